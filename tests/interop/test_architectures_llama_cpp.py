"""Small models of every architecture in llama.cpp itself: logits behind a prompt and behind what follows it, and greedy text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, quants

from llamatrain.gguf.reader import open_gguf
from llamatrain.kernels.reference import KERNELS, gates
from llamatrain.model.architectures import smollm3
from llamatrain.sample.decoder import Decoder, Generation
from llamatrain.sample.options import SamplingOptions
from tests.helpers.architecture_family import CONTROL, CTX, VOCABULARY, Shape
from tests.helpers.architecture_models import (
    CASES,
    Arrays,
    keys,
    prompt,
    rows,
    shape_of,
    weights,
    wide,
    written,
)
from tests.helpers.architectures import FAMILIES
from tests.helpers.cli import ran
from tests.helpers.llama_cpp import Served, served
from tests.helpers.small_models import loaded

LETTERS = range(
    CONTROL + 0x21, CONTROL + 0x7F
)  # of others a server tells no probabilities: they end a text, or a part
MORE = 16
TEXT, TEXT_CTX = 100, 160  # tokens of a text, and of the context that it needs with its prompt
LAST_NORMS = ("output_norm.weight", "token_embd_norm.weight")


def letters(server: Served, ids: list[int], count: int = MORE, **more: Any) -> tuple[list[int], np.ndarray]:
    """The likeliest letters behind a prompt, and the logarithms of all probabilities before each: (letters, vocabulary)."""
    unwanted = [[token, False] for token in range(VOCABULARY) if token not in LETTERS]
    asked = {
        "prompt": ids,
        "n_predict": count,
        "temperature": 0.0,
        "n_probs": VOCABULARY,
        "logit_bias": unwanted,
    }
    told = server.post("completion", return_tokens=True, **asked, **more)
    found = np.full((count, VOCABULARY), np.nan)
    for row, each in zip(found, told["completion_probabilities"], strict=True):
        for one in each["top_logprobs"]:
            row[one["id"]] = one["logprob"]
    return told["tokens"], found


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def said(decoder: Decoder, ids: list[int], follow: list[int]) -> np.ndarray:
    """The same of ours, where this follows."""
    return log_softmax(
        np.array([decoder.feed(ids).copy(), *(decoder.feed([token]).copy() for token in follow[:-1])])
    )


def likeliest(found: np.ndarray) -> list[int]:
    return [LETTERS[0] + int(row[LETTERS[0] : LETTERS[-1] + 1].argmax()) for row in found]


def varied(shape: Shape) -> Arrays:
    """Weights of a model that does not repeat the last token, as tied random embeddings would."""
    arrays = weights(shape)
    signs = np.random.default_rng(5).choice(np.array([-1, 1], np.float32), shape.embd)
    if shape.tied:
        arrays |= {name: arrays[name] * signs for name in LAST_NORMS if name in arrays}
    return arrays


def gaps(found: np.ndarray, tokens: list[int], among: range = range(VOCABULARY)) -> np.ndarray:
    """Return how much likelier than each token the likeliest is; 0 if it is this token."""
    return found[:, list(among)].max(1) - found[np.arange(len(tokens)), tokens]


def tolerance(arch: str) -> tuple[float, float]:
    """Return how much logits may be off, and how much less likely than another a token of llama.cpp's may be.

    A gelu of half floats is off by 6e-3 at most in 100 rows of logits.
    """
    return (8e-3, 8e-3) if FAMILIES[arch].half_float_gelu else (1e-4, 0.0)


def same_text(decoder: Decoder, server: Served, arch: str) -> None:
    """Compare a text of letters, and all logits before each."""
    (limit, tie), ids = tolerance(arch), prompt()
    follow, expected = letters(server, ids, TEXT)
    found = said(decoder, ids, follow)
    assert np.abs(found - expected).max() <= limit and found.std() > 0.5
    assert gaps(found, follow, LETTERS).max() <= tie
    decoder.reset()


@pytest.mark.llama_cpp
@pytest.mark.parametrize(("arch", "name"), CASES)
def test_logits_and_greedy_text(arch: str, name: str, tmp_path: Path) -> None:
    shape = replace(FAMILIES[arch].llama_cpp_shape(shape_of(arch, name)), ctx=TEXT_CTX)
    path, ids = written(tmp_path / "model.gguf", shape, varied(shape)), prompt()
    decoder = Decoder(*loaded(open_gguf(path)), ctx=TEXT_CTX)
    with served(path, ctx=TEXT_CTX) as server:
        same_text(decoder, server, arch)
        asked = {"prompt": ids, "n_predict": TEXT, "temperature": 0.0, "return_tokens": True}
        whatever = server.post("completion", **asked)["tokens"]  # shorter if it ends
    tie = tolerance(arch)[1]
    assert whatever and gaps(said(decoder, ids, whatever), whatever).max() <= tie
    if not tie:
        assert list(Generation(decoder, ids, SamplingOptions(n=len(whatever), temp=0))) == whatever


@pytest.mark.llama_cpp
@pytest.mark.parametrize(
    ("arch", "name"), [(arch, name) for arch, name in CASES if FAMILIES[arch].half_float_gelu]
)
def test_gelu_of_half_floats(arch: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp looks up gelu in a table of half floats, which alone is off by more than is asked; with such a table so are we."""
    shape, ids = shape_of(arch, name), prompt()
    path = written(tmp_path / "model.gguf", shape, weights(shape))
    with served(path) as server:
        follow, expected = letters(server, ids)
    h, arrays = loaded(open_gguf(path))
    assert np.abs(said(Decoder(h, arrays, ctx=CTX), ids, follow) - expected).max() <= 5e-3
    rounded = in_half_floats(gates.gelu)
    monkeypatch.setattr(gates, "gelu", rounded)
    monkeypatch.setitem(KERNELS, "gelu", rounded)
    off = np.abs(said(Decoder(h, arrays, ctx=CTX, kernels="reference"), ids, follow) - expected)
    assert (
        off.max() <= 2e-3 and off.mean() <= FAMILIES[arch].gelu_error
    )  # where a sum falls on the other side of such a float, it is off a little


@pytest.mark.llama_cpp
@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
@pytest.mark.parametrize(("arch", "name"), CASES)
def test_greedy_text_of_quantized_files(arch: str, name: str, kind: str, tmp_path: Path) -> None:
    """With the file's weights in float32, llama.cpp has our logits and says what we say.

    With the file itself it rounds to eight bits what it multiplies by them, which has been seen to move logits by 2.4 % of their
    deviation (q8_0) and 3.9 % (q4_k) on average. Of 100 tokens, 2 or 3 are then others, and 9 at most; ours was the likelier one by
    less than six times that average. Rounding may choose another expert, which moves the logits of that token by more.
    """
    shape = replace(FAMILIES[arch].llama_cpp_shape(wide(arch, name)), ctx=TEXT_CTX)
    base, model = written(tmp_path / "base.gguf", shape, varied(shape)), tmp_path / "model.gguf"
    ran("export-lora", base, "--type", kind, "--out", model)
    types = {each.type.name for each in open_gguf(model).tensors.values() if len(each.shape) == 2}
    assert kind.upper() in types
    decoder = Decoder(*loaded(open_gguf(model)), ctx=TEXT_CTX)
    with served(unpacked(model, shape), ctx=TEXT_CTX) as server:
        same_text(decoder, server, arch)
    with served(model, ctx=TEXT_CTX) as server:
        follow, expected = letters(server, prompt(), TEXT)
    found = said(decoder, prompt(), follow)
    off, ties = np.abs(found - expected).mean(), gaps(found, follow, LETTERS)
    assert off <= (0.035 if kind == "q8_0" else 0.05) * found.std()
    assert np.count_nonzero(ties) <= 12 and ties.max() <= (60 if hasattr(shape, "experts") else 8) * off


def unpacked(path: Path, shape: Shape) -> Path:
    """The same file with all its weights in float32, by gguf's own code."""
    found = {
        tensor.name: quants.dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(path).tensors
    }
    return written(path.with_name("unpacked.gguf"), shape, {name: found[name] for name in rows(shape)})


def in_half_floats(gelu: Any) -> Any:
    def rounded(x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            inside = gelu(x.astype(np.float16).astype(np.float32)).astype(np.float16).astype(np.float32)
        return np.where(np.abs(x) < 10, inside, np.maximum(x, 0))

    return rounded


@pytest.mark.llama_cpp
@pytest.mark.parametrize("arch", [arch for arch, family in FAMILIES.items() if family.shifts_context])
def test_text_goes_on_behind_the_context_in_the_same_way(arch: str, tmp_path: Path) -> None:
    """Each block's keys turn back by its own rotation.

    llama.cpp makes phi3's longer at that, as if they were not so already, and turns those of smollm3's blocks that never turn.
    """
    shape, ids = shape_of(arch, "a"), prompt(9)
    known = {key: value for key, value in keys(shape).items() if key != "rope.scaling.attn_factor"}
    path = written(tmp_path / "model.gguf", shape, weights(shape), known)
    with served(path, ctx_shift=True) as server:
        follow, expected = letters(server, ids, 80, n_keep=4)
    decoder = Decoder(*loaded(open_gguf(path)), ctx=CTX)
    found = [decoder.feed(ids).copy()]
    for token in follow[:-1]:
        if decoder.position == CTX - 1:
            assert decoder.shift_context(5)
        found.append(decoder.feed([token]).copy())
    off = np.abs(log_softmax(np.array(found)) - expected).max(1)
    assert off.max() <= (2e-2 if FAMILIES[arch].half_float_gelu else 1e-4), off


@pytest.mark.parametrize(
    ("arch", "still"),
    [
        *((arch, False) for arch, family in FAMILIES.items() if family.exact_shift),
        ("smollm3", True),
        ("gemma3", True),
    ],
)
def test_what_is_left_is_as_if_it_had_always_stood_there(
    arch: str, still: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one block, whose keys and values know of no other tokens; or one that never turns, or is global."""
    if still:
        monkeypatch.setattr(smollm3, "NO_ROPE_EVERY", 1)
    shape, ids = replace(shape_of(arch, "a"), layers=1), prompt(60)
    more = {"attention.sliding_window_pattern": 1} if still and arch == "gemma3" else {}
    h, arrays = loaded(open_gguf(written(tmp_path / "model.gguf", shape, weights(shape), keys(shape) | more)))
    decoder, fresh = (Decoder(h, arrays, ctx=CTX) for _ in range(2))
    decoder.feed(ids[:55])
    assert decoder.shift_context(5) and decoder.position == 30
    fresh.feed([*ids[:5], *ids[30:55]])
    for token in ids[55:]:
        assert decoder.feed([token]).copy() == pytest.approx(fresh.feed([token]).copy(), abs=1e-4)
