"""Tokenizers of transformers become those of GGUF files; beside llama.cpp's converter where it is there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.data.tokenizer.bpe_tables import ALPHABET
from llamatrain.data.tokenizer.tokenizer import Tokenizer, load
from llamatrain.errors import FileError
from llamatrain.gguf.constants import TokenType
from llamatrain.gguf.reader import open_gguf
from llamatrain.importing.pre_tokenizers import expressions_of, find_pre_tokenizer_names
from llamatrain.importing.tokenizer import tokenizer_metadata
from llamatrain.importing.tokenizer_files import TokenizerFiles, read_tokenizer_files
from tests.helpers.errors import raises
from tests.helpers.llama_cpp_converter import convert_folder, needs_converter
from tests.helpers.test_data import material
from tests.helpers.tokenizer_folders import (
    LLAMA3_SPLIT,
    begins_with,
    bpe,
    byte_level,
    config,
    flag,
    sentencepiece,
    split,
    write_json,
)

PREFIX = "tokenizer.ggml."


def found(folder: Path, size: int, arch: str = "llama") -> dict[str, Any]:
    return {key: value.decode() for key, value in tokenizer_metadata(folder, arch, size).items()}


def real(name: str) -> dict[str, Any]:
    return dict(open_gguf(material(f"vocab/ggml-vocab-{name}.gguf")).metadata)


def normal(vocab: dict[str, Any]) -> dict[str, int]:
    rows = zip(vocab[PREFIX + "tokens"], vocab[PREFIX + "token_type"], strict=True)
    return {text: number for number, (text, kind) in enumerate(rows) if kind == TokenType.NORMAL}


def special(vocab: dict[str, Any]) -> dict[str, int]:
    rows = zip(vocab[PREFIX + "tokens"], vocab[PREFIX + "token_type"], strict=True)
    return {text: number for number, (text, kind) in enumerate(rows) if kind == TokenType.CONTROL}


def llama3_folder(place: Path) -> tuple[Path, dict[str, Any]]:
    vocab = real("llama-bpe")
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    added = special(vocab)
    more = {"pre_tokenizer": split(LLAMA3_SPLIT), "post_processor": begins_with(begin, added[begin])}
    whole = {"ignore_merges": True}
    tokenizer = bpe(normal(vocab), vocab[PREFIX + "merges"], added, model=whole, **more)
    about = {"bos_token": begin, "eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    sizes = config(len(vocab[PREFIX + "tokens"]) + 8, bos_token_id=added[begin], eos_token_id=added[end])
    return write_json(place, tokenizer=tokenizer, tokenizer_config=about, config=sizes), vocab


def gpt2_folder(place: Path) -> tuple[Path, dict[str, Any]]:
    vocab = real("gpt-2")
    end = "<|endoftext|>"
    tokenizer = bpe(normal(vocab), vocab[PREFIX + "merges"], special(vocab), post_processor=byte_level())
    about = {"bos_token": end, "eos_token": end, "chat_template": "{{ messages }}"}
    sizes = config(len(vocab[PREFIX + "tokens"]), bos_token_id=50256, eos_token_id=50256)
    return write_json(place, tokenizer=tokenizer, tokenizer_config=about, config=sizes), vocab


def spm_folder(place: Path) -> tuple[Path, dict[str, Any]]:
    vocab = real("llama-spm")
    columns = (vocab[PREFIX + name] for name in ("tokens", "scores", "token_type"))
    raw = sentencepiece((text, float(score), int(kind)) for text, score, kind in zip(*columns, strict=True))
    decoder = {
        "0": {"content": "<unk>", "special": True},
        "1": {"content": "<s>", "special": True},
        "2": {"content": "</s>", "special": True},
        "32000": {"content": "<|im_end|>", "special": False},
        "32001": {"content": "a▁b", "special": False},
    }
    about = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": True,
        "tokenizer_class": "LlamaTokenizer",
        "added_tokens_decoder": decoder,
    }
    sizes = config(32008, bos_token_id=1, eos_token_id=2)
    write_json(place, tokenizer_config=about, config=sizes, added_tokens={"<|im_end|>": 32000, "zz": 32003})
    (place / "tokenizer.model").write_bytes(raw)
    return place, vocab


FOLDERS = {"llama-bpe": llama3_folder, "gpt-2": gpt2_folder, "llama-spm": spm_folder}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_real_vocabulary_comes_back(name: str, tmp_path: Path) -> None:
    folder, vocab = FOLDERS[name](tmp_path)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    values = found(folder, size)
    assert len(values[PREFIX + "tokens"]) == len(values[PREFIX + "token_type"]) == size
    first = 3 if name == "llama-spm" else 0  # special tokens have other scores
    for column in ("tokens", "token_type", "scores" if first else "merges"):
        wanted = list(vocab[PREFIX + column])
        assert list(values[PREFIX + column])[first : len(wanted)] == wanted[first:], column
    assert values[PREFIX + "model"] == vocab[PREFIX + "model"]
    assert values[PREFIX + "pre"] == {"llama-spm": "default"}.get(name, name)
    assert values[PREFIX + "bos_token_id"] == vocab[PREFIX + "bos_token_id"]


def test_added_tokens_and_padding(tmp_path: Path) -> None:
    values = found(spm_folder(tmp_path)[0], 32008)
    tokens, kinds = values[PREFIX + "tokens"], values[PREFIX + "token_type"]
    rows = [(text, TokenType(kind)) for text, kind in zip(tokens[32000:], kinds[32000:], strict=True)]
    assert rows[:4] == [
        ("<|im_end|>", TokenType.CONTROL),  # it looks special
        ("a b", TokenType.USER_DEFINED),
        ("[PAD32002]", TokenType.UNUSED),
        ("zz", TokenType.USER_DEFINED),
    ]
    literal = found(tmp_path, 32008, "phi3")
    assert literal[PREFIX + "tokens"][32001] == "a▁b"
    assert literal[PREFIX + "token_type"][32000] == TokenType.USER_DEFINED


@needs_converter
@pytest.mark.parametrize("name", FOLDERS)
def test_llama_cpp_converts_it_to_the_same_keys(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder, _ = FOLDERS[name](tmp_path / "folder")
    out = convert_folder(folder, tmp_path / "theirs.gguf", "--vocab-only")
    theirs = {key: each for key, each in open_gguf(out).metadata.items() if key.startswith("tokenizer.")}
    ours = found(folder, json.loads((folder / "config.json").read_text())["vocab_size"])
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert np.array_equal(np.asarray(value), np.asarray(ours[key])), key


def test_merges_in_place_of_scores_give_the_same_tokens(tmp_path: Path) -> None:
    """Without tokenizer.model, there are merges, ordered as the scores of their results."""
    vocab = real("llama-spm")
    rows = list(zip(*(vocab[PREFIX + name] for name in ("tokens", "scores", "token_type")), strict=True))
    texts = {text: number for number, (text, _, _) in enumerate(rows)}
    scores = {text: score for text, score, kind in rows if kind == TokenType.NORMAL}
    pairs = [
        (scores[text], f"{text[:cut]} {text[cut:]}")
        for text in scores
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    merges = [pair for _, pair in sorted(pairs, key=lambda each: -each[0])]
    tokenizer = bpe(texts, merges, {}, model={"byte_fallback": True}, pre_tokenizer=None)
    about = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    sizes = config(32000, bos_token_id=1, eos_token_id=2)
    folder = write_json(tmp_path, tokenizer=tokenizer, tokenizer_config=about, config=sizes)
    mine, theirs = load(found(folder, 32000)), load(vocab)
    lines = material("text/tinyshakespeare.txt").read_text().split("\n")[:1000]
    assert all(encoded(mine, line) == encoded(theirs, line) for line in [*lines, "naïve 😶 ½ \t x"])


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text).tolist())


# ---- pre-tokenizers ----------------------------------------------------------------------------

CASE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CASE}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CASE}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = {"type": "Digits", "individual_digits": True}
CUTS = {
    "llama-bpe": split(LLAMA3_SPLIT),
    "qwen2": split(rf"{CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{END}"),
    "gpt-2": byte_level(),
    "starcoder": {"type": "Sequence", "pretokenizers": [DIGITS, byte_level()]},
    "gpt-4o": split(GPT4O),
    "tekken": split(GPT4O.replace(CASE + "?", "").replace("{1,3}", "")),
}


def small(place: Path, **more: Any) -> TokenizerFiles:
    """A folder with a tokenizer of the bytes alone."""
    vocab = {letter: number for number, letter in enumerate(ALPHABET)}
    tokenizer = bpe(vocab, ["a b"], {"<|end|>": 256}, **more)
    return read_tokenizer_files(write_json(place, tokenizer=tokenizer, config=config(257)))


@pytest.mark.parametrize("name", CUTS)
def test_expressions_decide_the_pre_tokenizer(name: str, tmp_path: Path) -> None:
    whole = {"ignore_merges": name in ("llama-bpe", "tekken")}
    files = small(tmp_path, pre_tokenizer=CUTS[name], model=whole)
    assert name in find_pre_tokenizer_names(files)
    pre = found(tmp_path, 257)[PREFIX + "pre"]
    assert pre == find_pre_tokenizer_names(files)[0]


def test_possessive_marks_change_nothing() -> None:
    ours = expressions_of(split(r"[^\r\n\p{L}\p{N}]?+\p{L}++|\s+"))
    assert ours == [r"[^\r\n\p{L}\p{N}]?\p{L}+"]


def test_an_unknown_expression_is_refused(tmp_path: Path) -> None:
    small(tmp_path, pre_tokenizer=split("[aeiou]+"))
    with raises("unknown-pre-tokenizer", FileError, match="aeiou"):
        found(tmp_path, 257)


# ---- malformed files ---------------------------------------------------------------------------

NO_NUMBER = {"a": "b"}
BROKEN = {
    "no tokenizer": (None, "no-tokenizer"),
    "no JSON": (b"{", "bad-tokenizer"),
    "deep JSON": (b"[" * 100_000, "bad-tokenizer"),
    "a list": (b"[]", "bad-tokenizer"),
    "a model that is a list": (b'{"model": []}', "bad-tokenizer"),
    "WordPiece": (b'{"model": {"type": "WordPiece", "vocab": {}}}', "unsupported-vocabulary"),
    "no vocabulary": (b'{"model": {"type": "BPE"}}', "bad-tokenizer"),
    "a vocabulary without numbers": (json.dumps({"model": {"vocab": NO_NUMBER}}).encode(), "bad-tokenizer"),
    "merges of numbers": (b'{"model": {"vocab": {}, "merges": [1]}}', "bad-tokenizer"),
    "an added token without text": (b'{"model": {}, "added_tokens": [{"id": 1}]}', "bad-tokenizer"),
    "an added token without number": (b'{"model": {}, "added_tokens": [{"content": "a"}]}', "bad-tokenizer"),
    "added tokens that are none": (b'{"model": {}, "added_tokens": 1}', "bad-tokenizer"),
    "cuts that are none": (
        b'{"model": {"vocab": {}, "merges": ["a b"]}, "pre_tokenizer": 1}',
        "bad-tokenizer",
    ),
    "half a character": (
        b'{"model": {"vocab": {"\\ud800": 0}, "byte_fallback": true}}',
        "bad-tokenizer",
    ),
    "a post-processor that is none": (b'{"model": {"vocab": {}}, "post_processor": 1}', "bad-tokenizer"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_json(kind: str, tmp_path: Path) -> None:
    raw, code = BROKEN[kind]
    if raw is not None:
        (tmp_path / "tokenizer.json").write_bytes(raw)
    with raises(code, FileError, match=str(tmp_path)):
        found(tmp_path, 4)


@pytest.mark.parametrize("template", [[1.5], [{"name": 1, "template": "x"}], "\ud800"])
def test_broken_chat_templates(template: Any, tmp_path: Path) -> None:
    small(tmp_path)
    write_json(tmp_path, tokenizer_config={"chat_template": template})
    with raises("bad-tokenizer", FileError, match="download"):
        found(tmp_path, 257)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        sentencepiece([("a", 1.0, 1)])[:5],
        flag(1, 3),
        b"\x0a\x03\x0a\x01\xff",
        b"\x0a\x02\x18\x01",  # a piece without a text
    ],
)
def test_broken_sentencepiece(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(raw)
    with raises("bad-tokenizer", FileError, match="tokenizer.model"):
        found(tmp_path, 4)


def test_numbers_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    added = {"added_tokens_decoder": {"9999999": {"content": "x", "special": True}}}
    write_json(tmp_path, tokenizer_config=added, added_tokens={"y": 1 << 40, "z": -1})
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece([("a", -1.0, 1), ("b", -2.0, 1)]))
    assert found(tmp_path, 3)[PREFIX + "tokens"] == ["a", "b", "[PAD2]"]
    assert found(tmp_path, 1)[PREFIX + "tokens"] == ["a"]
