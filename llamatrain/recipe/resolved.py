"""What a run does, the second of three stages: nothing of it is open any more."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Literal

from llamatrain.config.options import COUNT, OptionError
from llamatrain.engine.backend import is_compiled
from llamatrain.machine.units import cores, units
from llamatrain.machine.world import world
from llamatrain.optim.optimizer import Optimizer, StepRule
from llamatrain.optim.registry import named
from llamatrain.optim.schedule import Schedule
from llamatrain.optim.stop import StopRules
from llamatrain.recipe.asked import Asked
from llamatrain.recipe.dividing import divided
from llamatrain.recipe.options import FALL, ITERS, LR_MIN, WARMUP, TrainOptions
from llamatrain.train.course import Course
from llamatrain.train.graphs import Gradients

Precision = Literal["f32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Made once of what was asked; what is still to be decided is how it is done in the memory that there is."""

    asked: Asked
    iters: int
    warmup: int
    decay_steps: int
    lr_min: float
    row: int  # tokens
    threads: int
    precision: Precision
    optimizer: Optimizer
    gradients: Gradients
    ranks: int
    alpha: float | None  # of a new adapter

    @property
    def schedule(self) -> Schedule:
        train = self.asked.train
        return Schedule(
            kind=train.schedule,
            peak=train.lr,
            minimum=self.lr_min,
            warmup=self.warmup,
            decay_steps=self.decay_steps,
            restart_growth=train.restart_growth,
            end=self.iters,
        )

    def course(self, splits: int) -> Course:
        """With batches in so many parts."""
        train, run = self.asked.train, self.asked.run
        return Course(
            iters=self.iters,
            grad_acc=train.grad_acc * splits,
            seed=train.seed,
            schedule=self.schedule,
            rules=StopRules(past=train.past, delta=train.delta, max_no_improvement=train.max_no_improvement, epsf=train.epsf),
            eval_every=run.eval_every,
            sample_every=run.sample_every,
            save_every=run.save_every,
            patience=run.patience,
            max_time=run.max_time,
            fresh=train.lbfgs_fresh,
        )

    def kept(self, policy: str, splits: int, cache: Literal["auto", "bf16", "off"]) -> Asked:
        """As options in which nothing is open, for checkpoints and config.toml; with how it is done."""
        asked, train = self.asked, self.asked.train
        if (batches := train.grad_acc * splits) > COUNT:
            told = f" {train.grad_acc} cannot be: in {splits} parts each it makes {batches} batches, and less than 2^31 can be"
            raise OptionError(lambda spelt: spelt("grad_acc") + told)
        return replace(
            asked,
            model=replace(asked.model, ctx=self.row),
            train=replace(
                train,
                iters=self.iters,
                epochs=None,
                warmup=self.warmup,
                decay_steps=self.decay_steps,
                lr_min=self.lr_min,
                precision=self.precision,
                remat=policy,
                batch=train.batch // splits,
                grad_acc=batches,
            ),
            preference=asked.preference.decided,
            tune=replace(asked.tune, ctx=self.row, lora_alpha=self.alpha, cache_base=cache),
        )


def resolve(asked: Asked, row: int, rows_of: Callable[[int], int], ranks: int = 0) -> Resolved:
    """`rows_of` counts those of so many epochs; `ranks` are to come, where they are not here."""
    asked = divided(asked, ranks or world().size, ranks > 1)
    train, tune = asked.train, asked.tune
    iters = train.iters if train.iters is not None else ITERS
    if train.epochs is not None:
        steps = -(-rows_of(train.epochs) // (train.batch * train.grad_acc))
        iters = steps if train.iters is None else min(steps, train.iters)
        if iters > COUNT:
            told = f" {train.epochs} cannot be: it takes {iters} steps, and less than 2^31 can be; fewer will do"
            raise OptionError(lambda spelt: spelt("epochs") + told)
    warmup = train.warmup if train.warmup is not None else round(WARMUP * iters)
    optimizer = named(train.optimizer).of(asdict(train)).in_precision(precision_of(train))
    return Resolved(
        asked=asked,
        iters=iters,
        warmup=warmup,
        decay_steps=train.decay_steps or max(1, round(FALL * iters) if train.schedule == "wsd" else iters - warmup),
        lr_min=train.lr_min if train.lr_min is not None else LR_MIN * train.lr,
        row=row,
        threads=asked.run.threads or cores(),
        precision=precision_of(train),
        optimizer=optimizer,
        ranks=ranks or world().size,
        gradients=gradients_of(train, optimizer, reads_base=asked.command == "finetune" and not tune.full),
        alpha=tune.lora_alpha if tune.full or tune.lora_init else tune.alpha,
    )


def precision_of(options: TrainOptions) -> Precision:
    if options.precision != "auto":
        return options.precision
    if named(options.optimizer).exact:
        return "f32"
    return "bf16" if units() & {"amx", "avx512bf16"} and is_compiled(options.kernels) else "f32"


def gradients_of(train: TrainOptions, optimizer: Optimizer, reads_base: bool) -> Gradients:
    """Those that a base was read for are not used before it was seen to be what it was."""
    if not isinstance(optimizer, StepRule) or train.grad_acc > 1 or train.shards not in (None, 1):
        return "flat"
    return "arena" if train.clip > 0 or reads_base else "streamed"
