"""The errors that a user may meet; whatever else comes up is a fault of the program."""

import os


class LlamatrainError(Exception):
    """Something that failed for a reason the user can act on: one line, exit code 1."""

    exit_code = 1
    shared = False  # whether all processes of a run have met it


class UsageError(LlamatrainError):
    """An option or argument that cannot be meant: exit code 2."""

    exit_code = 2


class GraphError(LlamatrainError):
    """A graph that cannot be: shapes, dtypes, or a gradient that is not there."""


class MemoryPlanError(LlamatrainError):
    """A plan that does not fit the memory it was given."""


class FileError(LlamatrainError):
    """A file that cannot be read or written: its name, the place in it, and what was found there."""


class DataError(LlamatrainError):
    """Training data that cannot be used: names the file and, where there is one, the line."""


class MissingError(FileError, DataError, UsageError):
    """A path that leads nowhere: it was not meant so, and exit code 2 says that."""


def words_of(error: Exception) -> str:
    """Also of the errors of Python's own that a user may meet."""
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
