"""Options of a training run. Those left open (None, "auto") are resolved once, and stored with the run."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from llamatrain.config.common import BATCH, DEVICE, EVERY, SEED, THREADS, DeviceName
from llamatrain.config.options import COUNT, Condition, Option, OptionError, Options, Values, needs
from llamatrain.config.units import Duration, Size
from llamatrain.gguf.type_names import QuantizedName
from llamatrain.optim import registry
from llamatrain.sources.options import OLLAMA

AUTO = "auto"
ITERS = 256
WARMUP = 0.05  # default of --warmup, as a share of the steps
LR_MIN = 0.1  # default of --lr-min, as a share of --lr
WSD_DECAY = 0.2  # default of --decay-steps with the wsd schedule, as a share of the steps
TIMEOUT = Duration(120)
LEAST_MEMORY = 1000  # bytes; a smaller --memory was given without its unit


if TYPE_CHECKING:
    from llamatrain.gguf.types import GgmlType

    OptimizerName = str
else:
    OptimizerName = Literal[registry.optimizer_names()]

# panels of the help
RATE = "Learning rate"
OPTIMIZER = "Optimizer"
STOP = "When to stop"
SPEED = "Speed and memory"

NOT_LBFGS = Condition(
    lambda values: values["optimizer"] != "lbfgs",
    "with --optimizer lbfgs, whose line search needs a smooth loss",
)
NOT_CONSTANT = Condition(lambda values: values["schedule"] != "constant", "with --schedule constant")


def is_remat(text: str) -> bool:
    """Return True if a text is a recomputation policy."""
    from llamatrain.graph.remat_policy import is_policy

    return text == AUTO or is_policy(text)


def logs_to_tracker(values: Values) -> bool:
    """Return True if metrics go to a service that shows the name of a run."""
    return bool({*values["log"]} - {"csv"})


def check_rates(highest: float, least: float) -> None:
    """Raise OptionError if the lowest learning rate is above the highest one."""
    if least > highest:
        raise OptionError(
            lambda spelt: f"{spelt('lr_min')} must not exceed {spelt('lr')} {highest:g} (got {least:g})",
            code="lr-min-above-lr",
        )


def has_validation(values: Values) -> bool:
    """Return True if there is validation data."""
    return bool(values.get("val") or values.get("val_split"))


@dataclass(frozen=True)
class TrainOptions(Options, panel="Training"):
    """Options that decide what a model learns."""

    batch: Annotated[int, BATCH] = 8
    grad_acc: Annotated[
        int, Option("Batches per step; their gradients are added up.", unit="BATCHES", least=1, most=COUNT)
    ] = 1
    iters: Annotated[
        int | None,
        Option(
            "Steps in total, including those before a resume; default: 256, or as many as --epochs takes.",
            unit="STEPS",
            least=0,
            most=COUNT,
            resumable=True,
            announced=True,
            resolved=True,
        ),
    ] = None
    epochs: Annotated[
        int | None,
        Option(
            "Stop after this many passes over the data, or after --iters if that is sooner.",
            unit="TIMES",
            least=1,
            most=COUNT,
        ),
    ] = None
    optimizer: Annotated[
        OptimizerName,
        Option(
            "Optimizer. adamuon needs the fewest tokens, with --lr 0.01; like muon it trains whole models only. "
            "sgd has momentum --beta1, lbfgs uses the same rows in every step.",
            panel=OPTIMIZER,
        ),
    ] = "adamw"
    lr: Annotated[
        float | None,
        Option(
            "Learning rate, at the peak of the schedule; default of finetune: 2 / the width of the model, but at "
            "most 0.01, for an adapter, less with a larger --lora-alpha or --lora-plus-ratio; 1e-4 with --full or "
            "--objective.",
            panel=RATE,
            unit="RATE",
            least=0,
            resolved=True,
        ),
    ] = 1e-3
    lr_min: Annotated[
        float | None,
        Option(
            "Lowest learning rate of the schedule, also of the warm-up; default: a tenth of --lr.",
            panel=RATE,
            unit="RATE",
            least=0,
            resolved=True,
        ),
    ] = None
    warmup: Annotated[
        int | None,
        Option(
            "Steps in which the learning rate rises; default: 5 % of all steps.",
            panel=RATE,
            unit="STEPS",
            least=0,
            most=COUNT,
            resolved=True,
        ),
    ] = None
    schedule: Annotated[
        Literal["constant", "linear", "cosine", "wsd"],
        Option(
            "How the learning rate falls after the warm-up; wsd falls at the end only, and later if "
            "--iters is raised.",
            panel=RATE,
        ),
    ] = "cosine"
    decay_steps: Annotated[
        int | None,
        Option(
            "Steps in which the learning rate falls; default: all after the warm-up, with wsd a fifth.",
            panel=RATE,
            unit="STEPS",
            least=1,
            most=COUNT,
            when=(NOT_CONSTANT,),
            resumable=lambda values: values["schedule"] == "wsd",
            resolved=True,
        ),
    ] = None
    restart_growth: Annotated[
        float,
        Option(
            "Restart the cosine; each period is longer than the one before by this factor. 0: never.",
            panel=RATE,
            accepts=lambda growth: not growth or growth >= 1,
            takes="1 or more, or 0",
            when=(NOT_CONSTANT,),
        ),
    ] = 0.0
    line_search: Annotated[
        Literal["armijo", "wolfe", "strong-wolfe"], Option("Line search of L-BFGS.", panel=OPTIMIZER)
    ] = "wolfe"
    lbfgs_history: Annotated[
        int,
        Option(
            "Updates that L-BFGS keeps in its history.", panel=OPTIMIZER, unit="UPDATES", least=1, most=COUNT
        ),
    ] = 6
    lbfgs_refresh: Annotated[
        int,
        Option(
            "Give L-BFGS new rows and an empty history after this many steps; 0: never.",
            panel=OPTIMIZER,
            unit="STEPS",
            least=0,
            most=COUNT,
            aliases=("lbfgs_fresh",),
        ),
    ] = 0
    weight_decay: Annotated[float, Option("Decoupled weight decay.", panel=OPTIMIZER, least=0)] = 0.1
    decay_min_ndim: Annotated[
        int,
        Option(
            "Decay only tensors with at least this many dimensions.", panel=OPTIMIZER, least=0, most=COUNT
        ),
    ] = 2
    clip: Annotated[
        float,
        Option("Clip the global gradient norm to this; 0: off.", panel=OPTIMIZER, unit="NORM", least=0),
    ] = 1.0
    beta1: Annotated[
        float | None,
        Option(
            "Beta 1 of AdamW, momentum of SGD; default: 0.9, with adamuon 0.6.",
            panel=OPTIMIZER,
            least=0,
            below=1,
            example="0.9",
        ),
    ] = None
    beta2: Annotated[
        float | None,
        Option(
            "Beta 2 of AdamW; default: 0.999, with adamuon 0.95.",
            panel=OPTIMIZER,
            least=0,
            below=1,
            example="0.999",
        ),
    ] = None
    eps: Annotated[float, Option("Epsilon of AdamW.", panel=OPTIMIZER, above=0, example="1e-8")] = 1e-8
    stop_window: Annotated[
        int,
        Option(
            "Stop if the loss changed by less than --stop-delta over this many steps; 0: never.",
            panel=STOP,
            unit="STEPS",
            least=0,
            most=COUNT,
            aliases=("past",),
        ),
    ] = 0
    stop_delta: Annotated[
        float,
        Option(
            "Least change of the loss over --stop-window steps, as a share of the loss.",
            panel=STOP,
            unit="SHARE",
            least=0,
            when=(needs("stop_window"),),
            aliases=("delta",),
        ),
    ] = 1e-5
    max_no_improvement: Annotated[
        int,
        Option(
            "Stop after this many consecutive steps without a new lowest training loss; 0: never.",
            panel=STOP,
            unit="STEPS",
            least=0,
            most=COUNT,
        ),
    ] = 0
    stop_rel: Annotated[
        float,
        Option(
            "Stop if the loss changed by less than this share from one step to the next; 0: never.",
            panel=STOP,
            unit="SHARE",
            least=0,
            aliases=("epsf",),
        ),
    ] = 0.0
    loss: Annotated[
        Literal["cross-entropy", "squared-error"],
        Option("Loss function; squared-error is for the sine wave only."),
    ] = "cross-entropy"
    teacher: Annotated[
        Path | None,
        Option("Distill this model, which must have the same vocabulary.", unit="MODEL"),
    ] = None
    teacher_weight: Annotated[
        float,
        Option(
            "Share of the distillation loss; the data has the rest.",
            unit="SHARE",
            least=0,
            most=1,
            when=(needs("teacher"),),
        ),
    ] = 0.5
    quant_aware: Annotated[
        QuantizedName | None,
        Option(
            "Train for a model whose matrices have this type: products read them rounded to it. A new or whole "
            "model is written in it.",
            unit="TYPE",
            when=(NOT_LBFGS,),
        ),
    ] = None
    balance: Annotated[
        float,
        Option(
            "Weight of a loss that balances the experts of each block; it is 1 if all are chosen equally often.",
            unit="WEIGHT",
            least=0,
            example="0.01",
        ),
    ] = 0.0
    grad_groups: Annotated[
        int | None,
        Option(
            "Groups of rows whose gradients are added in a fixed order, so that any number of ranks up "
            "to this one "
            "gives the same bits; default: 8 with several ranks.",
            panel=SPEED,
            unit="GROUPS",
            least=1,
            most=1 << 16,
            accepts=lambda groups: groups.bit_count() == 1,
            takes="a power of two",
            resumable=True,
            announced=True,
            aliases=("shards",),
        ),
    ] = None
    seed: Annotated[
        int,
        replace(
            SEED,
            sentence="Seed of initial weights, shuffling and samples; -1: draw one, and print it.",
            least=-1,
        ),
    ] = 0
    precision: Annotated[
        Literal["auto", "f32", "bf16"],
        Option(
            "Number type of matrix products; auto: bf16 where it is faster, otherwise f32; f32 for L-BFGS.",
            panel=SPEED,
            resumable=True,
            announced=True,
        ),
    ] = "auto"
    flash: Annotated[bool, Option("Compute attention without storing all scores.", panel=SPEED)] = True
    remat: Annotated[
        str,
        Option(
            "Activations to recompute in the backward pass: none, light, block, optimal, a number of "
            "blocks, or a list "
            "such as block:3,wide:2; auto: light, or whatever fits the memory best.",
            panel=SPEED,
            unit="POLICY",
            accepts=is_remat,
            takes=(
                f"none, light, block, optimal, {AUTO}, a number of blocks, or a list such as block:3,wide:2"
            ),
        ),
    ] = "auto"
    memory: Annotated[
        Size | None,
        Option(
            "Memory limit of the run, such as 6GB; default: all that is free.",
            panel=SPEED,
            accepts=lambda size: size >= LEAST_MEMORY,
            takes="a size, such as 6GB",
            resumable=True,
        ),
    ] = None
    device: Annotated[DeviceName, replace(DEVICE, panel=SPEED)] = "cpu"
    kernels: Annotated[
        Literal["cpu", "reference"],
        Option("Compiled kernels, or the numpy ones that define them.", panel=SPEED),
    ] = "cpu"

    @property
    def rounding_type(self) -> "GgmlType | None":
        """The type that weights are rounded to, or None."""
        from llamatrain.gguf.types import type_by_name

        return type_by_name(self.quant_aware.upper()) if self.quant_aware else None

    @property
    def processor(self) -> str:
        """The name of the device for the engine, to which the numpy kernels are another one."""
        return self.kernels if self.device == "cpu" else self.device

    def validate(self) -> None:
        """Raise OptionError if options contradict each other."""
        if self.lr is not None and self.lr_min is not None:
            check_rates(self.lr, self.lr_min)
        if self.restart_growth and self.schedule != "cosine":
            raise OptionError(
                lambda spelt: (
                    f"{spelt('restart_growth')} needs {spelt('schedule')} cosine (got {self.schedule})"
                ),
                code="conflicting-options",
            )
        if self.device != "cpu" and self.kernels != "cpu":
            raise OptionError(
                lambda spelt: (
                    f"{spelt('kernels')} {self.kernels} is for {spelt('device')} cpu (got {self.device})"
                ),
                code="conflicting-options",
            )
        if self.loss == "squared-error" and not self.flash:
            raise OptionError(
                lambda spelt: f"{spelt('no_flash')} and {spelt('loss')} squared-error exclude each other",
                code="conflicting-options",
            )


@dataclass(frozen=True)
class RunOptions(Options, panel="The run", resumable=True):
    """Options that decide nothing that is learned. They may change when a run is resumed."""

    threads: Annotated[int | None, replace(THREADS, announced=True)] = None
    save_every: Annotated[
        int,
        replace(EVERY, sentence="Save a checkpoint and the model every N steps; 0: at the end only."),
    ] = 100
    keep: Annotated[
        int, Option("Checkpoints to keep; older ones are deleted.", unit="CHECKPOINTS", least=1, most=COUNT)
    ] = 2
    eval_every: Annotated[
        int, replace(EVERY, sentence="Validate every N steps and at the end; 0: never.")
    ] = 100
    patience: Annotated[
        int,
        Option(
            "Stop after this many consecutive validations without a new lowest loss; 0: never.",
            panel=STOP,
            unit="TIMES",
            least=0,
            most=COUNT,
            when=(
                Condition(has_validation, "without --val or --val-split"),
                Condition(lambda values: values["eval_every"], "with --eval-every 0"),
            ),
        ),
    ] = 0
    sample_every: Annotated[
        int, replace(EVERY, sentence="Print a text that the model writes every N steps; 0: never.")
    ] = 0
    sample_prompt: Annotated[
        tuple[str, ...],
        Option(
            "Prompt of these samples; may be repeated, for several texts.",
            takes_one=True,
            when=(needs("sample_every"),),
        ),
    ] = ()
    report_every: Annotated[
        int, replace(EVERY, sentence="Print a line every N steps; 0: at a readable rate.")
    ] = 0
    max_time: Annotated[
        Duration | None, Option("Validate, save and stop after this time, such as 90m or 2h.", transient=True)
    ] = None
    grad_comm_dtype: Annotated[
        Literal["f32", "bf16"],
        Option(
            "Number type of gradients between ranks; bf16 halves the traffic, and bits then depend on "
            "the number of ranks.",
            panel=SPEED,
            aliases=("wire",),
        ),
    ] = "f32"
    timeout: Annotated[
        Duration, Option("Exit with code 75 if one of several processes is silent for this long.", least=2)
    ] = TIMEOUT
    log: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio", "csv"], ...],
        Option("Also send metrics there; may be repeated.", unit="WHERE"),
    ] = ()
    name: Annotated[
        str,
        Option(
            "Name of the run there; default: the name of its folder.",
            unit="NAME",
            accepts=lambda name: name == name.strip() and name.isprintable() and len(name) <= 120,
            takes="a name of at most 120 letters",
            when=(Condition(logs_to_tracker, "without --log to tensorboard, wandb or trackio"),),
        ),
    ] = ""
    note: Annotated[str, Option("A note that is stored with the run.")] = ""
    ollama: Annotated[
        str,
        replace(
            OLLAMA,
            when=(
                Condition(
                    lambda values: not (values.get("lora") or values.get("lora_scaled")),
                    "with --lora, since Ollama takes one adapter: merge all of them with export-lora --ollama",
                ),
            ),
        ),
    ] = ""
    profile: Annotated[
        bool,
        Option("Print where the time went, and write trace.json for Chrome and Perfetto.", transient=True),
    ] = False


@dataclass(frozen=True)
class RunFolderOptions(Options, panel="Where it is stored"):
    """Options that say where a run is stored and where it starts. They are not stored with the run."""

    out: Annotated[
        Path | None,
        Option("Folder of the run; default: a new one, runs/<command>-<n>.", unit="FOLDER", short="o"),
    ] = None
    overwrite: Annotated[bool, Option("Replace the run in the folder --out.")] = False
    resume: Annotated[
        Path | None,
        Option(
            "Resume the run in this folder, or from this checkpoint.",
            unit="RUN",
            excludes=(
                ("checkpoint_in", "both name a checkpoint to start from"),
                ("config", "a resumed run keeps its options"),
                ("overwrite", "a run is either resumed or replaced"),
            ),
        ),
    ] = None
    checkpoint_in: Annotated[
        Path | None,
        Option("Start from this GGUF file: the weights of a model, or the full state of a checkpoint."),
    ] = None
    trust: Annotated[
        bool, Option("Read the files that someone else's checkpoint names, without naming them again.")
    ] = False
    only_write_model: Annotated[bool, Option("Write the model of a checkpoint, without training.")] = False
    config: Annotated[
        Path | None, Option("Read options from this TOML file; the command line overrides them.")
    ] = None
    quiet: Annotated[bool, Option("Print errors only.", short="q")] = False
    verbose: Annotated[
        bool,
        Option(
            "Print every step, and every option as it was resolved.",
            short="v",
            excludes=(("quiet", "one prints more, the other less"),),
        ),
    ] = False
