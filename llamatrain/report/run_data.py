"""What a run's folder tells of it: read with distrust, and what is damaged or missing is left out."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamatrain.config.read_limited import contents
from llamatrain.errors import FileError, LlamatrainError
from llamatrain.report.memory_layout import MemoryLayout
from llamatrain.report.metrics import lines_of
from llamatrain.report.series import RunSeries, number

METRICS, SAMPLES, TOLD, TRACE, CONFIG, PAGE = (
    "metrics.jsonl",
    "samples.jsonl",
    "report.json",
    "trace.json",
    "config.toml",
    "report.html",
)
LARGEST = 8 << 20  # bytes of a trace; of other files much less
FILES, SAMPLES_SHOWN, FACTS, OPS, OPTIONS = 40, 40, 20, 16, 300
MANY = 2000  # samples that are held at once


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    step: int
    text: str = ""
    waves: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # the sine, and the model's


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Seconds by phase, and by op and part, of so many steps."""

    phases: dict[str, float]
    ops: dict[tuple[str, str], tuple[int, float]]
    holds: str


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run, as its folder has it."""

    folder: Path
    figures: RunSeries
    options: dict[str, Any]
    command: str
    facts: list[tuple[str, str]]
    ended: str
    arena: MemoryLayout | None
    samples: list[ShownSample]
    profile: Profile | None
    files: list[tuple[str, int]]

    @property
    def name(self) -> str:
        return self.folder.resolve().name or str(self.folder)

    @property
    def iters(self) -> int | None:
        found = self.options.get("iters")
        return found if type(found) is int and found > 0 else None


def kept_in(folder: Path, tell: Callable[[str], None] = lambda line: None) -> RunData:
    """All that is there. It is told which lines of the figures are damaged."""
    told = json_of(folder / TOLD)
    figures = RunSeries.of(line for _, line in lines_of(folder / METRICS, tell))
    options, command = options_of(folder / CONFIG)
    ended = told.get("ended")
    return RunData(
        folder=folder,
        figures=figures,
        options=options,
        command=command,
        facts=list(facts_of(told.get("facts"))),
        ended=ended[:200] if isinstance(ended, str) else "",
        arena=MemoryLayout.read(told.get("memory")),
        samples=samples_of(folder / SAMPLES, figures.step),
        profile=profile_of(json_of(folder / TRACE)),
        files=files_of(folder),
    )


def json_of(path: Path) -> dict[str, Any]:
    with suppress(LlamatrainError, ValueError, RecursionError):
        found = json.loads(contents(path, LARGEST, "a file of a run"))
        if isinstance(found, dict):
            return found
    return {}


def options_of(path: Path) -> tuple[dict[str, Any], str]:
    """As they were resolved; and which command it was, by the comment at the head."""
    import tomllib

    with suppress(LlamatrainError, ValueError, RecursionError):
        text = contents(path, 1 << 20, "a file of options").decode()
        head = text.partition("\n")[0].removeprefix("# ").split()
        command = head[1] if head[:1] == ["llamatrain"] and len(head) > 1 else ""
        return dict(list(tomllib.loads(text).items())[:OPTIONS]), command
    return {}, ""


def facts_of(told: Any) -> Iterator[tuple[str, str]]:
    for each in told[:FACTS] if isinstance(told, list) else ():
        match each:
            case [str(name), str(value)]:
                yield name[:40], value[:1000]


def samples_of(path: Path, last: int) -> list[ShownSample]:
    """By steps, of each the last one; of many some, the first and the last among them."""
    found = dict[int, ShownSample]()
    with suppress(FileError):
        for _, line in lines_of(path):
            if 0 <= line["step"] <= last and (sample := sample_of(line)):
                found[sample.step] = sample
                if len(found) > MANY:
                    found = {
                        step: found[step]
                        for place, step in enumerate(sorted(found))
                        if place % 2 == 0 or step == sample.step
                    }
    every = [found[step] for step in sorted(found)]
    apart = max(1, math.ceil((len(every) - 1) / (SAMPLES_SHOWN - 1)))
    return [
        sample
        for place, sample in enumerate(reversed(every))
        if place % apart == 0 or place == len(every) - 1
    ][::-1]


def sample_of(line: dict[str, Any]) -> ShownSample | None:
    match line:
        case {"step": int(step), "text": str(text)}:
            return ShownSample(step=step, text=text)
        case {"step": int(step), "target": list(target), "model": list(model)} if target and len(
            target
        ) == len(model):
            waves = tuple(tuple(number(each, 1e6) for each in wave) for wave in (target, model))
            return ShownSample(step=step, waves=(waves[0], waves[1]))
    return None


def profile_of(trace: dict[str, Any]) -> Profile | None:
    """Of Chrome's events: those before the steps, and the ops of the first of these."""
    phases, ops = defaultdict[str, float](float), dict[tuple[str, str], tuple[int, float]]()
    events, other = trace.get("traceEvents"), trace.get("otherData")
    for event in events if isinstance(events, list) else ():
        match event:
            case {"name": str(name), "cat": str(part), "dur": int() | float() as lasted} if (
                0 <= lasted < 1e15
            ):
                if "args" in event:
                    calls, seconds = ops.get((name[:60], part[:20]), (0, 0.0))
                    ops[name[:60], part[:20]] = calls + 1, seconds + lasted / 1e6
                elif part == "start":
                    phases[name[:60]] += lasted / 1e6
    if not ops and not phases:
        return None
    most = sorted(ops.items(), key=lambda each: -each[1][1])[:OPS]
    holds = other.get("holds") if isinstance(other, dict) else None
    return Profile(
        phases=dict(list(phases.items())[:OPS]),
        ops=dict(most),
        holds=holds[:100] if isinstance(holds, str) else "",
    )


def files_of(folder: Path) -> list[tuple[str, int]]:
    """By name, with their sizes; but the page itself."""
    found = list[tuple[str, int]]()
    with suppress(OSError), os.scandir(folder) as there:
        for each in there:
            if each.is_file() and not each.name.startswith(".") and each.name != PAGE:
                found.append((each.name, each.stat().st_size))
    return sorted(found)[:FILES]
