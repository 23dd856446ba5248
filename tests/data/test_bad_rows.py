"""Rows that cannot be used are listed together, and left out where that is wanted."""

import json
from pathlib import Path

import pytest

from llamatrain.data.dataset import open_dataset
from llamatrain.data.options import DataOptions
from llamatrain.errors import DataError
from llamatrain.run.row_kinds import KINDS
from tests.data.chat.test_encode import MISTRAL, talk
from tests.helpers.byte_tokenizer import ByteTokenizer

GOOD = {"messages": talk("a", "b")}
REFUSED = {"messages": [*talk("a"), *talk("b", "c")]}  # two questions, which the template does not take
UNKNOWN = {"words": "a"}


def data(folder: Path, *rows: object) -> str:
    path = folder / "c.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def opened(path: str, **options: bool):  # type: ignore[no-untyped-def]
    return open_dataset([path], ByteTokenizer(chat_template=MISTRAL), DataOptions(**options), 64, 0)[0]


def test_all_rows_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    path = data(tmp_path, GOOD, REFUSED, GOOD, UNKNOWN, REFUSED, REFUSED, REFUSED)
    with pytest.raises(DataError) as info:
        opened(path)
    told = str(info.value)
    assert (
        told.startswith(f"{path}, line 2: the chat template refuses it: roles must alternate")
        and "\n" not in told
    )
    assert f"also 4 other rows ({path}, line 4, {path}, line 5, {path}, line 6 and 1 more)" in told
    assert told.endswith("use --skip-bad-rows to skip them")


def test_rows_that_cannot_be_used_are_left_out(tmp_path: Path) -> None:
    path = data(tmp_path, GOOD, REFUSED, UNKNOWN, GOOD)
    for _ in range(2):  # read anew, and from the cache
        corpus = opened(path, skip_bad_rows=True)
        assert len(corpus) == 2 and corpus.refused == [f"{path}:2", f"{path}:3"] and not corpus.skipped
    with pytest.raises(DataError, match="line 2"):  # which what was kept of it does not change
        opened(path)


def test_rows_behind_many_that_cannot_be_used_are_read(tmp_path: Path) -> None:
    path = data(tmp_path, *[UNKNOWN] * 3000, GOOD)
    corpus = opened(path, skip_bad_rows=True)
    assert len(corpus) == 1 and len(corpus.refused) == 3000


def test_a_row_alone_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2: .*\"words\".*--skip-bad-rows"):
        opened(data(tmp_path, GOOD, UNKNOWN, GOOD))
    with pytest.raises(DataError) as info:  # where all are like that, leaving them out is no way
        opened(data(tmp_path, UNKNOWN, UNKNOWN))
    assert "line 1: no known keys" in str(info.value) and "--skip-bad-rows" not in str(info.value)


def test_pairs_that_cannot_be_compared_are_left_out_too(tmp_path: Path) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    path = data(tmp_path, pair, {**pair, "rejected": "b"}, {"prompt": "a"}, pair)
    options = DataOptions(skip_bad_rows=True, as_chat=False)
    corpus, _ = open_dataset([path], ByteTokenizer(), options, 64, 0, KINDS["pairs"].dataset)
    assert len(corpus) == 2 and corpus.refused == [f"{path}:2", f"{path}:3"]
