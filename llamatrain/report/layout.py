"""Lines made of pieces: what a terminal is too narrow for is left out, the least important first."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

from rich.text import Text

from llamatrain.report.format import amount, duration, perplexity, time_of_step
from llamatrain.report.records import Score, StepLine

GAP = "  "


class Segment(NamedTuple):
    label: str
    value: str
    rank: int  # those of low rank are left out first
    style: str = ""

    @property
    def width(self) -> int:
        return len(self.label) + bool(self.label) + len(self.value)


def fitted(pieces: Sequence[Segment], width: int | None) -> list[Segment]:
    """As many of the pieces as fit, in their order; one at least."""
    kept = list(pieces)
    while width is not None and len(kept) > 1 and width_of(kept) > width:
        kept.remove(min(kept, key=lambda piece: piece.rank))
    return kept


def width_of(pieces: Sequence[Segment]) -> int:
    return sum(piece.width for piece in pieces) + len(GAP) * (len(pieces) - 1)


def assembled(pieces: Sequence[Segment]) -> Text:
    text = Text(no_wrap=True)
    for n, piece in enumerate(pieces):
        text.append(GAP if n else "")
        text.append(f"{piece.label} " if piece.label else "", "bright_black")
        text.append(piece.value, piece.style)
    return text


# ---- steps and scores -------------------------------------------------------


def place_of(line: StepLine) -> Iterator[Segment]:
    """The epoch, and the sample of all."""
    if line.epoch and line.sample and line.samples:
        yield Segment("epoch", str(line.epoch), 1)
        yield Segment("sample", f"{line.sample:>{len(f'{line.samples:,}')},}/{line.samples:,}", 1)


def rewards_of(told: StepLine | Score) -> Iterator[Segment]:
    """How far answers that are compared are apart."""
    if told.margin is not None:
        yield Segment("margin", f"{told.margin:>7.4f}", 8, "bold")
    if isinstance(told, StepLine) and told.accuracy is not None:
        yield Segment("accuracy", f"{100 * told.accuracy:5.1f} %", 7)


def scores_of(score: Score, encoding: str) -> Iterator[Segment]:
    yield Segment(
        "loss", f"{amount(score.loss):>7}{spread(amount, score.loss_error, encoding)}", 10, "bold yellow"
    )
    if score.answers is None:
        yield Segment("perplexity", perplexity(score.loss), 2)
    yield from rewards_of(score)
    if told := accuracy(score, encoding):
        yield Segment("accuracy", told, 3)
    yield Segment("", f"{score.tokens:,} tokens", 1)


def figures_of(step: int, score: Score, best: bool) -> dict[str, int | float | bool]:
    """A line of metrics."""
    told = {f"val_{name}": value for name, value in asdict(score).items() if value is not None}
    first = {"step": step, "val_loss": told.pop("val_loss"), "val_tokens": told.pop("val_tokens")}
    return {**first, **told, **({"best": True} if best else {})}


def accuracy(score: Score, encoding: str) -> str:
    if score.accuracy is None:
        return ""
    return f"{100 * score.accuracy:.1f}{spread(lambda error: f'{100 * error:.2g}', score.accuracy_error, encoding)} %"


def spread(worded: Callable[[float], str], error: float | None, encoding: str) -> str:
    sign = "±" if encoding.startswith("utf") else "+-"
    return "" if error is None else f" {sign} {worded(error)}"


def summary(line: StepLine, seconds: float, score: Score | None, encoding: str) -> str:
    """Those of earlier processes included; the score is the last."""
    seen = ""
    if line.epoch and line.sample and line.samples:
        seen = f", {line.epoch - 1 + line.sample / line.samples:.4g} times through {line.samples:,} samples"
    steps = f"{line.step:,} step{'s' * (line.step != 1)}"
    told = f"{steps}{seen}, {line.tokens:,} tokens in {duration(seconds)}, {time_of_step(seconds / line.step)} each"
    if score:
        told += f"; validation loss {amount(score.loss)}{spread(amount, score.loss_error, encoding)}"
        told += "" if score.margin is None else f", margin {score.margin:.4f}"
        told += f", accuracy {right}" if (right := accuracy(score, encoding)) else ""
    return told
