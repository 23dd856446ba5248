"""Adapters: what their files mean, and whether one is for a base."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters import gguf
from llamatrain.adapters.adapter import Adapter, LoraPair, check_fits, checked_factors
from llamatrain.adapters.read import read_adapter
from llamatrain.errors import FileError
from llamatrain.gguf import quants
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import Kind, Value, f32, numbers, string
from llamatrain.gguf.writer import create_gguf
from llamatrain.model import hyperparameters
from tests.helpers.adapter_files import adapter, ggla, linear, same
from tests.helpers.small_models import EMBEDDINGS, LLAMA, OUTPUT, small, weights, written
from tests.helpers.test_data import material

H = small()
MATRICES = [EMBEDDINGS, *linear(H), OUTPUT]
Q = "blk.0.attn_q.weight"


def refused(match: str, path: Path) -> None:
    with pytest.raises(FileError, match=match) as error:
        read_adapter(path, H)
    assert str(error.value).isprintable()


# ---- what is added ---------------------------------------------------------


def test_what_a_pair_adds() -> None:
    made = adapter(H, [EMBEDDINGS, Q, "output_norm.weight"], alpha=6)
    q, e, n = (made.pairs[name] for name in (Q, EMBEDDINGS, "output_norm.weight"))
    assert np.allclose(made.delta(Q), 1.5 * q.b @ q.a, atol=1e-6)
    assert np.allclose(made.delta(EMBEDDINGS, 3, 7), 1.5 * e.a[3:7] @ e.b.T, atol=1e-6)
    assert np.allclose(made.delta("output_norm.weight")[0], 1.5 * n.b[0] @ n.a, atol=1e-6)
    assert np.allclose(made.scale_by(0.5).delta(Q), 0.75 * q.b @ q.a, atol=1e-6)


# ---- GGUF ------------------------------------------------------------------


def test_gguf_there_and_back(tmp_path: Path) -> None:
    made = adapter(H, MATRICES)
    gguf.write_adapter(
        tmp_path / "a.gguf", made, metadata={"general.author": string("me"), "general.type": string("model")}
    )
    found = read_adapter(tmp_path / "a.gguf", H)
    assert same(found, made) and (found.alpha, found.name, found.architecture) == (8.0, "mine", LLAMA)
    keys = open_gguf(tmp_path / "a.gguf").metadata
    assert (
        keys["general.type"],
        keys["adapter.type"],
        keys["general.author"],
        keys["general.file_type"],
    ) == (
        "adapter",
        "lora",
        "me",
        0,
    )
    gguf.write_adapter(tmp_path / "h.gguf", made, "f16")
    half = read_adapter(tmp_path / "h.gguf", H)
    assert open_gguf(tmp_path / "h.gguf").metadata["general.file_type"] == 1
    assert all(
        np.array_equal(half.pairs[name].a, pair.a.astype(np.float16)) for name, pair in made.pairs.items()
    )


@pytest.mark.parametrize("alpha", [0.0, 8.0])
def test_another_scale_goes_into_b(tmp_path: Path, alpha: float) -> None:
    made = adapter(H, [Q, EMBEDDINGS], rank=2, alpha=alpha, scale=0.3)
    gguf.write_adapter(tmp_path / "a.gguf", made)
    found = read_adapter(tmp_path / "a.gguf", H)
    assert found.pairs[Q].scale == (alpha / 2 or 1)
    assert all(np.allclose(found.delta(name), made.delta(name), rtol=1e-6) for name in made.pairs)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_gguf_of_other_types(tmp_path: Path, kind: str) -> None:
    """Without an alpha the scale is 1; a rank of 1 may leave out its axis."""
    random = np.random.default_rng(1)
    a, b = random.standard_normal((32, 64), np.float32), random.standard_normal((64, 32), np.float32)
    keys = {
        "general.type": string("adapter"),
        "general.architecture": string("llama"),
        "adapter.type": string("lora"),
    }
    raw_a, raw_b = quants.encode(a, type_by_name(kind)), quants.encode(b, type_by_name(kind))
    write(
        tmp_path / "a.gguf",
        keys,
        {f"{Q}.lora_a": (raw_a, a.shape, kind), f"{Q}.lora_b": (raw_b, b.shape, kind)},
    )
    pair = read_adapter(tmp_path / "a.gguf", H).pairs[Q]
    assert pair.scale == 1 and np.array_equal(pair.a, quants.decode(raw_a, type_by_name(kind)))
    one = {f"{Q}.lora_a": (a[0].tobytes(), (64,), "F32"), f"{Q}.lora_b": (b[:, :1].tobytes(), (64, 1), "F32")}
    write(tmp_path / "b.gguf", keys, one)
    assert np.array_equal(read_adapter(tmp_path / "b.gguf", H).pairs[Q].a, a[:1])


def write(
    path: Path, keys: dict[str, Value], tensors: dict[str, tuple[np.ndarray | bytes, tuple[int, ...], str]]
) -> None:
    with create_gguf(
        path,
        keys,
        [TensorInfo(name, type_by_name(kind), shape) for name, (_, shape, kind) in tensors.items()],
    ) as out:
        for name, (raw, _, _) in tensors.items():
            out.write(name, [raw])


KEYS = {
    "general.type": string("adapter"),
    "general.architecture": string("llama"),
    "adapter.type": string("lora"),
    "adapter.lora.alpha": f32(4),
}
A, B = (bytes(4 * 4 * 64), (4, 64), "F32"), (bytes(4 * 64 * 4), (64, 4), "F32")
GOOD = {f"{Q}.lora_a": A, f"{Q}.lora_b": B}


@pytest.mark.parametrize(
    ("keys", "tensors", "told"),
    [
        ({"adapter.type": string("control_vector")}, GOOD, "adapter.type must be lora .got 'control_vector'"),
        ({"adapter.lora.alpha": string("4")}, GOOD, "adapter.lora.alpha must be of type float .got STRING"),
        ({"adapter.alora.invocation_tokens": numbers(Kind.UINT32, [1, 2])}, GOOD, "aLoRA"),
        ({"general.type": string("model")}, GOOD, "no adapter but a model"),
        ({"general.type": string("other")}, GOOD, "neither an adapter nor a model; give an adapter"),
        ({}, {}, "no pair of factors"),
        ({}, {f"{Q}.lora_a": A}, "has factor a, but factor b is missing"),
        ({}, {f"{Q}.lora_b": B}, "has factor b, but factor a is missing"),
        ({}, GOOD | {"blk.0.attn_norm.weight": A}, "is not a factor of an adapter"),
        ({}, GOOD | {".lora_a": A}, "is not a factor of an adapter"),
        ({}, {f"{Q}.lora_a": (A[0], (64, 4), "F32"), f"{Q}.lora_b": B}, "differ in rank"),
        ({}, {f"{Q}.lora_a": (A[0], (2, 2, 64), "F32"), f"{Q}.lora_b": B}, "must have two dimensions .got 3"),
        (
            {},
            {f"{Q}.lora_a": (bytes(4 * 144), (4, 256), "Q4_K"), f"{Q}.lora_b": B},
            "must be one of F32, .*got Q4_K",
        ),
    ],
)
def test_gguf_that_is_no_adapter(
    tmp_path: Path, keys: dict[str, Value], tensors: dict[str, object], told: str
) -> None:
    write(tmp_path / "a.gguf", KEYS | keys, tensors)  # type: ignore[arg-type]
    refused(told, tmp_path / "a.gguf")
    write(tmp_path / "good.gguf", KEYS, GOOD)
    assert read_adapter(tmp_path / "good.gguf", H).pairs[Q].scale == 1


# ---- the ancestors' --------------------------------------------------------


def test_ggla(tmp_path: Path) -> None:
    """The scale is alpha / r for all, whatever a tensor's own rank."""
    names = [EMBEDDINGS, "output_norm.weight", Q]
    pairs = adapter(H, names, rank=4).pairs | {
        "blk.0.attn_norm.weight": adapter(H, ["blk.0.attn_norm.weight"], rank=1).pairs[
            "blk.0.attn_norm.weight"
        ]
    }
    made = Adapter(
        source=Path(), alpha=6, pairs={name: replace(pair, scale=1.5) for name, pair in pairs.items()}
    )
    (tmp_path / "l.bin").write_bytes(ggla(made, 4, 6))
    found = read_adapter(tmp_path / "l.bin", H)
    assert same(found, made) and type(found.alpha) is float
    check_fits(found, H, "base")
    assert checked_factors(found, H, "base").keys() == found.pairs.keys()
    matrices = replace(found, pairs={name: found.pairs[name] for name in (EMBEDDINGS, Q)})
    assert checked_factors(matrices, H, "base").keys() == matrices.pairs.keys()
    gguf.write_adapter(tmp_path / "a.gguf", matrices)
    assert same(read_adapter(tmp_path / "a.gguf", H), matrices)


def test_a_file_of_the_ancestors_finetune() -> None:
    base = open_gguf(material("ancestors/model.gguf"))
    h = hyperparameters.read_hyperparameters(base)
    found = read_adapter(material("ancestors/lora.bin"), h)
    check_fits(found, h, base.path)
    merged = open_gguf(material("ancestors/merged-by-ancestor.gguf"))
    assert found.pairs.keys() == base.tensors.keys() and found.alpha == 4

    def values(name: str, file: object) -> np.ndarray:
        tensor = file.tensors[name]  # type: ignore[attr-defined]
        return np.atleast_2d(tensor.raw.view("<f4").reshape(tensor.shape))

    for name in found.pairs:
        assert np.abs(values(name, merged) - values(name, base) - found.delta(name)).max() < 1e-7


# ---- what is no adapter ----------------------------------------------------


def test_what_is_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"text, and more")
    (tmp_path / "empty").touch()
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    refused(r"begins with b'text'\); give an adapter \(a GGUF file", tmp_path / "text")
    refused("the file is empty; an adapter", tmp_path / "empty")
    refused("No such file", tmp_path / "none")
    refused("no adapter_config.json", tmp_path / "folder")
    refused("give its folder", tmp_path / "adapter_config.json")
    refused("device or pipe; an adapter", Path("/dev/null"))
    refused("no adapter but a model", written(tmp_path / "m.gguf", H, weights(H)))


# ---- for a base ------------------------------------------------------------


def unfit(made: Adapter, told: str, tied: bool = False) -> None:
    with pytest.raises(FileError, match=re.escape(told)) as error:
        check_fits(made, replace(H, tied=tied), "base.gguf")
    assert str(error.value).startswith("made: ") and "\n" not in str(error.value)


def test_an_adapter_of_another_base() -> None:
    check_fits(adapter(H, H.shapes), H, "base.gguf")
    check_fits(adapter(H, linear(H)), replace(H, tied=True), "base.gguf")
    wide = small(embd=128, vocab=300)
    unfit(
        adapter(wide, [Q]),
        "the pair of blk.0.attn_q.weight is for a weight of [64, 128], but base.gguf has [64, 64]",
    )
    unfit(adapter(wide, [EMBEDDINGS]), "is for a weight of [300, 128], but base.gguf has [258, 64]")
    unfit(adapter(wide, ["output_norm.weight"]), "is for a weight of [1, 128], but base.gguf has [64]")
    unfit(
        adapter(small(layers=3), ["blk.2.attn_q.weight"]),
        "has a pair for 'blk.2.attn_q.weight', which base.gguf does not have",
    )
    unfit(adapter(H, [OUTPUT]), "pair for output.weight, but the embeddings of base.gguf are tied", tied=True)
    unfit(
        adapter(H, [EMBEDDINGS]),
        "pair for token_embd.weight, but the embeddings of base.gguf are tied",
        tied=True,
    )
    unfit(
        replace(adapter(H, [Q]), architecture=replace(LLAMA, name="mamba")),
        "the adapter is for the architecture 'mamba', but base.gguf is a llama",
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none(value: float) -> None:
    made = adapter(H, [Q])
    pair = made.pairs[Q]
    unfit(made.scale_by(value), "the scale of")
    unfit(made.scale_by(1e10), "(got 2e+10")
    pair.b[5, 2] = value
    unfit(made, "factor b of blk.0.attn_q.weight is not finite")


def test_a_pair_knows_its_rank() -> None:
    a, b = np.zeros((3, 64), np.float32), np.zeros((64, 3), np.float32)
    assert LoraPair(a, b, 1).rank == LoraPair(b, b, 1).rank == 3
