"""A small checkpoint of each optimizer to test with, and files forged from it whose checksum is right."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from llamatrain.checkpoints.checkpoint import (
    CHECKSUM,
    GRADIENTS,
    SUM_END,
    SUM_START,
    Checkpoint,
    compute_checksum,
    tensor_infos,
)
from llamatrain.data.batches import CursorState
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import Value
from llamatrain.gguf.writer import create_gguf
from llamatrain.grpo.rollouts import GeneratedAnswer
from llamatrain.optim.early_stop import StopState
from llamatrain.preference.batch import Rewards
from llamatrain.train.state import BestValidation, Counters, PartialStep, RunState
from tests.helpers.tiny_gguf import llama_metadata, llama_tensors

MEMORY = 3  # moves in the history of L-BFGS


def tiny_checkpoint(optimizer: str = "adam", step: int = 7, partial: bool = False) -> Checkpoint:
    random = np.random.default_rng(step)
    weights = llama_tensors()
    order = sorted(weights)[:-1]  # one that is not trained
    n = sum(weights[name].size for name in order)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "adam": {"first_moments": (n,), "second_moments": (n,)},
        "sgd": {"momentum": (n,)},
        "lbfgs": {"current_gradients": (n,), "memory_s": (MEMORY, n), "memory_y": (MEMORY, n)},
    }
    vectors: dict[str, np.ndarray] = {
        f"optimizer.{optimizer}.{name}": random.random(shape, np.float32)
        for name, shape in shapes[optimizer].items()
    }
    numbers: dict[str, float | int | bool] = {}
    if optimizer == "lbfgs":
        moves, changes = (vectors[f"optimizer.lbfgs.{name}"] for name in ("memory_s", "memory_y"))
        vectors["optimizer.lbfgs.memory_ys"] = np.einsum("mn,mn->m", moves, changes, dtype=np.float64)
        numbers = {
            "approx_hessian_count": 2,
            "line_search_end": 2,
            "loss": 0.1 + 0.2,
            "evaluations": 2**40,
            "ready": True,
        }
    if partial:
        vectors[GRADIENTS] = random.random(n, np.float32)
    return Checkpoint(
        kind="train_model",
        metadata=llama_metadata(),
        weights=weights,
        options={"lr": 1e-3, "data": ["a.txt", "\udcff ü"], "val": None, "flash": True},
        state=RunState(
            counters=Counters(step, 8 * step, 999, 1, 0.1 + 0.2),
            data=CursorState(3, 1, 40, 2, "00ff", end=7),
            best=BestValidation(1 / 3, step - min(step, 2), min(step, 2), 2 / 3),
            stop=StopState(1.1, 1.3 / 3, 2, [0.1 * i for i in range(5)]),
            partial=PartialStep([1 / 3, 2 / 7], 0.1 + 0.7, Rewards(0.1, -1 / 3, 3, 2, 4, 5))
            if partial
            else None,
            validation_due=True,
            rollouts=[GeneratedAnswer([1, 2], [3], True, 1 / 3, [-2 / 7]), None],
            stop_reason="the loss rose",
        ),
        optimizer=optimizer,
        order=order,
        vectors=vectors,
        numbers={f"optimizer.lbfgs.{name}": value for name, value in numbers.items()},
        extra={"best_val": 1 / 7},
    )


def sign(path: Path) -> Path:
    """Put in the checksum that the file should have."""
    file = np.fromfile(path, np.uint8)
    file[SUM_START:SUM_END] = np.frombuffer(compute_checksum(file).to_bytes(4, "little"), np.uint8)
    file.tofile(path)
    return path


def forge(
    source: Path,
    target: Path,
    values: Mapping[str, Value | None],
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """A copy with other values and float32 tensors; None takes one away. One that had a checksum has a right one."""
    gguf = open_gguf(source)
    metadata = {
        key: value for key, value in {**gguf.metadata.raw_values, **values}.items() if value is not None
    }
    arrays = {
        name: tensor.raw.view("<f8" if tensor.type.name == "F64" else "<f4")
        for name, tensor in gguf.tensors.items()
    }
    arrays = {name: array for name, array in {**arrays, **(tensors or {})}.items() if array is not None}
    with create_gguf(target, metadata, tensor_infos(arrays)) as out:
        for name, array in arrays.items():
            out.write(name, array)
    return sign(target) if CHECKSUM in metadata else target
