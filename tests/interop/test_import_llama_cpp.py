"""Imported models are those of llama.cpp's converter: names, types and bytes of all tensors, and all hyperparameters."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.gguf.reader import Gguf, open_gguf
from tests.helpers.architecture_family import WORDS
from tests.helpers.architecture_models import weights
from tests.helpers.architecture_torch import model
from tests.helpers.architectures import FAMILIES
from tests.helpers.llama_cpp_converter import convert_without_tokenizer, needs_converter
from tests.helpers.tokenizer_folders import write_json
from tests.helpers.transformers_folders import config, single_experts, write_folder
from tests.importing.test_architectures import import_to

pytestmark = [pytest.mark.reference, needs_converter]
# keys in which the converter's files do not say what the model is: the shared width of ERNIE and Ling is that of experts
# times their number, and the scores of DeepSeek V3 are sigmoids also where a configuration does not say so
DIFFERENT = {
    "ernie4_5-moe": {"ernie4_5-moe.expert_shared_feed_forward_length"},
    "deepseek2": {"deepseek2.expert_gating_func"},
    "bailingmoe2": {"bailingmoe2.expert_shared_feed_forward_length"},
}


def adapt(arch: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as models on the Hub have it, where the converter does not take that of the library."""
    layers, kinds = values.get("num_hidden_layers", 0), values.get("layer_types", [])
    if arch == "cohere2":
        return values | {"rotary_pct": 1.0}
    if arch in ("qwen35", "qwen35moe", "qwen3next"):
        return values | {"full_attention_interval": kinds.index("full_attention") + 1}
    if arch == "granitehybrid":
        return values | {"layer_types": ["attention" if "full" in kind else "mamba" for kind in kinds]}
    if arch == "exaone":  # an unknown type, so that the converter reads the file itself
        more = {"model_type": "exaone3", "activation_function": "silu"}
        return (
            values
            | more
            | {"architectures": ["ExaoneForCausalLM"], "layer_norm_epsilon": values["rms_norm_eps"]}
        )
    if arch == "hunyuan-dense":
        return values | {"max_position_embeddings": 1 << 15}
    if arch == "hunyuan-moe":  # its assertions hold for heads of 128 only
        rope = values["rope_parameters"] | {"rope_type": "default"}
        counts = {"moe_intermediate_size": values["intermediate_size"], "num_shared_expert": 1}
        counts |= {"moe_topk": values["moe_topk"]}
        lists = {
            name: count if isinstance(count, list) else [count] * layers for name, count in counts.items()
        }
        return values | lists | {"rope_parameters": rope}
    return values


@pytest.fixture(scope="module", params=["f32", "auto", "q8_0"])
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Save all models with transformers, and convert them with llama.cpp's converter."""
    torch = pytest.importorskip("torch")
    root = tmp_path_factory.mktemp(request.param)
    for arch, family in FAMILIES.items():
        made = model(family.shapes["a"], weights(family.shapes["a"]))
        made = made if request.param == "f32" else made.to(torch.bfloat16)
        made.save_pretrained(root / arch)
        path = root / arch / "config.json"
        path.write_text(json.dumps(adapt(arch, json.loads(path.read_text()))))
        vocabulary = {"model": {"vocab": {word: i for i, word in enumerate(WORDS)}}, "added_tokens": []}
        (root / arch / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert not convert_without_tokenizer([root / arch for arch in FAMILIES], request.param)
    return request.param, root


@pytest.mark.parametrize("arch", ["deepseek2", "hunyuan-dense", "hunyuan-moe", "gemma3"])
def test_tensors_that_are_left_out_are_those_of_the_converter(arch: str, tmp_path: Path) -> None:
    """An output matrix beside tied embeddings, and rows behind the vocabulary."""
    shape = FAMILIES[arch].shapes["a"]
    values = adapt(arch, config(shape))
    cut = 3 * (arch == "gemma3")
    values.get("text_config", values)["vocab_size"] -= cut
    values["tie_word_embeddings"] = True
    folder = write_folder(tmp_path / "folder", values, single_experts(shape, weights(shape)))
    words = {word: number for number, word in enumerate(WORDS[: shape.vocab - cut])}
    write_json(folder, tokenizer={"model": {"vocab": words}, "added_tokens": []})
    assert not convert_without_tokenizer([folder], "f32")
    same_tensors(import_to(tmp_path / "model.gguf", folder), open_gguf(folder.with_suffix(".gguf")))


@pytest.mark.parametrize("arch", FAMILIES)
def test_the_file_is_that_of_the_converter(arch: str, converted: tuple[str, Path], tmp_path: Path) -> None:
    kind, root = converted
    imported = import_to(tmp_path / "model.gguf", root / arch, None if kind == "auto" else kind.upper())
    expected = open_gguf(root / f"{arch}.gguf")
    assert hyperparameters(imported, arch) == hyperparameters(expected, arch)
    same_tensors(imported, expected)


def same_tensors(imported: Gguf, expected: Gguf) -> None:
    """Compare names, types, shapes and bytes."""
    assert {name: (tensor.type.name, tensor.shape) for name, tensor in imported.tensors.items()} == {
        name: (tensor.type.name, tensor.shape) for name, tensor in expected.tensors.items()
    }
    for name, tensor in expected.tensors.items():
        np.testing.assert_array_equal(imported.tensors[name].raw, tensor.raw, err_msg=name)


def hyperparameters(gguf: Gguf, arch: str) -> dict[str, tuple[str, bytes]]:
    """Return the kind and the bytes of each key but those of the name, the author and the tokenizer."""
    return {
        key: (value.kind.name, bytes(value.raw))
        for key, value in gguf.metadata.raw_values.items()
        if not key.startswith(("general.", "tokenizer."))
        or key in ("general.architecture", "general.file_type", "general.quantization_version")
        if key not in DIFFERENT.get(arch, ())
    }
