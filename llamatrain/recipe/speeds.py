"""How fast this machine does what training is made of: small models are trained for a moment, and each op is timed.

An op takes so long for each call, each operation and each byte; that is fitted to what was timed, and kept for a day.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from llamatrain.engine.program import Program
from llamatrain.engine.recorder import Recorder, recording
from llamatrain.graph.tensor import F32, DType, Node, nodes_of, parameter, state
from llamatrain.graph.work import work_of
from llamatrain.machine.cachefolder import wanted
from llamatrain.machine.code import cache_key
from llamatrain.machine.kept import Shelf, name_of, sealed
from llamatrain.machine.units import cores
from llamatrain.model.architectures import USUAL, find
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Delta, Weights
from llamatrain.model.rope import Rope
from llamatrain.model.transformer import parameters
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.train.graphs import Graph, RunGraphs, Setting

DAY = 86400.0  # seconds that a measurement serves
MOMENT, LEAST = 0.3, 2  # seconds that a model is trained again and again, and how often at least
RANK = 8
SIZES = ((512, 8, 1536, 2048, 256, 2), (256, 8, 768, 2048, 32, 2))  # embd, heads, ff, vocab, tokens in a row, rows
ALL = ""  # in the place of an op's name: what moves memory

Cost = tuple[float, float, float]  # seconds of a call, of an operation, of a byte


class Seen(NamedTuple):
    """An op that was timed."""

    name: str
    flops: int
    moved: int
    seconds: float


class Kind(NamedTuple):
    """What decides how fast a model's ops are, beside their sizes."""

    precision: str
    threads: int
    kernels: str
    base: str  # the type of what is not trained; nothing: all is trained


@dataclass(frozen=True)
class Speeds:
    costs: Mapping[str, Cost]
    measured: float  # when, in seconds since 1970

    def seconds(self, nodes: Iterable[Node]) -> float:
        return sum(self.of(node) for node in nodes)

    def of(self, node: Node) -> float:
        if node.op.layout or not any(output.size for output in node.outputs):
            return 0.0
        work = work_of(node)
        call, flop, byte = self.costs.get(node.op.name) or self.costs[ALL]
        return call + flop * work.flops + byte * work.moved

    def of_graph(self, graph: Graph) -> float:
        return self.seconds(nodes_of(graph.outputs))


def least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> np.ndarray:
    """The unknowns, none of them below 0, that come nearest to the values, each of which counts alike however large it is.

    Unknowns are few: each choice of those that are not 0 is tried.
    """
    rows = np.array(columns, np.float64).T / np.array(values, np.float64)[:, None]
    scales = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    best, least = np.zeros(rows.shape[1]), np.inf
    for count in range(1, rows.shape[1] + 1):
        for chosen in combinations(range(rows.shape[1]), count):
            part = rows[:, chosen] / scales[list(chosen)]
            found = np.linalg.lstsq(part, np.ones(len(rows)), rcond=None)[0]
            off = float(np.sum((part @ found - 1) ** 2))
            if (found >= 0).all() and off < least * (1 - 1e-9):
                best, least = np.zeros(rows.shape[1]), off
                best[list(chosen)] = found / scales[list(chosen)]
    return best


# ---- measuring -------------------------------------------------------------


def fitted(seen: Iterable[Seen]) -> dict[str, Cost]:
    groups: dict[str, list[Seen]] = {ALL: []}
    for each in seen:
        groups.setdefault(each.name, []).append(each)
        if not each.flops:
            groups[ALL].append(each)
    return {name: _fitted(group) for name, group in groups.items() if group}


def _fitted(group: Sequence[Seen]) -> Cost:
    columns = [[1.0] * len(group), [each.flops for each in group], [each.moved for each in group]]
    call, flop, byte = least_squares(columns, [each.seconds for each in group])
    return float(call), float(flop), float(byte)


def setting_of(kind: Kind, base: DType | None, size: Sequence[int]) -> Setting:
    """A model of one layer."""
    embd, heads, ff, vocab, length, batch = size
    shape = {"embd": embd, "heads": heads, "kv_heads": heads, "ff": ff, "vocab": vocab, "ctx": length}
    head = embd // heads
    h = Hyperparameters(**shape, layers=1, head_size=head, rope=Rope(head), architecture=find(USUAL))  # type: ignore[arg-type]
    weights = adapted(h, base) if base else parameters(h)
    halves = [half for deltas in weights.deltas.values() for delta in deltas for half in (delta.a, delta.b)]
    trained = {each.name: each for each in (halves if base else weights.tensors.values())}
    return Setting(
        h=h,
        weights=weights,
        trained=trained,
        batch=batch,
        positions=length,
        precision=kind.precision,
        threads=kind.threads,
        kernels=kind.kernels,
        optimizer=AdamW(),
    )


def adapted(h: Hyperparameters, base: DType) -> Weights:
    tensors, deltas = {}, {}
    for name, shape in h.shapes.items():
        tensors[name] = state(name, shape, base if len(shape) > 1 else F32)
        if len(shape) > 1 and name.startswith("blk."):
            a, b = ((RANK, shape[1]), (shape[0], RANK))
            deltas[name] = [Delta(parameter(f"{name}.a", a), parameter(f"{name}.b", b), 1.0)]
    return Weights(tensors, deltas)


def timed(setting: Setting) -> Iterator[Seen]:
    """Over zeros: it takes as long as over anything else."""
    graphs = RunGraphs(setting)
    made = [graphs.gradients(setting.positions, first) for first in (True, False)] + [graphs.update(setting.positions)]
    with recording(recorder := Recorder()):
        programs = [Program(graphs.plan(graph), memory_for(graph), setting.backend) for graph in made]
        for program in programs:
            program.ready()
    best = [float("inf")] * len(recorder.ops)
    end, runs = 0.0, 0
    while runs <= LEAST or time.perf_counter() < end:
        before = [op.seconds for op in recorder.ops]
        for program in programs:
            program()
        recorder.step(runs, 0.0)
        if runs:  # the first wakes threads and fills caches
            best = [min(old, op.seconds - gone) for old, op, gone in zip(best, recorder.ops, before, strict=True)]
        else:
            end = time.perf_counter() + MOMENT
        runs += 1
    for op, seconds in zip(recorder.ops, best, strict=True):
        yield Seen(op.node.op.name, op.work.flops, op.work.moved, max(seconds, 1e-9))


def memory_for(graph: Graph) -> dict:
    from llamatrain.graph.tensor import leaves_of
    return {leaf: np.zeros(leaf.dtype.held(leaf.shape), leaf.dtype.numpy) for leaf in leaves_of(graph.outputs) if leaf.role == "state"}


def measured(kind: Kind, base: DType | None) -> Speeds:
    seen = [each for size in SIZES for each in timed(setting_of(kind, base, size))]
    return Speeds(fitted(seen), time.time())
