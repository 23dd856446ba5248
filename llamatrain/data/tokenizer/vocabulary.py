"""Reads and checks the vocabulary in a file's metadata, with the defaults and repairs of llama.cpp."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from llamatrain.data.chat.builtin import CHATML
from llamatrain.data.tokenizer.pretokenizers import PreTokenizer, find_pre_tokenizer
from llamatrain.errors import FileError
from llamatrain.gguf.constants import TokenType
from llamatrain.gguf.parser import quote

# ---- tokens known by their texts -------------------------------------------------

ENDS_OF_TURN = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
}
ENDS_OF_TURN |= {"[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"}
ENDS = ENDS_OF_TURN | {
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "<|eom_id|>",
    "[EOS]",
    "<eos>",
    "<turn|>",
}
ENDS |= {"<|tool_response>", "[e~[", "<|ifm|im_end|>"}
# Fill-in-the-middle tokens by key, recognized by text if no key names one.
FILL_IN_TOKENS = {
    (
        "fim_pre",
        "prefix",
    ): "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> "
    "<|plamo:fim_prefix|>",
    (
        "fim_suf",
        "suffix",
    ): "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> "
    "<|plamo:fim_suffix|>",
    (
        "fim_mid",
        "middle",
    ): "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|> "
    "<|plamo:fim_middle|>",
    ("fim_pad",): "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    ("fim_rep",): "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    ("fim_sep",): "<|file_sep|> <|plamo:file_separator|>",
}
STOPPING = ("fim_pad", "fim_rep", "fim_sep")  # of these, the ones that end a text
ALWAYS_TEXT = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # always user-defined
# A turn may have several channels; only the last one ends it.
CHANNELS = (
    {"<|return|>", "<|call|>"},
    {"<|return|>", "<|calls|>"},
    {"<|call|>", "<|flush|>"},
    {"<|calls|>", "<|flush|>"},
)


class EndTokens(NamedTuple):
    """The tokens that end an answer, and all at which llama.cpp stops."""

    turn: frozenset[int]  # end an answer
    all: frozenset[int]  # those, and others at which llama.cpp stops


def find_end_tokens(
    index: Mapping[str, int], ids_by_key: Mapping[str, int | None], kinds: np.ndarray
) -> EndTokens:
    """Find the tokens that end something, by texts and by keys of the file; correct their `kinds`."""
    texts_known = index.keys()
    turn = {token for name in ("eos", "eot", "eom") if (token := ids_by_key[name]) is not None}
    control = {index[text] for text in ENDS & texts_known}
    stops = set[int]()
    turn |= control
    for keys, texts in FILL_IN_TOKENS.items():
        tokens = {token for key in keys if (token := ids_by_key[key]) is not None}
        if not tokens:
            tokens = {index[text] for text in texts.split() if text in texts_known}
            control |= tokens
        stops |= tokens if keys[0] in STOPPING else set()
    kinds[[*control]] = TokenType.CONTROL
    kinds[[index[text] for text in ALWAYS_TEXT if text in texts_known]] = TokenType.USER_DEFINED
    if "<|end|>" in texts_known and any(marks <= texts_known for marks in CHANNELS):
        turn.discard(index["<|end|>"])
        kinds[index["<|end|>"]] = TokenType.USER_DEFINED
    # In some vocabularies </s> ends struck-out text.
    if "</s>" in texts_known and ("<|tool_response>" in texts_known or index.get("<|plamo:eos|>") in turn):
        turn.discard(index["</s>"])
        kinds[index["</s>"]] = TokenType.NORMAL
    return EndTokens(frozenset(turn), frozenset(turn | stops))


# ---- the vocabulary of a file ----------------------------------------------------

KEY = "tokenizer.ggml."
MODELS = ("llama", "gpt2", "gemma4")
WITHOUT_TEXT = ("none", "no_vocab")
UNSUPPORTED_MODELS = {
    "bert": "WordPiece, as BERT has it",
    "t5": "a unigram model, as T5 has it",
    "rwkv": "the longest match first, as RWKV has it",
    "plamo2": "a table of suffixes, as PLaMo 2 has it",
    "hybriddna": "words beside groups of bases, as models of DNA have them",
    "whitespace": "whole words between white space",
}
ID_KEYS = ("bos", "eos", "eot", "eom", *(key for keys in FILL_IN_TOKENS for key in keys))
WITHOUT_BOS = ("chatglm-bpe", "glm4", "glm5")
SPACE = "▁"  # replaces spaces in the tokens of a `llama` vocabulary
UNDEFINED = 0  # a token type that `gguf` does not name
MAX_CHARACTERS = 1024  # of a token; all ways to cut it in two are tried, and the longest known has 256
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
TYPE_NAMES = {str: "a text", bool: "true or false", int: "a whole number"}


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a model."""

    model: str
    tokens: list[str]  # bytes that are not UTF-8 are lone surrogates
    index: dict[str, int]
    scores: np.ndarray
    kinds: np.ndarray
    merges: Sequence[str]
    pre: str
    pre_tokenizer: PreTokenizer
    bos: int | None
    eos: int | None
    eot: int | None
    ends: EndTokens
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    strips_spaces: bool  # special tokens remove the white space after them, as in Phi-3
    chat_template: str | None
    tool_template: str | None
    rerank_template: str | None

    @property
    def escapes_spaces(self) -> bool:
        """True if SPACE replaces spaces in the tokens."""
        return self.model == "llama" or self.pre_tokenizer.characters


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Read the vocabulary from metadata; raise FileError if it is invalid."""
    model = _model(metadata)
    tokens, index = _tokens(metadata)
    spm = model == "llama"
    pre = "gemma4" if model == "gemma4" else _value(metadata, "pre", str, "") or "default"
    cutting = PreTokenizer(()) if spm else find_pre_tokenizer(pre)
    defaults = {"bos": 1, "eos": 2} if spm else {"bos": None if pre in WITHOUT_BOS else 11, "eos": 11}
    defaults = {} if model == "gemma4" else defaults
    special = {name: _id(metadata, name, len(tokens), defaults.get(name)) for name in ID_KEYS}
    added = {
        name: _value(metadata, f"add_{name}_token", bool, name == "bos" and (spm or cutting.add_bos))
        for name in ("bos", "eos")
    }
    added["bos"] |= cutting.always_bos
    for name, wanted in added.items():
        if wanted and special[name] is None:
            raise FileError(
                f"{KEY}add_{name}_token is set, but {KEY}{name}_token_id is not one of the "
                f"{len(tokens)} tokens",
                code="bad-vocabulary",
            )
    kinds = _kinds(metadata, len(tokens))
    name = _name(metadata)
    template, tool_template = _templates(metadata)
    return Vocabulary(
        model=model,
        tokens=tokens,
        index=index,
        scores=_numbers(metadata, "scores", len(tokens), np.float32, 0),
        kinds=kinds,
        merges=[] if spm else _texts(metadata, "merges"),
        pre="" if spm else pre,
        pre_tokenizer=cutting,
        bos=special["bos"],
        eos=special["eos"],
        eot=_end_of_turn(special["eot"], index),
        ends=find_end_tokens(index, special, kinds),
        add_bos=added["bos"],
        add_eos=added["eos"],
        add_space_prefix=_value(metadata, "add_space_prefix", bool, spm),
        strips_spaces="phi-3" in name or "phi3" in name,
        chat_template=template,
        tool_template=tool_template,
        rerank_template=_text_or_none(metadata.get("tokenizer.chat_template.rerank")),
    )


def _text_or_none(value: Any) -> str | None:
    """Return a text, or None if the value is no text or an empty one."""
    return value if isinstance(value, str) and value else None


def _templates(metadata: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Read the chat template and the one for chats with tools, as llama-server does."""
    keys = ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")
    template, tool_template = (_text_or_none(metadata.get(key)) for key in keys)
    if template in (None, "chatml"):
        template = tool_template or (CHATML if template else None)
    return template, tool_template


def _model(metadata: Mapping[str, Any]) -> str:
    model = str(_value(metadata, "model", str))
    if model not in MODELS:
        kind = f": {UNSUPPORTED_MODELS[model]}" if model in UNSUPPORTED_MODELS else ""
        raise FileError(
            f"unsupported {KEY}model (got {quote(model)}{kind}); "
            f"supported are {', '.join(MODELS)}, and {WITHOUT_TEXT[0]}",
            code="unsupported-vocabulary",
        )
    if model != "llama" and f"{KEY}merges" not in metadata:
        raise FileError(f"{KEY}merges is missing; a {model} vocabulary needs it", code="bad-vocabulary")
    return model


def has_no_text(metadata: Mapping[str, Any]) -> bool:
    """Return True if the tokens of a vocabulary stand for no text."""
    model = metadata.get(f"{KEY}model")
    return isinstance(model, str) and model in WITHOUT_TEXT


def parse_byte(token: str) -> int | None:
    """Return the byte of a token such as <0x0A>, or None."""
    match = BYTE.fullmatch(token)
    return int(match[1], 16) if match else None


def _value(metadata: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = metadata.get(KEY + name, default)
    if value is None:
        raise FileError(
            f"{KEY}{name} is missing; the file has no vocabulary to read text with", code="bad-vocabulary"
        )
    return _check_type(f"{KEY}{name}", value, kind)


def _check_type(key: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:
        type_name = TYPE_NAMES.get(type(value)) or ("a number" if isinstance(value, float) else "an array")
        raise FileError(f"{key} is {type_name}; expected {TYPE_NAMES[kind]}", code="bad-vocabulary")
    return value


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], dict[str, int]]:
    """Read the tokens, which must be distinct, and their indices."""
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_texts(metadata, "tokens"))]
    if (longest := max(map(len, tokens), default=0)) > MAX_CHARACTERS:
        at = next(i for i, token in enumerate(tokens) if len(token) == longest)
        raise FileError(
            f"{KEY}tokens: token {at} has {longest} characters; the limit is {MAX_CHARACTERS}",
            code="bad-vocabulary",
        )
    index = {token: i for i, token in enumerate(tokens)}
    if len(index) < len(tokens):
        twice = next(i for i, token in enumerate(tokens) if index[token] != i)
        raise FileError(
            f"{KEY}tokens: tokens {twice} and {index[tokens[twice]]} are both {quote(tokens[twice])}",
            code="bad-vocabulary",
        )
    return tokens, index


def _texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    """Read an array of strings, which may be bytes."""
    value = metadata.get(KEY + name)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        problem = "missing" if value is None else "not an array of strings"
        raise FileError(f"{KEY}{name} is {problem}", code="bad-vocabulary")
    texts = [text.decode("utf-8", "surrogateescape") if isinstance(text, bytes) else text for text in value]
    if not all(isinstance(text, str) for text in texts):
        raise FileError(f"{KEY}{name} is not an array of strings", code="bad-vocabulary")
    return texts


def _numbers(metadata: Mapping[str, Any], name: str, count: int, dtype: Any, default: float) -> np.ndarray:
    """Read a number for each token; as in llama.cpp, there may be more numbers than tokens."""
    value = metadata.get(KEY + name)
    if value is None:
        return np.full(count, default, dtype)
    try:
        array = np.asarray(value)
    except ValueError:  # ragged lists
        array = np.zeros(())
    if array.ndim != 1 or array.dtype.kind not in "iuf"[: 3 if dtype is np.float32 else 2]:
        expected = "numbers" if dtype is np.float32 else "whole numbers"
        raise FileError(f"{KEY}{name} is not an array of {expected}", code="bad-vocabulary")
    if len(array) < count:
        raise FileError(f"{KEY}{name} has {len(array)} numbers for {count} tokens", code="bad-vocabulary")
    with np.errstate(all="ignore"):
        return array[:count].astype(dtype)


def _id(metadata: Mapping[str, Any], name: str, count: int, default: int | None) -> int | None:
    """Read the number of a token; an invalid one counts as missing."""
    value = metadata.get(f"{KEY}{name}_token_id")
    if value is not None and 0 <= _check_type(f"{KEY}{name}_token_id", value, int) < count:
        return int(value)
    return default if default is not None and default < count else None


def _name(metadata: Mapping[str, Any]) -> str:
    name = metadata.get("general.name", "")
    return name.lower() if isinstance(name, str) else ""


def _kinds(metadata: Mapping[str, Any], count: int) -> np.ndarray:
    kinds = _numbers(metadata, "token_type", count, np.int32, TokenType.NORMAL)
    kinds[(kinds < 0) | (kinds > max(TokenType))] = UNDEFINED
    return kinds


def _end_of_turn(token: int | None, index: dict[str, int]) -> int | None:
    return (
        min((index[text] for text in ENDS_OF_TURN & index.keys()), default=None) if token is None else token
    )
