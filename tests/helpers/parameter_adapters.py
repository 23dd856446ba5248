"""PEFT's own adapters of plain parameters: stacked experts, whose gate and values share one factor A, and routers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.adapters import peft
from llamatrain.adapters.adapter import LoraPair
from llamatrain.gguf.safetensors import write_safetensors
from tests.helpers.architecture_family import Shape
from tests.helpers.architecture_models import rows
from tests.helpers.architecture_runs import ALPHA, RANK, Pairs
from tests.helpers.architectures import FAMILIES


def joined(shape: Shape, pairs: Pairs) -> Pairs:
    """The pairs of parameters by Hugging Face's names; weights that are parts of one have one factor A."""
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for name, pair in pairs.items():
        parts.setdefault(rows(shape)[name][0].partition("#")[0], []).append(pair)
    for pairs_of_one in parts.values():
        assert all(np.array_equal(a, pairs_of_one[0][0]) for a, _ in pairs_of_one)
    return {name: (each[0][0], join_rows(shape, name, [b for _, b in each])) for name, each in parts.items()}


def join_rows(shape: Shape, theirs: str, factors: list[np.ndarray]) -> np.ndarray:
    """One factor B of several, as the rows of Hugging Face's weight lie."""
    rows = np.concatenate(factors, -2)
    order = FAMILIES[shape.arch].output_order(shape, theirs)
    return rows if order is None else rows[..., order, :]


def share_factors(pairs: Pairs) -> Pairs:
    """The same pairs, but that of the values has the factor A of the gate."""
    return {
        name: (pairs[name.replace("ffn_up_exps", "ffn_gate_exps")][0], b) for name, (_, b) in pairs.items()
    }


def wrappers(held: Any) -> dict[str, Any]:
    """PEFT's modules, by the names of the parameters that they change."""
    return {
        f"{name.removeprefix('base_model.model.').replace('.base_layer', '')}.{module.parameter_name}": module
        for name, module in held.named_modules()
        if type(module).__name__ == "ParamWrapper"
    }


def with_parameters(made: Any, shape: Shape, pairs: Pairs) -> Any:
    """A model with an adapter of parameters that has these factors."""
    torch, library = pytest.importorskip("torch"), pytest.importorskip("peft")
    theirs = joined(shape, pairs)
    config = library.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=[], target_parameters=[*theirs], task_type="CAUSAL_LM"
    )
    held = library.get_peft_model(made, config)
    found = wrappers(held)
    assert found.keys() == theirs.keys()
    for name, (a, b) in theirs.items():
        a, b = to_matrices(a, b)
        for half, array in ((found[name].lora_A, a), (found[name].lora_B, b)):
            assert half["default"].weight.shape == array.shape
            half["default"].weight.data = torch.from_numpy(np.array(array))
    return held


def to_matrices(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return factors as PEFT has them: row e r + k of A and column k E + e of B are rank k of expert e."""
    if a.ndim == 2:
        return a, b
    experts, rank, _ = a.shape
    columns = [b[expert, :, k] for k in range(rank) for expert in range(experts)]
    return np.concatenate([*a]), np.stack(columns, axis=1)


def gradients(held: Any, shape: Shape, pairs: Pairs) -> Pairs:
    """The gradients of PEFT's factors as matrices, by the names of parameters."""
    found = wrappers(held)
    return {
        name: (
            found[name].lora_A["default"].weight.grad.numpy(),
            found[name].lora_B["default"].weight.grad.numpy(),
        )
        for name in joined(shape, pairs)
    }


def write_single_experts(folder: Path, pairs: Mapping[str, LoraPair], **more: Any) -> None:
    """Write pairs of experts as PEFT did when each expert had linear layers."""
    folder.mkdir()
    names = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": [*names.values()]}
    (folder / peft.CONFIG).write_text(json.dumps(config | {"task_type": "CAUSAL_LM"} | more))
    tensors = {
        f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{names[short]}.lora_{half}.weight": factor
        for name, pair in pairs.items()
        for _, layer, short, _ in [name.split(".")]
        for half, stack in (("A", pair.a), ("B", pair.b))
        for expert, factor in enumerate(stack)
    }
    write_safetensors(folder / peft.WEIGHTS, tensors)
