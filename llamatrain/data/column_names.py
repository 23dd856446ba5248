"""Names the keys of rows and maps them to other names in the data."""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from llamatrain.config.messages import LONGEST, quote, suggest
from llamatrain.errors import DataError, UsageError

MESSAGES = ("messages", "conversations", "conversation")  # keys of chats
MEDIA = tuple(name for kind in ("image", "video", "audio") for name in (kind, f"{kind}s", f"{kind}_path"))
PROMPTS = ("prompt", "question", "instruction", "query", "input")
ANSWERS = ("completion", "answer", "output", "response")
USUAL_PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
OTHER_PAIRS = tuple(
    (prompt, answer) for prompt in PROMPTS for answer in ANSWERS if (prompt, answer) not in USUAL_PAIRS
)
PAIRS = (*USUAL_PAIRS, *OTHER_PAIRS)
WHOLE = (*MESSAGES, "text")  # keys that make a row by themselves
QUERIES, POSITIVES, NEGATIVES = ("query", "anchor"), ("positive", "pos"), ("negatives", "negative", "neg")
PREFERENCES = ("chosen", "rejected", "preferred_output", "non_preferred_output")
OTHERS = ("system", "history", "tools", *PREFERENCES, "label", "kto_tag", "anchor", *POSITIVES, *NEGATIVES)
KEYS = (*WHOLE, *PROMPTS, *ANSWERS, *OTHERS)
SEPARATOR = re.compile(rf",(?=(?:{'|'.join(KEYS)})=)")  # column names may contain commas, too
FORMS = (
    '{"text"}, {"prompt", "completion"}, {"question", "answer"}, {"instruction", "output"} with or '
    'without "input", '
    '{"messages": [{"role", "content"}]}, {"conversations": [{"from", "value"}]}'
)
MAX_LISTED = 8  # names in a message


def parse_mapping(text: str) -> dict[str, str]:
    """Parse `prompt=question,completion=answer` into a dict of keys and column names."""
    mapping = dict[str, str]()
    for part in SEPARATOR.split(text) if text else ():
        key, equals, column = part.partition("=")
        if not equals or not column:
            raise UsageError(
                f"expected KEY=COLUMN (got {quote(part)}); write prompt=question,completion=answer",
                code="bad-columns",
            )
        if key not in KEYS:
            raise UsageError(
                f"unknown key {quote(key)}{suggest(key, KEYS)}; known keys are {', '.join(KEYS)}",
                code="bad-columns",
            )
        if key in mapping or column in mapping.values():
            name = key if key in mapping else column
            raise UsageError(f"{quote(name)} is given twice; give it once", code="bad-columns")
        mapping[key] = column
    return mapping


def find_duplicate(names: Sequence[str]) -> str | None:
    """Return a name that occurs twice, or None."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def quote_name(name: str) -> str:
    """Quote a name for a message, shortened if it is long."""
    return json.dumps(name if len(name) <= LONGEST else f"{name[:LONGEST]}...", ensure_ascii=False)


def format_keys(names: Sequence[str]) -> str:
    """List the first few names for a message, quoted, and count the rest."""
    text = ", ".join(quote_name(name) for name in names[:MAX_LISTED]) or "none"
    rest = len(names) - MAX_LISTED
    return f"{text} and {rest} more" if rest > 0 else text


def media_flag(names: Sequence[str]) -> dict[str, bool]:
    """Return {"media": True} if a table has a column of images, video or audio.

    The content of these columns is not read.
    """
    return {"media": True} if any(name.lower() in MEDIA for name in names) else {}


def lower_keys(row: dict[str, Any], known: Collection[str] = KEYS) -> dict[str, Any]:
    """Write known keys in lower case."""
    if all(key.islower() for key in row):
        return row
    return {
        key.lower() if key.lower() in known and key.lower() not in row else key: value
        for key, value in row.items()
    }


def rename_keys(row: dict[str, Any], columns: Mapping[str, str], location: str) -> dict[str, Any]:
    """Rename the columns of a row to the keys they were mapped to; drop the keys they replace."""
    if not columns:
        return lower_keys(row)
    check_columns(list(row), columns, location)
    replaced = {*columns, *columns.values()}
    renamed = {key: row[name] for key, name in columns.items()}
    return renamed | {key: value for key, value in row.items() if key not in replaced}


def check_columns(names: Sequence[str], columns: Mapping[str, str], location: str) -> None:
    """Raise DataError if a mapped column does not exist."""
    for key, name in columns.items():
        if name not in names:
            raise DataError(
                f"{location}: no column {quote_name(name)}, which --columns maps to {key} (got "
                f"{format_keys(names)})",
                code="no-such-column",
            )


def select_columns(names: Sequence[str], columns: Mapping[str, str], location: str) -> list[str]:
    """Return the columns of a table that are read; raise DataError if they make no known row."""
    check_columns(names, columns, location)
    mapped = {*columns.values()}
    by_key = {name.lower(): name for name in names if name.lower() in KEYS and name not in mapped}
    by_key |= columns
    has_whole = any(key in by_key for key in (*WHOLE, *PREFERENCES, *POSITIVES))
    if not has_whole and not any({*pair} <= {*by_key} for pair in PAIRS):
        raise DataError(
            f"{location}: no known columns (got {format_keys(names)}); known are {FORMS}; "
            "--columns prompt=NAME,... maps others",
            code="unknown-columns",
        )
    selected = {*by_key.values()}
    return [name for name in names if name in selected]
