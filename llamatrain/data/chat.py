"""Chats as tokens, with a mark on what the assistant says.

What is trained is found by comparing renderings, never by a template's marks: a turn begins where the whole chat goes on
differently from (or beyond) the chat before the turn with the answer's opening, and ends where the chat up to the turn
ends. Some templates write an old turn otherwise than a new one (without its thoughts): then the chat becomes several
samples, each ending with a turn as it was when it was new.

All that takes renderings whose messages grow with the square of the turns: there is a limit to them.
"""

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np

from llamatrain.data.forms import Message, TooMuch
from llamatrain.data.growing import Begun, Growing
from llamatrain.data.templates import ChatTemplate, Prefix

RENDERED = 2_100_000  # messages in all renderings of a chat: one of 2,000 messages that take turns is rendered so often
TOKENS = 12_000_000  # of all samples of a chat, besides twice its bytes
Marked = tuple[np.ndarray, np.ndarray]  # tokens, and 1 where they are the assistant's


def encode_chat(
    messages: list[Message], template: ChatTemplate, text: Growing, ended: Callable[[np.ndarray], int], size: int
) -> Iterator[Marked]:
    """Samples of a chat in so many bytes; `ended` tells how many tokens of a turn count."""
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if sum(2 * turn + 1 for turn in turns) > RENDERED:
        raise TooMuch(f"a chat of {len(messages):,} messages, {len(turns):,} of them answers; about 2,000 can be: split it")
    left = TOKENS + 2 * size
    begins, ends = list[Begun](), list[Begun]()
    with closing(template.renderings(messages, prefixes_of(messages))) as renderings:
        for before, after in zip(renderings, renderings, strict=True):
            if begins and not after.goes_on:
                yield marked(text.tokens.copy(), begins, ends, ended)
                left -= len(text.tokens)
                begins, ends = [], []
            if left < 0:
                raise TooMuch(f"a chat of {len(turns):,} answers, each a sample of its own, with more than {TOKENS:,} tokens")
            end = text.change(before.same, before.rest)
            ends += [end] if begins else []
            begins.append(text.change(after.same, after.rest))
    if begins:
        yield marked(text.tokens, begins, ends, ended)


def prefixes_of(messages: list[Message]) -> list[Prefix]:
    """The parts of a chat that are rendered: before each turn and behind it."""
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return [prefix for turn in turns for prefix in ((turn, True), (turn + 1, False))]


def marked(tokens: np.ndarray, begins: list[Begun], ends: list[Begun], ended: Callable[[np.ndarray], int]) -> Marked:
    """A sample of some turns, the last of which ends where the tokens do."""
    marks = np.zeros(len(tokens), np.uint8)
    for begin, end in zip(begins, [*(end.agreeing(tokens) for end in ends), len(tokens)], strict=True):
        first = begin.agreeing(tokens)
        marks[first : first + ended(tokens[first:end])] = 1
    return tokens, marks
