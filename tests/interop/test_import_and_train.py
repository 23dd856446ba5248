"""A folder of transformers becomes a file that is trained, and that llama.cpp opens: with tokenizer, model and cache."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamatrain.data.tokenizer.tokenizer import load
from llamatrain.gguf.reader import open_gguf
from llamatrain.sample.decoder import Decoder
from tests.helpers.architecture_family import WORDS
from tests.helpers.architecture_torch import model
from tests.helpers.architectures import FAMILIES
from tests.helpers.cli import ran
from tests.helpers.llama_cpp import served
from tests.helpers.small_models import loaded
from tests.helpers.tokenizer_folders import SPECIAL, byte_level_bpe, sentencepiece, write_json
from tests.helpers.transformers_folders import config, state, write_folder
from tests.interop.test_architectures_llama_cpp import TEXT_CTX, same_text, varied

SHAPE = replace(FAMILIES["llama"].shapes["a"], ctx=TEXT_CTX)
BEGIN = WORDS.index("<s>")
TEXT = "A line of text.\nAnd one more, 12 and 3 words!\n" * 20


def sentencepiece_model(folder: Path) -> None:
    """Write a tokenizer.model with the tests' vocabulary."""
    kinds = [2, 3, 3, *[6] * 256]
    raw = sentencepiece((text, 0.0, kind) for text, kind in zip(WORDS, kinds, strict=True))
    (folder / "tokenizer.model").write_bytes(raw)
    write_json(folder, tokenizer_config=SPECIAL | {"add_prefix_space": False, "add_bos_token": True})


TOKENIZERS = {"bytes": byte_level_bpe, "sentencepiece": sentencepiece_model}


@pytest.fixture(params=TOKENIZERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a model and a tokenizer."""
    made = write_folder(tmp_path / "model", config(SHAPE), state(SHAPE, varied(SHAPE)))
    TOKENIZERS[request.param](made)
    return made


@pytest.mark.llama_cpp
def test_llama_cpp_opens_it(folder: Path, tmp_path: Path) -> None:
    opens_alike(folder, tmp_path / "model.gguf")


def opens_alike(folder: Path, out: Path) -> None:
    """Import a folder, and compare tokens, logits and text with llama.cpp's."""
    ran("import", folder, "--out", out, "--type", "f32")
    gguf = open_gguf(out)
    decoder, tokenizer = Decoder(*loaded(gguf), ctx=TEXT_CTX), load(gguf.metadata)
    ids = [*[BEGIN] * tokenizer.add_bos, *tokenizer.encode(TEXT).tolist()]
    with served(out, ctx=TEXT_CTX) as server:
        assert server.tokenize(TEXT, special=False, ends=True) == ids
        same_text(decoder, server, "llama")


@pytest.mark.llama_cpp
@pytest.mark.reference
def test_llama_cpp_opens_what_transformers_saved(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    byte_level_bpe(tmp_path)
    saved = tmp_path / "saved"
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **SPECIAL)
    made.save_pretrained(saved)
    model(SHAPE, varied(SHAPE)).save_pretrained(saved)
    opens_alike(saved, tmp_path / "model.gguf")
    mine = load(open_gguf(tmp_path / "model.gguf").metadata)
    assert mine.encode(TEXT, start=False).tolist() == made.encode(TEXT, add_special_tokens=False)


def test_training_the_folder_is_training_its_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "model.gguf"
    text.write_text(TEXT)
    ran("import", folder, "--out", out)
    trained = [adapter_of(base, text, tmp_path / f"run{number}") for number, base in enumerate((out, folder))]
    assert trained[0].keys() == trained[1].keys()
    for name, array in trained[0].items():
        assert array.any()
        np.testing.assert_array_equal(trained[1][name], array)


def adapter_of(base: Path, text: Path, run: Path) -> dict[str, np.ndarray]:
    """Train a model for three steps, and return its adapter."""
    ran("finetune", base, text, "--iters", 3, "--ctx", 32, "--batch", 2, "--out", run)
    return {name: tensor.raw for name, tensor in open_gguf(run / "adapter.gguf").tensors.items()}
