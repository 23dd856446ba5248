"""Training and evaluation of a graph on a dataset."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from llamatrain.config.messages import quote, suggest
from llamatrain.custom.dataset import Dataset
from llamatrain.custom.graph import Graph
from llamatrain.custom.losses import get_loss
from llamatrain.custom.programs import GraphPrograms, LossPrograms, Microbatch, TrainPrograms
from llamatrain.custom.score import Score, ScoreMeter
from llamatrain.data.shuffle import Order
from llamatrain.distributed.cores import count_cores
from llamatrain.distributed.launcher import check_single_process
from llamatrain.engine.device import Device, create_device
from llamatrain.errors import LlamatrainError, UsageError
from llamatrain.optim.optimizer import ElementwiseRule
from llamatrain.optim.registry import get_optimizer, optimizer_names
from llamatrain.optim.schedule import FunctionSchedule
from llamatrain.platform.terminal import log_line, progress_bar, show_log

Rate = float | Callable[[int], float]  # a learning rate, or a function of the step, which counts from 1


@dataclass(frozen=True, kw_only=True)
class FitStep:
    """A step of training, after its update."""

    epoch: int  # epochs and steps count from 1
    step: int
    steps: int  # of all epochs
    samples: int
    loss: float  # before the update
    lr: float
    grad_norm: float  # before clipping
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EpochResult:
    """An epoch of training."""

    epoch: int
    step: int  # the last one of the epoch
    training: Score  # over its steps, each before its update
    validation: Score | None  # after the epoch
    seconds: float

    def __str__(self) -> str:
        validation = f"; validation: {self.validation}" if self.validation else ""
        return f"epoch {self.epoch}: {self.training}{validation}; {self.seconds:.1f} s"


@dataclass(frozen=True)
class FitResult:
    """Epochs of a training, the last of which may have been stopped."""

    epochs: list[EpochResult]
    finished: bool  # False: a callback stopped it

    @property
    def training(self) -> Score:
        """The score of the last epoch."""
        return self.epochs[-1].training

    @property
    def validation(self) -> Score | None:
        """The validation score after the last epoch."""
        return self.epochs[-1].validation


def fit(
    graph: Graph,
    dataset: Dataset,
    *,
    loss: str = "cross_entropy",
    optimizer: str | ElementwiseRule = "adamw",
    lr: Rate = 1e-3,
    epochs: int = 1,
    batch: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    clip: float = 0.0,
    validation: float | Dataset | None = None,
    on_step: Callable[[FitStep], bool | None] | None = None,
    on_epoch: Callable[[EpochResult], bool | None] | None = None,
    device: str = "cpu",
    threads: int | None = None,
    show: bool = False,
) -> FitResult:
    """Train the weights of a graph, and return the scores of all epochs.

    loss: "cross_entropy", "mse", "mean" or "sum" of the output.
    optimizer: a name, or an optimizer with its settings; its moments start at zero.
    lr: the learning rate, or a function of the step.
    batch: samples of a step, a multiple of the graph's batch, whose gradients are added up.
    seed: of the order of samples, which differs in each epoch unless `shuffle` is False.
    clip: the largest norm of the gradients; 0: none.
    validation: a dataset, or the share of the dataset's last samples that are not trained.
    on_step, on_epoch: functions that get each step and each epoch; if one returns True, training ends.
    show: print epochs and a progress bar to standard error.
    """
    check_single_process("the graph and the dataset", "start the program without mpiexec")
    check_whole(epochs, 1, "epochs")
    check_whole(seed, 0, "seed")
    dataset, held_out = split_validation(dataset, validation)
    step_samples = check_step(graph, batch, clip)
    schedule = FunctionSchedule(lr if callable(lr) else lambda step: lr)
    schedule.rate(1)
    programs = TrainPrograms(
        graph, open_device(device, threads), get_loss(loss), dataset, create_rule(optimizer), clip
    )
    trainer = Trainer(programs, dataset, schedule, step_samples, Order(len(dataset), seed, shuffle), epochs)
    evaluator = (
        LossPrograms(graph, programs.device, programs.kind, held_out, programs.memory) if held_out else None
    )
    results: list[EpochResult] = []
    with show_log() if show else nullcontext():
        for epoch in range(1, epochs + 1):
            start = time.perf_counter()
            training = trainer.run_epoch(epoch, on_step)
            score = score_dataset(evaluator, held_out) if evaluator and held_out else None
            seconds = time.perf_counter() - start
            results.append(
                EpochResult(
                    epoch=epoch, step=trainer.step, training=training, validation=score, seconds=seconds
                )
            )
            log_line(str(results[-1]))
            if (on_epoch and on_epoch(results[-1])) or trainer.is_stopped:
                break
    return FitResult(results, trainer.step == trainer.steps)


def evaluate(
    graph: Graph,
    dataset: Dataset,
    *,
    loss: str = "cross_entropy",
    device: str = "cpu",
    threads: int | None = None,
) -> Score:
    """Return loss and accuracy of a graph on a dataset."""
    return score_dataset(LossPrograms(graph, open_device(device, threads), get_loss(loss), dataset), dataset)


def predict(
    graph: Graph, inputs: ArrayLike | Dataset, *, device: str = "cpu", threads: int | None = None
) -> np.ndarray:
    """Return the output of a graph for each sample; inputs are those of a dataset."""
    dataset = inputs if isinstance(inputs, Dataset) else Dataset(inputs)
    dataset.check_inputs(graph)
    programs = GraphPrograms(graph, open_device(device, threads))
    return np.concatenate([programs.predict(batch) for batch in split_rows(dataset, graph.batch)])


class Trainer:
    """Takes the steps of a training."""

    def __init__(
        self,
        programs: TrainPrograms,
        dataset: Dataset,
        schedule: FunctionSchedule,
        step_samples: int,
        order: Order,
        epochs: int,
    ) -> None:
        self.programs, self.dataset, self.schedule = programs, dataset, schedule
        self.step_samples, self.order = step_samples, order
        self.step, self.steps = 0, epochs * math.ceil(len(dataset) / step_samples)
        self.is_stopped = False

    def run_epoch(self, epoch: int, on_step: Callable[[FitStep], bool | None] | None) -> Score:
        """Train on each sample once, or until a callback stops, and return the score."""
        meter = ScoreMeter(self.programs.kind.is_sum)
        count, first = len(self.dataset), (epoch - 1) * len(self.dataset)
        with progress_bar(f"epoch {epoch}", total=count, unit=" samples") as bar:
            for start in range(0, count, self.step_samples):
                stop = min(count, start + self.step_samples)
                result = self._take_step(epoch, self.order.take(range(first + start, first + stop)), meter)
                bar.update(stop - start)
                if on_step and on_step(result):
                    self.is_stopped = True
                    break
        self.programs.read_weights()
        return meter.score()

    def _take_step(self, epoch: int, rows: np.ndarray, meter: ScoreMeter) -> FitStep:
        start, programs, step = time.perf_counter(), self.programs, self.step + 1
        rate = self.schedule.rate(step)
        size = programs.graph.batch
        weight = 1.0 if programs.kind.is_sum else 1 / len(rows)
        found = [
            programs.add_gradients(Microbatch(self.dataset, rows[at : at + size], weight), at == 0)
            for at in range(0, len(rows), size)
        ]
        loss = check_finite(math.fsum(each.loss for each in found), "loss", step)
        norm = check_finite(programs.update(step, rate), "norm of the gradients", step)
        self.step = step
        correct = sum(each.correct for each in found)
        meter.add(loss, len(rows), correct, sum(each.predictions for each in found))
        return FitStep(
            epoch=epoch,
            step=step,
            steps=self.steps,
            samples=len(rows),
            loss=loss,
            lr=rate,
            grad_norm=norm,
            seconds=time.perf_counter() - start,
        )


def score_dataset(programs: LossPrograms, dataset: Dataset) -> Score:
    """Return the score of a dataset."""
    meter = ScoreMeter(programs.kind.is_sum)
    for batch in split_rows(dataset, programs.graph.batch, is_sum=programs.kind.is_sum):
        found = programs.evaluate(batch)
        meter.add(found.loss, len(batch.rows), found.correct, found.predictions)
    return meter.score()


def split_rows(dataset: Dataset, size: int, *, is_sum: bool = False) -> Iterator[Microbatch]:
    """Yield all samples in order, in batches; each batch's loss is a mean, or a sum."""
    for start in range(0, len(dataset), size):
        rows = np.arange(start, min(len(dataset), start + size))
        yield Microbatch(dataset, rows, 1.0 if is_sum else 1 / len(rows))


# ---- arguments -------------------------------------------------------------


def open_device(name: str, threads: int | None) -> Device:
    """Return the device of a name, by default with a thread for each processor."""
    return create_device(name, count_cores() if threads is None else check_whole(threads, 1, "threads"))


def check_whole(value: int, least: int, name: str) -> int:
    """Return a whole number that is large enough."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(
            f"{name} must be a whole number of at least {least} (got {quote(value)})", code=f"invalid-{name}"
        )
    return value


def split_validation(dataset: Dataset, validation: float | Dataset | None) -> tuple[Dataset, Dataset | None]:
    """Return the datasets for training and for validation."""
    if validation is None or isinstance(validation, Dataset):
        return dataset, validation
    return dataset.split(validation)


def check_step(graph: Graph, batch: int | None, clip: float) -> int:
    """Check the settings of a step, and return the number of its samples."""
    if not graph.parameters:
        raise UsageError("the graph has no weights to train", code="no-weights")
    if not isinstance(clip, int | float) or not 0 <= clip < math.inf:
        raise UsageError(
            f"clip must be a finite number of at least 0 (got {quote(clip)})", code="invalid-clip"
        )
    samples = graph.batch if batch is None else check_whole(batch, 1, "batch")
    if samples % graph.batch:
        raise UsageError(
            f"batch must be a multiple of the graph's batch of {graph.batch} (got {batch})",
            code="invalid-batch",
        )
    return samples


def create_rule(optimizer: str | ElementwiseRule) -> ElementwiseRule:
    """Return an optimizer whose update is part of the graph."""
    if isinstance(optimizer, ElementwiseRule):
        return optimizer
    rules: Sequence[str] = [
        name for name in optimizer_names() if issubclass(get_optimizer(name), ElementwiseRule)
    ]
    if optimizer not in rules:
        raise UsageError(
            f"optimizer must be {', '.join(rules)} (got {quote(optimizer)}){suggest(str(optimizer), rules)}",
            code="unknown-optimizer",
        )
    rule = get_optimizer(optimizer)()
    assert isinstance(rule, ElementwiseRule)
    return rule


def check_finite(value: float, what: str, step: int) -> float:
    """Return a number; raise an error if it is NaN or infinite."""
    if not math.isfinite(value):
        raise LlamatrainError(
            f"the {what} of step {step} is {value}; a lower learning rate, or clip=1.0, may help",
            code="not-finite",
        )
    return value
