"""The table of file formats: what a new reader has to declare, and that nothing else needs to know it."""

from pathlib import Path

import pytest

from llamatrain.data import file_kind
from llamatrain.data.files import DataFile, Format
from llamatrain.data.find_files import find_sources
from llamatrain.data.readers import formats


def test_names_and_suffixes_are_unique() -> None:
    names = [format.name for format in formats.FORMATS]
    suffixes = [suffix for format in formats.FORMATS for suffix in format.suffixes]
    assert len({*names}) == len(names) and len({*suffixes}) == len(suffixes)


def test_only_text_has_no_rows() -> None:
    assert [format.name for format in formats.FORMATS if format.read_rows is None] == ["text"]


def test_binary_formats_check_their_files() -> None:
    assert all(format.check for format in formats.BINARY)


def test_a_new_format_needs_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_rows(source: DataFile):
        with source.open() as stream:
            for number, line in enumerate(stream, 1):
                yield number, b'{"text": "%s"}' % line.strip()

    words = Format("words", (".words",), read_rows, unit="word")
    monkeypatch.setitem(file_kind.BY_SUFFIX, ".words", words)
    (tmp_path / "a.words").write_text("one\ntwo\n")
    (source,) = find_sources([str(tmp_path / "a.words")])
    assert (source.format, source.kind) == (words, "lines")
    assert [row for _, row in source.rows()] == [b'{"text": "one"}', b'{"text": "two"}']
    assert source.locate(2).endswith("a.words, word 2")
