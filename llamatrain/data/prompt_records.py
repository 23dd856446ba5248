"""Reads rows whose prompts a model is to answer. An answer in the row is a column like any other."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from llamatrain.data.answer_records import check_length, encode_prompt, render_prompt, rows_of
from llamatrain.data.chat.messages import read_messages, read_tools
from llamatrain.data.column_names import ANSWERS, FORMS, MESSAGES, PROMPTS, format_keys, rename_keys
from llamatrain.data.encode import Encoder
from llamatrain.data.files import DataFile
from llamatrain.data.options import DataOptions
from llamatrain.data.records import (
    ChatRecord,
    PromptRecord,
    holds_messages,
    parse_object,
    record_from_row,
)
from llamatrain.data.tokenizer import Tokenizer
from llamatrain.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """A prompt as text and as tokens, with the row that it comes from."""

    text: str
    tokens: list[int]
    row: Mapping[str, Any]
    place: str


def read_prompts(
    sources: Sequence[DataFile], tokenizer: Tokenizer, options: DataOptions, ctx: int
) -> list[Prompt]:
    """Read the prompts of files; raise DataError if a row has none, or one that leaves no room for an answer."""
    encoder = Encoder(tokenizer, options, ctx)
    with closing(encoder):
        prompts = [
            read_prompt(line, source.locate(number), options, encoder)
            for source in sources
            for number, line in rows_of(source)
        ]
    for prompt in prompts:
        check_length(prompt.tokens, ctx, f"{prompt.place}: the")
    if not prompts:
        raise DataError("there are no prompts; name files with a row for each", code="no-prompt")
    return prompts


def read_prompt(line: bytes, location: str, options: DataOptions, encoder: Encoder) -> Prompt:
    """Read the prompt of a row."""
    row = parse_object(line, location)
    record = parse_prompt(rename_keys(row, options.mapping, location), location)
    text = render_prompt(record, encoder)
    tokens = encode_prompt(text, location, encoder)
    return Prompt(text.decode("utf-8", "replace"), tokens, row, location)


def parse_prompt(row: Mapping[str, Any], location: str) -> ChatRecord | PromptRecord:
    """Parse a row into a record that ends where the answer begins, with an empty answer behind a plain prompt."""
    given = {key: value for key, value in row.items() if value is not None}
    key = next((key for key in (*MESSAGES, *PROMPTS) if key in given), None)
    if key is None:
        raise DataError(
            f"{location}: no prompt (got {format_keys(list(row))}); known are {FORMS}, whose answers may be missing; "
            "--columns prompt=KEY maps another",
            code="unknown-keys",
        )
    if key in MESSAGES or holds_messages(given[key]):
        messages = read_messages({**row, "messages": given[key]}, location)
        if messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise DataError(f"{location}: the chat has no message to answer", code="no-prompt")
        return ChatRecord(messages, read_tools(dict(row), location))
    others = {name: value for name, value in given.items() if name not in (*ANSWERS, "text")}
    record = record_from_row({**others, ANSWERS[0]: ""}, location)
    assert isinstance(record, PromptRecord)
    return record
