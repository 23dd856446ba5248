"""What `bench.py useful` times: an epoch of an adapter over a chat set, by `llamatrain finetune` and by PEFT, in turns."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from chats import pairs
from tuning import COMMAND, HERE, ROWS, has_peft, measured

CTX, BATCH, RATE = 512, 4, 1e-3
JUDGED = 200  # chats that the loss at the end is of


@dataclass
class Epoch:
    """Someone's, and what came of it each time."""

    name: str
    run: Callable[[], dict[str, float]]
    rates: list[float] = field(default_factory=list)  # chats a second
    loss: float = 0.0
    peak: float = 0.0

    def round(self) -> None:
        found = self.run()
        self.rates.append(found["chats"] / found["seconds"])
        self.loss, self.peak = found["loss"], max(self.peak, found["peak"])


def said(words: list[str]) -> str:
    done = subprocess.run(words, cwd=HERE.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed: {done.stderr[-1000:]}")
    return done.stdout


def ours(base: Path, folder: Path, count: int, options: list[str]) -> Callable[[], dict[str, float]]:
    data, some, out = folder / "chats.jsonl", folder / "some.jsonl", folder / "run"

    def run() -> dict[str, float]:
        words = ["finetune", base, data, "--epochs", 1, "--ctx", CTX, "--lr", RATE, "--schedule", "constant"]
        more = ["--warmup", 0, "--weight-decay", 0, "--out", out, "--overwrite", *options]
        peak = measured([*COMMAND, *map(str, (*words, *more))])
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        seconds = sum(line["seconds"] for line in lines[1:])
        judged = [base, some, "--lora", out / "adapter.gguf", "--ctx", CTX, "--json"]
        loss = json.loads(said([*COMMAND, "evaluate", *map(str, judged)]))["loss"]
        # the last step may begin another epoch; all steps but the first are counted
        rows = count * (len(lines) - 1) / len(lines)
        return {"seconds": seconds, "chats": rows, "loss": loss, "peak": peak}

    return run


def theirs(words: list[str]) -> dict[str, float]:
    return dict(json.loads(said(words).splitlines()[-1]))


def written(path: Path, count: int) -> None:
    path.write_text(
        "".join(json.dumps(each._asdict()).replace("answer", "completion") + "\n" for each in pairs(count))
    )


def epochs(
    folder: Path, shape: str, kind: str, count: int, chats: int, threads: int, peer: str | None
) -> Iterator[Epoch]:
    written(folder / "chats.jsonl", count)
    written(folder / "some.jsonl", min(count, JUDGED))
    base = folder / "base.gguf"
    said([sys.executable, str(HERE / "random_model.py"), str(base), "--shape", shape, "--type", kind])
    for name, options in (("packed", ["--batch", BATCH]), ("--no-pack", ["--no-pack", "--batch", chats])):
        yield Epoch(name, ours(base, folder, count, [*map(str, options), "--threads", str(threads)]))
    for how, batch in (("padding", chats), ("packing", BATCH)) if peer and has_peft(peer) else ():
        words = [peer, HERE / "peft_chats.py", base, count, RATE, CTX, batch, threads, how]
        yield Epoch(f"peft, {how}", partial(theirs, list(map(str, words))))


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--shape", choices=ROWS, default="small")
    command.add_argument("--type", default="q8_0")
    command.add_argument("--count", type=int, default=1000, help="chats")
    command.add_argument(
        "--chats", type=int, default=BATCH, help="of a step without packing; a row has about three"
    )
    command.add_argument("--rounds", type=int, default=2)
    command.add_argument("--peer", default=sys.executable, help="a Python that has transformers and peft")


def bench(shape: str, kind: str, count: int, chats: int, threads: int, rounds: int, peer: str | None) -> int:
    with tempfile.TemporaryDirectory() as folder:
        runs = list(epochs(Path(folder), shape, kind, count, chats, threads, peer))
        for _ in range(rounds):
            for each in runs:
                each.round()
    trained = sum(len(each.answer) + 1 for each in pairs(count)) / count
    steps = f"a step has {BATCH} packed rows of {CTX}, or {chats} chats"
    print(f"\n{shape} in {kind}, rank 8 on all linear weights; {count} chats, {steps}")
    names = f"{'slowest..fastest':>17} {'trained tokens/s':>17} {'loss':>8} {'peak MB':>8} {'x first':>8}"
    print(f"\n{'run':14} {'chats/s':>8} {names}")
    first = median(runs[0].rates)
    for each in runs:
        rate = median(each.rates)
        spread = f"{min(each.rates):.4g}..{max(each.rates):.4g}"
        line = f"{each.name:14} {rate:8.2f} {spread:>17} {rate * trained:17.1f} {each.loss:8.4f} {each.peak / 1e6:8.0f}"
        print(f"{line} {rate / first:8.3f}")
    return 0
