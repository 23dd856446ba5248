"""How fast this machine does what training is made of: small models are trained for a moment, and each op is timed.

An op takes so long for each call, each operation and each byte; that is fitted to what was timed, and kept for a day.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from llamatrain.engine.program import Program
from llamatrain.engine.recorder import Recorder, recording
from llamatrain.graph.tensor import F32, DType, Node, Tensor, leaves_of, nodes_of, parameter, state
from llamatrain.graph.work import work_of
from llamatrain.machine.cachefolder import wanted
from llamatrain.machine.code import cache_key
from llamatrain.machine.kept import Shelf, name_of, sealed
from llamatrain.machine.units import cores, processor
from llamatrain.model.architectures import USUAL, find
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Delta, Weights
from llamatrain.model.rope import Rope
from llamatrain.model.transformer import parameters
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.recipe.tempo import least_squares
from llamatrain.train.graphs import Graph, RunGraphs, Setting

DAY = 86400.0  # seconds that a measurement serves
MOMENT = 0.25  # seconds that a model is trained again and again
LONG = 1.0  # of once: then that will do
RANK = 8
SIZES = ((512, 8, 1536, 8192, 256, 1), (256, 8, 768, 16384, 64, 1), (32, 4, 96, 64, 32, 4))  # embd, heads, ff, vocab, row, rows
BLOCK = 256  # weights that some types hold together: no row of theirs is shorter
ANY = ""  # in the place of an op's name: one that moves memory

Cost = tuple[float, float, float]  # seconds of a call, of an operation, of a byte


class OpSeen(NamedTuple):
    name: str
    flops: int
    moved: int
    seconds: float


@dataclass(frozen=True)
class Speeds:
    costs: Mapping[str, Cost]
    when: float  # they were measured: seconds since 1970

    def of(self, node: Node) -> float:
        if node.op.layout or not any(output.size for output in node.outputs):
            return 0.0
        work = work_of(node)
        call, flop, byte = self.costs.get(node.op.name) or self.costs[ANY]
        return call + flop * work.flops + byte * work.moved

    def of_graph(self, graph: Graph) -> float:
        """The seconds that all of it takes."""
        return sum(map(self.of, nodes_of(graph.outputs)))

    def of_bytes(self, moved: int) -> float:
        return self.costs[ANY][2] * moved


def speeds_for(setting: Setting) -> Speeds:
    """Of a model of its kind: those that were measured within a day, or now."""
    base = frozen_type(setting)
    how = (setting.precision, setting.threads, setting.kernels, base.name if base else "")
    facts = repr((processor().name, cores(), cache_key(), *how, SIZES))
    shelf, name = Shelf(wanted("speeds")), name_of(f"speeds-{setting.precision}-{setting.threads}", facts)
    if kept := shelf.take(name, facts):
        with suppress(ValueError, TypeError):
            found = Speeds(**json.loads(bytes(kept)))
            if 0 <= time.time() - found.when < DAY:
                return found
    made = measured(setting, base)
    shelf.put(name, sealed(facts, json.dumps(asdict(made)).encode()))
    return made


def frozen_type(setting: Setting) -> DType | None:
    """Of most of what is not trained, if anything is not."""
    sizes: dict[DType, int] = {}
    for name, tensor in setting.weights.items():
        if name not in setting.trained and len(tensor.shape) > 1:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size
    return max(sizes, key=lambda each: sizes[each], default=None)


# ---- measuring -------------------------------------------------------------


def measured(setting: Setting, base: DType | None) -> Speeds:
    models = [small(setting, base, size) for size in SIZES if base is None or size[0] >= BLOCK]
    seen = [each for model in models for each in timed(model)]
    return Speeds(fitted(seen), time.time())


def fitted(seen: Iterable[OpSeen]) -> dict[str, Cost]:
    groups: dict[str, list[OpSeen]] = {}
    for each in seen:
        groups.setdefault(each.name, []).append(each)
        if not each.flops:
            groups.setdefault(ANY, []).append(each)
    return {name: cost_of(group) for name, group in groups.items()}


def cost_of(group: Sequence[OpSeen]) -> Cost:
    columns: list[list[float]] = [[1.0] * len(group), [each.flops for each in group], [each.moved for each in group]]
    call, flop, byte = least_squares(columns, [each.seconds for each in group])
    return float(call), float(flop), float(byte)


def small(setting: Setting, base: DType | None, size: Sequence[int]) -> Setting:
    """A model of one layer, which is computed as another one."""
    embd, heads, ff, vocab, length, batch = size
    h = Hyperparameters(
        vocab=vocab,
        embd=embd,
        layers=1,
        heads=heads,
        kv_heads=heads,
        ff=ff,
        ctx=length,
        head_size=embd // heads,
        rope=Rope(embd // heads),
        architecture=find(USUAL),
    )
    weights = adapted(h, base) if base else parameters(h)
    factors = [factor for deltas in weights.deltas.values() for delta in deltas for factor in (delta.a, delta.b)]
    return Setting(
        h=h,
        weights=weights,
        trained={each.name: each for each in (factors if base else weights.tensors.values())},
        batch=batch,
        positions=length,
        precision=setting.precision,
        threads=setting.threads,
        kernels=setting.kernels,
        optimizer=AdamW(),
    )


def adapted(h: Hyperparameters, base: DType) -> Weights:
    tensors, deltas = {}, {}
    for name, shape in h.shapes.items():
        tensors[name] = state(name, shape, base if len(shape) > 1 else F32)
        if len(shape) > 1 and name.startswith("blk."):
            a, b = parameter(f"{name}.lora_a", (RANK, shape[1])), parameter(f"{name}.lora_b", (shape[0], RANK))
            deltas[name] = [Delta(a, b, 1.0)]
    return Weights(tensors, deltas)


def timed(setting: Setting) -> Iterator[OpSeen]:
    """Over zeros, which take as long as anything else: each op's least seconds, as others may be at work here."""
    graphs, length = RunGraphs(setting), setting.positions
    made = [graphs.gradients(length, True), graphs.gradients(length, False), graphs.update(length)]
    with recording(recorder := Recorder()):
        programs = [Program(graphs.plan(graph), zeros_of(graph), setting.backend) for graph in made]
    for program in programs:
        program.ready()
    runs = list[list[float]]()
    start = time.perf_counter()
    while len(runs) < 3 or time.perf_counter() - start < MOMENT:
        before = [op.seconds for op in recorder.ops]
        for program in programs:
            program()
        recorder.step(len(runs), 0.0)
        runs.append([op.seconds - gone for op, gone in zip(recorder.ops, before, strict=True)])
        if time.perf_counter() - start > LONG:
            break
    for op, seconds in zip(recorder.ops, np.min(runs, axis=0), strict=True):
        yield OpSeen(op.node.op.name, op.work.flops, op.work.moved, max(float(seconds), 1e-9))


def zeros_of(graph: Graph) -> dict[Tensor, np.ndarray]:
    """For weights that are not trained, which are held as their type has it."""
    return {
        each: np.zeros(each.dtype.held(each.shape), each.dtype.numpy) for each in leaves_of(graph.outputs) if each.role == "state"
    }
