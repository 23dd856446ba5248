"""Folders of all architectures become the files that tests have of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.gguf.reader import Gguf, open_gguf
from llamatrain.gguf.types import type_by_name
from llamatrain.importing.checkpoint import open_checkpoint
from llamatrain.importing.families import FAMILIES as IMPORTED
from llamatrain.importing.write import plan_import, write_import
from llamatrain.model.architectures import supported_names
from llamatrain.model.hyperparameters import read_hyperparameters
from tests.helpers.architecture_models import Arrays, full_key, keys, weights
from tests.helpers.architectures import FAMILIES
from tests.helpers.transformers_folders import config, single_experts, state, write_folder

# keys that the tests' files have, and llama.cpp's converter writes in another way, or not at all
OTHER_KEYS = {
    "deepseek2": ("expert_weights_norm",),
    "deepseek2-lite": ("expert_weights_norm", "expert_gating_func", "attention.q_lora_rank"),
    "gemma-embedding": ("attention.causal", "pooling_type"),
    "gpt-oss": ("feed_forward_length",),
    "granitehybrid": ("context_length",),
    "hunyuan-dense": ("context_length",),
    "hunyuan-moe": ("context_length",),
    "lfm2": ("rope.dimension_count",),
    "lfm2moe": ("rope.dimension_count",),
    "stablelm": ("rope.freq_base",),
}
CASES = [(arch, name) for arch, family in FAMILIES.items() for name in family.shapes]


def import_to(out: Path, folder: Path, kind: str | None = "F32") -> Gguf:
    """Import a folder without its tokenizer, and open the result."""
    target = type_by_name(kind) if kind else None
    plan = plan_import(open_checkpoint(folder), target, lambda folder, arch, size: {})
    write_import(out, plan)
    return open_gguf(out)


def expected_tensors(shape: Any, arrays: Arrays) -> Arrays:
    """Return the tensors of the file that llama.cpp's converter writes."""
    found = arrays | FAMILIES[shape.arch].tensors(shape)
    for name in ("long", "short"):
        if factors := getattr(shape, name):
            found[f"rope_factors_{name}.weight"] = np.array(factors, np.float32)
    return found


def is_alternative(shape: Any) -> bool:
    """Return True if converters wrote the weights of a block in another form earlier."""
    split_gemma = shape.arch == "gemma4moe" and not shape.joined_stacks
    joined = shape.arch != "gemma4moe" and getattr(shape, "joined_stacks", False)
    return split_gemma or joined or getattr(shape, "joined", False)


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_tensors_and_keys_are_those_of_the_file(arch: str, name: str, tmp_path: Path) -> None:
    shape = FAMILIES[arch].shapes[name]
    arrays = weights(shape)
    folder = write_folder(tmp_path / "folder", config(shape), state(shape, arrays))
    gguf = import_to(tmp_path / "model.gguf", folder)
    read_hyperparameters(gguf)
    assert gguf.metadata["general.architecture"] == shape.file_arch
    expected = expected_tensors(shape, arrays)
    if not is_alternative(shape):
        assert gguf.tensors.keys() == expected.keys()
    for each in gguf.tensors.keys() & expected.keys():
        found = gguf.tensors[each].raw.view(np.float32)
        np.testing.assert_allclose(
            found.reshape(expected[each].shape), expected[each], rtol=2e-6, atol=1e-7, err_msg=each
        )
    if not is_alternative(shape):
        compare_keys(gguf, shape)


def compare_keys(gguf: Gguf, shape: Any) -> None:
    """Compare the hyperparameters with those that tests write."""
    others = OTHER_KEYS.get(shape.arch, ())
    expected = {key: value for key, value in keys(shape).items() if key not in others}
    found = {key: gguf.metadata.get(full_key(shape, key)) for key in expected}
    pairs = {key: (rounded(found[key]), rounded(expected[key])) for key in expected}
    assert {key: pair for key, pair in pairs.items() if pair[0] != pair[1]} == {}


def rounded(value: Any) -> Any:
    """Return a value with float32 numbers; equal numbers in all blocks are one."""
    if isinstance(value, str | None):
        return value
    values = {float(f"{number:.5g}") for number in np.atleast_1d(value)}
    return values.pop() if len(values) == 1 else [float(f"{number:.5g}") for number in np.atleast_1d(value)]


def test_every_supported_architecture_can_be_imported() -> None:
    assert {family.architecture for family in IMPORTED.values()} == {*supported_names()}


MIXTURES = [arch for arch, family in FAMILIES.items() if hasattr(family.shapes["a"], "experts")]


@pytest.mark.parametrize("arch", sorted({*MIXTURES} - {"gpt-oss", "gemma4moe"}))
def test_single_experts_become_the_same_stacks(arch: str, tmp_path: Path) -> None:
    shape = FAMILIES[arch].shapes["a"]
    arrays = weights(shape)
    stacked = write_folder(tmp_path / "stacked", config(shape), state(shape, arrays))
    single = write_folder(tmp_path / "single", config(shape), single_experts(shape, arrays))
    first, second = import_to(tmp_path / "a.gguf", stacked), import_to(tmp_path / "b.gguf", single)
    assert first.tensors.keys() == second.tensors.keys()
    assert any("_exps." in name for name in first.tensors)
    for name, tensor in first.tensors.items():
        np.testing.assert_array_equal(tensor.raw, second.tensors[name].raw)


@pytest.mark.parametrize("arch", ["deepseek2", "hunyuan-dense", "hunyuan-moe", "llama"])
def test_an_output_beside_tied_embeddings(arch: str, tmp_path: Path) -> None:
    """Files of some families have no output matrix if the configuration says that it is tied; others keep it."""
    shape = FAMILIES[arch].shapes["a"]
    tensors = state(shape, weights(shape))
    assert "lm_head.weight" in tensors
    folder = write_folder(tmp_path / "folder", config(shape) | {"tie_word_embeddings": True}, tensors)
    gguf = import_to(tmp_path / "model.gguf", folder)
    assert ("output.weight" in gguf.tensors) == (arch == "llama")
    assert read_hyperparameters(gguf).tied == (arch != "llama")


def test_rows_behind_the_vocabulary_of_gemma3(tmp_path: Path) -> None:
    shape = FAMILIES["gemma3"].shapes["a"]
    arrays = weights(shape)
    values = config(shape)
    part = values.get("text_config", values)
    part["vocab_size"] -= 3
    gguf = import_to(tmp_path / "model.gguf", write_folder(tmp_path / "folder", values, state(shape, arrays)))
    found = gguf.tensors["token_embd.weight"].raw.view(np.float32).reshape(-1, shape.embd)
    np.testing.assert_array_equal(found, arrays["token_embd.weight"][:-3])
    assert read_hyperparameters(gguf).vocab == shape.vocab - 3


def test_joined_rows_of_internlm2(tmp_path: Path) -> None:
    shape = FAMILIES["internlm2"].shapes["a"]
    arrays = weights(shape)
    tensors = state(shape, arrays)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        q, k, v = (tensors.pop(f"{prefix}.self_attn.{x}_proj.weight") for x in "qkv")
        groups = [x.reshape(shape.kv_heads, -1, shape.head_size, shape.embd) for x in (q, k, v)]
        tensors[f"{prefix}.attention.wqkv.weight"] = np.concatenate(groups, 1).reshape(-1, shape.embd)
    gguf = import_to(tmp_path / "model.gguf", write_folder(tmp_path / "folder", config(shape), tensors))
    assert gguf.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(gguf.tensors[name].raw.view(np.float32), array)


def test_multipliers_of_falcon_are_part_of_the_weights(tmp_path: Path) -> None:
    shape = FAMILIES["falcon-h1"].shapes["a"]
    arrays = weights(shape)
    values = config(shape) | {
        "key_multiplier": 0.5,
        "attention_in_multiplier": 2.0,
        "ssm_multipliers": [0.5, 0.25, 2.0, 4.0, 8.0],
        "mlp_multipliers": [0.25, 0.125],
    }
    folder = write_folder(tmp_path / "folder", values, state(shape, arrays))
    gguf = import_to(tmp_path / "model.gguf", folder)
    factors = {"attn_q": 2.0, "attn_k": 1.0, "attn_v": 2.0, "ffn_gate": 0.25, "ffn_down": 0.125}
    for name, factor in factors.items():
        whole = f"blk.1.{name}.weight"
        np.testing.assert_array_equal(gguf.tensors[whole].raw.view(np.float32), arrays[whole] * factor)
    ratio = gguf.tensors["blk.0.ssm_in.weight"].raw.view(np.float32) / arrays["blk.0.ssm_in.weight"]
    assert set(np.unique(ratio)) == {0.5, 0.25, 2.0, 4.0, 8.0}
