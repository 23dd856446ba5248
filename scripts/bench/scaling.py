"""Times whole runs on several ranks of this machine, or on hosts with limited links: `bench.py scale`.

The same step runs on 1, 2, 3 and 4 ranks of one thread each; on two ranks and on one rank with two threads,
in turns; and on hosts that have a rank each. Then the model of a step's seconds is fitted to all numbers of
ranks but one, and predicts that one.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hosts import create_hosts, find_obstacle

from bench.fit_scaling import TimedStep, fit_link_model, predict_seconds
from bench.processes import COMMAND, ROOT, make_random_model, run_command, run_program
from bench.timer import print_header
from llamatrain.distributed.cores import count_cores
from llamatrain.planner.scaling_model import LinkModel, ShardedStep

MPIEXEC = next(
    (str(path) for path in [Path(sys.executable).parent / "mpiexec"] if path.exists()),
    shutil.which("mpiexec"),
)
WARMUP = 2  # steps at the beginning that are not counted
MODELS = {  # embd, layer, head, head-kv, ff, ctx
    "S": (256, 4, 8, 8, 768, 64),
    "M": (512, 8, 8, 4, 1376, 256),
}
VOCAB, ROWS = 32000, 8
NAMES = (*MODELS, "lora")


@dataclass
class Timings:
    """The times of a number of ranks, over all rounds."""

    ranks: int
    threads: int
    batches: int
    seconds: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    micro: int = 0
    groups: int = 0

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return float(np.median(self.seconds))

    @property
    def crowding(self) -> float:
        """Threads per processor, if more than one."""
        return max(1.0, self.ranks * self.threads / count_cores())

    def format_columns(self, baseline: "Timings") -> str:
        """Return times, the efficiency compared to a baseline, and the exposed communication."""
        low, high = np.quantile(self.seconds, [0.25, 0.75])
        exposed = float(np.median(self.exposed)) if self.exposed else 0.0
        workers = self.ranks * self.threads
        ideal = baseline.median * baseline.ranks * baseline.threads / workers * self.crowding
        times = f"{1e3 * self.median:10.1f} {f'{1e3 * low:.4g}..{1e3 * high:.4g}':>17}"
        return f"{times} {ideal / self.median:11.3f} {1e3 * exposed:11.1f} {exposed / self.median:8.1%}"


@dataclass(frozen=True)
class Job:
    """A command without the options that say on how many ranks it runs."""

    name: str
    words: tuple[str, ...]
    folder: Path

    @property
    def trained(self) -> int:
        """The number of trained floats."""
        return int(json.loads(run_command("plan", *self.words, "--json"))["weights"]) // 4

    def time(self, timings: Timings, iters: int, mpi_options: Sequence[str] = ()) -> None:
        """Run the command on the ranks of `timings`, and add the times of its steps."""
        out = self.folder / "run"
        options: list[object] = [
            "--threads",
            timings.threads,
            "--grad-acc",
            timings.batches,
            "--iters",
            iters,
        ]
        options += ["--save-every", 0, "--out", out, "--overwrite"]
        launcher = [MPIEXEC or "mpiexec", *mpi_options, "-n", timings.ranks]
        run_program([*launcher, *COMMAND, *self.words, *options], ROOT)
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        steps = [line for line in lines if "grad_norm" in line][WARMUP:]
        timings.seconds += [line["seconds"] for line in steps]
        timings.exposed += [
            line["seconds_exposed"] for line in steps if line.get("seconds_exposed") is not None
        ]
        config = tomllib.loads((out / "config.toml").read_text())
        timings.micro = config["grad-acc"]
        timings.groups = config.get("grad-groups", 1)


# ---- what is run -----------------------------------------------------------


def make_inputs(folder: Path, kind: str) -> tuple[Path, Path, Path]:
    """Write a text, a model with a vocabulary, and a base whose weights have a type; return their paths."""
    text = folder / "text.txt"
    letters = random.Random(0)
    text.write_text("".join(letters.choice("abcdefgh ") for _ in range(1 << 20)))
    vocabulary = folder / "vocabulary.gguf"
    sizes: list[object] = ["--embd", 32, "--layer", 1, "--head", 2, "--head-kv", 2, "--ff", 32]
    make_random_model(vocabulary, *sizes, "--vocab", VOCAB, "--type", "f32")
    base = folder / "base.gguf"
    make_random_model(base, "--shape", "small", "--type", kind)
    return text, vocabulary, base


def build_jobs(names: Sequence[str], precision: str, kind: str, folder: Path) -> Iterator[Job]:
    """Yield the command of each name."""
    text, vocabulary, base = make_inputs(folder, kind)
    for name in names:
        words: list[object]
        if name == "lora":
            words = ["finetune", base, text, "--ctx", MODELS["S"][-1], "--cache-base", "off"]
        else:
            embd, layer, head, kv, ff, ctx = MODELS[name]
            words = ["from-scratch", text, "--vocab-from", vocabulary, "--embd", embd, "--layer", layer]
            words += ["--head", head, "--head-kv", kv, "--ff", ff, "--ctx", ctx]
        words += ["--batch", ROWS, "--precision", precision]
        yield Job(f"{name} {precision}", tuple(map(str, words)), folder)


# ---- tables ----------------------------------------------------------------

COLUMNS = f"{'ms':>10} {'quartiles':>17} {'efficiency':>11} {'exposed ms':>11} {'share':>8}"


def print_heading(job: Job, title: str) -> None:
    """Print the title and the column heads of a table."""
    print(f"\n{job.name}: {title}\n\n{'ranks':>5} {'threads':>7} {'batches':>7} {COLUMNS}")


def print_row(timings: Timings, baseline: Timings) -> None:
    """Print a row of a table."""
    counts = f"{timings.ranks:5} {timings.threads:7} {timings.batches:7}"
    print(f"{counts} {timings.format_columns(baseline)}", flush=True)


def time_in_turns(job: Job, runs: Sequence[Timings], args: argparse.Namespace) -> None:
    """Time each number of ranks once a round."""
    for _ in range(args.rounds):
        for timings in runs:
            job.time(timings, args.iters + WARMUP)


def bench_ranks(job: Job, args: argparse.Namespace) -> None:
    """Time the same step on several numbers of ranks, and predict the number that is held out."""
    runs = [Timings(ranks, 1, batches) for batches in args.batches for ranks in args.ranks]
    time_in_turns(job, runs, args)
    machine = f"one machine of {count_cores()} processors"
    print_heading(job, f"the same step on {machine}; efficiency is a share of the processors in use")
    for timings in runs:
        print_row(timings, next(run for run in runs if run.batches == timings.batches))
    print_prediction(job, runs, args.held_out or max(args.ranks))


def print_prediction(job: Job, runs: Sequence[Timings], held_out: int) -> None:
    """Fit the model to all numbers of ranks but one, and print what it predicts for each."""
    trained = job.trained
    steps = [make_timed_step(timings, trained) for timings in runs]
    others = [timed for timed in steps if timed.step.ranks != held_out]
    ranks = sorted({timed.step.ranks for timed in others})
    if len(ranks) < 2:
        return
    link = fit_link_model(others)
    print(f"\nfitted to {', '.join(map(str, ranks))} ranks: {describe_link(link)}")
    for timings, timed in zip(runs, steps, strict=True):
        predicted = predict_seconds(timed, link)
        kind = "held out" if timed.step.ranks == held_out else "fitted"
        times = f"{1e3 * predicted:9.1f} ms, {predicted / timings.median:6.3f} of the measured time"
        print(f"{timings.ranks:5} ranks, {timings.batches} batches: {times}, {kind}")


def make_timed_step(timings: Timings, trained: int) -> TimedStep:
    """Return timings as the model's fit takes them."""
    step = ShardedStep(ranks=timings.ranks, micro=timings.micro, groups=timings.groups, trained=trained)
    return TimedStep(
        step=step, seconds=timings.median, ranks_per_host=timings.ranks, crowding=timings.crowding
    )


def describe_link(link: LinkModel) -> str:
    """Return the fitted values as text."""
    bandwidth = f"{1e-9 / link.byte:.3g} GB/s" if link.byte else "no time for bytes"
    compute = f"a micro-batch {1e3 * link.micro:.4g} ms, the update of all weights {1e3 * link.update:.4g} ms"
    return f"{compute}, {bandwidth}, {1e6 * link.message:.3g} µs a message, ranks differ by {link.spread:.1%}"


def bench_threads(job: Job, args: argparse.Namespace) -> None:
    """Compare one rank of two threads to two ranks of one thread."""
    runs = [Timings(1, 2, 1), Timings(2, 1, 1)]
    time_in_turns(job, runs, args)
    print_heading(job, "two threads, or two ranks, in turns")
    for timings in runs:
        print_row(timings, runs[0])
    print(f"{runs[0].median / runs[1].median:.3f} of the speed of one rank")


def bench_hosts(job: Job, args: argparse.Namespace) -> None:
    """Time a rank on each of two hosts with several limits of their links, in turns."""
    rates = ["", *args.network]
    runs = [Timings(2, 1, 1) for _ in rates]
    for _ in range(args.rounds):
        for rate, timings in zip(rates, runs, strict=True):
            with create_hosts(2, rate) as hosts:
                job.time(timings, args.iters + WARMUP, hosts.options)
    print_heading(job, f"two hosts: without a limit, {', '.join(args.network)}")
    for timings in runs:
        print_row(timings, runs[0])
    for rate, timings in zip(args.network, runs[1:], strict=True):
        print(f"{rate}: {runs[0].median / timings.median:.3f} of the speed without a limit")


PARTS = {"ranks": bench_ranks, "threads": bench_threads, "hosts": bench_hosts}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `scale`."""
    command.add_argument("names", nargs="*", choices=NAMES, default=list(NAMES), help="only these")
    command.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3, 4])
    command.add_argument("--held-out", type=int, default=0, help="the number to predict (the largest)")
    command.add_argument("--batches", nargs="+", type=int, default=[1, 2], help="in a step")
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--iters", type=int, default=8, help="steps of each run that are counted")
    command.add_argument("--type", default="q4_k", help="of the base that gets an adapter")
    command.add_argument(
        "--network", nargs="*", default=[], help="limits of links between two hosts, such as 1gbit; as root"
    )
    command.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these")


def bench_scaling(args: argparse.Namespace) -> int:
    """Run the parts for each model and precision."""
    print_header(args, None)
    if MPIEXEC is None:
        raise SystemExit("error: mpiexec was not found; pip install 'llamatrain[mpi]'")
    if args.network and (obstacle := find_obstacle()):
        raise SystemExit(f"error: {obstacle}")
    with tempfile.TemporaryDirectory() as folder:
        for precision in args.precision:
            for job in build_jobs(args.names, precision, args.type, Path(folder)):
                for part in args.parts:
                    if part != "hosts" or args.network:
                        PARTS[part](job, args)
    return 0
