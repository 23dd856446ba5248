"""Plans models with very many layers from models with few.

A further layer adds the same nodes with the same lifetimes to each graph, so memory grows linearly with
depth.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

from llamatrain.graph.remat_policy import Policy
from llamatrain.graph.tensor import Tensor
from llamatrain.model.architecture import split_block_number
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Delta, Weights
from llamatrain.planner.memory import MemoryBreakdown, MemoryDemand, MemoryPlan, plan_memory, split_batch
from llamatrain.train.graphs import StepGraphs, StepSpec

DEPTHS = 32, 64  # layers that are planned instead
ARENA_MARGIN = 1 / 500  # an extrapolated arena may turn out larger, because blocks do not always fit tightly
V = TypeVar("V")


def extrapolate_plan(spec: StepSpec, policy: Policy, demand: MemoryDemand, splits: int = 1) -> MemoryPlan:
    """Plan a deep model like `plan_memory`, without building its graphs if its layers are alike."""
    if not layers_are_alike(spec):
        return plan_memory(spec, policy, demand, splits)
    low, high = (
        asdict(plan_memory(with_layers(spec, depth), policy, demand, splits).breakdown) for depth in DEPTHS
    )
    further = (spec.h.layers - DEPTHS[1]) / (DEPTHS[1] - DEPTHS[0])
    sizes = {name: size + math.ceil(further * (size - low[name])) for name, size in high.items()}
    sizes["arena"] += math.ceil(ARENA_MARGIN * sizes["arena"])
    own = split_batch(spec, splits)
    return MemoryPlan(
        spec=own,
        policy=policy,
        splits=splits,
        graphs=StepGraphs(own, policy),
        arena=sizes["arena"],
        breakdown=MemoryBreakdown(**sizes),
        own_memory=demand.own_memory,
    )


def with_layers(spec: StepSpec, layers: int) -> StepSpec:
    """Return the spec of a model that has only the first layers."""
    weights = spec.weights
    return replace(
        spec,
        h=replace(spec.h, layers=layers),
        weights=Weights(
            in_first_layers(weights, layers), in_first_layers(weights.deltas, layers), weights.dropout
        ),
        trainable=in_first_layers(spec.trainable, layers),
        rounded=in_first_layers(spec.rounded, layers),
    )


def in_first_layers(values: Mapping[str, V], layers: int) -> dict[str, V]:
    """Return the values of weights that belong to the first layers, or to no layer."""
    return {name: value for name, value in values.items() if int(split_block_number(name)[1] or 0) < layers}


def layers_are_alike(spec: StepSpec) -> bool:
    """Return True if all layers have the same weights and adapters, and the same ones are trained.

    Other weights must not depend on the number of layers.
    """
    facts: list[set[object]] = [set() for _ in range(spec.h.layers)]
    groups: dict[str, Mapping[str, Tensor | Sequence[Delta]]] = {
        "weights": spec.weights,
        "trainable": spec.trainable,
        "deltas": spec.weights.deltas,
        "rounded": {name: weight.stored for name, weight in spec.rounded.items()},
    }
    for group, values in groups.items():
        for name, value in values.items():
            pattern, number = split_block_number(name)
            if number is not None:
                facts[int(number)].add((group, pattern, _facts(value)))
    if not all(layer == facts[0] for layer in facts):
        return False
    return shapes_outside_layers(spec.h) == shapes_outside_layers(replace(spec.h, layers=1))


def shapes_outside_layers(h: Hyperparameters) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights that belong to no layer."""
    return {name: shape for name, shape in h.shapes.items() if split_block_number(name)[1] is None}


def _facts(value: Tensor | Sequence[Delta]) -> object:
    if isinstance(value, Tensor):
        return value.shape, value.dtype.name, value.role
    return tuple((delta.a.shape, delta.b.shape, delta.dropout) for delta in value)
