"""An architecture is one file: found by its name, read, begun, trained, decoded and adapted by what its table says."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import llamatrain
from llamatrain.adapters.adapter import check_fits
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf.reader import open_gguf
from llamatrain.model import architectures
from llamatrain.model.architectures import DEFAULT, find_architecture, supported_names
from llamatrain.model.hyperparameters import Hyperparameters, read_hyperparameters
from llamatrain.model.init import init_weights
from llamatrain.model.lora_targets import block_matrices, match_target
from llamatrain.run.inputs import fingerprint
from llamatrain.sample.decoder import Decoder
from tests.helpers.adapter_files import adapter
from tests.helpers.errors import raises
from tests.helpers.small_models import LLAMA, Arrays, loss_of, small, tokens, weights, written

# A llama with a bias behind queries and behind what goes down, whose heads turn in halves, and with a number of its own.
MADE = """
from dataclasses import replace

from llamatrain.model.architecture import Key, WeightKind
from llamatrain.model.architectures.llama import ARCHITECTURE as LLAMA

BIASES = {
    "blk.{}.attn_q.bias": WeightKind(role="bias", shape=lambda h: (h.width,), module="model.layers.{}.self_attn.q_proj"),
    "blk.{}.ffn_down.bias": WeightKind(role="bias", shape=lambda h: (h.embd,), module="model.layers.{}.mlp.down_proj"),
}
ARCHITECTURE = replace(
    LLAMA,
    name="made-here",
    keys={**LLAMA.keys, "softness": Key("softness", float, 0.25)},
    weights={**LLAMA.weights, **BIASES},
    rotation="halves",
)
"""
BIAS = "blk.0.attn_q.bias"


@pytest.fixture
def h(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hyperparameters:
    folder = tmp_path / "architectures"
    folder.mkdir()
    (folder / "made_here.py").write_text(MADE)
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(folder)])
    return small(architecture=find_architecture("made-here"), extra={"softness": 0.5})


def test_a_file_more_is_an_architecture_more(h: Hyperparameters, tmp_path: Path) -> None:
    assert supported_names() == sorted([*supported_names()]) and {"llama", "made-here"} <= {
        *supported_names()
    }
    arrays = weights(h)
    assert {name for name in arrays if name.endswith("bias")} == {
        f"blk.{layer}.{name}.bias" for layer in (0, 1) for name in ("attn_q", "ffn_down")
    }
    path = written(tmp_path / "m.gguf", h, arrays)
    gguf = open_gguf(path)
    assert gguf.get_value("made-here.softness", float) == 0.5
    assert read_hyperparameters(gguf) == h
    assert h.describe().startswith("made-here, 2 layers")
    del gguf.metadata.raw_values["made-here.softness"]
    assert read_hyperparameters(gguf).extra == {"softness": 0.25}
    with pytest.raises(FileError, match=r"m\.gguf: blk\.0\.attn_q\.bias is missing"):
        read_hyperparameters(
            open_gguf(written(path, h, {name: array for name, array in arrays.items() if name != BIAS}))
        )


def test_bases_are_known_again(h: Hyperparameters, tmp_path: Path) -> None:
    """Also by checkpoints of older versions: they keep what is made of the repr of a llama's numbers."""
    assert repr(small()) == (
        "Hyperparameters(vocab=258, embd=64, layers=2, heads=4, kv_heads=2, ff=96, ctx=64, head_size=16, rope=Rope(size=16, "
        "base=10000.0, kind='none', factor=1.0, original_ctx=0, length=1.0), rms_eps=9.999999747378752e-06, tied=False)"
    )
    softer = replace(h, extra={"softness": 0.125})
    files = [
        open_gguf(written(tmp_path / f"{each.extra['softness']}.gguf", each, weights(h)))
        for each in (h, softer)
    ]
    assert len({fingerprint(file) for file in files}) == 2


@pytest.mark.parametrize("name", ["gpt2", "", "../llama", "__init__", "llama.py", "x" * 1000])
def test_what_is_none(name: str) -> None:
    with raises("unsupported-architecture", match=r"such as [\w-]+, which is the nearest$") as failure:
        find_architecture(name)
    assert len(str(failure.value)) < 240


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "llama4",
            "'llama4', a mixture of experts, is not supported; use .*, such as llama, which is the nearest",
        ),
        (
            "nemotron_h",
            "'nemotron_h', a hybrid of attention and .*, is not supported; use .*, such as nemotron, which is the nearest",
        ),
        ("olmo3", "'olmo3' is not supported; use .*, such as olmo2?, which is the nearest"),
        (
            "qwen9moe",
            "'qwen9moe', a mixture of experts, is not supported; use .*, such as qwen3moe, which is the nearest",
        ),
        (
            "mamba2",
            "'mamba2', a recurrent model, is not supported; use .*, such as llama, which is the nearest",
        ),
        (
            "starcoder",
            "'starcoder', a model with .*, is not supported; .*, such as starcoder2, which is the nearest",
        ),
        ("paddleocr", "'paddleocr', a vision-language model, .*, such as ernie4_5, which is the nearest"),
    ],
)
def test_what_is_near(name: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        find_architecture(name)


def test_each_is_named_in_its_own_file_alone() -> None:
    """Names of vocabularies and of templates are other things; elsewhere stand what is usual, and what old files were.

    `importing` says how the files of each architecture differ from those of transformers.
    """
    root, names = Path(llamatrain.__file__).parent, supported_names()
    apart = (root / "data", root / "importing")
    word = re.compile(rf"(?<![\w./-])({'|'.join(names)})(?![\w./-])")
    places: dict[str, int] = {}
    for path in root.rglob("*.py"):
        own = path.stem if path.parent.name == "architectures" else ""  # with _ for -
        if not word.search(source := path.read_text()):
            continue
        tree = ast.parse(source)
        documented = {id(node.body[0].value) for node in ast.walk(tree) if has_docstring(node)}  # type: ignore[attr-defined]
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in documented else ""
            found = (
                word.findall(text)
                if isinstance(text, str) and not any(map(path.is_relative_to, apart))
                else []
            )
            if more := [
                name
                for name in found
                if name.replace("-", "_") != own and (name != DEFAULT or text == DEFAULT)
            ]:
                places[str(path.relative_to(root))] = len(more)
    del places["api/option_types.py"]  # a script writes it
    assert places == {
        "model/architectures/__init__.py": 1,
        "legacy/checkpoint_file.py": 1,
        "legacy/adapter_bin.py": 1,
    }


def has_docstring(node: ast.AST) -> bool:
    if not isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
        return False
    return (
        bool(node.body)
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    )


def test_first_values(h: Hyperparameters) -> None:
    """Biases begin at nothing and norms at one; what has the same name and seed begins the same."""
    made: Arrays = {name: np.full(shape, np.nan, np.float32) for name, shape in h.shapes.items()}
    init_weights(h, 3, made)
    plain = {name: np.empty(shape, np.float32) for name, shape in small().shapes.items()}
    init_weights(small(), 3, plain)
    for name, array in made.items():
        role = h.weight_kind(name).role
        if role in ("bias", "norm"):
            assert (array == (role == "norm")).all()
        else:
            assert np.array_equal(array, plain[name])
    assert np.isclose(
        made["blk.0.ffn_down.weight"].std() * 2,
        made["blk.0.ffn_up.weight"].std() * (64 / 96) ** 0.5,
        rtol=0.05,
    )


# ---- adapters --------------------------------------------------------------


def test_targets(h: Hyperparameters) -> None:
    assert block_matrices(h) == block_matrices(small())
    assert match_target("attn_q", h) == {"blk.0.attn_q.weight", "blk.1.attn_q.weight"}
    assert (
        match_target("blk.1.attn_q.weight", h) == match_target("blk.1-1.attn_q", h) == {"blk.1.attn_q.weight"}
    )
    assert match_target("output", h) == {"output.weight"}
    assert match_target("ffn_norm", h) == {"blk.0.ffn_norm.weight", "blk.1.ffn_norm.weight"}
    assert match_target("norms", h) == {name for name in h.shapes if "norm" in name}
    last = {name for name in block_matrices(h) if name.startswith("blk.1.")}
    assert (
        len(last) == 7
        and match_target("blk.1", h) == match_target("blk.1-", h) == match_target("blk.1-1", h) == last
    )
    assert match_target("blk.0-", h) == set(block_matrices(h)) and match_target("blk.1-.attn_q", h) == {
        "blk.1.attn_q.weight"
    }
    for target, told in (
        ("blk.2-", "^blk.2-: the model has the blocks 0 to 1$"),
        ("blk.1-0", "^blk.1-0: the model has the blocks 0 to 1$"),
        ("blk.1.", "^blk.1.: no such weight; choose one of attn_q"),
        ("blk.2.attn_q", "^blk.2.attn_q: the model has the blocks 0 to 1$"),
        ("blk.0.output", "^blk.0.output: the model has no such weight$"),
        ("attn_q.bias", "^attn_q.bias: no such weight; choose one of attn_q"),
        ("atn_q", "^atn_q: no such weight; choose one of attn_q, "),
    ):
        with pytest.raises(UsageError, match=told):
            match_target(target, h)
    with pytest.raises(UsageError, match=r"^output: the model's embeddings are tied"):
        match_target("output", replace(h, tied=True))


def test_adapters(h: Hyperparameters) -> None:
    made = replace(adapter(h, block_matrices(h)), architecture=h.architecture)
    check_fits(made, h, "base")
    with pytest.raises(FileError, match=f"a pair for {BIAS}, but biases cannot have an adapter"):
        check_fits(replace(adapter(h, [BIAS]), architecture=h.architecture), h, "base")
    with pytest.raises(
        FileError, match="the adapter is for the architecture 'made-here', but base is a llama"
    ):
        check_fits(made, small(), "base")


def test_names_of_hugging_face(h: Hyperparameters) -> None:
    for name in h.shapes:
        module = h.architecture.module_for_weight(name)
        assert (module is None) == (h.weight_kind(name).role in ("norm", "bias"))
        assert module is None or name in h.architecture.weights_for_module(module)
    assert LLAMA.weights_for_module("model.layers.11.mlp.down_proj") == ["blk.11.ffn_down.weight"]
    for module in (
        "layers.{}.mlp.down_proj",
        "layers.01.mlp.down_proj",
        "layers.0.input_layernorm",
        "lm_head",
    ):
        assert not LLAMA.weights_for_module(f"model.{module}")
    for name in ("blk.{}.attn_q.weight", "blk.00.attn_q.weight", "blk.1.attn_q", "blk.1.blk.1.attn_q.weight"):
        assert LLAMA.weight_kind(name) is None and LLAMA.module_for_weight(name) is None


# ---- graphs ----------------------------------------------------------------


@pytest.mark.parametrize("name", [BIAS, "blk.1.ffn_down.bias", "blk.0.attn_k.weight"])
def test_gradients(h: Hyperparameters, name: str) -> None:
    arrays = {key: array.astype(np.float64) for key, array in weights(h).items()}
    _, grads = loss_of(h, arrays, 7)
    way, step = np.random.default_rng(2).standard_normal(arrays[name].shape), 1e-5
    ahead, behind = (loss_of(h, arrays | {name: arrays[name] + sign * step * way}, 7)[0] for sign in (1, -1))
    assert np.vdot(grads[name], way) == pytest.approx((ahead - behind) / (2 * step), rel=1e-5)


def test_decoding_goes_on_from_its_cache(h: Hyperparameters) -> None:
    arrays, ids = weights(h), tokens(20)
    whole = Decoder(h, arrays, ctx=32).feed(ids).copy()
    parts = Decoder(h, arrays, ctx=32)
    for token in ids:
        last = parts.feed([token])
    np.testing.assert_allclose(last, whole, rtol=0, atol=1e-4)
    without = Decoder(h, arrays | {BIAS: np.zeros_like(arrays[BIAS])}, ctx=32).feed(ids)
    pairs = Decoder(replace(h, architecture=replace(h.architecture, rotation="pairs")), arrays, ctx=32).feed(
        ids
    )
    assert np.abs(without - whole).max() > 0.1 and np.abs(pairs - whole).max() > 0.1
