"""Files that are read whole: with a limit, since what a path leads to may have no end, or never begin."""

import stat
from pathlib import Path

from llamatrain.config.not_found import missing
from llamatrain.errors import FileError

OPEN = ("/dev/fd", "/proc/self/fd")  # where a shell hands over what it has opened, as for <(a command)


def contents(path: Path, most: int, needed: str) -> bytes:
    """The bytes of a file, or of a pipe that is open already: a pipe with a name might wait for ever for its writer."""
    opened = str(path) == "/dev/stdin" or str(path.parent) in OPEN
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or (opened and stat.S_ISFIFO(mode))):
            raise FileError(
                f"{path}: this is a {'folder' if stat.S_ISDIR(mode) else 'device or pipe'}; {needed} is needed"
            )
        with path.open("rb") as file:
            return limited(file.read(most + 1), most, str(path), needed)
    except FileNotFoundError:
        raise missing(path) from None
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None


def limited(raw: bytes, most: int, name: str, needed: str) -> bytes:
    """What was read, of which one byte too much was asked for."""
    if len(raw) > most:
        raise FileError(f"{name}: more than {most:,} bytes, which is too much for {needed}")
    return raw
