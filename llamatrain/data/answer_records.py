"""Prepares prompts whose answers a model is to generate, from rows of prompts with answers, and of chats.

Prompts are encoded as they are in training. Of a chat the last answer is expected, after all messages before it.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
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
        if len(expected.tokens) >= ctx:
            raise DataError(
                f"a prompt has {len(expected.tokens):,} tokens, and the context {ctx:,}; raise --ctx or shorten it "
                f"({expected.prompt[:40]!r}...)",
                code="prompt-too-long",
            )
    return found


def rows_of(source: DataFile) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a file of JSON lines or a table."""
    if source.kind != "lines":
        raise DataError(f"{source.name}: prompts with answers must be JSON lines, not text", code="not-json")
    return source.rows()


def encode_expected(line: bytes, location: str, options: DataOptions, encoder: Encoder) -> ExpectedAnswer:
    """Encode the prompt of a row."""
    record = strip_reasoning(parse_record(line, location, options.mapping))
    if isinstance(record, PromptRecord) and encoder.as_chat:
        record = record.as_chat()
    if isinstance(record, PromptRecord):
        prompt, answer = record.context.encode(), record.answer
    elif isinstance(record, ChatRecord) and (answers := find_answers(record.messages)) and answers[-1]:
        template, index = encoder.choose_template(record), answers[-1]
        prompt = template.render(record.messages[:index], answer_next=True, tools=record.tools)
        answer = message_text(record.messages[index])
    else:
        raise DataError(
            f'{location}: a prompt with an answer is needed, such as {{"prompt", "answer"}} or a chat that ends '
            "with one",
            code="no-answer",
        )
    reader = encoder.reader
    start = [] if reader.bos is None else [reader.bos]
    tokens = [*start, *reader.encode_prompt(prompt).tolist()]
    if not tokens:
        raise DataError(f"{location}: the prompt is empty", code="no-prompt")
    return ExpectedAnswer(prompt.decode("utf-8", "replace"), tokens, answer)
