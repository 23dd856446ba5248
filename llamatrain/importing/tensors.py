"""Plans and converts the tensors of a checkpoint of transformers: names, order of rows, and how numbers are stored.

The declaration of an architecture says which module of transformers a weight comes from, and in what order its rows and
columns are there. Arrays keep the bytes of the checkpoint until they are encoded, piece by piece.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llamatrain.errors import FileError
from llamatrain.gguf.opened_file import FileTensor, Gguf, Metadata
from llamatrain.gguf.parser import quote
from llamatrain.gguf.quants import encode_chunks
from llamatrain.gguf.types import GgmlType, TensorInfo, type_by_name
from llamatrain.gguf.values import Value
from llamatrain.importing.checkpoint import Checkpoint
from llamatrain.importing.families import Family
from llamatrain.importing.mxfp4 import find_mxfp4, repack_mxfp4
from llamatrain.importing.sources import F32, Piece, Sources, shorten_name
from llamatrain.model.architecture import Architecture, WeightKind, split_block_number
from llamatrain.model.architectures import load_architecture
from llamatrain.model.hyperparameters import Hyperparameters, read_unchecked_hyperparameters
from llamatrain.model.limits import BadHyperparameter

F16 = type_by_name("F16")
# the modules of single experts by what their stack is called
EXPERT_MODULES = {
    "ffn_gate_exps": ("gate_proj", "w1", "gate"),
    "ffn_up_exps": ("up_proj", "w3", "up"),
    "ffn_down_exps": ("down_proj", "w2", "down"),
}
PADDED = ("embedding", "table")  # roles of weights with a row for each token
Kind = WeightKind[Hyperparameters]


@dataclass(frozen=True)
class ImportedTensor:
    """A tensor of the new file."""

    info: TensorInfo
    load: Callable[[], Iterable[Piece]]

    def chunks(self, threads: int) -> Iterator[np.ndarray]:
        """Yield the bytes of the tensor."""
        for piece in self.load():
            if piece.type is self.info.type:
                yield np.ascontiguousarray(piece.values).reshape(-1).view(np.uint8)
            else:
                for values in split_rows(piece):
                    yield from encode_chunks(
                        values.to_float32(), self.info.type, threads=threads, name=self.info.name
                    )


def split_rows(piece: Piece, most: int = 1 << 24) -> Iterator[Piece]:
    """Yield parts of a piece that are small enough to be held as float32, too."""
    values = piece.values.reshape(-1, piece.values.shape[-1])
    step = max(1, most // max(1, values.shape[-1]))
    for start in range(0, len(values), step):
        yield Piece(piece.type, values[start : start + step])


# ---- names --------------------------------------------------------------------------


def locate(name: str, kind: Kind, sources: Sources, joined: Mapping[str, str]) -> list[str]:
    """Return the tensors that a weight is made from: one, those of all experts, or none."""
    pattern, number = split_block_number(name)
    module = shorten_name(kind.module.format(number))
    ends = (".bias", "") if name.endswith(".bias") else (".weight", "")
    for end in ends:
        if module + end in sources:
            return [module + end]
    base = pattern.removeprefix("blk.{}.").removesuffix(".weight")
    if base in EXPERT_MODULES:
        stack = module.rpartition(".")[0]
        if stacked := find_mxfp4(module, sources):
            return stacked
        named = (sources.numbered(f"{stack}.{{}}.{single}.weight") for single in EXPERT_MODULES[base])
        return next(filter(None, named), [])
    if base in joined and number is not None:
        whole = joined[base].format(number)
        return [whole] if whole in sources else []
    return sources.numbered(f"{module}.{{}}.weight")


# ---- the plan -----------------------------------------------------------------------


def plan_tensors(
    checkpoint: Checkpoint, family: Family, metadata: Mapping[str, Value], target: GgmlType
) -> tuple[list[ImportedTensor], Hyperparameters]:
    """Return the tensors of the new file in their order, and the model that they make."""
    sources = Sources(checkpoint, family)
    architecture = load_architecture(family.architecture)
    layers = checkpoint.config.layers
    if layers > len(checkpoint.tensors):
        raise checkpoint.config.error(
            "num_hidden_layers", f"at most the number of tensors, {len(checkpoint.tensors)}", layers
        )
    found = {
        name: (kind, places)
        for name, kind in every_weight(architecture, layers)
        if not name.endswith(family.unused or ("\0",))
        and (places := locate(name, kind, sources, family.joined))
    }
    if family.drops_tied_output and checkpoint.config.values.get("tie_word_embeddings") is True:
        found.pop(architecture.weight_with_role("output"), None)
    h = read_model(
        checkpoint, family, metadata, sources, {name: places for name, (_, places) in found.items()}
    )
    for name in h.shapes:
        if name not in found:
            module = h.weight_kind(name).module.format(split_block_number(name)[1])
            raise FileError(
                f"{checkpoint.folder}: the weight {module} is missing ({name} in GGUF)", code="missing-tensor"
            )
    tensors: list[ImportedTensor] = []
    dropped = [name for name in found if h.tied and name == architecture.weight_with_role("output")]
    for name, (kind, places) in found.items():
        if name in dropped:
            for place in places:
                sources.use(place)
            continue
        shape = h.shapes.get(name) or kind.shape(h.for_weight(name))
        tensors.append(plan_tensor(name, shape, kind, places, sources, family, checkpoint, h, target))
    tensors += [
        ImportedTensor(TensorInfo(name, F32, values.shape), partial(whole_piece, values))
        for name, values in family.tensors(checkpoint.config).items()
    ]
    for names in family.number_lists.values():
        for name in sources.numbered(names):
            sources.use(name)
    refuse_unused(sources, layers, h.tied)
    return tensors, h


def whole_piece(values: np.ndarray) -> list[Piece]:
    """Return an array as the only piece of a tensor."""
    return [Piece(F32, values)]


def every_weight(architecture: Architecture[Any, Any], layers: int) -> Iterator[tuple[str, Kind]]:
    """Yield all weights that a model may have, also those that only some blocks or files have."""
    optional = frozenset(name for name, kind in architecture.weights.items() if kind.optional)
    yield from architecture.weight_kinds(layers, architecture.tied is True, optional)
    for pattern, kind in architecture.weights.items():
        if kind.replaced_by:  # left out above, because the other weight is optional
            yield from ((pattern.format(layer), kind) for layer in range(layers))


def read_model(
    checkpoint: Checkpoint,
    family: Family,
    metadata: Mapping[str, Value],
    sources: Sources,
    places: Mapping[str, list[str]],
) -> Hyperparameters:
    """Return the hyperparameters that the new file will have."""
    embeddings = load_architecture(family.architecture).weight_with_role("embedding")
    if embeddings not in places:
        raise FileError(f"{checkpoint.folder}: the embeddings of tokens are missing", code="missing-tensor")
    shape = sources.shape(places[embeddings][0])
    if len(shape) == 2 and family.pads_vocabulary:
        tokens = checkpoint.config.count("vocab_size")
        if tokens > 2 * shape[0]:
            raise checkpoint.config.error("vocab_size", f"near the {shape[0]} rows of the embeddings", tokens)
        shape = max(shape[0], tokens), shape[1]
    if len(shape) == 2 and family.cuts_vocabulary and checkpoint.config.has("vocab_size"):
        shape = min(shape[0], checkpoint.config.count("vocab_size")), shape[1]
    nothing = np.empty(0, np.uint8)
    tensors = {
        name: FileTensor(name, F32, shape if name == embeddings else (1,), 0, nothing) for name in places
    }
    path = checkpoint.config.path
    try:
        h = read_unchecked_hyperparameters(
            Gguf(path, Metadata(dict(metadata)), tensors), load_architecture(family.architecture)
        )
        h.for_block(0)
    except BadHyperparameter as error:
        raise FileError(f"{path}: {error.describe(error.field)}", code=error.code) from None
    return h


def refuse_unused(sources: Sources, layers: int, tied: bool) -> None:
    """Raise if tensors are left that belong to the model as far as it is known."""
    for name in sources.unused():
        number = split_block_number(name)[1]
        if number is not None and int(number) >= layers:
            continue  # blocks that predict several tokens at once
        if tied and shorten_name(name) == "lm_head.weight":
            continue  # a copy of the embeddings
        raise FileError(
            f"{sources.path}: {quote(name)} is no known weight of this architecture; such a checkpoint "
            "cannot be imported",
            code="unknown-tensor",
        )


def choose_type(name: str, kind: Kind, shape: Sequence[int], target: GgmlType) -> GgmlType:
    """Return the type of a tensor: what is small, or read in float32 alone, keeps all bits."""
    is_small = len(shape) == 1 or name.endswith("_norm.weight") or not name.endswith(".weight")
    if (
        is_small
        or kind.role in ("router", "taps")
        or name.endswith(("_coef.weight", "gate_inp_shexp.weight"))
    ):
        return F32
    return target if shape[-1] % target.block_size == 0 else F16


def plan_tensor(
    name: str,
    shape: tuple[int, ...],
    kind: Kind,
    places: list[str],
    sources: Sources,
    family: Family,
    checkpoint: Checkpoint,
    h: Hyperparameters,
    target: GgmlType,
) -> ImportedTensor:
    """Return how one tensor is made."""
    if places[0].endswith("_blocks"):
        type_, load = repack_mxfp4(name, shape, kind.part, places, sources)
        return ImportedTensor(TensorInfo(name, type_, shape), load)
    for place in places:
        sources.read(place)  # checks its type
    if len(places) == 1 and sources.shape(places[0]) == (1, *shape):
        shape = (1, *shape)  # as llama.cpp's converter writes a vector with two axes
    base, number = split_block_number(name)
    joined = family.joined.get(base.removeprefix("blk.{}.").removesuffix(".weight"), "")
    is_joined = joined.format(number) == places[0]
    convert = Conversion(name, shape, kind, family, checkpoint, h, is_joined)
    convert.check([sources.shape(place) for place in places], [sources.long_name(place) for place in places])
    info = TensorInfo(name, choose_type(name, kind, shape, target), shape)
    return ImportedTensor(info, lambda: convert.pieces([sources.read(place) for place in places]))


# ---- conversions --------------------------------------------------------------------


@dataclass(frozen=True)
class Conversion:
    """A conversion of the arrays of a checkpoint into a tensor of the file."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    family: Family
    checkpoint: Checkpoint
    h: Hyperparameters
    is_joined: bool  # it is made of some rows of a tensor that other weights have rows of, too

    @property
    def path(self) -> Path:
        """The folder, for errors."""
        return self.checkpoint.folder

    @property
    def _short_name(self) -> str:
        """The name without the block and the end."""
        return split_block_number(self.name)[0].removeprefix("blk.{}.").rpartition(".")[0]

    @property
    def rows(self) -> np.ndarray | None:
        """The places of the rows in the array of the checkpoint, if they have another order or are some of them."""
        base, h = self._short_name, self.h.for_weight(self.name)
        if self.is_joined:
            return self.family.joined_rows(h, base)
        return self.kind.row_order(h) if self.kind.row_order else None

    def check(self, shapes: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        """Raise if the arrays of the checkpoint have other sizes than the tensor needs."""
        if len(shapes) > 1:
            fits = len(shapes) == self.shape[0] and all(
                prod(each) * len(shapes) == prod(self.shape) for each in shapes
            )
        elif self.family.transposes_experts and "_exps." in self.name:
            size = prod(self.shape) * self.kind.part[1]
            fits = len(shapes[0]) == len(self.shape) and prod(shapes[0]) == size
        elif (rows := self.rows) is not None and self.kind.role != "bias" and self.kind.role != "taps":
            fits = len(shapes[0]) == 2 and int(rows.max()) < shapes[0][0] and shapes[0][1] == self.columns
        elif self.pads:
            fits = len(shapes[0]) == 2 and shapes[0][0] <= self.shape[0] and shapes[0][1] == self.shape[1]
        elif self.cuts:
            fits = len(shapes[0]) == 2 and shapes[0][0] >= self.shape[0] and shapes[0][1] == self.shape[1]
        else:
            fits = prod(shapes[0]) == prod(self.shape) * self.kind.part[1] and 0 not in shapes[0]
        if not fits:
            found = f"{len(shapes)} times {list(shapes[0])}" if len(shapes) > 1 else f"{list(shapes[0])}"
            raise FileError(
                f"{self.path}: {quote(names[0])} has the shape {found}, which does not fit {list(self.shape)} of "
                f"{self.name}; config.json belongs to another model",
                code="wrong-tensor-shape",
            )

    @property
    def columns(self) -> int:
        """The columns of the array in the checkpoint."""
        return self.shape[1] if self.name.endswith("attn_k_b.weight") else self.shape[-1]

    @property
    def pads(self) -> bool:
        """True if rows of zeros are added for tokens that the checkpoint does not have."""
        return self.family.pads_vocabulary and self.kind.role in PADDED

    @property
    def cuts(self) -> bool:
        """True if rows are left out behind those of the tokens."""
        return self.family.cuts_vocabulary and self.kind.role == "embedding"

    def pieces(self, arrays: list[Piece]) -> Iterator[Piece]:
        """Yield the tensor in pieces."""
        if len(arrays) > 1:  # matrices of experts, or norms of heads
            for array in arrays:
                yield self._finish(Piece(array.type, array.values.reshape(1, *self.shape[1:])))
            return
        piece = arrays[0]
        values = self._reorder(piece.values)
        yield self._finish(Piece(piece.type, values))
        if self.pads and len(values) < self.shape[0]:
            yield Piece(piece.type, np.zeros((self.shape[0] - len(values), self.shape[1]), values.dtype))

    def _reorder(self, values: np.ndarray) -> np.ndarray:
        """Return the rows and columns in the order of the file."""
        kind, h = self.kind, self.h.for_weight(self.name)
        part, count = kind.part
        is_vector = "bias" in self.name
        if self.family.transposes_experts and "_exps." in self.name:
            values = values if is_vector else values.swapaxes(-1, -2)
            if (rows := self.rows) is not None:
                values = values.take(rows, -1 if is_vector else -2)
        elif (rows := self.rows) is not None:
            values = values[rows]
        elif count > 1:
            size = values.shape[-1 if is_vector else -2] // count
            chosen = slice(part * size, part * size + size)
            values = values[..., chosen] if is_vector else values[..., chosen, :]
        if kind.column_order:
            values = values[:, kind.column_order(h)]
        if kind.rotary_heads and self.h.architecture.rotation == "pairs" and self.family.permutes:
            heads = kind.rotary_heads(h)
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2)
        if self.name.endswith("attn_k_b.weight"):
            return values.reshape(self.shape[0], self.shape[2], self.shape[1]).swapaxes(1, 2)
        if self.cuts:
            values = values[: self.shape[0]]
        return values if self.pads else values.reshape(self.shape)

    def _finish(self, piece: Piece) -> Piece:
        """Return the numbers as the file has them."""
        short = self.name.rpartition(".")[0].rpartition(".")[2] + "." + self.name.rpartition(".")[2]
        factors = self.family.multipliers(self.checkpoint.config).get(short, ())
        less_one = self.family.norms_less_one and self.kind.role == "norm" and "ssm_" not in self.name
        if not (factors or less_one or self.kind.trained_as_log):
            return piece
        values = piece.to_float32().reshape(piece.values.shape)
        if self.kind.trained_as_log:
            values = -np.exp(values.astype(np.float64)).astype(np.float32)
        if less_one:
            values = values + np.float32(1)
        for factor in factors:
            values = values * np.asarray(factor, np.float32)
        return Piece(F32, values)
