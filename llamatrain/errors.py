"""Errors that a user may meet. Any other exception is a bug in the program."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class LlamatrainError(Exception):
    """A failure that the user can act on. The command line prints it as one line and exits with code 1.

    `code` is a short name of the problem, such as "truncated-file". It stays the same when the message is
    reworded; the command line prints it behind the message, and tests compare it.
    """

    exit_code = 1
    shared = False  # True if every process of the run met the same error

    def __init__(self, message: str = "", *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class UsageError(LlamatrainError):
    """An option or argument is invalid. The exit code is 2."""

    exit_code = 2


class GraphError(LlamatrainError):
    """A graph is invalid: a shape, a dtype, or a missing gradient."""


class MemoryPlanError(LlamatrainError):
    """A plan does not fit the memory limit."""


class DeviceError(LlamatrainError):
    """A device is missing, out of memory, or reports an error."""


class FileError(LlamatrainError):
    """A file cannot be read or written. The message names the file and the position."""


class DataError(LlamatrainError):
    """Training data cannot be used. The message names the file and, if there is one, the line."""


class MissingError(FileError, DataError, UsageError):
    """A path does not exist. The exit code is 2, because the user gave the path."""


def words_of(error: Exception) -> str:
    """Return the message of an error, also of Python's own errors that a user may meet."""
    if isinstance(error, MemoryError):
        return f"not enough memory{f' ({error})' if str(error) else ''}; a smaller model, --ctx or --batch takes less"
    if isinstance(error, ImportError):  # late: what is missing, or what the system has no memory to load
        return (
            f"a part of the program cannot be loaded: {' '.join(str(error).split()) or type(error).__name__}"
        )
    if isinstance(error, OSError) and error.strerror:
        return (
            error.strerror if error.filename is None else f"{os.fsdecode(error.filename)}: {error.strerror}"
        )
    return str(error)


def describe(error: Exception) -> str:
    """Return the message of an error with its code, as the command line prints it."""
    code = getattr(error, "code", "")
    return f"{words_of(error)} [{code}]" if code else words_of(error)


@contextmanager
def wrap_os_errors(path: Path, problem: str) -> Iterator[None]:
    """Turn an OSError inside the context into a FileError that names the path and the problem."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: {problem}: {error.strerror}", code="folder-error") from error
