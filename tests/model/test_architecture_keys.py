"""Keys that a file has not, or has otherwise than most, and weights that not all have: taken as llama.cpp takes them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamatrain.errors import FileError
from llamatrain.gguf.reader import open_gguf
from llamatrain.model.hyperparameters import unused_tensors
from llamatrain.run.choose_trainable import read_untrained
from llamatrain.sample.decoder import Decoder
from tests.helpers.architecture_family import CTX
from tests.helpers.architecture_models import Arrays, keys, prompt, shape_of, weights, written
from tests.helpers.architectures import FAMILIES
from tests.helpers.llama_cpp import served
from tests.helpers.small_models import loaded
from tests.interop.test_architectures_llama_cpp import letters, likeliest, said

IDS = prompt()
WINDOW = "attention.sliding_window"
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
CASES: dict[str, tuple[str, list[str], dict[str, int | float | str]]] = {
    "no heads of keys": (
        "qwen3",
        ["attention.head_count_kv"],
        {"attention.head_count": 2, "attention.head_count_kv": 2},
    ),
    "qwen2: no base": ("qwen2", ["rope.freq_base"], {}),
    "qwen3: no base": ("qwen3", ["rope.freq_base"], {}),
    "gemma2: no window": ("gemma2", [WINDOW], {}),
    "gemma2: no caps": ("gemma2", ["attn_logit_softcapping", "final_logit_softcapping"], {}),
    "gemma2: no sizes of heads": ("gemma2", ["attention.key_length", "attention.value_length"], {}),
    "gemma2: another base": ("gemma2", [], {"rope.freq_base": 500.0}),
    "gemma2: another base near": ("gemma2", [], {"rope.freq_base_swa": 500.0}),
    "gemma2: another pattern": ("gemma2", [], {f"{WINDOW}_pattern": 3}),
    "gemma2: linear": ("gemma2", [], {"rope.scaling.factor": 2.0}),
    "gemma3: no window": ("gemma3", [WINDOW], {}),
    "gemma3: a window of 0": ("gemma3", [WINDOW], {WINDOW: 0}),
    "gemma3: no base": ("gemma3", ["rope.freq_base"], {}),
    "gemma3: another base near": ("gemma3", [], {"rope.freq_base_swa": 500.0}),
    "gemma3: another pattern": ("gemma3", [], {f"{WINDOW}_pattern": 3}),
    "gemma3: linear": ("gemma3", [], {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
    "gemma3: longer": ("gemma3", [], {"rope.scaling.attn_factor": 1.3}),
    "gemma3: a cap": ("gemma3", [], {"final_logit_softcapping": 3.0}),
    "gemma3: a cap that it has not": ("gemma3", [], {"attn_logit_softcapping": 1.0}),
    "gemma4: no base near": ("gemma4", ["rope.freq_base_swa"], {}),
    "gemma4: no heads of keys": ("gemma4", ["attention.head_count_kv"], {"attention.head_count_kv": 2}),
    "gemma4: windows in part": ("gemma4", [], {"rope.dimension_count_swa": 8}),
    "gemma4: linear": ("gemma4", [], {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
    "phi3: a window, which is not used": ("phi3", [WINDOW], {WINDOW: 8}),
    "phi3: no length": ("phi3", ["rope.scaling.attn_factor"], {}),
    "granite: no scale of scores": ("granite", ["attention.scale"], {}),
    "granite: scales of 0": (
        "granite",
        [],
        {"attention.scale": 0.0, "residual_scale": 0.0, "embedding_scale": 0.0},
    ),
    "granite: no scales": ("granite", ["attention.scale", "residual_scale", "embedding_scale"], {}),
    "llama: scales that it has not": (
        "llama",
        [],
        {"attention.scale": 0.4, "logit_scale": 3.0, "embedding_scale": 3.0},
    ),
    "olmo2: windows": ("olmo2", [], {WINDOW: 9, f"{WINDOW}_pattern": 2}),
    "cohere2: another pattern": ("cohere2", [], {f"{WINDOW}_pattern": 3}),
    "minicpm: no scales": ("minicpm", ["embedding_scale", "residual_scale"], {}),
    "minicpm: a scale of scores, which it has not": ("minicpm", [], {"attention.scale": 0.4}),
    "apertus: a scale for all blocks": (
        "apertus",
        [],
        {"xielu.alpha_p": 0.3, "xielu.alpha_n": -0.4, "xielu.beta": 0.6, "xielu.eps": -1e-6},
    ),
    "exaone4: a window, which is not used": ("exaone4", [], {WINDOW: 9}),
    "mistral3: no temperature": ("mistral3", ["attention.temperature_scale"], {}),
    "mistral3: no multiplier": ("mistral3", ["rope.scaling.yarn_log_multiplier"], {}),
    "mistral3: another multiplier": ("mistral3", [], {"rope.scaling.yarn_log_multiplier": 0.6}),
    "mistral3: no turns": (
        "mistral3",
        ["rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"],
        {},
    ),
    "mistral3: other turns": (
        "mistral3",
        [],
        {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 0.5},
    ),
    "mistral3: no scaling": (
        "mistral3",
        ["rope.scaling.type", "rope.scaling.factor", "attention.temperature_scale"],
        {},
    ),
    "bailingmoe2: no width of the shared experts": ("bailingmoe2", ["expert_shared_feed_forward_length"], {}),
    "bailingmoe2: a width of 0": ("bailingmoe2", [], {"expert_shared_feed_forward_length": 0}),
    "bailingmoe2: softmax": ("bailingmoe2", [], {"expert_gating_func": 1}),
    "bailingmoe2: no factor of shares": ("bailingmoe2", ["expert_weights_scale"], {}),
    "bailingmoe2: shares as they are": ("bailingmoe2", ["expert_weights_norm"], {}),
    "bailingmoe2: no groups": ("bailingmoe2", ["expert_group_count", "expert_group_used_count"], {}),
    "bailingmoe2: whole heads turn": ("bailingmoe2", ["rope.dimension_count"], {}),
    "smallthinker: no windows": ("smallthinker", ["attention.sliding_window"], {}),
    "smallthinker: another window": ("smallthinker", [], {"attention.sliding_window": 3}),
    "smallthinker: softmax": ("smallthinker", [], {"expert_gating_func": 1}),
    "hunyuan-dense: a scaling of none": ("hunyuan-dense", [], {"rope.scaling.type": "none"}),
    **{f"{arch}: yarn": (arch, [], YARN) for arch in ("qwen2", "qwen3", "granite", "olmo2", "smollm3")},
}


def alike(path: Path, limit: float) -> None:
    h, arrays = loaded(open_gguf(path))
    with served(path) as server:
        follow, expected = letters(server, IDS, 4)
    found = said(Decoder(h, arrays, ctx=CTX), IDS, follow)
    assert np.abs(found - expected).max() <= limit and likeliest(found) == follow


def near(arch: str) -> float:
    return 5e-3 if FAMILIES[arch].half_float_gelu else 1e-4


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", CASES)
def test_keys(name: str, tmp_path: Path) -> None:
    arch, less, more = CASES[name]
    shape = shape_of(arch, "a")
    if "attention.head_count" in more:
        shape, more = replace(shape, heads=2, kv_heads=2), {}
    known = {key: value for key, value in keys(shape).items() if key not in less} | more
    alike(written(tmp_path / "m.gguf", shape, weights(shape), known), near(arch))


@pytest.mark.llama_cpp
def test_windows_of_the_larger_exaone4(tmp_path: Path) -> None:
    """It is known by its number of blocks; blocks without a window do not turn heads."""
    shape = replace(shape_of("exaone4", "a"), layers=64)
    known = keys(shape) | {WINDOW: 9}
    alike(written(tmp_path / "m.gguf", shape, weights(shape), known), 1e-3)


@pytest.mark.llama_cpp
def test_windows_of_four_blocks_of_smallthinker(tmp_path: Path) -> None:
    shape = replace(shape_of("smallthinker", "a"), layers=4)
    alike(written(tmp_path / "m.gguf", shape, weights(shape)), 1e-4)


def test_windows_of_smallthinker(tmp_path: Path) -> None:
    """llama.cpp takes any window to be 4096 wide."""
    shape = shape_of("smallthinker", "a")

    def seen(window: int) -> list[tuple[int, int | None]]:
        known = keys(shape) | {"attention.sliding_window": window}
        h, _ = loaded(open_gguf(written(tmp_path / "m.gguf", shape, weights(shape), known)))
        return [
            (h.attention_mask(layer).window, h.architecture.rope_index(h, layer))
            for layer in range(shape.layers)
        ]

    assert seen(0) == [(0, 0)] * 5
    assert seen(3) == seen(4096) == [(0, None), (4096, 0), (4096, 0), (4096, 0), (0, None)]


@pytest.mark.llama_cpp
@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma2", 26), ("gemma3", 62)])
def test_models_whose_scores_are_scaled_by_their_width(arch: str, layers: int, tmp_path: Path) -> None:
    """The largest of both, which are known by their number of blocks alone."""
    shape = replace(shape_of(arch, "b"), layers=layers)
    alike(written(tmp_path / "m.gguf", shape, weights(shape)), 2e-2)


@pytest.mark.llama_cpp
def test_weights_tell_the_variant_of_stablelm(tmp_path: Path) -> None:
    """Not the key for it, which converters also write for models whose configuration has none."""
    shape = shape_of("stablelm", "a")
    arrays, other = weights(shape), keys(shape) | {"use_parallel_residual": True}
    alike(written(tmp_path / "in-turn.gguf", shape, arrays, other), near("stablelm"))
    side_by_side = {name: array for name, array in arrays.items() if "ffn_norm" not in name}
    alike(written(tmp_path / "side-by-side.gguf", shape, side_by_side), near("stablelm"))


def with_biases(arch: str, kinds: str) -> Arrays:
    shape = shape_of(arch, "a")
    arrays, random = weights(shape), np.random.default_rng(5)
    for name in [name for name in arrays if name.startswith("blk.") and name.split(".")[2] in kinds.split()]:
        arrays[name.replace("weight", "bias")] = random.standard_normal(len(arrays[name]), np.float32)
    return arrays


BIASED = "attn_q attn_k attn_v"


@pytest.mark.llama_cpp
@pytest.mark.parametrize(
    ("arch", "kinds"),
    [
        ("llama", BIASED),
        ("llama", f"{BIASED} attn_output ffn_gate ffn_up ffn_down"),
        ("granite", f"{BIASED} attn_output ffn_gate ffn_up ffn_down"),
        ("qwen3", BIASED),
        ("olmo2", BIASED),
        ("gemma3", BIASED),
        ("smollm3", BIASED),
        ("arcee", BIASED),
        ("nemotron", BIASED),
        ("nemotron", "attn_output ffn_up ffn_down"),
        ("command-r", BIASED),
        ("minicpm", BIASED),
        ("apertus", f"{BIASED} attn_output"),
        ("exaone", BIASED),
        ("ernie4_5", BIASED),
        ("hunyuan-dense", BIASED),
        ("internlm2", BIASED),
        ("mistral3", f"{BIASED} attn_output ffn_gate ffn_up ffn_down"),
    ],
)
def test_biases(arch: str, kinds: str, tmp_path: Path) -> None:
    alike(written(tmp_path / "m.gguf", shape_of(arch, "a"), with_biases(arch, kinds)), near(arch))


LACKING = {
    "granite": "logit_scale",
    "llama": "attention.layer_norm_rms_epsilon",
    "qwen3": "feed_forward_length",
    "gemma3": "attention.head_count",
    "gemma3n": "activation_sparsity_scale",
    "gemma4": "attention.sliding_window_pattern",
    "cohere2": "attention.sliding_window",
    "command-r": "logit_scale",
    "minicpm": "logit_scale",
    "bailingmoe2": "expert_shared_count",
}


@pytest.mark.parametrize(("arch", "key"), [each for each in LACKING.items() if each[0] != "llama"])
def test_keys_that_must_be(arch: str, key: str, tmp_path: Path) -> None:
    shape = shape_of(arch, "a")
    known = {name: value for name, value in keys(shape).items() if name != key}
    with pytest.raises(FileError, match=rf"{arch}\.{key}"):
        loaded(open_gguf(written(tmp_path / "m.gguf", shape, weights(shape), known)))


WRONG: dict[str, tuple[str, dict[str, int | float | str], str]] = {
    "own heads in qwen2": (
        "qwen2",
        {"attention.key_length": 10, "attention.value_length": 10},
        "attention.key_length",
    ),
    "turned in another part near": ("gemma3", {"rope.dimension_count_swa": 6}, "rope.dimension_count_swa"),
    "turned in part in qwen3": ("qwen3", {"rope.dimension_count": 6}, "rope.dimension_count"),
    "turned in part in smollm3": ("smollm3", {"rope.dimension_count": 6}, "rope.dimension_count"),
    "a logit scale of 0": ("granite", {"logit_scale": 0.0}, "logit_scale"),
    "no number as a scale": ("granite", {"residual_scale": float("nan")}, "residual_scale"),
    "no number as a cap": ("gemma2", {"attn_logit_softcapping": float("inf")}, "attn_logit_softcapping"),
    "too few of xielu": ("apertus", {"xielu.beta": [0.5]}, "must be 3 numbers"),  # type: ignore[dict-item]
    "no number of xielu": ("apertus", {"xielu.beta": [0.5, float("inf"), 0.5]}, "finite"),  # type: ignore[dict-item]
    "a limit in olmo": ("olmo", {"attention.clamp_kqv": 8.0}, "clamp_kqv"),
    "sections in glm4": ("glm4", {"rope.dimension_sections": [2, 2, 2, 0]}, "vision-language"),  # type: ignore[dict-item]
    "a fourth section": ("qwen2vl", {"rope.dimension_sections": [2, 2, 2, 1]}, "fourth section"),  # type: ignore[dict-item]
    "too few sections": ("qwen3vl", {"rope.dimension_sections": [2, 2]}, "must be 4 numbers"),  # type: ignore[dict-item]
    "experts": ("qwen3", {"expert_count": 8}, "mixture of experts"),
    "experts in gemma4": ("gemma4", {"expert_count": 128}, "must be 1 to the 128 experts"),
    "nothing left to share": (
        "gemma4",
        {"attention.shared_kv_layers": 5},
        "shared_kv_layers must leave a block",
    ),
    "more shared than blocks": (
        "gemma4",
        {"attention.shared_kv_layers": 8},
        "shared_kv_layers must leave a block",
    ),
    "no list of windows": ("gemma4", {f"{WINDOW}_pattern": 3}, "sliding_window_pattern must be of type bool"),
    "too many elements near": (
        "gemma4",
        {"rope.dimension_count_swa": 14},
        "dimension_count_swa must be even and",
    ),
    "other streams": ("gemma3n", {"altup.num_inputs": 2}, "another number of streams is not supported"),
    "a sparsity of one block": (
        "gemma3n",
        {"activation_sparsity_scale": [1.6]},
        "activation_sparsity_scale must have",
    ),
    "no number as a sparsity": (
        "gemma3n",
        {"activation_sparsity_scale": [float("nan")] * 25},
        "activation_sparsity_scale must have",
    ),
    "an odd size near": (
        "gemma4",
        {"attention.key_length_swa": 9, "attention.value_length_swa": 9},
        "dimension_count_swa must be even and at most",
    ),
    "other values near": ("gemma4", {"attention.value_length_swa": 14}, "value_length_swa is 14 and"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    arch, more, told = WRONG[name]
    shape = shape_of(arch, "a")
    path = written(tmp_path / "m.gguf", shape, weights(shape), keys(shape) | more)
    with pytest.raises(FileError, match=told) as failure:
        loaded(open_gguf(path))
    assert str(failure.value).startswith(str(path)) and "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("arch", "tied"), [("gemma2", False), ("olmo2", True)], ids=["an output in gemma2", "none in olmo2"]
)
def test_outputs_that_cannot_be(arch: str, tied: bool, tmp_path: Path) -> None:
    """llama.cpp would not open these."""
    shape = replace(shape_of(arch, "a"), tied=tied)
    with pytest.raises(FileError, match=r"output\.weight"):
        loaded(open_gguf(written(tmp_path / "m.gguf", shape, weights(shape))))


@pytest.mark.llama_cpp
def test_keys_and_values_that_a_block_does_not_need(tmp_path: Path) -> None:
    """Converters keep those of a checkpoint; nothing reads them, and full training keeps them."""
    shape = shape_of("gemma4", "a")
    arrays = weights(shape)
    more = {f"blk.4.attn_{each}.weight": np.ones((24, 48), np.float32) for each in "kv"}
    path = written(
        tmp_path / "m.gguf", shape, arrays | more | {"blk.4.attn_k_norm.weight": np.ones(12, np.float32)}
    )
    h, found = loaded(open_gguf(path))
    kept = [*more, "blk.4.attn_k_norm.weight"]
    assert found.keys() == arrays.keys() and unused_tensors(open_gguf(path), h) == kept
    assert {*kept} <= read_untrained(open_gguf(path), h, 1).keys()
    alike(path, near("gemma4"))
