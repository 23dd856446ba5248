"""Assembles a run: from options, or from the run that is gone on with, to everything that the loop is given."""

import math
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from llamatrain.config.file import config_text
from llamatrain.config.options import flag_of, from_plain, plain
from llamatrain.config.units import Size
from llamatrain.data.options import DataOptions
from llamatrain.data.sources import find_sources
from llamatrain.errors import FileError, MemoryPlanError, UsageError
from llamatrain.files.newfile import NewFile
from llamatrain.files.pages import release
from llamatrain.files.reader import Gguf, open_gguf
from llamatrain.machine.memory import available, resident
from llamatrain.machine.threads import runner
from llamatrain.machine.units import cores, units
from llamatrain.model import initial, load
from llamatrain.model.llama import parameters
from llamatrain.model.options import ModelOptions
from llamatrain.optim.lbfgs import Lbfgs, LbfgsOptions
from llamatrain.optim.schedule import Schedule
from llamatrain.optim.step import SGD, AdamW, Optimizer
from llamatrain.optim.stop import StopRules
from llamatrain.report.metrics import Metrics
from llamatrain.report.report import Report
from llamatrain.train.checkpoint import GRADIENTS, Checkpoint
from llamatrain.train.folder import RunFolder, numbered, write_model
from llamatrain.train.graphs import Gradients, Setting
from llamatrain.train.interrupts import Interrupts
from llamatrain.train.loop import Loop, Outcome
from llamatrain.train.material import Material, Model, material_of, model_of, new_model, sine_of
from llamatrain.train.needs import SHARE, Choice, Shape, choose, excess, fixed
from llamatrain.train.options import AUTO, ITERS, LR_MIN, WARMUP, PlaceOptions, RunOptions, TrainOptions, idle
from llamatrain.train.programs import Programs
from llamatrain.train.watch import Nothing, Texts, Watch, Waves

COMMAND = "from-scratch"
KIND = "train_model"  # training.type
LOADED = 14 * 10**6  # bytes that a process grows by beside what is planned: compiled kernels, and calls bound to them
VECTORS = {
    "adamw": {"m": "optimizer.adam.first_moments", "v": "optimizer.adam.second_moments"},
    "sgd": {"m": "optimizer.sgd.momentum"},
    "lbfgs": {},
}
TYPES = {"adamw": "adam", "sgd": "sgd", "lbfgs": "lbfgs"}  # optimizer.type


@dataclass(frozen=True)
class Options:
    """All that a run is told and keeps."""

    files: tuple[str, ...]
    model: ModelOptions
    data: DataOptions
    train: TrainOptions
    run: RunOptions

    def plain(self) -> dict[str, Any]:
        parts = {name: plain(getattr(self, name)) for name in ("model", "data", "train", "run")}
        return {"command": COMMAND, "files": list(self.files), **parts}

    @classmethod
    def from_plain(cls, kept: Mapping[str, Any], source: object) -> "Options":
        files = kept.get("files", [])
        parts = [kept.get(name, {}) for name in ("model", "data", "train", "run")]
        if not (isinstance(files, list) and all(isinstance(f, str) for f in files) and all(isinstance(p, dict) for p in parts)):
            raise FileError(f"{source}: its options are damaged")
        model, data, train, run = parts
        try:
            return cls(
                tuple(files), from_plain(ModelOptions, model, source), from_plain(DataOptions, data, source),
                from_plain(TrainOptions, train, source), from_plain(RunOptions, run, source),
            )  # fmt: skip
        except UsageError as error:
            raise FileError(str(error)) from None


# ---- where a run begins ----------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Nothing, a model's file, or a checkpoint."""

    model: Gguf | None = None
    checkpoint: Checkpoint | None = None
    path: Path | None = None  # of the checkpoint
    notes: tuple[str, ...] = ()


def start_of(place: PlaceOptions) -> Start:
    if place.resume:
        checkpoint, path, notes = RunFolder.newest(place.resume)
        return Start(open_gguf(path), checkpoint, path, tuple(notes))
    if not place.checkpoint_in:
        return Start()
    gguf = open_gguf(place.checkpoint_in)
    if gguf.kind != "checkpoint":
        return Start(gguf)
    checkpoint, path, notes = RunFolder.newest(place.checkpoint_in)
    return Start(gguf, checkpoint, path, tuple(notes))


def gone_on_with(options: Options, start: Start, given: Collection[str]) -> tuple[Options, list[str]]:
    """A checkpoint's options, with those changed that may be; and what is to be said of it."""
    assert start.checkpoint
    if not start.checkpoint.options:  # an ancestor's: it kept none
        return options, []
    kept = Options.from_plain(start.checkpoint.options, start.path)
    changed: dict[str, dict[str, Any]] = {"train": {}, "run": {}, "data": {}}
    said = list[str]()
    free = {f.name: "run" for f in fields(RunOptions)} | {
        "iters": "train",
        "memory": "train",
        "precision": "train",
        "val": "data",
    }
    for part in ("model", "data", "train", "run"):
        for field in fields(getattr(options, part)):
            name = field.name
            asked, before = getattr(getattr(options, part), name), getattr(getattr(kept, part), name)
            if name not in given or asked == before:
                continue
            if name not in free:
                raise UsageError(f"{flag_of(name)} {asked} may not change when a run goes on: it has {before}; leave it out")
            changed[free[name]][name] = asked
            if name in ("iters", "threads", "precision"):
                said.append(f"{flag_of(name)} is {asked} from now on" + (f", and was {before}" if before is not None else ""))
    if options.files and absolute(options.files) != kept.files:
        before = " ".join(kept.files) or "the sine wave"
        raise UsageError(f"the data may not change when a run goes on: it has {before}; leave it out")
    if "-" in kept.files and sys.stdin.isatty():
        raise UsageError("the run's data came from standard input: give it there again")
    parts = {part: replace(getattr(kept, part), **values) for part, values in changed.items()}
    if "iters" in changed["train"] and kept.train.schedule != "constant" and kept.train.optimizer != "lbfgs":
        said.append(f"the schedule stays: after step {kept.train.iters} the rate is --lr-min {kept.train.lr_min:g}")
    if "precision" in changed["train"]:
        said.append("with another precision the run is not, to the bit, what it would have been")
    return replace(kept, **parts), said


def absolute(files: Sequence[str]) -> tuple[str, ...]:
    """So that a run goes on from any folder."""
    return tuple(file if file == "-" else str(Path(os.path.abspath(file))) for file in files)  # noqa: PTH100 - keeps links


# ---- what was left open ----------------------------------------------------


def resolved(options: TrainOptions, rows_of: Callable[[int], int]) -> TrainOptions:
    iters = options.iters if options.iters is not None else ITERS
    if options.epochs is not None:
        iters = -(-rows_of(options.epochs) // (options.batch * options.grad_acc))
    warmup = options.warmup if options.warmup is not None else round(WARMUP * iters)
    precision = options.precision
    if precision == AUTO:
        precision = "bf16" if units() & {"amx", "avx512bf16"} and options.kernels == "cpu" else "f32"
    return replace(
        options, iters=iters, epochs=None, warmup=warmup, precision=precision,
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


def watch_of(options: Options, model: Model, material: Material | None) -> Watch:
    run, train, threads = options.run, options.train, options.run.threads or cores()
    if material and material.sine:
        return Waves(model.h, material.sine, threads, train.kernels)
    if not run.sample_every or not model.vocabulary.tokenizer:
        return Nothing()
    return Texts(model.h, model.vocabulary.tokenizer, run.sample_prompt, train.seed, threads, train.kernels)


def gradients_of(train: TrainOptions) -> Gradients:
    if train.optimizer == "lbfgs" or train.grad_acc > 1:
        return "flat"
    return "arena" if train.clip > 0 else "streamed"


def chosen(
    options: Options, model: Model, lengths: tuple[int, ...], validating: bool, watch: Watch, refuse: bool = True
) -> Choice:
    """How the run will be run, in the memory that there is."""
    train, threads = options.train, options.run.threads or cores()
    weights = parameters(model.h)
    setting = Setting(
        model.h, weights, weights.tensors, train.batch, max(lengths), train.precision, threads, train.kernels, train.flash,
        train.loss == "squared-error", optimizer_of(train), gradients_of(train), train.clip,
    )  # fmt: skip
    runner(threads)  # every run needs it, and what it loads is to be counted as what the process holds
    history = train.lbfgs_history if train.optimizer == "lbfgs" else 0
    shape = Shape(lengths, validating, watch.positions, history, resident() + LOADED)
    most = allowed(train)
    least = fixed(setting, shape)
    if refuse and most is not None and least > most:  # at once: planning a model so large takes a while
        takes = f"weights, gradients and moments alone take {Size(least).words}"
        raise MemoryPlanError(f"{takes}, and {Size(most).words} are there; a smaller model takes less")
    return choose(setting, train.remat, shape, most)


def allowed(train: TrainOptions) -> int | None:
    """Bytes that a run may take: as it was told, or nearly all that is free, its own share included."""
    if train.memory is not None:
        return train.memory
    free = available()
    return None if free is None else int((free + resident()) * SHARE)


# ---- the run ---------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    outcome: Outcome
    folder: Path
    command: str  # that goes on with it


def from_scratch(options: Options, place: PlaceOptions, given: Collection[str]) -> Finished:
    start = start_of(place)
    said: list[str] = list(start.notes)
    if start.checkpoint:
        options, more = gone_on_with(options, start, given)
        said += more
    options = replace(options, files=absolute(options.files))
    with folder_of(place, start) as folder, Interrupts(folder.discard) as interrupts:
        try:
            return in_folder(options, start, folder, said, given, interrupts)
        finally:
            folder.discard()


def in_folder(
    options: Options, start: Start, folder: RunFolder, said: list[str], given: Collection[str], interrupts: Interrupts
) -> Finished:
    model = model_for(options, start, given)
    material = material_of(options.files, model, options.data, options.train.seed)
    options = replace(options, train=resolved(options.train, material.rows.count))
    watch = watch_of(options, model, material)
    choice = chosen(options, model, material.rows.lengths, material.validation is not None, watch)
    if (told := excess(choice, options.train.memory, allowed(options.train))) is not None:
        raise MemoryPlanError(told)
    if start.checkpoint and start.checkpoint.counters.step >= (options.train.iters or 0):
        said.append(f"all {options.train.iters} steps are done already; --iters with a larger number goes on")
    if choice.splits > 1:
        said.append(f"a batch is run in {choice.splits} parts, to fit the memory")
    train = replace(
        options.train, remat=str(choice.policy), batch=choice.setting.batch, grad_acc=options.train.grad_acc * choice.splits
    )
    options = replace(options, train=train)
    if start.checkpoint and start.path and folder.path == start.path.parent:
        folder.rewind(start.checkpoint.counters.step)  # past those that are damaged
    else:
        folder.clear()
    parts = (options.model, options.data, options.train, options.run)
    text = config_text(f"llamatrain {COMMAND} --config FILE", options.files, parts, idle(options.train, options.run))
    with NewFile(folder.result("config.toml")) as file:
        file.write(text.encode("utf-8", "replace"))
    return run(options, start, material, choice, watch, folder, said, interrupts)


def model_for(options: Options, start: Start, given: Collection[str], read: bool = True) -> Model:
    if not start.model:
        return new_model(options.files, options.model, read)
    model = model_of(start.model, options.model, () if start.checkpoint and start.checkpoint.options else given)
    return replace(model, metadata=start.checkpoint.metadata) if start.checkpoint else model


def planned(options: Options, place: PlaceOptions, given: Collection[str]) -> tuple[Choice, str | None]:
    """How a run would be run, and why it would not, if so; its text is not read, and nothing is written."""
    start = start_of(place)
    if start.checkpoint:
        options, _ = gone_on_with(options, start, given)
    if named := [file for file in options.files if file != "-"]:
        find_sources(named)
    model = model_for(options, start, given, read=False)
    sine = None if options.files else sine_of(model, 0)
    options = replace(options, train=resolved(options.train, lambda epochs: epochs))
    validating = bool(options.data.val or options.data.val_split)
    choice = chosen(options, model, (model.row,), validating, watch_of(options, model, sine), refuse=False)
    return choice, excess(choice, options.train.memory, allowed(options.train))


def folder_of(place: PlaceOptions, start: Start) -> RunFolder:
    """A new folder, or the one that the run has."""
    home = start.path.parent if place.resume and start.path else None
    if home is None or (place.out and os.path.realpath(place.out) != os.path.realpath(home)):
        return RunFolder.new(place.out, COMMAND, place.overwrite)
    assert place.resume and start.checkpoint
    step = start.checkpoint.counters.step
    if place.resume.is_file() and any(later > step for later in numbered(home)):
        raise UsageError(
            f"{place.resume}: its folder has later checkpoints; --resume {home} takes the newest, --out begins another run"
        )
    return RunFolder(home)


def run(
    options: Options, start: Start, material: Material, choice: Choice, watch: Watch, folder: RunFolder, said: list[str],
    interrupts: Interrupts,
) -> Finished:  # fmt: skip
    train, checkpoint = options.train, start.checkpoint
    metrics_file = folder.result("metrics.jsonl")
    step = checkpoint.counters.step if checkpoint else 0
    if start.path and (before := start.path.with_name(metrics_file.name)).exists() and not metrics_file.exists():
        with NewFile(metrics_file) as file:
            file.write(before.read_bytes())  # the run's first part, told in its new folder, too
    metrics = Metrics.resumed(metrics_file, step) if metrics_file.exists() else Metrics.fresh(metrics_file)
    assert train.iters is not None
    with Report(metrics, iters=train.iters, every=options.run.report_every or None) as report:
        report.header(facts(options, material, choice, folder.path))
        for line in said:
            report.say(f"note: {line}")
        programs = Programs(choice.graphs, choice.arena)
        fill(programs, start, train.seed, choice.setting.threads)
        keeper = Keeper(options, material, programs, folder, report)
        loop = Loop(
            programs, material.rows, material.validation, schedule_of(train),
            StopRules(train.past, train.delta, train.max_no_improvement, train.epsf), options.run, train.iters, train.grad_acc,
            report, keeper.save, lambda step: watch.show(step, programs.weights.parts, report), interrupts=interrupts,
        )  # fmt: skip
        if train.optimizer == "lbfgs":
            loop.lbfgs = Lbfgs(programs.weights.vector, LbfgsOptions(train.lbfgs_history, train.line_search))
        if checkpoint:
            restore(loop, checkpoint, report)
            loop.saved = str(start.path)
            report.resumed(step)
        else:
            loop.saved = keeper.save(loop)
        outcome = loop.train()
        watch.end(programs.weights.parts, report)
        report.end(folder.path)
    return Finished(outcome, folder.path, f"llamatrain {COMMAND} --resume {shlex.quote(str(folder.path))}")


def facts(options: Options, material: Material, choice: Choice, folder: Path) -> list[tuple[str, str]]:
    train, h = options.train, material.h
    batches = f", {train.grad_acc} batches a step" if train.grad_acc > 1 else ""
    rows = f"{train.batch} rows of {max(material.rows.lengths)}{batches}"
    recomputed = "" if str(choice.policy) == "none" else f", recomputing {choice.policy}"
    return [
        ("model", h.describe()),
        ("parameters", f"{h.parameters:,}"),
        ("data", material.described),
        ("training", f"{train.optimizer}, {train.iters} steps of {rows}, {train.precision}, {choice.setting.threads} threads"),
        ("memory", choice.needs.describe() + recomputed),
        ("folder", str(folder)),
    ]


def fill(programs: Programs, start: Start, seed: int, threads: int) -> None:
    """The weights to begin with."""
    parts = programs.weights.parts
    if start.checkpoint:
        for name, part in parts.items():
            part[...] = start.checkpoint.weights[name]
            release(start.checkpoint.weights[name])
    elif start.model:
        load.fill_from(start.model, parts, threads)
    else:
        initial.fill(programs.setting.h, seed, parts)


# ---- checkpoints of it -----------------------------------------------------


@dataclass
class Keeper:
    """Writes a run as it stands."""

    options: Options
    material: Material
    programs: Programs
    folder: RunFolder
    report: Report

    def save(self, loop: Loop) -> str:
        self.report.metrics.flush()
        weights = self.programs.weights.parts | self.material.untrained
        path = self.folder.save(self.checkpoint(loop, weights), self.options.run.keep)
        write_model(self.folder.result("model.gguf"), self.material.metadata, weights)
        return str(path)

    def checkpoint(self, loop: Loop, weights: dict[str, np.ndarray]) -> Checkpoint:
        kind = self.options.train.optimizer
        vectors = {name: self.programs.vectors[short].vector for short, name in VECTORS[kind].items()}
        numbers: dict[str, float | int | bool] = {}
        if loop.lbfgs and not math.isnan(loop.lbfgs.loss):
            for name, value in loop.lbfgs.to_dict().items():
                (vectors if isinstance(value, np.ndarray) else numbers)[f"optimizer.lbfgs.{name}"] = value
        if loop.partial and self.programs.grads:
            vectors[GRADIENTS] = self.programs.grads.vector
        return Checkpoint(
            KIND, dict(self.material.metadata), weights, self.options.plain(), replace(loop.counters),
            loop.data or loop.rows.state, TYPES[kind], list(self.programs.weights.parts), vectors, numbers,
            loop.stop, loop.partial, {"owed_validation": loop.owed},
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
    elif checkpoint.partial and programs.grads:
        programs.grads.vector[:] = checkpoint.vectors[GRADIENTS]
        loop.partial = checkpoint.partial
    loop.counters, loop.stop = replace(checkpoint.counters), checkpoint.stop
    loop.owed = bool(checkpoint.extra.get("owed_validation"))


def kind_of(programs: Programs, loop: Loop) -> str:
    if loop.lbfgs:
        return "lbfgs"
    return "adamw" if "v" in programs.vectors else "sgd"
