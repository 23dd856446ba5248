"""Compares quantization-aware training with rounding after training: `bench.py rounding`."""

import argparse
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llamatrain
from bench.plays import make_play
from bench.timer import print_header

SHAPE: dict[str, Any] = {"vocab_size": "512", "embd": 64, "head": 4, "layer": 4, "ctx": 64, "batch": 16}
VALIDATION = 0.05  # share of the text
MIN_RECOVERED = 0.5  # share of what rounding loses


@dataclass(frozen=True)
class Comparison:
    """Perplexities on text that was not trained on. Both runs took the same steps from the same model."""

    exact: float  # of the run without rounding, in float32
    rounded_after: float  # the same model, rounded when it was exported
    rounded_in_training: float  # of the run with --quant-aware, as exported

    @property
    def lost(self) -> float:
        """The perplexity that rounding after training loses."""
        return self.rounded_after - self.exact

    @property
    def recovered(self) -> float:
        """The share of it that quantization-aware training recovers."""
        return (self.rounded_after - self.rounded_in_training) / self.lost


def compare_rounding(
    train: Path, validation: Path, folder: Path, *, kind: Any, steps: int, more: int, seed: int, threads: int
) -> Comparison:
    """Train a model, train it for `more` steps with and without rounding, and measure the exported files."""
    common: dict[str, Any] = {"seed": seed, "threads": threads, "eval_every": 0, "save_every": 0}
    first = llamatrain.from_scratch(train, **SHAPE, **common, iters=steps, lr=3e-3, out=folder / "first")
    common |= {"full": True, "ctx": SHAPE["ctx"], "batch": SHAPE["batch"], "iters": more, "lr": 1e-3}
    exact = llamatrain.finetune(first.result, train, **common, out=folder / "exact")
    trained = llamatrain.finetune(first.result, train, **common, quant_aware=kind, out=folder / "rounded")
    exported = llamatrain.export_lora(exact.result, type=kind, out=folder / "exported.gguf")

    def perplexity(model: Path) -> float:
        found = llamatrain.evaluate(model, validation, ctx=SHAPE["ctx"], threads=threads).perplexity
        assert found is not None
        return found

    return Comparison(*map(perplexity, (exact.result, exported.path, trained.result)))


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `rounding`."""
    command.add_argument("text", nargs="?", type=Path, help="default: a synthetic text")
    command.add_argument("--type", default="q4_0")
    command.add_argument("--steps", type=int, default=1000, help="of the first model")
    command.add_argument("--more", type=int, default=500, help="steps with and without rounding")
    command.add_argument("--seeds", type=int, default=1)


def bench_rounding(args: argparse.Namespace) -> int:
    """Print perplexities for each seed; return 1 if less than half of what rounding loses is recovered."""
    print_header(args, None)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        text = args.text.read_text() if args.text else make_play(random.Random(1), 1 << 20)
        border = int((1 - VALIDATION) * len(text))
        train, validation = home / "train.txt", home / "validation.txt"
        train.write_text(text[:border])
        validation.write_text(text[border:])
        print(f"\n{args.text or 'a synthetic text'}, {args.steps} steps, then {args.more} more; {args.type}")
        print(
            f"\n{'seed':>4} {'float32':>9} {'rounded after':>14} {'rounded in training':>20} {'recovered':>10}"
        )
        shares = []
        for seed in range(args.seeds):
            found = compare_rounding(
                train,
                validation,
                home / str(seed),
                kind=args.type,
                steps=args.steps,
                more=args.more,
                seed=seed,
                threads=args.threads,
            )
            shares.append(found.recovered)
            print(
                f"{seed:4} {found.exact:9.4f} {found.rounded_after:14.4f} {found.rounded_in_training:20.4f} "
                f"{found.recovered:10.0%}",
                flush=True,
            )
    return int(min(shares) < MIN_RECOVERED)
