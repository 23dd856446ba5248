"""The tokens that llama.cpp knows by their texts, whatever the file says of them: what ends a turn, what marks code."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from llamatrain.gguf.constants import TokenType

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
