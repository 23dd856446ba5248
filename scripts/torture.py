"""Puts the command to all that a rough week may bring, from a seed, and says what did not hold.

    python scripts/torture.py                              all of it: an hour or more on two processors
    python scripts/torture.py --short                      a little of each kind, in a minute
    python scripts/torture.py --only kills disks           these kinds
    python scripts/torture.py --only kills --number 17     the one trial of that number again
    python scripts/torture.py --keep FOLDER                leave what was made in this folder

Kinds: kills, disks, inputs, caches, folders, mutants, large, live. Linux only. The table goes to standard output, words to
standard error; the exit code is 1 if anything failed. What a trial does follows from seed, kind and number.
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

from torments.core import Kind, Trial
from torments.house import House
from torments.kinds import KINDS
from torments.watching import outlived
from tqdm import tqdm

tqdm.monitor_interval = 0  # a thread of its own, beside which nothing is forked


@dataclass
class Tally:
    """What came of the trials of a kind."""

    kind: Kind
    tried: int = 0
    skipped: int = 0
    seconds: float = 0.0
    longest: float = 0.0  # seconds of the processor of one command
    highest: int = 0  # bytes of one command
    codes: Counter[str] = field(default_factory=Counter)
    failed: list[Trial] = field(default_factory=list)


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="what all chance follows from")
    parser.add_argument("--only", nargs="+", choices=KINDS, metavar="KIND", default=[*KINDS])
    parser.add_argument("--number", nargs="+", type=int, help="these trials alone")
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--count", type=int, help="so many trials of each kind, at most")
    effort.add_argument("--short", action="store_true", help="a few of each kind")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work here, and leave what failed")
    return parser.parse_args()


def numbers(kind: Kind, given: argparse.Namespace, house: House) -> list[int]:
    """Which trials of a kind are tried."""
    if given.number:
        return list(given.number)
    if given.short and isinstance(kind.short, tuple):
        return list(kind.short)
    count = kind.count(house)
    wanted = kind.short if isinstance(kind.short, int) and given.short else given.count
    if wanted is None or wanted >= count:
        return list(range(count))
    return sorted(Random(f"{given.seed} {kind.name}").sample(range(count), wanted))


def torture(tally: Tally, given: argparse.Namespace, house: House) -> None:
    kind, start = tally.kind, time.monotonic()
    with tqdm(numbers(kind, given, house), desc=kind.name, unit="", leave=False, disable=None) as bar:
        for number in bar:
            trial = Trial(
                kind=kind.name,
                number=number,
                seed=given.seed,
                place=house.trials / f"{kind.name}-{number}",
                house=house,
            )
            tried(kind, trial)
            tally.tried += 1
            tally.codes.update(
                "well" if code == 0 else "refused" if code > 0 else "killed" for code in trial.codes
            )
            tally.skipped += bool(trial.skipped)
            tally.longest, tally.highest = (
                max(tally.longest, trial.longest),
                max(tally.highest, trial.highest),
            )
            if trial.faults:
                tally.failed.append(trial)
                bar.set_postfix(failed=len(tally.failed))
                tqdm.write(told(trial), file=sys.stderr)
            if not (trial.faults and given.keep):
                shutil.rmtree(trial.place, ignore_errors=True)
            tally.seconds = time.monotonic() - start


def tried(kind: Kind, trial: Trial) -> None:
    """What goes wrong in the trial itself is told like any other failure."""
    try:
        kind.trial(trial)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        trial.faults.append(
            f"the trial itself: {type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        )


def told(trial: Trial) -> str:
    """A failure, and how to see it again."""
    again = f"--seed {trial.seed} --only {trial.kind} --number {trial.number}"
    lines = [
        f"FAILED {again}",
        *(f"    {each[:400]}" for each in trial.story),
        *(f"  ! {each[:500]}" for each in trial.faults),
    ]
    return "\n".join(lines)


def table(tallies: list[Tally]) -> str:
    """As Markdown, to be read as it is."""
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
    for each in tallies:
        counts = [f"{count:,}" for count in (each.tried, each.skipped, len(each.failed))]
        most = f"{each.seconds / 60:.1f}", f"{each.longest:.1f} s", f"{each.highest / 1e6:.0f} MB"
        ends = ", ".join(f"{count:,} {name}" for name, count in sorted(each.codes.items()))
        rows.append((each.kind.name, each.kind.what, *counts, *most, ends))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    failed = [trial for each in tallies for trial in each.failed]
    lines += [
        f"failed: --seed {t.seed} --only {t.kind} --number {t.number}: {t.faults[0][:200]}" for t in failed
    ]
    tried = sum(each.tried for each in tallies)
    return "\n".join(
        [*lines, f"{len(failed):,} of {tried:,} trials failed" if failed else f"all {tried:,} trials held"]
    )


@contextmanager
def place_of(keep: Path | None) -> Iterator[Path]:
    """Where things are made; what runs there ends before it goes."""
    folder = keep or Path(tempfile.mkdtemp(prefix="torture-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_STATE_HOME"] = str(
        folder.resolve() / "state"
    )  # where the key is that checkpoints are signed with
    try:
        yield folder.resolve()
    finally:
        outlived(0)
        if not keep:
            remove(folder)


def remove(folder: Path) -> None:
    for path in folder.rglob("*"):  # some of it was made read-only
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def stop(number: int, _: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    given = asked()
    signal.signal(signal.SIGTERM, stop)
    tallies: list[Tally] = []
    try:
        with place_of(given.keep) as folder:
            house = House(folder)
            print("preparing: what trials start from is made", file=sys.stderr)
            house.prepare()
            for name in given.only:
                tallies.append(Tally(KINDS[name]))
                torture(tallies[-1], given, house)
    except KeyboardInterrupt:
        print("stopped: what was tried until then counts", file=sys.stderr)
        print(table(tallies))
        sys.exit(130)
    print(table(tallies))
    sys.exit(any(each.failed for each in tallies))


if __name__ == "__main__":
    main()
