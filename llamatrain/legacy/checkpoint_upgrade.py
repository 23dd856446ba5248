"""Upgrades checkpoints of llama.cpp's train-text-from-scratch and finetune to the present keys.

Their vectors hold the parameters in an order of their own (legacy_order.py); ours store a list of names. The
factors of an adapter are transposed (adapter_checkpoint.py), and so are their pieces of the vectors. Their
shuffle (std::mt19937 over a list of all samples) cannot be resumed.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from llamatrain.adapters.adapter import is_transposed
from llamatrain.checkpoints.checkpoint import RUN_PREFIXES
from llamatrain.errors import FileError
from llamatrain.gguf.parser import quote
from llamatrain.gguf.reader import FileTensor, Gguf, Metadata
from llamatrain.gguf.types import type_by_name
from llamatrain.gguf.values import Kind, Value, number, numbers, string, strings, u32, u64
from llamatrain.legacy import adapter_checkpoint
from llamatrain.legacy.adapter_bin import ARCHITECTURE
from llamatrain.legacy.parameter_order import (
    Order,
    order_from_squares,
    order_from_values,
    possible_orders,
    split_vectors,
)
from llamatrain.model.architectures import find_architecture
from llamatrain.optim.methods.lbfgs import slots_newest_first

NO_TOKEN = 2**32 - 1  # written for a missing token
PROGRAMS = {"train_model": "train-text-from-scratch", "finetune_lora": "finetune"}
SWAPPED = {"a": "b", "b": "a"}

Tensors = dict[str, FileTensor]


def upgrade(gguf: Gguf) -> tuple[Gguf, list[str]]:
    """Return the checkpoint in the present form, and notes about what was lost."""
    kind = gguf.get_value("training.type", str, "train_model")
    optimizer = gguf.get_value("optimizer.type", str)
    if kind not in PROGRAMS:
        raise FileError(
            f"{gguf.path}: unknown type of run {quote(kind)}; llama.cpp wrote {', '.join(PROGRAMS)}",
            code="unknown-run-type",
        )
    if optimizer not in ("adam", "lbfgs"):
        raise FileError(
            f"{gguf.path}: unknown optimizer {quote(optimizer)}; llama.cpp had adam and lbfgs",
            code="unknown-optimizer",
        )
    weights = {name: tensor for name, tensor in gguf.tensors.items() if not name.startswith(RUN_PREFIXES)}
    order = find_order(gguf, weights, optimizer, kind == "finetune_lora")
    vectors, optimizer_numbers, notes = (
        read_moments(gguf) if optimizer == "adam" else read_history(gguf, order, weights)
    )
    extra = dict[str, object]()
    if kind == "finetune_lora":
        weights, vectors, order, extra = convert_adapter(gguf, weights, vectors, order)
    metadata = {
        **{
            key: value
            for key, value in gguf.metadata.raw_values.items()
            if not key.startswith(RUN_PREFIXES) and not _is_missing_token(key, value)
        },
        "training.type": string(kind),
        **_counters(gguf),
        **_stop(gguf, f"optimizer.{optimizer}"),
        "training.options": string("{}"),
        "training.extra": string(json.dumps(extra)),
        "optimizer.type": string(optimizer),
        "optimizer.parameter_order": strings(order),
        **optimizer_numbers,
    }
    notes = [
        f"this checkpoint is from llama.cpp's {PROGRAMS[kind]}, which stored no options",
        "its shuffle cannot be resumed: the data starts over",
        *notes,
        *legacy_notes(gguf),
    ]
    return replace(gguf, metadata=Metadata(metadata), tensors=weights | vectors), notes


def legacy_notes(gguf: Gguf) -> Iterator[str]:
    """Yield notes about a file from before GGUF."""
    if missing := gguf.get_value("training.unsaid", str, ""):
        yield f"it is older than GGUF and does not state: {missing}"
    if options := gguf.get_value("training.said", str, ""):
        yield (
            f"it was trained with {options}, which is not stored here; give these options again to "
            "resume with them"
        )


def _is_missing_token(key: str, value: Value) -> bool:
    return key.endswith("_token_id") and value.decode() == NO_TOKEN


def _counters(gguf: Gguf) -> dict[str, Value]:
    """Return the counters; version 0 had them in 32 bits, and no epochs."""
    training = [f"training.{name}_count" for name in ("iteration", "sample", "token", "epoch")]
    counts = {
        key: gguf.metadata.raw_values[key]
        for key in (*training, "optimizer.parameter_count")
        if key in gguf.metadata
    }
    return {"training.epoch_count": u64(0), "training.seconds": number(Kind.FLOAT64, 0.0), **counts}


def _stop(gguf: Gguf, prefix: str) -> dict[str, Value]:
    fresh = gguf.get_value("optimizer.just_initialized", bool, False)
    best = math.inf if fresh else gguf.get_value(f"{prefix}.best_loss", float)
    # L-BFGS has none
    previous = math.nan if fresh else gguf.get_value(f"{prefix}.previous_loss", float, math.nan)
    count = 0 if fresh else gguf.get_value(f"{prefix}.no_improvement_count", int, 0)
    return {
        "training.best_loss": number(Kind.FLOAT64, best),
        "training.previous_loss": number(Kind.FLOAT64, previous),
        "training.no_improvement_count": number(Kind.INT64, count),
        "training.past_loss_values": numbers(Kind.FLOAT64, _past_losses(gguf, f"{prefix}.past_loss_values")),
    }


def _past_losses(gguf: Gguf, name: str) -> list[float]:
    """Return the past losses, oldest first, from a ring with the loss of iteration i at i modulo its length."""
    if name not in gguf.tensors or gguf.tensors[name].type.name != "F32":
        return []
    ring, step = gguf.tensors[name].raw.view("<f4").ravel(), gguf.get_value("training.iteration_count", int)
    return [float(ring[i % ring.size]) for i in range(max(0, step - ring.size), step)]


# ---- what the optimizers held ----------------------------------------------


def read_f32(gguf: Gguf, name: str, shape: Sequence[int] | None = None) -> np.ndarray:
    """Return a tensor as float32, with this shape or number of elements."""
    if name not in gguf.tensors:
        raise FileError(f"{gguf.path}: tensor {name} is missing", code="missing-tensor")
    tensor = gguf.tensors[name]
    if tensor.type.name != "F32":
        raise FileError(
            f"{gguf.path}: tensor {quote(name)} must be F32 (got {tensor.type.name})",
            code="wrong-tensor-type",
        )
    if shape is not None and tensor.elements != math.prod(shape):
        raise FileError(
            f"{gguf.path}: tensor {name} must have the shape {list(shape)} (got {list(tensor.shape)})",
            code="wrong-tensor-shape",
        )
    array: np.ndarray = tensor.raw.view("<f4").reshape(tensor.shape if shape is None else shape)
    return array


def tensor_in_memory(name: str, array: np.ndarray) -> FileTensor:
    """Return an array as a tensor that is in no file."""
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return FileTensor(name, type_by_name("F64" if array.dtype == np.float64 else "F32"), array.shape, 0, raw)


Held = tuple[Tensors, dict[str, Value], list[str]]  # vectors, numbers, notes


def read_moments(gguf: Gguf) -> Held:
    """Return Adam's moments."""
    names = ("optimizer.adam.first_moments", "optimizer.adam.second_moments")
    return {name: gguf.tensors[name] for name in names if name in gguf.tensors}, {}, []


def read_history(gguf: Gguf, order: Order, weights: Tensors) -> Held:
    """Return the moves of L-BFGS that are usable, from the newest on.

    `end` is the slot of the next move, `k` counts moves from 1.
    """
    prefix, size = "optimizer.lbfgs.", sum(weights[name].elements for name in order)
    size_of_history, k, end = (
        gguf.get_value(prefix + key, int)
        for key in ("approx_hessian_count", "line_search_k", "line_search_end")
    )
    fresh = gguf.get_value("optimizer.just_initialized", bool, False)
    if not 0 <= end < size_of_history or size * size_of_history > sum(
        tensor.elements for tensor in gguf.tensors.values()
    ):
        raise FileError(
            f"{gguf.path}: invalid L-BFGS history: {size_of_history} moves, next slot {end}",
            code="invalid-history",
        )
    s, y = (read_f32(gguf, f"{prefix}memory_{name}", (size_of_history, size)) for name in "sy")
    with np.errstate(all="ignore"):
        ys = np.array(
            [np.einsum("i,i", one, other, dtype=np.float64) for one, other in zip(s, y, strict=True)]
        )
    slots = slots_newest_first(0 if fresh else max(0, min(size_of_history, k - 1)), end, size_of_history)
    usable = next((count for count, slot in enumerate(slots) if not 0 < ys[slot] < math.inf), len(slots))
    vectors = {"memory_s": s, "memory_y": y, "memory_ys": np.where(np.isfinite(ys), ys, 0.0)}
    history_numbers = {
        f"{prefix}approx_hessian_count": u32(usable),
        f"{prefix}line_search_end": number(Kind.INT32, end),
    }
    note = (
        f"the optimizer continues with its history of {usable} moves; the gradient is computed again, "
        "on other samples"
    )
    return (
        {prefix + name: tensor_in_memory(prefix + name, array) for name, array in vectors.items()},
        history_numbers,
        [note],
    )


# ---- the parameters in their vectors ---------------------------------------


def find_order(gguf: Gguf, weights: Tensors, optimizer: str, adapter: bool) -> Order:
    """Return the order in which the vectors hold the parameters."""
    layers, parts = gguf.get_value("llama.block_count", int), "pairs of factors" if adapter else "weights"
    count = len(weights) // 2 if adapter else len(weights)
    if count != layers * 9 + 3 or len(weights) != count * (1 + adapter):
        raise FileError(
            f"{gguf.path}: {count} {parts} do not match a llama of {layers} layers", code="wrong-tensor-count"
        )
    candidates = list(possible_orders(layers, adapter))
    if missing := [name for name in candidates[0] if name not in weights]:
        raise FileError(f"{gguf.path}: tensor {missing[0]} is missing", code="missing-tensor")
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    size = sum(tensor.elements for tensor in weights.values())
    if (key := f"optimizer.{optimizer}.current_parameters") in gguf.tensors or optimizer == "lbfgs":
        arrays = {name: read_f32(gguf, name) for name in weights}
        return order_from_values(read_f32(gguf, key, [size]), arrays, candidates)
    squares = read_f32(gguf, "optimizer.adam.second_moments", [size])
    order = order_from_squares(
        squares, shapes, "token_embd.weight" + (".lora_b" if adapter else ""), candidates
    )
    if order is None:
        raise FileError(
            f"{gguf.path}: the order of the moments is unknown; the weights can be taken from the model file",
            code="unknown-parameter-order",
        )
    return order


def convert_adapter(
    gguf: Gguf, weights: Tensors, vectors: Tensors, order: Order
) -> tuple[Tensors, Tensors, Order, dict[str, object]]:
    """Return factors and vectors in the present layout, their order, and the run's data on its adapter."""
    adapter = adapter_checkpoint.parse_adapter(gguf)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    pairs = adapter.pairs.items()
    factors = {f"{name}.lora_{half}": getattr(pair, half) for name, pair in pairs for half in ("a", "b")}
    size = sum(tensor.elements for tensor in weights.values())
    for name, tensor in vectors.items():
        if tensor.shape[-1] == size:
            array = tensor.raw.view("<f4").reshape(tensor.shape)
            vectors[name] = tensor_in_memory(
                name, np.concatenate(list(transpose_pieces(array, shapes, order)), -1)
            )
    extra = {
        "ranks": {name: pair.rank for name, pair in pairs},
        "scales": {name: pair.scale for name, pair in pairs},
        "alpha": adapter.alpha,
    }
    present_order = tuple(name for name, _ in map(present_name, order))
    return (
        {name: tensor_in_memory(name, factor) for name, factor in factors.items()},
        vectors,
        present_order,
        extra,
    )


def present_name(name: str) -> tuple[str, bool]:
    """Return a factor's present name, and True if it was transposed."""
    weight, half = name.removesuffix(name[-1]), name[-1]
    if is_transposed(find_architecture(ARCHITECTURE), weight.removesuffix(".lora_")):
        return weight + SWAPPED[half], False
    return name, half == "a"


def transpose_pieces(
    vectors: np.ndarray, shapes: Mapping[str, tuple[int, ...]], order: Order
) -> Iterator[np.ndarray]:
    """Yield the pieces of flat vectors in the present layout."""
    for name, piece in split_vectors(vectors, shapes, order):
        yield (np.swapaxes(piece, -1, -2) if present_name(name)[1] else piece).reshape(
            *vectors.shape[:-1], -1
        )
