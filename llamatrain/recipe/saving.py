"""A run's checkpoints and its result: written as it stands, and put back as it was."""

import math
from dataclasses import dataclass, replace

import numpy as np

from llamatrain.files.pages import release
from llamatrain.files.values import Value
from llamatrain.optim.lbfgs import Lbfgs
from llamatrain.recipe.asked import Options
from llamatrain.recipe.target import Task
from llamatrain.report.report import Report
from llamatrain.store.checkpoint import GRADIENTS, Checkpoint
from llamatrain.store.folder import RunFolder
from llamatrain.train.loop import Loop
from llamatrain.train.programs import Programs

VECTORS = {
    "adamw": {"m": "optimizer.adam.first_moments", "v": "optimizer.adam.second_moments"},
    "sgd": {"m": "optimizer.sgd.momentum"},
    "lbfgs": {},
}
TYPES = {"adamw": "adam", "sgd": "sgd", "lbfgs": "lbfgs"}  # optimizer.type


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
        kind = self.options.train.optimizer
        vectors = {name: self.programs.vectors[short].vector for short, name in VECTORS[kind].items()}
        numbers: dict[str, float | int | bool] = {}
        if loop.lbfgs and not math.isnan(loop.lbfgs.loss):
            for name, value in loop.lbfgs.to_dict().items():
                (vectors if isinstance(value, np.ndarray) else numbers)[f"optimizer.lbfgs.{name}"] = value
        if loop.partial and self.programs.grads:
            vectors[GRADIENTS] = self.programs.grads.vector
        return Checkpoint(
            self.task.kind, dict(self.metadata), self.task.saved(self.programs.weights.parts), self.options.plain(),
            replace(loop.counters), loop.data or loop.rows.state, TYPES[kind], list(self.programs.weights.parts), vectors,
            numbers, loop.stop, loop.partial, {"owed_validation": loop.owed, "ended": loop.ended, **self.task.extra()},
        )  # fmt: skip


def restore(loop: Loop, checkpoint: Checkpoint, report: Report) -> None:
    """Put a run back where its checkpoint was; the weights are there already."""
    programs = loop.programs
    if checkpoint.optimizer != TYPES.get(kind_of(programs, loop)):
        report.warn(f"the checkpoint's optimizer is {checkpoint.optimizer}: this one begins anew")
    elif loop.lbfgs and "optimizer.lbfgs.current_parameters" in checkpoint.vectors:
        kept = {**checkpoint.vectors, **checkpoint.numbers}
        values = {name.removeprefix("optimizer.lbfgs."): value for name, value in kept.items()}
        loop.lbfgs = Lbfgs.from_dict(values, loop.lbfgs.options)
    else:
        for short, name in VECTORS[kind_of(programs, loop)].items():
            for weight, piece in checkpoint.pieces(name).items():
                programs.vectors[short].parts[weight][...] = piece
                release(piece)
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


def kind_of(programs: Programs, loop: Loop) -> str:
    if loop.lbfgs:
        return "lbfgs"
    return "adamw" if "v" in programs.vectors else "sgd"
