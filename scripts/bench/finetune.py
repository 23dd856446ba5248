"""Times runs of `llamatrain finetune` in turns with PEFT, on bases of one shape: `bench.py finetune`."""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.processes import PEERS, make_random_model, run_command, run_measured, run_program
from bench.timer import print_header
from llamatrain.platform import cpu

ROWS = {
    "1.1b": (512, 1),
    "7b": (256, 1),
    "small": (64, 8),
    "qwen35-0.8b": (512, 1),
    "3b-experts": (512, 4),
}  # tokens in a row, rows in a batch
MODES = ["eager", "compiled"]
STEPS = 5  # of a run; the first of them is not counted


@dataclass
class Contender:
    """A kind of run, and what was measured of it."""

    name: str
    run: Callable[[], tuple[list[float], int]]  # returns the seconds of its steps and its peak memory
    planned: int = 0  # bytes
    seconds: list[float] = field(default_factory=list)
    peak: int = 0  # bytes

    def run_round(self) -> None:
        """Run once and add what was measured."""
        seconds, peak = self.run()
        self.seconds += seconds
        self.peak = max(self.peak, peak)


def build_contender(name: str, base: Path, text: Path, folder: Path, options: list[object]) -> Contender:
    """Return a run of `llamatrain finetune` on a base, with the memory that its plan expects."""
    words = [base, text, "--iters", STEPS, *options]
    plan = json.loads(run_command("plan", "finetune", *words, "--json"))

    def run() -> tuple[list[float], int]:
        out = folder / "run"
        peak = run_measured("finetune", *words, "--out", out, "--overwrite")
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return [line["seconds"] for line in lines if "grad_norm" in line][1:], peak

    return Contender(name, run, plan["total"])


def choose_peer_precision() -> str:
    """Return bf16, or f32 on processors without products in bf16, where torch's take many times as long."""
    return "bf16" if "avx512bf16" in cpu.cpu_features() else "f32"


def build_peft_contender(python: str, shape: str, mode: str, threads: int, precision: str) -> Contender:
    """Return a run of PEFT on a base of the same shape; `mode` is eager or compiled."""
    ctx, batch = ROWS[shape]
    words = [python, PEERS / "peft_step.py", shape, ctx, batch, threads, mode, STEPS - 1, precision]

    def run() -> tuple[list[float], int]:
        result = json.loads(run_program(words).splitlines()[-1])
        return result["seconds"], result["peak"]

    return Contender(f"peft {precision} {mode}", run)


def has_peft(python: str) -> bool:
    """Return whether a Python can import PEFT and transformers."""
    done = subprocess.run([python, "-c", "import peft, transformers"], capture_output=True, check=False)
    return done.returncode == 0


def write_text(folder: Path, tokens: int) -> Path:
    """Write random text that is long enough for runs with `tokens` tokens in a step."""
    text, letters = folder / "text.txt", random.Random(0)
    text.write_text("".join(letters.choice("abcdefgh ") for _ in range(2 * STEPS * tokens)))
    return text


def precision_options(precision: str) -> list[object]:
    """Return the options of a run whose products with the base are in a number type."""
    if precision == "int8":
        return ["--base-precision", "int8"]
    return ["--precision", precision, "--base-precision", "same"]


def build_contenders(
    types: list[str],
    shape: str,
    precisions: list[str],
    threads: int,
    peer: str | None,
    modes: list[str],
    peer_precisions: list[str],
    folder: Path,
) -> tuple[list[Contender], list[Contender]]:
    """Return our contenders and PEFT's.

    Ours are a run on a base of each type, with its weights used in the file's format and also copied to bf16 or
    int8. With int8, all products but those with the base are in the processor's faster precision.
    """
    ctx, batch = ROWS[shape]
    text = write_text(folder, ctx * batch)
    ours = []
    for kind in types:
        base = folder / f"{kind}.gguf"
        make_random_model(base, "--shape", shape, "--type", kind)
        for precision in precisions:
            for cache in ("off",) if precision == "f32" else ("off", precision):
                options: list[object] = ["--ctx", ctx, "--batch", batch, "--cache-base", cache]
                options += ["--threads", threads]
                options += precision_options(precision)
                ours.append(build_contender(f"{kind} {precision} {cache}", base, text, folder, options))
    theirs = []
    if peer and has_peft(peer):
        theirs = [
            build_peft_contender(peer, shape, mode, threads, precision)
            for precision in peer_precisions
            for mode in modes
        ]
    return ours, theirs


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `finetune`."""
    command.add_argument("types", nargs="*", default=["q4_0"])
    command.add_argument("--shape", choices=ROWS, default="1.1b")
    command.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES, help="of PEFT; large models compile for long"
    )
    command.add_argument(
        "--peer-precision",
        nargs="+",
        choices=["f32", "bf16"],
        default=[choose_peer_precision()],
        help="of PEFT's base",
    )
    add_peer_arguments(command)


def add_peer_arguments(command: argparse.ArgumentParser) -> None:
    """Add the number of rounds and the Python of the peer."""
    command.add_argument("--rounds", type=int, default=2)
    command.add_argument("--peer", default=sys.executable, help="a Python that has transformers and peft")


def bench_finetune(args: argparse.Namespace) -> int:
    """Time the command on a base of each type, in turns with PEFT."""
    print_header(args, None)
    ctx, batch = ROWS[args.shape]
    peer = args.peer if args.torch else None
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = build_contenders(
            args.types,
            args.shape,
            args.precision,
            args.threads,
            peer,
            args.modes,
            args.peer_precision,
            Path(folder),
        )
        for _ in range(args.rounds):
            for contender in (*ours, *theirs):
                contender.run_round()
    best = min((median(contender.seconds) for contender in theirs), default=0.0)
    columns = f"{'tokens/s':>9} {'slowest..fastest':>17} {'peak MB':>9} {'planned MB':>11} {'plan/peak':>10}"
    print(f"\n{args.shape}, ctx {ctx}, batch {batch}, rank 8 on all linear weights")
    print(f"\n{'run':18} {columns} {'x peft':>7}")
    for contender in (*ours, *theirs):
        print(format_row(contender, ctx * batch, best))
    return 0


def format_row(contender: Contender, tokens: int, best_peer: float, width: int = 18) -> str:
    """Return a line of the table; `best_peer` is the time that others are compared with, 0 if there is none."""
    rate = tokens / median(contender.seconds)
    low = tokens / max(contender.seconds)
    high = tokens / min(contender.seconds)
    planned = f"{'-':>11} {'-':>10}"
    if contender.planned:
        planned = f"{contender.planned / 1e6:11.1f} {contender.planned / contender.peak:10.3f}"
    ratio = f"{best_peer * rate / tokens:7.2f}" if best_peer else f"{'-':>7}"
    speed = f"{rate:9.1f} {f'{low:.4g}..{high:.4g}':>17}"
    return f"{contender.name:{width}} {speed} {contender.peak / 1e6:9.1f} {planned} {ratio}"
