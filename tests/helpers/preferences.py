"""Small sets of answers that are compared, and what a run makes of a batch of them: its loss, and the gradients of an adapter."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llamatrain.adapters import gguf
from llamatrain.adapters.adapter import Adapter
from llamatrain.data.batches import Batch as Laid
from llamatrain.run.prepare import prepare, start_request
from llamatrain.run.request import request_finetune
from llamatrain.train.parallel.step_sync import MicrobatchInfo, sum_totals
from llamatrain.train.programs import TrainPrograms
from tests.helpers.adapter_files import adapter, linear
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small, weights

H = small(ctx=128)
CASES = {
    "orpo": 1,
    "dpo": 1,
    "simpo": 1,
    "kto": 1,
    "kto-clamped": 2,
    "kto-repeated": 1,
}  # by the seed of an adapter: with one KTO's estimate is 0
WORDS = ["red", "green", "blue", "dog", "cat", "sun", "moon", "tree", "fish", "bird"]
NUMBERS: dict[str, dict[str, float]] = {
    "orpo": {"beta": 0.3},
    "dpo": {"beta": 0.2},
    "simpo": {"beta": 1.5, "gamma": 0.6},
    "kto": {"beta": 0.25, "desirable_weight": 1.3, "undesirable_weight": 0.7},
}
Batch = list[tuple[Any, ...]]  # prompt, chosen, rejected; or prompt, answer, whether it is good


def rows(count: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    """Good answers say yes and are short, others no and are long."""
    draw = random.Random(seed)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    return [
        {"prompt": f"{words(1, 5)}?", "chosen": f" yes {words(1, 3)}", "rejected": f" no {words(2, 6)}"}
        for _ in range(count)
    ]


def labelled(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = ("chosen", "rejected", "rejected", "chosen")
    return [
        {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
        for row, kind in zip(pairs, kinds * len(pairs), strict=False)
    ]


def lines(path: Path, made: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


@dataclass(frozen=True)
class Found:
    loss: float
    gradients: dict[str, tuple[np.ndarray, np.ndarray]]  # of a and b, by the names of the weights
    margin: float

    @property
    def told(self) -> dict[str, Any]:
        """Few numbers that say much of all: of each gradient its norm, and what it has of two fixed directions."""
        return {
            "loss": self.loss,
            "margin": self.margin,
            "gradients": {n: [seen(a), seen(b)] for n, (a, b) in self.gradients.items()},
        }


def seen(gradient: np.ndarray) -> list[float]:
    directions = np.random.default_rng(gradient.size).standard_normal((2, gradient.size))
    flat = gradient.astype(np.float64).ravel()
    return [float(np.linalg.norm(flat)), *map(float, directions @ flat / np.sqrt(flat.size))]


def adapter_of(case: str) -> Adapter:
    return adapter(H, linear(H), seed=CASES[case])


def ours(case: str, folder: Path, *, batch: int = 4, **more: Any) -> tuple[Found, Batch]:
    """Of one batch, and what that holds."""
    kind, given = case.partition("-")[0], adapter_of(case)
    folder.mkdir(exist_ok=True)
    model = base(folder / "base.gguf", H, arrays=weights(H))
    gguf.write_adapter(folder / "given.gguf", given)
    made = (
        [row for row in rows(2) for _ in range(2)] if case == "kto-repeated" else rows()
    )  # two answers to each prompt
    data = lines(folder / "data.jsonl", labelled(made) if kind == "kto" else made)
    said = {
        "objective": kind,
        "lora_init": folder / "given.gguf",
        "ctx": 96,
        "batch": batch,
        "grad_acc": 2,
        "precision": "f32",
    }
    request = request_finetune(
        str(model), (str(data),), said | NUMBERS[kind] | {"shuffle": False, "iters": 1, "pack": False} | more
    )
    asked, sources, notes = start_request(request)
    prepared = prepare(asked, sources, None, notes, request.changed)
    plan, leaves = prepared.fitted.plan, prepared.fitted.weights
    prepared.trainable.load_copies(leaves)
    programs = TrainPrograms(plan.graphs, plan.arena, leaves.frozen)
    prepared.trainable.init_weights(programs.weights.parts)
    laid = prepared.data.rows.batch(batch)
    loss = programs.compute_gradients(laid, sum_totals([MicrobatchInfo.from_batch(laid)]), 0)
    rewards = programs.rewards(laid)
    assert programs.grads and rewards
    parts = programs.grads.parts
    pairs = {name: (parts[f"{name}.lora_a"].copy(), parts[f"{name}.lora_b"].copy()) for name in given.pairs}
    margin = rewards.metrics["margin"]
    assert margin is not None
    return Found(loss, pairs, margin), (answers_of if kind == "kto" else pairs_of)(laid)


def pieces(laid: Laid) -> list[tuple[list[int], list[int], int]]:
    """Prompt, answer and number of each piece of a batch, by its own arrays."""
    made = []
    assert laid.answers
    for row in range(len(laid.tokens)):
        for start in np.unique(laid.starts[row]):
            own = (laid.starts[row] == start) & (laid.weights[row] > 0)
            if own.any():
                first, last = np.flatnonzero(own)[[0, -1]]
                prompt = laid.tokens[row, start : first + 1].tolist()
                made.append(
                    (
                        prompt,
                        laid.targets[row, first : last + 1].tolist(),
                        int(laid.answers.sequences[row, first]),
                    )
                )
    return made


def pairs_of(laid: Laid) -> Batch:
    found = {number: (prompt, answer) for prompt, answer, number in pieces(laid)}
    half = laid.tokens.size // 2
    return [
        (prompt, answer, found[number + half][1])
        for number, (prompt, answer) in sorted(found.items())
        if number < half
    ]


def answers_of(laid: Laid) -> Batch:
    assert laid.answers
    return [(prompt, answer, bool(laid.answers.sides[number] > 0)) for prompt, answer, number in pieces(laid)]
