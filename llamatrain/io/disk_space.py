"""Compares the size of a new file with the free space of its disk."""

import os
import shutil
from pathlib import Path

from llamatrain.config.units import Size
from llamatrain.errors import FileError


def check_disk_space(out: Path, needed: int) -> None:
    """Raise if the disk has less free space than the file needs."""
    free = shutil.disk_usage(Path(os.path.realpath(out)).parent).free  # of a link's target
    if needed > free:
        raise FileError(
            f"{out} needs {Size(needed).text}, but only {Size(free).text} are free there", code="disk-full"
        )
