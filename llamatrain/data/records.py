"""Parses rows by their keys: text, a prompt with its answer, or a chat."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llamatrain.data.chat.messages import (
    REASONING_KEYS,
    UNTRAINED,
    Message,
    describe_type,
    has_media,
    parse_list,
    read_messages,
    read_tools,
)
from llamatrain.data.chat.server_messages import message_text
from llamatrain.data.column_names import (
    ANSWERS,
    FORMS,
    MESSAGES,
    PAIRS,
    POSITIVES,
    PREFERENCES,
    QUERIES,
    format_keys,
    rename_keys,
)
from llamatrain.data.json_values import iterate_strings, parse_json
from llamatrain.errors import DataError

FORM_KEYS: tuple[tuple[str, ...], ...] = (*((key,) for key in MESSAGES), *PAIRS, ("text",))
ROLES = ("user", "assistant")
PLAIN_FORMS = '{"messages"} or {"prompt", "completion"}'


@dataclass(frozen=True)
class TextRecord:
    """A row of plain text."""

    text: str


@dataclass(frozen=True)
class PromptRecord:
    """A prompt with its answer."""

    prompt: str
    answer: str
    separator: str = ""  # between prompt and answer in plain text; part of the prompt
    system: str = ""  # used only in chats
    has_media: bool = False  # True if the row has images, audio or video
    history: tuple[tuple[str, str], ...] = ()  # earlier prompts with their answers

    @property
    def context(self) -> str:
        """The plain text before the answer."""
        history = "".join(f"{prompt}\n{answer}\n" for prompt, answer in self.history)
        return history + self.prompt + self.separator

    def as_chat(self) -> "ChatRecord":
        """Return the prompt and answer as a chat."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        exchanges = (*self.history, (self.prompt, self.answer))
        messages = (
            {"role": role, "content": text}
            for exchange in exchanges
            for role, text in zip(ROLES, exchange, strict=True)
        )
        return ChatRecord([*system, *messages], has_media=self.has_media)


@dataclass(frozen=True)
class ChatRecord:
    """A chat, with the tools that it may call."""

    messages: list[Message]
    tools: list[Any] | None = None
    has_media: bool = False


Record = TextRecord | PromptRecord | ChatRecord


def parse_record(line: bytes, location: str, columns: Mapping[str, str] | None = None) -> Record:
    """Parse a JSON line into a record. `columns` maps keys to their names in the data."""
    columns = columns or {}
    return record_from_row(rename_keys(parse_object(line, location), columns, location), location, {*columns})


def parse_object(line: bytes, location: str) -> dict[str, Any]:
    """Parse a JSON line into an object; raise DataError if it is none."""
    try:
        row = parse_json(line)
        if not line.isascii():
            line.decode("utf-8")
        if b"\\u" in line:
            for text in iterate_strings(row):
                text.encode("utf-8")  # an escaped lone surrogate is not text
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise DataError(
            f"{location}: not UTF-8 ({error.reason}); save the data as UTF-8", code="not-utf8"
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{location}: not JSON ({error.msg}, column {error.colno})", code="not-json"
        ) from None
    except RecursionError:
        raise DataError(f"{location}: the JSON nests too deeply", code="not-json") from None
    except ValueError as error:
        problem = "a number of thousands of digits" if "digits" in str(error) else str(error)
        raise DataError(f"{location}: the JSON cannot be read ({problem})", code="not-json") from None
    if not isinstance(row, dict):
        raise DataError(
            f"{location}: {describe_type(row)} instead of an object; expected one of {FORMS}",
            code="not-an-object",
        )
    return row


def record_from_row(row: dict[str, Any], location: str, preferred: Collection[str] = ()) -> Record:
    """Convert a row into a record.

    If it can be read in several ways, a key of `preferred` decides. A null counts as missing.
    """
    reject_preferences(row, location)
    given = {key: value for key, value in row.items() if value is not None}
    forms = sorted(FORM_KEYS, key=lambda form: not {*preferred} & {*form}) if preferred else FORM_KEYS
    form = next((form for keys_of in (given, row) for form in forms if keys_of.keys() >= {*form}), None)
    if form and form[0] in MESSAGES:
        return ChatRecord(read_messages(row, location, form[0]), read_tools(row, location), has_media(row))
    if form == ("text",):
        return TextRecord(_read_string(row, "text", location))
    # In TRL's chats, prompt and answer are both messages.
    if form and all(holds_messages(row[key]) for key in form):
        return ChatRecord(
            read_halves(row, form[0], form[1], location), read_tools(row, location), has_media(row)
        )
    if form:
        prompt = read_prompt(row, form[0], location)
        answer = _read_string(row, form[1], location)
        separator = "" if form[0] == "prompt" else "\n"
        system = row.get("system")
        return PromptRecord(
            prompt,
            answer,
            separator,
            system if isinstance(system, str) else "",
            has_media(row),
            read_history(row, location),
        )
    if any(key in row for key in QUERIES) and any(key in row for key in POSITIVES):
        raise DataError(
            f"{location}: the row has a query with its answers (got {format_keys(list(row))}); use finetune or evaluate "
            "with --objective contrastive or rerank",
            code="unexpected-query",
        )
    raise DataError(
        f"{location}: no known keys (got {format_keys(list(row))}); known are {FORMS}; "
        "--columns prompt=KEY,... maps others",
        code="unknown-keys",
    )


def read_prompt(row: dict[str, Any], key: str, location: str) -> str:
    """Read a prompt; an instruction may be followed by its input."""
    prompt = _read_string(row, key, location)
    if key == "instruction" and row.get("input"):
        return f"{prompt}\n\n{_read_string(row, 'input', location)}"
    return prompt


def read_history(row: dict[str, Any], location: str) -> tuple[tuple[str, str], ...]:
    """Read the turns before a prompt: Alpaca's list of prompts with their answers."""
    turns = parse_list(row.get("history")) or []
    if not isinstance(turns, list) or not all(is_pair(turn) for turn in turns):
        raise DataError(
            f'{location}: "history" is not a list of pairs of strings, [["prompt", "answer"], ...]; '
            "rename it if it is something else",
            code="wrong-type",
        )
    return tuple((prompt, answer) for prompt, answer in turns)


def is_pair(value: Any) -> bool:
    """Return True if a value is a list of two strings."""
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)


def holds_messages(value: Any) -> bool:
    """Return True if a value is a list of messages."""
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], dict)


def read_halves(row: dict[str, Any], prompt_key: str, answer_key: str, location: str) -> list[Message]:
    """Read a chat whose messages to train on are in a separate list."""
    context = read_messages({**row, "messages": row[prompt_key]}, location)
    answers = read_messages({**row, "messages": row[answer_key]}, location)
    context = [
        {**message, UNTRAINED: True} if message["role"] == "assistant" else message for message in context
    ]
    return [*context, *(message for message in answers if message["role"] != "system")]


def reject_preferences(row: dict[str, Any], location: str) -> None:
    """Raise DataError if a row has preferences, whose rejected answers must not be learned."""
    keys_found = [key for key in PREFERENCES if key in row]
    labelled_key = next((key for key in (*ANSWERS, *MESSAGES) if key in row), None)
    if not keys_found and labelled_key and isinstance(row.get("label"), bool):
        keys_found = [labelled_key, "label"]
    if keys_found:
        keys = ", ".join(map(json.dumps, keys_found))
        kinds = "kto" if "label" in keys_found else "orpo, dpo, simpo or kto"
        learns = f"use finetune --objective {kinds}"
        raise DataError(
            f"{location}: the row has preferences ({keys}); {learns}, or keep only the good answers, "
            f"as {PLAIN_FORMS}",
            code="unexpected-preferences",
        )


def _read_string(row: dict[str, Any], key: str, location: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(
            f"{location}: {json.dumps(key)} is {describe_type(value)}; expected a string", code="wrong-type"
        )
    return value


# ---- reasoning -------------------------------------------------------------------

REASONING_END = "</think>"


def strip_reasoning(record: Record) -> Record:
    """Remove the reasoning from the answers of a record."""
    if isinstance(record, ChatRecord):
        return replace(record, messages=[strip_message(message) for message in record.messages])
    return replace(record, answer=strip_text(record.answer)) if isinstance(record, PromptRecord) else record


def strip_message(message: Message) -> Message:
    """Remove the reasoning from an assistant's message."""
    if message["role"] != "assistant":
        return message
    fields = {key: value for key, value in message.items() if key != REASONING_KEYS[0]}
    text = message_text(message)
    return {**fields, "content": strip_text(text)} if REASONING_END in text else fields


def strip_text(text: str) -> str:
    """Return an answer without the reasoning before it."""
    return text.rpartition(REASONING_END)[2].lstrip("\n") if REASONING_END in text else text
