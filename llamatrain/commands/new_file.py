"""Options and checks of commands that write one file."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llamatrain.config.options import Option
from llamatrain.errors import FileError, MissingError, UsageError
from llamatrain.gguf.type_names import MatrixType

if TYPE_CHECKING:
    from llamatrain.gguf.rewrite import NewTensor
    from llamatrain.gguf.types import GgmlType
    from llamatrain.model.hyperparameters import Hyperparameters

OUT = Option("File to write.", short="o")
OVERWRITE = Option("Replace the file --out.")


# ---- its name and its size -------------------------------------------------


def check_output(out: Path, inputs: Iterable[Path], *, overwrite: bool) -> None:
    """Raise if the output file cannot be written, or would replace an input."""
    from llamatrain.checkpoints.filenames import is_same_file
    from llamatrain.run.input_watch import files_of_input

    if Path(os.path.realpath(out)).is_symlink():
        raise FileError(f"{out}: this is a link to itself", code="unwritable-file")
    if not os.path.lexists(out.parent):
        raise MissingError(f"{out}: its folder does not exist", code="missing-folder")
    if not out.exists():
        return
    if not out.is_file():
        raise FileError(f"{out}: this is a folder or a device, not a file", code="unwritable-file")
    for path in inputs:
        if any(is_same_file(out, file) for file in files_of_input(path)):
            raise UsageError(
                f"--out {out} would replace the input {path}; choose another name", code="replaces-input"
            )
    if not overwrite:
        raise FileError(f"{out} exists already; add --overwrite to replace it", code="output-exists")


def total_bytes(tensors: "Iterable[NewTensor]") -> int:
    """Return the size of all tensors."""
    return sum(tensor.info.nbytes for tensor in tensors)


# ---- types of its tensors --------------------------------------------------


def find_type(name: MatrixType) -> "GgmlType | None":
    """Return the type that matrices get, or None if each keeps its own."""
    from llamatrain.gguf.types import type_by_name

    return None if name == "keep" else type_by_name(name.upper())


def describe_kept_types(
    tensors: "Sequence[NewTensor]", h: "Hyperparameters", target: "GgmlType | None"
) -> str | None:
    """Return a note about matrices that cannot have the new type, or None."""
    from llamatrain.model.lora_targets import group_weights

    stacks = group_weights("experts", h)
    others = [
        tensor.base
        for tensor in tensors
        if target
        and tensor.type is not target
        and (len(tensor.base.shape) == 2 or tensor.base.name in stacks)
        and tensor.base.shape[-1] % target.block_size
    ]
    if not (others and target):
        return None
    more = f" and {len(others) - 1} more keep their" if len(others) > 1 else " keeps its"
    return (
        f"{others[0].name}{more} type: rows of {others[0].shape[-1]} are not a multiple of the block "
        f"size {target.block_size}"
    )
