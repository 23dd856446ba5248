"""Pairs of experts and routers: their files, what they add, what is refused, and how they are merged."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.adapters import gguf, peft
from llamatrain.adapters.adapter import Adapter, LoraPair, check_fits
from llamatrain.adapters.read import read_adapter
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf import quants, rewrite
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.safetensors import write_safetensors
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import f32, string
from llamatrain.gguf.writer import create_gguf
from llamatrain.model import layers
from llamatrain.model.hyperparameters import Hyperparameters, read_hyperparameters
from llamatrain.model.lora_targets import GROUPS, block_matrices, group_sizes, match_target
from tests.adapters.test_broken_adapters import broken, broken_json
from tests.gguf.test_broken_files import little_memory
from tests.helpers import architecture_runs as runs
from tests.helpers.adapter_files import same
from tests.helpers.architecture_models import mixtures, shape_of, weights, wide, written
from tests.helpers.cli import ran, run
from tests.helpers.lora_runs import decoded
from tests.helpers.parameter_adapters import write_single_experts

__all__ = ["little_memory"]  # a fixture

SHAPE = shape_of("qwen3moe", "a")
UP, DOWN, ROUTER = (f"blk.0.{name}.weight" for name in ("ffn_up_exps", "ffn_down_exps", "ffn_gate_inp"))


def made(names: list[str] | None = None, seed: int = 3) -> Adapter:
    return runs.adapter_of(SHAPE, runs.factors(SHAPE, seed, names or mixtures(SHAPE)))


@pytest.fixture
def h(tmp_path: Path) -> Hyperparameters:
    return read_hyperparameters(open_gguf(written(tmp_path / "base.gguf", SHAPE, weights(SHAPE))))


def added(pair: LoraPair) -> np.ndarray:
    """Return what a pair of experts adds, expert by expert, in float64."""
    return np.stack([pair.scale * (b.astype(np.float64) @ a) for a, b in zip(pair.a, pair.b, strict=True)])


# ---- targets ----------------------------------------------------------------


def test_targets(h: Hyperparameters) -> None:
    experts = {name for name in h.shapes if "_exps" in name}
    routers = {name for name in h.shapes if "ffn_gate_inp" in name}
    attention = {
        f"blk.{layer}.attn_{x}.weight" for layer in range(h.layers) for x in ("q", "k", "v", "output")
    }
    assert len(experts) == 3 * h.layers and len(routers) == h.layers
    assert match_target("experts", h) == experts and match_target("router", h) == routers
    assert match_target("attention", h) == attention == set(block_matrices(h)) == match_target("blk.0-1", h)
    assert match_target("blk.1.experts", h) == {name for name in experts if name.startswith("blk.1.")}
    assert match_target("blk.0-.ffn_up_exps", h) == match_target("ffn_up_exps", h)
    with pytest.raises(UsageError, match=r"^shared: the model has no such weight$"):
        match_target("shared", h)


def test_stacks_that_get_no_adapter(tmp_path: Path) -> None:
    """One line says why; the group of experts is without them."""
    shape = shape_of("gemma4moe", "b")
    h = read_hyperparameters(open_gguf(written(tmp_path / "base.gguf", shape, weights(shape))))
    short = {name.split(".")[2] for name in match_target("experts", h)}
    assert short == {"ffn_gate_exps", "ffn_up_exps"}
    told = r"^ffn_down_exps: it cannot have an adapter, because llama.cpp would add it without the factors of experts"
    with pytest.raises(UsageError, match=told):
        match_target("ffn_down_exps", h)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("blk.{}.attn_kv_b.weight", "attention"),
        ("blk.{}.ffn_up_shexp.weight", "shared"),
        ("blk.{}.ffn_up.weight", "feed-forward"),
        ("blk.{}.ssm_in.weight", "others"),
    ],
)
def test_groups(name: str, group: str, h: Hyperparameters) -> None:
    """Name the group of a matrix that some architecture may have."""
    matrix = layers.block_matrix(lambda h: 3, lambda h: 2, "module")
    other = replace(h, architecture=replace(h.architecture, weights={name: matrix}))
    wanted = {weight for weight, _ in other.weight_kinds()}
    assert len(wanted) == h.layers
    assert group_sizes(((weight, 5) for weight in wanted), other) == {group: 5 * h.layers}
    if group in GROUPS:
        assert match_target(group, other) == wanted


# ---- files ------------------------------------------------------------------


def test_there_and_back(h: Hyperparameters, tmp_path: Path) -> None:
    """Stacks of factors, as llama.cpp has them."""
    gguf.write_adapter(tmp_path / "a.gguf", made())
    tensors, (count, out, into) = open_gguf(tmp_path / "a.gguf").tensors, h.shapes[UP]
    assert tensors[f"{UP}.lora_a"].shape == (count, runs.RANK, into)
    assert tensors[f"{UP}.lora_b"].shape == (count, out, runs.RANK)
    found = read_adapter(tmp_path / "a.gguf", h)
    check_fits(found, h, "base")
    assert same(found, made()) and found.pairs[UP].rank == runs.RANK
    gguf.write_adapter(tmp_path / "half.gguf", made(), "f16")
    halves = read_adapter(tmp_path / "half.gguf", h)
    assert all(np.allclose(halves.delta(name), made().delta(name), atol=1e-3) for name in halves.pairs)
    peft.write_peft(tmp_path / "p", made(), "", h)
    back = read_adapter(tmp_path / "p", h)
    assert all(np.allclose(back.delta(name), made().delta(name), atol=1e-6) for name in made().pairs)


def test_rows_of_what_is_added() -> None:
    pair = made().pairs[UP]
    whole = added(pair).reshape(-1, pair.a.shape[-1])
    found = made().delta(UP)
    assert found.dtype == np.float32 and np.allclose(found, whole, atol=1e-6)
    for lo, hi in ((0, 1), (5, 24), (23, 25), (24, 48), (10, 130), (100, None), (140, 500), (7, 7)):
        np.testing.assert_allclose(made().delta(UP, lo, hi), found[lo:hi], atol=1e-6)


def refused(folder: Path, tensors: dict[str, np.ndarray], h: Hyperparameters) -> str:
    """The error for an adapter file with these tensors."""
    path, kind = folder / "bad.gguf", type_by_name("F32")
    keys = {"general.type": string("adapter"), "general.architecture": string("qwen3moe")}
    keys |= {"adapter.type": string("lora"), "adapter.lora.alpha": f32(8.0)}
    with create_gguf(
        path, keys, [TensorInfo(name, kind, each.shape) for name, each in tensors.items()]
    ) as out:
        for name, each in tensors.items():
            out.write(name, quants.encode(each, kind))
    with pytest.raises(FileError) as error:
        check_fits(read_adapter(path, h), h, "base")
    message = str(error.value)
    assert message.startswith(str(path)) and message.isprintable()
    return message.removeprefix(f"{path}: ")


def zeros(name: str, a: tuple[int, ...], b: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {f"{name}.lora_a": np.zeros(a, np.float32), f"{name}.lora_b": np.zeros(b, np.float32)}


DENSE, STACKED = "must have two dimensions", "must have three dimensions, as a factor of experts"


@pytest.mark.parametrize(
    ("name", "a", "b", "told"),
    [
        (UP, (5, 2, 48), (6, 24, 2), "differ in their number of experts"),
        (UP, (6, 2, 48), (6, 24, 3), "differ in rank"),
        (UP, (5, 2, 48), (5, 24, 2), "is for a weight of [5, 24, 48], but base has [6, 24, 48]"),
        (UP, (6, 2, 24), (6, 48, 2), "is for a weight of [6, 48, 24], but base has [6, 24, 48]"),
        (UP, (2, 48), (24, 2), STACKED),
        (UP, (6, 2, 48), (24, 2), STACKED),
        (UP, (1, 6, 2, 48), (1, 6, 24, 2), STACKED),
        (ROUTER, (1, 2, 48), (1, 6, 2), DENSE),
        ("blk.0.attn_q.weight", (6, 2, 48), (6, 48, 2), DENSE),
        ("token_embd.weight", (1, 259, 2), (1, 48, 2), DENSE),
        ("blk.0.unknown.weight", (6, 2, 48), (6, 24, 2), DENSE),
        ("blk.9.ffn_up_exps.weight", (6, 2, 48), (6, 24, 2), "which base does not have"),
    ],
)
@pytest.mark.usefixtures("little_memory")
def test_files_that_are_refused(
    name: str, a: tuple[int, ...], b: tuple[int, ...], told: str, h: Hyperparameters, tmp_path: Path
) -> None:
    assert told in refused(tmp_path, zeros(name, a, b), h)


EXPERTS_MODULE = "base_model.model.model.layers.0.mlp.experts"


def peft_folder(folder: Path, tensors: dict[str, tuple[int, int]], targets: Any) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_parameters": targets}
    (folder / peft.CONFIG).write_text(json.dumps(config))
    arrays = {f"{EXPERTS_MODULE}{name}.weight": np.ones(shape, np.float32) for name, shape in tensors.items()}
    write_safetensors(folder / peft.WEIGHTS, arrays)
    return folder


DOWN_FACTORS = {".lora_A": (12, 24), ".lora_B": (48, 12)}


def test_a_wrapper_of_one_parameter(h: Hyperparameters, tmp_path: Path) -> None:
    """Read a folder that differs from refused ones in one thing each."""
    found = read_adapter(peft_folder(tmp_path / "p", DOWN_FACTORS, ["mlp.experts.down_proj"]), h)
    check_fits(found, h, "base")
    assert [*found.pairs] == [DOWN] and found.pairs[DOWN].scale == 2.0


@pytest.mark.parametrize(
    ("tensors", "targets", "told"),
    [
        (DOWN_FACTORS, None, "has factors, but target_parameters of the configuration names none of its"),
        (DOWN_FACTORS, ["mlp.experts"], "names none of its parameters"),
        (DOWN_FACTORS, "down_proj", "target_parameters must be a list of at most"),
        (DOWN_FACTORS, [1], "target_parameters must be a list of at most"),
        (
            {".base_layer.lora_A": (12, 24), ".base_layer.lora_B": (48, 12)},
            ["down_proj"],
            "names .*down_proj of",
        ),
        ({".lora_A": (11, 24), ".lora_B": (48, 12)}, ["down_proj"], "11 ranks of .* among 6 experts"),
        ({".lora_A": (12, 24), ".lora_B": (48, 11)}, ["down_proj"], "11 ranks of .* among 6 experts"),
        ({".lora_A": (12, 24), ".lora_B": (48, 18)}, ["down_proj"], "differ in rank"),
        ({".lora_A": (18, 24), ".lora_B": (48, 18)}, ["down_proj"], "the rank of .* must be 2"),
        ({".lora_A": (12, 48), ".lora_B": (47, 12)}, ["gate_up_proj"], "47 rows of .* into 2 parts"),
        ({f"{'.base_layer' * 99}.lora_A": (12, 24)}, ["down_proj"], "is not a module of qwen3moe"),
    ],
)
def test_folders_that_are_refused(
    tensors: dict[str, tuple[int, int]], targets: Any, told: str, h: Hyperparameters, tmp_path: Path
) -> None:
    with pytest.raises(FileError, match=told) as error:
        read_adapter(peft_folder(tmp_path / "p", tensors, targets), h)
    assert str(error.value).isprintable()


def test_single_experts_that_are_refused(h: Hyperparameters, tmp_path: Path) -> None:
    """Adapters with a module for each expert must have all of them, alike."""
    whole = made([UP, DOWN])
    write_single_experts(tmp_path / "whole", whole.pairs)
    assert same(read_adapter(tmp_path / "whole", h), whole)
    some = {name: replace(pair, a=pair.a[:5], b=pair.b[:5]) for name, pair in whole.pairs.items()}
    last = f"{EXPERTS_MODULE.removeprefix('base_model.model.')}.5.up_proj"
    for name, pairs, more, told in (
        (
            "some",
            some,
            {},
            "needs pairs for its 6 experts .got pairs for 5.; the adapter is for another base",
        ),
        ("alphas", whole.pairs, {"alpha_pattern": {last: 2}}, "experts of one block must have one alpha"),
        ("ranks", whole.pairs, {"rank_pattern": {last: 2}}, "the rank of .*experts.5.up_proj' must be 2"),
    ):
        write_single_experts(tmp_path / name, pairs, **more)
        with pytest.raises(FileError, match=told):
            read_adapter(tmp_path / name, h)


@pytest.mark.usefixtures("little_memory")
def test_mutated_files(h: Hyperparameters, tmp_path: Path) -> None:
    """Read damaged files and folders: each is an adapter that fits, or an error of one line."""
    path, folder, counts = tmp_path / "a.gguf", tmp_path / "p", {True: 0, False: 0}
    adapter = made([UP, ROUTER])
    gguf.write_adapter(path, adapter)
    peft.write_peft(folder, adapter, "", h)
    config, tensors = folder / peft.CONFIG, folder / peft.WEIGHTS
    sound = json.loads(config.read_bytes())
    for changed, source, files in (
        (path, path, broken(path.read_bytes(), 7)),
        (tensors, folder, broken(tensors.read_bytes(), 7)),
        (config, folder, broken_json(sound)),
    ):
        before = changed.read_bytes()
        for data in files:
            changed.write_bytes(data)
            try:
                check_fits(read_adapter(source, h), h, "base")
                counts[True] += 1
            except FileError as error:
                assert str(error).startswith(str(source)) and str(error).isprintable()
                counts[False] += 1
        changed.write_bytes(before)
        check_fits(read_adapter(source, h), h, "base")
    assert counts[True] > 50 and counts[False] > 1000


# ---- merging ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["keep", "q8_0", "q4_k"])
def test_merged_some_rows_at_a_time(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge in pieces that end within an expert."""
    shape = wide("qwen3moe")
    adapter = runs.adapter_of(shape, runs.factors(shape, names=mixtures(shape)))
    base = written(tmp_path / "base.gguf", shape, weights(shape))
    gguf.write_adapter(tmp_path / "a.gguf", adapter)
    monkeypatch.setattr(rewrite, "PANEL", 100 * 256)
    out = tmp_path / "merged.gguf"
    ran("export-lora", base, "--lora", tmp_path / "a.gguf", "--type", kind, "--out", out)
    before, after = weights(shape), decoded(out)
    limit = {"keep": 1e-6, "q8_0": 0.01, "q4_k": 0.15}[kind]
    for name in mixtures(shape):
        delta = adapter.delta(name).reshape(before[name].shape)
        off = after[name] - before[name] - delta
        assert np.sqrt(np.mean(off**2)) <= limit * np.std(before[name] + delta)
        kept = kind == "keep" or "ffn_gate_inp" in name
        assert open_gguf(out).tensors[name].type.name == ("F32" if kept else kind.upper())


def test_adapters_as_one(h: Hyperparameters, tmp_path: Path) -> None:
    for name, each in (("a", made()), ("b", made([UP, ROUTER], seed=4))):
        gguf.write_adapter(tmp_path / f"{name}.gguf", each)
    given = ("--lora", tmp_path / "a.gguf", "--lora-scaled", tmp_path / "b.gguf", 0.5)
    ran("export-lora", tmp_path / "base.gguf", *given, "--only-adapter", "--out", tmp_path / "c.gguf")
    found, other = read_adapter(tmp_path / "c.gguf", h), made([UP, ROUTER], seed=4)
    assert found.pairs[UP].rank == found.pairs[ROUTER].rank == 2 * runs.RANK
    for name in (UP, ROUTER):
        assert np.allclose(found.delta(name), made().delta(name) + 0.5 * other.delta(name), atol=1e-6)
    assert np.allclose(found.delta(DOWN), made().delta(DOWN), atol=1e-6)


def test_an_adapter_of_other_experts(tmp_path: Path) -> None:
    other = replace(SHAPE, experts=5)  # type: ignore[call-arg]
    base = written(tmp_path / "other.gguf", other, weights(other))
    gguf.write_adapter(tmp_path / "a.gguf", made([UP]))
    for command in (
        ("generate",),
        ("evaluate", tmp_path / "no-data"),
        ("export-lora", "--out", tmp_path / "m"),
    ):
        done = run(command[0], base, *command[1:], "--lora", tmp_path / "a.gguf")
        assert done.code and len(done.errors) == 1, done.err
    assert "is for a weight of [6, 24, 48], but" in done.err.replace("\n", " ")
