"""Reads checkpoints and validates their content: the checksum only shows that a file is complete."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from llamatrain.checkpoints.checkpoint import (
    BEST,
    CHECKSUM,
    GRADIENTS,
    PIECE,
    ROLLOUTS,
    RUN_PREFIXES,
    STOP_REASON,
    VALIDATION_DUE,
    VERSION,
    Checkpoint,
    compute_checksum,
)
from llamatrain.data.batches import CursorState
from llamatrain.errors import FileError
from llamatrain.extensions import load_extensions
from llamatrain.gguf.parser import quote
from llamatrain.gguf.reader import FileTensor, Gguf, open_gguf
from llamatrain.gguf.values import Value
from llamatrain.grpo.metrics import RolloutStats
from llamatrain.grpo.rollouts import GeneratedAnswer, Rollouts
from llamatrain.io.madvise import release_pages
from llamatrain.io.mapped_file import verify_unchanged
from llamatrain.optim import registry
from llamatrain.optim.early_stop import StopState
from llamatrain.optim.optimizer import Optimizer
from llamatrain.preference.batch import Rewards
from llamatrain.train.state import BestValidation, Counters, PartialStep, RunState

KINDS_OF_RUNS = ("train_model", "finetune_lora")
MAX_TOKEN = 1 << 31
MAX_SECONDS = 1e12  # seconds, the longest run
DERIVED_KEYS = ("best_loss", "previous_loss", "no_improvement_count")  # copies of values in training.*


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint. Arrays are views of the mapped file, which stays open as long as they exist."""
    gguf = open_gguf(path)
    with verify_unchanged(gguf.mapped_files):
        return parse_checkpoint(gguf)


def parse_checkpoint(gguf: Gguf) -> Checkpoint:
    """Return the checkpoint in a GGUF file that is open already."""
    path = gguf.path
    if gguf.kind != "checkpoint":
        raise FileError(
            f"{path}: not a checkpoint of a training run (kind {gguf.kind})", code="not-a-checkpoint"
        )
    version, notes = gguf.get_value("training.file_version", int), list[str]()
    _verify(gguf, needed=version == VERSION)
    if version in (0, 1):
        (upgrade,) = load_extensions("checkpoint_upgrade")
        gguf, notes = upgrade(gguf)
    elif version != VERSION:
        raise FileError(
            f"{path}: checkpoint version must be 0 to {VERSION} (got {version}); a newer llamatrain wrote it",
            code="unknown-version",
        )
    optimizer, extra = gguf.get_value("optimizer.type", str), _json(gguf, "training.extra")
    checkpoint = Checkpoint(
        kind=gguf.get_value("training.type", str),
        # copied: views would keep the whole header in memory
        metadata={
            key: Value(v.kind, bytes(v.raw))
            for key, v in gguf.metadata.raw_values.items()
            if not key.startswith(RUN_PREFIXES)
        },
        weights={
            name: _array(gguf, tensor)
            for name, tensor in gguf.tensors.items()
            if not name.startswith(RUN_PREFIXES)
        },
        options=_json(gguf, "training.options"),
        state=_state(gguf, extra),
        optimizer=optimizer,
        order=_names(gguf, "optimizer.parameter_order"),
        vectors={
            name: _array(gguf, tensor)
            for name, tensor in gguf.tensors.items()
            if name.startswith(RUN_PREFIXES) and not name.endswith(".past_loss_values")
        },
        numbers=_numbers(gguf, f"optimizer.{optimizer}."),
        extra={key: value for key, value in extra.items() if key not in (VALIDATION_DUE, STOP_REASON, BEST)},
        notes=notes,
    )
    if problem := find_problem(checkpoint, gguf.get_value("optimizer.parameter_count", int)):
        raise FileError(f"{path}: {problem}", code="invalid-checkpoint")
    return checkpoint


def _verify(gguf: Gguf, needed: bool) -> None:
    if CHECKSUM not in gguf.metadata:
        if needed:
            raise FileError(f"{gguf.path}: the file is damaged: {CHECKSUM} is missing", code="damaged-file")
        return
    if not gguf.tensors:
        raise FileError(f"{gguf.path}: the file has no tensors", code="invalid-checkpoint")
    file = next(iter(gguf.tensors.values())).file
    stored, actual = gguf.get_value(CHECKSUM, int), compute_checksum(file)
    if stored != actual:
        raise FileError(
            f"{gguf.path}: the file is damaged: its checksum is {actual:08x}, but {stored:08x} is stored",
            code="damaged-file",
        )


def _array(gguf: Gguf, tensor: FileTensor) -> np.ndarray:
    dtypes = {"F32": "<f4"} if not tensor.name.startswith("optimizer.") else {"F32": "<f4", "F64": "<f8"}
    if tensor.type.name not in dtypes:
        raise FileError(
            f"{gguf.path}: tensor {quote(tensor.name)} must be {' or '.join(dtypes)} (got "
            f"{tensor.type.name})",
            code="wrong-tensor-type",
        )
    return tensor.raw.view(dtypes[tensor.type.name])


def _count(gguf: Gguf, key: str) -> int:
    value = gguf.get_value(key, int)
    if value < 0:
        raise FileError(f"{gguf.path}: {key} must be at least 0 (got {value})", code="invalid-checkpoint")
    return value


def _json(gguf: Gguf, key: str) -> dict[str, Any]:
    try:
        value = json.loads(gguf.get_value(key, str))
        # UTF-16 surrogates are no text, except those that stand for bytes of paths that are not UTF-8.
        json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise FileError(
            f"{gguf.path}: {key} contains {error.object[error.start]!a}, which is not a character",
            code="invalid-json",
        ) from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{gguf.path}: {key} is not valid JSON: {error}", code="invalid-json") from error
    if not isinstance(value, dict):
        raise FileError(f"{gguf.path}: {key} must be a JSON object", code="invalid-json")
    return value


def _names(gguf: Gguf, key: str) -> list[str]:
    names = gguf.get_value(key, list)
    if not names or not all(isinstance(name, str) for name in names):
        raise FileError(f"{gguf.path}: {key} must be a list of names", code="invalid-checkpoint")
    return names


def _state(gguf: Gguf, extra: dict[str, Any]) -> RunState:
    validation_due, stop_reason = extra.get(VALIDATION_DUE, False), extra.get(STOP_REASON)
    if not isinstance(validation_due, bool) or not isinstance(stop_reason, str | None):
        raise FileError(
            f"{gguf.path}: training.extra has an invalid state of the run", code="invalid-checkpoint"
        )
    counters = _counters(gguf)
    return RunState(
        counters=counters,
        data=_data(gguf),
        stop=_stop(gguf),
        best=_best(gguf, extra.get(BEST), counters.step),
        partial=_partial(gguf),
        rollouts=_rollouts(gguf),
        validation_due=validation_due,
        stop_reason=stop_reason,
    )


def _best(gguf: Gguf, value: Any, steps: int) -> BestValidation:
    match value:
        case None:
            return BestValidation()
        case {"loss": None, "step": None, "idle": int(idle)} if 0 < idle <= steps + 1:
            return BestValidation(stale=idle)
        case {"loss": float() as loss, "step": int(step), "idle": int(idle), "due": float() | None as due}:
            due = math.inf if due is None else due
            if math.isfinite(loss) and loss < due and 0 <= step <= steps and 0 <= idle <= steps + 1:
                return BestValidation(loss=loss, step=step, scheduled_loss=due, stale=idle)
        case {"loss": float() as loss, "step": int(step), "idle": int(idle)}:
            if math.isfinite(loss) and 0 <= step <= steps and 0 <= idle <= steps - step:
                return BestValidation(loss=loss, step=step, scheduled_loss=loss, stale=idle)
    raise FileError(f"{gguf.path}: training.extra has an invalid best validation", code="invalid-checkpoint")


def _counters(gguf: Gguf) -> Counters:
    step, samples, tokens, epoch = (
        _count(gguf, f"training.{name}_count") for name in ("iteration", "sample", "token", "epoch")
    )
    seconds = gguf.get_value("training.seconds", float)
    if not 0 <= seconds < MAX_SECONDS:
        raise FileError(
            f"{gguf.path}: training.seconds is out of range (got {seconds})", code="invalid-checkpoint"
        )
    return Counters(step=step, samples=samples, tokens=tokens, epoch=epoch, seconds=seconds)


def _data(gguf: Gguf) -> CursorState | None:
    if "training.shuffle.seed" not in gguf.metadata:
        return None
    epoch, position, row = (
        _count(gguf, f"training.shuffle.{key}") for key in ("epoch", "next_sample", "next_row")
    )
    seed = gguf.get_value("training.shuffle.seed", int)
    fingerprint = gguf.get_value("training.shuffle.fingerprint", str)
    end = _count(gguf, "training.shuffle.end_epoch") if "training.shuffle.end_epoch" in gguf.metadata else 0
    return CursorState(seed=seed, epoch=epoch, position=position, row=row, fingerprint=fingerprint, end=end)


def _stop(gguf: Gguf) -> StopState:
    best, previous = (gguf.get_value(f"training.{key}", float) for key in ("best_loss", "previous_loss"))
    past = gguf.get_value("training.past_loss_values", np.ndarray)
    if math.isnan(best) or past.dtype.kind != "f" or not np.isfinite(past).all():
        raise FileError(
            f"{gguf.path}: training.best_loss or the past losses are invalid (best loss {best})",
            code="invalid-checkpoint",
        )
    count = _count(gguf, "training.no_improvement_count")
    return StopState(
        best_loss=best, previous_loss=previous, no_improvement_count=count, past_loss_values=past.tolist()
    )


def _rewards(gguf: Gguf, value: object) -> Rewards | RolloutStats | None:
    if value is None:
        return None
    match value:
        case [
            float(),
            float(),
            int(),
            int(),
            int(),
            int(),
            float() | None,
            int() | None,
        ] if all(number is None or math.isfinite(number) for number in value):
            return RolloutStats._make(value)
        case [float(), float(), int(), int(), int(), int()] if all(math.isfinite(number) for number in value):
            return Rewards._make(value)
    raise FileError(f"{gguf.path}: training.partial has invalid rewards", code="invalid-checkpoint")


def _rollouts(gguf: Gguf) -> Rollouts | None:
    """Return the answers that the next step may train again; whether they fit the model is checked later."""
    if ROLLOUTS not in gguf.metadata:
        return None
    try:
        stored = json.loads(gguf.get_value(ROLLOUTS, str))
    except (ValueError, RecursionError):
        stored = None
    if isinstance(stored, list) and stored and all(answer is None or _is_answer(answer) for answer in stored):
        return [answer and GeneratedAnswer(**answer) for answer in stored]
    raise FileError(f"{gguf.path}: {ROLLOUTS} has invalid answers", code="invalid-checkpoint")


def _is_answer(value: object) -> bool:
    """Return True if a JSON value describes a generated answer."""
    match value:
        case {
            "prompt": list(prompt),
            "tokens": list(tokens),
            "is_truncated": bool(),
            "reward": float() | int() as reward,
            "log_probs": list(log_probs),
            **others,
        }:
            return (
                not others
                and bool(prompt and tokens)
                and all(type(token) is int and 0 <= token < MAX_TOKEN for token in (*prompt, *tokens))
                and len(log_probs) in (0, len(tokens))
                and all(
                    isinstance(number, float) and math.isfinite(number)
                    for number in (reward * 1.0, *log_probs)
                )
            )
    return False


def _partial(gguf: Gguf) -> PartialStep | None:
    if "training.partial" not in gguf.metadata:
        return None
    match _json(gguf, "training.partial"):
        case {
            "count": int(count),
            "losses": list(losses),
            "extra": {"seconds": int() | float() as seconds, **more},
        }:
            sound = all(isinstance(loss, float) and math.isfinite(loss) for loss in losses)
            if 0 < count == len(losses) and sound and 0 <= seconds < MAX_SECONDS:
                return PartialStep(losses, float(seconds), _rewards(gguf, more.get("rewards")))
    raise FileError(f"{gguf.path}: training.partial has invalid losses", code="invalid-checkpoint")


def _numbers(gguf: Gguf, prefix: str) -> dict[str, float | int | bool]:
    keys = [
        key
        for key in gguf.metadata
        if key.startswith(prefix) and key.removeprefix(prefix) not in DERIVED_KEYS
    ]
    numbers = {key: gguf.metadata[key] for key in keys}
    if invalid := [key for key, value in numbers.items() if not isinstance(value, int | float)]:
        raise FileError(f"{gguf.path}: {quote(invalid[0])} must be a number", code="invalid-checkpoint")
    return numbers


# ---- what must agree -------------------------------------------------------


def find_problem(checkpoint: Checkpoint, parameters: int) -> str | None:
    """Return why a run cannot resume from this checkpoint, or None."""
    order, weights, known = checkpoint.order, checkpoint.weights, registry.optimizers_by_checkpoint_name()
    if checkpoint.kind not in KINDS_OF_RUNS:
        return f"the type of run must be {' or '.join(KINDS_OF_RUNS)} (got {quote(checkpoint.kind)})"
    if checkpoint.optimizer not in known:
        return f"the optimizer must be one of {', '.join(known)} (got {quote(checkpoint.optimizer)})"
    optimizer = known[checkpoint.optimizer]
    if unknown := [name for name in order if name not in weights]:
        return f"parameter {quote(unknown[0])} has no weights"
    if len(set(order)) != len(order) or sum(weights[name].size for name in order) != parameters:
        return (
            f"its {len(order)} parameters must have {parameters} elements in total, and each must occur once"
        )
    if bool(checkpoint.state.partial) != (GRADIENTS in checkpoint.vectors):
        return f"{GRADIENTS} or training.partial is missing; one needs the other"
    return (
        _vector_problem(checkpoint, optimizer, parameters)
        or optimizer.state_problem(checkpoint.optimizer_values)
        or _value_problem(checkpoint, [optimizer.checkpoint_key(name) for name in optimizer.nonnegative])
    )


def _vector_problem(checkpoint: Checkpoint, optimizer: type[Optimizer], parameters: int) -> str | None:
    lengths = optimizer.state_lengths({name: checkpoint.weights[name].shape for name in checkpoint.order})
    shapes = optimizer.required_shapes(checkpoint.optimizer_values, parameters) | {
        name: (length,) for name, length in lengths.items()
    }
    needed = {optimizer.checkpoint_key(name): shape for name, shape in shapes.items()}
    if missing := needed.keys() - checkpoint.vectors.keys():
        return f"tensor {min(missing)} is missing"
    for name, vector in checkpoint.vectors.items():
        wanted = needed.get(name, (parameters,))
        if vector.shape != wanted:
            return f"tensor {quote(name)} must have the shape {list(wanted)} (got {list(vector.shape)})"
    return None


def _value_problem(checkpoint: Checkpoint, squares: list[str]) -> str | None:
    """Return the first tensor with invalid values; minimum and maximum show NaN and infinity without a copy."""
    for name, array in {**checkpoint.weights, **checkpoint.vectors}.items():
        least, greatest = _min_max(array)
        if not (math.isfinite(least) and math.isfinite(greatest)):
            return f"tensor {quote(name)} has values that are not finite"
        if least < 0 and name in squares:
            return f"tensor {name} has values below 0, but holds squares"
    return None


def _min_max(array: np.ndarray) -> tuple[float, float]:
    """Return minimum and maximum, NaN if there is one, and release the pages of the mapped file."""
    flat, extremes = array.reshape(-1), list[np.floating]()
    step = PIECE // flat.itemsize
    for start in range(0, flat.size, step):
        part = flat[start : start + step]
        extremes += [part.min(), part.max()]
        release_pages(flat[: start + step])
    return float(np.min(extremes)), float(np.max(extremes))
