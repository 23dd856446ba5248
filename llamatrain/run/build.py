"""Builds the parts of a prepared run: programs with their memory filled, the loop, and the rows it reads."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np

from llamatrain.compiler.thread_pool import compile_together_with
from llamatrain.distributed.comm import get_comm
from llamatrain.engine.device import Memory
from llamatrain.engine.profiler import phase
from llamatrain.report.report import Report
from llamatrain.rewards.scorer import Scorer
from llamatrain.run.input_watch import InputWatcher
from llamatrain.run.prepare import PreparedRun
from llamatrain.run.profiling import with_profile
from llamatrain.run.rank_roles import CheckpointSink, NullListener
from llamatrain.run.restore import initial_state, load_weights
from llamatrain.run.rollouts import AnswerSource, check_signals
from llamatrain.run.signals import Interrupts
from llamatrain.sample.batch import BatchDecoder
from llamatrain.sample.options import SamplingOptions
from llamatrain.train.config import StopReason
from llamatrain.train.loop import Loop
from llamatrain.train.parallel.batch_shard import BatchShard
from llamatrain.train.parallel.programs import ShardedPrograms
from llamatrain.train.prefetch import Prefetcher, prefetch_count
from llamatrain.train.programs import TrainPrograms
from llamatrain.train.protocols import Batches, SkippableLoader


def run_loop(
    loop: Loop,
    rows: SkippableLoader,
    sink: CheckpointSink,
    compile_ahead: Callable[[], None],
    on_start: Callable[[], None] = lambda: None,
) -> StopReason:
    """Train from the first save to the last, reading rows ahead and compiling later programs meanwhile."""
    with prefetch_rows(loop, rows) as loop.loader, compile_together_with(compile_ahead):
        loop.last_checkpoint = sink.begin(loop.state)
        on_start()
        return loop.train()


def build_programs(prepared: PreparedRun) -> TrainPrograms:
    """Build the programs of a run, and load their weights from the checkpoint, the base or random numbers."""
    plan = prepared.fitted.plan
    trainable = prepared.trainable
    resume_point = prepared.inputs.resume_point
    with phase("weights"):
        frozen = upload_frozen(prepared)
        if plan.spec.groups > 1:
            batches = prepared.resolved.loop_config(plan.splits).microbatches
            programs: TrainPrograms = ShardedPrograms(
                plan.graphs, plan.arena, frozen, trainable.encode_weight, comm=get_comm(), batches=batches
            )
        else:
            programs = TrainPrograms(plan.graphs, plan.arena, frozen, trainable.encode_weight)
        if resume_point:
            load_weights(resume_point.checkpoint, programs.weights.parts)
        else:
            trainable.init_weights(programs.weights.parts)
        programs.weights.push()
        programs.round_weights()
    get_comm().assert_equal_on_all(
        {"first weights": zlib.crc32(programs.weights.vector.data) if get_comm().size > 1 else 0}
    )
    return programs


def build_loop(
    prepared: PreparedRun, programs: TrainPrograms, listener: Report | NullListener, interrupts: Interrupts
) -> Loop:
    """Build the loop of a new or resumed run. The caller sets `save`, `save_best` and `sample`."""
    data, hooks = prepared.data, prepared.hooks
    loop_config = prepared.resolved.loop_config(prepared.fitted.plan.splits)
    if hooks.schedule:
        loop_config = replace(loop_config, schedule=hooks.schedule)
    minimizer = prepared.resolved.optimizer.create_minimizer(programs.weights.vector)
    inputs, reads_base = prepared.inputs, prepared.fitted.plan.spec.device.is_host
    arrays = list(prepared.fitted.weights.frozen.values()) if reads_base else []
    if inputs.base and prepared.fitted.weights.reference and prepared.fitted.weights.rounded:
        arrays += [tensor.raw for tensor in inputs.base.tensors.values()]  # rounded again in each step
    return Loop(
        programs=programs,
        loader=data.rows,
        validation=data.validation,
        retained=data.retained,
        config=loop_config,
        listener=with_profile(listener),
        save=lambda state, last: "",
        save_best=lambda state: None,
        sample=lambda step: None,
        state=initial_state(prepared, programs, minimizer, loop_config, listener),
        signals=interrupts,
        input_guard=InputWatcher(
            inputs=inputs.watched_files, warn=listener.warn, frozen=arrays, base_is_same=inputs.is_same_base
        ),
        minimizer=minimizer,
        epoch_samples=data.samples,
        comm=get_comm(),
        wants_stop=lambda: hooks.wants_stop,
        pause=hooks.pause,
    )


@contextmanager
def open_answers(
    prepared: PreparedRun, programs: TrainPrograms, signals: Interrupts, warn: Callable[[str], None]
) -> Iterator[AnswerSource | None]:
    """Open the source of generated answers, if the run trains such, and end its rewards afterwards."""
    config, settings, prompts = prepared.config, prepared.config.grpo_settings, prepared.data.prompts
    if settings is None or prompts is None:
        yield None
        return
    tokenizer, leaves, options = prepared.model.tokenizer, prepared.fitted.weights, config.grpo
    assert tokenizer

    def create_decoder() -> BatchDecoder:
        return BatchDecoder(
            prepared.model.h,
            programs.memory,
            ctx=prepared.model.row_length,
            slots=programs.spec.batch,
            threads=prepared.resolved.threads,
            kernels=config.train.processor,
            weights=leaves.read_weights,
            drop_base=leaves.drop_base,
        )

    with Scorer(config.rewards, warn, partial(check_signals, get_comm(), signals)) as scorer:
        yield AnswerSource(
            settings=settings,
            sampling=SamplingOptions(
                n=options.max_completion_length,
                temp=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                min_p=options.min_p,
                repeat_last_n=0,
                seed=config.train.seed,
            ),
            seed=config.train.seed,
            microbatches=prepared.resolved.loop_config(prepared.fitted.plan.splits).microbatches,
            prompts=prompts,
            tokenizer=tokenizer,
            programs=programs,
            create_decoder=create_decoder,
            scorer=scorer,
            comm=get_comm(),
            signals=signals,
        )


def upload_frozen(prepared: PreparedRun) -> dict[str, Memory]:
    """Load the frozen weights of the base and of the teacher to the device."""
    weights, device = prepared.fitted.weights, prepared.fitted.plan.spec.device
    loaded = weights.frozen | load_teacher(prepared)
    weights.frozen.update({name: device.upload(array) for name, array in loaded.items()})
    prepared.trainable.load_copies(weights, device.upload)
    return weights.frozen


def load_teacher(prepared: PreparedRun) -> dict[str, np.ndarray]:
    """Load the arrays of the teacher, or none without a teacher."""
    teacher, gguf = prepared.fitted.plan.spec.teacher, prepared.inputs.teacher
    return teacher.load(gguf, prepared.resolved.threads) if teacher and gguf else {}


def prefetch_rows(loop: Loop, rows: SkippableLoader) -> AbstractContextManager[Batches]:
    """Return the batches of this rank, read ahead by a thread unless every step uses the same rows."""
    loop_config, steps = loop.config, loop.config.iters - loop.state.counters.step
    own_batches = loop.programs.local_microbatches(loop_config.microbatches)
    own_rows: Batches = (
        rows
        if len(own_batches) == loop_config.microbatches
        else BatchShard(rows, loop_config.microbatches, own_batches)
    )
    if loop.minimizer and not loop_config.iters_per_rows:
        return nullcontext(own_rows)
    return Prefetcher(
        own_rows, loop.programs.spec.batch, prefetch_count(len(own_batches)), max(0, steps) * len(own_batches)
    )
