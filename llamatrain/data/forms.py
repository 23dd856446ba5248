"""JSON lines by their keys: text, a prompt with its answer, or a chat."""

import json
from dataclasses import dataclass
from typing import Any

from llamatrain.data.json_values import parsed, strings_of
from llamatrain.data.messages import Message, kind_of, messages_of, shared_of, tools_of
from llamatrain.errors import DataError
from llamatrain.files.cursor import cut

FORMS = (
    '{"text"}, {"prompt", "completion"}, {"question", "answer"}, {"instruction", "output"} with or without "input", '
    '{"messages": [{"role", "content"}]}, {"conversations": [{"from", "value"}]}'
)
GOOD = '{"messages"} or {"prompt", "completion"}'
PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
PREFERENCES = ("chosen", "rejected", "preferred_output", "non_preferred_output")


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


def parse_line(line: bytes, place: str) -> Document:
    return _document(row_of(line, place), place)


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
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: no JSON that can be read: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: {kind_of(row)} where an object is expected, one of {FORMS}")
    return row


def _document(row: dict[str, Any], place: str) -> Document:
    check_alone(row, place)
    if "messages" in row:
        return Chat(messages_of(row, place), tools_of(row, place))
    if "conversations" in row:
        return Chat(shared_of(row, place), tools_of(row, place))
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
