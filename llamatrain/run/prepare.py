"""Prepares a run: does everything that can fail before anything is written."""

import os
import secrets
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from llamatrain.adapters import peft as peft_files
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.config.common import DeviceName
from llamatrain.config.options import COUNT
from llamatrain.config.toml import config_text
from llamatrain.config.units import Size
from llamatrain.contrastive.settings import POOLING_TYPES, Contrastive, pooling_key
from llamatrain.data.batches import row_lengths
from llamatrain.data.find_files import find_data
from llamatrain.data.options import RERANK
from llamatrain.data.rerank import find_verdicts
from llamatrain.data.sine import Sine
from llamatrain.distributed.comm import get_comm
from llamatrain.engine.device import resolve_device
from llamatrain.engine.profiler import phase
from llamatrain.errors import FileError, MemoryPlanError, UsageError
from llamatrain.gguf.reader import Gguf
from llamatrain.gguf.values import u32
from llamatrain.grpo.batches import answer_lengths
from llamatrain.model import hyperparameters
from llamatrain.model.distill import Teacher
from llamatrain.model.rerank_head import check_head
from llamatrain.planner.limits import check_resident
from llamatrain.platform.escape import make_printable
from llamatrain.report.loggers import check_installed as check_loggers
from llamatrain.rewards.scorer import Scorer
from llamatrain.run.choose_trainable import choose_trainable
from llamatrain.run.config import RunConfig, transient_options
from llamatrain.run.dataset import (
    TrainingData,
    check_first_rows,
    first_group_size,
    load_data,
    load_prompts,
    make_sine,
)
from llamatrain.run.extra_outputs import may_write
from llamatrain.run.fit_memory import DataShape, FittedRun, fit_memory
from llamatrain.run.hooks import NO_HOOKS, RunHooks
from llamatrain.run.inputs import RunInputs, open_inputs
from llamatrain.run.model import NEW_MODEL, RunModel, check_teacher_vocab, make_model
from llamatrain.run.request import RunRequest
from llamatrain.run.resolve import ResolvedConfig, divisors, resolve, resolve_precision
from llamatrain.run.restore import check_weights
from llamatrain.run.resume import ResumePoint, apply_resume, check_inputs, find_checkpoint
from llamatrain.run.sampling import Sampler, make_sampler
from llamatrain.run.trainable import Trainable
from llamatrain.train.programs import TrainPrograms

MPI_BYTES = 20 * 10**6  # bytes that each process takes for MPI
GROUP_TOKENS = 4096  # most tokens of a micro-batch of groups: more of them are not faster
SMALL_BATCH = 1024  # tokens; products of fewer run below full speed
TOKEN_BYTES = 500  # bytes of a token in a vocabulary: its text, merges, and the tables to find them


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that is ready to start."""

    resolved: ResolvedConfig
    fitted: FittedRun
    config: RunConfig  # the config that is stored: of the options and the plan
    inputs: RunInputs
    model: RunModel
    data: TrainingData
    trainable: Trainable
    sampler: Sampler
    notes: tuple[str, ...]
    hooks: RunHooks

    def compile_ahead(self, programs: TrainPrograms) -> None:
        """Compile the programs that are needed after the first step."""
        self.sampler.compile(self.fitted.weights, programs.memory)
        self.compile_validation(programs)

    def compile_validation(self, programs: TrainPrograms) -> None:
        """Compile the validation program."""
        if self.data.validation or self.data.retained:
            programs.eval_program(self.resolved.row_length)


def start_request(request: RunRequest) -> tuple[RunConfig, RunInputs, list[str]]:
    """Return the final config of a run, its opened inputs, and notes about resuming it."""
    config, folder_options = request.config, request.folder_options
    resume_point = find_checkpoint(folder_options, config.command)
    notes = [*request.notes, *(resume_point.notes if resume_point else ())]
    if resume_point:
        request.hooks.check_resume(resume_point)
        named_config = config.make_absolute()
        config, more_notes = apply_resume(config, resume_point, request.given, request.changed)
        notes += more_notes
        if resume_point.has_options:
            check_inputs(config, named_config, resume_point, folder_options)
    if config.train.device == "auto":
        found = cast(DeviceName, resolve_device("auto"))
        config = replace(config, train=replace(config.train, device=found))
        notes.append(f"--device auto: {config.train.device}")
    if config.train.seed < 0:
        config = replace(
            config, train=replace(config.train, seed=get_comm().broadcast(secrets.randbelow(COUNT)))
        )
        notes.append(f"--seed -1: drew {config.train.seed}")
    config = config.make_absolute(
        "" if resume_point or not folder_options.checkpoint_in else str(folder_options.checkpoint_in)
    )
    return config, open_inputs(config, resume_point), notes


def prepare(
    config: RunConfig,
    inputs: RunInputs,
    peft: Path | None,
    notes: list[str],
    changed: Collection[str],
    hooks: RunHooks = NO_HOOKS,
) -> PreparedRun:
    """Open the data, resolve the options and fit the run into memory."""
    with get_comm().raise_on_all():
        check(config)
    with phase("tokenizer"):
        model = with_pooling(make_model(config, inputs, changed), config, inputs.base)
        check_judge(model, config, inputs.base)
    teacher = teacher_for(config, model, inputs)
    # before the data is read: broken adapters show at once
    trainable = choose_trainable(config, model, inputs, peft)
    check_resident(config.train.memory, config.train.processor)
    with phase("data"):
        if settings := config.grpo_settings:
            data = load_prompts(config.files, model, config.data, config.train.seed, settings)
        else:
            kind = config.preference.data_kind
            data = load_data(config.files, model, config.data, config.train.seed, kind, hooks.rows)
    if data.packed:  # store the default that was chosen, so that a resumed run packs too
        config = replace(config, data=replace(config.data, pack=True))
    config = cut_groups(config, data.texts_per_row * model.row_length)
    resolved = resolve(config, model.h.embd, model.row_length, data.rows.count, base=inputs.base)
    contrastive = contrastive_settings(config, model, data.texts_per_row)
    data.rows.end = config.train.epochs or 0
    sampler = build_sampler(resolved, model, data.rows if isinstance(data.rows, Sine) else None)
    shape = DataShape(
        lengths=data.rows.lengths,
        has_untrained_tokens=data.rows.has_untrained_tokens
        or any(rows.has_untrained_tokens for rows in data.scored),
        has_validation=bool(data.scored),
        decoder_positions=sampler.positions,
        decoder_slots=sampler.slots,
        answer_positions=model.row_length if data.prompts else 0,
        is_resume=inputs.is_resume,
        teacher=teacher,
        contrastive=contrastive,
    )
    with phase("planning"):
        fitted = fit_memory(resolved, trainable, shape)
    if inputs.resume_point:
        check_weights(inputs.resume_point, fitted.weights.trainable)
    if fitted.error:
        raise MemoryPlanError(fitted.error, code="out-of-memory")
    return PreparedRun(
        resolved=resolved,
        fitted=fitted,
        config=resolved.stored_config(str(fitted.plan.policy), fitted.plan.splits, fitted.cache),
        inputs=inputs,
        model=model,
        data=data,
        trainable=trainable,
        sampler=sampler,
        notes=(*notes, *hooks.notes, *describe_surprises(resolved, fitted, inputs, model, trainable)),
        hooks=hooks,
    )


def check(config: RunConfig) -> None:
    """Check what can be checked at once."""
    check_resident(config.train.memory, config.train.processor)
    check_loggers(config.run.log)
    if config.rewards.reward and get_comm().rank == 0:
        with Scorer(config.rewards) as scorer:
            scorer.start()
    if config.files and not config.preference.is_grpo:  # all prompts are read before anything is compiled
        check_first_rows(config.files, config.data, config.preference.data_kind)


def teacher_for(config: RunConfig, model: RunModel, inputs: RunInputs) -> Teacher | None:
    """Return the teacher of the run, or None."""
    if inputs.teacher is None:
        return None
    check_teacher_vocab(model, inputs.teacher)
    bf16 = resolve_precision(config.train) == "bf16"
    return Teacher(hyperparameters.read_hyperparameters(inputs.teacher), config.train.teacher_weight, bf16)


def contrastive_settings(config: RunConfig, model: RunModel, texts: int) -> Contrastive | None:
    """Return the settings of contrastive training with some texts in a row, or None."""
    if not config.preference.is_contrastive:
        return None
    rows = config.train.batch * config.train.grad_acc
    return config.contrastive.settings(model.h, model.metadata, texts, rows)


def cut_groups(config: RunConfig, row_tokens: int) -> RunConfig:
    """Cut batches of groups, whose rows have room for some tokens, into micro-batches of up to GROUP_TOKENS.

    The loss compares all rows of a step, so it stays the same. Rows of smaller micro-batches have less padding.
    """
    train = config.train
    if not config.preference.is_contrastive:
        return config
    fitting = (parts for parts in divisors(train.batch) if train.batch // parts * row_tokens <= GROUP_TOKENS)
    parts = min(fitting, default=train.batch)
    return replace(config, train=replace(train, batch=train.batch // parts, grad_acc=train.grad_acc * parts))


def check_judge(model: RunModel, config: RunConfig, base: Gguf | None) -> None:
    """Raise if a model cannot be asked whether texts answer queries, as --objective rerank needs."""
    if config.preference.objective != RERANK or model.tokenizer is None:
        return
    verdicts = find_verdicts(model.tokenizer)
    if base:
        check_head(base, model.h, verdicts)


def with_pooling(model: RunModel, config: RunConfig, base: Gguf | None) -> RunModel:
    """Return a model for embeddings whose file will state its pooling."""
    if not config.preference.is_contrastive:
        return model
    if config.run.sample_every and not model.h.architecture.causal:
        raise UsageError(
            "--sample-every has no effect on a model that predicts no text; leave it out",
            code="unused-option",
        )
    if behind := [name for name in (base.tensors if base else ()) if name.startswith("dense_")]:
        raise UsageError(
            f"{base and base.path}: embeddings are multiplied with {behind[0]}, which contrastive training does not "
            "do; use a file without such matrices",
            code="unsupported-model",
        )
    pooling = config.contrastive.choose_pooling(model.h, model.metadata)
    number = next(number for number, name in POOLING_TYPES.items() if name == pooling)
    return replace(model, metadata=model.metadata | {pooling_key(model.h): u32(number)})


def build_sampler(resolved: ResolvedConfig, model: RunModel, sine: Sine | None) -> Sampler:
    """Return the sampler of a run."""
    run, train = resolved.config.run, resolved.config.train
    return make_sampler(
        model,
        sine,
        run.sample_prompt if run.sample_every else None,
        train.seed,
        resolved.threads,
        train.processor,
    )


def describe_surprises(
    resolved: ResolvedConfig, fitted: FittedRun, inputs: RunInputs, model: RunModel, trainable: Trainable
) -> Iterator[str]:
    """Yield notes about what the user may not expect of the run."""
    config, tune = resolved.config, resolved.config.tune
    if inputs.resume_point and inputs.step >= resolved.iters:
        yield f"all {resolved.iters} steps are done; raise --iters to train further"
    if resolved.optimizer.needs_f32 and resolved.precision == "bf16":
        yield (
            f"--optimizer {config.train.optimizer} stops early in bf16, where losses are rounded; "
            "--precision f32 trains further"
        )
    if fitted.plan.splits > 1:
        yield f"each batch is split into {fitted.plan.splits} micro-batches to fit the memory"
    if (
        resolved.forced_splits > 1
        and config.train.batch * model.row_length < SMALL_BATCH
        and resolved.ranks < (groups := config.train.grad_groups or 1)
    ):
        fewer = 1 << (resolved.ranks - 1).bit_length()
        yield (
            f"each batch is split into {resolved.forced_splits} micro-batches for {groups} gradient "
            f"groups; --grad-groups {fewer} is faster, with slightly different results"
        )
    if model.row_length > model.h.ctx:
        yield f"rows have {model.row_length} tokens, but the model was made for {model.h.ctx}"
    if fitted.cache == "off" and fitted.plan.breakdown.packed_copies:
        copy_size = Size(fitted.plan.breakdown.packed_copies).text
        yield f"some quantized weights are unpacked once, which takes {copy_size}"
    if trainable.kind == "train_model" and inputs.base and not inputs.resume_point:
        kinds = {inputs.base.tensors[name].type.name for name in model.h.shapes} - {"F32"}
        if kinds:
            written = "" if config.train.quant_aware else " and written"
            yield f"all weights are trained{written} in F32 ({', '.join(sorted(kinds))} ones are unpacked)"
    if contrastive := fitted.plan.spec.contrastive:
        pooling = contrastive.pooling
        yield f"embeddings are pooled by {pooling}; serve them with llama-server --embeddings --pooling {pooling}"
    changes_rope = (tune.rope_freq_base, tune.rope_freq_scale, tune.norm_rms_eps) != (None, None, None)
    if changes_rope and config.command == "finetune" and not tune.full:
        yield "the adapter fits the base with this rope and epsilon only; run it with the same values"


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A plan of a run that is not started."""

    fitted: FittedRun
    config: RunConfig
    batches: int  # per step
    steps: int | None  # still to run; None with --epochs, since the text has not been read


def unlearned_vocab_bytes(model: RunModel, inputs: RunInputs) -> int:
    """Return the memory that a vocabulary will take that is not learned yet."""
    return 0 if inputs.base or not model.tokenizer else TOKEN_BYTES * (model.h.vocab - len(model.tokenizer))


def plan_run(request: RunRequest, graphs: bool = True, ranks: int = 0) -> PlannedRun:
    """Plan a run on a number of ranks, without reading its text or writing anything."""
    with request.naming_sources():
        config, inputs, _ = start_request(request)
        check_resident(config.train.memory, config.train.processor)
        files_named = [file for file in config.files if file != "-"]
        found_files = find_data(files_named, raw=config.data.raw) if files_named else None
        plain = all(source.kind == "text" for source in (found_files.sources if found_files else ()))
        whole = plain and not config.data.pattern and not config.preference.is_grpo
        model = with_pooling(make_model(config, inputs, request.changed, read=False), config, inputs.base)
        texts = first_group_size(files_named, config.data) if config.preference.is_contrastive else 0
        sine = None if config.files else make_sine(model, 0)
        config = cut_groups(config, texts * model.row_length)
        resolved = resolve(config, model.h.embd, model.row_length, lambda epochs: epochs, ranks, inputs.base)
        sampler = build_sampler(resolved, model, sine)
        shape = DataShape(
            lengths=answer_lengths(model.row_length, config.data)
            if config.preference.is_grpo
            else row_lengths(model.row_length, config.data, whole, plain, config.preference.data_kind, texts),
            has_untrained_tokens=not whole,
            has_validation=bool(
                config.data.val
                or config.data.val_split
                or config.data.retain_data
                or (found_files and found_files.validation)
            ),
            decoder_positions=sampler.positions,
            decoder_slots=sampler.slots,
            answer_positions=model.row_length if config.preference.is_grpo else 0,
            is_resume=inputs.is_resume,
            teacher=teacher_for(config, model, inputs),
            contrastive=contrastive_settings(config, model, texts),
            later_bytes=unlearned_vocab_bytes(model, inputs)
            + (MPI_BYTES if ranks > 1 and get_comm().size == 1 else 0),
            may_extrapolate=not graphs,
        )
        refuse = config.train.memory is not None  # otherwise the plan is shown with a warning
        fitted = fit_memory(resolved, choose_trainable(config, model, inputs, None), shape, refuse)
        steps = None if config.train.epochs is not None else max(0, resolved.iters - inputs.step)
        return PlannedRun(fitted=fitted, config=config, batches=resolved.config.train.grad_acc, steps=steps)


# ---- files -----------------------------------------------------------------


def input_files(config: RunConfig, inputs: RunInputs, config_file: Path | None) -> Iterator[Path]:
    """Yield all files that a run reads."""
    yield from (path for path in (config.model.vocab_from, config.train.teacher, config_file) if path)
    yield from (
        path
        for path in (inputs.base and inputs.base.path, inputs.resume_point and inputs.resume_point.path)
        if path
    )
    for adapter in config.adapters:
        yield from adapter.iterdir() if adapter.is_dir() else (adapter,)
    for names in (config.files, config.data.val, config.data.retain_data):
        found_files = find_data(names, raw=config.data.raw) if names else None
        yield from (
            source.path for source in ((*found_files.sources, *found_files.validation) if found_files else ())
        )


def format_config(config: RunConfig) -> str:
    """Return the text of config.toml, which starts the same run again."""
    is_new = config.command == "from-scratch"
    omit = {
        *config.unused,
        *(NEW_MODEL if is_new and config.base else ()),
        *(name for _, name, _ in transient_options()),
    }
    first = f" --checkpoint-in {shlex.quote(config.base)}" if is_new and config.base else ""
    head = f"llamatrain {config.command}{first} --config FILE"
    return config_text(
        make_printable(head, "utf-8"),
        config.files,
        list(config.parts.values()),
        omit,
        base="" if is_new else config.base,
    )


def resolve_peft_folder(
    config: RunConfig, inputs: RunInputs, folder: RunFolder, request: RunRequest
) -> tuple[RunConfig, Path | None, list[str]]:
    """Check the folder for the PEFT adapter, and return the config, the folder and notes.

    The folder replaces no input, and nothing that the user did not ask for. A folder that belongs to another
    run stays with that run. A folder that only a checkpoint names is used only if this user wrote the
    checkpoint and the folder lies inside the run's own.
    """
    path, folder_options = config.tune.peft, request.folder_options
    is_other_folder = inputs.folder is not None and folder.path != inputs.folder
    if path is None or (is_other_folder and "peft" not in request.given):
        return replace(config, tune=replace(config.tune, peft=None)), None, []
    real, is_override = os.path.realpath(path), "peft" in request.overrides
    if "peft" not in request.given and not may_write(path, folder.path, inputs.resume_point):
        if inputs.resume_point and inputs.resume_point.is_own:
            peft_files.remove_partial(path)
        else:
            config = replace(config, tune=replace(config.tune, peft=None))
        return (
            config,
            None,
            [
                f"the adapter is not written to {path}, since only the checkpoint names it; add --peft "
                f"{path} to write it"
            ],
        )
    peft_files.remove_partial(path)
    for read in config.adapters:
        if os.path.realpath(read) == real:
            raise UsageError(
                f"--peft {path} would replace the input {read}; choose another name", code="replaces-input"
            )
    peft_files.check_writable(path)
    stored = stored_peft(inputs.resume_point)
    is_own = not is_other_folder and stored is not None and os.path.realpath(stored) == real
    if peft_files.has_adapter(path) and not is_own and not (folder_options.overwrite and is_override):
        replaced = (
            ""
            if folder_options.resume
            else ", or add --overwrite to replace it"
            if is_override
            else f", or add --overwrite --peft {path} to replace it"
        )
        raise FileError(
            f"{path} already holds an adapter; choose another --peft{replaced}", code="output-exists"
        )
    return config, path, []


def stored_peft(resume_point: ResumePoint | None) -> str | None:
    """Return the PEFT folder of the run that is resumed."""
    tune = resume_point.checkpoint.options.get("tune") if resume_point else None
    folder = tune.get("peft") if isinstance(tune, dict) else None
    return folder if isinstance(folder, str) else None
