"""Who of the ranks does what of a run: the first writes and tells, the others have their parts of a checkpoint ready."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llamatrain.distributed.comm import Comm
from llamatrain.errors import FileError
from llamatrain.report.records import Score, StepLine
from llamatrain.train.programs import TrainPrograms
from llamatrain.train.state import RunState


class CheckpointSink(Protocol):
    """Whoever keeps a run, as it begins, at each save and when it has ended."""

    def begin(self, state: RunState) -> str: ...

    def save(self, state: RunState, last: bool = False) -> str: ...

    def end(self, state: RunState) -> None: ...

    def keep_best(self, state: RunState) -> None: ...


@dataclass
class RankZeroCheckpointer:
    """The first rank: what comes of its saves is told to all, and what fails there fails everywhere."""

    checkpointer: CheckpointSink
    comm: Comm

    def begin(self, state: RunState) -> str:
        return self._broadcast(lambda: self.checkpointer.begin(state))

    def save(self, state: RunState, last: bool = False) -> str:
        return self._broadcast(lambda: self.checkpointer.save(state, last))

    def end(self, state: RunState) -> None:
        def save() -> str:
            self.checkpointer.end(state)
            return ""

        self._broadcast(save)

    def keep_best(self, state: RunState) -> None:
        self.checkpointer.keep_best(state)

    def _broadcast(self, save: Callable[[], str]) -> str:
        try:
            path = save()
        except FileError as error:
            self.comm.broadcast(("", "", str(error)))
            error.shared = True
            raise
        self.comm.broadcast(("", path, ""))
        return path


@dataclass
class FollowerCheckpointer:
    """Another one, while the first keeps the run."""

    programs: TrainPrograms
    comm: Comm

    def begin(self, state: RunState) -> str:
        return self._serve_save()

    def save(self, state: RunState, last: bool = False) -> str:
        return self._serve_save()

    def end(self, state: RunState) -> None:
        self._serve_save()

    def keep_best(self, state: RunState) -> None: ...

    def _serve_save(self) -> str:
        """Until it is done there: the checkpoint's name."""
        while True:
            kind, path, fault = self.comm.broadcast(("", "", ""))
            if fault:
                error = FileError(fault)
                error.shared = True
                raise error
            if not kind:
                return path
            self.programs.send_state(kind)


class NullListener:
    """A listener where another rank tells."""

    def on_step(self, line: StepLine) -> None: ...

    def log(self, line: str) -> None: ...

    def warn(self, line: str) -> None: ...

    def show_activity(self) -> None: ...

    def set_start(self, step: int) -> None: ...

    def on_validation(self, step: int, score: Score, best: bool = False) -> None: ...

    def on_save(self, step: int, path: str) -> None: ...

    def on_save_error(self, step: int, why: str) -> None: ...
