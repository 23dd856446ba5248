"""Chats as tokens, with a mark on what the assistant says.

What is trained is found by comparing renderings, never by a template's marks: a turn begins where the whole chat goes on
differently from (or beyond) the chat before the turn with the answer's opening, and ends where the chat up to the turn
ends. Some templates write an old turn otherwise than a new one (without its thoughts): then the chat becomes several
samples, each ending with a turn as it was when it was new.
"""

from collections.abc import Callable

import numpy as np

from llamatrain.data.forms import Message
from llamatrain.data.templates import ChatTemplate, TemplateError

Encode = Callable[[str], np.ndarray]


def encode_chat(
    messages: list[Message], template: ChatTemplate, encode: Encode, ended: Callable[[np.ndarray], int]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Samples of tokens with marks, 1 where a token is the assistant's; `ended` tells how many tokens of a turn count."""
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return []
    after = template.render(*((messages[: turn + 1], False) for turn in turns))
    before = [opening(messages[: turn + 1], template) for turn in turns]
    samples, first = [], 0
    for last in range(len(turns)):
        if last + 1 < len(turns) and after[last + 1].startswith(after[last]):
            continue
        tokens = encode(after[last])
        marks = np.zeros(len(tokens), np.uint8)
        for turn in range(first, last + 1):
            begin = agreeing(encode(before[turn]), tokens)
            end = len(tokens) if turn == last else agreeing(encode(after[turn]), tokens)
            marks[begin : begin + ended(tokens[begin:end])] = 1
        samples.append((tokens, marks))
        first = last + 1
    return samples


def opening(messages: list[Message], template: ChatTemplate) -> str:
    """What stands before the last message's own words."""
    try:
        return template.render((messages[:-1], True))[0]
    except TemplateError:
        if len(messages) > 1:
            raise
    # Templates refuse a chat of no messages; what an opening turn shares with another one is what the template adds.
    other = template.render(([messages[0]], False), ([{**messages[0], "content": "\0"}], False))
    shared = next((at for at, (a, b) in enumerate(zip(*other, strict=False)) if a != b), min(map(len, other)))
    return other[0][:shared]


def agreeing(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two lists have in common at their beginning."""
    short = min(len(a), len(b))
    different = np.flatnonzero(a[:short] != b[:short])
    return int(different[0]) if len(different) else short
