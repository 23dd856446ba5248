"""What `bench.py readme` prints: README's table of speed and memory, beside torch and PEFT, in markdown."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tuning
from timing import in_turns, machine, versions

from tests.helpers.llama_step import LlamaStep
from tests.helpers.random_models import M, S, Size

SIZES = {"S": S, "M": M}
HEAD = "| | tokens/s | PyTorch's | ratio | memory | PyTorch's |\n| --- | ---: | ---: | ---: | ---: | ---: |"
Figures = tuple[
    float, int
]  # tokens a second, and the most bytes that the process had: 0 where that is not known


@dataclass(frozen=True)
class Row:
    what: str
    ours: Figures
    theirs: Figures | None

    @property
    def line(self) -> str:
        theirs = self.theirs or (0.0, 0)
        ratio = f"{self.ours[0] / theirs[0]:.2f}" if theirs[0] else "–"
        cells = [speed(self.ours[0]), speed(theirs[0]), ratio, size(self.ours[1]), size(theirs[1])]
        return f"| {self.what} | {' | '.join(cells)} |"


def speed(tokens: float) -> str:
    return (f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.1f}") if tokens else "–"


def size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes else "–"


def caption(args: argparse.Namespace, torch: Any) -> str:
    told = "Tokens a second, by whole steps of so many tokens, and the most memory of a process"
    return f"{told}, on {machine(args)}; {versions(torch)}. A ratio above 1 is in llamatrain's favour."


def steps(
    args: argparse.Namespace, torch: Any, torch_step: Callable[..., Any], peak_of: Callable[..., Any]
) -> Iterator[Row]:
    """Of new models, in turns with torch, which compiles them."""
    for name, each in SIZES.items():
        for precision in args.precision:
            step = LlamaStep(each, precision=precision, kernels=args.kernels, threads=args.threads, kept=True)
            ours, theirs = in_turns(
                step, torch_step(torch, each, precision, True) if torch else None, seconds=args.seconds
            )
            assert ours
            tokens = each.batch * each.ctx * 1e3
            peaks = [
                peak_of(who, name, precision, "none", args).get("peak", 0) if torch else 0
                for who in ("ours", "compiled")
            ]
            own = (tokens / ours.quartiles()[1], peaks[0])
            yield Row(
                told_of(each, precision), own, (tokens / theirs.quartiles()[1], peaks[1]) if theirs else None
            )


def told_of(each: Size, precision: str) -> str:
    millions = (
        sum(
            rows * columns for rows, columns in (shape for shape in each.h.shapes.values() if len(shape) == 2)
        )
        / 1e6
    )
    return f"a new model of {millions:.0f} million weights; {each.batch * each.ctx:,} tokens, {precision}"


def adapters(args: argparse.Namespace) -> Iterator[Row]:
    """On a quantised base, by the command, in turns with PEFT on one in bf16: the faster of its two ways."""
    ctx, batch = tuning.ROWS[args.shape]
    with tempfile.TemporaryDirectory() as folder:
        peer = args.peer if args.torch else None
        mine, theirs = tuning.contenders([args.type], args.shape, ["bf16"], args.threads, peer, Path(folder))
        for _ in range(args.rounds):
            for each in (*mine, *theirs):
                each.round()
    best = min(theirs, key=lambda each: median(each.seconds), default=None)
    for each, where in zip(mine, ("left in its file", "copied to bf16 once"), strict=True):
        what = f"an adapter of a base of {args.shape} weights in {args.type.upper()}, {where}; {batch * ctx} tokens, bf16"
        yield Row(what, of(each, ctx * batch), of(best, ctx * batch) if best else None)


def of(each: tuning.Contender, tokens: int) -> Figures:
    return tokens / median(each.seconds), each.peak


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=tuning.ROWS, default="1.1b", help="of the base")
    parser.add_argument("--type", default="q4_k", help="of the base's weights")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peer", default=sys.executable, help="a Python that has transformers and peft")


def bench(
    args: argparse.Namespace, torch: Any, torch_step: Callable[..., Any], peak_of: Callable[..., Any]
) -> int:
    print(HEAD, flush=True)
    for row in steps(args, torch, torch_step, peak_of):
        print(row.line, flush=True)
    for row in adapters(args):
        print(row.line, flush=True)
    print(f"\n{caption(args, torch)}")
    return 0
