"""The result of a training run in Python."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llamatrain.report.format import format_loss
from llamatrain.report.metrics import read_lines
from llamatrain.run.summary import RunResult

Points = list[tuple[int, float]]  # steps and values


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of a training run."""

    folder: Path
    result: Path  # model.gguf or adapter.gguf
    losses: list[float]  # one per step, with those before a resume; NaN: not recorded
    validations: Points  # steps and losses
    margins: Points  # steps and reward margins, with preference training
    rewards: Points  # steps and mean rewards of their generated answers
    retained: Points  # steps and losses of the data that should not be forgotten
    steps: int
    best: Path | None  # the model or adapter with the lowest validation loss
    finished: bool  # False: steps are left, which `resume=run.folder` runs
    reason: str  # why the run stopped
    notes: tuple[str, ...]
    perplexity: float | None  # of the last validation; None where answers or texts are compared

    def _repr_html_(self) -> str:
        """Return the run for a notebook: what it made, and its curves."""
        from llamatrain.report.notebook import run_html

        loss = self.losses[-1] if self.losses else math.nan
        facts = [
            ("result", str(self.result)),
            ("steps", f"{self.steps:,}{'' if self.finished else f' ({self.reason})'}"),
            ("loss", format_loss(loss)),
        ]
        facts += [("validation", format_loss(self.validations[-1][1]))] if self.validations else []
        facts += [("perplexity", f"{self.perplexity:,.2f}")] if self.perplexity is not None else []
        facts += [("best", str(self.best))] if self.best else []
        return run_html(self.folder, facts)


class RunMetrics(NamedTuple):
    """The numbers of a run's metrics.jsonl."""

    losses: list[float]
    validations: Points
    margins: Points
    rewards: Points
    retained: Points
    perplexity: float | None


def read_metrics(finished: RunResult) -> RunMetrics:
    """Return the numbers of a run's metrics.jsonl."""
    losses, path = [math.nan] * finished.steps, finished.folder / "metrics.jsonl"
    validations, margins, rewards, retained, perplexity = Points(), Points(), Points(), Points(), None
    for _, line in read_lines(path) if path.exists() else ():
        match line:
            case {"step": int(step), "loss": int() | float() as loss, **more} if 0 < step <= finished.steps:
                losses[step - 1] = float(loss)
                if isinstance(reward := more.get("reward"), int | float):
                    rewards.append((step, float(reward)))
            case {"step": int(step), "retain_loss": int() | float() as loss}:
                retained.append((step, float(loss)))
            case {"step": int(step), "val_loss": int() | float() as loss, **more}:
                validations.append((step, float(loss)))
                if isinstance(margin := more.get("val_margin"), int | float):
                    margins.append((step, float(margin)))
                perplexity = None if "val_answers" in more else math.exp(min(loss, 700))
    return RunMetrics(losses, validations, margins, rewards, retained, perplexity)
