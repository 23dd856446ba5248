"""The roles of ranks when a run is saved: rank 0 writes and reports, the others send their parts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llamatrain.distributed.comm import Comm
from llamatrain.errors import FileError
from llamatrain.report.records import Score, StepLine
from llamatrain.train.programs import TrainPrograms
from llamatrain.train.state import RunState

# What rank 0 sends during a save: a kind of state to send to it; or the path of the checkpoint, or the message
# and the code of an error, when it is done.
SaveMessage = tuple[str, str, tuple[str, str] | None]

NO_MESSAGE: SaveMessage = "", "", None


class CheckpointSink(Protocol):
    """Saves a run: at its start, at each save, and at its end."""

    def begin(self, state: RunState) -> str:
        """Save before the first step; return the path of the checkpoint."""

    def save(self, state: RunState, last: bool = False) -> str:
        """Save; return the path of the checkpoint."""

    def end(self, state: RunState) -> None:
        """Finish after the last save."""

    def keep_best(self, state: RunState) -> None:
        """Keep the present weights as the best ones."""


@dataclass
class RankZeroCheckpointer:
    """Saves on rank 0, and broadcasts the outcome, so that a failure stops all ranks."""

    checkpointer: CheckpointSink
    comm: Comm

    def begin(self, state: RunState) -> str:
        """Save before the first step."""
        return self._broadcast(lambda: self.checkpointer.begin(state))

    def save(self, state: RunState, last: bool = False) -> str:
        """Save a checkpoint."""
        return self._broadcast(lambda: self.checkpointer.save(state, last))

    def end(self, state: RunState) -> None:
        """Finish after the last save."""

        def save() -> str:
            self.checkpointer.end(state)
            return ""

        self._broadcast(save)

    def keep_best(self, state: RunState) -> None:
        """Keep the present weights as the best ones."""
        self.checkpointer.keep_best(state)

    def _broadcast(self, save: Callable[[], str]) -> str:
        try:
            path = save()
        except FileError as error:
            self.comm.broadcast(("", "", (str(error), error.code)))
            error.shared = True
            raise
        self.comm.broadcast(("", path, None))
        return path


@dataclass
class FollowerCheckpointer:
    """Sends this rank's part of the state while rank 0 saves."""

    programs: TrainPrograms
    comm: Comm

    def begin(self, state: RunState) -> str:
        """Take part in the first save."""
        return self._serve_save()

    def save(self, state: RunState, last: bool = False) -> str:
        """Take part in a save."""
        return self._serve_save()

    def end(self, state: RunState) -> None:
        """Take part in the end of the run."""
        self._serve_save()

    def keep_best(self, state: RunState) -> None:
        """Do nothing: weights are complete on rank 0."""

    def _serve_save(self) -> str:
        """Send state until rank 0 has saved; return the path of its checkpoint."""
        while True:
            kind, path, failure = self.comm.broadcast(NO_MESSAGE)
            if failure:
                message, code = failure
                error = FileError(message, code=code)
                error.shared = True
                raise error
            if not kind:
                return path
            self.programs.send_state(kind)


class NullListener:
    """A listener that reports nothing, for all ranks but the first."""

    def on_step(self, line: StepLine) -> None:
        """Ignore a step."""

    def log(self, line: str) -> None:
        """Ignore a line."""

    def warn(self, line: str) -> None:
        """Ignore a warning."""

    def show_activity(self) -> None:
        """Ignore activity."""

    def set_start(self, step: int) -> None:
        """Ignore the first step."""

    def on_validation(self, step: int, score: Score, best: bool = False) -> None:
        """Ignore a validation."""

    def on_retained(self, step: int, score: Score) -> None:
        """Ignore the score of data that should not be forgotten."""

    def on_save(self, step: int, path: str) -> None:
        """Ignore a save."""

    def on_save_error(self, step: int, why: str) -> None:
        """Ignore a failed save."""
