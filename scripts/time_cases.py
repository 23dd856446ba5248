"""Compares the step time that `plan` predicts with real steps, on shapes that calibration does not use.

    python scripts/time_cases.py [--threads N] [--rounds N] [--cpu] [WORD ...]   cases that contain a word
    python scripts/time_cases.py --search [...]     the plan found for a limit, and the usual ones that fit

Each round calibrates again and runs each case, one after the other; the medians of both are compared. A case
is bad if it is more than 25 % off. With `--cpu` the CPU time of one thread counts, for a machine that is in
use.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.processes import ROOT
from plan_cases import make_file

CPU_CLOCK = "import time; time.perf_counter = time.thread_time; "
PROGRAM = "from llamatrain.cli.main import main; main()"
SHARE = 0.25
WARMUP = 2  # steps that do not count
POLICIES = ("none", "light", "block", "optimal")


@dataclass(frozen=True)
class Case:
    """A run to compare."""

    name: str
    words: tuple[str, ...]
    base: str = ""  # the type of a base's weights; empty for from-scratch
    steps: int = 8

    @property
    def command(self) -> str:
        """The command that the case runs."""
        return "finetune" if self.base else "from-scratch"


def shape_options(embd: int, head: int, layer: int, ff: int, ctx: int, batch: int) -> tuple[str, ...]:
    """Return the options for a shape."""
    sizes = {"--embd": embd, "--head": head, "--layer": layer, "--ff": ff, "--ctx": ctx, "--batch": batch}
    return tuple(str(word) for pair in sizes.items() for word in pair)


NEW = {
    "tiny": (*shape_options(64, 4, 2, 192, 128, 8), "--vocab-size", "bytes"),
    "tiny, short rows": (*shape_options(96, 4, 4, 256, 32, 16), "--vocab-size", "bytes"),
    "narrow, 4,000 tokens": (*shape_options(128, 4, 3, 352, 256, 4), "--vocab-size", "4000"),
    "small": (*shape_options(256, 8, 4, 704, 128, 8), "--vocab-size", "bytes"),
    "long rows": (*shape_options(192, 6, 4, 512, 1024, 1), "--vocab-size", "bytes"),
    "8,192 tokens": (*shape_options(384, 6, 4, 1024, 64, 4), "--vocab-from", "Q8_0.gguf"),
    "medium": (*shape_options(512, 8, 8, 1376, 256, 2), "--vocab-size", "bytes"),
    "block": (*shape_options(320, 5, 6, 864, 192, 4), "--vocab-size", "bytes", "--remat", "block"),
}
TUNED = {
    "rows of 32": ("--ctx", "32", "--batch", "4"),
    "rows of 384": ("--ctx", "384", "--batch", "1"),
    "16 rows of 64": ("--ctx", "64", "--batch", "16"),
    "rank 32": ("--ctx", "128", "--batch", "2", "--lora-r", "32"),
    "attention alone": ("--ctx", "256", "--batch", "2", "--target", "attn_q,attn_v"),
    "every weight": ("--ctx", "128", "--batch", "2", "--full"),
}
KINDS = ("Q4_K", "Q8_0", "F32")


def build_cases() -> Iterator[Case]:
    """Yield all cases."""
    for precision in ("f32", "bf16"):
        for name, words in NEW.items():
            yield Case(
                f"{name}, {precision}", (*words, "--precision", precision), steps=24 if "tiny" in name else 8
            )
        for number, (name, words) in enumerate(TUNED.items()):
            kind = KINDS[number % len(KINDS)]
            yield Case(f"{kind} {name}, {precision}", (*words, "--precision", precision), kind, steps=4)


@dataclass
class Bench:
    """Plans and runs cases in a folder."""

    folder: Path
    threads: int
    cpu: bool
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def words(self, case: Case) -> list[str]:
        """Return the command line of a case; make its files if they do not exist."""
        bases = [f"{case.base}.gguf"] if case.base else []
        files = [str(make_file(self.folder, name)) for name in (*bases, "text.txt")]
        options = [
            str(make_file(self.folder, word)) if word.endswith(".gguf") else word for word in case.words
        ]
        return [*files, *options, "--threads", str(self.threads)]

    def run(self, *words: str) -> str:
        """Run the command and return its standard output."""
        program = (CPU_CLOCK if self.cpu else "") + PROGRAM
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}\n{done.stderr}")
        return done.stdout

    def plan(self, case: Case) -> dict[str, float]:
        """Return the plan of a case."""
        plan: dict[str, float] = json.loads(self.run("plan", case.command, *self.words(case), "--json"))
        return plan

    def clear_calibration(self) -> None:
        """Remove the measured speed of this machine."""
        cache = os.environ.get("LLAMATRAIN_CACHE") or Path.home() / ".cache"
        shutil.rmtree(Path(cache) / "llamatrain" / "speeds", ignore_errors=True)

    def time_steps(self, case: Case, *options: str) -> list[float]:
        """Run a case and return the seconds of its steps."""
        out = str(self.folder / "run")
        run_options = (
            "--iters",
            str(case.steps + WARMUP),
            "--save-every",
            "0",
            "--out",
            out,
            "--overwrite",
            "--quiet",
        )
        self.run(case.command, *self.words(case), *options, *run_options)
        lines = map(json.loads, (Path(out) / "metrics.jsonl").read_text().splitlines())
        return [line["seconds"] for line in lines if "grad_norm" in line][WARMUP:]


def compare(bench: Bench, chosen: list[Case], rounds: int) -> int:
    """Print predicted and measured times; return how many cases are bad."""
    predictions: dict[str, list[float]] = {case.name: [] for case in chosen}
    times: dict[str, list[float]] = {case.name: [] for case in chosen}
    for case in chosen:
        bench.time_steps(Case(case.name, case.words, case.base, 1))  # compiles the kernels
    for _ in range(rounds):
        bench.clear_calibration()
        for case in chosen:
            predictions[case.name].append(bench.plan(case)["seconds_of_step"])
            times[case.name] += bench.time_steps(case)
    print(
        f"{'':36} {'predicted':>10} {'measured':>10} {'off':>8}  "
        f"ms a step, {bench.threads} threads, {rounds} rounds"
    )
    bad = 0
    for case in chosen:
        predicted = median(predictions[case.name])
        measured = median(times[case.name])
        off = predicted / measured - 1
        bad += abs(off) > SHARE
        print(
            f"{case.name:36} {1e3 * predicted:10.2f} {1e3 * measured:10.2f} {off:8.1%}"
            f"{'  BAD' if abs(off) > SHARE else ''}"
        )
    print(f"{bad} bad")
    return bad


def search(bench: Bench, chosen: list[Case], rounds: int) -> int:
    """Print for three limits the plan that is found and the fastest usual one; return how many are slower."""
    bad = 0
    print(f"{'':36} {'limit':>8} {'way':28} {'ms':>8}   {'usual':28} {'ms':>8}")
    for case in chosen:
        usual = {
            way: bench.plan(Case(case.name, (*case.words, "--remat", way), case.base))["total"]
            for way in POLICIES
        }
        for share in (0.2, 0.5, 0.8):
            limit = int(min(usual.values()) + share * (usual["light"] - min(usual.values())))
            plan = bench.plan(Case(case.name, (*case.words, "--memory", str(limit)), case.base))
            ways = {f"{plan['remat']} in {plan['splits']}": ("--memory", str(limit))}
            ways |= {way: ("--remat", way) for way, total in usual.items() if total <= limit}
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(rounds):
                for way, options in ways.items():
                    times[way] += bench.time_steps(case, *options)
            (best_plan, own), *others = ((way, median(seconds)) for way, seconds in times.items())
            best = min(others, key=lambda other: other[1], default=("none fits", own))
            slower = own > 1.02 * best[1]
            bad += slower
            figures = f"{best_plan:28} {1e3 * own:8.1f}   {best[0]:28} {1e3 * best[1]:8.1f}"
            print(f"{case.name:36} {limit / 1e6:6.0f}MB {figures}{'  SLOWER' if slower else ''}", flush=True)
    return bad


def main() -> int:
    """Run the comparison; return 1 if a case is bad."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "plan_cases")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    chosen = [
        case for case in build_cases() if not args.words or any(word in case.name for word in args.words)
    ]
    return bool(
        (search if args.search else compare)(Bench(args.folder, args.threads, args.cpu), chosen, args.rounds)
    )


if __name__ == "__main__":
    sys.exit(main())
