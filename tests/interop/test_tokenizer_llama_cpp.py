"""The same tokens as llama.cpp itself, on text of all sorts."""

from pathlib import Path

import numpy as np
import pytest

from llamatrain.data.tokenizer import load, new_vocab
from llamatrain.data.tokenizer.pretokenizers import _KNOWN
from llamatrain.gguf.reader import Metadata, open_gguf
from llamatrain.gguf.values import Kind, Value, numbers, string, strings
from tests.data.tokenizer.test_tokenizer import VOCABULARIES
from tests.helpers.llama_cpp import model_with
from tests.helpers.llama_cpp_vocabulary import Opened
from tests.helpers.mixed_text import CODE, Mixer
from tests.helpers.test_data import material
from tests.helpers.tiny_gguf import WIDTH, llama_metadata, llama_tensors, write_arrays

pytestmark = pytest.mark.llama_cpp


def control_texts(vocabulary: dict[str, Value]) -> list[str]:
    metadata = Metadata(vocabulary)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    return [*(tokens[i] for i in np.flatnonzero(kinds == 3)[:40].tolist()), "<unk>"]


def compare(witness: Opened, vocabulary: dict[str, Value], size: int, seed: int = 1) -> None:
    encoder, mixer = load(Metadata(vocabulary)), Mixer(seed, control_texts(vocabulary))
    for done in range(0, size, 50_000):
        text = mixer.text(min(size, 50_000))
        for special in (False, True):
            expected = np.array(witness.tokenize(text.encode(), special=special))
            assert np.array_equal(encoder.encode(text, special=special), expected), (done, special)
    first, last = [encoder.bos] if encoder.add_bos else [], [encoder.eos] if encoder.add_eos else []
    assert [*first, *encoder.encode("a").tolist(), *last] == witness.tokenize(b"a", special=False, ends=True)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_million_characters(name: str, tmp_path: Path) -> None:
    vocabulary = open_gguf(material(f"vocab/ggml-vocab-{name}.gguf")).metadata.raw_values
    with Opened(model_with(vocabulary, tmp_path / "model.gguf")) as witness:
        compare(witness, vocabulary, 1_000_000)


@pytest.fixture(scope="module")
def new() -> dict[str, Value]:
    return new_vocab.learn_vocabulary([CODE, Mixer(3).text(20_000)], 1000)


@pytest.mark.parametrize("names", _KNOWN)
def test_each_pre_tokenizer(names: str, new: dict[str, Value], tmp_path: Path) -> None:
    vocabulary = {**new, "tokenizer.ggml.pre": string(names.split()[0])}
    with Opened(model_with(vocabulary, tmp_path / "model.gguf")) as witness:
        compare(witness, vocabulary, 50_000, 2)


@pytest.mark.parametrize("made", ["learned", "bytes"])
def test_new_vocabularies(made: str, new: dict[str, Value], tmp_path: Path) -> None:
    vocabulary = new if made == "learned" else new_vocab.bytes_vocabulary()
    with Opened(model_with(vocabulary, tmp_path / "model.gguf")) as witness:
        compare(witness, vocabulary, 100_000)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_bytes_that_are_no_text(name: str, tmp_path: Path) -> None:
    vocabulary = open_gguf(material(f"vocab/ggml-vocab-{name}.gguf")).metadata.raw_values
    encoder, mixer = load(Metadata(vocabulary)), Mixer(4, control_texts(vocabulary))
    with Opened(model_with(vocabulary, tmp_path / "model.gguf")) as witness:
        for _ in range(10):
            raw = mixer.broken(50_000)
            for special in (False, True):
                assert encoder.encode(raw, special=special).tolist() == witness.tokenize(raw, special=special)


def test_merges_that_name_no_tokens(tmp_path: Path) -> None:
    tokens = ["", *"abcdefghijklm", "abc", "qrs", "Ġ"]
    vocabulary: dict[str, Value] = {
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string("gpt-2"),
        "tokenizer.ggml.tokens": strings(tokens),
        "tokenizer.ggml.token_type": numbers(Kind.INT32, [1] * len(tokens)),
        "tokenizer.ggml.merges": strings(["a b", "ab z", "q r", "qr s", "nospace", " x y", "a b", "e f"]),
    }
    encoder = load(Metadata(vocabulary))
    with Opened(model_with(vocabulary, tmp_path / "odd.gguf")) as witness:
        for text in (b"abc", b"az", b"abz", b"qrs", b"qr ef", b"\xc4\xa0 ab"):
            assert encoder.encode(text).tolist() == witness.tokenize(text, special=False)


def test_a_vocabulary_without_text_opens(tmp_path: Path) -> None:
    metadata = {key: value for key, value in llama_metadata().items() if not key.startswith("tokenizer.")}
    tensors = llama_tensors()
    tensors["token_embd.weight"] = tensors["output.weight"] = np.zeros((8, WIDTH), np.float32)
    path = write_arrays(tmp_path / "model.gguf", metadata | new_vocab.textless_vocabulary(8), tensors)
    with Opened(path) as witness:
        assert len(witness) == 8
