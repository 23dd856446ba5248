"""Models in files: what is read is what was written, weights of every type are loaded, and what cannot be is a line."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamatrain.config.options import build
from llamatrain.errors import FileError, LlamatrainError, UsageError
from llamatrain.gguf import quants
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import type_by_name
from llamatrain.gguf.values import Kind, Value, f32, numbers, string, u32
from llamatrain.graph.tensor import F32
from llamatrain.model import load as loading
from llamatrain.model.frozen_weights import load_frozen
from llamatrain.model.hyperparameters import Hyperparameters, read_hyperparameters
from llamatrain.model.load import check_memory, load_weights
from llamatrain.model.options import ModelOptions
from llamatrain.model.rope import Rope
from tests.helpers.small_models import Arrays, small, weights, written

FACTORS = np.linspace(1, 8, 8).astype(np.float32)
MODELS = [
    small(),
    small(tied=True, rms_eps=0.25),
    small(heads=2, kv_heads=1, head_size=48, rope=Rope(32, base=500000.0)),
    small(rope=Rope(16, factors=FACTORS)),
    small(rope=Rope(16, base=12345.678, kind="linear", factor=1 / 0.3, length=1.1), rms_eps=1e-6),
    small(rope=Rope(16, base=1e6, kind="yarn", factor=4.0, original_ctx=16)),
]


@pytest.mark.parametrize("h", MODELS)
def test_hyperparameters_come_back(h: Hyperparameters, tmp_path: Path) -> None:
    found = read_hyperparameters(open_gguf(written(tmp_path / "m.gguf", h, weights(h))))
    assert found == h
    np.testing.assert_array_equal(found.rope.table(50), h.rope.table(50))


def test_defaults_of_old_files(tmp_path: Path) -> None:
    h = small(kv_heads=4, ctx=2048)
    path = written(tmp_path / "m.gguf", h, weights(h))
    gguf = open_gguf(path)
    for name in (
        "context_length",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "attention.layer_norm_rms_epsilon",
        "vocab_size",
    ):
        del gguf.metadata.raw_values[f"llama.{name}"]
    assert replace(read_hyperparameters(gguf), rope=h.rope) == h
    gguf.metadata.raw_values["llama.rope.scale_linear"] = f32(2.0)
    assert (read_hyperparameters(gguf).rope.kind, read_hyperparameters(gguf).rope.factor) == ("linear", 2.0)
    gguf.metadata.raw_values["llama.rope.scaling.type"] = string("none")
    assert read_hyperparameters(gguf).rope.factor == 1.0


L = "llama."
BROKEN: list[tuple[dict[str, Value], str]] = [
    (
        {"general.architecture": string("gpt2")},
        r"architecture 'gpt2' is not supported; .*, such as [\w-]+, which is the nearest$",
    ),
    ({"general.type": string("adapter")}, "an adapter, not a model; a model is needed"),
    ({"general.type": string("mmproj")}, "neither a model nor an adapter; a model is needed"),
    ({L + "block_count": u32(3)}, "blk.2.attn_norm.weight is missing"),
    ({L + "block_count": u32(1)}, "'blk.1.attn_norm.weight' is not a weight of a llama"),
    ({L + "block_count": u32((1 << 32) - 1)}, "llama.block_count must be 1 to 4096 .got 4294967295."),
    ({L + "block_count": u32(0)}, r"llama.block_count must be .*\(got 0\)"),
    ({L + "block_count": f32(2)}, "llama.block_count must be of type int .got FLOAT32"),
    ({L + "attention.head_count": u32(0)}, "llama.attention.head_count must be 1 to"),
    (
        {L + "attention.head_count": numbers(Kind.INT32, [4])},
        "llama.attention.head_count must have a number in range for each of 2 blocks",
    ),
    (
        {L + "attention.key_length": numbers(Kind.INT32, [16, 16])},
        "key_length must be of type int .got ARRAY",
    ),
    (
        {L + "attention.head_count_kv": u32(3)},
        "llama.attention.head_count_kv must divide the 4 heads .got 3",
    ),
    ({L + "attention.head_count_kv": u32(0)}, r"llama.attention.head_count_kv must be .*\(got 0\)"),
    (
        {L + "attention.key_length": u32(18)},
        "llama.attention.value_length is 16 and llama.attention.key_length 18; only equal",
    ),
    (
        {L + "embedding_length": u32(65)},
        r"the shape of token_embd.weight must be \[258, 65\] .got \[258, 64\]",
    ),
    ({L + "feed_forward_length": u32(1 << 31)}, r"llama.feed_forward_length must be .*\(got 2147483648\)"),
    ({L + "context_length": u32(0)}, r"llama.context_length must be .*\(got 0\)"),
    ({L + "expert_count": u32(8)}, r"llama.expert_used_count must be 1 to the 8 experts \(got 0\)"),
    (
        {L + "attention.layer_norm_rms_epsilon": f32(float("nan"))},
        r"norm_rms_epsilon must be .*\(got nan\)",
    ),
    (
        {L + "rope.dimension_count": u32(15)},
        "llama.rope.dimension_count must be even and at most the head size, 16 .got 15",
    ),
    (
        {L + "rope.dimension_count": u32(18)},
        "llama.rope.dimension_count must be even and at most the head size, 16 .got 18",
    ),
    (
        {L + "rope.freq_base": f32(float("inf"))},
        "llama.rope.freq_base must be at least 1, such as 10000 .got inf",
    ),
    ({L + "rope.freq_base": f32(1e-30)}, r"llama.rope.freq_base must be .*\(got 1e-30\)"),
    (
        {L + "rope.scaling.type": string("dynamic")},
        "rope.scaling.type must be one of none, linear, yarn, longrope .got 'dynamic'",
    ),
    (
        {L + "rope.scaling.factor": f32(-2)},
        "llama.rope.scaling.factor must be more than 0, such as 4 .got -2",
    ),
    (
        {L + "rope.scaling.attn_factor": f32(float("nan"))},
        r"llama.rope.scaling.attn_factor must be .*\(got nan\)",
    ),
    (
        {L + "rope.scaling.type": string("yarn"), L + "rope.scaling.original_context_length": u32(0)},
        "as YaRN and LongRoPE need it",
    ),
]


@pytest.mark.parametrize(("change", "told"), BROKEN)
def test_a_model_that_cannot_be(change: dict[str, Value], told: str, tmp_path: Path) -> None:
    h = small()
    path = written(tmp_path / "m.gguf", h, weights(h), more=change)
    with pytest.raises(FileError, match=told) as failure:
        read_hyperparameters(open_gguf(path))
    assert (
        str(failure.value).startswith(f"{path}: ")
        and "\n" not in str(failure.value)
        and "--" not in str(failure.value)
    )


@pytest.mark.parametrize(
    ("factors", "told"),
    [
        (FACTORS[:7], r"rope_freqs.weight must be 8 numbers above 0 .got \[7\]"),
        (-FACTORS, "must be 8 numbers above 0"),
        (FACTORS - 1, "must be 8 numbers above 0"),
        (np.ones((2, 8), np.float32), r"must be a vector of F32 .got F32 \[2, 8\]"),
    ],
)
def test_factors_that_cannot_be(factors: np.ndarray, told: str, tmp_path: Path) -> None:
    h = small()
    path = written(tmp_path / "m.gguf", h, weights(h) | {"rope_freqs.weight": factors})
    with pytest.raises(FileError, match=told):
        read_hyperparameters(open_gguf(path))


def without_matrix(arrays: Arrays) -> Arrays:
    return arrays | {"token_embd.weight": np.zeros(64, np.float32)}


def test_tensors_that_cannot_be(tmp_path: Path) -> None:
    h = small()
    arrays = weights(h)
    for tensors, told in (
        (
            {name: array for name, array in arrays.items() if name != "token_embd.weight"},
            "the matrix token_embd.weight is missing",
        ),
        (without_matrix(arrays), "the matrix token_embd.weight is missing"),
        (arrays | {"blk.0.attn_q.bias": np.zeros(64, np.float32)}, "blk.1.attn_q.bias is missing"),
        (arrays | {"blk.1.attn_q.bias": np.zeros(64, np.float32)}, "blk.0.attn_q.bias is missing"),
        (
            arrays | {"blk.0.attn_z.bias": np.zeros(64, np.float32)},
            "'blk.0.attn_z.bias' is not a weight of a llama",
        ),
        (
            arrays | {"blk.1.attn_k.weight": np.zeros((64, 64), np.float32)},
            r"attn_k.weight must be \[32, 64\] .got \[64, 64\]",
        ),
    ):
        with pytest.raises(FileError, match=told):
            read_hyperparameters(open_gguf(written(tmp_path / "m.gguf", h, tensors)))


OPTIONS: list[tuple[dict[str, float], str]] = [
    ({"head_kv": 3}, "--head-kv must divide the 8 heads .got 3"),
    ({"layer": 5000}, r"--layer must be .*\(got 5000\)"),
    ({"norm_rms_eps": 1e-60}, r"--norm-rms-eps must be .*\(got 0\)"),
    ({"norm_rms_eps": 2}, r"--norm-rms-eps must be .*\(got 2\)"),
    ({"rope_freq_base": 0}, r"--rope-freq-base must be .*\(got 0\)"),
]


@pytest.mark.parametrize(("options", "told"), OPTIONS)
def test_what_cannot_be_is_told_by_whoever_said_it(options: dict[str, float], told: str) -> None:
    """A file by its keys (above), an option by its flag."""
    with pytest.raises(UsageError, match=f"^{told}"):
        build(ModelOptions, options).hyperparameters(100)
    with pytest.raises(UsageError, match=r"^size must be even and at most the head size, 5 .got 5"):
        small(head_size=5, rope=Rope(5))


# ---- weights ---------------------------------------------------------------


def test_float32_is_used_as_it_lies(tmp_path: Path) -> None:
    h = small()
    gguf = open_gguf(written(tmp_path / "m.gguf", h, weights(h)))
    _, arrays = load_frozen(gguf, read_hyperparameters(gguf))
    assert arrays.keys() == h.shapes.keys()
    for name, array in weights(h).items():
        np.testing.assert_array_equal(arrays[name], array)
        assert (
            np.shares_memory(arrays[name], gguf.tensors[name].raw)
            == (array.ndim == 2)
            != arrays[name].flags.writeable
        )


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_other_types_are_decoded(kind: str, tmp_path: Path) -> None:
    h = small(embd=256, heads=4, kv_heads=4, head_size=64, ff=256, layers=1)
    gguf = open_gguf(written(tmp_path / "m.gguf", h, weights(h), kind))
    filled = {name: np.zeros(shape, np.float32) for name, shape in h.shapes.items()}
    load_weights(gguf, filled, threads=2)
    for name, array in weights(h).items():
        type_ = type_by_name(kind if array.ndim == 2 else "F32")
        expected = quants.decode(quants.encode(array, type_), type_)
        np.testing.assert_array_equal(filled[name], expected)


def test_float32_off_its_place_is_copied(tmp_path: Path) -> None:
    h = small(layers=1)
    one = {"general.alignment": u32(1), "general.name": string("of odd length")}
    for name in ("x", "xx", "xxx", "xxxx"):
        gguf = open_gguf(
            written(tmp_path / "m.gguf", h, weights(h), more=one | {f"general.{name}": string(name)})
        )
        leaves, arrays = load_frozen(gguf, h)
        for key, array in arrays.items():
            assert leaves[key].dtype is not F32 or array.ctypes.data % 4 == 0
            found = array if leaves[key].dtype is F32 else quants.decode(array, type_by_name("F32"))
            np.testing.assert_array_equal(found, weights(h)[key])


def test_what_does_not_fit_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h = small(layers=1)
    gguf = open_gguf(written(tmp_path / "m.gguf", h, weights(h)))
    monkeypatch.setattr(loading, "available_bytes", lambda: 9999)
    check_memory(gguf, 9999)
    with pytest.raises(
        LlamatrainError,
        match="needs 10,000 bytes of memory, but 9,999 are available; a smaller model needs less",
    ):
        check_memory(gguf, 10000)
    monkeypatch.setattr(loading, "available_bytes", lambda: None)
    check_memory(gguf, 1 << 60)
