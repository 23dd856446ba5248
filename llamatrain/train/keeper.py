"""A run's checkpoints and its result: written as it stands, and put back as it was."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamatrain.files.pages import release
from llamatrain.files.values import Value
from llamatrain.report.report import Report
from llamatrain.train.begin import Options
from llamatrain.train.checkpoint import GRADIENTS, Checkpoint
from llamatrain.train.folder import RunFolder
from llamatrain.train.loop import Loop
from llamatrain.train.programs import Programs
from llamatrain.train.task import Task


@dataclass
class Keeper:
    """Writes a run as it stands."""

    options: Options
    task: Task
    metadata: dict[str, Value]
    programs: Programs
    folder: RunFolder
    report: Report

    def save(self, loop: Loop) -> str:
        self.report.metrics.flush()
        parts = self.programs.weights.parts
        path = self.folder.save(self.checkpoint(loop), self.options.run.keep)
        self.task.write(self.folder.result(self.task.result), parts)
        return str(path)

    def checkpoint(self, loop: Loop) -> Checkpoint:
        optimizer = self.programs.setting.optimizer
        assert optimizer
        kept: dict[str, Any] = {name: self.programs.vectors[kind].vector for kind, name in optimizer.states.items()}
        kept |= loop.descent.kept() if loop.descent else {}
        vectors = {optimizer.key(name): value for name, value in kept.items() if isinstance(value, np.ndarray)}
        numbers: dict[str, float | int | bool] = {
            optimizer.key(name): value for name, value in kept.items() if not isinstance(value, np.ndarray)
        }
        if loop.partial and self.programs.grads:
            vectors[GRADIENTS] = self.programs.grads.vector
        return Checkpoint(
            self.task.kind, dict(self.metadata), self.task.saved(self.programs.weights.parts), self.options.plain(),
            replace(loop.counters), loop.data or loop.rows.state, optimizer.kept_as, list(self.programs.weights.parts), vectors,
            numbers, loop.stop, loop.partial, {"owed_validation": loop.owed, "ended": loop.ended, **self.task.extra()},
        )  # fmt: skip


def restore(loop: Loop, checkpoint: Checkpoint, report: Report) -> None:
    """Put a run back where its checkpoint was; the weights are there already."""
    programs, optimizer = loop.programs, loop.programs.setting.optimizer
    assert optimizer
    if checkpoint.optimizer != optimizer.kept_as:
        report.warn(f"the checkpoint's optimizer is {checkpoint.optimizer}: this one begins anew")
    else:
        for kind, name in optimizer.states.items():
            for weight, piece in checkpoint.pieces(optimizer.key(name)).items():
                programs.vectors[kind].parts[weight][...] = piece
                release(piece)
        if loop.descent:
            loop.descent.restore(checkpoint.kept)
    if checkpoint.data and not loop.rows.restore(checkpoint.data):
        report.warn("the data is not what it was: the shuffle begins anew")
    elif checkpoint.partial and programs.grads and checkpoint.partial.count < loop.grad_acc:
        programs.grads.vector[:] = checkpoint.vectors[GRADIENTS]
        loop.partial = checkpoint.partial
    loop.counters, loop.stop = replace(checkpoint.counters), checkpoint.stop
    loop.owed = bool(checkpoint.extra.get("owed_validation"))
    if isinstance(ended := checkpoint.extra.get("ended"), str) and loop.iters <= iters_of(checkpoint):
        loop.ended = ended
    loop.data = loop.rows.state


def iters_of(checkpoint: Checkpoint) -> int:
    train = checkpoint.options.get("train")
    iters = train.get("iters") if isinstance(train, dict) else None
    return iters if isinstance(iters, int) else 0
