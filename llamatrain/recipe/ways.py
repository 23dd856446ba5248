"""How a run is run: options that were left open, and the way that fits the memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from llamatrain.config.units import Size
from llamatrain.data.sine import Sine
from llamatrain.errors import MemoryPlanError
from llamatrain.files.pages import map_of
from llamatrain.machine.memory import available, resident
from llamatrain.machine.units import cores, units
from llamatrain.optim.schedule import Schedule
from llamatrain.optim.step import SGD, AdamW, Optimizer
from llamatrain.recipe.asked import Options
from llamatrain.recipe.material import Model
from llamatrain.recipe.memory import SHARE, Choice, Shape, choose, fixed
from llamatrain.recipe.options import ITERS, LR_MIN, WARMUP, TrainOptions
from llamatrain.recipe.samples import Nothing, Texts, Watch, Waves
from llamatrain.recipe.target import Task
from llamatrain.train.graphs import Gradients, Setting

LOADED = 12 * 10**6  # bytes that a process grows by beside what is planned: compiled kernels


def precision_of(options: TrainOptions) -> Literal["f32", "bf16"]:
    if options.precision != "auto":
        return options.precision
    return "bf16" if units() & {"amx", "avx512bf16"} and options.kernels == "cpu" else "f32"


def resolved(options: TrainOptions, rows_of: Callable[[int], int]) -> TrainOptions:
    iters = options.iters if options.iters is not None else ITERS
    if options.epochs is not None:
        iters = -(-rows_of(options.epochs) // (options.batch * options.grad_acc))
    warmup = options.warmup if options.warmup is not None else round(WARMUP * iters)
    return replace(
        options, iters=iters, epochs=None, warmup=warmup, precision=precision_of(options),
        lr_min=options.lr_min if options.lr_min is not None else LR_MIN * options.lr,
        decay_steps=options.decay_steps or max(1, iters - warmup),
    )  # fmt: skip


def optimizer_of(options: TrainOptions) -> Optimizer | None:
    if options.optimizer == "lbfgs":
        return None
    decay, least = options.weight_decay, options.decay_min_ndim
    if options.optimizer == "sgd":
        return SGD(weight_decay=decay, decay_min_ndim=least, momentum=options.beta1)
    return AdamW(weight_decay=decay, decay_min_ndim=least, beta1=options.beta1, beta2=options.beta2, eps=options.eps)


def schedule_of(options: TrainOptions) -> Schedule:
    return Schedule(
        options.schedule, options.lr, options.lr_min or 0.0, options.warmup or 0, options.decay_steps or 1, options.restart_growth
    )


def watch_of(options: Options, model: Model, task: Task, sine: Sine | None) -> Watch:
    run, train, threads = options.run, options.train, options.run.threads or cores()
    if sine:
        return Waves(model.h, sine, threads, train.kernels)
    if not run.sample_every or not model.vocabulary.tokenizer:
        return Nothing()
    return Texts(task, model.vocabulary.tokenizer, run.sample_prompt, train.seed, threads, train.kernels)


def gradients_of(train: TrainOptions) -> Gradients:
    if train.optimizer == "lbfgs" or train.grad_acc > 1:
        return "flat"
    return "arena" if train.clip > 0 else "streamed"


def chosen(
    options: Options, task: Task, lengths: tuple[int, ...], validating: bool, watch: Watch, held: int, *, refuse: bool = True,
    goes_on: bool = False,
) -> Choice:  # fmt: skip
    """How the run will be run, in the memory that there is, of which the process has `held` already. One that goes on keeps its
    batches as they are."""
    train, threads = options.train, options.run.threads or cores()
    setting = Setting(
        task.h, task.weights, task.trained, train.batch, max(lengths), train.precision, threads, train.kernels, train.flash,
        train.loss == "squared-error", optimizer_of(train), gradients_of(train), train.clip, task.drops,
        options.tune.lora_plus_ratio,
    )  # fmt: skip
    history = train.lbfgs_history if train.optimizer == "lbfgs" else 0
    matrices = [array for array in task.frozen.values() if array.dtype == np.float32 and array.ndim > 1]
    pages = max((array.nbytes for array in matrices if map_of(array) is not None), default=0)
    shape = Shape(lengths, validating, watch.positions, history, held + LOADED, train.grad_acc, task.copies, pages)
    most = allowed(train)
    least = fixed(setting, shape)
    if refuse and most is not None and least > most:  # at once: planning a model so large takes a while
        parts, less = "weights, gradients and moments", "a smaller model"
        if task.copies:
            parts, less = f"copies of the base, {parts}", "--cache-base off"
        raise MemoryPlanError(f"{parts} alone take {Size(least).words}, and {Size(most).words} are there; {less} takes less")
    return choose(setting, train.remat, shape, most, parts=not goes_on)


def allowed(train: TrainOptions) -> int | None:
    """Bytes that a run may take: as it was told, or nearly all that is free, its own share included."""
    if train.memory is not None:
        return train.memory
    free = available()
    return None if free is None else int((free + resident()) * SHARE)
