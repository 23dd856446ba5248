"""Interfaces between the training loop and the rest: batches, listeners, signals, input guards."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from llamatrain.data.batches import Batch, CursorState
from llamatrain.errors import LlamatrainError
from llamatrain.report.records import Score, StepLine

if TYPE_CHECKING:
    from llamatrain.train.evaluate import BatchLoss
    from llamatrain.train.programs import EvalPrograms
    from llamatrain.train.state import RunState


class TrainingError(LlamatrainError):
    """The loss, a gradient or a weight is NaN or infinite, or an input file changed."""


class TrainingInterrupted(Exception):
    """A signal arrived. The run must be saved as it is."""


class InputChanged(Exception):
    """A file that the steps read has changed. The steps before it must be saved.

    The message says how to resume; the loop adds the checkpoint.
    """


class Batches(Protocol):
    """A source of batches with a position that can be saved."""

    @property
    def state(self) -> CursorState:
        """The position in the data, for a checkpoint."""

    def batch(self, count: int) -> Batch:
        """Return the next batch of `count` rows."""

    def one_epoch(self, count: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """Yield all rows once, in batches of `count`.

        With several ranks, yield only those of rank `rank` of `ranks`.
        """


class SkippableLoader(Batches, Protocol):
    """A source of batches that can skip rows."""

    def skip(self, count: int) -> None:
        """Skip `count` rows without building them."""


class AnswerSource(Protocol):
    """Generates and rewards the answers that are trained."""

    def next_batches(self, state: "RunState", read: Callable[[], list[Batch]]) -> list[Batch]:
        """Return this rank's micro-batches of the next step; `read` reads its prompts."""

    def evaluate(self, programs: "EvalPrograms", batch: Batch) -> "BatchLoss":
        """Return the score of answers to a batch of prompts."""


class Listener(Protocol):
    """Receives the events of a run, for the terminal and the logs."""

    def on_step(self, line: StepLine) -> None:
        """Report a completed step."""

    def log(self, line: str) -> None:
        """Print a line."""

    def show_activity(self) -> None:
        """Report that a validation begins."""

    def on_validation(self, step: int, score: Score, best: bool = False) -> None:
        """Report the score of a validation, and if it is the best so far."""

    def on_retained(self, step: int, score: Score) -> None:
        """Report the score of data that should not be forgotten."""

    def on_save(self, step: int, path: str) -> None:
        """Report a checkpoint."""

    def on_save_error(self, step: int, why: str) -> None:
        """Report that a checkpoint could not be written, and why."""


class Signals(Protocol):
    """The signals that end a run in order."""

    pending: int  # number of the signal that arrived, or 0
    can_save: bool  # False: there is nothing to save, and a signal ends the process at once


@dataclass
class NoSignals:
    """Never receives a signal."""

    pending: int = 0
    can_save: bool = False


class InputGuard(Protocol):
    """Guards input files that steps read in place (the mapped base)."""

    possible_cause: str  # a change of the input that may explain NaN

    def check(self) -> None:
        """Raise InputChanged if an input is not what it was."""

    def report(self) -> None:
        """Report the state of the other input files, before a save."""


@dataclass
class NoInputGuard:
    """Guards nothing."""

    possible_cause: str = ""

    def check(self) -> None:
        """Do nothing."""

    def report(self) -> None:
        """Do nothing."""
