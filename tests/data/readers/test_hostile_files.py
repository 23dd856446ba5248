"""Files that are broken or mean harm: each is refused in one line that names the place, in little time and memory."""

import gzip
import io
import json
import os
import random
import re
import struct
import time
import tracemalloc
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from llamatrain.data.dataset import open_corpus
from llamatrain.data.find_files import find_sources
from llamatrain.data.options import DataOptions
from llamatrain.data.readers import compressed, csv, json_array, parquet
from llamatrain.data.readers.text import rows_of
from llamatrain.errors import DataError, LlamatrainError
from tests.data.readers.test_readers import as_parquet, as_zst
from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.cli import run

NAMES = b"prompt,completion\n"
LINE = b'{"prompt":"a","completion":"b"}\n'
ARRAY = b'[{"prompt":"a","completion":"b"}]'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(name: str, data: bytes, **options: Any) -> str:
    Path(name).write_bytes(data)
    begin = time.process_time()
    with pytest.raises(DataError) as failed:
        open_corpus([name], ByteTokenizer(), DataOptions(**options), 64, 0)
    told = str(failed.value)
    assert "\n" not in told and told.startswith(name) and time.process_time() - begin < 20
    return told


TABLES = {
    "a quote that is never closed": (
        NAMES + b"a,b\n" + b'a,"b\n' + b"c,d\n" * 9,
        "line 3: a quote opens in this row that",
    ),
    "a letter behind a quote": (
        NAMES + b'"a"b,c\n',
        "line 2: a letter stands behind the quote that closes a field",
    ),
    "a quote that opens far before": (NAMES + b'"a,b\nc,d\n"e",f\n', "the row goes on to line 4"),
    "too few fields": (NAMES + b"a,b\na\n", "line 3: 1 fields, where the names in line 1 are 2"),
    "too many fields": (NAMES + b"a,b,c\n", "line 2: 3 fields, where the names in line 1 are 2"),
    "very many fields": (NAMES + b"," * 10**6, "line 2: 1,000,001 fields"),
    "a name twice": (b"prompt,completion,prompt\na,b,c\n", 'line 1: two columns are named "prompt"'),
    "a name that is empty": (b"prompt,,completion\na,b,c\n", "line 1: column 2 of 3 has no name"),
    "no names": (b",,\n1,2,3\n", "line 1: no names of columns"),
    "no known names": (b"hello,there\na,b\n", 'line 1: no known columns: found "hello", "there"'),
    "very many names": (b",".join(b"c%d" % n for n in range(10**5)) + b"\n", "and 99992 more"),
    "no rows": (NAMES, "there is no row below the names"),
    "zero bytes": (NAMES + b"a\0,b\n", "binary data, a zero byte at offset 19"),
    "zero bytes far behind": (NAMES + b"a,b\n" * 20_000 + b"a,\0b\n", "line 20002: a zero byte"),
    "another encoding": (NAMES + "é,b\n".encode("latin-1"), r"line 2: no UTF-8 text \(0xE9 at byte 1\)"),
    "another encoding far behind": (NAMES + b"a,b\n" * 20_000 + b"a,\xff\n", "line 20002: no UTF-8 text"),
    "two tables in one": (NAMES + b"a,b\n\xef\xbb\xbf" + NAMES, "line 3: a byte order mark in the midst"),
    "old Macintosh's lines": (b"prompt,completion\ra,b\r", "line 1: a carriage return stands alone"),
    "chats that are none": (b"messages\nhello\n", 'line 2: "messages" is a string where a list'),
    "chats without roles": (b'messages\n"[{""a"": 1}]"\n', 'line 2: message 1 has no "role"'),
    "answers that are bad": (
        b"prompt,completion,label\na,b,False\n",
        r'line 2: preferences \("completion", "label"\)',
    ),
    "only blank lines": (b"\n\n\n", "there is only white space in it"),
}
ARRAYS = {
    "ends early": (ARRAY[:-1], "element 1: the file ends within it"),
    "ends in a string": (ARRAY[:-6], "element 1: the file ends within it"),
    "ends in an escape": (b'[{"text":"a\\', "element 1: the file ends within it"),
    "is followed by more": (
        ARRAY + b'\n{"a":1}',
        r"""the array of 1 elements is followed by more: '\{"a":1\}'""",
    ),
    "two of them": (ARRAY * 2, "is followed by more"),
    "is empty": (b" [ ] ", "the array is empty"),
    "ends in a comma": (ARRAY[:-1] + b",]", "element 2: there is nothing between two commas"),
    "is only a comma": (b"[,]", "element 1: there is nothing between"),
    "another bracket": (b'[{"a":1}}', r"element 1: '\}' stands where it cannot"),
    "no array": (b"42", r"no JSON of rows: it begins with '42', where an array begins with \["),
    "words": (b"hello", "no JSON of rows: it begins with 'hello'"),
    "objects with commas": (LINE + b"," + LINE, "a comma behind element 1, and no array around it"),
    "objects, the last one cut": (LINE * 2 + LINE[:-4], "element 3: the file ends within it"),
    "nested too deep": (
        b'[{"text":' + b"[" * 10**5 + b"]" * 10**5 + b"}]",
        "element 1: no JSON that can be read: it nests too deeply",
    ),
    "nested without an end": (b"[" * 10**6, "element 1: the file ends within it"),
    "a huge number": (
        b'[{"text": ' + b"9" * 10**5 + b"}]",
        "element 1: no JSON .*: a number of thousands of digits",
    ),
    "no objects": (b"[null]", "element 1: null where an object is expected"),
    "nulls": (
        b'[{"prompt":null,"completion":"b"}]',
        'element 1: "prompt" is null where a string is expected',
    ),
    "half a surrogate": (b'[{"text":"\\ud800"}]', "element 1: no UTF-8 text"),
    "zero bytes": (b'[{"text":"a\0b"}]', "a zero byte at offset 11"),
    "zero bytes far behind": (b"[" + (LINE[:-1] + b",") * 3000 + b'{"text":"a\0"}]', "element 3001: no JSON"),
    "another encoding": (b'[{"text":"\xe9"}]', "element 1: no UTF-8 text"),
    "an object around it": (b'{"lines":' + ARRAY + b"}", 'element 1: no known keys: found "lines"'),
    "a column each": (b'{"prompt":["a"],"completion":["b"]}', 'element 1: "prompt" is a list where a string'),
}
PACKED = {
    "cut.csv.gz": (gzip.compress(NAMES * 1000)[:-9], "packed data that ends early: it was cut short"),
    "cut.zst": (lambda: as_zst(LINE * 1000)[:-5], "packed data that ends early: it was cut short"),
    "none.csv.gz": (b"hello world", "packed data that is damaged: Not a gzipped file"),
    "none.jsonl.zst": (b"hello world", "packed data that is damaged"),
    "sum.jsonl.gz": (gzip.compress(LINE * 99)[:-8] + bytes(8), "packed data that is damaged: CRC"),
    "tail.jsonl.gz": (gzip.compress(LINE) + b"words", "packed data that is damaged"),
    "empty.csv.gz": (gzip.compress(b""), "the file is empty"),
    "nothing.gz": (b"", "the file is empty"),
    "twice.jsonl.gz": (gzip.compress(gzip.compress(LINE)), "packed twice, by the look of it; unpack it once"),
    "window.zst": (b"\x28\xb5\x2f\xfd\x00\xf8" + bytes(50), "packed data that is damaged"),
    "page.gz": (gzip.compress(b"<!doctype html><p>words"), "markup"),
    "half.txt": (
        "words".encode("utf-16")[:-1],
        "begins as UTF-16, and is none: it ends in the midst of a character",
    ),
    "surrogate.txt": (b"\xff\xfe\x00\xd8a\x00", "begins as UTF-16, and is none: near byte 2"),
    "mark.txt": (b"\xff\xfe", "the file is empty"),
    "wide.txt": ("words".encode("utf-32"), "looks like UTF-32; save it as UTF-8"),
    "mixed.jsonl": (LINE + '{"text":"a"}\n'.encode("utf-16"), "binary data, a zero byte"),
}


@pytest.mark.parametrize("fault", TABLES)
def test_tables(fault: str) -> None:
    data, told = TABLES[fault]
    assert re.search(told, refusal("a.csv", data))


@pytest.mark.parametrize("fault", ARRAYS)
def test_arrays(fault: str) -> None:
    data, told = ARRAYS[fault]
    assert re.search(told, refusal("a.json", data))


@pytest.mark.parametrize("name", PACKED)
def test_packed_files_and_encodings(name: str) -> None:
    data, told = PACKED[name]
    if name.endswith(".zst"):
        pytest.importorskip("pyarrow")
    assert told in refusal(name, data() if callable(data) else data)


# ---- what unpacks to too much --------------------------------------------------


BOMBS: dict[str, Callable[[], bytes]] = {
    "text.txt.gz": lambda: gzip.compress(b"\n" * 10**6),
    "words.txt.gz": lambda: gzip.compress(b"words " * 10**5),
    "line.jsonl.gz": lambda: gzip.compress(b'{"text":"' + b"a" * 10**6 + b'"}'),
    "rows.jsonl.gz": lambda: gzip.compress(LINE * 10**4),
    "blanks.json.gz": lambda: gzip.compress(b"[" + b" " * 10**6),
    "brackets.json.gz": lambda: gzip.compress(b"[" * 10**6),
    "element.json.gz": lambda: gzip.compress(b'[{"text":"' + b"a" * 10**6),
    "quote.csv.gz": lambda: gzip.compress(NAMES + b'"' + b"a\n" * 10**6),
    "wide.csv.gz": lambda: gzip.compress(NAMES + b"," * 10**6),
    "zeros.parquet.gz": lambda: gzip.compress(b"PAR1" + bytes(10**6)),
    "line.jsonl.zst": lambda: as_zst(b'{"text":"' + b"a" * 10**6 + b'"}'),
    "rows.csv.zst": lambda: as_zst(NAMES + b"a,b\n" * 10**5),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_unpacks_to_too_much(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits far below what they are."""
    data = BOMBS[name]()
    for module in (compressed, parquet):
        monkeypatch.setattr(module, "FREE", 1 << 16)
    for module in (json_array, csv):
        monkeypatch.setattr(module, "LONGEST", 1 << 15)
    monkeypatch.setattr("llamatrain.data.readers.text.LONGEST", 1 << 15)
    tracemalloc.start()
    told = refusal(name, data)
    assert tracemalloc.get_traced_memory()[1] < 24 << 20
    tracemalloc.stop()
    assert (
        "unpacks to more than" in told
        or "is longer than" in told
        or "a row of more than" in told
        or "fields" in told
    )


def test_a_limit_is_of_the_file_s_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "FREE", 1000)
    dice = random.Random(1)
    rows = [json.dumps({"text": "".join(dice.choices("abc ", k=50))}) for _ in range(1000)]
    Path("a.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    (source,) = find_sources(["a.jsonl.gz"])
    assert len(list(rows_of(source))) == 1000


# ---- Parquet -------------------------------------------------------------------


def test_files_that_are_no_parquet() -> None:
    pytest.importorskip("pyarrow")
    whole = as_parquet([{"prompt": "a", "completion": "b"}] * 3)
    for data, told in (
        (b"", "no Parquet file: it does not begin with PAR1"),
        (b"PAR1", "no Parquet file"),
        (b"prompt,completion\n", "no Parquet file"),
        (whole[:-20], "a Parquet file that ends early: it was cut short"),
        (b"PAR1" + bytes(100) + b"PAR1", "a Parquet file that cannot be read, behind row 0"),
        (whole[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1", "cannot be read, behind row 0"),
    ):
        assert told in refusal("a.parquet", data)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"x": 1}], 'no known columns: found "x"'),
        ([{"text": 1}], 'row 1: "text" is a number where a string is expected'),
        ([{"text": ["a"]}], 'row 1: "text" is a list where a string is expected'),
        ([{"text": {"a": "b"}}], 'row 1: "text" is an object where a string is expected'),
        (
            [{"prompt": "a", "completion": "b"}, {"prompt": None, "completion": "b"}],
            'row 2: "prompt" is null where a string',
        ),
        ([{"text": b"ok"}, {"text": b"\xff"}], "row 2: no UTF-8 text"),
        ([{"messages": [{"role": "user", "content": None}]}], 'row 1: message 1 has no "content"'),
        ([{"text": None}], 'row 1: "text" is null'),
        ([{"text": "a" * 10**5}] * 30, "250 times the file's"),
        ([{"messages": [{"role": "user", "content": "a" * 10**5}]}] * 30, "250 times the file's"),
    ],
)
def test_rows_of_parquet_that_cannot_be(
    rows: list[dict[str, Any]], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "FREE", 1 << 18)
    assert told in refusal("a.parquet", as_parquet(rows, compression="zstd"))


def test_a_time_is_no_text() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as library

    made = io.BytesIO()
    library.write_table(pyarrow.table({"text": pyarrow.array([1], pyarrow.timestamp("s"))}), made)
    assert "row 1: holds what is no JSON (datetime)" in refusal("a.parquet", made.getvalue())


def test_mutants_end_in_a_line() -> None:
    """Whatever is changed in a file of any form, it is read or refused."""
    dice = random.Random(7)
    files = {
        "a.csv": NAMES + b'"a ""b""",c\n' * 20,
        "a.json": ARRAY[:-1] + b"," + ARRAY[1:],
        "a.jsonl.gz": gzip.compress(LINE * 9),
    }
    files["w.txt"] = ("words é " * 30).encode("utf-16")
    if find_spec("pyarrow"):
        files |= {
            "a.parquet": as_parquet([{"prompt": "a", "completion": "b"}] * 5),
            "a.jsonl.zst": as_zst(LINE * 9),
        }
    marks = [b'"', b",", b"\n", b"\0", b"\xff", b"[", b"]", b"{", b"\\", b"\r", b"\xef\xbb\xbf", b""]
    for name, data in files.items():
        for _ in range(60):
            at = dice.randrange(len(data))
            mutant = data[:at] + dice.choice(marks) + data[at + dice.randrange(3) :]
            Path(name).write_bytes(mutant[: dice.choice([None, at])] or b"x")
            try:
                (source,) = find_sources([name])
                for _ in rows_of(source) if source.kind == "lines" else ():
                    pass
            except LlamatrainError as error:
                assert "\n" not in str(error)


# ---- zstd by each that knows it -------------------------------------------------


@pytest.mark.parametrize("library", ["compression", "zstandard", "pyarrow"])
def test_each_library_unpacks_zstd(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not find_spec(library):
        pytest.skip(f"{library} is not installed")
    data = as_zst(LINE * 1000)
    monkeypatch.setattr(compressed, "find_spec", lambda name: name.partition(".")[0] == library)
    for name, packed, rows in (("a.jsonl.zst", data, 1000), ("b.jsonl.zst", data * 2, 2000)):
        Path(name).write_bytes(packed)
        (source,) = find_sources([name])
        assert len(list(rows_of(source))) == rows
    assert "ends early" in refusal("c.jsonl.zst", data[:-3])
    assert "is damaged" in refusal("d.jsonl.zst", data + b"words and more words")
    assert "is damaged" in refusal("e.jsonl.zst", b"words and more words")


def test_the_command_says_it_in_a_line() -> None:
    for name, data in {
        "a.csv": NAMES + b'"a\n',
        "a.json": ARRAY[:-1],
        "a.csv.gz": gzip.compress(NAMES)[:-4],
    }.items():
        Path(name).write_bytes(data)
        done = run("from-scratch", name, "--vocab-size", "bytes", "--out", "run")
        assert (
            done.code == 1
            and len(done.errors) == 1
            and name in done.errors[0]
            and "Traceback" not in done.err
        )
        assert not os.path.lexists("run")
    done = run("from-scratch", "a.csv", "--columns", "prompt")
    assert done.code == 2 and "--columns: 'prompt' names no key" in done.err
