"""Qwen 3 Next."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.helpers.architecture_family import BROAD, EXPERTS, GROUPED, OWN, Numbers, Row, join_stacks, three
from tests.helpers.architectures import qwen35, qwen35moe


@dataclass(frozen=True, kw_only=True)
class NextShape(qwen35moe.MixedShape):
    """The sizes of a model."""

    joined: bool = False  # queries, keys, values and gates have one weight, as in older files

    @property
    def projected(self) -> int:
        return self.channels + self.values

    @property
    def two_numbers(self) -> int:
        return 2 * self.value_heads


PROJECTIONS, QUERIES, GATES = "linear_attn.in_proj_qkvz.weight", "attn_qkv.weight", "attn_gate.weight"
JOINED = [("ssm_in.weight", PROJECTIONS, "projected embd")]
SPLIT = [(QUERIES, f"{PROJECTIONS}#0", "channels embd"), (GATES, f"{PROJECTIONS}#1", "values embd")]
NUMBERS = ("ssm_ba.weight", "linear_attn.in_proj_ba.weight", "two_numbers embd")
REST = qwen35.DELTA_NET[4:]


def rows(shape: Any, layer: int) -> Sequence[Row]:
    """Return the weights of a block."""
    delta_net = [*(JOINED if shape.joined else SPLIT), NUMBERS, *REST]
    mixer = delta_net if qwen35.is_recurrent(shape, layer) else qwen35.ATTENTION
    return [*qwen35.NORMS, *mixer, *join_stacks(shape, EXPERTS), *qwen35moe.SHARED]


def keys(shape: Any) -> Numbers:
    """Return the metadata."""
    found = qwen35moe.keys(shape)
    return {key: value for key, value in found.items() if key != "rope.dimension_sections"}


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration."""
    found = qwen35moe.settings(shape)
    names = ("rope_type", "rope_theta", "partial_rotary_factor")
    return found | {"rope_parameters": {name: found["rope_parameters"][name] for name in names}}


def to_theirs(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a weight."""
    if name.endswith(qwen35moe.GATE):
        return array[None]
    if name.endswith("ssm_a"):
        return np.log(-array)
    return array[:, None] if name.endswith("conv1d.weight") else array


def gradient_to_ours(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Convert a gradient."""
    if name.endswith(qwen35moe.GATE):
        return array[0]
    return array[:, 0] if name.endswith("conv1d.weight") else array


def grouped(shape: Any) -> np.ndarray:
    """Return, for each row of queries, keys, values and gates as a model has them, its place with all in order."""
    keys, values = shape.key_heads * shape.key_size, shape.values
    parts = [np.arange(keys), keys + np.arange(keys)]
    parts += [2 * keys + np.arange(values), 2 * keys + values + np.arange(values)]
    return np.concatenate([part.reshape(shape.key_heads, -1) for part in parts], axis=1).ravel()


def whole_to_theirs(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Put the rows of each key head together."""
    return array[grouped(shape)] if name.endswith(PROJECTIONS) and not shape.joined else array


def whole_to_ours(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Put all queries together, all keys, values and gates."""
    is_split = name.endswith(PROJECTIONS) and not shape.joined
    return array[np.argsort(grouped(shape))] if is_split else array


FAMILY = replace(
    qwen35moe.FAMILY,
    block=rows,
    shapes=three(
        "qwen3next",
        BROAD
        | {"base": 500.0, "eps": 1e-3, "key_size": 16, "value_size": 16, "key_heads": 3, "value_heads": 9}
        | {"taps": 3, "turned": 20, "experts": 9, "experts_used": 4, "expert_ff": 40},
        OWN
        | {"key_heads": 2, "value_heads": 6, "tied": True, "eps": 5e-2, "layers": 3, "period": 3, "turned": 8}
        | {"experts": 7, "experts_used": 6},
        GROUPED
        | {
            "base": 1e6,
            "eps": 3e-3,
            "layers": 4,
            "turned": 6,
            "experts_used": 3,
            "joined_stacks": True,
            "joined": True,
        },
        NextShape,
    ),
    config="Qwen3NextConfig",
    model="Qwen3NextForCausalLM",
    keys=keys,
    settings=settings,
    # two in one module, and those that PEFT takes for experts; `test_a_run_writes_for_peft` has their adapters
    not_in_peft=(QUERIES, GATES, "shexp.weight"),
    to_theirs=to_theirs,
    gradient_to_ours=gradient_to_ours,
    whole_to_theirs=whole_to_theirs,
    whole_to_ours=whole_to_ours,
    input_order=lambda shape, name: None,
    adjust=lambda shape: qwen35.adjust(shape, "qwen3_next"),
)
