"""What `bench.py finetune` times: runs of `llamatrain finetune` and of PEFT on bases of one shape, a process each, in turns."""

import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from plan_cases import PROGRAM

HERE = Path(__file__).resolve().parent
COMMAND = [sys.executable, "-c", "from llamatrain.cli.main import main; main()"]
ROWS = {"1.1b": (512, 1), "7b": (256, 1), "small": (64, 8)}  # tokens in a row, rows in a batch
STEPS = 5  # of a run; the first of them is not counted


@dataclass
class Contender:
    """Someone's run, and what came of it."""

    name: str
    run: Callable[[], tuple[list[float], int]]  # seconds of steps, peak resident memory
    planned: int = 0
    seconds: list[float] = field(default_factory=list)
    peak: int = 0

    def round(self) -> None:
        seconds, peak = self.run()
        self.seconds += seconds
        self.peak = max(self.peak, peak)


def measured(words: list[str]) -> int:
    """Run to its end: the most of memory that was resident, pages of files too; by its own word, as what the system counts of a
    process begins with what its parent had."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, cwd=HERE.parent, check=False
    )
    told = re.search(r"VmHWM (\d+)", done.stderr)
    if done.returncode or not told:
        raise SystemExit(f"llamatrain {' '.join(words)} failed: {done.stderr[-1000:]}")
    return int(told[1]) * 1024


def ours(name: str, base: Path, text: Path, folder: Path, options: list[str]) -> Contender:
    words = [str(base), str(text), "--iters", str(STEPS), *options]
    plan = subprocess.run(
        [*COMMAND, "plan", "finetune", *words, "--json"], cwd=HERE.parent, capture_output=True, check=True
    )

    def run() -> tuple[list[float], int]:
        out = folder / "run"
        peak = measured(["finetune", *words, "--out", str(out), "--overwrite"])
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return [line["seconds"] for line in lines if "grad_norm" in line][1:], peak

    return Contender(name, run, json.loads(plan.stdout)["total"])


def pefts(python: str, shape: str, mode: str, threads: int) -> Contender:
    ctx, batch = ROWS[shape]
    words = [
        python,
        str(HERE / "peft_step.py"),
        shape,
        str(ctx),
        str(batch),
        str(threads),
        mode,
        str(STEPS - 1),
    ]

    def run() -> tuple[list[float], int]:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} failed: {done.stderr[-1000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        return found["seconds"], found["peak"]

    return Contender(f"peft, {mode}", run)


def has_peft(python: str) -> bool:
    return (
        subprocess.run(
            [python, "-c", "import peft, transformers"], capture_output=True, check=False
        ).returncode
        == 0
    )


def contenders(
    types: list[str], shape: str, precisions: list[str], threads: int, peer: str | None, folder: Path
) -> tuple[list[Contender], list[Contender]]:
    """Ours, on a base of each type: its weights left in the file, and kept in bf16; and PEFT's."""
    ctx, batch = ROWS[shape]
    text, letters = folder / "text.txt", random.Random(0)
    text.write_text("".join(letters.choice("abcdefgh ") for _ in range(2 * STEPS * ctx * batch)))
    mine = []
    for kind in types:
        base = folder / f"{kind}.gguf"
        subprocess.run(
            [sys.executable, HERE / "random_model.py", base, "--shape", shape, "--type", kind],
            check=True,
            stdout=sys.stderr,
        )
        for precision in precisions:
            for cache in ("off", "bf16") if precision == "bf16" else ("off",):
                options = [
                    "--ctx",
                    ctx,
                    "--batch",
                    batch,
                    "--cache-base",
                    cache,
                    "--precision",
                    precision,
                    "--threads",
                    threads,
                ]
                mine.append(
                    ours(
                        f"{kind} {precision} {cache}", base, text, folder, [str(option) for option in options]
                    )
                )
    theirs = (
        [pefts(peer, shape, mode, threads) for mode in ("eager", "compiled")]
        if peer and has_peft(peer)
        else []
    )
    return mine, theirs


def bench(
    types: list[str], shape: str, precisions: list[str], threads: int, rounds: int, peer: str | None
) -> int:
    ctx, batch = ROWS[shape]
    with tempfile.TemporaryDirectory() as folder:
        mine, theirs = contenders(types, shape, precisions, threads, peer, Path(folder))
        for _ in range(rounds):
            for each in (*mine, *theirs):
                each.round()
    best = min((median(each.seconds) for each in theirs), default=0.0)
    columns = f"{'tokens/s':>9} {'slowest..fastest':>17} {'peak MB':>9} {'planned MB':>11} {'plan/peak':>10} {'x peft':>7}"
    print(f"\n{shape}, ctx {ctx}, batch {batch}, rank 8 on all linear weights\n\n{'run':18} {columns}")
    for each in (*mine, *theirs):
        rate, low, high = (
            ctx * batch / s for s in (median(each.seconds), max(each.seconds), min(each.seconds))
        )
        planned = (
            f"{each.planned / 1e6:11.1f} {each.planned / each.peak:10.3f}"
            if each.planned
            else f"{'-':>11} {'-':>10}"
        )
        ratio = f"{best * rate / ctx / batch:7.2f}" if best else f"{'-':>7}"
        print(
            f"{each.name:18} {rate:9.1f} {f'{low:.4g}..{high:.4g}':>17} {each.peak / 1e6:9.1f} {planned} {ratio}"
        )
    return 0
