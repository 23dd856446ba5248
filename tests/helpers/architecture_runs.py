"""Runs of ours over the small models of all architectures: their losses, and the gradients of one batch."""

import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from llamatrain.adapters import gguf
from llamatrain.adapters.adapter import Adapter, LoraPair
from llamatrain.model.architectures import find_architecture
from tests.helpers.architecture_family import Shape
from tests.helpers.architecture_models import Arrays, linear, rows, trainable, weights, written
from tests.helpers.cli import Argument, losses, ran, tensors, text
from tests.helpers.cli import rows as shown
from tests.helpers.lora_runs import pairs as pairs_of

CTX, BATCH, STEPS, RATE = 48, 4, 30, 3e-4
RANK, ALPHA = 4, 8.0
PLAIN = ("--schedule", "constant", "--warmup", 0, "--no-pack", "--ctx", CTX, "--batch", BATCH, "--seed", 3)
SGD = (
    "--optimizer",
    "sgd",
    "--beta1",
    0,
    "--weight-decay",
    0,
    "--clip",
    0,
    "--iters",
    1,
    "--precision",
    "f32",
)
HUGE = 100.0  # the rate of a step that is looked at, not gone on from
Pairs = dict[str, tuple[np.ndarray, np.ndarray]]


def data(folder: Path) -> Path:
    """As many pairs as a batch has rows, so that every step sees them all: in what order is of no account."""
    sizes = ((11, 36), (3, 30), (20, 21), (1, 9))
    lines = (
        {"prompt": text(ask, 2 * n), "completion": text(tell, 2 * n + 1)}
        for n, (ask, tell) in enumerate(sizes)
    )
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def base(folder: Path, shape: Shape) -> Path:
    return written(folder / "base.gguf", shape, weights(shape, last=1.0))


def batch(folder: Path, model: Path) -> list[dict[str, list[float]]]:
    """The rows of one step, in a fixed order."""
    made = shown(BATCH, data(folder), "--model", model, *PLAIN[4:])
    return sorted(
        ({key: row[key].tolist() for key in ("tokens", "targets", "weights")} for row in made), key=str
    )


def factors(shape: Shape, seed: int = 3, names: Iterable[str] = ()) -> Pairs:
    """An adapter of every linear weight, or of these, neither half of which is 0."""
    made = {}
    for name in names or linear(shape):
        *experts, out, into = rows(shape)[name][1]
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        a, b = (
            np.float32(0.1) * random.standard_normal((*experts, *axes), np.float32)
            for axes in ((RANK, into), (out, RANK))
        )
        made[name] = (a, b)
    return made


def adapter_of(shape: Shape, made: Pairs) -> Adapter:
    pairs = {name: LoraPair(a, b, ALPHA / RANK) for name, (a, b) in made.items()}
    return Adapter(
        source=Path("made"), alpha=ALPHA, pairs=pairs, architecture=find_architecture(shape.file_arch)
    )


def start(folder: Path, shape: Shape, made: Pairs | None = None) -> Path:
    gguf.write_adapter(folder / "start.gguf", adapter_of(shape, made or factors(shape)))
    return folder / "start.gguf"


def full_gradients(folder: Path, shape: Shape, *more: Argument) -> Arrays:
    """What one plain step subtracts, through its rate."""
    model = base(folder, shape)
    out = folder / "gradients"
    ran("finetune", model, data(folder), "--full", *PLAIN, *SGD, "--lr", HUGE, *more, "--out", out)
    return changes(model, out / "model.gguf", shape)


def changes(model: Path, stepped: Path, shape: Shape) -> Arrays:
    """The gradients that one such step had."""
    before, after = tensors(model), tensors(stepped)
    for name in trainable(shape):
        kind = find_architecture(shape.file_arch).weight_kind(name)
        if kind and kind.trained_as_log:
            before[name], after[name] = np.log(-before[name]), np.log(-after[name])
    return {name: (before[name] - after[name]) / np.float32(HUGE) for name in trainable(shape)}


def lora_gradients(folder: Path, shape: Shape, *more: Argument, made: Pairs | None = None) -> Pairs:
    model, first = base(folder, shape), start(folder, shape, made)
    out = folder / "lora-gradients"
    ran(
        "finetune", model, data(folder), "--lora-init", first, *PLAIN, *SGD, "--lr", HUGE, *more, "--out", out
    )
    before, after = pairs_of(first), pairs_of(out / "adapter.gguf")
    assert before.keys() == after.keys()
    return {
        name: tuple((x - y) / np.float32(HUGE) for x, y in zip(before[name], after[name], strict=True))
        for name in before
    }  # type: ignore[misc]


def full_losses(folder: Path, shape: Shape, precision: str = "f32", *more: Argument) -> list[float]:
    given = ("--lr", RATE, "--iters", STEPS, *PLAIN, "--precision", precision, *more)
    ran("finetune", base(folder, shape), data(folder), "--full", *given, "--out", folder / "full")
    return losses(folder / "full")


def lora_losses(
    folder: Path, shape: Shape, precision: str = "f32", *more: Argument, made: Pairs | None = None
) -> list[float]:
    given = (
        "--lora-init",
        start(folder, shape, made),
        "--lr",
        RATE,
        "--iters",
        STEPS,
        *PLAIN,
        "--precision",
        precision,
        *more,
    )
    ran("finetune", base(folder, shape), data(folder), *given, "--out", folder / "lora")
    return losses(folder / "lora")


# ---- few numbers that say much of all ---------------------------------------


def seen(gradients: Arrays) -> dict[str, list[float]]:
    """Of what all blocks have alike: its norm, and what it has of a fixed direction, which others of this norm have not."""
    kinds: dict[str, list[np.ndarray]] = {}
    for name, each in gradients.items():
        kinds.setdefault(re.sub(r"\d+", "{}", name, count=1), []).append(each.astype(np.float64).ravel())
    return {kind: _seen(np.concatenate(each)) for kind, each in kinds.items()}


def _seen(flat: np.ndarray) -> list[float]:
    return [
        float(np.linalg.norm(flat)),
        float(np.random.default_rng(flat.size).standard_normal(flat.size) @ flat),
    ]


def halves(pairs: Pairs) -> Arrays:
    return {
        f"{name}.lora_{half}": array
        for name, pair in pairs.items()
        for half, array in zip("ab", pair, strict=True)
    }


def corner(logits: np.ndarray) -> list[float]:
    """Some of all, from places before and behind every window."""
    return [float(value) for value in logits[3::12, 60:66].ravel()]
