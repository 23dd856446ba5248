"""Assembles a run: from options, or from the run that is gone on with, to everything that the loop is given."""

import os
import shlex
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from llamatrain.adapters import peft
from llamatrain.config.file import config_text
from llamatrain.errors import FileError, UsageError
from llamatrain.files.newfile import NewFile
from llamatrain.optim.lbfgs import Lbfgs, LbfgsOptions
from llamatrain.optim.stop import StopRules
from llamatrain.recipe.asked import Options, Start, gone_on_with, start_of
from llamatrain.recipe.interrupts import Interrupts
from llamatrain.recipe.material import OWN_SIZE
from llamatrain.recipe.options import PlaceOptions
from llamatrain.recipe.prepare import Prepared, prepare
from llamatrain.recipe.saving import Keeper, restore
from llamatrain.recipe.target import filled
from llamatrain.recipe.tasks import model_for, task_for
from llamatrain.recipe.ways import schedule_of
from llamatrain.report.metrics import Metrics
from llamatrain.report.report import Report
from llamatrain.store.folder import RunFolder, numbered
from llamatrain.train.loop import Loop, Outcome
from llamatrain.train.programs import Programs


@dataclass(frozen=True)
class Finished:
    outcome: Outcome
    result: Path
    command: str  # that goes on with it


def train(options: Options, place: PlaceOptions, given: Collection[str]) -> Finished:
    start = start_of(place, options.command, options.base)
    notes = list(start.notes)
    if start.checkpoint:
        options, more = gone_on_with(options, start, given)
        notes += more
    options = options.settled()
    if options.tune.only_write_lora:
        return written(options, start, place, given)
    with folder_of(options.command, place, start) as folder, Interrupts(folder.discard) as interrupts:
        try:
            options = with_peft_folder(options, start, folder, place, given)
            prepared = prepare(options, start, notes, given)
            settle(prepared, folder)
            return run(prepared, folder, interrupts)
        finally:
            folder.discard()


def written(options: Options, start: Start, place: PlaceOptions, given: Collection[str]) -> Finished:
    """The adapter of a checkpoint, and nothing else."""
    assert start.checkpoint
    model = model_for(options, start, ())
    if place.overwrite:
        raise UsageError("--only-write-lora replaces no run: leave --overwrite out, and name a new folder with --out")
    with folder_of(options.command, place, start) as folder, telling(start):
        try:
            options = with_peft_folder(options, start, folder, place, given)
            task = task_for(replace(options, tune=replace(options.tune, cache_base="off")), model, start)
            task.write(folder.result(task.result), {name: start.checkpoint.weights[name] for name in task.trained})
        finally:
            folder.discard()
    command = f"llamatrain {options.command} --resume {shlex.quote(str(start.path))}"
    return Finished(Outcome("done"), folder.path / task.result, command)


# ---- the folder ------------------------------------------------------------


def folder_of(command: str, place: PlaceOptions, start: Start) -> RunFolder:
    """A new folder, or the one that the run has."""
    home = start.path.parent if place.resume and start.path else None
    if home is None or (place.out and os.path.realpath(place.out) != os.path.realpath(home)):
        return RunFolder.new(place.out, command, place.overwrite)
    assert place.resume and start.checkpoint
    step = start.checkpoint.counters.step
    if place.resume.is_file() and any(later > step for later in numbered(home)):
        raise UsageError(
            f"{place.resume}: its folder has later checkpoints; --resume {home} takes the newest, --out begins another run"
        )
    return RunFolder(home)


def with_peft_folder(options: Options, start: Start, folder: RunFolder, place: PlaceOptions, given: Collection[str]) -> Options:
    """The folder for PEFT replaces nothing that is read or was not asked for; that of another run is left to it."""
    path = options.tune.peft
    if path is None:
        return options
    elsewhere = start.path is not None and folder.path != start.path.parent
    if elsewhere and "peft" not in given:
        return replace(options, tune=replace(options.tune, peft=None))
    for read in adapters_of(options):
        if os.path.realpath(read) == os.path.realpath(path):
            raise UsageError(f"--peft {path} would replace {read}, which is being read: another name will do")
    peft.check_place(path)
    before = start.checkpoint.options.get("tune") if start.checkpoint else None
    kept = before.get("peft") if isinstance(before, dict) else None
    own = not elsewhere and isinstance(kept, str) and os.path.realpath(kept) == os.path.realpath(path)
    if not own and not place.overwrite and any((path / name).exists() for name in (peft.CONFIG, peft.WEIGHTS, peft.PICKLE)):
        or_replaced = "" if place.resume else ", --overwrite replaces it"
        raise FileError(f"{path}: there is an adapter already; another --peft leaves it alone{or_replaced}")
    return options


def settle(prepared: Prepared, folder: RunFolder) -> None:
    """Make the folder the run's own."""
    start, options = prepared.start, prepared.options
    if start.checkpoint and start.path and folder.path == start.path.parent:
        folder.rewind(start.checkpoint.counters.step)  # past those that are damaged
    else:
        folder.clear(read_from(options, start))
    unsaid = {*options.idle, *(OWN_SIZE if start.model and options.command == "from-scratch" else ())}
    head = f"llamatrain {options.command}{' BASE.gguf' if options.base else ''} --config FILE"
    text = config_text(head, options.files, list(options.parts.values()), unsaid)
    with NewFile(folder.result("config.toml")) as file:
        file.write(text.encode("utf-8", "replace"))


def read_from(options: Options, start: Start) -> list[Path]:
    """Files that the run reads."""
    named = [options.model.vocab_from, *adapters_of(options), start.model and start.model.path, start.path]
    return [path for path in named if path]


def adapters_of(options: Options) -> list[Path]:
    return [*([options.tune.lora_init] if options.tune.lora_init else []), *(path for path, _ in options.lora.scaled)]


@contextmanager
def telling(start: Start) -> Iterator[None]:
    """What a checkpoint says of itself may be nonsense, though its checksum holds."""
    try:
        yield
    except (KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
        raise FileError(f"{start.path}: its state cannot be gone on with: {error!r}") from error


def metrics_of(start: Start, folder: RunFolder) -> Metrics:
    """New, or those of the run so far; in a new folder its first part is told, too."""
    path = folder.result("metrics.jsonl")
    if start.path and (before := start.path.with_name(path.name)).exists() and not path.exists():
        with NewFile(path) as file:
            file.write(before.read_bytes())
    step = start.checkpoint.counters.step if start.checkpoint else 0
    return Metrics.resumed(path, step) if path.exists() else Metrics.fresh(path)


# ---- the run ---------------------------------------------------------------


def run(prepared: Prepared, folder: RunFolder, interrupts: Interrupts) -> Finished:
    options, start, task, choice = prepared.options, prepared.start, prepared.task, prepared.choice
    train, checkpoint = options.train, start.checkpoint
    command = f"llamatrain {options.command} --resume {shlex.quote(str(folder.path))}"
    metrics, iters = metrics_of(start, folder), train.iters or 0
    with Report(metrics, iters=iters, every=options.run.report_every or None) as report:
        report.header(facts(prepared, folder.path))
        for line in prepared.notes:
            report.say(f"note: {line}")
        task.load()
        programs = Programs(choice.graphs, choice.arena, task.frozen)
        parts = programs.weights.parts
        if checkpoint:
            with telling(start):
                filled(checkpoint, parts)
        else:
            task.begin(parts)
        keeper = Keeper(options, task, prepared.model.metadata, programs, folder, report)
        loop = Loop(
            programs, prepared.material.rows, prepared.material.validation, schedule_of(train),
            StopRules(train.past, train.delta, train.max_no_improvement, train.epsf), options.run, iters, train.grad_acc, report,
            keeper.save, lambda step: prepared.watch.show(step, parts, report), interrupts=interrupts, seed=train.seed,
        )  # fmt: skip
        if train.optimizer == "lbfgs":
            loop.lbfgs = Lbfgs(programs.weights.vector, LbfgsOptions(train.lbfgs_history, train.line_search))
        if checkpoint:
            with telling(start):
                restore(loop, checkpoint, report)
            report.resumed(checkpoint.counters.step)
            done = any("val_loss" in line and line.get("step") == loop.counters.step for line in metrics.lines())
            loop.owed = loop.owed and not done  # a run may be killed between the validation and the next save
        else:
            loop.owed = options.command == "finetune" and options.run.eval_every > 0  # the base's own loss, as line 0
        loop.saved = keeper.save(loop)  # so that a full disk shows now, and not after an hour
        folder.settled()
        interrupts.leaving = lambda: print(f"interrupted; to go on: {command}", file=sys.stderr, flush=True)
        outcome = loop.train()
        prepared.watch.end(parts, report)
        report.end(folder.path)
    return Finished(outcome, folder.path / task.result, command)


def facts(prepared: Prepared, folder: Path) -> list[tuple[str, str]]:
    train, choice, material, h = prepared.options.train, prepared.choice, prepared.material, prepared.model.h
    batches = f", {train.grad_acc} batches a step" if train.grad_acc > 1 else ""
    rows = f"{train.batch} rows of {max(material.rows.lengths)}{batches}"
    recomputed = "" if str(choice.policy) == "none" else f", recomputing {choice.policy}"
    trained = sum(tensor.size for tensor in prepared.task.trained.values())
    some = f"; an adapter of {trained:,} is trained" if prepared.task.kind == "finetune_lora" else ""
    return [
        ("model", h.describe()),
        ("parameters", f"{h.parameters:,}{some}"),
        ("data", material.described),
        ("training", f"{train.optimizer}, {train.iters} steps of {rows}, {train.precision}, {choice.setting.threads} threads"),
        ("memory", choice.needs.describe() + recomputed),
        ("folder", str(folder)),
    ]
