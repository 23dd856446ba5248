"""Tests the command against crashes, full disks, damaged files and more, in trials from a seed.

    python scripts/torture.py                              all of it: an hour or more on two processors
    python scripts/torture.py --short                      a few trials of each kind, in a minute
    python scripts/torture.py --only kills disks           these kinds
    python scripts/torture.py --only kills --number 17     one trial again
    python scripts/torture.py --keep FOLDER                work in this folder and keep it

Kinds: kills, disks, inputs, caches, folders, mutants, large, live. Linux only. The table goes to standard
output, failures to standard error; the exit code is 1 if a trial failed. What a trial does follows from seed,
kind and number.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torments.fixtures import Fixtures
from torments.kinds import KINDS
from torments.proc import kill_survivors
from torments.trial import Kind, Trial
from tqdm import tqdm

tqdm.monitor_interval = 0  # its thread would make forks unsafe


@dataclass
class Tally:
    """The results of the trials of a kind."""

    kind: Kind
    trials: int = 0
    skipped: int = 0
    seconds: float = 0.0
    longest: float = 0.0  # CPU seconds of one command
    highest: int = 0  # bytes of one command
    codes: Counter[str] = field(default_factory=Counter)
    failed: list[Trial] = field(default_factory=list)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--only", nargs="+", choices=KINDS, metavar="KIND", default=[*KINDS])
    parser.add_argument("--number", nargs="+", type=int, help="only these trials")
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--count", type=int, help="at most this many trials of each kind")
    effort.add_argument("--short", action="store_true", help="a few trials of each kind")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="work in this folder and keep failed trials"
    )
    return parser.parse_args()


def choose_numbers(kind: Kind, args: argparse.Namespace, fixtures: Fixtures) -> list[int]:
    """Return the numbers of the trials to run."""
    if args.number:
        return list(args.number)
    if args.short and isinstance(kind.short, tuple):
        return list(kind.short)
    count = kind.count(fixtures)
    wanted = kind.short if isinstance(kind.short, int) and args.short else args.count
    if wanted is None or wanted >= count:
        return list(range(count))
    return sorted(Random(f"{args.seed} {kind.name}").sample(range(count), wanted))


def run_kind(tally: Tally, args: argparse.Namespace, fixtures: Fixtures) -> None:
    """Run the trials of a kind and count their results."""
    kind = tally.kind
    start = time.monotonic()
    with tqdm(
        choose_numbers(kind, args, fixtures), desc=kind.name, unit="", leave=False, disable=None
    ) as bar:
        for number in bar:
            trial = Trial(
                kind=kind.name,
                number=number,
                seed=args.seed,
                root=fixtures.trials / f"{kind.name}-{number}",
                fixtures=fixtures,
            )
            run_trial(kind, trial)
            tally.trials += 1
            tally.codes.update(
                "well" if code == 0 else "refused" if code > 0 else "killed" for code in trial.codes
            )
            tally.skipped += bool(trial.skipped)
            tally.longest = max(tally.longest, trial.longest)
            tally.highest = max(tally.highest, trial.highest)
            if trial.faults:
                tally.failed.append(trial)
                bar.set_postfix(failed=len(tally.failed))
                tqdm.write(format_failure(trial), file=sys.stderr)
            if not (trial.faults and args.keep):
                shutil.rmtree(trial.root, ignore_errors=True)
            tally.seconds = time.monotonic() - start


def run_trial(kind: Kind, trial: Trial) -> None:
    """Run a trial; an error of the trial itself counts as a fault."""
    try:
        kind.trial(trial)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        trial.faults.append(
            f"the trial itself: {type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
        )


def format_failure(trial: Trial) -> str:
    """Return the events and faults of a trial, and the options that repeat it."""
    options = f"--seed {trial.seed} --only {trial.kind} --number {trial.number}"
    lines = [
        f"FAILED {options}",
        *(f"    {event[:400]}" for event in trial.story),
        *(f"  ! {fault[:500]}" for fault in trial.faults),
    ]
    return "\n".join(lines)


def format_table(tallies: list[Tally]) -> str:
    """Return the table in Markdown."""
    rows: list[tuple[str, ...]] = [
        (
            "kind",
            "what is done",
            "tried",
            "skipped",
            "failed",
            "minutes",
            "longest",
            "largest",
            "commands that ended",
        )
    ]
    rows.append(("---", "---", *["--:"] * 6, "---"))
    for tally in tallies:
        counts = [f"{count:,}" for count in (tally.trials, tally.skipped, len(tally.failed))]
        most = f"{tally.seconds / 60:.1f}", f"{tally.longest:.1f} s", f"{tally.highest / 1e6:.0f} MB"
        ends = ", ".join(f"{count:,} {name}" for name, count in sorted(tally.codes.items()))
        rows.append((tally.kind.name, tally.kind.what, *counts, *most, ends))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    failed = [trial for tally in tallies for trial in tally.failed]
    lines += [
        f"failed: --seed {t.seed} --only {t.kind} --number {t.number}: {t.faults[0][:200]}" for t in failed
    ]
    total = sum(tally.trials for tally in tallies)
    return "\n".join(
        [
            *lines,
            f"{len(failed):,} of {total:,} trials failed" if failed else f"all {total:,} trials passed",
        ]
    )


@contextmanager
def working_folder(keep: Path | None) -> Iterator[Path]:
    """Yield the folder to work in; processes that run there end before it is removed."""
    folder = keep or Path(tempfile.mkdtemp(prefix="torture-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_STATE_HOME"] = str(folder.resolve() / "state")  # the key that signs checkpoints is there
    try:
        yield folder.resolve()
    finally:
        kill_survivors(0)
        if not keep:
            remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder, read-only folders in it included."""
    for path in folder.rglob("*"):  # some folders were made read-only
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def stop(number: int, _: FrameType | None) -> NoReturn:
    """Handle SIGTERM like Ctrl-C."""
    raise KeyboardInterrupt


def main() -> None:
    """Run the trials and print the table."""
    args = parse_arguments()
    signal.signal(signal.SIGTERM, stop)
    tallies: list[Tally] = []
    try:
        with working_folder(args.keep) as folder:
            fixtures = Fixtures(folder)
            print("preparing the files that trials start from", file=sys.stderr)
            fixtures.prepare()
            for name in args.only:
                tallies.append(Tally(KINDS[name]))
                run_kind(tallies[-1], args, fixtures)
    except KeyboardInterrupt:
        print("stopped; the table shows the trials until now", file=sys.stderr)
        print(format_table(tallies))
        sys.exit(130)
    print(format_table(tallies))
    sys.exit(any(tally.failed for tally in tallies))


if __name__ == "__main__":
    main()
