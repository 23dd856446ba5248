"""What all kinds share: a trial with its own luck and place, and the one judge of how a process ended."""

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from torments.processes import Ended, Job, Running, forked, started

MEASURED = 5.0  # seconds that `plan` may take to see how fast the machine is
SECONDS, MEMORY = 2.0, 200_000_000  # of the processor, and at the peak: for whatever is small
LONGEST_LINE = 700  # characters of what is said to have failed
INTERRUPTED = 130
Argument = str | int | float | Path


def judged(
    ended: Ended,
    codes: Iterable[int] = (0, 1, 2),
    seconds: float = SECONDS,
    memory: float = MEMORY,
    said: bool = True,
) -> list[str]:
    """What is wrong with how a process ended: the same is asked of every one. `said`: its words can be read."""
    found = []
    if ended.late:
        found.append(
            f"did not end: {ended.wall:.0f} s, {ended.cpu:.1f} s of the processor, {ended.peak / 1e6:.0f} MB"
        )
    elif ended.code < 0 and ended.code not in codes:
        found.append(f"died of signal {-ended.code}")
    elif ended.code not in codes:
        found.append(f"exit code {ended.code}, not one of {sorted(codes)}: {last_line(ended.err)}")
    if "Traceback" in ended.err + ended.out:
        found.append(f"a traceback: {last_line(ended.err)}")
    elif said and ended.code in (1, 2) and len(ended.errors) != 1:
        found.append(
            f"exit code {ended.code} with {len(ended.errors)} lines of error: {last_line(ended.err)}"
        )
    if ended.code == 0 and ended.errors:
        found.append(f"exit code 0 with an error: {ended.errors[0]}")
    found += [
        f"a line of {len(line)} characters: {line[:80]}" for line in ended.errors if len(line) > LONGEST_LINE
    ]
    if ended.compiled:
        seconds = memory = math.inf
    if ended.cpu > seconds and not ended.late:
        found.append(f"took {ended.cpu:.1f} s of the processor, more than {seconds:g}")
    if ended.peak > memory:
        found.append(f"peak of {ended.peak / 1e6:.0f} MB, more than {memory / 1e6:.0f}")
    return found + [f"outlived by a process: {name}" for name in ended.left]


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "(nothing was said)"


@dataclass(kw_only=True)
class Trial:
    """One attempt to do harm. Everything in it follows from seed, kind and number."""

    kind: str
    number: int
    seed: int
    place: Path  # the folder that is its own
    house: Any
    faults: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)  # of the commands that were judged
    longest: float = 0.0  # seconds of the processor of one of them
    highest: int = 0  # bytes of one of them
    skipped: str = ""

    def __post_init__(self) -> None:
        self.random = Random(f"{self.seed} {self.kind} {self.number}")
        self.folder = self.place / "here"
        shutil.rmtree(self.place, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def job(self, words: Iterable[Argument], cache: Path | None, **more: Any) -> Job:
        return Job(words=tuple(map(str, words)), folder=self.folder, cache=cache or self.house.cache, **more)

    def start(
        self,
        *words: Argument,
        real: bool = False,
        cache: Path | None = None,
        plan: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Running:
        self.tell(" ".join(map(str, words)), plan)
        return (started if real else forked)(self.job(words, cache, plan=plan or {}, **more))

    def run(
        self, *words: Argument, judge: bool = True, codes: Iterable[int] = (0, 1, 2), **more: Any
    ) -> Ended:
        """The command until its end, judged."""
        usual = {"seconds": SECONDS + MEASURED} if words[0] == "plan" else {}
        limits = usual | {name: more.pop(name) for name in ("seconds", "memory", "said") if name in more}
        before = set(self.place.iterdir())  # where temporary files are, too
        patience = {"seconds": max(60.0, 3 * limits["seconds"])} if limits.get("seconds") else {}
        ended = self.start(*words, **patience, **more).wait()
        if judge and ended.code >= 0:
            left = [
                path.name for path in set(self.place.iterdir()) - before if path.name.startswith((".", "tmp"))
            ]
            self.must(not left, f"left among temporary files: {', '.join(sorted(left)[:3])} [{brief(words)}]")
        if judge:
            self.codes.append(ended.code)
            if not ended.compiled:
                self.longest, self.highest = max(self.longest, ended.cpu), max(self.highest, ended.peak)
            self.faults += [f"{each} [{brief(words)}]" for each in judged(ended, tuple(codes), **limits)]
        return ended

    def tell(self, text: str, plan: Mapping[str, Any] | None = None) -> None:
        self.story.append(f"{text}  {dict(plan)}" if plan else text)

    def must(self, condition: object, text: str) -> bool:
        if not condition:
            self.faults.append(text)
        return bool(condition)

    def given(self, *names: str) -> None:
        """Copies of what the house has, into this trial's folder."""
        for name in names:
            source = self.house.things / name
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, self.folder / name)

    def whole(self, *places: Path) -> bool:
        """Whether every GGUF file below opens, as a reader would have it."""
        files = [
            path
            for place in places
            for path in ([place] if place.is_file() else sorted(place.rglob("*.gguf")))
        ]
        fine = True
        for path in files:
            if path.is_file():
                ended = forked(self.job(("inspect", "--json", path), None)).wait()
                fine &= self.must(ended.code == 0, f"{path.name} does not open: {last_line(ended.err)}")
        return fine

    def tidy(self, *places: Path) -> None:
        """Nothing that was begun lies there."""
        left = [
            path.name
            for place in places
            if place.is_dir()
            for path in place.rglob(".*")
            if not path.name.startswith(".lock")
        ]
        self.must(not left, f"left behind: {', '.join(sorted(left)[:3])}")


def brief(words: Iterable[Argument], length: int = 160) -> str:
    text = " ".join(map(str, words))
    return text if len(text) <= length else text[: length - 3] + "..."


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way to do harm: how often it is tried, and how."""

    name: str
    what: str  # it does, in a line
    count: Callable[[Any], int]  # of different trials there are, or are asked for; the house is ready then
    trial: Callable[[Trial], None]
    short: int | tuple[int, ...]  # how many of them, or which, are a little of it


Attempts = Sequence[
    tuple[Callable[[Trial, int], None], int, int]
]  # what is tried, how often, and how often in short


def kind_of(name: str, what: str, attempts: Attempts) -> Kind:
    """A kind of several attempts, one after the other; in short the first few of each."""

    def trial(t: Trial) -> None:
        place = t.number
        for attempt, size, _ in attempts:
            if place < size:
                t.tell(f"{attempt.__name__}:")
                attempt(t, place)
                return
            place -= size
        t.skipped = "there is no such trial"

    begins = accumulate((size for _, size, _ in attempts), initial=0)
    short = (begin + n for begin, (_, _, few) in zip(begins, attempts, strict=False) for n in range(few))
    return Kind(
        name=name,
        what=what,
        count=lambda _: sum(size for _, size, _ in attempts),
        trial=trial,
        short=tuple(short),
    )
