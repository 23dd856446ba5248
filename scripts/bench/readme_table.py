"""Prints the table of README: speed and memory compared to torch and PEFT, in Markdown."""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import finetune
from bench.llama_step import LlamaStep
from bench.memory import measure_step
from bench.random_models import M, S, Size
from bench.steps import build_torch_step
from bench.timer import describe_machine, describe_versions, import_torch, time_in_turns

SIZES = {"S": S, "M": M}
HEAD = "| | tokens/s | PyTorch's | ratio | memory | PyTorch's |\n| --- | ---: | ---: | ---: | ---: | ---: |"
Figures = tuple[float, int]  # tokens a second, and the peak memory in bytes (0 if unknown)


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    title: str
    ours: Figures
    theirs: Figures | None

    @property
    def line(self) -> str:
        """The row in Markdown."""
        theirs = self.theirs or (0.0, 0)
        ratio = f"{self.ours[0] / theirs[0]:.2f}" if theirs[0] else "–"
        cells = [format_speed(self.ours[0]), format_speed(theirs[0]), ratio]
        cells += [format_bytes(self.ours[1]), format_bytes(theirs[1])]
        return f"| {self.title} | {' | '.join(cells)} |"


def format_speed(tokens: float) -> str:
    """Format tokens a second."""
    if not tokens:
        return "–"
    return f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.1f}"


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes in GB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes else "–"


def format_caption(args: argparse.Namespace, torch: Any) -> str:
    """Return the sentence below the table."""
    what = "Tokens a second of whole steps, and the peak memory of a process"
    machine = f"{describe_machine(args.threads)}; {describe_versions(torch)}"
    return f"{what}, on {machine}. A ratio above 1 is in llamatrain's favor."


def bench_new_models(args: argparse.Namespace, torch: Any) -> Iterator[Row]:
    """Yield rows of new models, timed in turns with torch.compile."""
    for name, size in SIZES.items():
        for precision in args.precision:
            step = LlamaStep(
                size, precision=precision, kernels=args.kernels, threads=args.threads, two_programs=True
            )
            peer = build_torch_step(torch, size, precision, True) if torch else None
            ours, theirs = time_in_turns(step, peer, seconds=args.seconds)
            assert ours
            tokens = size.batch * size.ctx * 1e3
            peaks = [
                measure_step(program, name, precision, "none", args.threads).get("peak", 0) if torch else 0
                for program in ("ours", "compiled")
            ]
            our_figures = (tokens / ours.quartiles()[1], peaks[0])
            their_figures = (tokens / theirs.quartiles()[1], peaks[1]) if theirs else None
            yield Row(describe_model(size, precision), our_figures, their_figures)


def describe_model(size: Size, precision: str) -> str:
    """Return the title of a new model's row."""
    matrices = [shape for shape in size.h.shapes.values() if len(shape) == 2]
    millions = sum(rows * columns for rows, columns in matrices) / 1e6
    return f"a new model of {millions:.0f} million weights; {size.batch * size.ctx:,} tokens, {precision}"


def bench_adapters(args: argparse.Namespace) -> Iterator[Row]:
    """Yield rows of adapters on a quantized base, compared to the faster mode of PEFT."""
    ctx, batch = finetune.ROWS[args.shape]
    tokens = ctx * batch
    with tempfile.TemporaryDirectory() as folder:
        peer = args.peer if args.torch else None
        ours, theirs = finetune.build_contenders(
            [args.type],
            args.shape,
            ["bf16"],
            args.threads,
            peer,
            finetune.MODES,
            [finetune.choose_peer_precision()],
            Path(folder),
        )
        for _ in range(args.rounds):
            for contender in (*ours, *theirs):
                contender.run_round()
    best = min(theirs, key=lambda contender: median(contender.seconds), default=None)
    for contender, storage in zip(ours, ("left in its file", "copied to bf16 once"), strict=True):
        base = f"a base of {args.shape} weights in {args.type.upper()}, {storage}"
        title = f"an adapter of {base}; {tokens} tokens, bf16"
        yield Row(title, get_figures(contender, tokens), get_figures(best, tokens) if best else None)


def get_figures(contender: finetune.Contender, tokens: int) -> Figures:
    """Return the speed and the memory of a contender."""
    return tokens / median(contender.seconds), contender.peak


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `readme`."""
    command.add_argument("--shape", choices=finetune.ROWS, default="1.1b", help="of the base")
    command.add_argument("--type", default="q4_k", help="of the base's weights")
    finetune.add_peer_arguments(command)


def print_table(args: argparse.Namespace) -> int:
    """Print the table row by row, and its caption."""
    torch = import_torch(args.threads, args.torch)
    print(HEAD, flush=True)
    for row in bench_new_models(args, torch):
        print(row.line, flush=True)
    for row in bench_adapters(args):
        print(row.line, flush=True)
    print(f"\n{format_caption(args, torch)}")
    return 0
