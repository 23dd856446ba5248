"""A checkpoint: one GGUF file with all that a run needs to go on as if it had never stopped.

Keys and tensors are called as llama.cpp's train-text-from-scratch and finetune called them, where those had such a thing:

    training.checksum     CRC-32 of the whole file, its own four bytes taken as zeros
    training.type         the kind of run
    general.*, llama.*, tokenizer.*   the model's own keys, as its file has them
    training.*            counters, options, where the data and the stop rules stand
    optimizer.*           its kind, the order of the parameters in its flat vectors, further numbers
    tensors               the weights, then the vectors

Numbers that must come back to the bit are float64. Where the ancestors had a float32 it is written too, for other readers.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from llamatrain.data.rows import State
from llamatrain.errors import FileError
from llamatrain.files.constants import ALIGNMENT
from llamatrain.files.cursor import quoted
from llamatrain.files.pages import release
from llamatrain.files.reader import FileTensor, Gguf, open_gguf
from llamatrain.files.types import TensorInfo, by_name
from llamatrain.files.values import Kind, Value, boolean, f32, number, numbers, string, strings, u32, u64
from llamatrain.files.writer import head, new_gguf
from llamatrain.optim.stop import StopState
from llamatrain.store.ancestors import OWN, upgraded

KINDS_OF_RUNS = ("train_model", "finetune_lora")
VERSION = 2  # training.file_version; 0 and 1 are the ancestors'
CHECKSUM = "training.checksum"
GRADIENTS = "training.accumulated_gradients"
LONGEST_COUNT = 2**32 - 1  # the ancestors counted iterations in 32 bits here, and in 64 above

DERIVED = ("best_loss", "previous_loss", "no_improvement_count")  # from those of training.*
TYPES = {np.dtype(np.float32): by_name("F32"), np.dtype(np.float64): by_name("F64")}
KINDS = {"approx_hessian_count": Kind.UINT32, "line_search_end": Kind.INT32}  # the ancestors'


@dataclass
class Counters:
    """Of the whole run so far."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    epoch: int = 0
    seconds: float = 0.0


@dataclass
class Partial:
    """A step left half way: micro-batches that are in the accumulated gradients already, and the loss of each."""

    count: int
    losses: list[float]
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Checkpoint:
    kind: str  # "train_model" or "finetune_lora"
    metadata: dict[str, Value]
    weights: dict[str, np.ndarray]  # float32, by their GGUF names
    options: dict[str, Any]  # every one as resolved; JSON
    counters: Counters
    data: State | None  # None: the data begins anew, with the run's own seed
    optimizer: str  # "adam", "sgd" or "lbfgs"
    order: list[str]  # the parameters as they follow each other in flat vectors; other weights are not trained
    vectors: dict[str, np.ndarray]  # by full name: (n,), (m, n), or (m,) in float64
    numbers: dict[str, float | int | bool] = field(default_factory=dict)  # by full key: optimizer.<kind>.*
    stop: StopState = field(default_factory=StopState)
    partial: Partial | None = None  # there if and only if `vectors` has accumulated gradients
    extra: dict[str, Any] = field(default_factory=dict)  # JSON
    notes: list[str] = field(default_factory=list)  # what a reader should be told; not written

    def pieces(self, name: str) -> dict[str, np.ndarray]:
        """A flat vector cut into the parameters that it holds: views, each in its weight's shape."""
        sizes = [self.weights[parameter].size for parameter in self.order]
        cuts = np.split(self.vectors[name], np.cumsum(sizes)[:-1])
        return {key: cut.reshape(self.weights[key].shape) for key, cut in zip(self.order, cuts, strict=True)}


def write(path: str | Path, checkpoint: Checkpoint) -> None:
    """Whole or not at all; the arrays go straight from where they lie to the file."""
    arrays = {**checkpoint.weights, **checkpoint.vectors}
    with np.errstate(over="ignore"):  # a loss beyond float32 is infinite there
        if past := checkpoint.stop.past_loss_values:  # the ancestors' ring: that of iteration i at i modulo its length
            ring = np.roll(np.array(past, np.float32), checkpoint.counters.step % len(past))
            arrays[f"optimizer.{checkpoint.optimizer}.past_loss_values"] = ring
        metadata = {CHECKSUM: u32(0), **_metadata(checkpoint)}
    infos = tensor_infos(arrays)
    metadata[CHECKSUM] = u32(_sum_of(head(metadata, infos, ALIGNMENT), arrays.values()))
    with new_gguf(path, metadata, infos) as out:
        for name, array in arrays.items():
            out.write(name, array)


def tensor_infos(arrays: Mapping[str, np.ndarray]) -> list[TensorInfo]:
    return [TensorInfo(name, TYPES[array.dtype], array.shape) for name, array in arrays.items()]


# ---- the checksum ----------------------------------------------------------


SUM_END = len(head({CHECKSUM: u32(0)}, [], ALIGNMENT))  # it is the first value, so that its place is known
SUM_START = SUM_END - 4


def _sum_of(start: bytes, arrays: Iterable[np.ndarray]) -> int:
    """Of a file that is still to be written: each part with its padding."""
    found = 0
    for part in chain([memoryview(start)], (np.ascontiguousarray(array).data for array in arrays)):
        found = crc32(bytes(-part.nbytes % ALIGNMENT), crc32(part, found))
    return found


def sum_of_file(file: np.ndarray) -> int:
    return crc32(file[SUM_END:].data, crc32(bytes(4), crc32(file[:SUM_START].data)))


# ---- the values ------------------------------------------------------------


def _metadata(checkpoint: Checkpoint) -> dict[str, Value]:
    # where tensors lie is the file's affair, not the model's
    model = {key: value for key, value in checkpoint.metadata.items() if not key.startswith((*OWN, "general.alignment"))}
    return {"training.type": string(checkpoint.kind), **model, **dict(_training(checkpoint)), **dict(_optimizer(checkpoint))}


def _training(checkpoint: Checkpoint) -> Iterator[tuple[str, Value]]:
    counters, data, stop = checkpoint.counters, checkpoint.data, checkpoint.stop
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
    yield "training.best_loss", _exactly(stop.best_loss)
    yield "training.previous_loss", _exactly(stop.previous_loss)
    yield "training.no_improvement_count", u64(stop.no_improvement_count)
    yield "training.past_loss_values", numbers(Kind.FLOAT64, stop.past_loss_values)
    if checkpoint.partial:
        yield "training.partial", string(json.dumps(asdict(checkpoint.partial)))
    yield "training.options", string(json.dumps(checkpoint.options))
    yield "training.extra", string(json.dumps(checkpoint.extra))


def _optimizer(checkpoint: Checkpoint) -> Iterator[tuple[str, Value]]:
    stop, kind = checkpoint.stop, f"optimizer.{checkpoint.optimizer}"
    yield "optimizer.file_version", u32(0)
    yield "optimizer.convergence_past_count", u32(len(stop.past_loss_values))
    yield "optimizer.parameter_count", u64(sum(checkpoint.weights[name].size for name in checkpoint.order))
    yield "optimizer.iteration_count", u32(min(checkpoint.counters.step, LONGEST_COUNT))
    yield "optimizer.just_initialized", boolean(checkpoint.counters.step == 0)
    yield "optimizer.type", string(checkpoint.optimizer)
    yield "optimizer.parameter_order", strings(checkpoint.order)
    yield f"{kind}.best_loss", f32(stop.best_loss)
    yield f"{kind}.previous_loss", f32(stop.previous_loss)
    yield f"{kind}.no_improvement_count", u32(min(stop.no_improvement_count, LONGEST_COUNT))
    for key, value in checkpoint.numbers.items():
        yield key, _scalar(key, value)


def _exactly(value: float) -> Value:
    return number(Kind.FLOAT64, value)


def _scalar(key: str, value: float | int | bool) -> Value:
    if isinstance(value, bool):
        return boolean(value)
    default = Kind.INT64 if isinstance(value, int) else Kind.FLOAT64
    return number(KINDS.get(key.rpartition(".")[2], default), value)


# ---- reading ---------------------------------------------------------------


def read(path: str | Path) -> Checkpoint:
    """Arrays are views of the file as it is mapped into memory: the file stays open until they are gone."""
    gguf = open_gguf(path)
    if gguf.kind != "checkpoint":
        raise FileError(f"{path}: no checkpoint of a training run, but a file of kind {gguf.kind}")
    version, notes = gguf.value("training.file_version", int), list[str]()
    _verify(gguf, needed=version == VERSION)
    if version in (0, 1):
        gguf, notes = upgraded(gguf)
    elif version != VERSION:
        raise FileError(f"{path}: checkpoint version {version}; 0 to {VERSION} can be read: a newer llamatrain wrote it")
    optimizer = gguf.value("optimizer.type", str)
    checkpoint = Checkpoint(
        kind=gguf.value("training.type", str),
        # copied, as a run keeps them, and would keep its first file open with them
        metadata={key: Value(v.kind, bytes(v.raw)) for key, v in gguf.metadata.typed.items() if not key.startswith(OWN)},
        weights={name: _array(gguf, tensor) for name, tensor in gguf.tensors.items() if not name.startswith(OWN)},
        options=_json(gguf, "training.options"),
        counters=_counters(gguf),
        data=_data(gguf),
        optimizer=optimizer,
        order=_names(gguf, "optimizer.parameter_order"),
        vectors={
            name: _array(gguf, tensor)
            for name, tensor in gguf.tensors.items()
            if name.startswith(OWN) and not name.endswith(".past_loss_values")
        },
        numbers=_numbers(gguf, f"optimizer.{optimizer}."),
        stop=_stop(gguf),
        partial=_partial(gguf),
        extra=_json(gguf, "training.extra"),
        notes=notes,
    )
    if wrong := fault(checkpoint, gguf.value("optimizer.parameter_count", int)):
        raise FileError(f"{path}: {wrong}")
    return checkpoint


def _verify(gguf: Gguf, needed: bool) -> None:
    if CHECKSUM not in gguf.metadata:
        if needed:
            raise FileError(f"{gguf.path}: {CHECKSUM} is missing, which llamatrain writes: the file is damaged")
        return
    if not gguf.tensors:
        raise FileError(f"{gguf.path}: there are no tensors in it")
    file = next(iter(gguf.tensors.values())).file
    said, found = gguf.value(CHECKSUM, int), sum_of_file(file)
    release(file)
    if said != found:
        raise FileError(f"{gguf.path}: the file is damaged: its checksum is {found:08x}, where {said:08x} was written")


def _array(gguf: Gguf, tensor: FileTensor) -> np.ndarray:
    wanted = {"F32": "<f4"} if not tensor.name.startswith("optimizer.") else {"F32": "<f4", "F64": "<f8"}
    if tensor.type.name not in wanted:
        raise FileError(f"{gguf.path}: {quoted(tensor.name)} is {tensor.type.name}, where {' or '.join(wanted)} is needed")
    return tensor.raw.view(wanted[tensor.type.name])


def _count(gguf: Gguf, key: str) -> int:
    value = gguf.value(key, int)
    if value < 0:
        raise FileError(f"{gguf.path}: {key} is {value}, less than nothing")
    return value


def _json(gguf: Gguf, key: str) -> dict[str, Any]:
    try:
        value = json.loads(gguf.value(key, str))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{gguf.path}: {key} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise FileError(f"{gguf.path}: {key} is no JSON object")
    return value


def _names(gguf: Gguf, key: str) -> list[str]:
    names = gguf.value(key, list)
    if not names or not all(isinstance(name, str) for name in names):
        raise FileError(f"{gguf.path}: {key} is no list of names")
    return names


def _counters(gguf: Gguf) -> Counters:
    step, samples, tokens, epoch = (_count(gguf, f"training.{name}_count") for name in ("iteration", "sample", "token", "epoch"))
    seconds = gguf.value("training.seconds", float)
    if not 0 <= seconds < math.inf:
        raise FileError(f"{gguf.path}: training.seconds is {seconds}")
    return Counters(step, samples, tokens, epoch, seconds)


def _data(gguf: Gguf) -> State | None:
    if "training.shuffle.seed" not in gguf.metadata:
        return None
    epoch, position, row = (_count(gguf, f"training.shuffle.{key}") for key in ("epoch", "next_sample", "next_row"))
    return State(gguf.value("training.shuffle.seed", int), epoch, position, row, gguf.value("training.shuffle.fingerprint", str))


def _stop(gguf: Gguf) -> StopState:
    best, previous = (gguf.value(f"training.{key}", float) for key in ("best_loss", "previous_loss"))
    past = gguf.value("training.past_loss_values", np.ndarray)
    if math.isnan(best) or past.dtype.kind != "f" or not np.isfinite(past).all():
        raise FileError(f"{gguf.path}: training.best_loss is {best}, and of the past losses not all are numbers")
    return StopState(best, previous, _count(gguf, "training.no_improvement_count"), past.tolist())


def _partial(gguf: Gguf) -> Partial | None:
    if "training.partial" not in gguf.metadata:
        return None
    match _json(gguf, "training.partial"):
        case {"count": int(count), "losses": list(losses), "extra": dict(extra)}:
            if 0 < count == len(losses) and all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
                return Partial(count, losses, extra)
    raise FileError(f"{gguf.path}: training.partial does not hold the losses of a step's first micro-batches")


def _numbers(gguf: Gguf, prefix: str) -> dict[str, float | int | bool]:
    keys = [key for key in gguf.metadata if key.startswith(prefix) and key.removeprefix(prefix) not in DERIVED]
    found = {key: gguf.metadata[key] for key in keys}
    if wrong := [key for key, value in found.items() if not isinstance(value, int | float)]:
        raise FileError(f"{gguf.path}: {quoted(wrong[0])} is no number")
    return found


# ---- what must agree -------------------------------------------------------


# By optimizer: the vectors that it cannot go on without, by the names of their axes.
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "adam": {"first_moments": ("n",), "second_moments": ("n",)},
    "sgd": {"momentum": ("n",)},
    "lbfgs": {"current_gradients": ("n",), "memory_s": ("m", "n"), "memory_y": ("m", "n"), "memory_ys": ("m",)},
}


def fault(checkpoint: Checkpoint, parameters: int) -> str | None:
    """Why a run cannot go on from this, if it cannot."""
    order, weights = checkpoint.order, checkpoint.weights
    if checkpoint.kind not in KINDS_OF_RUNS:
        return f"a run of type {quoted(checkpoint.kind)}; known are {', '.join(KINDS_OF_RUNS)}"
    if checkpoint.optimizer not in NEEDED:
        return f"the optimizer {quoted(checkpoint.optimizer)} is unknown; known are {', '.join(NEEDED)}"
    if strange := [name for name in order if name not in weights]:
        return f"the parameter {quoted(strange[0])} has no weights"
    if len(set(order)) != len(order) or sum(weights[name].size for name in order) != parameters:
        return f"its {len(order)} parameters do not have the {parameters} elements together that are said"
    if bool(checkpoint.partial) != (GRADIENTS in checkpoint.vectors):
        return f"{GRADIENTS} and training.partial go together, and one is missing"
    return _unfit_vector(checkpoint, parameters) or _unfit_ring(checkpoint) or _unfit_value(checkpoint)


def _unfit_vector(checkpoint: Checkpoint, parameters: int) -> str | None:
    prefix = f"optimizer.{checkpoint.optimizer}."
    needed = {prefix + name: axes for name, axes in NEEDED[checkpoint.optimizer].items()}
    if checkpoint.optimizer == "lbfgs" and not any(name in checkpoint.vectors for name in needed):
        needed = {}  # it may begin anew
    if missing := needed.keys() - checkpoint.vectors.keys():
        return f"the tensor {min(missing)} is missing"
    sizes = {"n": parameters, "m": checkpoint.vectors[f"{prefix}memory_ys"].size if "lbfgs" in prefix and needed else 0}
    for name, vector in checkpoint.vectors.items():
        wanted = tuple(sizes[axis] for axis in needed.get(name, ("n",)))
        if vector.shape != wanted:
            return f"the tensor {quoted(name)} has the shape {list(vector.shape)}, where {list(wanted)} is needed"
    return None


def _unfit_ring(checkpoint: Checkpoint) -> str | None:
    ys = checkpoint.vectors.get("optimizer.lbfgs.memory_ys")
    if ys is None:
        return None
    held, at = (checkpoint.numbers.get(f"optimizer.lbfgs.{key}") for key in ("approx_hessian_count", "line_search_end"))
    if not (type(held) is int and type(at) is int and 0 <= held <= ys.size and 0 <= at < ys.size):
        return f"{held} moves held and the next one to go to place {at} cannot be in a history of {ys.size}"
    return None


def _unfit_value(checkpoint: Checkpoint) -> str | None:
    """Least and greatest tell of NaN and infinity without a copy."""
    for name, array in {**checkpoint.weights, **checkpoint.vectors}.items():
        least, greatest = float(array.min()), float(array.max())
        if not (math.isfinite(least) and math.isfinite(greatest)):
            return f"the tensor {quoted(name)} has values that are not finite"
        if least < 0 and name == "optimizer.adam.second_moments":
            return f"the tensor {name} has values below 0, and is one of squares"
    return None
