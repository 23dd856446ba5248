"""Tokenizers of vocabularies in GGUF files, written as transformers would store them."""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llamatrain.data.tokenizer.bpe_tables import ALPHABET
from tests.helpers.architecture_family import CONTROL, WORDS

SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(use_regex: bool = True) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split(expression: str) -> dict[str, Any]:
    """The pre-tokenizer of most models: an expression, then bytes as letters."""
    cut = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, byte_level(use_regex=False)]}


def begins_with(token: str, number: int) -> dict[str, Any]:
    """The post-processor that puts a token before each text."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    a, b = ({"Sequence": {"id": each, "type_id": kind}} for kind, each in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, a],
        "pair": [first, a, {"SpecialToken": {"id": token, "type_id": 1}}, b],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def write_json(folder: Path, **files: Any) -> Path:
    """Write files by the names of their arguments; a folder that is there keeps its other files."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def bpe(
    vocab: Mapping[str, int], merges: Iterable[str], added: Mapping[str, int], **more: Any
) -> dict[str, Any]:
    """The contents of a tokenizer.json."""
    model = {"type": "BPE", "vocab": dict(vocab), "merges": list(merges), "byte_fallback": False}
    model |= more.pop("model", {})
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    listed = [{"id": number, "content": text, **flags} for text, number in added.items()]
    blank = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    given = {"version": "1.0", **blank, "added_tokens": listed, "decoder": byte_level(), "model": model}
    return given | {"pre_tokenizer": byte_level()} | more


def config(size: int, **more: Any) -> dict[str, Any]:
    """The config.json of a small llama with this vocabulary."""
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 128,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size, **sizes} | more


def byte_level_bpe(folder: Path) -> None:
    """Write a tokenizer of bytes with the numbers that the tests' vocabulary has."""
    vocab = {letter: CONTROL + number for number, letter in enumerate(ALPHABET)}
    added = {text: number for number, text in enumerate(WORDS[:CONTROL])}
    write_json(folder, tokenizer=bpe(vocab, [], added), tokenizer_config=SPECIAL)


def sentencepiece(pieces: Iterable[tuple[str, float, int]], space_prefix: bool = True) -> bytes:
    """The bytes of a tokenizer.model with these texts, scores and types."""
    rows = b"".join(
        field(1, field(1, text.encode()) + number(2 << 3 | 5) + struct.pack("<f", score) + flag(3, kind))
        for text, score, kind in pieces
    )
    return rows + field(2, flag(3, 2) + flag(35, 1)) + field(3, flag(3, int(space_prefix)))


def number(value: int) -> bytes:
    """A number as protocol buffers store it: seven bits a byte, the lowest first."""
    low = []
    while value > 127:
        low.append(value & 127 | 128)
        value >>= 7
    return bytes([*low, value])


def field(key: int, raw: bytes) -> bytes:
    return number(key << 3 | 2) + number(len(raw)) + raw


def flag(key: int, value: int) -> bytes:
    return number(key << 3) + number(value)
