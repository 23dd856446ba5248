"""Adapters of experts and routers: beside bases in llama.cpp, merged, trained as PEFT trains them, and to and from its files."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters import gguf, peft
from llamatrain.adapters.adapter import Adapter, LoraPair
from llamatrain.adapters.read import read_adapter
from llamatrain.gguf.reader import open_gguf
from llamatrain.model import layers
from llamatrain.model.architectures import find_architecture
from llamatrain.model.hyperparameters import Hyperparameters
from tests.helpers import architecture_runs as runs
from tests.helpers import architecture_torch as theirs
from tests.helpers import parameter_adapters as parameters
from tests.helpers.adapter_files import same
from tests.helpers.architecture_family import Shape
from tests.helpers.architecture_models import (
    SHAPES,
    linear,
    mixtures,
    prompt,
    shape_of,
    weights,
    wide,
    written,
)
from tests.helpers.architectures import FAMILIES
from tests.helpers.cli import ran
from tests.helpers.llama_cpp import served
from tests.helpers.small_models import loaded
from tests.interop.test_architecture_adapters import (
    Merge,
    at_most,
    both,
    differ_by,
    differ_in_llama_cpp,
    merge,
    whole,
)
from tests.interop.test_architectures_llama_cpp import letters, said

IDS = prompt()
MIXTURES = [arch for arch, shapes in SHAPES.items() if hasattr(shapes["a"], "experts")]
CONVERTIBLE = [arch for arch in MIXTURES if not find_architecture(shape_of(arch, "a").file_arch).peft_problem]


def strong(shape: Shape) -> Adapter:
    """Return an adapter of all experts and routers, and of one matrix of attention."""
    names = [*mixtures(shape), next(name for name in linear(shape) if name.endswith("attn_output.weight"))]
    return runs.adapter_of(shape, runs.factors(shape, names=names)).scale_by(1.5)


# ---- llama.cpp --------------------------------------------------------------


@pytest.mark.llama_cpp
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("arch", MIXTURES)
def test_beside_a_base(arch: str, kind: str, tmp_path: Path) -> None:
    shape, path = wide(arch), tmp_path / "a.gguf"
    gguf.write_adapter(path, strong(shape))
    base = model = written(tmp_path / "base.gguf", shape, weights(shape))
    if kind != "f32":
        model = tmp_path / "quantized.gguf"
        ran("export-lora", base, "--type", kind, "--out", model)
        assert open_gguf(model).tensors["blk.1.ffn_down_exps.weight"].type.name == kind.upper()
    with served(model, adapter=path) as server:
        follow, expected = letters(server, IDS)
    with served(model) as server:
        _, plain = letters(server, IDS, 1)
    decoder, _ = both(model, [read_adapter(path, loaded(open_gguf(model))[0])])
    off, change = np.abs(said(decoder, IDS, follow) - expected), np.abs(plain[0] - expected[0])
    near = 0.1 if kind != "f32" else 5e-3 if FAMILIES[arch].half_float_gelu else 1e-4
    assert off.mean() <= near * change.mean() and change.max() > 1


@pytest.fixture(scope="module", params=MIXTURES)
def merges(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Merge]:
    """Merge an adapter into stacks of float32 and of a quantized type."""
    shape, folder = wide(request.param), tmp_path_factory.mktemp(request.param)
    gguf.write_adapter(folder / "a.gguf", strong(shape))
    return merge(written(folder / "base.gguf", shape, weights(shape)), folder / "a.gguf", ("keep", "q8_0"))


def test_merged(merges: dict[str, Merge]) -> None:
    differences = differ_by(merges)
    assert at_most(differences, {"keep": 1e-4, "q8_0": 0.05}), differences


@pytest.mark.llama_cpp
def test_merged_in_llama_cpp(merges: dict[str, Merge]) -> None:
    differences = differ_in_llama_cpp(merges)
    assert at_most(differences, {"keep": 0.01, "q8_0": 0.05}), differences


# ---- PEFT: training ---------------------------------------------------------


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("arch", CONVERTIBLE)
def test_gradients(arch: str, name: str, tmp_path: Path) -> None:
    """Compare factors; the gradient of an A that gate and values share is the sum of ours."""
    shape = shape_of(arch, name)
    pairs = parameters.share_factors(runs.factors(shape, names=mixtures(shape)))
    held = parameters.with_parameters(theirs.model(shape, weights(shape, last=1.0)), shape, pairs)
    batch = runs.batch(tmp_path, runs.base(tmp_path, shape))
    theirs.loss(held, batch).backward()
    expected = parameters.gradients(held, shape, pairs)
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for weight, pair in runs.lora_gradients(tmp_path, shape, made=pairs).items():
        parts.setdefault(theirs.rows(shape)[weight][0].partition("#")[0], []).append(pair)
    assert parts.keys() == expected.keys()
    for weight, each in parts.items():
        a, b = sum(a for a, _ in each), parameters.join_rows(shape, weight, [b for _, b in each])
        for mine, other in zip(parameters.to_matrices(np.asarray(a), b), expected[weight], strict=True):
            assert np.abs(mine - other).max() <= 1e-3 * np.abs(other).max() > 0, weight


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", CONVERTIBLE)
def test_losses(arch: str, tmp_path: Path) -> None:
    """Train what is a parameter of its own in Hugging Face's model."""
    shape = shape_of(arch, "a")
    names = [name for name in mixtures(shape) if "#" not in theirs.rows(shape)[name][0]]
    pairs = runs.factors(shape, names=names)
    held = parameters.with_parameters(theirs.model(shape, weights(shape, last=1.0)), shape, pairs)
    batch = runs.batch(tmp_path, runs.base(tmp_path, shape))
    expected = theirs.losses(held, batch, runs.STEPS, runs.RATE)
    found = runs.lora_losses(tmp_path, shape, made=pairs)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert expected[-1] < expected[0] - 0.01


# ---- PEFT: files ------------------------------------------------------------


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shared", [True, False], ids=["one a", "two a"])
@pytest.mark.parametrize("arch", CONVERTIBLE)
def test_peft_loads_what_is_written(arch: str, shared: bool, tmp_path: Path) -> None:
    """Two factors A of gate and values become one of both ranks."""
    library = pytest.importorskip("peft")
    shape = shape_of(arch, "b")
    base = written(tmp_path / "base.gguf", shape, weights(shape))
    h, _ = loaded(open_gguf(base))
    pairs = runs.factors(
        shape,
        names=[*mixtures(shape), [name for name in linear(shape) if name.endswith("attn_output.weight")][-1]],
    )
    made = runs.adapter_of(shape, parameters.share_factors(pairs) if shared else pairs).scale_by(1.5)
    peft.write_peft(tmp_path / "p", made, "", h)
    held = library.PeftModel.from_pretrained(theirs.model(shape, weights(shape)), os.fspath(tmp_path / "p"))
    ranks = {name: each.r["default"] for name, each in parameters.wrappers(held).items()}
    assert {rank for name, rank in ranks.items() if "gate_up" in name} == {runs.RANK * (1 if shared else 2)}
    expected = theirs.logits(held, IDS)
    assert np.abs(whole(base, made) - expected).max() < 1e-3 < 0.5 < np.abs(whole(base) - expected).max()
    held.save_pretrained(os.fspath(tmp_path / "again"))
    for folder in ("p", "again"):
        back = read_adapter(tmp_path / folder, h)
        assert back.pairs.keys() == made.pairs.keys()
        for name in made.pairs:
            np.testing.assert_allclose(back.delta(name), made.delta(name), atol=1e-5)


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wanted", ["ffn_", "ffn_down_exps", "ffn_gate_inp"])
@pytest.mark.parametrize("arch", CONVERTIBLE)
def test_what_peft_writes_is_read(arch: str, wanted: str, tmp_path: Path) -> None:
    shape = shape_of(arch, "a")
    base = written(tmp_path / "base.gguf", shape, weights(shape))
    names = [name for name in mixtures(shape) if wanted in name]
    pairs = parameters.share_factors(runs.factors(shape, names=names))
    held = parameters.with_parameters(theirs.model(shape, weights(shape)), shape, pairs).eval()
    held.save_pretrained(os.fspath(tmp_path / "p"))
    found = read_adapter(tmp_path / "p", loaded(open_gguf(base))[0])
    assert found.pairs.keys() == pairs.keys()
    for name, (a, b) in pairs.items():
        assert np.array_equal(found.pairs[name].a, a) and np.array_equal(found.pairs[name].b, b)
    expected = theirs.logits(held, IDS)
    assert np.abs(whole(base, found) - expected).max() < 1e-3 < 0.1 < np.abs(whole(base) - expected).max()


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
def test_modules_of_single_experts(tmp_path: Path) -> None:
    """Adapters that were made before experts were parameters: PEFT converts them as they are read here."""
    library, shape, folder = pytest.importorskip("peft"), shape_of("qwen3moe", "a"), tmp_path / "p"
    base = written(tmp_path / "base.gguf", shape, weights(shape))
    names = [name for name in mixtures(shape) if "_exps" in name]
    made = runs.adapter_of(shape, runs.factors(shape, names=names))
    parameters.write_single_experts(folder, made.pairs)
    found = read_adapter(folder, loaded(open_gguf(base))[0])
    assert same(found, made)
    held = library.PeftModel.from_pretrained(theirs.model(shape, weights(shape)), os.fspath(folder))
    expected = theirs.logits(held, IDS)
    assert np.abs(whole(base, found) - expected).max() < 1e-3 < 0.3 < np.abs(whole(base) - expected).max()


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
def test_linear_layers_with_the_names_of_experts(tmp_path: Path) -> None:
    """Load adapters of shared experts, which PEFT takes for those of experts if it adapts them as modules."""
    library, family = pytest.importorskip("peft"), pytest.importorskip("transformers")
    h = with_shared_experts(tmp_path)
    random, pairs = np.random.default_rng(1), {}
    for name, rank in (("blk.1.ffn_up_shexp.weight", 2), ("blk.1.ffn_down_shexp.weight", 3)):
        out, into = h.shapes[name]
        a, b = (random.standard_normal(shape, np.float32) for shape in ((rank, into), (out, rank)))
        pairs[name] = LoraPair(a, b, 4 / rank)
    made = Adapter(source=Path("made"), alpha=4.0, pairs=pairs, architecture=h.architecture)
    peft.write_peft(tmp_path / "p", made, "", h)
    sizes = {"vocab_size": 8, "hidden_size": h.embd, "num_hidden_layers": 2, "moe_intermediate_size": 24}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config = family.Glm4MoeConfig(**sizes, first_k_dense_replace=1, num_attention_heads=2, head_dim=8)
    held = library.PeftModel.from_pretrained(family.Glm4MoeForCausalLM(config), os.fspath(tmp_path / "p"))
    found = {name: each.detach().numpy() for name, each in held.named_parameters() if "lora_" in name}
    wrappers = parameters.wrappers(held)
    assert len(found) == 4
    for name, module in (("up", "up_proj"), ("down", "down_proj")):
        prefix = f"model.layers.1.mlp.shared_experts.{module}"
        pair = pairs[f"blk.1.ffn_{name}_shexp.weight"]
        assert np.array_equal(found[f"base_model.model.{prefix}.lora_A.default.weight"], pair.a)
        assert np.array_equal(found[f"base_model.model.{prefix}.lora_B.default.weight"], pair.b)
        assert wrappers[f"{prefix}.weight"].scaling["default"] == pair.scale
    held.save_pretrained(os.fspath(tmp_path / "again"))
    assert same(read_adapter(tmp_path / "p", h), made) and same(read_adapter(tmp_path / "again", h), made)


def with_shared_experts(folder: Path) -> Hyperparameters:
    """Return the hyperparameters of a model whose blocks have shared experts besides the others."""
    shape = shape_of("qwen3moe", "a")
    h, _ = loaded(open_gguf(written(folder / "base.gguf", shape, weights(shape))))
    width, inner = (lambda h: h.embd), (lambda h: 24)
    more = {
        "blk.{}.ffn_up_shexp.weight": layers.block_matrix(inner, width, "mlp.shared_experts.up_proj"),
        "blk.{}.ffn_down_shexp.weight": layers.block_matrix(width, inner, "mlp.shared_experts.down_proj"),
    }
    return replace(h, architecture=replace(h.architecture, weights=h.architecture.weights | more))


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", CONVERTIBLE)
def test_a_run_writes_for_peft(arch: str, tmp_path: Path) -> None:
    library = pytest.importorskip("peft")
    shape = shape_of(arch, "b")
    base, folder = runs.base(tmp_path, shape), tmp_path / "p"
    given = ("--target", "experts,router", "--lora-rank-of", "ffn_up_exps=2", "--lr", 1e-2, "--iters", 10)
    ran(
        "finetune",
        base,
        runs.data(tmp_path),
        *given,
        *runs.PLAIN,
        "--peft",
        folder,
        "--out",
        tmp_path / "run",
    )
    held = library.PeftModel.from_pretrained(theirs.model(shape, weights(shape, last=1.0)), os.fspath(folder))
    expected = theirs.logits(held, IDS)
    learned = gguf.parse_adapter(open_gguf(tmp_path / "run" / "adapter.gguf"))
    assert learned.pairs.keys() == set(mixtures(shape))
    assert np.abs(whole(base, learned) - expected).max() < 1e-3 < 0.1 < np.abs(whole(base) - expected).max()
