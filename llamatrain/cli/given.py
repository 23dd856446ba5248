"""What the user said, as apart from defaults: on the command line, or in the file of `--config`."""

from typing import Any

from llamatrain.config.file import DATA, read_config
from llamatrain.config.options import Checked
from llamatrain.train.options import PlaceOptions


def given_options(
    data: tuple[str, ...], said: dict[str, Any], place: PlaceOptions, *classes: type[Checked]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Data and options, the config file's under the command line's."""
    config = read_config(place.config, *classes) if place.config else {}
    files = config.pop(DATA, ())
    return data or files, {**config, **said}
