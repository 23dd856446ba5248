"""Checkpoints as llama.cpp's old train-text-from-scratch and finetune wrote them, made of ours in their keys and their order."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from llamatrain.checkpoints.checkpoint import Checkpoint
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import Kind, Value, boolean, f32, number, string, u32, u64
from llamatrain.gguf.writer import create_gguf
from tests.helpers.small_models import EMBEDDINGS

FILE = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_down",
    "ffn_up",
)
# by the way that ggml went through its graph, and whether attention was an op of its own: the weights as it met them
LEFT = (
    ("ffn_down", "ffn_gate", "ffn_norm", "attn_output", "attn_norm"),
    ("attn_v", "attn_k", "attn_q", "ffn_up"),
)
LEFT_FLASH = (
    ("ffn_down", "ffn_gate", "ffn_norm", "attn_output", "attn_q", "attn_norm"),
    ("attn_k", "attn_v", "ffn_up"),
)
RIGHT = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_up",
    "ffn_gate",
    "ffn_down",
)
RIGHT_FLASH = (
    "attn_v",
    "attn_norm",
    "attn_k",
    "attn_q",
    "attn_output",
    "ffn_norm",
    "ffn_up",
    "ffn_gate",
    "ffn_down",
)
WAYS = ("left", "left, flash", "right", "right, flash")
RANKS = ("token_embd", "output_norm", "output", *FILE)


def met(way: str, layers: int) -> list[str]:
    if way.startswith("left"):
        down, up = LEFT_FLASH if "flash" in way else LEFT
        below = [f"blk.{i}.{name}" for i in reversed(range(layers)) for name in down]
        names = [
            "output",
            "output_norm",
            *below,
            "token_embd",
            *(f"blk.{i}.{name}" for i in range(layers) for name in up),
        ]
    else:
        block = RIGHT_FLASH if "flash" in way else RIGHT
        names = [
            "token_embd",
            *(f"blk.{i}.{name}" for i in range(layers) for name in block),
            "output_norm",
            "output",
        ]
    return [f"{name}.weight" for name in names]


def filed(layers: int) -> list[str]:
    names = [
        "token_embd",
        "output_norm",
        "output",
        *(f"blk.{i}.{name}" for i in range(layers) for name in FILE),
    ]
    return [f"{name}.weight" for name in names]


def parts(name: str, adapter: bool, way: str) -> list[tuple[str, str, bool]]:
    """Of a weight: theirs, ours, and whether ours is turned."""
    if not adapter:
        return [(name, name, False)]
    a, b = f"{name}.lora_a", f"{name}.lora_b"
    both = [(a, b, False), (b, a, False)] if name == EMBEDDINGS else [(a, a, True), (b, b, False)]
    return both[::-1] if way.startswith("right") else both


def as_theirs(path: Path, ours: Checkpoint, layers: int, way: str = "left", version: int = 1) -> Path:
    adapter = ours.kind == "finetune_lora"
    prefix = f"optimizer.{ours.optimizer}."

    def flat(found: dict[str, np.ndarray]) -> np.ndarray:
        order = [part for name in met(way, layers) for part in parts(name, adapter, way)]
        return np.concatenate(
            [(found[mine].T if turned else found[mine]).ravel() for _, mine, turned in order]
        )

    tensors = {}
    for name in filed(layers):
        for theirs, mine, turned in parts(name, adapter, "left"):
            tensors[theirs] = ours.weights[mine].T if turned else ours.weights[mine]
    values: dict[str, Value] = {
        **dict(model_keys(ours)),
        **(dict(ranks(tensors)) if adapter else {}),
        **training_values(ours, version),
    }
    if ours.optimizer == "adam":
        for name in ("first_moments", "second_moments"):
            tensors[prefix + name] = flat(ours.split_vector(prefix + name))
        values |= {f"{prefix}previous_loss": f32(ours.state.stop.previous_loss)}
    else:
        values |= lbfgs_values(ours, prefix)
        tensors |= lbfgs_tensors(ours, prefix, flat)
    values[f"{prefix}no_improvement_count"] = u32(0)
    arrays = {name: as_ggml(array) for name, array in tensors.items()}
    with create_gguf(
        path, values, [TensorInfo(name, type_by_name("F32"), array.shape) for name, array in arrays.items()]
    ) as out:
        for name, array in arrays.items():
            out.write(name, array)
    return path


def training_values(ours: Checkpoint, version: int) -> dict[str, Value]:
    """Return the counters of a run and of its optimizer; before version 1 they have 32 bits."""
    counters, count = ours.state.counters, u64 if version else u32
    return {
        "training.type": string(ours.kind),
        "training.file_version": u32(version),
        "training.iteration_count": count(counters.step),
        "training.sample_count": count(counters.samples),
        "training.token_count": count(counters.tokens),
        "training.epoch_count": u64(counters.epoch),
        "training.shuffle.samples_hash": u64(7),
        "training.shuffle.rng_state": string("1 2 3"),
        "training.shuffle.sample_count": u64(9),
        "training.shuffle.next_sample": u64(3),
        "optimizer.file_version": u32(0),
        "optimizer.convergence_past_count": u32(0),
        "optimizer.parameter_count": u64(sum(weight.size for weight in ours.weights.values())),
        "optimizer.iteration_count": u32(counters.step),
        "optimizer.just_initialized": boolean(False),
        "optimizer.type": string(ours.optimizer),
        f"optimizer.{ours.optimizer}.best_loss": f32(ours.state.stop.best_loss),
    }


def lbfgs_values(ours: Checkpoint, prefix: str) -> dict[str, Value]:
    """Return the counters of L-BFGS's history and line search."""
    kept = ours.optimizer_values
    held, end = int(kept["approx_hessian_count"]), int(kept["line_search_end"])
    numbers = {"j": end, "k": held + 1, "end": end}
    return {
        f"{prefix}approx_hessian_count": u32(len(kept["memory_ys"])),
        f"{prefix}line_search_step": f32(1.0),
        **{f"{prefix}line_search_{name}": number(Kind.INT32, value) for name, value in numbers.items()},
    }


def lbfgs_tensors(
    ours: Checkpoint, prefix: str, flat: Callable[[dict[str, np.ndarray]], np.ndarray]
) -> dict[str, np.ndarray]:
    """Return L-BFGS's vectors and history, in the order of weights that `flat` has."""

    def rows(name: str) -> np.ndarray:
        made = []
        for row in ours.vectors[prefix + name]:
            ours.vectors["row"] = row
            made.append(flat(ours.split_vector("row")))
        del ours.vectors["row"]
        return np.array(made)

    count = len(ours.optimizer_values["memory_ys"])
    x = flat(ours.split_vector(prefix + "current_parameters"))
    gradient = flat(ours.split_vector(prefix + "current_gradients"))
    return {
        **{f"{prefix}{name}_parameters": x for name in ("current", "previous")},
        **{f"{prefix}{name}_gradients": gradient for name in ("current", "previous")},
        f"{prefix}search_direction": -gradient,
        f"{prefix}memory_alpha": np.zeros(count, np.float32),
        f"{prefix}memory_ys": np.asarray(ours.optimizer_values["memory_ys"], np.float32),
        **{f"{prefix}memory_{name}": rows(f"memory_{name}") for name in "sy"},
    }


def as_ggml(array: np.ndarray) -> np.ndarray:
    """It forgets axes of length 1 that are not the first to it, the last to numpy."""
    array = np.ascontiguousarray(array, np.float32)
    while array.ndim > 1 and array.shape[0] == 1:
        array = array[0]
    return array


def model_keys(ours: Checkpoint) -> Iterator[tuple[str, Value]]:
    keep = (
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "block_count",
        "rope.dimension_count",
    )
    yield "general.architecture", string("llama")
    yield "general.file_type", u32(0)
    for key in (
        *keep,
        "attention.head_count",
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
    ):
        if f"llama.{key}" in ours.metadata:
            yield f"llama.{key}", ours.metadata[f"llama.{key}"]
    yield "llama.rope.scale_linear", f32(1.0)
    if ours.kind == "train_model":
        yield from ((key, value) for key, value in ours.metadata.items() if key.startswith("tokenizer."))


def ranks(tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, Value]]:
    for kind in RANKS:
        name = f"{kind}.weight" if f"{kind}.weight.lora_a" in tensors else f"blk.0.{kind}.weight"
        yield f"training.lora.rank.{kind}", u32(tensors[f"{name}.lora_a"].shape[-1])
