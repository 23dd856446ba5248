"""What a run is assembled of: its programs with their memory filled, its loop, its rows."""

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from llamatrain.compiler.thread_pool import compile_together_with
from llamatrain.distributed.comm import get_comm
from llamatrain.engine.profiler import phase
from llamatrain.report.report import Report
from llamatrain.run.checkpointer import filled
from llamatrain.run.input_watch import InputWatcher
from llamatrain.run.prepare import PreparedRun
from llamatrain.run.profiling import watched
from llamatrain.run.rank_roles import CheckpointSink, NullListener
from llamatrain.run.restore import state_of
from llamatrain.run.signals import Interrupts
from llamatrain.train.config import StopReason
from llamatrain.train.loop import Loop
from llamatrain.train.parallel.batch_shard import BatchShard
from llamatrain.train.parallel.programs import ShardedPrograms
from llamatrain.train.prefetch import Prefetcher, prefetch_count
from llamatrain.train.programs import TrainPrograms
from llamatrain.train.protocols import Batches, SkippableLoader


def trained_in(
    loop: Loop,
    rows: SkippableLoader,
    keeper: CheckpointSink,
    foresee: Callable[[], None],
    begun: Callable[[], None] = lambda: None,
) -> StopReason:
    """From its first save to its last."""
    with reading(loop, rows) as loop.loader, compile_together_with(foresee):
        loop.last_checkpoint = keeper.begin(loop.state)
        begun()
        return loop.train()


def programs_of(prepared: PreparedRun) -> TrainPrograms:
    """Their memory taken and filled, where the run begins or goes on."""
    way, leaves, target, resumed = (
        prepared.plan.plan,
        prepared.plan.weights,
        prepared.trainable,
        prepared.inputs.resumed,
    )
    with phase("weights"):
        target.load_copies(leaves)
        frozen = leaves.frozen | taught(prepared)
        if way.spec.groups > 1:
            batches = prepared.resolved.course(way.splits).grad_acc
            programs: TrainPrograms = ShardedPrograms(
                way.graphs, way.arena, frozen, comm=get_comm(), batches=batches
            )
        else:
            programs = TrainPrograms(way.graphs, way.arena, frozen)
        if resumed:
            filled(resumed.checkpoint, programs.weights.parts)
        else:
            target.init_weights(programs.weights.parts)
    get_comm().assert_equal_on_all(
        {"first weights": zlib.crc32(programs.weights.vector.data) if get_comm().size > 1 else 0}
    )
    return programs


def loop_of(
    prepared: PreparedRun, programs: TrainPrograms, listener: Report | NullListener, interrupts: Interrupts
) -> Loop:
    """Where it begins or goes on; it is still to be said who keeps it."""
    data, course = prepared.data, prepared.resolved.course(prepared.plan.plan.splits)
    descent = prepared.resolved.optimizer.create_minimizer(programs.weights.vector)
    sources, arrays = prepared.inputs, prepared.plan.weights.frozen.values()
    return Loop(
        programs=programs,
        loader=data.rows,
        validation=data.validation,
        config=course,
        listener=watched(listener),
        save=lambda state, last: "",
        save_best=lambda state: None,
        sample=lambda step: None,
        state=state_of(prepared, programs, descent, course, listener),
        signals=interrupts,
        input_guard=InputWatcher(
            inputs=sources.inputs, warn=listener.warn, frozen=arrays, is_same=sources.is_same_base
        ),
        minimizer=descent,
        epoch_samples=data.samples,
        comm=get_comm(),
    )


def taught(prepared: PreparedRun) -> dict[str, np.ndarray]:
    """What the teacher knows."""
    teacher, gguf = prepared.plan.plan.spec.teacher, prepared.inputs.taught_by
    return teacher.load(gguf, prepared.resolved.threads) if teacher and gguf else {}


def reading(loop: Loop, rows: SkippableLoader) -> AbstractContextManager[Batches]:
    """Its rows, read ahead, but for those that are the same in every step; of each step those of this rank."""
    course, steps = loop.config, loop.config.iters - loop.state.counters.step
    own = loop.programs.local_microbatches(course.grad_acc)
    dealt: Batches = rows if len(own) == course.grad_acc else BatchShard(rows, course.grad_acc, own)
    if loop.minimizer and not course.iters_per_rows:
        return nullcontext(dealt)
    return Prefetcher(dealt, loop.programs.spec.batch, prefetch_count(len(own)), max(0, steps) * len(own))
