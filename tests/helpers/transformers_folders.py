"""Small models as folders of transformers, written without that library: config.json and safetensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from llamatrain.gguf.safetensors import write_safetensors
from tests.helpers.architecture_family import Shape
from tests.helpers.architecture_models import Arrays, rows
from tests.helpers.architecture_torch import settings, split_stack, to_theirs
from tests.helpers.architectures import FAMILIES

# what the classes of transformers add to a configuration, beyond the settings that the tests' models are made with
DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "ernie4_5-moe": {"moe_layer_interval": 1},
    "exaone": {"architectures": ["ExaoneForCausalLM"]},
    "falcon-h1": {"mamba_expand": 2},
    "gemma3n": {"altup_active_idx": 0},
    "internlm2": {"architectures": ["InternLM2ForCausalLM"]},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "phi2": {"model_type": "phi"},
}


def config(shape: Shape) -> dict[str, Any]:
    """Return a configuration."""
    family = FAMILIES[shape.arch]
    text = settings(shape)
    found: dict[str, Any] = {"architectures": [family.model], **text}
    if family.vision is not None:
        found = {"architectures": [family.model], "text_config": text, "vision_config": dict(family.vision)}
    return found | DEFAULTS.get(shape.arch, {}) | more_settings(shape, text)


def more_settings(shape: Any, text: dict[str, Any]) -> dict[str, Any]:
    """Return what the classes of transformers compute."""
    if shape.arch == "granitehybrid":
        return {"mamba_d_head": shape.inner // shape.scan_heads, "mamba_n_groups": 1}
    if shape.arch == "falcon-h1":
        return {"mamba_d_head": shape.inner // shape.scan_heads}
    if shape.arch == "minicpm":
        return {
            "architectures": ["MiniCPMForCausalLM"],
            "scale_emb": shape.embedding_scale,
            "scale_depth": shape.residual_scale * shape.layers**0.5,
            "dim_model_base": shape.embd / shape.logit_scale,
        }
    if shape.arch == "hunyuan-moe":
        counts = {"moe_intermediate_size": shape.ff, "moe_topk": shape.experts_used, "num_shared_expert": 1}
        return {name: [count] * shape.layers for name, count in counts.items()}
    return {}


def state(shape: Shape, arrays: Arrays) -> Arrays:
    """Return the tensors of Hugging Face's model by name, as its library has them in memory."""
    family, found = FAMILIES[shape.arch], Arrays()
    for name, (theirs, _) in rows(shape).items():
        for part, array in split_stack(theirs, to_theirs(shape, name, arrays[name])):
            whole, _, number = part.partition("#")
            if number not in ("", "0"):
                axis = -1 if "bias" in theirs else -min(2, array.ndim)
                array = np.concatenate([found[whole], array], axis)
            found[whole] = array
    modules = {mine: theirs for mine, theirs, _ in family.block_rows(shape, 0)}
    for name, array in family.tensors(shape).items():  # weights that blocks have, but do not use
        if name.startswith("blk."):
            _, number, mine = name.split(".", 2)
            found[f"{family.prefix}layers.{number}.{modules[mine]}"] = array
    found |= {name: np.asarray(array) for name, array in family.their_constants(shape).items()}
    return {name: family.whole_to_theirs(shape, name, array) for name, array in found.items()}


def single_experts(shape: Shape, arrays: Arrays) -> Arrays:
    """Return the tensors of Hugging Face's model with a matrix for each expert instead of stacks, as most checkpoints have them."""
    found, (*inner, down) = Arrays(), FAMILIES[shape.arch].single_experts
    for name, array in state(shape, arrays).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = array
            continue
        stack, _, module = name.rpartition(".")
        for number, each in enumerate(array):
            parts = np.split(each, 2) if module == "gate_up_proj" else [each]
            names = inner if module == "gate_up_proj" else [down]
            for single, part in zip(names, parts, strict=True):
                found[f"{stack}.{number}.{single}.weight"] = part
    return found


def write_folder(folder: Path, values: dict[str, Any], tensors: Arrays) -> Path:
    """Write a folder with one file of weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    write_safetensors(folder / "model.safetensors", contiguous(tensors))
    return folder


def write_shards(folder: Path, tensors: Arrays) -> Path:
    """Write the weights of a folder in two files with an index."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    places = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for file in {*places.values()}:
        part = {name: array for name, array in tensors.items() if places[name] == file}
        write_safetensors(folder / file, contiguous(part))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


def contiguous(tensors: Arrays) -> Arrays:
    """Return arrays whose bytes lie in their order."""
    return {name: np.ascontiguousarray(array, np.float32) for name, array in tensors.items()}
