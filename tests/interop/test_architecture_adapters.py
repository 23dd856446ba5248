"""Adapters of every architecture: beside bases in llama.cpp, merged by export-lora, and to and from PEFT under its own names."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from llamatrain.adapters import gguf, peft
from llamatrain.adapters.adapter import Adapter
from llamatrain.adapters.read import read_adapter
from llamatrain.errors import FileError
from llamatrain.gguf.reader import open_gguf
from llamatrain.model.architectures import find_architecture
from llamatrain.sample.decoder import Decoder
from tests.helpers import architecture_runs as runs
from tests.helpers import architecture_torch as theirs
from tests.helpers.adapter_files import merged
from tests.helpers.architecture_family import CTX, EMBEDDINGS, OUTPUT, Shape
from tests.helpers.architecture_models import (
    SHAPES,
    adaptable,
    linear,
    prompt,
    shape_of,
    weights,
    wide,
    written,
)
from tests.helpers.architectures import FAMILIES
from tests.helpers.cli import ran, run
from tests.helpers.llama_cpp import served
from tests.helpers.small_models import Arrays, loaded
from tests.interop.test_architectures_llama_cpp import letters, log_softmax, said

IDS = prompt()
CONVERTIBLE = [arch for arch in SHAPES if not find_architecture(shape_of(arch, "a").file_arch).peft_problem]


def strong(shape: Shape) -> Adapter:
    return runs.adapter_of(shape, runs.factors(shape)).scale_by(1.5)


def bases(shape: Shape, folder: Path) -> tuple[Path, Path]:
    """A base in float32, and an adapter of it as we write it."""
    gguf.write_adapter(folder / "a.gguf", strong(shape))
    return written(folder / "base.gguf", shape, weights(shape)), folder / "a.gguf"


def both(model: Path, adapters: list[Adapter]) -> tuple[Decoder, Arrays]:
    h, arrays = loaded(open_gguf(model))
    arrays = merged(arrays, adapters)
    return Decoder(h, arrays, ctx=CTX), arrays


def whole(model: Path, *adapters: Adapter) -> np.ndarray:
    decoder, _ = both(model, list(adapters))
    return np.array([decoder.feed([token]).copy() for token in IDS])


def last(model: Path, *adapters: Adapter) -> np.ndarray:
    return both(model, list(adapters))[0].feed(IDS).copy()


# ---- in llama.cpp -----------------------------------------------------------


@pytest.mark.llama_cpp
@pytest.mark.parametrize("arch", SHAPES)
def test_beside_a_base(arch: str, tmp_path: Path) -> None:
    """Logits behind a prompt and 15 tokens more; llama.cpp's gelu is a table of half floats, its products with few bits round."""
    base, path = bases(wide(arch), tmp_path)
    h, _ = loaded(open_gguf(base))
    mine = [read_adapter(path, h)]
    for kind, limit in (
        ("f32", 5e-3 if FAMILIES[arch].half_float_gelu else 1e-4),
        ("q8_0", 0.05),
        ("q4_k", 0.2),
    ):
        model = base
        if kind != "f32":
            model = tmp_path / f"{kind}.gguf"
            ran("export-lora", base, "--lora-scaled", path, 0, "--type", kind, "--out", model)
            tensors = open_gguf(model).tensors
            down = next(name for name in tensors if name.startswith("blk.1.ffn_down"))
            assert tensors[down].type.name == kind.upper()
        with served(model, adapter=path) as server:
            follow, expected = letters(server, IDS)
        with served(model) as server:
            _, plain = letters(server, IDS, 1)
        off = np.abs(said(both(model, mine)[0], IDS, follow) - expected)
        change = np.abs(plain[0] - expected[0])
        assert off.mean() <= limit * change.mean() and change.max() > 1, kind
        assert kind != "f32" or off.max() <= limit


class Merge(NamedTuple):
    """A base and its merged file of some type: logits behind a prompt, and how much the adapter changes them."""

    model: Path
    logits: np.ndarray
    expected: np.ndarray  # of the base beside the adapter
    change: float


def merge(base: Path, adapter: Path, kinds: Iterable[str]) -> dict[str, Merge]:
    """Merge an adapter into a base, as each type."""
    plain, expected = last(base), last(base, read_adapter(adapter, loaded(open_gguf(base))[0]))
    change, merges = float(np.abs(plain - expected).mean()), {}
    for kind in kinds:
        model = base.with_name(f"{kind}.gguf")
        ran("export-lora", base, "--lora", adapter, "--type", kind, "--out", model)
        merges[kind] = Merge(model, last(model), expected, change)
    return merges


def differ_by(merges: dict[str, Merge]) -> dict[str, float]:
    """Return the difference of each merged file from the base beside the adapter, relative to the change."""
    return {kind: np.abs(each.logits - each.expected).mean() / each.change for kind, each in merges.items()}


def differ_in_llama_cpp(merges: dict[str, Merge]) -> dict[str, float]:
    """Return the difference of each merged file in llama.cpp from the same file here, relative to the change."""
    differences = {}
    for kind, each in merges.items():
        with served(each.model) as server:
            _, served_logits = letters(server, IDS, 1)
        differences[kind] = np.abs(served_logits[0] - log_softmax(each.logits)).mean() / each.change
    return differences


def at_most(found: dict[str, float], limits: dict[str, float]) -> bool:
    """Whether each type differs by at most its limit."""
    return found.keys() == limits.keys() and all(found[kind] <= limits[kind] for kind in limits)


MERGED = {"keep": 1e-4, "f16": 0.01, "q8_0": 0.05, "q5_k": 0.4}  # the most by which a type may differ


@pytest.fixture(scope="module", params=SHAPES)
def merges(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Merge]:
    return merge(*bases(wide(request.param), tmp_path_factory.mktemp(request.param)), MERGED)


def test_merged(merges: dict[str, Merge]) -> None:
    differences = differ_by(merges)
    assert at_most(differences, MERGED), differences


@pytest.mark.llama_cpp
def test_merged_in_llama_cpp(merges: dict[str, Merge]) -> None:
    differences = differ_in_llama_cpp(merges)
    assert at_most(differences, {"keep": 0.01, "f16": 0.01, "q8_0": 0.05, "q5_k": 0.2}), differences


def ends(shape: Shape) -> Adapter:
    """Of the embeddings, whose rows are scaled in some models, and of the output, whose logits are."""
    random, made = np.random.default_rng(4), {}
    for name, sizes in (
        (EMBEDDINGS, ((shape.vocab, 4), (shape.embd, 4))),
        (OUTPUT, ((4, shape.embd), (shape.vocab, 4))),
    ):
        a, b = (np.float32(0.2) * random.standard_normal(axes, np.float32) for axes in sizes)
        made[name] = (a, b)
    return runs.adapter_of(shape, made)


@pytest.mark.llama_cpp
@pytest.mark.parametrize("arch", ["granite", "gemma3", "qwen2"])
def test_both_ends_beside_a_base(arch: str, tmp_path: Path) -> None:
    shape = replace(shape_of(arch, "a"), tied=False)
    base, made = written(tmp_path / "base.gguf", shape, weights(shape)), ends(shape)
    gguf.write_adapter(tmp_path / "a.gguf", made)
    with served(base, adapter=tmp_path / "a.gguf") as server:
        follow, expected = letters(server, IDS, 4)
    found = said(both(base, [made])[0], IDS, follow)
    assert np.abs(found - expected).max() <= (5e-3 if arch == "gemma3" else 1e-4)
    assert np.abs(log_softmax(last(base)) - expected[0]).max() > 0.3


# ---- PEFT -------------------------------------------------------------------


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", ["granite", "gemma3", "qwen2"])
def test_peft_loads_both_ends(arch: str, tmp_path: Path) -> None:
    library = pytest.importorskip("peft")
    shape = replace(shape_of(arch, "a"), tied=False)
    base, made = written(tmp_path / "base.gguf", shape, weights(shape)), ends(shape)
    peft.write_peft(tmp_path / "p", made, "", loaded(open_gguf(base))[0])
    held = library.PeftModel.from_pretrained(theirs.model(shape, weights(shape)), os.fspath(tmp_path / "p"))
    expected = theirs.logits(held, IDS)
    assert np.abs(whole(base, made) - expected).max() < 1e-3 < 0.3 < np.abs(whole(base) - expected).max()


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", CONVERTIBLE)
def test_peft_loads_what_is_written(arch: str, tmp_path: Path) -> None:
    library = pytest.importorskip("peft")
    shape = shape_of(arch, "b")
    base = written(tmp_path / "base.gguf", shape, weights(shape))
    h, _ = loaded(open_gguf(base))
    made = strong(shape)
    peft.write_peft(tmp_path / "p", made, "", h)
    held = library.PeftModel.from_pretrained(theirs.model(shape, weights(shape)), os.fspath(tmp_path / "p"))
    there = library.get_peft_model_state_dict(held)
    assert {name.partition(".lora_")[0] for name in there} == {
        theirs.factor(shape, name, "A").partition(".lora_")[0] for name in linear(shape)
    }
    expected = theirs.logits(held, IDS)
    assert np.abs(whole(base, made) - expected).max() < 1e-3 < 0.5 < np.abs(whole(base) - expected).max()
    back = read_adapter(tmp_path / "p", h)
    assert back.pairs.keys() == made.pairs.keys()
    for name in made.pairs:
        np.testing.assert_allclose(back.delta(name), made.delta(name), atol=1e-6)


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", CONVERTIBLE)
def test_what_peft_writes_is_read(arch: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    shape = shape_of(arch, "a")
    base, pairs = written(tmp_path / "base.gguf", shape, weights(shape)), runs.factors(shape)
    held = theirs.with_adapter(theirs.model(shape, weights(shape)), shape, pairs).eval()
    held.save_pretrained(os.fspath(tmp_path / "p"))
    h, _ = loaded(open_gguf(base))
    found = read_adapter(tmp_path / "p", h)
    assert found.pairs.keys() == pairs.keys()
    expected = theirs.logits(held, IDS)
    assert np.abs(whole(base, found) - expected).max() < 1e-3 < 0.3 < np.abs(whole(base) - expected).max()


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", CONVERTIBLE)
def test_a_run_writes_for_peft(arch: str, tmp_path: Path) -> None:
    """What is learned shows there, too."""
    library = pytest.importorskip("peft")
    shape = shape_of(arch, "b")
    base = runs.base(tmp_path, shape)
    given = ("--lr", 1e-2, "--iters", 10, *runs.PLAIN, "--precision", "f32", "--peft", tmp_path / "p")
    ran("finetune", base, runs.data(tmp_path), *given, "--out", tmp_path / "run")
    held = library.PeftModel.from_pretrained(
        theirs.model(shape, weights(shape, last=1.0)), os.fspath(tmp_path / "p")
    )
    expected, learned = (
        theirs.logits(held, IDS),
        gguf.parse_adapter(open_gguf(tmp_path / "run" / "adapter.gguf")),
    )
    assert learned.pairs.keys() == set(adaptable(shape))
    assert np.abs(whole(base, learned) - expected).max() < 1e-3 < 0.2 < np.abs(whole(base) - expected).max()


def split_pairs(shape: Shape, seeds: tuple[int, int]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return a pair for the gate and one for the values of each feed-forward part; equal seeds give them one factor a."""
    found = {}
    for layer in range(shape.layers):
        for part, seed in zip(("ffn_gate", "ffn_up"), seeds, strict=True):
            a = np.random.default_rng([layer, seed]).standard_normal((runs.RANK, shape.embd), np.float32)
            b = np.random.default_rng([layer, len(part)]).standard_normal((shape.ff, runs.RANK), np.float32)
            found[f"blk.{layer}.{part}.weight"] = (np.float32(0.3) * a, np.float32(0.3) * b)
    return found


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("seeds", "rank"), [((1, 1), 1), ((1, 2), 2)], ids=["one a", "two a"])
def test_joined_modules(seeds: tuple[int, int], rank: int, tmp_path: Path) -> None:
    """Two weights of a file that are one module there: PEFT reads and writes their adapters."""
    library, shape = pytest.importorskip("peft"), shape_of("granitehybrid", "a")
    base = written(tmp_path / "base.gguf", shape, weights(shape))
    h, _ = loaded(open_gguf(base))
    made = runs.adapter_of(shape, split_pairs(shape, seeds))
    peft.write_peft(tmp_path / "p", made, "", h)
    held = library.PeftModel.from_pretrained(theirs.model(shape, weights(shape)), os.fspath(tmp_path / "p"))
    named = {name for name in library.get_peft_model_state_dict(held) if "lora_A" in name}
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in named} == {"input_linear"}
    expected = theirs.logits(held, IDS)
    assert np.abs(whole(base, made) - expected).max() < 1e-3 < 0.3 < np.abs(whole(base) - expected).max()
    held.save_pretrained(os.fspath(tmp_path / "again"))
    for folder in ("p", "again"):
        back = read_adapter(tmp_path / folder, h)
        assert {pair.rank for pair in back.pairs.values()} == {rank * runs.RANK}
        for name in made.pairs:
            np.testing.assert_allclose(back.delta(name), made.delta(name), atol=1e-5)


def test_half_of_a_joined_module(tmp_path: Path) -> None:
    """A pair of the gate alone leaves the other rows of the module as they are."""
    shape = shape_of("granitehybrid", "b")
    h, _ = loaded(open_gguf(written(tmp_path / "base.gguf", shape, weights(shape))))
    pairs = {name: each for name, each in split_pairs(shape, (1, 2)).items() if "ffn_gate" in name}
    made = runs.adapter_of(shape, pairs)
    peft.write_peft(tmp_path / "p", made, "", h)
    back = read_adapter(tmp_path / "p", h)
    for name in pairs:
        np.testing.assert_allclose(back.delta(name), made.delta(name), atol=1e-5)
        assert not back.delta(name.replace("ffn_gate", "ffn_up")).any()


def test_half_of_a_mixed_module(tmp_path: Path) -> None:
    """A module has the rows of two weights by turns: a pair of one of them leaves the others as they are."""
    shape = shape_of("qwen3next", "a")
    h, _ = loaded(open_gguf(written(tmp_path / "base.gguf", shape, weights(shape))))
    names = [name for name in adaptable(shape) if name.endswith("attn_gate.weight")]
    made = runs.adapter_of(shape, runs.factors(shape, names=names))
    peft.write_peft(tmp_path / "p", made, "", h)
    back = read_adapter(tmp_path / "p", h)
    assert back.pairs.keys() == {other for name in names for other in (name, name.replace("gate", "qkv"))}
    for name in names:
        np.testing.assert_allclose(back.delta(name), made.delta(name), atol=1e-5)
        assert not back.delta(name.replace("attn_gate", "attn_qkv")).any()


def test_models_whose_adapters_cannot_be_converted(tmp_path: Path) -> None:
    """One line says why, before a run begins."""
    shape = shape_of("falcon-h1", "b")
    base, data = runs.base(tmp_path, shape), runs.data(tmp_path)
    h, _ = loaded(open_gguf(base))
    told = "of a falcon-h1 cannot be converted, because its files have the multipliers"
    with pytest.raises(FileError, match=told):
        peft.write_peft(tmp_path / "p", strong(shape), "", h)
    with pytest.raises(FileError, match=told):
        peft.read_peft(tmp_path / "p", h)
    done = run("finetune", base, data, *runs.PLAIN, "--peft", tmp_path / "p", "--out", tmp_path / "run")
    assert done.code and told in done.err.replace("\n", " ") and not (tmp_path / "p").exists()
