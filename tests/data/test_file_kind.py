"""Files that are no training data are refused in a line that says what was received, and what is taken."""

import gzip
import io
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from llamatrain.data.find_files import DataFile, find_sources, skipped_files
from llamatrain.data.readers.encoding import MAX_BAD_BYTES, EncodingCheck
from llamatrain.data.readers.text import read_chunks, read_samples
from llamatrain.data.vocabulary_text import read_texts
from tests.helpers.cli import TINY, ran, run, text_file
from tests.helpers.errors import raises
from tests.run.test_from_scratch_errors import refused

FRENCH = "Où est passée l'écriture ? Là-bas, près de la forêt : des élèves l'ont trouvée à Noël.\n"
PAGE = b"\xef\xbb\xbf \n<!DOCTYPE html>\n<html><body>words</body></html>"
KNOWN = r".*\(\.txt, \.md, \.jsonl, \.ndjson, \.json, \.csv, \.tsv, \.parquet, and these as \.gz and \.zst,"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.html", b"<p>words</p>", r"a\.html: markup"),
        ("page", PAGE, r"page: markup"),
        ("feed.rss", b'<?xml version="1.0"?><rss/>', r"feed\.rss: markup"),
        ("a.pdf", b"%PDF-1.4 words", r"a\.pdf: a document"),
        ("a.ps", b"%!PS-Adobe-3.0\nwords", r"a\.ps: a document"),
        ("figure", b"%!PS-Adobe-3.0\nwords", r"figure: a document"),
        ("paper", b"%PDF-1.4 words", r"paper: a document"),
        ("a.docx", b"PK\x03\x04words", r"a\.docx: a document"),
        ("a.html.gz", gzip.compress(PAGE), r"a\.html\.gz: markup"),
        ("a.tar.gz", gzip.compress(b"words " * 99), r"a\.tar\.gz: an archive"),
        ("a.txt.xz", b"\xfd7zXZ\0words", r"a\.txt\.xz: an archive"),
        ("a.feather", b"ARROW1", r"a\.feather: a table of binary data"),
    ],
)
def test_what_is_no_training_data(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with raises("unsupported-format", match=told + KNOWN) as failed:
        find_sources([str(tmp_path / name)])
    assert "\n" not in str(failed.value)


def test_a_name_that_is_known_is_believed(tmp_path: Path) -> None:
    """What merely mentions a mark is no page, and two lines are no table."""
    for name, content in {"table.md": b"a,b\n1,2\n", "notes": b"see <html> and <!doctype html>"}.items():
        (tmp_path / name).write_bytes(content)
        assert [source.kind for source in find_sources([str(tmp_path / name)])] == ["text"]


def test_standard_input_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamatrain.data import find_files

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PAGE)))
    find_files._standard_input.cache_clear()
    with raises("unsupported-format", match="standard input: markup"):
        find_sources(["-"])
    find_files._standard_input.cache_clear()


def test_a_folder_passes_over_other_files(tmp_path: Path) -> None:
    for name in ("a.csv", "b.html", "c.pdf"):
        (tmp_path / name).write_bytes(b"something")
    (tmp_path / "d.txt").write_text("words")
    assert [source.path.name for source in find_sources([str(tmp_path)])] == ["d.txt"]
    assert skipped_files([str(tmp_path), str(tmp_path / "d.txt"), "-"]) == "1 .csv, 1 .html, 1 .pdf"
    assert skipped_files([str(tmp_path / "d.txt")]) == ""


def test_what_is_passed_over_is_said(tmp_path: Path) -> None:
    text_file(tmp_path)
    (tmp_path / "c.pdf").write_bytes(b"something")
    done = ran("from-scratch", tmp_path, *TINY, "--ctx", 32, "--iters", 1, "--out", tmp_path / "run")
    assert "1 .pdf ignored" in done.err


# ---- other encodings --------------------------------------------------------


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "iso8859-15", "mac-roman"])
def test_text_in_another_encoding(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(("plain words\n" + FRENCH * 3).encode(encoding))
    with raises("not-utf8", match=r"a\.txt: .*the first 0x\w\w at byte 13, in line 2\).*iconv") as failed:
        find_sources([str(path)])
    assert "\n" not in str(failed.value)
    refused(run("from-scratch", path, "--iters", 1, "--vocab-size", "bytes"), 1, "[not-utf8]", "line 2")


@pytest.mark.parametrize(
    "reads",
    [read_chunks, lambda source: read_texts([source]), lambda source: read_samples(source, "w", False, None)],
)
def test_other_bytes_are_found_wherever_they_begin(
    reads: Callable[[DataFile], Iterable[object]], tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"words\n" * 400_000 + (FRENCH * 3).encode("latin-1"))
    with raises("not-utf8", match=r"the first 0xF9 at byte 2400001, in line 400001\)"):
        for _ in reads(find_sources([str(path)])[0]):
            pass


def test_some_stray_bytes_stay_what_they_are(tmp_path: Path) -> None:
    """A few anywhere, and more of them where there is much that is sound."""
    path = tmp_path / "a.txt"
    for text in (
        b"words \xe9\xff " * (MAX_BAD_BYTES // 2),
        "你好，".encode() * 1000 + b"\xff" * 20 + b" end",
    ):
        path.write_bytes(text)
        assert b"".join(read_chunks(find_sources([str(path)])[0])) == text


def test_text_is_the_same_wherever_it_is_cut() -> None:
    """Characters that are cut in two, and the replacement character itself, are no bad bytes."""
    text, dice = ("é\ufffd你好😀 a\n" * 300).encode(), random.Random(1)
    reading, at = EncodingCheck("a"), 0
    while at < len(text):
        size = dice.randrange(1, 7)
        reading.feed(text[at : at + size])
        at += size
    assert (reading.bad, reading.first_bad) == (0, "")
    assert reading.beyond_ascii == sum(byte >= 128 for byte in text)


def test_lines_in_another_encoding_are_refused_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "words"}\n{"text": "\xe9"}\n')
    with raises("not-utf8", match="line 2: "):
        list(read_texts(find_sources([str(path)])))
