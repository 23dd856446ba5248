"""Adapters of PEFT's: read and written without it, and compared with PEFT itself where it is installed."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.adapters import gguf, peft
from llamatrain.adapters.adapter import Adapter, check_fits
from llamatrain.adapters.read import read_adapter
from llamatrain.errors import FileError
from llamatrain.gguf.safetensors import open_safetensors, write_safetensors
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.sample.decoder import Decoder
from tests.helpers.adapter_files import adapter, linear, merged, same
from tests.helpers.small_models import EMBEDDINGS, OUTPUT, Arrays, small, tokens, weights

H = small()
MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KINDS = [*(name.rpartition(".")[2] for name in MODULES), "embed_tokens", "lm_head"]
Q, K = "blk.0.attn_q.weight", "blk.1.attn_k.weight"
PLACE = "base_model.model.model.layers.0.self_attn.q_proj"


def folder(place: Path, config: dict[str, Any] | None = None, tensors: Arrays | None = None) -> Path:
    """An adapter of one module, made by hand."""
    random = np.random.default_rng(1)
    a, b = random.standard_normal((4, 64), np.float32), random.standard_normal((64, 4), np.float32)
    place.mkdir(exist_ok=True)
    write_safetensors(
        place / peft.WEIGHTS, tensors or {f"{PLACE}.lora_A.weight": a, f"{PLACE}.lora_B.weight": b}
    )
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (place / peft.CONFIG).write_text(json.dumps(plain | (config or {})))
    return place


def refused(place: Path, told: str) -> None:
    with pytest.raises(FileError, match=told) as error:
        read_adapter(place, H)
    assert str(error.value).startswith(str(place)) and str(error.value).isprintable()


# ---- what is in the folder -------------------------------------------------


def test_there_and_back(tmp_path: Path) -> None:
    made = adapter(H, [EMBEDDINGS, *linear(H), OUTPUT])
    peft.write_peft(tmp_path / "new" / "p", made, "mine/base", H)
    found = read_adapter(tmp_path / "new" / "p", H)
    assert same(
        found, Adapter(source=Path(), alpha=8, pairs={name: made.pairs[name] for name in found.pairs})
    )
    assert found.pairs.keys() == made.pairs.keys()
    config = json.loads((tmp_path / "new" / "p" / peft.CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["rank_pattern"], config["base_model_name_or_path"]) == (
        4,
        8,
        {},
        "mine/base",
    )
    assert config["target_modules"] == sorted(KINDS)


def test_through_gguf(tmp_path: Path) -> None:
    given = read_adapter(folder(tmp_path / "p"), H)
    gguf.write_adapter(tmp_path / "a.gguf", given)
    peft.write_peft(tmp_path / "q", read_adapter(tmp_path / "a.gguf", H), "", H)
    assert (tmp_path / "p" / peft.WEIGHTS).read_bytes() == (tmp_path / "q" / peft.WEIGHTS).read_bytes()


def test_rows_of_heads(tmp_path: Path) -> None:
    """Hugging Face turns element i of a head with i + 8, GGUF 2 i with 2 i + 1."""
    theirs = (
        open_safetensors(folder(tmp_path / "p") / peft.WEIGHTS)[f"{PLACE}.lora_B.weight"]
        .raw.view("<f4")
        .reshape(64, 4)
    )
    ours = read_adapter(tmp_path / "p", H).pairs[Q].b
    for head in range(4):
        for i in range(8):
            assert np.array_equal(ours[16 * head + 2 * i], theirs[16 * head + i])
            assert np.array_equal(ours[16 * head + 2 * i + 1], theirs[16 * head + 8 + i])


def test_ranks_and_scales(tmp_path: Path) -> None:
    """A rank of its own in the file; another scale than alpha / r in b."""
    pairs = adapter(H, [Q]).pairs | adapter(H, [K], rank=6, scale=0.5).pairs
    peft.write_peft(tmp_path / "p", Adapter(source=Path(), alpha=8, pairs=pairs), "", H)
    config = json.loads((tmp_path / "p" / peft.CONFIG).read_text())
    assert config["rank_pattern"] == {"model.layers.1.self_attn.k_proj": 6}
    assert config["target_modules"] == ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"]
    found = read_adapter(tmp_path / "p", H)
    assert found.pairs[K].scale == 8 / 6 and np.allclose(
        found.delta(K), 0.5 * pairs[K].b @ pairs[K].a, atol=1e-6
    )
    with pytest.raises(FileError, match="no pairs of norms"):
        peft.write_peft(tmp_path / "n", adapter(H, ["output_norm.weight"]), "", H)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"proj": 2}}, 2.0),
        ({"alpha_pattern": {r"^model\.layers.0.self_attn.q_proj$": 2}, "use_rslora": True}, 1.0),
        ({"alpha_pattern": {"k_proj": 5, "q_proj": 2, "self_attn.q_proj": 3}}, 0.5),  # the first that fits
        ({"alpha_pattern": {"^q_proj": 5, "self_attn.q_proj": 3, "q_proj": 2}}, 0.75),
        ({"r": 8, "rank_pattern": {"layers.0.self_attn.q_proj": 4}}, 2.0),
        ({"lora_alpha": 3.5}, 0.875),
        ({"lora_alpha": 0}, 0.0),
        (
            {
                "init_lora_weights": "gaussian",
                "modules_to_save": None,
                "use_dora": False,
                "layer_replication": None,
            },
            2.0,
        ),
    ],
)
def test_configurations(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    found = read_adapter(folder(tmp_path / "p", config), H)
    assert found.pairs[Q].scale == scale and type(found.alpha) is float
    gguf.write_adapter(tmp_path / "a.gguf", found)
    assert np.allclose(read_adapter(tmp_path / "a.gguf", H).delta(Q), found.delta(Q), atol=1e-6)


FITS = {  # what PEFT 0.21 says of model.layers.0.self_attn.q_proj
    "q_proj": True,
    "q_proj$": True,
    "proj": False,
    "_proj": False,
    "^q_proj": False,
    "self_attn.q_proj": True,
    "^self_attn.q_proj$": False,
    r"^model\.layers\.0\.self_attn\.q_proj": True,
    "^model.layers.0.self_attn.q_proj$": True,
    "model.layers.0.self_attn.q_proj": True,
    "base_model.model.model.layers.0.self_attn.q_proj": False,
    r"0\.self_attn\.q_proj": True,
    "1.self_attn.q_proj": False,
    "attn.q_proj": False,
    "self_attn": False,
    "q.proj": True,  # a bare dot is any sign
    r"q\.proj": False,
    "......": True,
    ".q_proj": False,
    "q_proj.": False,
    "layers.0..elf_attn.q_proj": True,
    "^......................q_proj": False,
}


@pytest.mark.parametrize(("pattern", "fits"), FITS.items())
def test_patterns(tmp_path: Path, pattern: str, fits: bool) -> None:
    place = folder(tmp_path / "p", {"alpha_pattern": {pattern: 2}})
    assert read_adapter(place, H).pairs[Q].scale == (0.5 if fits else 2.0)


@pytest.mark.reference
@pytest.mark.parametrize(("pattern", "fits"), FITS.items())
def test_patterns_are_those_of_peft(pattern: str, fits: bool) -> None:
    other = pytest.importorskip("peft.utils.other")
    assert (other.get_pattern_key([pattern], PLACE.removeprefix(peft.PREFIX)) == pattern) == fits


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA .got '\"IA3\"'"),
        ({"use_dora": True}, "use_dora 'true' is not"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out 'true' is not"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save '"),
        ({"bias": "all"}, "trained biases"),
        ({"init_lora_weights": "pissa"}, "a modified base"),
        ({"r": 5}, "the rank of 'model.layers.0.self_attn.q_proj' must be 5 .got 4"),
        ({"rank_pattern": {"q_proj": 3}}, "must be 3 .got 4"),
        ({"r": True}, "r must be .*got 'true'"),
        ({"r": 0}, "r must be .*got '0'"),
        ({"lora_alpha": "8"}, "lora_alpha must be"),
        ({"lora_alpha": -1}, "lora_alpha must be"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern must map"),
        ({"alpha_pattern": {"(q+)+_proj": 2}}, "must contain plain names"),
        ({"alpha_pattern": {"q_proj|k_proj": 2}}, "must contain plain names"),
        ({"alpha_pattern": {"^": 2}}, "must contain plain names"),
        ({"alpha_pattern": {f"q{i}": 2 for i in range(5000)}}, "at most 4096"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern must be .*got 'null'"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "alpha_pattern must be .*got 'NaN'"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern must be .*got '1000"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, config: dict[str, Any], told: str) -> None:
    refused(folder(tmp_path / "p", config), told)


@pytest.mark.parametrize(
    ("named", "told"),
    [
        (f"{PLACE}.lora_magnitude_vector", "is not a factor of an adapter"),
        ("base_model.model.model.norm.weight", "is not a factor of an adapter"),
        ("base_model.model.model.layers.0.mlp.experts.lora_A.weight", "is not a module of llama"),
        ("base_model.model.model.layers.00.mlp.up_proj.lora_A.weight", "is not a module of llama"),
        (
            "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight",
            "has factor a, but factor b is missing",
        ),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, named: str, told: str) -> None:
    one = np.zeros((4, 64), np.float32)
    pair = {f"{PLACE}.lora_A.weight": one, f"{PLACE}.lora_B.weight": one.T.copy()}
    refused(folder(tmp_path / "p", tensors=pair | {named: one}), told)
    copy = {"base_model.model.model.embed_tokens.base_layer.weight": one}
    assert read_adapter(folder(tmp_path / "p", tensors=pair | copy), H).pairs.keys() == {Q}


def test_other_things_in_the_folder(tmp_path: Path) -> None:
    place = folder(tmp_path / "p")
    (place / peft.WEIGHTS).rename(place / peft.PICKLE)
    refused(place, "pickle files can run any code")
    odd = {
        f"{PLACE}.lora_A.weight": np.zeros((4, 64), np.float32),
        f"{PLACE}.lora_B.weight": np.zeros((44, 4), np.float32),
    }
    refused(folder(tmp_path / "o", tensors=odd), "the 44 rows of .* cannot be divided among 4 heads in pairs")
    (place / peft.CONFIG).write_bytes(b" " * (1 << 20) + b"{}")
    refused(place, "the configuration must be at most")


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_floats(tmp_path: Path, dtype: str) -> None:
    value, raw = (0.1, np.float16(0.1).tobytes()) if dtype == "F16" else (0.1, struct.pack("<f", 0.1)[2:])
    place = folder(tmp_path / "p")
    header, at = {}, 0
    for suffix, shape in ((".lora_A.weight", [4, 64]), (".lora_B.weight", [64, 4])):
        header[f"{PLACE}{suffix}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + 512]}
        at += 512
    head = json.dumps(header).encode()
    (place / peft.WEIGHTS).write_bytes(struct.pack("<Q", len(head)) + head + raw * 512)
    assert np.allclose(read_adapter(place, H).pairs[Q].b, value, rtol=4e-3)


# ---- PEFT itself -----------------------------------------------------------


def theirs(h: Hyperparameters) -> Any:
    """The same model in transformers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=h.vocab,
        hidden_size=h.embd,
        intermediate_size=h.ff,
        num_hidden_layers=h.layers,
        num_attention_heads=h.heads,
        num_key_value_heads=h.kv_heads,
        head_dim=h.head_size,
        rms_norm_eps=h.rms_eps,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    state = {
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": OUTPUT,
        "model.embed_tokens.weight": EMBEDDINGS,
    }
    for i in range(h.layers):
        state |= {
            f"model.layers.{i}.{theirs}.weight": f"blk.{i}.{ours}.weight" for theirs, ours in MODULES.items()
        }
        state[f"model.layers.{i}.input_layernorm.weight"] = f"blk.{i}.attn_norm.weight"
        state[f"model.layers.{i}.post_attention_layernorm.weight"] = f"blk.{i}.ffn_norm.weight"
    arrays = weights(h)
    for theirs_name, name in state.items():
        heads = peft.permuted_heads(name, h)
        state[theirs_name] = torch.from_numpy(peft.split_rows(arrays[name], heads) if heads else arrays[name])
    model.load_state_dict(state)
    return model


def their_logits(model: Any, ids: list[int]) -> np.ndarray:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def our_logits(arrays: Arrays, ids: list[int]) -> np.ndarray:
    decoder = Decoder(H, arrays, ctx=64)
    return np.array([decoder.feed([token]).copy() for token in ids])


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", [[EMBEDDINGS, *linear(H), OUTPUT], [Q, K]], ids=["all", "two"])
def test_peft_loads_what_is_written(tmp_path: Path, names: list[str]) -> None:
    library = pytest.importorskip("peft")
    pairs = adapter(H, names).pairs | adapter(H, [K], rank=6, scale=0.5).pairs
    made = Adapter(source=Path(), alpha=8, pairs=pairs)
    peft.write_peft(tmp_path / "p", made, "", H)
    model = library.PeftModel.from_pretrained(theirs(H), os.fspath(tmp_path / "p"))
    there = library.get_peft_model_state_dict(model)
    assert {name.replace(".base_layer", "") for name in there if "lora" not in name} <= {
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.lm_head.weight",
    }
    assert sum("lora" in name for name in there) == 2 * len(pairs)
    ids = tokens(40)
    expected, base = their_logits(model, ids), our_logits(weights(H), ids)
    found = our_logits(merged(weights(H), [made]), ids)
    assert np.abs(found - expected).max() < 1e-3 < 0.5 < np.abs(found - base).max()


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "more", [{}, {"use_rslora": True, "rank_pattern": {"k_proj": 3}, "alpha_pattern": {"1.mlp.up_proj": 5}}]
)
def test_what_peft_writes_is_read(tmp_path: Path, more: dict[str, Any]) -> None:
    library, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    config = library.LoraConfig(r=4, lora_alpha=6, target_modules=KINDS, task_type="CAUSAL_LM", **more)
    model = library.get_peft_model(theirs(H), config).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(os.fspath(tmp_path / "p"))
    found = read_adapter(tmp_path / "p", H)
    check_fits(found, H, "base")
    assert found.pairs.keys() == {EMBEDDINGS, OUTPUT, *linear(H)}
    gguf.write_adapter(tmp_path / "a.gguf", found)
    ids = tokens(40)
    expected = their_logits(model, ids)
    for each in (found, read_adapter(tmp_path / "a.gguf", H)):
        assert np.abs(our_logits(merged(weights(H), [each]), ids) - expected).max() < 1e-3
