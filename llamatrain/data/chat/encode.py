"""Encodes chats as tokens, with marks on the assistant's answers.

Each answer follows the prompt that a server makes of the messages before it, and is tokenized separately, as
the output of a model is. If the next prompt continues that text, both share a sample. Some templates render
an old turn differently from a new one (without its reasoning, or with the system prompt elsewhere), and some
vocabularies tokenize it differently (with a space after a control token): then each answer becomes a separate
sample.

The rendered messages grow with the square of the turns, so there is a limit to them.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np

from llamatrain.data.chat.limits import LAST, TURNS
from llamatrain.data.chat.messages import UNTRAINED, Message
from llamatrain.data.chat.prompt import BORDER_BYTES, LARGE_TEXT, PromptReader
from llamatrain.data.chat.template import ChatTemplate
from llamatrain.data.json_values import RecordTooLarge
from llamatrain.data.records import ChatRecord, PromptRecord
from llamatrain.platform.memory import trim_heap

NO_TOKENS = (np.zeros(0, np.int32), np.zeros(0, np.uint8))  # a document that is counted but skipped


class MarkedTokens(NamedTuple):
    """The tokens of a document, with marks on those that are trained."""

    tokens: np.ndarray
    marks: np.ndarray  # 1 for trained tokens
    single: bool  # one row at most


EMPTY_SAMPLE = MarkedTokens(*NO_TOKENS, single=True)


def keep_last_answer(samples: list[MarkedTokens]) -> MarkedTokens:
    """Return the last sample of a conversation with only its last answer marked."""
    *_, (tokens, marks, _) = samples
    borders = np.flatnonzero(np.diff(marks, prepend=0))  # where answers begin and end
    begin = int(borders[-2 if len(borders) % 2 == 0 else -1]) if len(borders) else 0
    marks[:begin] = 0
    return MarkedTokens(tokens, marks, single=True)


MAX_RENDERED_MESSAGES = 2_100_000  # messages in all renderings of a chat; 2,000 alternating messages reach it
MAX_LATER_TOKENS = 6_000_000  # of all samples of a chat except the first; later answers are dropped
TokensAndMarks = tuple[np.ndarray, np.ndarray]  # tokens, and 1 for those of the assistant


class ChatSample:
    """A sample under construction: prompts and answers in turn."""

    def __init__(self) -> None:
        self.parts = deque[tuple[np.ndarray, bool]]()
        self.count = 0

    @property
    def last_token(self) -> int | None:
        """The last token, or None."""
        part = next((part for part, _ in reversed(self.parts) if len(part)), None)
        return None if part is None else int(part[-1])

    def add(self, tokens: np.ndarray, spoken: bool) -> None:
        """Append tokens; `spoken` marks them as the assistant's."""
        self.parts.append((tokens, spoken))
        self.count += len(tokens)

    def extends_to(self, more: np.ndarray, prompt: np.ndarray) -> bool:
        """Return True if the sample and more tokens equal a prompt.

        They may differ, because a vocabulary can merge tokens across their border.
        """
        if self.count + len(more) != len(prompt):
            return False
        begin = 0
        for tokens in (*(part for part, _ in self.parts), more):
            if not np.array_equal(tokens, prompt[begin : begin + len(tokens)]):
                return False
            begin += len(tokens)
        return True

    def join(self) -> TokensAndMarks:
        """Return all tokens with their marks, and free the parts."""
        tokens = np.empty(self.count, np.int32)
        marks = np.empty(self.count, np.uint8)
        begin = 0
        while self.parts:  # free each part after copying it
            part, spoken = self.parts.popleft()
            end = begin + len(part)
            tokens[begin:end] = part
            marks[begin:end] = spoken
            begin = end
        return tokens, marks


def encode_prompt(row: PromptRecord, reader: PromptReader, size: int) -> TokensAndMarks:
    """Encode a prompt and its answer, which ends with an end token."""
    sample = ChatSample()
    text = reader.start_text(size, LARGE_TEXT)
    text.replace_end(0, row.context.encode())
    sample.add(text.tokens, False)
    del text  # free the text, which is copied
    sample.add(reader.encode_continuation(row.answer.encode(), False, sample.last_token), True)
    if not reader.has_end(sample.parts[-1][0]):
        sample.add(reader.end, True)
    return sample.join()


def find_answers(messages: list[Message]) -> list[int]:
    """Return the indices of the answers that are trained."""
    return [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and not message.get(UNTRAINED)
    ]


def encode_chat(
    chat: ChatRecord,
    template: ChatTemplate,
    reader: PromptReader,
    size: int,
    notes: set[str],
    render_mode: str = TURNS,
) -> Iterator[TokensAndMarks]:
    """Yield the samples of a chat that has `size` bytes in the file; add remarks to `notes`."""
    turns = find_answers(chat.messages)[-1 if render_mode == LAST else 0 :]
    if sum(2 * turn + 1 for turn in turns) > MAX_RENDERED_MESSAGES:
        raise RecordTooLarge(
            f"a chat of {len(chat.messages):,} messages, {len(turns):,} of them answers "
            "(the limit is about 2,000); split it",
            code="row-too-large",
        )
    tokens_left = MAX_LATER_TOKENS
    text = reader.start_text(size)
    sample = ChatSample()
    answer_bytes = 0
    is_separate = True
    with closing(template.turns(chat.messages, chat.tools, render_mode)) as rendered_turns:
        for turn in rendered_turns:
            text.replace_end(turn.shared_bytes, turn.rest)
            continuation = None
            if turn.is_continuation and is_separate:  # it follows the end token of the previous answer
                continuation = reader.encode_continuation(
                    bytes(turn.rest[answer_bytes:]), answer_bytes > 0, sample.last_token
                )
            if continuation is not None and sample.extends_to(continuation, text.tokens):
                sample.add(continuation, False)
            else:
                if sample.parts:
                    notes.add("apart")
                    yield sample.join()
                    tokens_left -= len(text.tokens)
                if tokens_left < 0:
                    notes.add("later")
                    return
                sample = ChatSample()
                # The next change overwrites the tokens. No variable holds them, so that they can be freed.
                sample.add(text.tokens if len(turns) == 1 else text.tokens.copy(), False)
            is_separate = reader.tokenizes_alone(sample.parts[-1][0], bytes(turn.answer[:BORDER_BYTES]))
            answer = reader.encode_continuation(bytes(turn.answer), False, sample.last_token)
            stop = reader.find_end(answer)  # some templates write text after a tool call
            sample.add(answer[:stop], True)
            sample.add(answer[stop:], False)
            if not turn.has_end:
                notes.add("endless")
                sample.add(reader.end, not reader.has_end(answer[:stop]))
            answer_bytes = len(turn.answer)
    if sample.parts:
        del text, turn, answer  # each is as large as the sample
        if size > LARGE_TEXT:
            trim_heap()
        yield sample.join()
