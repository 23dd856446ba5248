"""Options as keywords of Python functions, and errors that name them as keywords."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from llamatrain.compiler.cache import code_cache
from llamatrain.config.flag_hints import suggest_option
from llamatrain.config.messages import shorten, shorten_line, suggest
from llamatrain.config.options import (
    OptionError,
    Options,
    OptionSpec,
    option_specs,
    replace_flags,
    with_present_names,
)
from llamatrain.distributed.comm import is_printing_rank
from llamatrain.errors import FileError, LlamatrainError, UsageError, words_of
from llamatrain.platform.escape import make_printable
from llamatrain.platform.terminal import show_log
from llamatrain.run.in_memory_rows import check_path


def path_of(place: Any) -> Path:
    """Return a path, after checking that it is one."""
    return Path(check_path(place))


def check_options(options: Mapping[str, Any], *classes: type[Options]) -> dict[str, Any]:
    """Return the options that are not None, each checked and in its declared type."""
    known = {name: spec for cls in classes for name, spec in option_specs(cls).items()}
    options = with_present_names(options, *classes)
    if "temperature" in options and "temp" in known:
        if "temp" in options:
            raise UsageError(
                "temp and temperature are the same option; leave one of them out", code="conflicting-options"
            )
        options = {"temp" if name == "temperature" else name: value for name, value in options.items()}
    for name in options:
        if name not in known:
            raise UsageError(
                f"no such option {shorten(name)}{suggest_option(f'--{name}') or suggest(name, known)}",
                code="unknown-option",
            )
    return {
        name: known[name].check(to_plain(value, known[name]))
        for name, value in options.items()
        if value is not None
    }


def to_plain(value: Any, option: OptionSpec) -> Any:
    """Convert NumPy numbers, paths, and single values of options that can be repeated."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if option.kind is str and isinstance(value, list | tuple):  # such as files to validate with
        value = [os.fspath(item) if isinstance(item, os.PathLike) else item for item in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value) if option.kind is str else Path(value)
    single = int | float if option.kind in (int, float) else str | Path
    return [value] if option.repeated and isinstance(value, single) else value


@contextmanager
def translate_errors(show: bool = False) -> Iterator[None]:
    """Turn errors that a user may meet into `LlamatrainError`, with options named as keywords."""
    try:
        with show_log() if show and is_printing_rank() else nullcontext():
            yield
            code_cache.report()
    except LlamatrainError as error:
        error.args = (
            shorten_line(
                in_keywords(error.format(keyword) if isinstance(error, OptionError) else str(error))
            ),
        )
        raise
    except OSError as error:
        raise FileError(shorten_line(in_keywords(words_of(error))), code="system-error") from error
    except MemoryError as error:
        raise LlamatrainError(in_keywords(words_of(error)), code="out-of-memory") from error


def keyword(name: str) -> str:
    """Return an option as a keyword argument."""
    return f"{name.removeprefix('no_')}=False" if name.startswith("no_") else name


def in_keywords(message: str) -> str:
    """Return a message with keywords in place of flags, and without control characters."""
    return make_printable(replace_flags(message, keyword), "utf-8")


def in_keywords_all(notes: Sequence[str]) -> tuple[str, ...]:
    """Return notes with keywords in place of flags."""
    return tuple(map(in_keywords, notes))
