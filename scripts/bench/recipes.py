"""Compares recipes by the tokens and seconds that they need for the same loss: `bench.py quality`.

AdamW trains for all steps, and its mean loss on a fixed validation text is the target. The other recipes train
for shares of these steps, each with a schedule that ends there, so that no run is stopped before its learning
rate has fallen. The share that reaches the target is interpolated in the logarithm of the tokens. Every recipe
is tuned first, for the steps of AdamW or for the largest share: all pairs of its learning rates and weight
decays are tried with one seed.
"""

import argparse
import itertools
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import llamatrain
from bench.timer import print_header

SHAPE: dict[str, Any] = {"embd": 128, "head": 4, "layer": 4, "ctx": 128, "batch": 8}
VOCABULARY = "2048"
BLOCK = 20_000  # characters of text that are held out, or not, together
HELD_OUT = 25  # one of this many blocks is for validation
MAX_SHARE = 0.55  # of AdamW's tokens that the best recipe may need
REFERENCE = "adamw"
WARMUP = 10  # one of this many steps


class Recipe(NamedTuple):
    """Options of a run, and the values among which the best are found."""

    options: Mapping[str, Any]
    rates: Sequence[float]
    decays: Sequence[float]


FALLING: dict[str, Any] = {"schedule": "linear", "lr_min": 0.0, "beta2": 0.95}
ADAMUON: dict[str, Any] = {"optimizer": "adamuon", "embd_std": 0.02, **FALLING}
RECIPES = {
    "adamw": Recipe(
        {"optimizer": "adamw", "beta1": 0.8, **FALLING}, (0.003, 0.0045, 0.006, 0.008), (0.1, 0.3)
    ),
    "muon": Recipe({"optimizer": "muon", "beta1": 0.8, **FALLING}, (0.003, 0.006, 0.012), (0.1, 0.3)),
    "adamuon": Recipe(ADAMUON, (0.008, 0.012, 0.016), (0.1, 0.3)),
    # heads whose queries and keys are normalized
    "qk-norm": Recipe({**ADAMUON, "arch": "qwen3"}, (0.008, 0.012, 0.016), (0.1, 0.3)),
}


class Texts(NamedTuple):
    """The files of a comparison."""

    training: Path
    validation: Path
    vocabulary: Path  # a model with the vocabulary of the training text


@dataclass(frozen=True)
class Result:
    """A finished run: its loss on the validation text, and what it took."""

    loss: float
    tokens: int
    seconds: float


def split_text(text: str, folder: Path) -> tuple[Path, Path]:
    """Write the blocks for training and those for validation to files, and return their paths."""
    blocks = [text[start : start + BLOCK] for start in range(0, len(text), BLOCK)]
    training, validation = folder / "training.txt", folder / "validation.txt"
    training.write_text(
        "".join(block for i, block in enumerate(blocks) if i % HELD_OUT != HELD_OUT // 2), "utf-8"
    )
    validation.write_text("".join(blocks[HELD_OUT // 2 :: HELD_OUT]), "utf-8")
    return training, validation


def prepare_texts(text: str, folder: Path, threads: int) -> Texts:
    """Split a text and learn a vocabulary, which all runs share."""
    training, validation = split_text(text, folder)
    run = llamatrain.from_scratch(
        training,
        **SHAPE,
        vocab_size=VOCABULARY,
        iters=0,
        threads=threads,
        out=folder / "vocabulary",
    )
    return Texts(training, validation, run.folder / "model.gguf")


def train(texts: Texts, name: str, steps: int, seed: int, threads: int, **options: Any) -> Result:
    """Train a small model; print and return the result."""
    with tempfile.TemporaryDirectory() as folder:
        run = llamatrain.from_scratch(
            texts.training,
            val=[texts.validation],
            vocab_from=texts.vocabulary,
            **SHAPE,
            **RECIPES[name].options,
            **options,
            iters=steps,
            warmup=steps // WARMUP,
            seed=seed,
            eval_every=steps,
            save_every=0,
            threads=threads,
            out=Path(folder) / "run",
        )
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    last = next(line for line in reversed(lines) if "total_seconds" in line)
    result = Result(run.validations[-1][1], last["tokens"], last["total_seconds"])
    print(
        f"{name:8} {options['lr']:6g} {options['weight_decay']:5g} {seed:4} {result.tokens:10,} "
        f"{result.seconds:7.1f} {result.loss:8.4f}",
        flush=True,
    )
    return result


def tune(texts: Texts, name: str, steps: int, threads: int) -> tuple[dict[str, float], Result]:
    """Return the best rate and decay of a recipe for some steps with the first seed, and their result."""
    recipe = RECIPES[name]
    results = {
        (rate, decay): train(texts, name, steps, 0, threads, lr=rate, weight_decay=decay)
        for rate, decay in itertools.product(recipe.rates, recipe.decays)
    }
    rate, decay = min(results, key=lambda pair: results[pair].loss)
    return {"lr": rate, "weight_decay": decay}, results[rate, decay]


def find_share(losses: Mapping[float, float], target: float) -> float:
    """Return the share of the tokens at which a recipe has the target, given its losses by share.

    Losses are interpolated, or extrapolated from the two nearest shares, in the logarithm of the share.
    """
    shares = sorted(losses)
    pairs = list(itertools.pairwise(shares))
    low, high = next((pair for pair in pairs if losses[pair[1]] <= target), pairs[-1])
    if losses[low] == losses[high]:
        return math.inf
    part = (losses[low] - target) / (losses[low] - losses[high])
    return low * (high / low) ** part


def describe(results: Sequence[Result]) -> str:
    """Return mean, spread and time of the results of several seeds."""
    losses = [result.loss for result in results]
    return f"{mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f}), {mean(r.seconds for r in results):.1f} s"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `quality`."""
    command.add_argument("text", type=Path, help="of at least a few megabytes, in a natural language")
    command.add_argument("--steps", type=int, default=1200, help="steps of AdamW")
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.55], help="of the steps")
    command.add_argument("--recipes", nargs="+", choices=[*RECIPES][1:], default=[*RECIPES][2:])


def bench_recipes(args: argparse.Namespace) -> int:
    """Print what each recipe needs for the loss of tuned AdamW; return 1 if the best one needs too much."""
    print_header(args, None)
    print(f"\n{args.text}, {args.steps} steps of AdamW")
    print(f"\n{'recipe':8} {'rate':>6} {'decay':>5} {'seed':>4} {'tokens':>10} {'seconds':>7} {'loss':>8}")
    with tempfile.TemporaryDirectory() as folder:
        texts = prepare_texts(args.text.read_text(encoding="utf-8"), Path(folder), args.threads)
        best, first = tune(texts, REFERENCE, args.steps, args.threads)
        others = range(1, args.seeds)
        references = [first, *(train(texts, REFERENCE, args.steps, s, args.threads, **best) for s in others)]
        lines, shares = [f"{REFERENCE:8} {describe(references)}"], list[float]()
        for name in args.recipes:
            best, _ = tune(texts, name, round(max(args.shares) * args.steps), args.threads)
            runs = {
                share: [
                    train(texts, name, round(share * args.steps), seed, args.threads, **best)
                    for seed in range(args.seeds)
                ]
                for share in args.shares
            }
            lines += [
                f"{name:8} {describe(results)} with {share:g} of the tokens"
                for share, results in runs.items()
            ]
            target = mean(result.loss for result in references)
            losses = {share: mean(result.loss for result in results) for share, results in runs.items()}
            shares.append(find_share(losses, target))
            by_seed = (
                find_share(
                    {share: results[seed].loss for share, results in runs.items()}, references[seed].loss
                )
                for seed in range(args.seeds)
            )
            seeds = ", ".join(f"{share:.2f}" for share in by_seed)
            lines.append(
                f"{name:8} reaches AdamW's loss with {shares[-1]:.2f} of its tokens (by seed: {seeds})"
            )
    print("\n" + "\n".join(lines))
    return int(min(shares) > MAX_SHARE)
