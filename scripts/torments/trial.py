"""A trial with its own random numbers and folder, and the checks of how a process ended."""

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from torments.processes import Job, ProcessResult, Running, fork_process, start_process

MEASURE_SECONDS = 5.0  # that `plan` may take to measure the speed of the machine
SECONDS = 4.0  # CPU time of small commands; 2.2 s were seen on a loaded machine
MEMORY = 200_000_000  # bytes, their peak
LONGEST_LINE = 700  # characters of a line of error
INTERRUPTED = 130
Argument = str | int | float | Path


def find_faults(
    result: ProcessResult,
    codes: Iterable[int] = (0, 1, 2),
    seconds: float = SECONDS,
    memory: float = MEMORY,
    check_errors: bool = True,
) -> list[str]:
    """Return what is wrong with how a process ended.

    `check_errors` also requires exactly one line of error for the exit codes 1 and 2.
    """
    faults = []
    if result.timed_out:
        faults.append(
            f"did not end: {result.wall:.0f} s, {result.cpu:.1f} s of CPU, {result.peak / 1e6:.0f} MB"
        )
    elif result.code < 0 and result.code not in codes:
        faults.append(f"died of signal {-result.code}")
    elif result.code not in codes:
        faults.append(f"exit code {result.code}, not one of {sorted(codes)}: {last_line(result.err)}")
    if "Traceback" in result.err + result.out:
        faults.append(f"a traceback: {last_line(result.err)}")
    elif check_errors and result.code in (1, 2) and len(result.errors) != 1:
        faults.append(
            f"exit code {result.code} with {len(result.errors)} lines of error: {last_line(result.err)}"
        )
    if result.code == 0 and result.errors:
        faults.append(f"exit code 0 with an error: {result.errors[0]}")
    faults += [
        f"a line of {len(line)} characters: {line[:80]}" for line in result.errors if len(line) > LONGEST_LINE
    ]
    if result.compiled:
        seconds = memory = math.inf
    if result.cpu > seconds and not result.timed_out:
        faults.append(f"took {result.cpu:.1f} s of CPU, more than {seconds:g}")
    if result.peak > memory:
        faults.append(f"peak of {result.peak / 1e6:.0f} MB, more than {memory / 1e6:.0f}")
    return faults + [f"a process still runs: {name}" for name in result.survivors]


def last_line(text: str) -> str:
    """Return the last line of a text, shortened."""
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "(no output)"


@dataclass(kw_only=True)
class Trial:
    """One attempt to do harm. Everything in it follows from seed, kind and number."""

    kind: str
    number: int
    seed: int
    root: Path  # a folder for this trial alone
    fixtures: Any
    faults: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)  # exit codes of checked commands
    longest: float = 0.0  # CPU seconds of one command
    highest: int = 0  # bytes of one command
    skipped: str = ""

    def __post_init__(self) -> None:
        self.random = Random(f"{self.seed} {self.kind} {self.number}")
        self.folder = self.root / "here"
        shutil.rmtree(self.root, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def job(self, words: Iterable[Argument], cache: Path | None, **more: Any) -> Job:
        """Return a job in the folder of this trial."""
        return Job(
            words=tuple(map(str, words)), folder=self.folder, cache=cache or self.fixtures.cache, **more
        )

    def start(
        self,
        *words: Argument,
        real: bool = False,
        cache: Path | None = None,
        plan: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Running:
        """Start the command; `real` starts a new interpreter instead of a fork."""
        self.log(" ".join(map(str, words)), plan)
        return (start_process if real else fork_process)(self.job(words, cache, plan=plan or {}, **more))

    def run(
        self, *words: Argument, check: bool = True, codes: Iterable[int] = (0, 1, 2), **more: Any
    ) -> ProcessResult:
        """Run the command to its end and note what is wrong with it."""
        usual = {"seconds": SECONDS + MEASURE_SECONDS} if words[0] == "plan" else {}
        limits = usual | {
            name: more.pop(name) for name in ("seconds", "memory", "check_errors") if name in more
        }
        before = set(self.root.iterdir())  # temporary files included
        timeout = {"seconds": max(60.0, 3 * limits["seconds"])} if limits.get("seconds") else {}
        result = self.start(*words, **timeout, **more).wait()
        if check and result.code >= 0:
            left = [
                path.name for path in set(self.root.iterdir()) - before if path.name.startswith((".", "tmp"))
            ]
            self.expect(not left, f"temporary files are left: {', '.join(sorted(left)[:3])} [{brief(words)}]")
        if check:
            self.codes.append(result.code)
            if not result.compiled:
                self.longest, self.highest = max(self.longest, result.cpu), max(self.highest, result.peak)
            self.faults += [
                f"{fault} [{brief(words)}]" for fault in find_faults(result, tuple(codes), **limits)
            ]
        return result

    def log(self, text: str, plan: Mapping[str, Any] | None = None) -> None:
        """Note an event; a failure prints them all."""
        self.story.append(f"{text}  {dict(plan)}" if plan else text)

    def expect(self, condition: object, text: str) -> bool:
        """Note a fault unless a condition holds; return whether it holds."""
        if not condition:
            self.faults.append(text)
        return bool(condition)

    def copy_files(self, *names: str) -> None:
        """Copy fixtures into the folder of this trial."""
        for name in names:
            source = self.fixtures.files / name
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, self.folder / name)

    def check_gguf(self, *places: Path) -> bool:
        """Check that every GGUF file in these places opens."""
        files = [
            path
            for place in places
            for path in ([place] if place.is_file() else sorted(place.rglob("*.gguf")))
        ]
        fine = True
        for path in files:
            if path.is_file():
                result = fork_process(self.job(("inspect", "--json", path), None)).wait()
                fine &= self.expect(result.code == 0, f"{path.name} does not open: {last_line(result.err)}")
        return fine

    def check_leftovers(self, *places: Path) -> None:
        """Check that no unfinished files lie in these folders."""
        left = [
            path.name
            for folder in places
            if folder.is_dir()
            for path in folder.rglob(".*")
            if not path.name.startswith(".lock")
        ]
        self.expect(not left, f"unfinished files are left: {', '.join(sorted(left)[:3])}")


def brief(words: Iterable[Argument], length: int = 160) -> str:
    """Return words as a line of limited length."""
    text = " ".join(map(str, words))
    return text if len(text) <= length else text[: length - 3] + "..."


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of trials."""

    name: str
    what: str  # a line for the table
    count: Callable[[Any], int]  # the number of trials, once the fixtures are ready
    trial: Callable[[Trial], None]
    short: int | tuple[int, ...]  # with --short: how many of them, or which


Attempts = Sequence[
    tuple[Callable[[Trial, int], None], int, int]
]  # functions with their numbers of trials in full and with --short


def build_kind(name: str, what: str, attempts: Attempts) -> Kind:
    """Build a kind that runs several functions in order, with --short only the first trials of each."""

    def trial(t: Trial) -> None:
        """Run the function that this trial's number belongs to."""
        index = t.number
        for attempt, size, _ in attempts:
            if index < size:
                t.log(f"{attempt.__name__}:")
                attempt(t, index)
                return
            index -= size
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
