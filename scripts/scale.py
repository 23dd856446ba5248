"""What `bench.py scale` times: whole runs on several ranks of this machine, or on hosts with limited links, as users start them.

The same step is taken by 1, 2, 3 and 4 ranks of one thread each; by two of them and by one with two threads, in turns; and by
ranks on hosts of their own. Then the model of a step's seconds is fitted to all numbers of ranks but one, and foretells that one.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from fit_scaling import TimedStep, fit_link_model, predict_seconds
from hosts import hosts, why_not
from tuning import COMMAND, HERE, measured

from llamatrain.distributed.cores import count_cores
from llamatrain.planner.scaling_model import LinkModel, ShardedStep

MPIEXEC = next(
    (str(path) for path in [Path(sys.executable).parent / "mpiexec"] if path.exists()),
    shutil.which("mpiexec"),
)
LEFT_OUT = 2  # steps at the beginning
NEW = {  # embd, layer, head, head-kv, ff, ctx
    "S": (256, 4, 8, 8, 768, 64),
    "M": (512, 8, 8, 4, 1376, 256),
}
VOCAB, ROWS = 32000, 8
NAMES = (*NEW, "lora")


@dataclass
class Timings:
    """Of some ranks, over all rounds."""

    ranks: int
    threads: int
    batches: int
    seconds: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    micro: int = 0
    groups: int = 0

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def crowding(self) -> float:
        """Threads for each processor, where that is more than one."""
        return max(1.0, self.ranks * self.threads / count_cores())

    def figures(self, one: "Timings") -> str:
        low, high = np.quantile(self.seconds, [0.25, 0.75])
        exposed = float(np.median(self.exposed)) if self.exposed else 0.0
        ideal = one.median * one.ranks * one.threads / (self.ranks * self.threads) * self.crowding
        spread, share = f"{1e3 * low:.4g}..{1e3 * high:.4g}", exposed / self.median
        return f"{1e3 * self.median:10.1f} {spread:>17} {ideal / self.median:11.3f} {1e3 * exposed:11.1f} {share:8.1%}"


@dataclass(frozen=True)
class Job:
    """A command without what says how it is run."""

    name: str
    words: tuple[str, ...]
    folder: Path

    @property
    def trained(self) -> int:
        """Floats."""
        done = subprocess.run(
            [*COMMAND, "plan", *self.words, "--json"], cwd=HERE.parent, capture_output=True, check=True
        )
        return int(json.loads(done.stdout)["weights"]) // 4

    def time(self, into: Timings, iters: int, where: Sequence[str] = ()) -> None:
        out = self.folder / "run"
        how = [
            "--threads",
            into.threads,
            "--grad-acc",
            into.batches,
            "--iters",
            iters,
            "--save-every",
            0,
            "--out",
            out,
            "--overwrite",
        ]
        measured([MPIEXEC or "mpiexec", *where, "-n", str(into.ranks), *COMMAND, *self.words, *map(str, how)])
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        steps = [line for line in lines if "grad_norm" in line][LEFT_OUT:]
        into.seconds += [line["seconds"] for line in steps]
        into.exposed += [line["seconds_exposed"] for line in steps if line.get("seconds_exposed") is not None]
        kept = tomllib.loads((out / "config.toml").read_text())
        into.micro, into.groups = kept["grad-acc"], kept.get("grad-groups", 1)


# ---- what is run -----------------------------------------------------------


def made(folder: Path, kind: str) -> tuple[Path, Path, Path]:
    """Text, a vocabulary and a base."""
    text, letters = folder / "text.txt", random.Random(0)
    text.write_text("".join(letters.choice("abcdefgh ") for _ in range(1 << 20)))
    vocabulary, base = folder / "vocabulary.gguf", folder / "base.gguf"
    least = [
        "--embd",
        32,
        "--layer",
        1,
        "--head",
        2,
        "--head-kv",
        2,
        "--ff",
        32,
        "--vocab",
        VOCAB,
        "--type",
        "f32",
    ]
    for words in ([vocabulary, *least], [base, "--shape", "small", "--type", kind]):
        subprocess.run(
            [sys.executable, HERE / "random_model.py", *map(str, words)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return text, vocabulary, base


def jobs(names: Sequence[str], precision: str, kind: str, folder: Path) -> Iterator[Job]:
    text, vocabulary, base = made(folder, kind)
    for name in names:
        if name == "lora":
            words = ["finetune", base, text, "--ctx", NEW["S"][-1], "--cache-base", "off"]
        else:
            embd, layer, head, kv, ff, ctx = NEW[name]
            shape = [
                "--embd",
                embd,
                "--layer",
                layer,
                "--head",
                head,
                "--head-kv",
                kv,
                "--ff",
                ff,
                "--ctx",
                ctx,
            ]
            words = ["from-scratch", text, "--vocab-from", vocabulary, *shape]
        more = ["--batch", ROWS, "--precision", precision]
        yield Job(f"{name} {precision}", tuple(map(str, (*words, *more))), folder)


# ---- what is shown ---------------------------------------------------------

COLUMNS = f"{'ms':>10} {'quartiles':>17} {'efficiency':>11} {'exposed ms':>11} {'share':>8}"


def heading(job: Job, what: str) -> None:
    print(f"\n{job.name}: {what}\n\n{'ranks':>5} {'threads':>7} {'batches':>7} {COLUMNS}")


def show(each: Timings, one: Timings) -> None:
    print(f"{each.ranks:5} {each.threads:7} {each.batches:7} {each.figures(one)}", flush=True)


def in_turns(job: Job, runs: Sequence[Timings], args: argparse.Namespace) -> None:
    for _ in range(args.rounds):
        for each in runs:
            job.time(each, args.iters + LEFT_OUT)


def bench_ranks(job: Job, args: argparse.Namespace) -> None:
    runs = [Timings(ranks, 1, batches) for batches in args.batches for ranks in args.ranks]
    in_turns(job, runs, args)
    heading(
        job,
        f"the same step on one machine of {count_cores()} processors, efficiency as a share of those that are used",
    )
    for each in runs:
        show(each, next(one for one in runs if one.batches == each.batches))
    foretell(job, runs, args.held_out or max(args.ranks))


def foretell(job: Job, runs: Sequence[Timings], held_out: int) -> None:
    """From what all others took, what those that were held out take."""
    trained = job.trained
    cases = [case_of(each, trained) for each in runs]
    others = [each for each in cases if each.step.ranks != held_out]
    if len({each.step.ranks for each in others}) < 2:
        return
    tempo = fit_link_model(others)
    print(
        f"\nfitted to {', '.join(map(str, sorted({each.step.ranks for each in others})))} ranks: {described(tempo)}"
    )
    for each, case in zip(runs, cases, strict=True):
        said = predict_seconds(case, tempo)
        kind = "held out" if case.step.ranks == held_out else "fitted"
        told = f"{1e3 * said:9.1f} ms, {said / each.median:6.3f} of what was measured"
        print(f"{each.ranks:5} ranks, {each.batches} batches: {told}, {kind}")


def case_of(each: Timings, trained: int) -> TimedStep:
    step = ShardedStep(ranks=each.ranks, micro=each.micro, groups=each.groups, trained=trained)
    return TimedStep(step=step, seconds=each.median, ranks_per_host=each.ranks, crowding=each.crowding)


def described(tempo: LinkModel) -> str:
    link = f"{1e-9 / tempo.byte:.3g} GB/s" if tempo.byte else "no time for bytes"
    own = f"a micro-batch {1e3 * tempo.micro:.4g} ms, all weights' step {1e3 * tempo.update:.4g} ms"
    return f"{own}, {link}, {1e6 * tempo.message:.3g} µs a message, ranks that differ by {tempo.spread:.1%}"


def bench_threads(job: Job, args: argparse.Namespace) -> None:
    """Two ranks of one thread beside one of two."""
    runs = [Timings(1, 2, 1), Timings(2, 1, 1)]
    in_turns(job, runs, args)
    heading(job, "two threads, or two ranks, in turns")
    for each in runs:
        show(each, runs[0])
    print(f"{runs[0].median / runs[1].median:.3f} of the speed of one rank")


def bench_hosts(job: Job, args: argparse.Namespace) -> None:
    """A rank on each of two hosts, by what their links let through, in turns."""
    rates = ["", *args.network]
    runs = [Timings(2, 1, 1) for _ in rates]
    for _ in range(args.rounds):
        for rate, each in zip(rates, runs, strict=True):
            with hosts(2, rate) as there:
                job.time(each, args.iters + LEFT_OUT, there.options)
    heading(job, f"two hosts: without a limit, {', '.join(args.network)}")
    for each in runs:
        show(each, runs[0])
    for rate, each in zip(args.network, runs[1:], strict=True):
        print(f"{rate}: {runs[0].median / each.median:.3f} of the speed without a limit")


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("names", nargs="*", choices=NAMES, default=list(NAMES), help="only these")
    command.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3, 4])
    command.add_argument("--held-out", type=int, default=0, help="of these, what is foretold (the last)")
    command.add_argument("--batches", nargs="+", type=int, default=[1, 2], help="of a step")
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--iters", type=int, default=8, help="steps that are counted, of each run")
    command.add_argument("--type", default="q4_k", help="of the base that gets an adapter")
    command.add_argument(
        "--network", nargs="*", default=[], help="limits of links between two hosts, such as 1gbit; as root"
    )
    command.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these")


PARTS = {"ranks": bench_ranks, "threads": bench_threads, "hosts": bench_hosts}


def bench(args: argparse.Namespace) -> int:
    if MPIEXEC is None:
        raise SystemExit("there is no mpiexec: pip install 'llamatrain[mpi]'")
    if args.network and (why := why_not()):
        raise SystemExit(why)
    with tempfile.TemporaryDirectory() as folder:
        for precision in args.precision:
            for job in jobs(args.names, precision, args.type, Path(folder)):
                for part in args.parts:
                    if part != "hosts" or args.network:
                        PARTS[part](job, args)
    return 0
