"""Folders that are incomplete, damaged or made to do harm are refused with one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.errors import LlamatrainError
from llamatrain.gguf.safetensors import write_safetensors
from llamatrain.importing.checkpoint import open_checkpoint
from llamatrain.importing.write import plan_import
from tests.helpers.architecture_models import Arrays, weights
from tests.helpers.architectures import FAMILIES
from tests.helpers.errors import raises
from tests.helpers.transformers_folders import config, single_experts, state, write_folder, write_shards

SHAPE = FAMILIES["llama"].shapes["a"]


@pytest.fixture
def tensors() -> Arrays:
    return state(SHAPE, weights(SHAPE))


@pytest.fixture
def folder(tmp_path: Path, tensors: Arrays) -> Path:
    return write_folder(tmp_path / "folder", config(SHAPE), tensors)


def plan(folder: Path) -> list[str]:
    """Plan an import; return the names of its tensors."""
    planned = plan_import(open_checkpoint(folder), None, lambda folder, arch, size: {})
    return [tensor.info.name for tensor in planned.tensors]


def test_shards_are_read_by_their_index(folder: Path, tensors: Arrays) -> None:
    write_shards(folder, tensors)
    assert open_checkpoint(folder).tensors.keys() == tensors.keys()
    plan(folder)


# ---- the index ------------------------------------------------------------------------


def change_index(folder: Path, tensors: Arrays, change: Callable[[dict[str, Any]], object]) -> None:
    index = write_shards(folder, tensors)
    values = json.loads(index.read_text())
    change(values["weight_map"])
    index.write_text(json.dumps(values))


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\0b", "..\\x"]
)
def test_an_index_names_files_of_the_folder_only(folder: Path, tensors: Arrays, name: str) -> None:
    write_safetensors(folder.parent / "outside.safetensors", tensors)
    change_index(folder, tensors, lambda places: places.update({"model.norm.weight": name}))
    with raises("invalid-index"):
        plan(folder)


def test_a_shard_is_missing(folder: Path, tensors: Arrays) -> None:
    write_shards(folder, tensors)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with raises("missing-file", match="model-00002-of-00002"):
        plan(folder)


def test_shards_without_an_index(folder: Path, tensors: Arrays) -> None:
    write_shards(folder, tensors).unlink()
    with raises("missing-file", match="index"):
        plan(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda places: places.pop("lm_head.weight"),
        lambda places: places.update(more="model-00001-of-00002.safetensors"),
    ],
)
def test_an_index_lists_what_the_files_have(
    folder: Path, tensors: Arrays, change: Callable[[dict[str, Any]], object]
) -> None:
    change_index(folder, tensors, change)
    with raises("invalid-index"):
        plan(folder)


def test_two_files_with_the_same_tensor(folder: Path, tensors: Arrays) -> None:
    write_shards(folder, tensors)
    write_safetensors(folder / "model-00002-of-00002.safetensors", tensors)
    with raises("invalid-index", match="another file"):
        plan(folder)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}']
)
def test_an_index_without_places(folder: Path, tensors: Arrays, text: str) -> None:
    write_shards(folder, tensors).write_text(text)
    with pytest.raises(LlamatrainError):
        plan(folder)


# ---- the configuration ------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"a": 1, "a": 2}', "\xff", "[" * 100000])
def test_a_configuration_that_is_no_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    with raises("invalid-json"):
        plan(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", -1),
        ("num_hidden_layers", "two"),
        ("num_hidden_layers", 1.5),
        ("num_hidden_layers", 10**30),
        ("num_hidden_layers", None),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 4_000_000_000),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("hidden_size", [48]),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", 1e300),
        ("rope_parameters", 3),
        ("rope_parameters", {"rope_theta": "x"}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": -1}),
        ("rope_parameters", {"rope_type": ["yarn"], "factor": {}}),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2}),
        ("max_position_embeddings", {}),
    ],
)
def test_numbers_that_make_no_model(folder: Path, name: str, value: Any) -> None:
    values = config(SHAPE) | {name: value}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(LlamatrainError) as info:
        plan(folder)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("names", [["BertModel"], [], None, "LlamaForCausalLM", [3], [["x"]]])
def test_an_unknown_class_names_what_is_supported(folder: Path, names: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config(SHAPE) | {"architectures": names}))
    with raises("unsupported-architecture", match="llama"):
        plan(folder)


@pytest.mark.parametrize("method", ["fp8", "bitsandbytes", "gptq", "awq", 3])
def test_quantized_checkpoints_are_refused(folder: Path, method: Any) -> None:
    (folder / "config.json").write_text(
        json.dumps(config(SHAPE) | {"quantization_config": {"quant_method": method}})
    )
    with raises("unsupported-checkpoint", match="float16"):
        plan(folder)


# ---- tensors --------------------------------------------------------------------------


def change_tensors(folder: Path, tensors: Arrays) -> None:
    write_safetensors(folder / "model.safetensors", tensors)


def test_a_missing_weight(folder: Path, tensors: Arrays) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]
    change_tensors(folder, tensors)
    with raises("missing-tensor", match="up_proj"):
        plan(folder)


def test_an_unknown_weight(folder: Path, tensors: Arrays) -> None:
    change_tensors(folder, tensors | {"model.layers.1.mlp.extra.weight": np.zeros(3, np.float32)})
    with raises("unknown-tensor", match="extra"):
        plan(folder)


def test_tensors_that_are_no_weights_are_left_out(folder: Path, tensors: Arrays) -> None:
    wanted, nothing = plan(folder), np.zeros(3, np.float32)
    more = ["model.layers.1.self_attn.rotary_emb.inv_freq", "vision_tower.encoder.weight", "model.visual.x"]
    change_tensors(folder, tensors | dict.fromkeys(more, nothing))
    assert plan(folder) == wanted


def test_a_copy_of_tied_embeddings_is_left_out(tmp_path: Path) -> None:
    shape = FAMILIES["gemma2"].shapes["a"]
    tensors = state(shape, weights(shape))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    names = plan(write_folder(tmp_path / "tied", config(shape), tensors))
    assert "token_embd.weight" in names and "output.weight" not in names


def test_the_same_weight_by_two_names(folder: Path, tensors: Arrays) -> None:
    change_tensors(folder, tensors | {"language_model.model.norm.weight": tensors["model.norm.weight"]})
    with raises("duplicate-tensor"):
        plan(folder)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 48), (48, 48, 48), (7,)])
def test_a_weight_of_another_shape(folder: Path, tensors: Arrays, name: str, shape: tuple[int, ...]) -> None:
    change_tensors(folder, tensors | {name: np.zeros(shape, np.float32)})
    with pytest.raises(LlamatrainError) as info:
        plan(folder)
    assert "\n" not in str(info.value)


def test_experts_that_are_not_all_there(tmp_path: Path) -> None:
    shape = FAMILIES["qwen3moe"].shapes["a"]
    tensors = single_experts(shape, weights(shape))
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    folder = write_folder(tmp_path / "mixture", config(shape), tensors)
    with raises("wrong-tensor-shape"):
        plan(folder)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("rope_layout", [1] * 5, "rope_layout"),
        ("sliding_window_layout", [0, 0, 1, 1, 1], "sliding_window_layout"),
        ("sliding_window_layout", [0] * 5, "rope_layout"),
        ("moe_layer_layout", [0, 1, 1, 1, 1], "moe_layer_layout"),
        ("sliding_window_size", 512, "sliding_window_size"),
    ],
)
def test_blocks_that_llama_cpp_would_take_for_others(
    name: str, value: Any, told: str, tmp_path: Path
) -> None:
    """Its SmallThinker has windows of one size in three of four blocks, which alone rotate, or in none."""
    shape = FAMILIES["smallthinker"].shapes["a"]
    tensors = state(shape, weights(shape))
    plan(write_folder(tmp_path / "as it is", config(shape), tensors))
    with raises("invalid-config", match=told):
        plan(write_folder(tmp_path / "changed", config(shape) | {name: value}, tensors))


def test_weights_of_other_types_are_refused(folder: Path, tensors: Arrays) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 3))
    with raises("unsupported-checkpoint", match="I32"):
        plan(folder)


def test_folders_without_files(tmp_path: Path) -> None:
    with raises("missing-folder"):
        plan(tmp_path / "none")
    with raises("missing-file", match=r"config\.json"):
        plan(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config(SHAPE)))
    with raises("missing-file", match=r"model\.safetensors"):
        plan(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with raises("missing-file", match="safetensors"):
        plan(tmp_path)
