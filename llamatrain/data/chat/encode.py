"""Chats as tokens, with a mark on what the assistant says.

Each answer stands behind the prompt that a server makes of the messages before it, and is tokenized apart from it, as what a
model says is. Where the prompt of the next answer goes on from that, both are in one sample; some templates write an old turn
otherwise than a new one (without its thoughts, or the system prompt elsewhere), and some vocabularies read it otherwise (with a
space more behind a control token): then each answer becomes a sample of its own.

All that takes renderings whose messages grow with the square of the turns: there is a limit to them.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np

from llamatrain.data.chat.messages import UNTRAINED, Message
from llamatrain.data.chat.prompt import BORDER, LARGE, PromptReader
from llamatrain.data.chat.template import LAST, TURNS, ChatTemplate
from llamatrain.data.json_values import RecordTooLarge
from llamatrain.data.records import ChatRecord, PromptRecord
from llamatrain.platform.memory import trim_heap

NOTHING = (np.zeros(0, np.int32), np.zeros(0, np.uint8))  # a document that is counted, and skipped


class MarkedTokens(NamedTuple):
    tokens: np.ndarray
    marks: np.ndarray  # 1 where trained
    single: bool  # one row at most


NEITHER = MarkedTokens(*NOTHING, single=True)


def last_answer(samples: list[MarkedTokens]) -> MarkedTokens:
    """What is compared of a conversation."""
    *_, (tokens, marks, _) = samples
    told = np.flatnonzero(np.diff(marks, prepend=0))  # where answers begin and end
    before = int(told[-2 if len(told) % 2 == 0 else -1]) if len(told) else 0
    marks[:before] = 0
    return MarkedTokens(tokens, marks, single=True)


RENDERED = 2_100_000  # messages in all renderings of a chat: one of 2,000 messages that take turns is rendered so often
TOKENS = 6_000_000  # of all samples of a chat but its first: answers behind them are left out
Marked = tuple[np.ndarray, np.ndarray]  # tokens, and 1 where they are the assistant's


class ChatSample:
    """A sample in the making: what the assistant is given, and what it says, in turn."""

    def __init__(self) -> None:
        self.parts = deque[tuple[np.ndarray, bool]]()
        self.count = 0

    @property
    def last(self) -> int | None:
        """Its last token."""
        part = next((part for part, _ in reversed(self.parts) if len(part)), None)
        return None if part is None else int(part[-1])

    def add(self, tokens: np.ndarray, spoken: bool) -> None:
        self.parts.append((tokens, spoken))
        self.count += len(tokens)

    def goes_on(self, more: np.ndarray, prompt: np.ndarray) -> bool:
        """Tell whether the sample and more tokens are the prompt: a vocabulary may join what stands at the border of two."""
        if self.count + len(more) != len(prompt):
            return False
        at = 0
        for tokens in (*(part for part, _ in self.parts), more):
            if not np.array_equal(tokens, prompt[at : at + len(tokens)]):
                return False
            at += len(tokens)
        return True

    def marked(self) -> Marked:
        tokens, marks, at = np.empty(self.count, np.int32), np.empty(self.count, np.uint8), 0
        while self.parts:  # each is let go once it is copied
            part, spoken = self.parts.popleft()
            tokens[at : at + len(part)], marks[at : at + len(part)] = part, spoken
            at += len(part)
        return tokens, marks


def encode_prompt(row: PromptRecord, reader: PromptReader, size: int) -> Marked:
    said, text = ChatSample(), reader.growing(size, LARGE)
    text.change(0, row.before.encode())
    said.add(text.tokens, False)
    del text  # what is copied can be let go
    said.add(reader.behind(row.answer.encode(), False, said.last), True)
    if not reader.ended(said.parts[-1][0]):
        said.add(reader.end, True)
    return said.marked()


def answers_in(messages: list[Message]) -> list[int]:
    """Those that are trained."""
    return [
        number
        for number, each in enumerate(messages)
        if each["role"] == "assistant" and not each.get(UNTRAINED)
    ]


def encode_chat(
    chat: ChatRecord,
    template: ChatTemplate,
    reader: PromptReader,
    size: int,
    notes: set[str],
    want: str = TURNS,
) -> Iterator[Marked]:
    """Samples of a chat in so many bytes; what is to be said of it is noted."""
    turns = answers_in(chat.messages)[-1 if want == LAST else 0 :]
    if sum(2 * turn + 1 for turn in turns) > RENDERED:
        raise RecordTooLarge(
            f"a chat of {len(chat.messages):,} messages, {len(turns):,} of them answers; about 2,000 can be: split it"
        )
    left, text, said, spoken, joined = TOKENS, reader.growing(size), ChatSample(), 0, True
    with closing(template.turns(chat.messages, chat.tools, want)) as made:
        for turn in made:
            text.change(turn.same, turn.rest)
            more = None
            if turn.goes_on and joined:  # behind the token that ends the answer before
                more = reader.behind(bytes(turn.rest[spoken:]), spoken > 0, said.last)
            if more is not None and said.goes_on(more, text.tokens):
                said.add(more, False)
            else:
                if said.parts:
                    notes.add("apart")
                    yield said.marked()
                    left -= len(text.tokens)
                if left < 0:
                    notes.add("later")
                    return
                said = ChatSample()
                said.add(
                    text.tokens if len(turns) == 1 else text.tokens.copy(), False
                )  # the next change writes over them
            joined = reader.joins(said.parts[-1][0], bytes(turn.answer[:BORDER]))
            answer = reader.behind(bytes(turn.answer), False, said.last)
            stop = reader.first_end(answer)  # some templates write more behind a call
            said.add(answer[:stop], True)
            said.add(answer[stop:], False)
            if not turn.ended:
                notes.add("endless")
                said.add(reader.end, not reader.ended(answer[:stop]))
            spoken = len(turn.answer)
    if said.parts:
        del text, turn, answer  # as large as what is made of them
        if size > LARGE:
            trim_heap()
        yield said.marked()
