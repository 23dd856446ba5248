"""JSON lines by their keys: text, a prompt with its answer, or a chat."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamatrain.errors import DataError
from llamatrain.files.cursor import cut

FORMS = (
    '{"text"}, {"prompt", "completion"}, {"question", "answer"}, {"instruction", "output"} with or without "input", '
    '{"messages": [{"role", "content"}]}, {"conversations": [{"from", "value"}]}'
)
PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool", "observation": "tool"}

VALUES = 1 << 18  # in a line: objects, lists and what they hold; each takes up to a hundred times its bytes in the file
Message = dict[str, Any]


class TooMuch(DataError):
    """What takes more time or memory than one row of the data may: the row is skipped."""


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


Document = Text | Prompt | Chat


def parse_line(line: bytes, place: str) -> Document:
    if len(line) > VALUES and (values := count_values(line)) > VALUES:
        raise TooMuch(f"{values:,} JSON values in a line, where {VALUES:,} can be")
    try:
        row = json.loads(line)
        if not line.isascii():
            line.decode("utf-8")
        if b"\\u" in line:
            for text in strings_of(row):
                text.encode("utf-8")  # an escaped half of a surrogate pair is no text
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise DataError(f"{place}: no UTF-8 text ({error.reason})") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: no JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: no JSON that can be read: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: {_kind(row)} where an object is expected, one of {FORMS}")
    return _document(row, place)


def count_values(line: bytes) -> int:
    """How many values JSON has, or some more: what begins or separates them outside of strings."""
    clean = line.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in line else line
    characters = np.frombuffer(clean, np.uint8)
    within = np.logical_xor.accumulate(characters == ord('"'))
    return sum(int(np.count_nonzero((characters == ord(mark)) & ~within)) for mark in "{[,")


def strings_of(value: Any) -> Iterator[str]:
    """All of them in a value of JSON, keys included."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value


def _document(row: dict[str, Any], place: str) -> Document:
    if "messages" in row:
        return Chat(_messages(row["messages"], place))
    if "conversations" in row:
        return Chat(_shared(row["conversations"], place))
    for first, second in PAIRS:
        if first in row and second in row:
            prompt, answer = _string(row, first, place), _string(row, second, place)
            if first == "instruction" and row.get("input"):
                prompt += "\n\n" + _string(row, "input", place)
            return Prompt(prompt, answer, "" if first == "prompt" else "\n")
    if "text" in row:
        return Text(_string(row, "text", place))
    keys = ", ".join(json.dumps(cut(key)) for key in list(row)[:8]) or "none"
    raise DataError(f"{place}: no known keys: found {keys}; known are {FORMS}")


def _string(row: dict[str, Any], key: str, place: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{place}: {json.dumps(key)} is {_kind(value)} where a string is expected")
    return value


def _messages(value: Any, place: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(f'{place}: "messages" is {_kind(value)} where a list of messages is expected')
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f'{place}: message {number} has no "role"; expected is {{"role", "content"}}')
        if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
            raise DataError(f'{place}: message {number} has no "content"; expected is {{"role", "content"}}')
    return value


def _shared(value: Any, place: str) -> list[Message]:
    """The ShareGPT form, in the other's words."""
    if not isinstance(value, list) or not value:
        raise DataError(f'{place}: "conversations" is {_kind(value)} where a list of turns is expected')
    messages = []
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str) or not isinstance(turn.get("value"), str):
            raise DataError(f'{place}: turn {number} is not {{"from", "value"}} with two strings')
        messages.append({"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]})
    return messages


def _kind(value: Any) -> str:
    if value in ([], {}, ""):
        return "empty"
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
