"""Reads the data of a run from its folder.

The files are untrusted: what is damaged or missing is left out.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamatrain.config.read_limited import read_limited
from llamatrain.errors import FileError, LlamatrainError
from llamatrain.report.evaluations import ShownEvaluation, read_evaluations
from llamatrain.report.memory_layout import MemoryLayout
from llamatrain.report.metrics import read_lines
from llamatrain.report.series import RunSeries, to_number

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
REPORT_FILE = "report.json"
TRACE = "trace.json"
CONFIG = "config.toml"
PAGE = "report.html"
MAX_TRACE = 8 << 20  # bytes; other files are smaller
FILES, SAMPLES_SHOWN, FACTS, OPS, OPTIONS = 40, 40, 20, 16, 300
MAX_SAMPLES = 2000  # samples in memory at a time


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """A sample: text, or waves."""

    step: int
    text: str = ""
    waves: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # target and model


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Seconds by phase, and calls and seconds by op and role."""

    phases: dict[str, float]
    ops: dict[tuple[str, str], tuple[int, float]]
    holds: str


@dataclass(frozen=True, kw_only=True)
class RunData:
    """A run, as read from its folder."""

    folder: Path
    figures: RunSeries
    options: dict[str, Any]
    command: str
    facts: list[tuple[str, str]]
    ended: str
    arena: MemoryLayout | None
    samples: list[ShownSample]
    evaluations: list[ShownEvaluation]
    profile: Profile | None
    files: list[tuple[str, int]]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name or str(self.folder)

    @property
    def iters(self) -> int | None:
        """The number of steps of the run, or None if unknown."""
        iters = self.options.get("iters")
        return iters if type(iters) is int and iters > 0 else None


def read_run_data(folder: Path, tell: Callable[[str], None] = lambda line: None) -> RunData:
    """Read a run."""
    report = read_json(folder / REPORT_FILE)
    figures = RunSeries.from_lines(line for _, line in read_lines(folder / METRICS, tell))
    options, command = read_options(folder / CONFIG)
    ended = report.get("ended")
    return RunData(
        folder=folder,
        figures=figures,
        options=options,
        command=command,
        facts=list(parse_facts(report.get("facts"))),
        ended=ended[:200] if isinstance(ended, str) else "",
        arena=MemoryLayout.from_json(report.get("memory")),
        samples=read_samples(folder / SAMPLES, figures.step),
        evaluations=read_evaluations(folder),
        profile=parse_profile(read_json(folder / TRACE)),
        files=list_files(folder),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    with suppress(LlamatrainError, ValueError, RecursionError):
        value = json.loads(read_limited(path, MAX_TRACE, "a file of a run"))
        if isinstance(value, dict):
            return value
    return {}


def read_options(path: Path) -> tuple[dict[str, Any], str]:
    """Return the resolved options, and the command from the comment at the head."""
    import tomllib

    with suppress(LlamatrainError, ValueError, RecursionError):
        text = read_limited(path, 1 << 20, "a file of options").decode()
        head = text.partition("\n")[0].removeprefix("# ").split()
        command = head[1] if head[:1] == ["llamatrain"] and len(head) > 1 else ""
        return dict(list(tomllib.loads(text).items())[:OPTIONS]), command
    return {}, ""


def parse_facts(facts: Any) -> Iterator[tuple[str, str]]:
    """Yield the valid names and values."""
    for fact in facts[:FACTS] if isinstance(facts, list) else ():
        match fact:
            case [str(name), str(value)]:
                yield name[:40], value[:1000]


def read_samples(path: Path, last: int) -> list[ShownSample]:
    """Return samples by step, the last one of each; of many a selection with the first and the last."""
    samples = dict[int, ShownSample]()
    with suppress(FileError):
        for _, line in read_lines(path):
            if 0 <= line["step"] <= last and (sample := parse_sample(line)):
                samples[sample.step] = sample
                if len(samples) > MAX_SAMPLES:
                    samples = {
                        step: samples[step]
                        for index, step in enumerate(sorted(samples))
                        if index % 2 == 0 or step == sample.step
                    }
    ordered = [samples[step] for step in sorted(samples)]
    stride = max(1, math.ceil((len(ordered) - 1) / (SAMPLES_SHOWN - 1)))
    return [
        sample
        for index, sample in enumerate(reversed(ordered))
        if index % stride == 0 or index == len(ordered) - 1
    ][::-1]


def parse_sample(line: dict[str, Any]) -> ShownSample | None:
    """Return a sample, or None if the line has none."""
    match line:
        case {"step": int(step), "text": str(text)}:
            return ShownSample(step=step, text=text)
        case {"step": int(step), "target": list(target), "model": list(model)} if target and len(
            target
        ) == len(model):
            waves = tuple(tuple(to_number(value, 1e6) for value in wave) for wave in (target, model))
            return ShownSample(step=step, waves=(waves[0], waves[1]))
    return None


def parse_profile(trace: dict[str, Any]) -> Profile | None:
    """Return the profile in a trace: the phases before the steps, and the ops of the traced steps."""
    phases, ops = defaultdict[str, float](float), dict[tuple[str, str], tuple[int, float]]()
    events, other = trace.get("traceEvents"), trace.get("otherData")
    for event in events if isinstance(events, list) else ():
        match event:
            case {"name": str(name), "cat": str(part), "dur": int() | float() as duration} if (
                0 <= duration < 1e15
            ):
                if "args" in event:
                    calls, seconds = ops.get((name[:60], part[:20]), (0, 0.0))
                    ops[name[:60], part[:20]] = calls + 1, seconds + duration / 1e6
                elif part == "start":
                    phases[name[:60]] += duration / 1e6
    if not ops and not phases:
        return None
    longest = sorted(ops.items(), key=lambda entry: -entry[1][1])[:OPS]
    holds = other.get("holds") if isinstance(other, dict) else None
    return Profile(
        phases=dict(list(phases.items())[:OPS]),
        ops=dict(longest),
        holds=holds[:100] if isinstance(holds, str) else "",
    )


def list_files(folder: Path) -> list[tuple[str, int]]:
    """Return the files by name with their sizes, without the page itself."""
    files = list[tuple[str, int]]()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file() and not entry.name.startswith(".") and entry.name != PAGE:
                files.append((entry.name, entry.stat().st_size))
    return sorted(files)[:FILES]
