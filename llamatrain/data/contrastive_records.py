"""Parses contrastive data: a query, a text that answers it, and texts that do not."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llamatrain.data.chat.messages import describe_type
from llamatrain.data.column_names import NEGATIVES, POSITIVES, QUERIES, format_keys, rename_keys
from llamatrain.data.files import DataFile
from llamatrain.data.records import parse_object
from llamatrain.errors import DataError

FORM = '{"query", "positive"} with or without "negatives"'
NUMBERED = "negative_"  # begins the names of columns with one negative each


@dataclass(frozen=True)
class TextGroup:
    """A query, a text that answers it, and texts that do not."""

    query: str
    positive: str
    negatives: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """The query, the positive and the negatives."""
        return (self.query, self.positive, *self.negatives)


def parse_group(line: bytes, location: str, columns: Mapping[str, str] | None = None) -> TextGroup:
    """Parse a JSON line into a group."""
    row = rename_keys(parse_object(line, location), columns or {}, location)
    query, positive = (read_text(row, names, location) for names in (QUERIES, POSITIVES))
    negatives = tuple(read_negatives(row, location))
    if positive in negatives:
        raise DataError(
            f"{location}: the positive text is also one of the negatives; remove it there",
            code="same-answers",
        )
    return TextGroup(query, positive, negatives)


def read_text(row: Mapping[str, Any], names: tuple[str, ...], location: str) -> str:
    """Read the text that one of some keys holds; a list of one text counts as that text."""
    key = next((name for name in names if name in row), None)
    if key is None:
        raise DataError(
            f"{location}: no {json.dumps(names[0])} (got keys {format_keys(list(row))}); --objective "
            f"contrastive and rerank need {FORM}",
            code="no-group",
        )
    value = row[key]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list) and value:
        raise DataError(
            f"{location}: {json.dumps(key)} has {len(value)} texts; give each one a row of its own",
            code="several-positives",
        )
    return check_text(value, key, location)


def read_negatives(row: Mapping[str, Any], location: str) -> Iterable[str]:
    """Yield the negatives: a list, a text, or the columns negative_1, negative_2, ..."""
    for key, value in row.items():
        if key in NEGATIVES or (key.startswith(NUMBERED) and key.removeprefix(NUMBERED).isdigit()):
            values = value if isinstance(value, list) else [] if value is None else [value]
            yield from (check_text(each, key, location) for each in values)


def check_text(value: Any, key: str, location: str) -> str:
    """Return a text; raise DataError if it is none or empty."""
    if not isinstance(value, str):
        raise DataError(
            f"{location}: {json.dumps(key)} is {describe_type(value)}; expected a text", code="wrong-type"
        )
    if not value.strip():
        raise DataError(f"{location}: {json.dumps(key)} is empty; remove the row", code="empty-text")
    return value


def check_has_groups(sources: Iterable[DataFile]) -> None:
    """Raise DataError for plain text, which has no groups."""
    for source in sources:
        if source.kind != "lines":
            raise DataError(
                f"{source.name}: plain text has no pairs; --objective contrastive and rerank need JSON lines of {FORM}",
                code="no-group",
            )
