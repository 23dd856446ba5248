"""Forecasts how long a run takes, from the measured speed of this machine."""

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from llamatrain.gguf import quants
from llamatrain.gguf.types import GgmlType
from llamatrain.planner.cost import plan_cost
from llamatrain.planner.memory import MemoryPlan
from llamatrain.planner.speeds import OpSpeeds, get_speeds
from llamatrain.train.graphs import StepSpec

OVERHEAD = 5e-4  # seconds of a step that are between its programs
ENCODED = (1024, 256)  # weights whose encoding is timed


@dataclass(frozen=True, kw_only=True)
class TimeForecast:
    """The time of a run's steps, without validation, samples and saves."""

    step_seconds: float  # seconds
    tokens: int  # per step, with padding
    steps: int | None  # remaining steps; None: unknown
    speeds: OpSpeeds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, including padding."""
        return self.tokens / self.step_seconds

    @property
    def run_seconds(self) -> float | None:
        """Seconds of all steps, or None if their number is not known."""
        return None if self.steps is None else self.steps * self.step_seconds


def forecast_time(
    plan: MemoryPlan, batches: int, steps: int | None, measure: bool = False
) -> TimeForecast | str:
    """Forecast steps of this many batches, or return why that is not possible. `measure` measures again."""
    spec, optimizer = plan.spec, plan.spec.optimizer
    if optimizer and not spec.rule:
        return f"unknown: the number of evaluations per step of {type(optimizer).__name__} varies"
    speeds = get_speeds(spec, measure)
    if speeds is None:
        return "known once a first run has compiled the kernels"
    seconds = plan_cost(plan, batches, speeds.node_seconds) + rounding_seconds(spec)
    tokens = batches * plan.splits * spec.batch * spec.rope_length
    return TimeForecast(step_seconds=seconds + OVERHEAD, tokens=tokens, steps=steps, speeds=speeds)


def rounding_seconds(spec: StepSpec) -> float:
    """Return the seconds in which the trained weights of a step are rounded, by the time of a sample of each type."""
    elements = Counter[GgmlType]()
    for weight in spec.rounded.values():
        elements[weight.kind] += weight.stored.size if weight.rounded is not None else 0
    return sum(count * encoding_seconds(kind, spec.threads) for kind, count in elements.items())


def encoding_seconds(kind: GgmlType, threads: int) -> float:
    """Time how long it takes to encode one weight as a type: the shortest of three times."""
    sample = np.random.default_rng(0).standard_normal(ENCODED, np.float32)
    quants.encode(sample[:1], kind, threads=threads)  # compiles
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        quants.encode(sample, kind, threads=threads)
        seconds.append(time.perf_counter() - start)
    return min(seconds) / sample.size
