"""What runs of deep models take, found out with fewer layers.

A layer more adds the same nodes and the same lives to each graph, so with some depth all grows by the same bytes for each. Some
depths show by how many; where they do not, all layers are planned.
"""

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from fractions import Fraction
from typing import TypeVar

from llamatrain.graph.remat_policy import scale_policy
from llamatrain.graph.tensor import Tensor
from llamatrain.model.architecture import split_block_number
from llamatrain.model.lora import Delta, Weights
from llamatrain.planner.memory import (
    NODE_BYTES,
    NODES_PER_LAYER,
    MemoryBreakdown,
    MemoryDemand,
    MemoryPlan,
    plan_memory,
    split_batch,
)
from llamatrain.train.graphs import Policy, StepGraphs, StepSpec

DEPTHS = (16, 32, 64)  # layers that are planned instead
SPAN = DEPTHS[-1] - DEPTHS[0]
UNEVEN = 400  # a part of all that a layer takes, by which its share of the arena may differ
GAPS = (
    1 << 16
)  # bytes, besides a thousandth, by which an arena may come to more: values do not always fit tightly
PARTS = 4  # of the layers, so many of which are made again
V = TypeVar("V")


def extrapolate_plan(setting: StepSpec, policy: Policy, demand: MemoryDemand, splits: int = 1) -> MemoryPlan:
    """As `way_with`, but that graphs are not built where that is not needed, and that a number counts parts of the layers."""
    needs = _carried_on(setting, policy, demand, splits) if layers_are_alike(setting) else None
    policy, own = whole(policy, setting.h.layers), split_batch(setting, splits)
    if needs is None:
        return plan_memory(setting, policy, demand, splits)
    return MemoryPlan(
        spec=own,
        policy=policy,
        splits=splits,
        graphs=StepGraphs(own, policy),
        arena=needs.arena,
        breakdown=needs,
    )


def whole(policy: Policy, layers: int) -> Policy:
    return scale_policy(policy, PARTS, layers)


def _carried_on(
    setting: StepSpec, policy: Policy, demand: MemoryDemand, splits: int
) -> MemoryBreakdown | None:
    """Where all but the arena grows evenly, and that as far as it matters."""
    found = list[dict[str, int]]()
    for n in DEPTHS:
        with pause_gc():
            found.append(
                asdict(plan_memory(with_layers(setting, n), whole(policy, n), demand, splits).breakdown)
            )
    lines = {name: line_through([each[name] for each in found]) for name in found[0]}
    much = sum(slope for slope, _ in lines.values()) / UNEVEN
    if any(off / SPAN > (much if name == "arena" else 0) for name, (_, off) in lines.items()):
        return None
    # what shrinks lies beside gradients that grow: there comes a depth where these alone count
    left = setting.h.layers - DEPTHS[-1]
    more = {
        name: math.ceil(max(Fraction(0), slope + off / SPAN) * left + off)
        for name, (slope, off) in lines.items()
    }
    if whole(policy, setting.h.layers) != policy and setting.h.layers % PARTS:
        more["interpreter"] += NODES_PER_LAYER * NODE_BYTES  # of a layer that is made again beyond the part
    arena = found[-1]["arena"] + more["arena"]
    return MemoryBreakdown(
        **{
            **{name: value + more[name] for name, value in found[-1].items()},
            "arena": arena + GAPS + arena // 1000,
        }
    )


def line_through(values: Sequence[int]) -> tuple[Fraction, Fraction]:
    """By how much they grow with a layer from the first depth to the last, and how far they are apart around that line."""
    slope = Fraction(values[-1] - values[0], SPAN)
    off = [
        value - values[0] - slope * (depth - DEPTHS[0]) for value, depth in zip(values, DEPTHS, strict=True)
    ]
    return slope, max(off) - min(off)


@contextmanager
def pause_gc() -> Iterator[None]:
    """Graphs that are built are not looked through again and again for what could be freed of them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ---- layers ----------------------------------------------------------------


def with_layers(spec: StepSpec, layers: int) -> StepSpec:
    """With the first layers alone."""
    weights = spec.weights
    first_weights = Weights(
        in_first_layers(weights, layers), in_first_layers(weights.deltas, layers), weights.dropout
    )
    return replace(
        spec,
        h=replace(spec.h, layers=layers),
        weights=first_weights,
        trainable=in_first_layers(spec.trainable, layers),
    )


def in_first_layers(values: Mapping[str, V], layers: int) -> dict[str, V]:
    """What belongs to the first layers, or to none."""
    return {name: value for name, value in values.items() if int(split_block_number(name)[1] or 0) < layers}


def layers_are_alike(spec: StepSpec) -> bool:
    """Whether each layer has weights and adapters like those of the first, and as many of them are trained."""
    facts: list[set[object]] = [set() for _ in range(spec.h.layers)]
    for kind, values in (
        ("weights", spec.weights),
        ("trained", spec.trainable),
        ("deltas", spec.weights.deltas),
    ):
        for name, value in values.items():
            pattern, number = split_block_number(name)
            if number is not None:
                facts[int(number)].add((kind, pattern, _facts(value)))
    return all(value == facts[0] for value in facts)


def _facts(value: Tensor | Sequence[Delta]) -> object:
    if isinstance(value, Tensor):
        return value.shape, value.dtype.name, value.role
    return tuple((delta.a.shape, delta.b.shape, delta.dropout) for delta in value)
