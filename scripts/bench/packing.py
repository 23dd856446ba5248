"""Times an epoch of an adapter over chats, packed and not, in turns with PEFT: `bench.py useful`."""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from bench.finetune import ROWS, add_peer_arguments, has_peft
from bench.processes import PEERS, make_random_model, run_command, run_measured, run_program
from bench.synthetic_chats import make_pairs
from bench.timer import print_header

CTX, BATCH, RATE = 512, 4, 1e-3
EVALUATED = 200  # chats for the loss at the end


@dataclass
class Epoch:
    """A way to run an epoch, and what was measured of it."""

    name: str
    run: Callable[[], dict[str, float]]
    rates: list[float] = field(default_factory=list)  # chats a second
    loss: float = 0.0
    peak: float = 0.0  # bytes

    def run_round(self) -> None:
        """Run the epoch once and add what was measured."""
        result = self.run()
        self.rates.append(result["chats"] / result["seconds"])
        self.loss = result["loss"]
        self.peak = max(self.peak, result["peak"])


def build_epoch(
    base: Path, folder: Path, count: int, options: list[object]
) -> Callable[[], dict[str, float]]:
    """Return a function that runs an epoch of `llamatrain finetune` and evaluates its adapter."""
    data = folder / "chats.jsonl"
    evaluated = folder / "some.jsonl"
    out = folder / "run"

    def run() -> dict[str, float]:
        words = ["finetune", base, data, "--epochs", 1, "--ctx", CTX, "--lr", RATE, "--schedule", "constant"]
        words += ["--warmup", 0, "--weight-decay", 0, "--out", out, "--overwrite", *options]
        peak = run_measured(*words)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        seconds = sum(line["seconds"] for line in lines[1:])
        result = run_command(
            "evaluate", base, evaluated, "--lora", out / "adapter.gguf", "--ctx", CTX, "--json"
        )
        # the last step may begin another epoch; all steps but the first are counted
        chats = count * (len(lines) - 1) / len(lines)
        return {"seconds": seconds, "chats": chats, "loss": json.loads(result)["loss"], "peak": peak}

    return run


def run_peft_epoch(words: list[object]) -> dict[str, float]:
    """Run an epoch of PEFT."""
    return dict(json.loads(run_program(words).splitlines()[-1]))


def write_chats(path: Path, count: int) -> None:
    """Write prompts with completions as JSON lines."""
    rows = [{"prompt": pair.prompt, "completion": pair.answer} for pair in make_pairs(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def build_epochs(folder: Path, args: argparse.Namespace) -> Iterator[Epoch]:
    """Yield ours, packed and not, and PEFT's, with padding and with packing."""
    write_chats(folder / "chats.jsonl", args.count)
    write_chats(folder / "some.jsonl", min(args.count, EVALUATED))
    base = folder / "base.gguf"
    make_random_model(base, "--shape", args.shape, "--type", args.type)
    threads = ["--threads", args.threads]
    packed = ["--batch", BATCH, *threads]
    yield Epoch("packed", build_epoch(base, folder, args.count, packed))
    unpacked = ["--no-pack", "--batch", args.chats, *threads]
    yield Epoch("--no-pack", build_epoch(base, folder, args.count, unpacked))
    if args.torch and has_peft(args.peer):
        for mode, batch in (("padding", args.chats), ("packing", BATCH)):
            words = [args.peer, PEERS / "peft_chats.py", base, args.count, RATE, CTX, batch, args.threads]
            yield Epoch(f"peft, {mode}", partial(run_peft_epoch, [*words, mode]))


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `useful`."""
    command.add_argument("--shape", choices=ROWS, default="small")
    command.add_argument("--type", default="q8_0")
    command.add_argument("--count", type=int, default=1000, help="chats")
    command.add_argument(
        "--chats", type=int, default=BATCH, help="in a step without packing; a packed row has about three"
    )
    add_peer_arguments(command)


def bench_packing(args: argparse.Namespace) -> int:
    """Time an epoch over chats, packed and not, in turns with PEFT."""
    print_header(args, None)
    with tempfile.TemporaryDirectory() as folder:
        epochs = list(build_epochs(Path(folder), args))
        for _ in range(args.rounds):
            for epoch in epochs:
                epoch.run_round()
    trained = sum(len(pair.answer) + 1 for pair in make_pairs(args.count)) / args.count
    steps = f"a step has {BATCH} packed rows of {CTX}, or {args.chats} chats"
    print(f"\n{args.shape} in {args.type}, rank 8 on all linear weights; {args.count} chats, {steps}")
    columns = f"{'slowest..fastest':>17} {'trained tokens/s':>17} {'loss':>8} {'peak MB':>8} {'x first':>8}"
    print(f"\n{'run':14} {'chats/s':>8} {columns}")
    first = median(epochs[0].rates)
    for epoch in epochs:
        rate = median(epoch.rates)
        spread = f"{min(epoch.rates):.4g}..{max(epoch.rates):.4g}"
        quality = f"{epoch.loss:8.4f} {epoch.peak / 1e6:8.0f} {rate / first:8.3f}"
        print(f"{epoch.name:14} {rate:8.2f} {spread:>17} {rate * trained:17.1f} {quality}")
    return 0
