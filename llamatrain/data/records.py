"""Rows by their keys: text, a prompt with its answer, or a chat."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llamatrain.data.chat.messages import (
    THOUGHTS,
    UNTRAINED,
    Message,
    has_media,
    kind_of,
    listed,
    messages_of,
    tools_of,
)
from llamatrain.data.chat.server_messages import words_of
from llamatrain.data.column_names import ANSWERS, FORMS, MESSAGES, PAIRS, PREFERENCES, renamed, told
from llamatrain.data.json_values import parsed, strings_of
from llamatrain.errors import DataError

TRIED: tuple[tuple[str, ...], ...] = (*((key,) for key in MESSAGES), *PAIRS, ("text",))
ROLES = ("user", "assistant")
GOOD = '{"messages"} or {"prompt", "completion"}'


@dataclass(frozen=True)
class TextRecord:
    text: str


@dataclass(frozen=True)
class PromptRecord:
    prompt: str
    answer: str
    joint: str = ""  # between the two where they are tokenized as they stand; it belongs to the prompt
    system: str = ""  # which only a chat has a place for
    media: bool = False  # whether images and the like stood beside it
    history: tuple[tuple[str, str], ...] = ()  # earlier prompts with their answers

    @property
    def before(self) -> str:
        """All that precedes the answer in plain text."""
        return "".join(f"{asked}\n{said}\n" for asked, said in self.history) + self.prompt + self.joint

    def as_chat(self) -> "ChatRecord":
        opened = [{"role": "system", "content": self.system}] if self.system else []
        turns = (*self.history, (self.prompt, self.answer))
        said = (
            {"role": role, "content": words}
            for turn in turns
            for role, words in zip(ROLES, turn, strict=True)
        )
        return ChatRecord([*opened, *said], media=self.media)


@dataclass(frozen=True)
class ChatRecord:
    messages: list[Message]
    tools: list[Any] | None = None
    media: bool = False


Document = TextRecord | PromptRecord | ChatRecord


def parse_line(line: bytes, place: str, columns: Mapping[str, str] | None = None) -> Document:
    """With the keys that have other names in the data."""
    columns = columns or {}
    return _document(renamed(row_of(line, place), columns, place), place, {*columns})


def row_of(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = parsed(line)
        if not line.isascii():
            line.decode("utf-8")
        if b"\\u" in line:
            for text in strings_of(row):
                text.encode("utf-8")  # an escaped half of a surrogate pair is no text
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise DataError(f"{place}: no UTF-8 text ({error.reason})") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: no JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise DataError(f"{place}: no JSON that can be read: it nests too deeply") from None
    except ValueError as error:
        told = "a number of thousands of digits" if "digits" in str(error) else str(error)
        raise DataError(f"{place}: no JSON that can be read: {told}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: {kind_of(row)} where an object is expected, one of {FORMS}")
    return row


def _document(row: dict[str, Any], place: str, meant: set[str]) -> Document:
    """Where a row can be read in several ways, in that of a key that is meant; null is as if it were not there."""
    check_alone(row, place)
    there = {key: value for key, value in row.items() if value is not None}
    known = sorted(TRIED, key=lambda form: not meant & {*form}) if meant else TRIED
    form = next((form for found in (there, row) for form in known if found.keys() >= {*form}), None)
    if form and form[0] in MESSAGES:
        return ChatRecord(messages_of(row, place, form[0]), tools_of(row, place), has_media(row))
    if form == ("text",):
        return TextRecord(_string(row, "text", place))
    if form and all(holds_messages(row[key]) for key in form):  # TRL's chats in two halves
        return ChatRecord(halves_of(row, form[0], form[1], place), tools_of(row, place), has_media(row))
    if form:
        prompt, answer = prompt_of(row, form[0], place), _string(row, form[1], place)
        joint, system = "" if form[0] == "prompt" else "\n", row.get("system")
        return PromptRecord(
            prompt,
            answer,
            joint,
            system if isinstance(system, str) else "",
            has_media(row),
            history_of(row, place),
        )
    raise DataError(
        f"{place}: no known keys: found {told(list(row))}; known are {FORMS}; --columns prompt=KEY,... names others"
    )


def prompt_of(row: dict[str, Any], key: str, place: str) -> str:
    """Read a prompt; an instruction may have an input, which follows it."""
    prompt = _string(row, key, place)
    return (
        f"{prompt}\n\n{_string(row, 'input', place)}" if key == "instruction" and row.get("input") else prompt
    )


def history_of(row: dict[str, Any], place: str) -> tuple[tuple[str, str], ...]:
    """Read the turns before a prompt, as Alpaca's form has them: a list of prompts with their answers."""
    turns = listed(row.get("history")) or []
    if not isinstance(turns, list) or not all(is_pair(turn) for turn in turns):
        raise DataError(
            f'{place}: "history" is not a list of pairs of strings, [["prompt", "answer"], ...]; rename what is none'
        )
    return tuple((asked, said) for asked, said in turns)


def is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)


def holds_messages(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], dict)


def halves_of(row: dict[str, Any], ask: str, answer: str, place: str) -> list[Message]:
    """Read a chat whose answers to train on stand apart from what is before them."""
    before, after = (messages_of({**row, "messages": row[key]}, place) for key in (ask, answer))
    given = [
        {**message, UNTRAINED: True} if message["role"] == "assistant" else message for message in before
    ]
    return [*given, *(message for message in after if message["role"] != "system")]


def check_alone(row: dict[str, Any], place: str) -> None:
    """Of answers to compare, one is not to be learned."""
    found = [key for key in PREFERENCES if key in row]
    if not found and isinstance(row.get("label"), bool) and any(key in row for key in (*ANSWERS, *MESSAGES)):
        found = [next(key for key in (*ANSWERS, *MESSAGES) if key in row), "label"]
    if found:
        keys = ", ".join(map(json.dumps, found))
        kinds = "kto" if "label" in found else "orpo, dpo, simpo or kto"
        learns = f"finetune learns from them with --objective {kinds}"
        raise DataError(
            f"{place}: preferences ({keys}): {learns}; or give the answers that are good alone, as {GOOD}"
        )


def _string(row: dict[str, Any], key: str, place: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{place}: {json.dumps(key)} is {kind_of(value)} where a string is expected")
    return value


# ---- reasoning -------------------------------------------------------------------

END = "</think>"


def unthought(document: Document) -> Document:
    if isinstance(document, ChatRecord):
        return replace(document, messages=[said(message) for message in document.messages])
    return (
        replace(document, answer=said_of(document.answer)) if isinstance(document, PromptRecord) else document
    )


def said(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key != THOUGHTS[0]}
    return {**kept, "content": said_of(words_of(message))}


def said_of(text: str) -> str:
    """An answer behind its thoughts."""
    return text.rpartition(END)[2].lstrip("\n") if END in text else text
