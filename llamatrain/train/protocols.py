"""Whom the training loop deals with: where batches come from, who is told, what may end a run before its end."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from llamatrain.data.batches import Batch, CursorState
from llamatrain.errors import LlamatrainError
from llamatrain.report.records import Score, StepLine


class TrainingError(LlamatrainError):
    """A loss or a gradient that is no number, or one of what is not there any more."""


class TrainingInterrupted(Exception):
    """A signal came: the run is to be saved as it stands."""


class InputChanged(Exception):
    """What the steps read is not what it was: those before are to be saved. It says how a run goes on, from where is added."""


class Batches(Protocol):
    """Where they come from."""

    @property
    def state(self) -> CursorState: ...

    def batch(self, count: int) -> Batch: ...

    def once(self, count: int, mine: int = 0, of: int = 1) -> Iterator[Batch]:
        """All rows, in batches; of so many who share those out, each in its turn, only the ones that are `mine`."""


class SkippableLoader(Batches, Protocol):
    def skip(self, count: int) -> None:
        """Go past so many rows, which are not made."""


class Listener(Protocol):
    """Whoever is told of the run."""

    def step(self, line: StepLine) -> None: ...

    def say(self, line: str) -> None: ...

    def evaluating(self) -> None: ...

    def validation(self, step: int, score: Score, best: bool = False) -> None: ...

    def saved(self, step: int, path: str) -> None: ...

    def unsaved(self, step: int, why: str) -> None: ...


class Signals(Protocol):
    """Those that end a run in order."""

    asked: int  # the number of the one that came, or 0
    saving: bool  # whether there is something to save; until then a signal ends the process at once


@dataclass
class NoSignals:
    """No signals at all."""

    asked: int = 0
    saving: bool = False


class InputGuard(Protocol):
    """What steps read beside their rows."""

    blame: str  # what was done to it so far that may be why a number is none

    def check(self) -> None:
        """Raise `Changed` where it is not what it was."""

    def tell(self) -> None:
        """What became of the rest, before a save."""


@dataclass
class NoInputGuard:
    blame: str = ""

    def check(self) -> None: ...

    def tell(self) -> None: ...
