"""A checkpoint: one GGUF file with all that resuming a run to the same bits needs.

Keys and tensors have the names of llama.cpp's train-text-from-scratch and finetune, where those had such a
thing:

    training.checksum     CRC-32 of the whole file, with its own four bytes as zeros
    training.type         the kind of run
    general.*, llama.*, tokenizer.*   the model's own keys, as in its file
    training.*            counters, options, position in the data, stop rules
    optimizer.*           its kind, the order of the parameters in its flat vectors, further numbers
    tensors               the weights, then the vectors

Numbers that must be restored exactly are float64. Where llama.cpp had a float32, that is written too, for
other readers.
"""

import json
import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from llamatrain.gguf.constants import ALIGNMENT
from llamatrain.gguf.quants import encode_chunks
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.rewrite import state_types
from llamatrain.gguf.types import GgmlType, TensorInfo, type_by_name
from llamatrain.gguf.values import Kind, Value, boolean, f32, number, numbers, string, strings, u32, u64
from llamatrain.gguf.writer import create_gguf, encode_head
from llamatrain.io.madvise import release_pages
from llamatrain.io.mapped_file import MappedFile, mapped_files
from llamatrain.train.state import BestValidation, RunState

VERSION = 2  # training.file_version; 0 and 1 are llama.cpp's
CHECKSUM = "training.checksum"
ROLLOUTS = "training.rollouts"  # generated answers that several steps train, as JSON
# keys and tensors of the run; others belong to the model or the adapter
RUN_PREFIXES = ("training.", "optimizer.")
GRADIENTS = "training.accumulated_gradients"
# keys of training.extra
VALIDATION_DUE = "owed_validation"
STOP_REASON = "ended"
BEST = "best_validation"
KERNELS = "kernels"  # key of training.extra: the class of processors
PIECE = 1 << 20  # bytes of a file read at a time
MAX_U32 = 2**32 - 1  # llama.cpp has this count in 32 bits, and the one above in 64

FLOAT32 = type_by_name("F32")
TYPES = {np.dtype(np.float32): FLOAT32, np.dtype(np.float64): type_by_name("F64")}
KINDS = {bool: Kind.BOOL, int: Kind.INT64, np.uint32: Kind.UINT32, np.int32: Kind.INT32}  # otherwise float64


@dataclass(kw_only=True)
class Checkpoint:
    """The content of a checkpoint file."""

    kind: str  # "train_model" or "finetune_lora"
    metadata: dict[str, Value]
    weights: dict[str, np.ndarray]  # float32, by GGUF name
    options: dict[str, Any]  # all, as resolved; JSON
    state: RunState  # without a position in the data, which starts over with the run's seed
    optimizer: str  # its name in checkpoints
    order: list[str]  # the trained parameters, in the order of flat vectors
    # by full name: (n,), (m, n), or (m,) in float64; arrays, or StreamedVectors; GRADIENTS only with a
    # partial step
    vectors: dict[str, Any]
    numbers: dict[str, float | int | bool] = field(default_factory=dict)  # by full key: optimizer.<kind>.*
    extra: dict[str, Any] = field(default_factory=dict)  # JSON: other facts about what is trained
    notes: list[str] = field(default_factory=list)  # warnings for whoever resumes; not written

    @property
    def files(self) -> list[MappedFile]:
        """The mapped files that the arrays are views of."""
        return mapped_files((*self.weights.values(), *self.vectors.values()))

    @property
    def optimizer_values(self) -> dict[str, Any]:
        """The vectors and numbers of the optimizer, by the optimizer's own names."""
        prefix = f"optimizer.{self.optimizer}."
        both = {**self.vectors, **self.numbers}
        return {name.removeprefix(prefix): value for name, value in both.items() if name.startswith(prefix)}

    def optimizer_values_for(self, order: list[str]) -> dict[str, Any]:
        """Return the optimizer's values with flat vectors in this order of parameters."""
        values = self.optimizer_values
        if order == self.order:
            return values
        sizes = [self.weights[name].size for name in self.order]
        offsets = dict(zip(self.order, np.cumsum([0, *sizes[:-1]]), strict=True))
        for name, value in values.items():
            if isinstance(value, np.ndarray) and value.shape[-1] == sum(sizes):
                values[name] = np.concatenate(
                    [
                        value[..., offsets[parameter] : offsets[parameter] + self.weights[parameter].size]
                        for parameter in order
                    ],
                    -1,
                )
        return values

    def split_vector(self, name: str, only: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Return views of a flat vector by parameter, each in its weight's shape.

        All parameters, or `only` these.
        """
        parameters = [parameter for parameter in self.order if only is None or parameter in only]
        sizes = [self.weights[parameter].size for parameter in parameters]
        pieces = np.split(self.vectors[name], np.cumsum(sizes)[:-1])
        return {
            key: piece.reshape(self.weights[key].shape) for key, piece in zip(parameters, pieces, strict=True)
        }


def write_checkpoint(
    path: str | Path, checkpoint: Checkpoint, check: Callable[[Path], object] | None = None
) -> None:
    """Write a checkpoint atomically, straight from the arrays.

    `check` is called with the path of the complete file before it is renamed.
    """
    arrays: dict[str, np.ndarray | StreamedVector] = {**checkpoint.weights, **checkpoint.vectors}
    with np.errstate(over="ignore"):  # a loss beyond float32 becomes infinite
        # llama.cpp's ring: iteration i at i modulo its length
        if past := checkpoint.state.stop.past_loss_values:
            ring = np.roll(np.array(past, np.float32), checkpoint.state.counters.step % len(past))
            arrays[f"optimizer.{checkpoint.optimizer}.past_loss_values"] = ring
        metadata = {CHECKSUM: u32(0), **_metadata(checkpoint)}
    infos = tensor_infos(arrays)
    checksum = CheckSum(encode_head(metadata, infos, ALIGNMENT))
    with create_gguf(path, metadata, infos, check) as out:
        for name, array in arrays.items():
            with closing(checksum.update([array] if isinstance(array, np.ndarray) else array)) as parts:
                out.write(name, parts)
        out.overwrite(SUM_START, checksum.crc.to_bytes(4, "little"))


class StreamedVector(Protocol):
    """A vector that is iterated in pieces; each iteration gives all of it once."""

    dtype: np.dtype
    shape: tuple[int, ...]

    def __iter__(self) -> Iterator[np.ndarray]: ...


def tensor_infos(arrays: Mapping[str, np.ndarray | StreamedVector]) -> list[TensorInfo]:
    """Return the tensor infos of arrays, in their order."""
    return [TensorInfo(name, TYPES[array.dtype], array.shape) for name, array in arrays.items()]


# ---- the checksum ----------------------------------------------------------


SUM_END = len(encode_head({CHECKSUM: u32(0)}, [], ALIGNMENT))  # the first value, so its offset is known
SUM_START = SUM_END - 4


class CheckSum:
    """The running checksum of a file while it is written: the header, then each tensor with its padding."""

    def __init__(self, start: bytes) -> None:
        self.crc = crc32(bytes(-len(start) % ALIGNMENT), crc32(start))

    def update(self, parts: Iterable[np.ndarray]) -> Generator[np.ndarray, None, None]:
        """Yield a tensor's parts unchanged, and add them to the checksum."""
        size = 0
        for part in map(np.ascontiguousarray, parts):
            self.crc, size = crc32(part.data, self.crc), size + part.nbytes
            yield part
        self.crc = crc32(bytes(-size % ALIGNMENT), self.crc)


def read_stored_checksum(path: Path) -> str:
    """Read the checksum that a checkpoint file states, in hexadecimal."""
    with path.open("rb") as file:
        file.seek(SUM_START)
        return file.read(4).hex()


def compute_checksum(file: np.ndarray) -> int:
    """Compute the checksum of a mapped checkpoint, and release its pages."""
    crc = crc32(bytes(4), crc32(file[:SUM_START].data))
    for start in range(SUM_END, file.size, PIECE):
        part = file[start : start + PIECE]
        crc = crc32(part.data, crc)
        release_pages(part)
    return crc


# ---- the values ------------------------------------------------------------


def _metadata(checkpoint: Checkpoint) -> dict[str, Value]:
    # the alignment belongs to the file, not to the model
    model = {
        key: value
        for key, value in checkpoint.metadata.items()
        if not key.startswith((*RUN_PREFIXES, "general.alignment"))
    }
    return {
        "training.type": string(checkpoint.kind),
        **model,
        **dict(_training(checkpoint)),
        **dict(_optimizer(checkpoint)),
    }


def _training(checkpoint: Checkpoint) -> Iterator[tuple[str, Value]]:
    state = checkpoint.state
    counters, data, stop = state.counters, state.data, state.stop
    yield "training.file_version", u32(VERSION)
    yield "training.iteration_count", u64(counters.step)
    yield "training.sample_count", u64(counters.samples)
    yield "training.token_count", u64(counters.tokens)
    yield "training.epoch_count", u64(counters.epoch)
    yield "training.seconds", _exactly(counters.seconds)
    if data:
        yield "training.shuffle.seed", number(Kind.INT64 if data.seed < 0 else Kind.UINT64, data.seed)
        yield "training.shuffle.epoch", u64(data.epoch)
        yield "training.shuffle.next_sample", u64(data.position)
        yield "training.shuffle.next_row", u64(data.row)
        yield "training.shuffle.fingerprint", string(data.fingerprint)
        if data.end:
            yield "training.shuffle.end_epoch", u64(data.end)
    yield "training.best_loss", _exactly(stop.best_loss)
    yield "training.previous_loss", _exactly(stop.previous_loss)
    yield "training.no_improvement_count", u64(min(stop.no_improvement_count, 2**64 - 1))
    yield "training.past_loss_values", numbers(Kind.FLOAT64, stop.past_loss_values)
    if interrupted := state.partial:
        more = {"rewards": interrupted.rewards} if interrupted.rewards else {}
        partial = {
            "count": len(interrupted.losses),
            "losses": interrupted.losses,
            "extra": {"seconds": interrupted.seconds, **more},
        }
        yield "training.partial", string(json.dumps(partial))
    if state.rollouts:
        yield ROLLOUTS, string(json.dumps([answer and vars(answer) for answer in state.rollouts]))
    yield "training.options", string(json.dumps(checkpoint.options))
    yield (
        "training.extra",
        string(
            json.dumps(
                {
                    VALIDATION_DUE: state.validation_due,
                    STOP_REASON: state.stop_reason,
                    **_best_validation(state.best),
                    **checkpoint.extra,
                }
            )
        ),
    )


def _best_validation(best: BestValidation) -> dict[str, Any]:
    """Return the best validation as JSON; nothing before the first validation."""
    if best == BestValidation():
        return {}
    values = {"loss": best.loss if best.step is not None else None, "step": best.step, "idle": best.stale}
    if best.scheduled_loss != best.loss:
        values["due"] = best.scheduled_loss if math.isfinite(best.scheduled_loss) else None
    return {BEST: values}


def _optimizer(checkpoint: Checkpoint) -> Iterator[tuple[str, Value]]:
    stop = checkpoint.state.stop
    step = checkpoint.state.counters.step
    kind = f"optimizer.{checkpoint.optimizer}"
    yield "optimizer.file_version", u32(0)
    yield "optimizer.convergence_past_count", u32(len(stop.past_loss_values))
    yield "optimizer.parameter_count", u64(sum(checkpoint.weights[name].size for name in checkpoint.order))
    yield "optimizer.iteration_count", u32(min(step, MAX_U32))
    yield "optimizer.just_initialized", boolean(step == 0)
    yield "optimizer.type", string(checkpoint.optimizer)
    yield "optimizer.parameter_order", strings(checkpoint.order)
    yield f"{kind}.best_loss", f32(stop.best_loss)
    yield f"{kind}.previous_loss", f32(stop.previous_loss)
    yield f"{kind}.no_improvement_count", u32(min(stop.no_improvement_count, MAX_U32))
    for key, value in checkpoint.numbers.items():
        yield key, number(KINDS.get(type(value), Kind.FLOAT64), value)


def _exactly(value: float) -> Value:
    return number(Kind.FLOAT64, value)


# ---- the model of a run that trains every weight ---------------------------


def write_model(
    path: Path,
    metadata: Mapping[str, Value],
    weights: Mapping[str, np.ndarray],
    types: Mapping[str, GgmlType] | None = None,
    kind: GgmlType | None = None,
    threads: int = 1,
) -> None:
    """Write a model file that llama.cpp can load: in float32, or in these types, of which matrices got `kind`."""
    types = types or dict.fromkeys(weights, FLOAT32)
    infos = [TensorInfo(name, types[name], array.shape) for name, array in weights.items()]
    stated = state_types(metadata, types.values(), kind or FLOAT32)
    with create_gguf(path, stated, infos, open_gguf) as out:
        for name, array in weights.items():
            is_plain = types[name] is FLOAT32
            out.write(
                name, array if is_plain else encode_chunks(array, types[name], threads=threads, name=name)
            )
