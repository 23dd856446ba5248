"""The keys that rows may have, and those that have other names in the data."""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from llamatrain.config.messages import LONGEST, nearest, worded
from llamatrain.errors import DataError, UsageError

MESSAGES = ("messages", "conversations", "conversation")  # what a row calls them
MEDIA = tuple(name for kind in ("image", "video", "audio") for name in (kind, f"{kind}s", f"{kind}_path"))
ASKS, ANSWERS = (
    ("prompt", "question", "instruction", "query", "input"),
    ("completion", "answer", "output", "response"),
)
USUAL = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
PAIRS = (*USUAL, *((ask, answer) for ask in ASKS for answer in ANSWERS if (ask, answer) not in USUAL))
WHOLE = (*MESSAGES, "text")
PREFERENCES = ("chosen", "rejected", "preferred_output", "non_preferred_output")
KEYS = (*WHOLE, *ASKS, *ANSWERS, "system", "history", "tools", *PREFERENCES, "label", "kto_tag")
NEXT = re.compile(rf",(?=(?:{'|'.join(KEYS)})=)")  # names of columns may hold commas, too
FORMS = (
    '{"text"}, {"prompt", "completion"}, {"question", "answer"}, {"instruction", "output"} with or without "input", '
    '{"messages": [{"role", "content"}]}, {"conversations": [{"from", "value"}]}'
)
SHOWN = 8  # names that are told


def mapping_of(text: str) -> dict[str, str]:
    """`prompt=question,completion=answer`: keys of a form, and what they are called in the data."""
    found = dict[str, str]()
    for part in NEXT.split(text) if text else ():
        key, equals, column = part.partition("=")
        if not equals or not column:
            raise UsageError(
                f"{worded(part)} names no key and its column; write prompt=question,completion=answer"
            )
        if key not in KEYS:
            raise UsageError(
                f"{worded(key)} is no key of a row{nearest(key, KEYS)}; there are {', '.join(KEYS)}"
            )
        if key in found or column in found.values():
            raise UsageError(f"{worded(key if key in found else column)} is named twice")
        found[key] = column
    return found


def repeated(names: Sequence[str]) -> str | None:
    """A name that is there twice."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def quoted_name(name: str) -> str:
    return json.dumps(name if len(name) <= LONGEST else f"{name[:LONGEST]}...", ensure_ascii=False)


def told(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return (", ".join(quoted_name(name) for name in names[:SHOWN]) or "none") + (
        f" and {more} more" if more > 0 else ""
    )


def media_in(names: Sequence[str]) -> dict[str, bool]:
    """Find what rows of a table are to say of its columns of images and the like, whose content is not read."""
    return {"media": True} if any(name.lower() in MEDIA for name in names) else {}


def in_small_letters(row: dict[str, Any], known: Collection[str] = KEYS) -> dict[str, Any]:
    """Write keys as they are known, where they begin with a capital letter."""
    if all(key.islower() for key in row):
        return row
    return {
        key.lower() if key.lower() in known and key.lower() not in row else key: value
        for key, value in row.items()
    }


def renamed(row: dict[str, Any], columns: Mapping[str, str], place: str) -> dict[str, Any]:
    """A row with the keys of its form; what they hide is left out."""
    if not columns:
        return in_small_letters(row)
    check_named(list(row), columns, place)
    hidden = {*columns, *columns.values()}
    return {key: row[name] for key, name in columns.items()} | {
        key: value for key, value in row.items() if key not in hidden
    }


def check_named(names: Sequence[str], columns: Mapping[str, str], place: str) -> None:
    for key, name in columns.items():
        if name not in names:
            raise DataError(
                f"{place}: there is no {quoted_name(name)}, which --columns wants for {key}; there are {told(names)}"
            )


def wanted(names: Sequence[str], columns: Mapping[str, str], place: str) -> list[str]:
    """Those of a table's columns that are read; some of them make rows of a known form."""
    check_named(names, columns, place)
    taken = {*columns.values()}
    by_key = {name.lower(): name for name in names if name.lower() in KEYS and name not in taken} | dict(
        columns
    )
    complete = any(key in by_key for key in (*WHOLE, *PREFERENCES)) or any(
        {*pair} <= {*by_key} for pair in PAIRS
    )
    if not complete:
        raise DataError(
            f"{place}: no known columns: found {told(names)}; known are {FORMS}; --columns prompt=NAME,... names others"
        )
    read = {*by_key.values()}
    return [name for name in names if name in read]
