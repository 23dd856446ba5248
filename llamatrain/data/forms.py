"""Rows by their keys: text, a prompt with its answer, or a chat."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamatrain.data.columns import FORMS, PAIRS, PREFERENCES, renamed, told
from llamatrain.data.json_values import parsed, strings_of
from llamatrain.data.messages import Message, kind_of, messages_of, shared_of, tools_of
from llamatrain.errors import DataError

TRIED: tuple[tuple[str, ...], ...] = (("messages",), ("conversations",), *PAIRS, ("text",))
GOOD = '{"messages"} or {"prompt", "completion"}'


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Prompt:
    prompt: str
    answer: str
    joint: str = ""  # between the two where they are tokenized as they stand; it belongs to the prompt

    def as_chat(self) -> "Chat":
        return Chat([{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.answer}])


@dataclass(frozen=True)
class Chat:
    messages: list[Message]
    tools: list[Any] | None = None


Document = Text | Prompt | Chat


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
    if form == ("messages",):
        return Chat(messages_of(row, place), tools_of(row, place))
    if form == ("conversations",):
        return Chat(shared_of(row, place), tools_of(row, place))
    if form == ("text",):
        return Text(_string(row, "text", place))
    if form:
        prompt, answer = _string(row, form[0], place), _string(row, form[1], place)
        if form[0] == "instruction" and row.get("input"):
            prompt += "\n\n" + _string(row, "input", place)
        return Prompt(prompt, answer, "" if form[0] == "prompt" else "\n")
    raise DataError(f"{place}: no known keys: found {told(list(row))}; known are {FORMS}; --columns prompt=KEY,... names others")


def check_alone(row: dict[str, Any], place: str) -> None:
    """Of answers to compare, one is not to be learned."""
    found = [key for key in PREFERENCES if key in row]
    if not found and "completion" in row and isinstance(row.get("label"), bool):
        found = ["completion", "label"]
    if found:
        keys = ", ".join(map(json.dumps, found))
        kinds = "kto" if "label" in found else "orpo, dpo, simpo or kto"
        learns = f"finetune learns from them with --objective {kinds}"
        raise DataError(f"{place}: preferences ({keys}): {learns}; or give the answers that are good alone, as {GOOD}")


def _string(row: dict[str, Any], key: str, place: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{place}: {json.dumps(key)} is {kind_of(value)} where a string is expected")
    return value
