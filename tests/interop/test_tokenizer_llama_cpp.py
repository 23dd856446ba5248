"""The same tokens as llama.cpp itself, on text of all sorts."""

from pathlib import Path

import numpy as np
import pytest

from llamatrain.data.tokenizer import load, new_vocab
from llamatrain.data.tokenizer.pretokenizers import _KNOWN, PRE_TOKENIZERS
from llamatrain.gguf.reader import Metadata, open_gguf
from llamatrain.gguf.values import Kind, Value, numbers, string, strings
from tests.data.tokenizer.test_tokenizer import VOCABULARIES
from tests.helpers import model_vocabularies
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
    return new_vocab.learn_vocabulary([CODE, Mixer(3).text(20_000), numerals()], 1300)


def numerals() -> str:
    """Text from which tokens of one to three digits are learned, so that tokens show how digits are grouped."""
    return " ".join(f"{number} {number * 7 % 100} {number % 10}" for number in range(0, 1000, 7)) * 5


@pytest.mark.parametrize("names", _KNOWN)
def test_each_pre_tokenizer(names: str, new: dict[str, Value], tmp_path: Path) -> None:
    text = model_vocabularies.FAMILIES["gemma 4"].vocabulary()
    for size, name in zip([50_000] + [4000] * len(names), names.split(), strict=False):
        base = text if PRE_TOKENIZERS[name].characters else new
        vocabulary = {**base, "tokenizer.ggml.model": string("gpt2"), "tokenizer.ggml.pre": string(name)}
        with Opened(model_with(vocabulary, tmp_path / "model.gguf")) as witness:
            compare(witness, vocabulary, size, 2)


@pytest.mark.parametrize("share", [1, 2])
def test_text_whose_characters_have_no_tokens(share: int, tmp_path: Path) -> None:
    """Nor have some of their bytes: they are left out."""
    vocabulary = model_vocabularies.FAMILIES["gemma 4"].vocabulary()
    metadata = Metadata(vocabulary)
    keep = [i for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind != 6 or i % 2 >= share]
    vocabulary["tokenizer.ggml.tokens"] = strings([metadata["tokenizer.ggml.tokens"][i] for i in keep])
    kinds = [int(metadata["tokenizer.ggml.token_type"][i]) for i in keep]
    vocabulary["tokenizer.ggml.token_type"] = numbers(Kind.INT32, kinds)
    with Opened(model_with(vocabulary, tmp_path / "model.gguf")) as witness:
        compare(witness, vocabulary, 50_000, 5)


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
