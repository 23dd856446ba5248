"""The options of a training run. What is left open (None, auto) is resolved once, and kept with the run."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from llamatrain.config.common import BATCH, EVERY, SEED, THREADS
from llamatrain.config.options import COUNT, Option, OptionError, Options, flag_of
from llamatrain.config.units import Duration, Size
from llamatrain.errors import UsageError
from llamatrain.optim import registry

AUTO = "auto"
ITERS = 256
WARMUP = 0.05  # of the steps
LR_MIN = 0.1  # of the rate
FALL = 0.2  # of the steps, at their end
TIMEOUT = Duration(120)
LEAST = 1000  # bytes of memory: less was said without its unit


if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[registry.names()]

RATE, OPTIMIZER, END, MEANS = (
    "Learning rate",
    "Optimizer",
    "When to stop",
    "Speed and memory",
)  # panels of the help


def is_recomputed(text: str) -> bool:
    """Whether a word says what is computed again."""
    from llamatrain.graph.remat_policy import is_policy

    return text == AUTO or is_policy(text)


@dataclass(frozen=True)
class TrainOptions(Options, panel="Training"):
    batch: Annotated[int, BATCH] = 8
    grad_acc: Annotated[
        int, Option("Batches whose gradients make one step.", unit="BATCHES", least=1, most=COUNT)
    ] = 1
    iters: Annotated[
        int | None,
        Option(
            "Steps in all, those before a resume included; else 256, or by --epochs.",
            unit="STEPS",
            least=0,
            most=COUNT,
        ),
    ] = None
    epochs: Annotated[
        int | None,
        Option(
            "End after so many times through the data, or by --iters if that is sooner.",
            unit="TIMES",
            least=1,
            most=COUNT,
        ),
    ] = None
    optimizer: Annotated[
        OptimizerName,
        Option(
            "How weights are changed; Muon: of whole models, SGD: with momentum --beta1, L-BFGS: on the same rows in every step.",
            panel=OPTIMIZER,
        ),
    ] = "adamw"
    lr: Annotated[
        float, Option("Learning rate, the highest of the schedule.", panel=RATE, unit="RATE", least=0)
    ] = 1e-3
    lr_min: Annotated[
        float | None,
        Option(
            "The lowest rate of the schedule, warm-up included; else a tenth of --lr.",
            panel=RATE,
            unit="RATE",
            least=0,
        ),
    ] = None
    warmup: Annotated[
        int | None,
        Option(
            "Steps in which the rate rises; else 5 % of all.", panel=RATE, unit="STEPS", least=0, most=COUNT
        ),
    ] = None
    schedule: Annotated[
        Literal["constant", "linear", "cosine", "wsd"],
        Option(
            "How the rate falls after the warm-up; wsd: at the end alone, and later where more --iters follow.",
            panel=RATE,
        ),
    ] = "cosine"
    decay_steps: Annotated[
        int | None,
        Option(
            "Steps in which it falls; else all that follow the warm-up, with wsd a fifth.",
            panel=RATE,
            unit="STEPS",
            least=1,
            most=COUNT,
        ),
    ] = None
    restart_growth: Annotated[
        float,
        Option(
            "Restart the cosine, each period this many times as long as the one before; 0: never.",
            panel=RATE,
            accepts=lambda growth: not growth or growth >= 1,
            takes="1 or more, or 0",
        ),
    ] = 0.0
    line_search: Annotated[
        Literal["armijo", "wolfe", "strong-wolfe"], Option("Line search of L-BFGS.", panel=OPTIMIZER)
    ] = "wolfe"
    lbfgs_history: Annotated[
        int, Option("Moves that L-BFGS remembers.", panel=OPTIMIZER, unit="MOVES", least=1, most=COUNT)
    ] = 6
    lbfgs_fresh: Annotated[
        int,
        Option(
            "New rows for L-BFGS, and no history, after so many steps; 0: never.",
            panel=OPTIMIZER,
            unit="STEPS",
            least=0,
            most=COUNT,
        ),
    ] = 0
    weight_decay: Annotated[float, Option("Decoupled weight decay.", panel=OPTIMIZER, least=0)] = 0.1
    decay_min_ndim: Annotated[
        int, Option("Only tensors of so many dimensions decay.", panel=OPTIMIZER, least=0, most=COUNT)
    ] = 2
    clip: Annotated[
        float,
        Option(
            "The most that the norm of all gradients together may be; 0: no limit.",
            panel=OPTIMIZER,
            unit="NORM",
            least=0,
        ),
    ] = 1.0
    beta1: Annotated[
        float, Option("AdamW's first beta, SGD's momentum.", panel=OPTIMIZER, least=0, below=1, example="0.9")
    ] = 0.9
    beta2: Annotated[
        float, Option("AdamW's second beta.", panel=OPTIMIZER, least=0, below=1, example="0.999")
    ] = 0.999
    eps: Annotated[float, Option("AdamW's epsilon.", panel=OPTIMIZER, above=0, example="1e-8")] = 1e-8
    past: Annotated[
        int,
        Option(
            "Stop when the loss differs by less than --delta from the one so many steps ago; 0: never.",
            panel=END,
            unit="STEPS",
            least=0,
            most=COUNT,
        ),
    ] = 0
    delta: Annotated[
        float, Option("What --past compares with: a share of the loss.", panel=END, unit="SHARE", least=0)
    ] = 1e-5
    max_no_improvement: Annotated[
        int,
        Option(
            "Stop after so many steps in a row without a new lowest loss; 0: never.",
            panel=END,
            unit="STEPS",
            least=0,
            most=COUNT,
        ),
    ] = 0
    epsf: Annotated[
        float,
        Option(
            "Stop when the loss differs by less than this share from the one before; 0: never.",
            panel=END,
            unit="SHARE",
            least=0,
        ),
    ] = 0.0
    loss: Annotated[
        Literal["cross-entropy", "squared-error"],
        Option("What is minimised; the squared error is for the sine wave only."),
    ] = "cross-entropy"
    teacher: Annotated[
        Path | None,
        Option("Learn the distributions of this model, too, which has the same vocabulary.", unit="MODEL"),
    ] = None
    teacher_weight: Annotated[
        float,
        Option("The teacher's share of the loss; the rest is the data's.", unit="SHARE", least=0, most=1),
    ] = 0.5
    shards: Annotated[
        int | None,
        Option(
            "Groups of rows that ranks divide a step by, whose sum has the same bits for any number of them; else 8 with ranks.",
            panel=MEANS,
            unit="GROUPS",
            least=1,
            most=1 << 16,
            accepts=lambda groups: groups.bit_count() == 1,
            takes="a power of two",
        ),
    ] = None
    seed: Annotated[
        int,
        replace(
            SEED,
            sentence="What first weights, shuffling and samples follow from; -1: a random one, which is told.",
            least=-1,
        ),
    ] = 0
    precision: Annotated[
        Literal["auto", "f32", "bf16"],
        Option("Of matrix products; auto: bf16 where the processor has it, but for L-BFGS.", panel=MEANS),
    ] = "auto"
    flash: Annotated[bool, Option("Attention that never holds all its scores.", panel=MEANS)] = True
    remat: Annotated[
        str,
        Option(
            "Made again, not kept: none, light, block, optimal, so many blocks, block:3,wide:2; auto: light, or what fits best.",
            panel=MEANS,
            unit="WHAT",
            accepts=is_recomputed,
            takes=f"none, light, block, optimal, {AUTO}, a number of blocks, or such as block:3,wide:2",
        ),
    ] = "auto"
    memory: Annotated[
        Size | None,
        Option(
            "The most that the run may take, such as 6GB; else what is free.",
            panel=MEANS,
            accepts=lambda size: size >= LEAST,
            takes="a size, such as 6GB",
        ),
    ] = None
    kernels: Annotated[
        Literal["cpu", "reference"],
        Option("Compiled kernels, or the plain numpy ones that define them.", panel=MEANS),
    ] = "cpu"

    def agree(self) -> None:
        low, high = self.lr_min, self.lr
        if low is not None and low > high:
            raise OptionError(
                lambda spelt: f"{spelt('lr_min')} {low:g} must not be more than {spelt('lr')} {high:g}"
            )
        if self.restart_growth and self.schedule != "cosine":
            told = f"{self.restart_growth:g} takes the cosine schedule, not {self.schedule}"
            raise OptionError(lambda spelt: f"{spelt('restart_growth')} {told}")
        if self.loss == "squared-error" and not self.flash:
            raise OptionError(
                lambda spelt: f"{spelt('no_flash')} and {spelt('loss')} squared-error exclude each other"
            )


@dataclass(frozen=True)
class RunOptions(Options, panel="The run"):
    """What may change when a run is resumed: it decides nothing that is learned."""

    threads: Annotated[int | None, THREADS] = None
    save_every: Annotated[
        int,
        replace(EVERY, sentence="Save a checkpoint and the model every so many steps; 0: at the end only."),
    ] = 100
    keep: Annotated[
        int, Option("Checkpoints that stay; older ones are removed.", unit="CHECKPOINTS", least=1, most=COUNT)
    ] = 2
    eval_every: Annotated[
        int, replace(EVERY, sentence="Validate every so many steps and at the end; 0: never.")
    ] = 100
    patience: Annotated[
        int,
        Option(
            "Stop after so many validations in a row without a new lowest loss; 0: never.",
            panel=END,
            unit="TIMES",
            least=0,
            most=COUNT,
        ),
    ] = 0
    sample_every: Annotated[
        int, replace(EVERY, sentence="Show what the model writes every so many steps; 0: never.")
    ] = 0
    sample_prompt: Annotated[str, Option("What those samples begin with.")] = ""
    report_every: Annotated[
        int, replace(EVERY, sentence="Print a line every so many steps; 0: as often as reads well.")
    ] = 0
    max_time: Annotated[
        Duration | None, Option("Validate, save and stop after this time, such as 90m or 2h.")
    ] = None
    wire: Annotated[
        Literal["f32", "bf16"],
        Option(
            "Of gradients between ranks; bf16 is half as much, and bits depend on how many they are.",
            panel=MEANS,
        ),
    ] = "f32"
    timeout: Annotated[
        Duration, Option("End with code 75 where one of several processes falls silent for so long.", least=2)
    ] = TIMEOUT
    log: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio", "csv"], ...],
        Option("Write the figures there, too; may be repeated.", unit="WHERE"),
    ] = ()
    name: Annotated[
        str,
        Option(
            "What the run is called there; else as its folder.",
            unit="NAME",
            accepts=lambda name: name == name.strip() and name.isprintable() and len(name) <= 120,
            takes="a name of at most 120 letters",
        ),
    ] = ""
    note: Annotated[str, Option("Some words on the run, which are kept with it.")] = ""
    profile: Annotated[
        bool, Option("Say where the time went, and write trace.json for Chrome and Perfetto.")
    ] = False


PASSING: dict[str, Any] = {
    "max_time": None,
    "profile": False,
}  # of these, what is for the process alone that it is given to


@dataclass(frozen=True)
class RunFolderOptions(Options, panel="Where it lives"):
    """Where a run lives, and what it goes on from. These are not kept with it."""

    out: Annotated[
        Path | None,
        Option("The folder of the run; else a new one, runs/<command>-<n>.", unit="FOLDER", short="o"),
    ] = None
    overwrite: Annotated[bool, Option("Replace the run that is in the folder --out.")] = False
    resume: Annotated[
        Path | None,
        Option(
            "Go on with the run in this folder, or from this checkpoint of one.",
            unit="RUN",
            excludes=(
                ("checkpoint_in", "both say what to go on from"),
                ("config", "a run that goes on keeps its options"),
                ("overwrite", "go on with a run, or replace it"),
            ),
        ),
    ] = None
    checkpoint_in: Annotated[
        Path | None,
        Option("Start from this GGUF file: a model's weights, or a checkpoint with all that goes with them."),
    ] = None
    trust: Annotated[
        bool, Option("Read the files that a checkpoint from elsewhere names, without naming them again.")
    ] = False
    only_write_model: Annotated[bool, Option("Write the model of a checkpoint, and train nothing.")] = False
    config: Annotated[Path | None, Option("Read options from this TOML file; those given here win.")] = None
    quiet: Annotated[bool, Option("Say nothing but what went wrong.", short="q")] = False
    verbose: Annotated[
        bool,
        Option(
            "Say each step, and each option as it was resolved.",
            short="v",
            excludes=(("quiet", "say more, or less"),),
        ),
    ] = False


# ---- options that would do nothing -----------------------------------------


def refuse_idle(idle: Mapping[str, str], altered: Collection[str]) -> None:
    """Refuse an option that would do nothing; one that is given with its default asks for nothing."""
    for name, why in idle.items():
        if name in altered:
            raise UsageError(f"{flag_of(name)} means nothing {why}; leave it out")
