"""What the user said, as apart from defaults: on the command line, or in the file of `--config`."""

from typing import Any

import click
from click.core import ParameterSource

from llamatrain.config.file import DATA, read_config
from llamatrain.train.demo import SINE
from llamatrain.train.options import PlaceOptions

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
        values = {**values, **{name: value for name, value in SINE.items() if name not in given}}
    return data, values, given
