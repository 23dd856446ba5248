"""The tensors of a checkpoint by short names, and which of them have been used."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamatrain.errors import FileError
from llamatrain.gguf.parser import quote
from llamatrain.gguf.quants import decode
from llamatrain.gguf.safetensors import StoredTensor
from llamatrain.gguf.types import GgmlType, type_by_name
from llamatrain.importing.checkpoint import Checkpoint
from llamatrain.importing.families import Family

F32 = type_by_name("F32")
STORED: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<u2"),
    "BF16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
}
PREFIXES = ("language_model.", "text_model.")
# parts of names of what sees and hears in models that do more than read
OTHER_SENSES = re.compile(
    r"visual\.|vision[._]|audio[._]|(^|\.)(projector|multi_modal_projector|embed_vision|embed_audio)\.|image_newline"
)
UNUSED_ENDS = (".rotary_emb.inv_freq", ".attention.masked_bias", ".attention.bias")


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor, or all of them, with numbers as they are in the checkpoint."""

    type: GgmlType
    values: np.ndarray

    def to_float32(self) -> np.ndarray:
        """Return the numbers."""
        if self.type is F32:
            return self.values
        return decode(np.ascontiguousarray(self.values).view(np.uint8), self.type)


def shorten_name(name: str, renames: Sequence[tuple[str, str]] = ()) -> str:
    """Return a name without prefixes that only say that a module is part of a larger one."""
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    for old, new in renames:
        name = name.replace(old, new)
    while name.startswith("model."):
        name = name.removeprefix("model.")
    return name


class Sources:
    """The tensors of a checkpoint by their short names, and which of them have been used."""

    def __init__(self, checkpoint: Checkpoint, family: Family) -> None:
        self.path, self._used = checkpoint.folder, set[str]()
        self._tensors: dict[str, StoredTensor] = {}
        self._names: dict[str, str] = {}
        for name, stored in checkpoint.tensors.items():
            if OTHER_SENSES.search(name) or name.endswith(UNUSED_ENDS) or name.startswith(family.ignored):
                continue
            short = shorten_name(name, family.renames)
            if short in self._tensors:
                raise FileError(
                    f"{self.path}: {quote(name)} and {quote(self._names[short])} are the same weight",
                    code="duplicate-tensor",
                )
            self._tensors[short], self._names[short] = stored, name

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._tensors[name].shape

    def long_name(self, name: str) -> str:
        """Return the name of a tensor in the checkpoint."""
        return self._names[name]

    def use(self, name: str) -> StoredTensor:
        """Return a tensor, which then counts as used."""
        self._used.add(name)
        return self._tensors[name]

    def read(self, name: str) -> Piece:
        """Return the numbers of a tensor."""
        stored = self.use(name)
        if stored.kind is None:
            raise FileError(
                f"{self.path}: {quote(self._names[name])} has the type {quote(stored.dtype)}; models in float32, "
                "float16 and bfloat16 can be imported, so use a checkpoint that is not quantized",
                code="unsupported-checkpoint",
            )
        return Piece(stored.kind, stored.raw.view(STORED[stored.dtype]).reshape(stored.shape))

    def unused(self) -> list[str]:
        """Return the names in the checkpoint of the tensors that were not used."""
        return [self._names[name] for name in self._tensors if name not in self._used]

    def numbered(self, pattern: str) -> list[str]:
        """Return the names with the numbers from 0 that a pattern gives, as far as they are there."""
        found: list[str] = []
        while (name := pattern.format(len(found))) in self:
            found.append(name)
        return found
