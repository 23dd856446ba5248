"""The same model files in llama.cpp itself: logits, and greedy text."""

import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from llamatrain.cli.main import app
from llamatrain.data.tokenizer import load as load_tokenizer
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import Value, f32, u32
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.layers import BIASES
from llamatrain.model.rope import Rope
from llamatrain.sample.decoder import Decoder, Generation
from llamatrain.sample.options import SamplingOptions
from tests.helpers.llama_cpp import served
from tests.helpers.small_models import LLAMA, loaded, small, tokens, weights, written

pytestmark = pytest.mark.llama_cpp

FACTORS = np.linspace(1, 8, 8).astype(np.float32)
YARN = Rope(16, kind="yarn", factor=4.0, original_ctx=16)
OPTIONAL = frozenset(name for name, kind in LLAMA.weights.items() if kind.optional)
Case = tuple[Hyperparameters, dict[str, Value]]
CASES: dict[str, Case] = {
    "grouped": (small(), {}),
    "all heads, tied": (small(kv_heads=4, tied=True), {}),
    "heads of 48": (small(heads=2, kv_heads=1, head_size=48), {}),
    "heads of 80": (small(embd=160, heads=2, kv_heads=2, head_size=80), {}),
    "base, longer, another epsilon": (small(rope=Rope(16, base=500000.0, length=1.3), rms_eps=1e-2), {}),
    "biases": (small(optional_weights=OPTIONAL), {}),
    "biases behind queries, keys and values alone": (small(optional_weights=frozenset(BIASES)), {}),
    "linear": (small(rope=Rope(16, kind="linear", factor=4.0, length=1.2)), {}),
    "linear, as old files have it": (small(), {"llama.rope.scale_linear": f32(2.0)}),
    "factors": (small(rope=Rope(16, base=500000.0, factors=FACTORS)), {}),
    "yarn": (small(rope=YARN), {}),
    "yarn, longer": (small(rope=Rope(16, kind="yarn", factor=4.0, original_ctx=16, length=1.3)), {}),
    "yarn that shortens": (small(rope=Rope(16, kind="yarn", factor=0.5, original_ctx=32)), {}),
    "yarn with factors": (
        small(rope=Rope(16, kind="yarn", factor=3.0, original_ctx=16, factors=FACTORS)),
        {},
    ),
    # llama.cpp reads these of other models only
    "yarn, other ramp": (
        small(rope=YARN),
        {
            f"llama.rope.scaling.yarn_{key}": f32(value)
            for key, value in (("beta_fast", 4), ("beta_slow", 0.5), ("ext_factor", 0.5))
        },
    ),
    "yarn, other lengths": (
        small(rope=YARN),
        {
            f"llama.rope.scaling.yarn_{key}": f32(value)
            for key, value in (("attn_factor", 1.4), ("log_multiplier", 0.1))
        },
    ),
    "yarn, no original context": (
        small(ctx=32, rope=Rope(16, kind="yarn", factor=2.0, original_ctx=32)),
        {"llama.context_length": u32(32)},
    ),
}
PROMPT = tokens(40)


def model(name: str, folder: Path) -> tuple[Path, Decoder]:
    h, more = CASES[name]
    path = written(folder / "model.gguf", h, weights(h), more=more)
    h, arrays = loaded(open_gguf(path))
    return path, Decoder(h, arrays, ctx=64, threads=2)


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    path, decoder = model(name, tmp_path)
    unset = {f"yarn_{key}": -1.0 for key in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")}
    witness = llama_cpp.Llama(
        os.fspath(path), n_ctx=64, logits_all=True, type_k=0, type_v=0, n_threads=1, verbose=False, **unset
    )
    witness.eval(PROMPT)
    expected = np.array(witness.scores[: len(PROMPT)])
    witness.close()
    found = np.array([decoder.feed([token]).copy() for token in PROMPT])
    assert np.abs(found - expected).max() <= 2e-3 and found.std() > 0.5
    assert found.argmax(1).tolist() == expected.argmax(1).tolist()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


@pytest.mark.parametrize(
    "name",
    ["grouped", "heads of 48", "biases", "linear", "factors", "yarn", "yarn, longer", "yarn, other ramp"],
)
def test_greedy_text(name: str, tmp_path: Path) -> None:
    path, decoder = model(name, tmp_path)
    logits = np.array([decoder.feed([token]).copy() for token in PROMPT])
    tokenizer = load_tokenizer(open_gguf(path).metadata)
    # The server gives no probabilities of a token that ends the text or is a part of a character.
    last = next(
        place for place in range(1, len(PROMPT)) if b"!" <= tokenizer.decode([logits[place].argmax()]) <= b"~"
    )
    with served(path) as server:
        asked = {"prompt": PROMPT[: last + 1], "temperature": 0.0}
        first = server.post("completion", n_predict=1, n_probs=258, **asked)["completion_probabilities"][0][
            "top_logprobs"
        ]
        expected = server.post("completion", n_predict=20, return_tokens=True, **asked)["tokens"]
        text = server.post("completion", prompt="Once upon", n_predict=25, temperature=0.0)["content"]
    assert len(first) == 258
    found = log_softmax(logits[last])
    assert max(abs(found[each["id"]] - each["logprob"]) for each in first) <= 2e-3
    generated = list(Generation(decoder, PROMPT[: last + 1], SamplingOptions(n=20, temp=0)))
    assert expected and generated[: len(expected)] == expected
    assert len(expected) == 20 or generated[len(expected)] == 1 or expected[-1] == 1
    ours = CliRunner().invoke(
        app, ["generate", str(path), "--prompt", "Once upon", "-n", "25", "--temp", "0"]
    )
    assert ours.exit_code == 0
    assert ours.stdout.rstrip("�") == text.rstrip("�")


def test_tokens_without_text(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    h = small(vocab=8, embd=32, heads=8, kv_heads=8, head_size=4, ctx=16, layers=1)
    path = written(tmp_path / "model.gguf", h, weights(h))
    raw = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.type_k, params.type_v, params.flash_attn_type = 256, 0, 0, 0
    context = llama_cpp.llama_init_from_model(raw, params)
    ids = [3, 0, 5, 7, 7]
    given = (llama_cpp.llama_token * len(ids))(*ids)
    assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(given, len(ids))) == 0
    expected = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (8,)).copy()
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(raw)
    found = Decoder(h, weights(h), ctx=16).feed(ids)
    assert np.abs(found - expected).max() <= 2e-3 and found.std() > 0.5
