"""Converts the tokenizer in a folder of transformers to the keys `tokenizer.*` of a GGUF file.

The keys are those of llama.cpp's converter, with one exception: where a tokenizer.json has merges in place
of SentencePiece's scores, the scores here follow the order of the merges, so the tokens are those of
transformers. llama.cpp's converter gives all tokens the same score there.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamatrain.data.tokenizer.vocabulary import KEY, parse_byte
from llamatrain.errors import FileError
from llamatrain.gguf.constants import TokenType
from llamatrain.gguf.values import Kind, Value, boolean, numbers, string, strings
from llamatrain.importing.gguf_package import collect_values
from llamatrain.importing.pre_tokenizers import (
    CHECK_TEXT,
    find_pre_tokenizer_names,
    name_by_tokens,
    unknown_pre_tokenizer,
)
from llamatrain.importing.sentencepiece import Piece, Pieces, read_pieces
from llamatrain.importing.tokenizer_files import (
    AddedToken,
    TokenizerFiles,
    check_kind,
    read_object,
    read_tokenizer_files,
)

if TYPE_CHECKING:
    from gguf.vocab import SpecialVocab

ADDED_SCORE = -1000.0
UNUSED_SCORE = -10000.0
LOOK_SPECIAL = {"<pad>", "<mask>", "<2mass>", "[@BOS@]"}
MARKS = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
SHOWN_BY_GEMMA4 = {
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
}
LITERAL = ("phi3", "internlm2")  # added tokens keep their kind, whatever they look like
WITHOUT_SPACE = ("gemma", "gemma2", "gemma3", "gemma3n", "gemma-embedding")
WITHOUT_BEGIN = 49152  # tokens of Granite's and SmolLM's vocabulary, which has no begin token
# Tokens by key that these architectures name in code, not in their files.
NAMED = {
    "glm4": {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>"},
    "glm4moe": {"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"},
    "internlm2": {"eos": "<|im_end|>"},
}
CODE_OF_GEMMA = {"prefix": 67, "suffix": 69, "middle": 68, "eot": 107}


def tokenizer_metadata(folder: Path, arch: str, vocab_size: int) -> dict[str, Value]:
    """Return the keys of the tokenizer for a model whose embeddings have `vocab_size` rows."""
    try:
        return convert_files(folder, arch, vocab_size)
    except UnicodeEncodeError:
        raise FileError(
            f"{folder}: a text of the tokenizer has half a character (a surrogate); download its files again",
            code="bad-tokenizer",
        ) from None
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
        AssertionError,
        RecursionError,
    ) as error:  # the gguf package reads these files without checking what is in them
        raise FileError(
            f"{folder}: the tokenizer's files do not fit together ({str(error)[:100]}); download them again",
            code="bad-tokenizer",
        ) from error


def convert_files(folder: Path, arch: str, vocab_size: int) -> dict[str, Value]:
    """Return the keys of the tokenizer; what is wrong in its files may raise errors of any kind."""
    files = read_tokenizer_files(folder)
    special = read_special(files, arch, vocab_size)
    if (path := folder / "tokenizer.model").exists() and arch != "gemma4":
        special.merges = []
        return scored(read_pieces(path), files, arch, vocab_size) | special_values(special)
    tokens = read_tokens(files)
    if files.model.get("byte_fallback") is True:
        return with_merges(tokens, files, special, arch, vocab_size)
    return byte_level(tokens, files, special, vocab_size)


# ---- SentencePiece -------------------------------------------------------------


def scored(found: Pieces, files: TokenizerFiles, arch: str, vocab_size: int) -> dict[str, Value]:
    """Return the keys of a vocabulary whose merges are chosen by scores."""
    literal = arch in LITERAL
    rows = [Piece(f"[PAD{i}]", UNUSED_SCORE, TokenType.UNUSED) for i in range(vocab_size)]
    pieces = found.pieces[:vocab_size]
    rows[: len(pieces)] = pieces
    if arch == "internlm2":
        rows = [_of_internlm(row) for row in rows]
    for text, number in read_object(files.folder / "added_tokens.json").items():
        check_kind(isinstance(number, int), files.folder / "added_tokens.json", "the number of a token")
        if 0 <= number < vocab_size:
            rows[number] = Piece(text, ADDED_SCORE, TokenType.USER_DEFINED)
    in_config = files.config.get("added_tokens_decoder", {})
    for number, added in files.added.items():
        if number < vocab_size and (literal or str(number) in in_config):
            text, kind = (added.text, _literal_kind(added)) if literal else _added_kind(added)
            rows[number] = Piece(text, ADDED_SCORE, kind)
    values = {"model": string("llama"), "pre": string("default"), **_columns(rows)}
    prefix = files.config.get("add_prefix_space")
    if arch == "internlm2":
        values["add_space_prefix"] = boolean(found.space_prefix)
    elif arch in WITHOUT_SPACE:
        values["add_space_prefix"] = boolean(False)
    elif isinstance(prefix, bool):
        values["add_space_prefix"] = boolean(prefix)
    return {KEY + name: value for name, value in values.items()}


def _of_internlm(row: Piece) -> Piece:
    """Return a piece as llama.cpp wants InternLM's: the character 0 would end a text in C."""
    text = "🐉" if row.text == "\0" else row.text
    return Piece(text, row.score, TokenType.UNUSED if text.startswith("[UNUSED") else row.kind)


def _columns(rows: Sequence[Piece]) -> dict[str, Value]:
    return {
        "tokens": strings(row.text for row in rows),
        "scores": numbers(Kind.FLOAT32, [row.score for row in rows]),
        "token_type": numbers(Kind.INT32, [int(row.kind) for row in rows]),
    }


# ---- tokenizer.json ------------------------------------------------------------


def read_tokens(files: TokenizerFiles) -> dict[int, str]:
    """Return the tokens of tokenizer.json by their numbers, without the added ones."""
    path = files.folder / "tokenizer.json"
    if not files.tokenizer:
        others = (
            "tokenizer.model" if not (files.folder / "tekken.json").exists() else "the one of transformers"
        )
        raise FileError(
            f"{files.folder}: there is no tokenizer that can be converted; tokenizer.json or {others} is needed",
            code="no-tokenizer",
        )
    if files.model.get("type", "BPE") != "BPE":
        raise FileError(
            f"{path}: a tokenizer of type {str(files.model['type'])[:40]!r} cannot be converted; BPE can",
            code="unsupported-vocabulary",
        )
    vocab: Any = files.model.get("vocab")
    check_kind(isinstance(vocab, dict), path, "vocab")
    check_kind(all(isinstance(number, int) and number >= 0 for number in vocab.values()), path, "vocab")
    return {number: text for text, number in vocab.items()}


def byte_level(
    tokens: Mapping[int, str], files: TokenizerFiles, special: "SpecialVocab", vocab_size: int
) -> dict[str, Value]:
    """Return the keys of a vocabulary whose tokens are bytes, written as letters."""
    rows = []
    for number in range(vocab_size):
        text = files.added[number].text if number in files.added else tokens.get(number)
        if text is None:
            rows.append((f"[PAD{number}]", TokenType.UNUSED))
        elif number in files.added or text in files.special:
            added = AddedToken(
                text=text,
                special=text in files.special or (number in files.added and files.added[number].special),
            )
            rows.append(_added_kind(added))
        else:
            rows.append((text, TokenType.NORMAL))
    values = {
        KEY + "model": string("gpt2"),
        KEY + "tokens": strings(text for text, _ in rows),
        KEY + "token_type": numbers(Kind.INT32, [int(kind) for _, kind in rows]),
        KEY + "merges": strings(()),  # of a vocabulary of bytes alone
        **special_values(special),
    }
    if vocab_size == WITHOUT_BEGIN:
        values[KEY + "add_bos_token"] = boolean(False)
    return values | {KEY + "pre": string(name_pre_tokenizer(files, special, values))}


def name_pre_tokenizer(files: TokenizerFiles, special: "SpecialVocab", values: Mapping[str, Value]) -> str:
    """Return the value of `tokenizer.ggml.pre`."""
    from llamatrain.data.tokenizer.pretokenizers import PRE_TOKENIZERS
    from llamatrain.data.tokenizer.tokenizer import load

    names = find_pre_tokenizer_names(files)
    metadata = {key: value.decode() for key, value in values.items()}
    added = {name: special.add_special_token.get(name, False) for name in ("bos", "eos")}
    ends = [
        [special.special_token_ids[name]] if added[name] and name in special.special_token_ids else []
        for name in added
    ]
    for pre in {PRE_TOKENIZERS[name]: name for name in reversed(names or [*PRE_TOKENIZERS])}.values():
        if PRE_TOKENIZERS[pre].characters:
            continue
        tokenizer = load(metadata | {KEY + "pre": pre}, files.folder)
        ids = tokenizer.encode(CHECK_TEXT, start=False).tolist()
        if (name := name_by_tokens(ends[0] + ids + ends[1])) is not None:
            return name
    if not names:
        raise unknown_pre_tokenizer(files)
    return names[0]


def with_merges(
    tokens: Mapping[int, str], files: TokenizerFiles, special: "SpecialVocab", arch: str, vocab_size: int
) -> dict[str, Value]:
    """Return the keys of a vocabulary of characters, in which bytes are written as <0x0A>."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(special.merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    if arch != "gemma4":
        special.merges = []
    rows = []
    for number in range(vocab_size):
        text = tokens.get(number)
        added = files.added.get(number)
        if text is not None:
            kind = TokenType.CONTROL if text in files.special else TokenType.NORMAL
            kind = TokenType.BYTE if parse_byte(text) is not None else kind
        elif added is not None:
            text = added.text
            kind = TokenType.CONTROL if text in files.special else TokenType.USER_DEFINED
        else:
            text, kind = f"[PAD{number}]", TokenType.UNUSED
        score = -float(ranks[text]) if text in ranks and arch != "gemma4" else ADDED_SCORE
        shown = arch == "gemma4" and text in SHOWN_BY_GEMMA4
        rows.append(Piece(text, score, TokenType.USER_DEFINED if shown else kind))
    values = {KEY + name: value for name, value in _columns(rows).items()} | special_values(special)
    if arch == "gemma4":
        more = {"model": string("gemma4"), "add_space_prefix": boolean(False), "add_bos_token": boolean(True)}
    else:
        more = {"model": string("llama"), "pre": string("default")}
        if isinstance(prefix := files.config.get("add_prefix_space"), bool):
            more["add_space_prefix"] = boolean(prefix)
    return values | {KEY + name: value for name, value in more.items()}


# ---- added and special tokens --------------------------------------------------


def looks_special(text: str) -> bool:
    """Return True if a token is no text, although its file does not say so."""
    return text in LOOK_SPECIAL or any(
        text.startswith(first) and text.endswith(last) for first, last in MARKS
    )


def _added_kind(added: AddedToken) -> tuple[str, TokenType]:
    if added.special or looks_special(added.text):
        return added.text, TokenType.CONTROL
    return added.text.replace("▁", " "), TokenType.USER_DEFINED


def _literal_kind(added: AddedToken) -> TokenType:
    return TokenType.CONTROL if added.special else TokenType.USER_DEFINED


def read_special(files: TokenizerFiles, arch: str, vocab_size: int) -> "SpecialVocab":
    """Read merges, special tokens and chat templates as the `gguf` package does for llama.cpp."""
    import gguf

    logging.getLogger("gguf.vocab").setLevel(logging.ERROR)
    special = gguf.SpecialVocab(files.folder, load_merges=True, n_vocab=vocab_size)
    after = files.tokenizer.get("post_processor") or {}
    if "ByteLevel" in (each.get("type") for each in after.get("processors", [after])):
        special.add_special_token = {"bos": False, "eos": False} | special.add_special_token
    ids = {added.text: number for number, added in files.added.items() if number < vocab_size}
    for key, text in NAMED.get(arch, {}).items():
        if text in ids:
            special.special_token_ids[key] = ids[text]
    if arch == "gemma":
        special.special_token_ids |= CODE_OF_GEMMA
    return special


def special_values(special: "SpecialVocab") -> dict[str, Value]:
    """Return the keys of merges, special tokens and chat templates."""
    import gguf

    writer = gguf.GGUFWriter("", "")
    special.add_to_gguf(writer, quiet=True)
    return collect_values(writer, "tokenizer.")
