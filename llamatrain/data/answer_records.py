"""Prepares prompts whose answers a model is to generate, from rows of prompts with answers, and of chats.

Prompts are encoded as they are in training. Of a chat the last answer is expected, after all messages before it.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice

from llamatrain.data.chat.encode import find_answers
from llamatrain.data.chat.server_messages import message_text
from llamatrain.data.encode import Encoder
from llamatrain.data.files import DataFile
from llamatrain.data.options import DataOptions
from llamatrain.data.records import ChatRecord, PromptRecord, parse_record, strip_reasoning
from llamatrain.data.tokenizer import Tokenizer
from llamatrain.errors import DataError


@dataclass(frozen=True)
class ExpectedAnswer:
    """A prompt, as text and as tokens, with the answer that is expected."""

    prompt: str
    tokens: list[int]
    answer: str


def read_expected(
    sources: Sequence[DataFile], tokenizer: Tokenizer, options: DataOptions, ctx: int, limit: int | None
) -> list[ExpectedAnswer]:
    """Read the first rows of files; raise DataError if a row has no answer."""
    encoder = Encoder(tokenizer, options, ctx)
    with closing(encoder):
        found = [
            expected
            for source in sources
            for number, line in islice(rows_of(source), limit)
            if (expected := encode_expected(line, source.locate(number), options, encoder))
        ]
    for expected in found:
        check_length(expected.tokens, ctx, f"{expected.prompt[:40]!r}: this")
    return found


def check_length(tokens: Sequence[int], ctx: int, subject: str) -> None:
    """Raise if a prompt leaves no room for an answer; `subject` names it in the message."""
    if len(tokens) >= ctx:
        raise DataError(
            f"{subject} prompt has {len(tokens):,} tokens, and the context {ctx:,}; raise --ctx or shorten it",
            code="prompt-too-long",
        )


def rows_of(source: DataFile) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a file of JSON lines or a table."""
    if source.kind != "lines":
        raise DataError(f"{source.name}: prompts with answers must be JSON lines, not text", code="not-json")
    return source.rows()


def encode_expected(line: bytes, location: str, options: DataOptions, encoder: Encoder) -> ExpectedAnswer:
    """Encode the prompt of a row."""
    record = strip_reasoning(parse_record(line, location, options.mapping))
    if isinstance(record, PromptRecord):
        answer = record.answer
    elif isinstance(record, ChatRecord) and (answers := find_answers(record.messages)) and answers[-1]:
        answer = message_text(record.messages[answers[-1]])
        record = replace(record, messages=record.messages[: answers[-1]])
    else:
        raise DataError(
            f'{location}: a prompt with an answer is needed, such as {{"prompt", "answer"}} or a chat that ends '
            "with one",
            code="no-answer",
        )
    prompt = render_prompt(record, encoder)
    return ExpectedAnswer(prompt.decode("utf-8", "replace"), encode_prompt(prompt, location, encoder), answer)


def render_prompt(record: PromptRecord | ChatRecord, encoder: Encoder) -> bytes:
    """Return the text before the answer: of a prompt with its answer, or of a chat that lacks one."""
    if isinstance(record, PromptRecord):
        if not encoder.as_chat:
            return record.context.encode()
        record = record.as_chat()
        record = replace(record, messages=record.messages[:-1])
    template = encoder.choose_template(record)
    return template.render(record.messages, answer_next=True, tools=record.tools)


def encode_prompt(prompt: bytes, location: str, encoder: Encoder) -> list[int]:
    """Return the tokens of a prompt, after the begin token."""
    reader = encoder.reader
    start = [] if reader.bos is None else [reader.bos]
    tokens = [*start, *reader.encode_prompt(prompt).tolist()]
    if not tokens:
        raise DataError(f"{location}: the prompt is empty", code="no-prompt")
    return tokens
