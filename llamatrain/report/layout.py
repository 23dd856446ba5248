"""Lines of segments for the terminal; on a narrow terminal the least important segments are dropped."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

from rich.text import Text

from llamatrain.report.format import format_duration, format_loss, format_perplexity, format_step_time
from llamatrain.report.records import Score, StepLine

GAP = "  "


class Segment(NamedTuple):
    """A label with a value."""

    label: str
    value: str
    rank: int  # low ranks are dropped first
    style: str = ""

    @property
    def width(self) -> int:
        """The width in characters."""
        return len(self.label) + bool(self.label) + len(self.value)


def fit_segments(candidates: Sequence[Segment], width: int | None) -> list[Segment]:
    """Return as many segments as fit, in order, at least one."""
    segments = list(candidates)
    while width is not None and len(segments) > 1 and total_width(segments) > width:
        segments.remove(min(segments, key=lambda piece: piece.rank))
    return segments


def total_width(segments: Sequence[Segment]) -> int:
    """Return the width of segments with the gaps between them."""
    return sum(segment.width for segment in segments) + len(GAP) * (len(segments) - 1)


def join_segments(segments: Sequence[Segment]) -> Text:
    """Return the segments as styled text."""
    text = Text(no_wrap=True)
    for n, segment in enumerate(segments):
        text.append(GAP if n else "")
        text.append(f"{segment.label} " if segment.label else "", "bright_black")
        text.append(segment.value, segment.style)
    return text


# ---- steps and scores -------------------------------------------------------


def position_segments(line: StepLine) -> Iterator[Segment]:
    """Yield epoch and sample of a step."""
    if line.epoch and line.sample and line.samples:
        yield Segment("epoch", str(line.epoch), 1)
        yield Segment("sample", f"{line.sample:>{len(f'{line.samples:,}')},}/{line.samples:,}", 1)


def reward_segments(record: StepLine | Score) -> Iterator[Segment]:
    """Yield the rewards of compared or generated answers, and for steps what else is measured."""
    if record.reward is not None:
        yield Segment("reward", f"{record.reward:>7.4f}", 10, "bold green")
    if isinstance(record, StepLine) and record.reward is not None:
        yield from answer_segments(record)
    if record.margin is not None:
        yield Segment("margin", f"{record.margin:>7.4f}", 8, "bold")
    if isinstance(record, StepLine) and record.accuracy is not None:
        yield Segment("accuracy", f"{100 * record.accuracy:5.1f} %", 7)


def answer_segments(line: StepLine) -> Iterator[Segment]:
    """Yield what is measured of the generated answers of a step."""
    if line.reward_std is not None:
        yield Segment("std", f"{line.reward_std:.3f}", 5)
    if line.answer_tokens is not None:
        yield Segment("answer", f"{line.answer_tokens:.4g} tokens", 4)
    if line.truncated:
        yield Segment("truncated", f"{100 * line.truncated:.0f} %", 6)
    if line.kl is not None:
        yield Segment("kl", f"{line.kl:.4f}", 6)
    if line.clipped is not None:
        yield Segment("clipped", f"{100 * line.clipped:.1f} %", 5)


def score_segments(score: Score, encoding: str) -> Iterator[Segment]:
    """Yield the numbers of a validation."""
    if score.reward is not None:  # the loss is minus this
        error = format_error(lambda value: f"{value:.2g}", score.loss_error, encoding)
        yield Segment("reward", f"{score.reward:.4f}{error}", 10, "bold green")
        yield Segment("", f"{score.answers} answers, {score.tokens:,} tokens", 1)
        return
    yield Segment(
        "loss",
        f"{format_loss(score.loss):>7}{format_error(format_loss, score.loss_error, encoding)}",
        10,
        "bold yellow",
    )
    if score.answers is None:
        yield Segment("perplexity", format_perplexity(score.loss), 2)
    yield from reward_segments(score)
    if shown := format_accuracy(score, encoding):
        yield Segment("accuracy", shown, 3)
    yield Segment("", f"{score.tokens:,} tokens", 1)


def score_metrics(
    step: int, score: Score, best: bool = False, kind: str = "val"
) -> dict[str, int | float | bool]:
    """Return a validation as a line of metrics.jsonl; the names of its values begin with its kind."""
    values = {f"{kind}_{name}": value for name, value in asdict(score).items() if value is not None}
    first = {"step": step, **{name: values.pop(name) for name in (f"{kind}_loss", f"{kind}_tokens")}}
    return {**first, **values, **({"best": True} if best else {})}


def format_accuracy(score: Score, encoding: str) -> str:
    """Format the accuracy of a score in percent."""
    if score.accuracy is None:
        return ""
    error = format_error(lambda value: f"{100 * value:.2g}", score.accuracy_error, encoding)
    return f"{100 * score.accuracy:.1f}{error} %"


def format_error(format_value: Callable[[float], str], error: float | None, encoding: str) -> str:
    """Format a standard error, with plus-minus in front."""
    sign = "±" if encoding.startswith("utf") else "+-"
    return "" if error is None else f" {sign} {format_value(error)}"


def retained_summary(losses: Sequence[float], encoding: str) -> str:
    """Return how the loss of data that should not be forgotten changed during a run."""
    first, last = losses[0], losses[-1]
    arrow = "\u2192" if encoding.startswith("utf") else "->"
    change = f"{format_loss(first)} {arrow} {format_loss(last)}" if len(losses) > 1 else format_loss(last)
    return f"loss of the retained data: {change}"


def run_summary(line: StepLine, seconds: float, score: Score | None, encoding: str) -> str:
    """Return the summary of a run, including earlier processes; `score` is the last one."""
    epochs = ""
    if line.epoch and line.sample and line.samples:
        epochs = f", {line.epoch - 1 + line.sample / line.samples:.4g} times through {line.samples:,} samples"
    steps = f"{line.step:,} step{'s' * (line.step != 1)}"
    summary = f"{steps}{epochs}, {line.tokens:,} tokens in {format_duration(seconds)}, {format_step_time(seconds / line.step)} each"
    if score:
        name, value = ("reward", -score.loss) if score.reward is not None else ("loss", score.loss)
        summary += (
            f"; validation {name} {format_loss(value)}{format_error(format_loss, score.loss_error, encoding)}"
        )
        summary += "" if score.margin is None else f", margin {score.margin:.4f}"
        summary += f", accuracy {shown}" if (shown := format_accuracy(score, encoding)) else ""
    return summary
