"""Prepares a run: everything that can fail, before anything is written."""

import os
import secrets
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from llamatrain.adapters import peft as peft_files
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.config.options import COUNT
from llamatrain.config.toml import config_text
from llamatrain.config.units import Size
from llamatrain.data.batches import lengths_of
from llamatrain.data.find_files import find_data
from llamatrain.data.sine import Sine
from llamatrain.distributed.comm import get_comm
from llamatrain.engine.profiler import phase
from llamatrain.errors import FileError, MemoryPlanError, UsageError
from llamatrain.model import hyperparameters
from llamatrain.model.distill import Teacher
from llamatrain.planner.limits import check_held
from llamatrain.platform.escape import make_printable
from llamatrain.report.loggers import check as check_loggers
from llamatrain.run.checkpointer import check_trained
from llamatrain.run.choose_trainable import target_of
from llamatrain.run.config import RunConfig, transient_options
from llamatrain.run.dataset import TrainingData, check_begin, data_of, sine_of
from llamatrain.run.extra_outputs import may_write
from llamatrain.run.fit_memory import DataShape, FittedRun, fitted
from llamatrain.run.inputs import RunInputs, opened
from llamatrain.run.model import NEW_MODEL, RunModel, check_taught, model_for
from llamatrain.run.request import RunRequest
from llamatrain.run.resolve import ResolvedConfig, precision_of, resolve
from llamatrain.run.resume import ResumePoint, check_inputs, gone_on_with, resumed_of
from llamatrain.run.sampling import Sampler, samples_of
from llamatrain.run.trainable import Trainable
from llamatrain.train.programs import TrainPrograms


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that could begin."""

    resolved: ResolvedConfig
    fitted: FittedRun
    kept: RunConfig  # what is written down of both
    sources: RunInputs
    model: RunModel
    data: TrainingData
    target: Trainable
    samples: Sampler
    notes: tuple[str, ...]

    def foresee(self, programs: TrainPrograms) -> None:
        """Make the programs that will be needed after the first step, too."""
        self.samples.foresee(self.fitted.leaves, programs.weights.parts)
        self.foresee_validation(programs)

    def foresee_validation(self, programs: TrainPrograms) -> None:
        if self.data.validation:
            programs.eval_program(self.resolved.row)


def begun(request: RunRequest) -> tuple[RunConfig, RunInputs, list[str]]:
    """What is asked in the end, what it is made from, and what is to be said of the run that goes on."""
    asked, place = request.asked, request.place
    resumed = resumed_of(place, asked.command)
    notes = [*request.notes, *(resumed.notes if resumed else ())]
    if resumed:
        named = asked.settled()
        asked, more = gone_on_with(asked, resumed, request.given, request.altered)
        notes += more
        if resumed.kept:
            check_inputs(asked, named, resumed, place)
    if asked.train.seed < 0:
        asked = replace(
            asked, train=replace(asked.train, seed=get_comm().broadcast(secrets.randbelow(COUNT)))
        )
        notes.append(f"--seed -1: {asked.train.seed} is drawn")
    asked = asked.settled("" if resumed or not place.checkpoint_in else str(place.checkpoint_in))
    return asked, opened(asked, resumed), notes


def prepare(
    asked: RunConfig, sources: RunInputs, peft: Path | None, notes: list[str], altered: Collection[str]
) -> PreparedRun:
    with get_comm().raise_on_all():
        check(asked)
    with phase("tokenizer"):
        model = model_for(asked, sources, altered)
    teacher = teacher_for(asked, model, sources)
    target = target_of(
        asked, model, sources, peft
    )  # what adapters are not as they should be is told before the data is read
    check_held(asked.train.memory)
    with phase("data"):
        data = data_of(asked.files, model, asked.data, asked.train.seed, asked.preference.data_kind)
    if data.packed:  # whatever would be without a word another time
        asked = replace(asked, data=replace(asked.data, pack=True))
    resolved = resolve(asked, model.row, data.rows.count)
    data.rows.end = asked.train.epochs or 0
    samples = shown(resolved, model, data.rows if isinstance(data.rows, Sine) else None)
    extent = DataShape(
        lengths=data.rows.lengths,
        sparse=data.rows.sparse or (data.validation is not None and data.validation.sparse),
        validating=data.validation is not None,
        decoding=samples.positions,
        goes_on=sources.goes_on,
        teacher=teacher,
    )
    with phase("planning"):
        found = fitted(resolved, target, extent)
    if sources.resumed:
        check_trained(sources.resumed, found.leaves.trained)
    if found.excess:
        raise MemoryPlanError(found.excess)
    return PreparedRun(
        resolved=resolved,
        fitted=found,
        kept=resolved.kept(str(found.way.policy), found.way.splits, found.cache),
        sources=sources,
        model=model,
        data=data,
        target=target,
        samples=samples,
        notes=(*notes, *remarks(resolved, found, sources, model, target)),
    )


def check(asked: RunConfig) -> None:
    """What is found out in no time."""
    check_held(asked.train.memory)
    check_loggers(asked.run.log)
    if asked.files:
        check_begin(asked.files, asked.data, asked.preference.data_kind)


def teacher_for(asked: RunConfig, model: RunModel, sources: RunInputs) -> Teacher | None:
    if sources.taught_by is None:
        return None
    check_taught(model, sources.taught_by)
    half = precision_of(asked.train) == "bf16"
    return Teacher(hyperparameters.read_hyperparameters(sources.taught_by), asked.train.teacher_weight, half)


def shown(resolved: ResolvedConfig, model: RunModel, sine: Sine | None) -> Sampler:
    run, train = resolved.asked.run, resolved.asked.train
    return samples_of(
        model,
        sine,
        run.sample_prompt if run.sample_every else None,
        train.seed,
        resolved.threads,
        train.kernels,
    )


def remarks(
    resolved: ResolvedConfig, found: FittedRun, sources: RunInputs, model: RunModel, target: Trainable
) -> Iterator[str]:
    """What a run's user should know of it."""
    asked, tune = resolved.asked, resolved.asked.tune
    if sources.resumed and sources.step >= resolved.iters:
        yield f"all {resolved.iters} steps are done already; --iters with a larger number goes on"
    if resolved.optimizer.exact and resolved.precision == "bf16":
        yield f"--optimizer {asked.train.optimizer} in bf16 sees rounded losses and ends early; --precision f32 goes further"
    if found.way.splits > 1:
        yield f"a batch is run in {found.way.splits} parts, to fit the memory"
    if (
        resolved.parts > 1
        and asked.train.batch * model.row < FEW
        and resolved.ranks < (groups := asked.train.grad_groups or 1)
    ):
        few = 1 << (resolved.ranks - 1).bit_length()
        yield f"a batch is run in {resolved.parts} parts, for {groups} groups; --grad-groups {few} is faster, with bits of its own"
    if model.row > model.h.ctx:
        yield f"rows have {model.row} tokens, and the model was made for {model.h.ctx}"
    if found.cache == "off" and found.way.needs.packed_copies:
        copied = Size(found.way.needs.packed_copies).words
        yield f"weights of types that no product unpacks on its way are unpacked once, which takes {copied}"
    if target.kind == "train_model" and sources.base and not sources.resumed:
        kinds = {sources.base.tensors[name].type.name for name in model.h.shapes} - {"F32"}
        if kinds:
            yield f"weights in {', '.join(sorted(kinds))} are unpacked: all are trained in F32, and {target.result} is written so"
    changed = (tune.rope_freq_base, tune.rope_freq_scale, tune.norm_rms_eps) != (None, None, None)
    if changed and asked.command == "finetune" and not tune.full:
        yield "the adapter is for the base with this rope and epsilon: it is to be run with the same"


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """How a run would be run, and what is asked of it in the end."""

    fitted: FittedRun
    asked: RunConfig
    batches: int  # of a step
    steps: int | None  # that are to come; how many an epoch has is not known before its text is read


def planned(request: RunRequest, graphs: bool = True, ranks: int = 0) -> PlannedRun:
    """On so many ranks. The text is not read, and nothing is written."""
    with request.telling():
        return foreseen(request, graphs, ranks)


JOINED = 20 * 10**6  # bytes that MPI takes of each process that it joins
FEW = 1024  # tokens: products of fewer run below their speed
TOKEN = 500  # bytes of each in a vocabulary that was read: texts, merges, and the tables to find them


def unread_of(model: RunModel, sources: RunInputs) -> int:
    """What a vocabulary takes that is not learned yet."""
    return 0 if sources.base or not model.tokenizer else TOKEN * (model.h.vocab - len(model.tokenizer))


def foreseen(request: RunRequest, graphs: bool, ranks: int) -> PlannedRun:
    asked, sources, _ = begun(request)
    check_held(asked.train.memory)
    named = [file for file in asked.files if file != "-"]
    files = find_data(named, raw=asked.data.raw) if named else None
    plain = all(source.kind == "text" for source in (files.sources if files else ()))
    whole = plain and not asked.data.pattern
    model = model_for(asked, sources, request.altered, read=False)
    sine = None if asked.files else sine_of(model, 0)
    resolved = resolve(asked, model.row, lambda epochs: epochs, ranks)
    extent = DataShape(
        lengths=lengths_of(model.row, asked.data, whole, plain, asked.preference.data_kind),
        sparse=not whole,
        validating=bool(asked.data.val or asked.data.val_split or (files and files.validation)),
        decoding=shown(resolved, model, sine).positions,
        goes_on=sources.goes_on,
        teacher=teacher_for(asked, model, sources),
        to_come=unread_of(model, sources) + (JOINED if ranks > 1 and get_comm().size == 1 else 0),
        rough=not graphs,
    )
    refuse = asked.train.memory is not None  # else it is told what would be needed
    found = fitted(resolved, target_of(asked, model, sources, None), extent, refuse)
    steps = None if asked.train.epochs is not None else max(0, resolved.iters - sources.step)
    return PlannedRun(fitted=found, asked=asked, batches=resolved.asked.train.grad_acc, steps=steps)


# ---- files -----------------------------------------------------------------


def read_by(asked: RunConfig, sources: RunInputs, config: Path | None) -> Iterator[Path]:
    """All files that a run is made from."""
    yield from (path for path in (asked.model.vocab_from, asked.train.teacher, config) if path)
    yield from (
        path
        for path in (sources.base and sources.base.path, sources.resumed and sources.resumed.path)
        if path
    )
    for adapter in asked.adapters:
        yield from adapter.iterdir() if adapter.is_dir() else (adapter,)
    for names in (asked.files, asked.data.val):
        found = find_data(names, raw=asked.data.raw) if names else None
        yield from (source.path for source in ((*found.sources, *found.validation) if found else ()))


def config_of(kept: RunConfig) -> str:
    """A file that says the same run again."""
    new = kept.command == "from-scratch"
    unsaid = {
        *kept.unused,
        *(NEW_MODEL if new and kept.base else ()),
        *(name for _, name, _ in transient_options()),
    }
    first = f" --checkpoint-in {shlex.quote(kept.base)}" if new and kept.base else ""
    head = f"llamatrain {kept.command}{first} --config FILE"
    return config_text(
        make_printable(head, "utf-8"),
        kept.files,
        list(kept.parts.values()),
        unsaid,
        base="" if new else kept.base,
    )


def peft_folder(
    asked: RunConfig, sources: RunInputs, folder: RunFolder, request: RunRequest
) -> tuple[RunConfig, Path | None, list[str]]:
    """Find the folder for PEFT, which replaces nothing that is read or was not asked for. That of another run is left to it, and
    so is one that only a checkpoint names, unless this user wrote that and the folder lies in the run's own. Return what is
    asked then, the folder, and what to say of it."""
    path, place = asked.tune.peft, request.place
    elsewhere = sources.home is not None and folder.path != sources.home
    if path is None or (elsewhere and "peft" not in request.given):
        return replace(asked, tune=replace(asked.tune, peft=None)), None, []
    real, said = os.path.realpath(path), "peft" in request.said
    if "peft" not in request.given and not may_write(path, folder.path, sources.resumed):
        if sources.resumed and sources.resumed.own:
            peft_files.remove_begun(path)
        else:
            asked = replace(asked, tune=replace(asked.tune, peft=None))
        return (
            asked,
            None,
            [
                f"the adapter is not written to {path}, which its checkpoint alone names; --peft {path} does that"
            ],
        )
    peft_files.remove_begun(path)
    for read in asked.adapters:
        if os.path.realpath(read) == real:
            raise UsageError(f"--peft {path} would replace {read}, which is being read: another name will do")
    peft_files.check_place(path)
    kept = peft_before(sources.resumed)
    own = not elsewhere and kept is not None and os.path.realpath(kept) == real
    if peft_files.is_there(path) and not own and not (place.overwrite and said):
        replaced = (
            ""
            if place.resume
            else ", --overwrite replaces it"
            if said
            else f", --overwrite --peft {path} replaces it"
        )
        raise FileError(f"{path}: there is an adapter already; another --peft leaves it alone{replaced}")
    return asked, path, []


def peft_before(resumed: ResumePoint | None) -> str | None:
    before = resumed.checkpoint.options.get("tune") if resumed else None
    kept = before.get("peft") if isinstance(before, dict) else None
    return kept if isinstance(kept, str) else None
