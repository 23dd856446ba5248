"""What the user said, as apart from defaults: on the command line, or in the file of `--config`."""

from dataclasses import fields
from typing import Any

import click
from click.core import ParameterSource

from llamatrain.config.file import DATA, read_config
from llamatrain.config.options import flag_of
from llamatrain.data.options import DataOptions
from llamatrain.errors import UsageError
from llamatrain.recipe.demo import SINE
from llamatrain.recipe.options import PlaceOptions

SAID = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


def given_options(
    context: click.Context, data: tuple[str, ...], values: dict[str, Any], place: PlaceOptions, *classes: type
) -> tuple[tuple[str, ...], dict[str, Any], set[str]]:
    """Data and options with the config file's under the command line's, and the names of those that were said at all."""
    given = {name for name in values if context.get_parameter_source(name) in SAID}
    config = read_config(place.config, *classes) if place.config else {}
    data = data or config.pop(DATA, ())
    values = {**values, **{name: value for name, value in config.items() if name not in given}}
    given |= config.keys()
    if context.info_name == "from-scratch" and not (data or place.resume or place.checkpoint_in):
        for name in (field.name for field in fields(DataOptions)):
            if name in given:
                raise UsageError(f"{flag_of(name)} means nothing to the built-in sine wave; name the data, or leave it out")
        sized = ("embd", "head", "layer") if "size" in given else ()
        values = {**values, **{name: value for name, value in SINE.items() if name not in given and name not in sized}}
    return data, values, given
