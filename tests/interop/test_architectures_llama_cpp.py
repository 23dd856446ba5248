"""Small models of every architecture in llama.cpp itself: logits behind a prompt and behind what follows it, and greedy text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.gguf.reader import open_gguf
from llamatrain.kernels.reference import KERNELS, gates
from llamatrain.model.architectures import smollm3
from llamatrain.sample.decoder import Decoder, Generation
from llamatrain.sample.options import SamplingOptions
from tests.helpers.architecture_family import CONTROL, CTX, VOCABULARY
from tests.helpers.architecture_models import (
    CASES,
    keys,
    prompt,
    shape_of,
    weights,
    written,
)
from tests.helpers.architectures import FAMILIES
from tests.helpers.llama_cpp import Served, served
from tests.helpers.small_models import loaded

LETTERS = range(
    CONTROL + 0x21, CONTROL + 0x7F
)  # of others a server tells no probabilities: they end a text, or a part
MORE = 16


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


@pytest.mark.llama_cpp
@pytest.mark.parametrize(("arch", "name"), CASES)
def test_logits_and_greedy_text(
    arch: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, ids = FAMILIES[arch].llama_cpp_shape(shape_of(arch, name)), prompt()
    path = written(tmp_path / "model.gguf", shape, weights(shape))
    with served(path) as server:
        follow, expected = letters(server, ids)
        whatever = server.post("completion", prompt=ids, n_predict=MORE, temperature=0.0, return_tokens=True)[
            "tokens"
        ]
    h, arrays = loaded(open_gguf(path))
    found = said(Decoder(h, arrays, ctx=CTX), ids, follow)
    assert likeliest(found) == follow and found.std() > 0.5
    made = list(Generation(Decoder(h, arrays, ctx=CTX), ids, SamplingOptions(n=MORE, temp=0)))
    assert whatever and made[: len(whatever)] == whatever
    if not FAMILIES[arch].half_float_gelu:
        assert np.abs(found - expected).max() <= 1e-4
        return
    # llama.cpp looks up gelu in a table of half floats, which alone is off by more than is asked; with such a table so are we.
    assert np.abs(found - expected).max() <= 5e-3
    rounded = in_half_floats(gates.gelu)
    monkeypatch.setattr(gates, "gelu", rounded)
    monkeypatch.setitem(KERNELS, "gelu", rounded)
    off = np.abs(said(Decoder(h, arrays, ctx=CTX, kernels="reference"), ids, follow) - expected)
    assert (
        off.max() <= 2e-3 and off.mean() <= FAMILIES[arch].gelu_error
    )  # where a sum falls on the other side of such a float, it is off a little


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
