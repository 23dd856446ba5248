"""The vocabularies of the models people have: tokens and ends as llama.cpp has them, and texts in pieces as if whole."""

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from llamatrain.data.tokenizer import Tokenizer, load, tokenizer
from llamatrain.gguf.reader import Metadata
from llamatrain.run import sampling
from tests.data.tokenizer.test_tokenizer import chunks
from tests.helpers.llama_cpp import model_with
from tests.helpers.llama_cpp_vocabulary import Opened
from tests.helpers.mixed_text import CODE, Mixer
from tests.helpers.model_vocabularies import (
    FAMILIES,
    TRUTH,
    digest,
    specials,
    text_for,
    without_long_spaces,
)
from tests.helpers.small_models import small

FROZEN = json.loads(TRUTH.read_text())


def read(name: str) -> Tokenizer:
    return load(Metadata(FAMILIES[name].vocabulary()))


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_ends_are_those_that_llama_cpp_was_seen_to_make(name: str) -> None:
    encoder, truth, text = read(name), FROZEN[name], text_for(FAMILIES[name].vocabulary())
    assert hashlib.sha256(text).hexdigest()[:16] == truth["text"], (
        "another text: python -m tests.helpers.model_vocabularies"
    )
    for key, special in (("plain", False), ("special", True)):
        tokens = encoder.encode(text, special=special)
        assert [len(tokens), digest(tokens.tolist())] == truth[key]
    assert sorted(encoder.ends.all) == truth["ends"]


def compare(name: str, folder: Path, size: int) -> None:
    vocabulary = FAMILIES[name].vocabulary()
    encoder, mixer = load(Metadata(vocabulary)), Mixer(1, specials(vocabulary))
    with Opened(model_with(vocabulary, folder / "model.gguf")) as witness:
        for done in range(0, size, 20_000):
            raw = mixer.text(20_000).encode() if done % 100_000 else without_long_spaces(mixer.broken(20_000))
            for special in (False, True):
                expected = np.array(witness.tokenize(raw, special=special))
                assert np.array_equal(encoder.encode(raw, special=special), expected), (done, special)
        assert encoder.ends.all == witness.ends()
        first, last = [encoder.bos] if encoder.add_bos else [], [encoder.eos] if encoder.add_eos else []
        assert [*first, *encoder.encode("a").tolist(), *last] == witness.tokenize(
            b"a", special=False, ends=True
        )


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_ends_are_llama_cpps(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, 60_000)


@pytest.mark.slow
@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", FAMILIES)
def test_a_million_characters_of_each(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, 1_000_000)


# ---- white space that is tokens ---------------------------------------------


@pytest.mark.parametrize("name", ["gemma 3", "gemma 4", "olmo 2", "phi 3", "sarvam"])
@pytest.mark.parametrize("special", [False, True])
def test_a_text_whose_lines_are_tokens_is_cut(
    name: str, special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = read(name)
    lines = "".join(f"{i % 97}{chr(10) * (1 + i % 3)}" for i in range(3000))
    mixed = Mixer(8, specials(FAMILIES[name].vocabulary())).broken(30_000)
    for raw in (lines.encode(), CODE[:30_000].encode(), mixed):
        whole = encoder.encode(raw, special=special)
        for block in (256, 700):
            monkeypatch.setattr(tokenizer, "BLOCK_BYTES", block)
            pieces = list(encoder.encode_large(chunks(raw, 10_000), special=special, threads=2))
            assert np.array_equal(np.concatenate([tokens for _, tokens in pieces]), whole)
            assert len(pieces) > len(raw) / block / 20 or name == "phi 3"  # which strips: few places are sure


def test_thousands_of_special_tokens_cost_little() -> None:
    """Most are looked at where they can begin alone."""
    text = CODE[:40_000]
    took = []
    for count in (10, 6000):
        unused = " ".join(f"<unused{i}>" for i in range(count))
        many = replace(FAMILIES["gemma 3"], control=f"<eos> <bos> {unused}")
        encoder = load(Metadata(many.vocabulary()))
        encoder.encode(text[:100], special=True)
        start = time.process_time()
        encoder.encode(text, special=True)
        took.append(time.process_time() - start)
    assert took[1] < 4 * took[0] + 0.05


# ---- what stops -------------------------------------------------------------


@pytest.mark.parametrize("end", ["<|end|>", "<|endoftext|>", "</s>"])
def test_samples_stop_at_every_end(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the one alone that the file names, which for Phi-3 ends no answer."""
    tokenizer, asked = read("phi 3"), list[set[int]]()

    class Generated(Exception): ...

    def generation(decoder: object, prompt: object, options: object, ends: set[int]) -> None:
        asked.append(ends)
        raise Generated

    monkeypatch.setattr(sampling, "Generation", generation)
    monkeypatch.setattr(sampling.TextSampler, "get_decoder", lambda *_: None)
    shown = sampling.TextSampler(small(), tokenizer, "a", 1, 1, "compiled")
    with pytest.raises(Generated):
        shown.show(1, cast(Any, None), {}, cast(Any, None))
    assert tokenizer.vocabulary.index[end] in asked[0]
