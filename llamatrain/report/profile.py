"""Formats a profile as a table, and as a trace for Chrome (chrome://tracing) and Perfetto.

The trace has Chrome's format: complete events (ph "X") in microseconds since the process began.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llamatrain.engine.profiler import Recorder, TraceSpan
from llamatrain.graph.node_roles import NodeRole

NAME, COLUMN = 28, 10  # characters
MIN_SECONDS = 0.0005  # shorter phases are not listed
HERE = {"pid": 1, "tid": 1}


@dataclass
class OpTotal:
    """Totals of all nodes with one op and role."""

    calls: int = 0
    seconds: float = 0.0
    flops: int = 0
    moved: int = 0

    @property
    def rate(self) -> str:
        """The speed in words."""
        if not self.seconds:
            return ""
        speed, unit = (self.flops, "GFLOP/s") if self.flops else (self.moved, "GB/s")
        return f"{speed / self.seconds / 1e9:,.1f} {unit}"


def total_by_op(recorder: Recorder) -> dict[tuple[str, NodeRole], OpTotal]:
    """Return totals by op and role over whole steps, the slowest first."""
    totals: dict[tuple[str, NodeRole], OpTotal] = defaultdict(OpTotal)
    for op in recorder.ops:
        if op.calls:
            total = totals[op.node.op.name, op.role]
            total.calls, total.seconds = total.calls + op.calls, total.seconds + op.seconds
            total.flops = total.flops + op.calls * op.cost.flops
            total.moved = total.moved + op.calls * op.cost.bytes_moved
    return dict(sorted(totals.items(), key=lambda entry: -entry[1].seconds))


# ---- the table -------------------------------------------------------------


def profile_table(recorder: Recorder) -> Iterator[str]:
    """Yield the lines of the table."""
    yield from _start_rows(recorder)
    if recorder.steps:
        yield from _step_rows(recorder)
        yield from _other_rows(recorder)


def _start_rows(recorder: Recorder) -> Iterator[str]:
    phases, total = recorder.startup_times()
    yield f"{'until the first step' if recorder.first_op_time else 'until the end':{NAME + 2}}{'s':>{COLUMN}}"
    for name, seconds in (*phases.items(), ("all else", total - sum(phases.values())), ("in all", total)):
        yield f"  {name:{NAME}}{seconds:{COLUMN}.3f}"


def _step_rows(recorder: Recorder) -> Iterator[str]:
    steps, sums = recorder.steps, total_by_op(recorder)
    yield f"{'a step':{NAME + 2}}{'':{COLUMN}}{'calls':>{COLUMN}}{'ms':>{COLUMN}}{'share':>{COLUMN}}"

    def row(name: str, part: str, calls: str, seconds: float, rate: str = "") -> str:
        share = f"{seconds / recorder.seconds if recorder.seconds else 0.0:.1%}".replace("%", " %")
        figures = f"{calls:>{COLUMN}}{1e3 * seconds / steps:{COLUMN},.3f}{share:>{COLUMN}}"
        return f"  {name:{NAME}}{part:{COLUMN}}{figures}  {rate:>16}".rstrip()

    for (op, part), total in sums.items():
        yield row(op, part, f"{total.calls / steps:,.4g}", total.seconds, total.rate)
    others = recorder.seconds - recorder.waited - sum(total.seconds for total in sums.values())
    yield row("waiting for data", "", "", recorder.waited)
    yield row("Python, between kernels", "", "", others)
    yield row(f"in all, of {steps:,} steps", "", "", recorder.seconds)


def _other_rows(recorder: Recorder) -> Iterator[str]:
    if phases := [
        f"{name} {seconds:.3f} s"
        for name, seconds in recorder.between_steps.items()
        if seconds >= MIN_SECONDS
    ]:
        yield f"beside the steps: {', '.join(phases)}"
    yield (
        "each op was run by itself, which takes a step somewhat longer; FLOPs of attention are those "
        "of whole rows"
    )


# ---- the trace -------------------------------------------------------------


def trace_json(recorder: Recorder, title: str) -> bytes:
    """Return the trace as JSON, one event per line."""
    spans = [_event(recorder, span) for span in (*recorder.spans, *recorder.traced)]
    events = [
        {"name": "process_name", "ph": "M", **HERE, "args": {"name": title}},
        {"name": "thread_name", "ph": "M", **HERE, "args": {"name": "run"}},
        *sorted(spans, key=lambda event: (event["ts"], -event["dur"])),
    ]
    head = json.dumps({"displayTimeUnit": "ms", "otherData": {"holds": trace_contents(recorder)}})
    lines = ",\n".join(map(json.dumps, events))
    return f'{head.removesuffix("}")}, "traceEvents": [\n{lines}\n]}}\n'.encode()


def _event(recorder: Recorder, span: TraceSpan) -> dict[str, Any]:
    """Return a span as an event, rounded to 0.1 microseconds, the clock's resolution."""
    start, end = (round(1e6 * (time - recorder.start_time), 1) for time in (span.start, span.end))
    event = {
        "name": span.name,
        "cat": span.kind,
        "ph": "X",
        "ts": start,
        "dur": round(end - start, 1),
        **HERE,
    }
    if span.node:
        event["args"] = {"makes": span.node.name, "shape": str([*span.node.outputs[0].shape])}
    return event


def trace_contents(recorder: Recorder) -> str:
    """Describe which steps have their ops in the trace."""
    numbers = recorder.traced_steps
    if not numbers:
        return "the start alone"
    steps = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"
    ops = f"the first {len(recorder.traced):,} ops" if recorder.ops_are_full else "the ops"
    return f"{ops} of {steps}, and {'the first' if recorder.dropped else 'all'} steps as wholes"
