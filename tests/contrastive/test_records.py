"""Rows of queries, positives and negatives: their forms, and those that are refused."""

import json
from typing import Any

import pytest

from llamatrain.data.contrastive_records import TextGroup, parse_group
from tests.helpers.errors import raises


def parse(row: Any) -> TextGroup:
    return parse_group(json.dumps(row).encode(), "data.jsonl:1")


@pytest.mark.parametrize(
    ("row", "negatives"),
    [
        ({"query": "a", "positive": "b"}, ()),
        ({"query": "a", "positive": "b", "negatives": []}, ()),
        ({"query": "a", "positive": "b", "negatives": ["c", "d"]}, ("c", "d")),
        ({"query": "a", "positive": "b", "negative": "c"}, ("c",)),
        ({"query": "a", "positive": "b", "negative": None}, ()),
        ({"anchor": "a", "positive": "b", "negative_1": "c", "negative_2": "d"}, ("c", "d")),
        ({"query": "a", "pos": ["b"], "neg": ["c"], "prompt": "?"}, ("c",)),
        ({"Query": "a", "Positive": "b"}, ()),
    ],
)
def test_forms(row: dict[str, Any], negatives: tuple[str, ...]) -> None:
    assert parse(row) == TextGroup("a", "b", negatives)


def test_columns() -> None:
    line = json.dumps({"question": "a", "passage": "b", "query": 3}).encode()
    assert parse_group(line, "f:1", {"query": "question", "positive": "passage"}) == TextGroup("a", "b")


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"positive": "b"}, "no-group"),
        ({"query": "a"}, "no-group"),
        ({"prompt": "a", "completion": "b"}, "no-group"),
        ({"query": 1, "positive": "b"}, "wrong-type"),
        ({"query": "a", "positive": None}, "wrong-type"),
        ({"query": "a", "positive": {"text": "b"}}, "wrong-type"),
        ({"query": "a", "positive": "b", "negatives": [1]}, "wrong-type"),
        ({"query": "a", "positive": "b", "negatives": {"c": 1}}, "wrong-type"),
        ({"query": "", "positive": "b"}, "empty-text"),
        ({"query": "a", "positive": " \n"}, "empty-text"),
        ({"query": "a", "positive": []}, "wrong-type"),
        ({"query": "a", "positive": "b", "negatives": [""]}, "empty-text"),
        ({"query": "a", "positive": "b", "negatives": ["b"]}, "same-answers"),
        ({"query": "a", "pos": ["b", "c"]}, "several-positives"),
        ([], "not-an-object"),
        ({}, "no-group"),
    ],
)
def test_refused(row: Any, code: str) -> None:
    """Each error names the line."""
    with raises(code) as error:
        parse(row)
    assert str(error.value).startswith("data.jsonl:1: ") and "\n" not in str(error.value)
