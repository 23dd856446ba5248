"""Errors for paths that do not exist, with the similar name that may have been meant."""

import os
import re
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from llamatrain.errors import MissingError

MAX_NEIGHBORS = 2000  # names beside it
ALIKE = 0.75
HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # as Hugging Face calls a model
HOSTED = re.compile(  # as llama.cpp and Ollama call a file there: of a repository the one of a type
    r"(?:(?:https?:/{1,2})?(?:www\.)?(?:hf\.co|huggingface\.co)/)?(?P<repository>[\w.-]+/[\w.-]+?)(?::(?P<type>[\w.-]+))?/?"
)
ASSIGNED = re.compile(r"([a-z][a-z_-]{1,30})=(\S+)")
SWITCH = re.compile(r"(?i)true|false|on|off|yes|no")
ADDRESS = re.compile(r"(?:.*/)?((?:https?|ftp|s3|gs|hf):)//?(.*)")  # a path has but one of its slashes
CONVERTER = "llama.cpp's convert_hf_to_gguf.py"


def missing_file(path: Path, problem: str = "No such file or directory") -> MissingError:
    """Return the error for a file that does not exist."""
    if address := ADDRESS.fullmatch(str(path)):
        return MissingError(
            f"{address[1]}//{address[2]}: addresses of this kind are not downloaded; write https://, or download "
            "the file and name it",
            code="url",
        )
    return MissingError(f"{path}: {problem}{suggest_path(path)}", code="no-such-file")


def suggest_path(path: Path) -> str:
    """Return a hint that names a similar file in the same folder."""
    with suppress(OSError, ValueError), os.scandir(path.parent) as beside:
        close = get_close_matches(
            path.name, sorted({each.name for each in islice(beside, MAX_NEIGHBORS)} - {path.name}), 1, ALIKE
        )
        return f"; did you mean {path.parent / close[0]}?" if close else ""
    return ""


def missing_model(path: Path) -> MissingError:
    """Return the error for a model that does not exist, with advice if it looks like a name on Hugging Face."""
    if (hosted := HOSTED.fullmatch(str(path))) and (
        hosted["type"] or "hf.co/" in str(path) or "huggingface.co/" in str(path)
    ):
        name = f"hf:{hosted['repository']}{':' + hosted['type'] if hosted['type'] else ''}"
        return MissingError(
            f"{path}: no such file; {name} downloads it from Hugging Face", code="no-such-file"
        )
    if HUB.fullmatch(str(path)) and path.suffix != ".gguf" and not path.parent.exists():
        return MissingError(
            f"{path}: no such file; hf:{path}-GGUF may name one on Hugging Face as a GGUF file, and hf:{path} "
            "one in safetensors, which is converted",
            code="no-such-file",
        )
    error = missing_file(path)
    is_bare_name = path.suffix != ".gguf" and path.name == str(path) and "; " not in str(error)
    return (
        MissingError(f"{error}; name a model by its GGUF file", code="no-such-file")
        if is_bare_name
        else error
    )


def missing_adapter(path: Path) -> MissingError:
    """Return the error for an adapter that does not exist, also if it is written FILE:SCALE."""
    name, _, scale = str(path).rpartition(":")
    if name and re.fullmatch(r"[-+]?[0-9.]+", scale) and Path(name).exists():
        return MissingError(
            f"{path}: No such file or directory; to scale an adapter use --lora-scaled {name} {scale}",
            code="no-such-file",
        )
    return missing_file(path)


def missing_data(name: str, problem: str = "no such file or folder") -> MissingError:
    """Return the error for data that does not exist, also if it looks like an option."""
    path = Path(name)
    if SWITCH.fullmatch(path.name):
        return MissingError(
            f"{name}: {problem}; a switch takes no value, turn it off like --no-shuffle", code="no-such-file"
        )
    if assignment := ASSIGNED.fullmatch(name if "/" not in name else path.name):
        return MissingError(
            f"{name}: {problem}; write an option as --{assignment[1].replace('_', '-')} {assignment[2]}",
            code="no-such-file",
        )
    if path.name[:1] in "\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}":
        return MissingError(
            f"{name}: {problem}; an option starts with two plain hyphens, --", code="no-such-file"
        )
    relative = os.path.relpath(name)
    if HUB.fullmatch(relative) and not path.parent.exists() and not path.suffix:
        return MissingError(
            f"{relative}: {problem}; hf:datasets/{relative}/FILE names a file of a dataset on Hugging Face",
            code="no-such-file",
        )
    if " -" in path.name:
        return MissingError(f"{name}: {problem}; a quote before it is closed too late", code="no-such-file")
    return missing_file(path, problem)
