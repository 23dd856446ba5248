"""What the user said, as apart from defaults: on the command line, or in the file of `--config`."""

from typing import Any

from llamatrain.config.file import read_config
from llamatrain.config.options import Checked
from llamatrain.recipe.options import PlaceOptions


def given_options(said: dict[str, Any], place: PlaceOptions, *classes: type[Checked]) -> dict[str, Any]:
    """What the config file says under what the command line does."""
    return {**(read_config(place.config, *classes) if place.config else {}), **said}
