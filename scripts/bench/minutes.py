"""Compares what `--minutes` chooses with a grid of sizes and rates that have the same time: `bench.py minutes`.

Every run chooses its steps for the time by the same trial, also those whose size and rate are given. Losses are
bits per byte of a validation text, since runs may differ in their vocabularies.
"""

import argparse
import itertools
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import llamatrain
from bench.recipes import split_text
from bench.timer import print_header
from llamatrain.run import choose_model

SHAPES = {embd: (head, layer) for embd, head, layer, _ in choose_model.SHAPES}
MAX_LATE = 0.1  # share of the time by which a run may miss it
MAX_WORSE = 1.02  # loss of what is chosen, relative to the lowest one of the grid


class Result(NamedTuple):
    """A finished run."""

    loss: float  # bits per byte
    late: float  # by what share of the time it missed the time


def train(texts: tuple[Path, Path], args: argparse.Namespace, **fixed: Any) -> Result:
    """Train for the time with some options fixed; print and return the result."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        run = llamatrain.from_scratch(
            texts[0],
            val=[texts[1]],
            minutes=args.minutes,
            threads=args.threads,
            out=Path(folder) / "run",
            **fixed,
        )
        seconds = time.monotonic() - start
        loss = llamatrain.evaluate(run.result, texts[1], threads=args.threads).bits_per_byte
        config = tomllib.loads((run.folder / "config.toml").read_text("utf-8"))
    assert loss is not None
    shape = f"{config['embd']} x {config['layer']}"
    print(
        f"{'' if fixed else 'chosen':6} {shape:>8} {config['vocab-size']:>6} {config['batch'] * config['ctx']:6} "
        f"{config['lr']:7g} {config['iters']:6} {seconds:8.1f} {loss:8.4f}",
        flush=True,
    )
    return Result(loss, seconds / (60 * args.minutes) - 1)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `minutes`."""
    command.add_argument("text", type=Path, help="of at least a few megabytes")
    command.add_argument("--minutes", type=float, default=5.0, help="of each run (5)")
    command.add_argument("--widths", type=int, nargs="+", choices=SHAPES, default=[96, 128, 192, 256])
    command.add_argument("--rates", type=float, nargs="+", default=[0.004, 0.008, 0.016])


def bench_minutes(args: argparse.Namespace) -> int:
    """Print the losses of what is chosen and of the grid; return 1 if it is too late, or learned too little."""
    print_header(args, None)
    print(
        f"\n{args.text}, {args.minutes:g} minutes\n\n{'':6} {'shape':>8} {'vocab':>6} {'step':>6} {'rate':>7} "
        f"{'steps':>6} {'seconds':>8} {'bits':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        texts = split_text(args.text.read_text(encoding="utf-8"), Path(folder))
        chosen = train(texts, args)
        lowest = min(
            train(texts, args, embd=width, head=SHAPES[width][0], layer=SHAPES[width][1], lr=rate).loss
            for width, rate in itertools.product(args.widths, args.rates)
        )
    print(
        f"\nchosen: {chosen.late:+.1%} of the time, {chosen.loss / lowest:.3f} of the lowest loss of the grid"
    )
    return int(abs(chosen.late) > MAX_LATE or chosen.loss > MAX_WORSE * lowest)
