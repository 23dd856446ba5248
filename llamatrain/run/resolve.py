"""Resolves options that were left open, such as the number of steps and the precision."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal

from llamatrain.config.options import COUNT, OptionError
from llamatrain.distributed.comm import get_comm, get_launch_info
from llamatrain.distributed.cores import count_cores
from llamatrain.engine.device import create_device, default_precision, is_compiled
from llamatrain.errors import UsageError
from llamatrain.gguf.reader import Gguf
from llamatrain.graph.precision import BasePrecision, Precision
from llamatrain.optim.early_stop import StopRules
from llamatrain.optim.optimizer import ElementwiseRule, Optimizer
from llamatrain.optim.registry import get_optimizer
from llamatrain.optim.schedule import Schedule
from llamatrain.platform.cpu import enabled_units
from llamatrain.run.config import RunConfig
from llamatrain.run.lora_options import ALPHA
from llamatrain.run.options import ITERS, LR_MIN, WARMUP, WSD_DECAY, TrainOptions, check_rates
from llamatrain.train.config import LoopConfig
from llamatrain.train.graphs import Gradients

# Elements of a quantized base from which on int8 is the default: smaller ones are fast in float32, too.
INT8_ELEMENTS = 100_000_000
GROUPS = 8  # default number of gradient groups, for up to as many ranks
RATE_OF_WIDTH, HIGHEST_RATE = 2.0, 0.01  # of an adapter, for a model of width 1, and for any model
CAREFUL_RATE = 1e-4  # of whole models, and of answers that are compared or generated


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """A config in which nothing is open, except how the run fits into memory."""

    config: RunConfig
    iters: int
    warmup: int
    decay_steps: int
    lr: float
    lr_min: float
    row_length: int  # tokens
    threads: int
    precision: Precision
    base_precision: BasePrecision
    optimizer: Optimizer
    gradients: Gradients
    ranks: int
    forced_splits: int  # micro-batches per batch that default gradient groups need
    lora_alpha: float | None  # of a new adapter

    @property
    def schedule(self) -> Schedule:
        """The learning rate schedule."""
        train = self.config.train
        return Schedule(
            kind=train.schedule,
            peak=self.lr,
            minimum=self.lr_min,
            warmup=self.warmup,
            decay_steps=self.decay_steps,
            restart_growth=train.restart_growth,
            end=self.iters,
        )

    def loop_config(self, splits: int) -> LoopConfig:
        """Return the config of the loop, with each batch split into this many micro-batches."""
        train, run = self.config.train, self.config.run
        return LoopConfig(
            iters=self.iters,
            microbatches=train.grad_acc * splits,
            seed=train.seed,
            schedule=self.schedule,
            stop_rules=StopRules(
                window=train.stop_window,
                min_change=train.stop_delta,
                max_no_improvement=train.max_no_improvement,
                min_relative_change=train.stop_rel,
            ),
            eval_every=run.eval_every,
            sample_every=run.sample_every,
            save_every=run.save_every,
            patience=run.patience,
            max_time=run.max_time,
            iters_per_rows=train.lbfgs_refresh,
        )

    def stored_config(
        self, policy: str, splits: int, cache: Literal["auto", "bf16", "int8", "off"]
    ) -> RunConfig:
        """Return the options to store in checkpoints and config.toml, including the memory plan."""
        asked, train = self.config, self.config.train
        if (batches := train.grad_acc * splits) > COUNT:
            raise OptionError(
                lambda spelt: (
                    f"{spelt('grad_acc')} {train.grad_acc} with batches split into {splits} makes too "
                    f"many batches ({batches})"
                )
            )
        return replace(
            asked,
            model=replace(asked.model, ctx=self.row_length),
            train=replace(
                train,
                iters=self.iters,
                epochs=None,
                warmup=self.warmup,
                decay_steps=self.decay_steps,
                lr=self.lr,
                lr_min=self.lr_min,
                precision=self.precision,
                remat=policy,
                batch=train.batch // splits,
                grad_acc=batches,
            ),
            preference=asked.preference.with_defaults,
            tune=replace(
                asked.tune,
                ctx=self.row_length,
                lora_alpha=self.lora_alpha,
                base_precision=self.base_precision,
                cache_base=cache,
            ),
        )


def resolve(
    config: RunConfig,
    width: int,
    row_length: int,
    count_rows: Callable[[int], int],
    ranks: int = 0,
    base: Gguf | None = None,
) -> ResolvedConfig:
    """Resolve the options.

    `width` is that of the model; `count_rows` counts the rows of some epochs; `ranks` is given if they do not
    run yet.
    """
    requested, config = config.train, split_for_ranks(config, ranks or get_comm().size, ranks > 1)
    train, tune = config.train, config.tune
    iters = train.iters if train.iters is not None else ITERS
    if train.epochs is not None:
        steps = -(-count_rows(train.epochs) // (train.batch * train.grad_acc))
        iters = steps if train.iters is None else min(steps, train.iters)
        if iters > COUNT:
            raise OptionError(
                lambda spelt: f"{spelt('epochs')} {train.epochs} takes too many steps ({iters})"
            )
    warmup = train.warmup if train.warmup is not None else round(WARMUP * iters)
    lr = train.lr if train.lr is not None else default_rate(config, width)
    lr_min = train.lr_min if train.lr_min is not None else LR_MIN * lr
    check_rates(lr, lr_min)
    optimizer = (
        get_optimizer(train.optimizer).from_options(asdict(train)).with_precision(resolve_precision(train))
    )
    return ResolvedConfig(
        config=config,
        iters=iters,
        warmup=warmup,
        decay_steps=train.decay_steps or default_decay_steps(train.schedule, iters, warmup),
        lr=lr,
        lr_min=lr_min,
        row_length=row_length,
        threads=config.run.threads or count_cores(),
        precision=resolve_precision(train),
        base_precision=resolve_base_precision(config, base),
        optimizer=optimizer,
        ranks=ranks or get_comm().size,
        forced_splits=requested.batch // config.train.batch if requested.grad_groups is None else 1,
        gradients=choose_gradients(
            train, optimizer, reads_base=config.command == "finetune" and not tune.full
        ),
        lora_alpha=tune.lora_alpha if tune.full or tune.lora_init else tune.alpha,
    )


def default_rate(config: RunConfig, width: int) -> float:
    """Return the learning rate of `finetune` for a model of some width.

    Both factors of an adapter learn, so where their product counts four times as much, each moves half as far.
    """
    tune = config.tune
    if tune.full or config.preference.objective:
        return CAREFUL_RATE
    strength = tune.lora_plus_ratio * tune.lora_r * tune.scale(tune.lora_r) / ALPHA
    return min(HIGHEST_RATE, float(f"{RATE_OF_WIDTH / width / math.sqrt(strength):.2g}"))


def default_decay_steps(kind: str, iters: int, warmup: int) -> int:
    """Return how many steps the rate falls for.

    The fall starts at the peak, which without a warm-up is step 1.
    """
    return max(1, round(WSD_DECAY * iters) if kind == "wsd" else iters - max(warmup, 1))


def split_for_ranks(config: RunConfig, ranks: int, is_planned: bool = False) -> RunConfig:
    """Resolve --grad-groups, and split batches so that there is a micro-batch for each group."""
    train = config.train
    can_split = not config.preference.needs_whole_batch  # rows are compared within a batch
    rows = train.grad_acc * (train.batch if can_split else 1)
    groups = train.grad_groups or default_groups(rows, ranks, is_planned or get_launch_info() is not None)
    if groups > rows:
        problem = (
            f" must be at most {rows}, the {'rows' if can_split else 'batches'} of a step (got {groups})"
        )
        raise OptionError(lambda spelt: spelt("grad_groups") + problem)
    if ranks > groups and train.grad_groups:
        problem = f" must be at least the number of ranks, {ranks} (got {groups})"
        raise OptionError(lambda spelt: spelt("grad_groups") + problem)
    if ranks > groups:
        raise UsageError(
            f"a step of {rows} rows cannot be divided among {ranks} ranks; raise --batch or --grad-acc",
            code="too-many-ranks",
        )
    if groups == 1:
        return config
    parts = min(parts for parts in divisors(train.batch) if train.grad_acc * parts >= groups)
    batch, batches = train.batch // parts, train.grad_acc * parts
    return replace(config, train=replace(train, grad_groups=groups, batch=batch, grad_acc=batches))


def divisors(number: int) -> Iterator[int]:
    """Yield the divisors of a number."""
    for divisor in range(1, math.isqrt(number) + 1):
        if number % divisor == 0:
            yield from (divisor, number // divisor)


def default_groups(rows: int, ranks: int, several: bool) -> int:
    """Return the default number of groups: enough for eight ranks or more, 1 for a single process."""
    if not several:
        return 1
    limit = 1 << (rows.bit_length() - 1)
    return min(limit, max(GROUPS, 1 << (ranks - 1).bit_length()))


def resolve_precision(options: TrainOptions) -> Precision:
    """Return the precision.

    Bf16 is the default if the processor has units for it and the optimizer allows it.
    """
    if options.precision != "auto":
        return options.precision
    if get_optimizer(options.optimizer).needs_f32:
        return "f32"
    return default_precision(options.processor)


def resolve_base_precision(config: RunConfig, base: Gguf | None) -> BasePrecision:
    """Return the number type of products with frozen weights.

    Raise UsageError for 8-bit integers on a device that has no kernels for them.
    """
    asked = config.tune.base_precision
    if config.command != "finetune" or config.tune.full or asked == "same":
        return "same"
    if asked == "auto":
        return "int8" if not config.train.quant_aware and prefers_int8(config, base) else "same"
    if not create_device(config.train.processor).has_int8_products:
        raise UsageError(
            f"--base-precision int8 needs --device cpu with an x86 processor (got {config.train.processor})",
            code="conflicting-options",
        )
    return "int8"


def prefers_int8(config: RunConfig, base: Gguf | None) -> bool:
    """Return True if products in 8-bit integers are the default.

    They are where they were measured to be much faster and to learn the same: on processors without AMX, with large
    quantized bases, in training on text; not if a precision was asked for.
    """
    train = config.train
    if train.precision != "auto" or train.processor != "cpu" or "amx" in enabled_units():
        return False
    if config.preference.objective or get_optimizer(train.optimizer).needs_f32 or not is_compiled("cpu"):
        return False
    tensors = base.tensors.values() if base else ()
    elements = sum(tensor.elements for tensor in tensors if tensor.type.block_size > 1)
    return elements >= INT8_ELEMENTS and create_device("cpu").has_int8_products


def choose_gradients(train: TrainOptions, optimizer: Optimizer, reads_base: bool) -> Gradients:
    """Choose where gradients are held: one flat vector, the arena, or nowhere (streamed to the optimizer).

    A base that is read in place may change on disk: its gradients are not used before it was checked.
    """
    if not isinstance(optimizer, ElementwiseRule) or train.grad_acc > 1 or train.grad_groups not in (None, 1):
        return "flat"
    return "arena" if train.clip > 0 or reads_base else "streamed"
