"""What a file says of its vocabulary, checked; defaults and repairs are those that llama.cpp makes when it opens the file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from llamatrain.data.chat.builtin import CHATML
from llamatrain.data.tokenizer.pretokenizers import PreTokenizer, pre_tokenizer
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
# The same where none of the keys names one: what marks the parts of code that is to be filled in.
FILLING = {
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
STOPS = ("fim_pad", "fim_rep", "fim_sep")  # of these: nothing comes behind them
SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # always user-defined
# Of channels, of which a turn has several, only the last ends it.
CHANNELS = (
    {"<|return|>", "<|call|>"},
    {"<|return|>", "<|calls|>"},
    {"<|call|>", "<|flush|>"},
    {"<|calls|>", "<|flush|>"},
)


class EndTokens(NamedTuple):
    turn: frozenset[int]  # of an answer
    all: frozenset[int]  # those, and what stops llama.cpp besides


def known_by_text(index: Mapping[str, int], named: Mapping[str, int | None], kinds: np.ndarray) -> EndTokens:
    """The tokens that end something; what they are is put right in `kinds`. `named`: by the keys of the file."""
    there = index.keys()
    turn = {token for name in ("eos", "eot", "eom") if (token := named[name]) is not None}
    control, stops = {index[text] for text in ENDS & there}, set[int]()
    turn |= control
    for keys, texts in FILLING.items():
        found = {token for key in keys if (token := named[key]) is not None}
        if not found:
            found = {index[text] for text in texts.split() if text in there}
            control |= found
        stops |= found if keys[0] in STOPS else set()
    kinds[[*control]] = TokenType.CONTROL
    kinds[[index[text] for text in SHOWN if text in there]] = TokenType.USER_DEFINED
    if "<|end|>" in there and any(marks <= there for marks in CHANNELS):
        turn.discard(index["<|end|>"])
        kinds[index["<|end|>"]] = TokenType.USER_DEFINED
    if "</s>" in there and (
        "<|tool_response>" in there or index.get("<|plamo:eos|>") in turn
    ):  # the end of a word struck out
        turn.discard(index["</s>"])
        kinds[index["</s>"]] = TokenType.NORMAL
    return EndTokens(frozenset(turn), frozenset(turn | stops))


# ---- the vocabulary of a file ----------------------------------------------------

KEY = "tokenizer.ggml."
MODELS = ("llama", "gpt2")
WITHOUT_TEXT = ("none", "no_vocab")
OTHERS = {
    "bert": "WordPiece, as BERT has it",
    "t5": "a unigram model, as T5 has it",
    "rwkv": "the longest match first, as RWKV has it",
    "plamo2": "a table of suffixes, as PLaMo 2 has it",
    "gemma4": "merges of letters, as Gemma 4 has them",
    "hybriddna": "words beside groups of bases, as models of DNA have them",
    "whitespace": "whole words between white space",
}
NAMED = ("bos", "eos", "eot", "eom", *(key for keys in FILLING for key in keys))
BOSLESS = ("chatglm-bpe", "glm4", "glm5")
SPACE = "▁"  # stands for a space in the tokens of a `llama` vocabulary
UNDEFINED = 0  # a token's type that `gguf` has no name for
LONGEST = (
    1024  # characters of a token: all ways to cut one in two are looked at, and the longest known has 256
)
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
NAMES = {str: "a text", bool: "true or false", int: "a whole number"}


@dataclass(frozen=True)
class Vocabulary:
    model: str
    tokens: list[str]  # bytes that are not UTF-8 stand in them as lone surrogates
    index: dict[str, int]
    scores: np.ndarray
    kinds: np.ndarray
    merges: Sequence[str]
    pre: str
    cutting: PreTokenizer
    bos: int | None
    eos: int | None
    eot: int | None
    ends: EndTokens
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    strips: bool  # special tokens take the white space behind them along, as in Phi-3
    chat_template: str | None
    tool_template: str | None


def read(metadata: Mapping[str, Any]) -> Vocabulary:
    model = _model(metadata)
    tokens, index = _tokens(metadata)
    spm = model == "llama"
    pre = _value(metadata, "pre", str, "") or "default"
    cutting = PreTokenizer(()) if spm else pre_tokenizer(pre)
    defaults = {"bos": 1, "eos": 2} if spm else {"bos": None if pre in BOSLESS else 11, "eos": 11}
    special = {name: _id(metadata, name, len(tokens), defaults.get(name)) for name in NAMED}
    added = {
        name: _value(metadata, f"add_{name}_token", bool, name == "bos" and (spm or cutting.add_bos))
        for name in ("bos", "eos")
    }
    for name, wanted in added.items():
        if wanted and special[name] is None:
            raise FileError(
                f"{KEY}add_{name}_token is set, and there is no {KEY}{name}_token_id among {len(tokens)} tokens"
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
        cutting=cutting,
        bos=special["bos"],
        eos=special["eos"],
        eot=_end_of_turn(special["eot"], index),
        ends=known_by_text(index, special, kinds),
        add_bos=added["bos"],
        add_eos=added["eos"],
        add_space_prefix=_value(metadata, "add_space_prefix", bool, spm),
        strips="phi-3" in name or "phi3" in name,
        chat_template=template,
        tool_template=tool_template,
    )


def _templates(metadata: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Read the chat template, and the one for chats with tools, as llama-server does."""
    found = (metadata.get(key) for key in ("tokenizer.chat_template", "tokenizer.chat_template.tool_use"))
    template, tool_template = (each if isinstance(each, str) and each else None for each in found)
    if template in (None, "chatml"):
        template = tool_template or (CHATML if template else None)
    return template, tool_template


def _model(metadata: Mapping[str, Any]) -> str:
    model = str(_value(metadata, "model", str))
    if model not in MODELS:
        kind = f": {OTHERS[model]}" if model in OTHERS else ""
        raise FileError(
            f"{KEY}model is {quote(model)}{kind}; known here are {', '.join(MODELS)}, and {WITHOUT_TEXT[0]}"
        )
    if model == "gpt2" and f"{KEY}merges" not in metadata:
        raise FileError(f"{KEY}merges is missing; a gpt2 vocabulary cannot do without")
    return model


def is_without_text(metadata: Mapping[str, Any]) -> bool:
    """Whether its tokens stand for no text."""
    model = metadata.get(f"{KEY}model")
    return isinstance(model, str) and model in WITHOUT_TEXT


def byte_of(token: str) -> int | None:
    """What a token such as <0x0A> stands for."""
    found = BYTE.fullmatch(token)
    return int(found[1], 16) if found else None


def _value(metadata: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = metadata.get(KEY + name, default)
    if value is None:
        raise FileError(f"{KEY}{name} is missing: the file has no vocabulary to read text with")
    return _of_kind(f"{KEY}{name}", value, kind)


def _of_kind(key: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:
        found = NAMES.get(type(value)) or ("a number" if isinstance(value, float) else "an array")
        raise FileError(f"{key} is {found}, where {NAMES[kind]} is needed")
    return value


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], dict[str, int]]:
    """The tokens, no two alike, and their numbers."""
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_texts(metadata, "tokens"))]
    if (longest := max(map(len, tokens), default=0)) > LONGEST:
        at = next(i for i, token in enumerate(tokens) if len(token) == longest)
        raise FileError(f"{KEY}tokens has {longest} characters as token {at}; {LONGEST} are the most of one")
    index = {token: i for i, token in enumerate(tokens)}
    if len(index) < len(tokens):
        twice = next(i for i, token in enumerate(tokens) if index[token] != i)
        raise FileError(
            f"{KEY}tokens has {quote(tokens[twice])} as token {twice} and as token {index[tokens[twice]]}"
        )
    return tokens, index


def _texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    """An array of texts, which may be given as bytes."""
    value = metadata.get(KEY + name)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise FileError(f"{KEY}{name} is {'missing' if value is None else 'no array of texts'}")
    texts = [text.decode("utf-8", "surrogateescape") if isinstance(text, bytes) else text for text in value]
    if not all(isinstance(text, str) for text in texts):
        raise FileError(f"{KEY}{name} is no array of texts")
    return texts


def _numbers(metadata: Mapping[str, Any], name: str, count: int, dtype: Any, default: float) -> np.ndarray:
    """A number for each token; more than tokens may be there, as in llama.cpp."""
    value = metadata.get(KEY + name)
    if value is None:
        return np.full(count, default, dtype)
    try:
        array = np.asarray(value)
    except ValueError:  # lists of some lengths
        array = np.zeros(())
    if array.ndim != 1 or array.dtype.kind not in "iuf"[: 3 if dtype is np.float32 else 2]:
        raise FileError(f"{KEY}{name} is no array of {'' if dtype is np.float32 else 'whole '}numbers")
    if len(array) < count:
        raise FileError(f"{KEY}{name} has {len(array)} numbers for {count} tokens")
    with np.errstate(all="ignore"):
        return array[:count].astype(dtype)


def _id(metadata: Mapping[str, Any], name: str, count: int, default: int | None) -> int | None:
    """A token's number; one that is not there is as if nothing were said."""
    value = metadata.get(f"{KEY}{name}_token_id")
    if value is not None and 0 <= _of_kind(f"{KEY}{name}_token_id", value, int) < count:
        return int(value)
    return default if default is not None and default < count else None


def _name(metadata: Mapping[str, Any]) -> str:
    name = metadata.get("general.name", "")
    return name.lower() if isinstance(name, str) else ""


def _kinds(metadata: Mapping[str, Any], count: int) -> np.ndarray:
    kinds = _numbers(metadata, "token_type", count, np.int32, TokenType.NORMAL)
    kinds[(kinds < 0) | (kinds > max(TokenType))] = UNDEFINED
    return kinds


def _end_of_turn(given: int | None, index: dict[str, int]) -> int | None:
    return (
        min((index[text] for text in ENDS_OF_TURN & index.keys()), default=None) if given is None else given
    )
