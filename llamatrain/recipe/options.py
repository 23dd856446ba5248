"""The options of a training run. What is left open (None, auto) is resolved once, and kept with the run."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from llamatrain.config.options import flag_of
from llamatrain.config.units import Duration, Size
from llamatrain.errors import UsageError
from llamatrain.optim import registry

AUTO = "auto"
ITERS = 256
WARMUP = 0.05  # of the steps
LR_MIN = 0.1  # of the rate

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[registry.names()]


@dataclass(frozen=True)
class TrainOptions:
    batch: Annotated[int, "Rows that are run together."] = 8
    grad_acc: Annotated[int, "Batches whose gradients make one step."] = 1
    iters: Annotated[int | None, "Steps in all, those before a resume included; else 256, or by --epochs."] = None
    epochs: Annotated[int | None, "End after so many times through the data, instead of --iters."] = None
    optimizer: Annotated[
        OptimizerName, "How weights are changed; SGD has a momentum of --beta1, L-BFGS the same rows in every step."
    ] = "adamw"
    lr: Annotated[float, "Learning rate, the highest of the schedule."] = 1e-3
    lr_min: Annotated[float | None, "The lowest rate of the schedule, warm-up included; else a tenth of --lr."] = None
    warmup: Annotated[int | None, "Steps in which the rate rises; else 5 % of all."] = None
    schedule: Annotated[Literal["constant", "linear", "cosine"], "How the rate falls after the warm-up."] = "cosine"
    decay_steps: Annotated[int | None, "Steps in which it falls; else all that follow the warm-up."] = None
    restart_growth: Annotated[float, "Restart the cosine, each period this many times as long as the one before; 0: never."] = 0.0
    line_search: Annotated[Literal["armijo", "wolfe", "strong-wolfe"], "Line search of L-BFGS."] = "wolfe"
    lbfgs_history: Annotated[int, "Moves that L-BFGS remembers."] = 6
    weight_decay: Annotated[float, "Decoupled weight decay."] = 0.1
    decay_min_ndim: Annotated[int, "Only tensors of so many dimensions decay."] = 2
    clip: Annotated[float, "The most that the norm of all gradients together may be; 0: no limit."] = 1.0
    beta1: Annotated[float, "AdamW's first beta, SGD's momentum."] = 0.9
    beta2: Annotated[float, "AdamW's second beta."] = 0.999
    eps: Annotated[float, "AdamW's epsilon."] = 1e-8
    past: Annotated[int, "Stop when the loss differs by less than --delta from the one so many steps ago; 0: never."] = 0
    delta: Annotated[float, "What --past compares with: a share of the loss."] = 1e-5
    max_no_improvement: Annotated[int, "Stop after so many steps in a row without a new lowest loss; 0: never."] = 0
    epsf: Annotated[float, "Stop when the loss differs by less than this share from the one before; 0: never."] = 0.0
    loss: Annotated[
        Literal["cross-entropy", "squared-error"],
        "What is minimised; the squared error is for the sine wave only.",
    ] = "cross-entropy"
    seed: Annotated[int, "What first weights, shuffling and samples follow from."] = 0
    precision: Annotated[Literal["auto", "f32", "bf16"], "Of matrix products; auto: bf16 where the processor has it."] = "auto"
    flash: Annotated[bool, "Attention that never holds all its scores."] = True
    remat: Annotated[
        str, "Computed again instead of kept: none, light, block, optimal, a number of blocks; auto: light, or what memory needs."
    ] = "auto"
    memory: Annotated[Size | None, "The most that the run may take, such as 6GB; else what is free."] = None
    kernels: Annotated[Literal["cpu", "reference"], "Compiled kernels, or the plain numpy ones that define them."] = "cpu"

    def __post_init__(self) -> None:
        from llamatrain.graph.remat import POLICIES

        least: dict[str, float] = {"batch": 1, "grad_acc": 1, "iters": 0, "epochs": 1, "warmup": 0, "decay_steps": 1,
                 "lbfgs_history": 1, "weight_decay": 0, "decay_min_ndim": 0, "clip": 0, "past": 0, "delta": 0,
                 "max_no_improvement": 0, "epsf": 0, "seed": 0, "lr": 0, "lr_min": 0}  # fmt: skip
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and not bound <= value < (1 << 31 if isinstance(value, int) else math.inf):
                raise UsageError(f"{flag_of(name)} {str(value)[:40]} cannot be; it takes {bound} or more, and less than 2^31")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{flag_of(name)} {getattr(self, name):g} must be at least 0 and less than 1, such as 0.9")
        if not 0 < self.eps < math.inf:
            raise UsageError(f"--eps {self.eps:g} must be more than 0, such as 1e-8")
        if self.lr_min is not None and self.lr_min > self.lr:
            raise UsageError(f"--lr-min {self.lr_min:g} must not be more than --lr {self.lr:g}")
        if self.restart_growth and not (1 <= self.restart_growth < math.inf and self.schedule == "cosine"):
            raise UsageError(f"--restart-growth {self.restart_growth:g} takes 1 or more, and the cosine schedule")
        if self.remat not in (AUTO, *POLICIES) and not (self.remat.isdecimal() and len(self.remat) < 7):
            raise UsageError(
                f"--remat {self.remat[:40]!r} is unknown; it takes {', '.join(POLICIES)}, {AUTO} or a number of blocks"
            )
        if self.loss == "squared-error" and not self.flash:
            raise UsageError("--no-flash and --loss squared-error exclude each other")


@dataclass(frozen=True)
class RunOptions:
    """What may change when a run is resumed: it decides nothing that is learned."""

    threads: Annotated[int | None, "Threads; else one for each processor."] = None
    save_every: Annotated[int, "Save a checkpoint and the model every so many steps; 0: at the end only."] = 100
    keep: Annotated[int, "Checkpoints that stay; older ones are removed."] = 2
    eval_every: Annotated[int, "Validate every so many steps and at the end; 0: never."] = 100
    sample_every: Annotated[int, "Show what the model writes every so many steps; 0: never."] = 0
    sample_prompt: Annotated[str, "What those samples begin with."] = ""
    report_every: Annotated[int, "Print a line every so many steps; 0: as often as reads well."] = 0
    max_time: Annotated[Duration | None, "Save and stop after this time, such as 90m or 2h."] = None

    def __post_init__(self) -> None:
        for name, bound in {
            "threads": 1,
            "save_every": 0,
            "keep": 1,
            "eval_every": 0,
            "sample_every": 0,
            "report_every": 0,
        }.items():
            value = getattr(self, name)
            if value is not None and not bound <= value < 1 << 31:
                raise UsageError(f"{flag_of(name)} {value} cannot be; it takes {bound} or more, and less than 2^31")


@dataclass(frozen=True)
class PlaceOptions:
    """Where a run lives, and what it goes on from. These are not kept with it."""

    out: Annotated[Path | None, "The folder of the run; else a new one, runs/<command>-<n>."] = None
    overwrite: Annotated[bool, "Replace the run that is in the folder --out."] = False
    resume: Annotated[Path | None, "Go on with the run in this folder, or from this checkpoint of one."] = None
    checkpoint_in: Annotated[
        Path | None, "Start from this GGUF file: a model's weights, or a checkpoint with all that goes with them."
    ] = None
    config: Annotated[Path | None, "Read options from this TOML file; those given here win."] = None

    def __post_init__(self) -> None:
        if self.resume and self.checkpoint_in:
            raise UsageError("--resume and --checkpoint-in exclude each other: both say what to go on from")
        if self.resume and self.config:
            raise UsageError("--resume and --config exclude each other: a run that goes on keeps its options")
        if self.resume and self.overwrite:
            raise UsageError("--resume and --overwrite exclude each other: go on with a run, or replace it")


# ---- options that would do nothing -----------------------------------------


def idle(options: TrainOptions, run: RunOptions) -> dict[str, str]:
    """The options that have no effect beside the others, and beside which."""
    found = dict.fromkeys(registry.idle(options.optimizer), f"to --optimizer {options.optimizer}")
    if options.schedule == "constant":
        found |= dict.fromkeys(("decay_steps", "restart_growth"), "to --schedule constant")
    if not options.past:
        found["delta"] = "without --past"
    if not run.sample_every:
        found["sample_prompt"] = "without --sample-every"
    return found


def refuse_idle(idle: Mapping[str, str], given: Collection[str]) -> None:
    """No option is taken that does nothing."""
    for name, why in idle.items():
        if name in given:
            raise UsageError(f"{flag_of(name)} means nothing {why}; leave it out")
    if "iters" in given and "epochs" in given:
        raise UsageError("--iters and --epochs exclude each other: both say when to end")
