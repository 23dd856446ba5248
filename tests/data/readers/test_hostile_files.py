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

from llamatrain.data.dataset import open_dataset
from llamatrain.data.find_files import find_sources
from llamatrain.data.options import DataOptions
from llamatrain.data.readers import compressed, csv, json_array, jsonl
from llamatrain.errors import DataError, LlamatrainError, describe
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
    """Return the message of the error with its code, as the command line prints it."""
    Path(name).write_bytes(data)
    begin = time.process_time()
    with pytest.raises(DataError) as failed:
        open_dataset([name], ByteTokenizer(), DataOptions(**options), 64, 0)
    message = describe(failed.value)
    assert "\n" not in message and message.startswith(name) and time.process_time() - begin < 20
    return message


TABLES = {
    "a quote that is never closed": (
        NAMES + b"a,b\n" + b'a,"b\n' + b"c,d\n" * 9,
        r"line 3: .*\[bad-table-row\]$",
    ),
    "a letter behind a quote": (
        NAMES + b'"a"b,c\n',
        r"line 2: .*\[bad-table-row\]$",
    ),
    "a quote that opens far before": (NAMES + b'"a,b\nc,d\n"e",f\n', r"line 4.*\[bad-table-row\]$"),
    "too few fields": (NAMES + b"a,b\na\n", r"line 3: 1 fields, .* 2 .*\[wrong-field-count\]$"),
    "too many fields": (NAMES + b"a,b,c\n", r"line 2: 3 fields, .* 2 .*\[wrong-field-count\]$"),
    "very many fields": (NAMES + b"," * 10**6, r"line 2: 1,000,001 fields"),
    "a name twice": (b"prompt,completion,prompt\na,b,c\n", r'line 1: .* "prompt" .*\[duplicate-column\]$'),
    "a name that is empty": (b"prompt,,completion\na,b,c\n", r"line 1: column 2 of 3 .*\[no-column-names\]$"),
    "no names": (b",,\n1,2,3\n", r"line 1: .*\[no-column-names\]$"),
    "no known names": (b"hello,there\na,b\n", r'line 1: .*"hello", "there".*\[unknown-columns\]$'),
    "very many names": (b",".join(b"c%d" % n for n in range(10**5)) + b"\n", "and 99992 more"),
    "no rows": (NAMES, r"\[no-rows\]$"),
    "zero bytes": (NAMES + b"a\0,b\n", r"offset 19\).*\[zero-byte\]$"),
    "zero bytes far behind": (NAMES + b"a,b\n" * 20_000 + b"a,\0b\n", r"line 20002: .*\[zero-byte\]$"),
    "another encoding": (NAMES + "é,b\n".encode("latin-1"), r"line 2: .*0xE9 at byte 1\).*\[not-utf8\]$"),
    "another encoding far behind": (NAMES + b"a,b\n" * 20_000 + b"a,\xff\n", r"line 20002: .*\[not-utf8\]$"),
    "two tables in one": (NAMES + b"a,b\n\xef\xbb\xbf" + NAMES, r"line 3: .*\[stray-byte-order-mark\]$"),
    "old Macintosh's lines": (b"prompt,completion\ra,b\r", r"line 1: .*\[bad-table-row\]$"),
    "chats that are none": (b"messages\nhello\n", r'line 2: "messages" .* string.*\[wrong-type\]$'),
    "chats without roles": (b'messages\n"[{""a"": 1}]"\n', r'line 2: message 1 .*"role".*\[bad-message\]$'),
    "answers that are bad": (
        b"prompt,completion,label\na,b,False\n",
        r'line 2: .*"completion", "label".*\[unexpected-preferences\]$',
    ),
    "texts to rank": (
        b"query,positive\na,b\n",
        r"line 2: .*--objective contrastive or rerank \[unexpected-query\]$",
    ),
    "only blank lines": (b"\n\n\n", r"\[empty-file\]$"),
}
ARRAYS = {
    "ends early": (ARRAY[:-1], r"element 1: .*\[truncated-file\]$"),
    "ends in a string": (ARRAY[:-6], r"element 1: .*\[truncated-file\]$"),
    "ends in an escape": (b'[{"text":"a\\', r"element 1: .*\[truncated-file\]$"),
    "is followed by more": (
        ARRAY + b'\n{"a":1}',
        r"""1 elements .*'\{"a":1\}'.*\[bad-array\]$""",
    ),
    "two of them": (ARRAY * 2, r"1 elements .*\[bad-array\]$"),
    "is empty": (b" [ ] ", r"\[no-rows\]$"),
    "ends in a comma": (ARRAY[:-1] + b",]", r"element 2: .*\[bad-array\]$"),
    "is only a comma": (b"[,]", r"element 1: .*\[bad-array\]$"),
    "another bracket": (b'[{"a":1}}', r"element 1: .*'\}'.*\[bad-array\]$"),
    "no array": (b"42", r"'42'.*\[not-json-rows\]$"),
    "words": (b"hello", r"'hello'.*\[not-json-rows\]$"),
    "objects with commas": (LINE + b"," + LINE, r"comma after element 1.*\[bad-array\]$"),
    "objects, the last one cut": (LINE * 2 + LINE[:-4], r"element 3: .*\[truncated-file\]$"),
    "nested too deep": (
        b'[{"text":' + b"[" * 10**5 + b"]" * 10**5 + b"}]",
        r"element 1: .*\[not-json\]$",
    ),
    "nested without an end": (b"[" * 10**6, r"element 1: .*\[truncated-file\]$"),
    "a huge number": (
        b'[{"text": ' + b"9" * 10**5 + b"}]",
        r"element 1: .*digits.*\[not-json\]$",
    ),
    "no objects": (b"[null]", r"element 1: .*null.*\[not-an-object\]$"),
    "nulls": (
        b'[{"prompt":null,"completion":"b"}]',
        r'element 1: "prompt" .*null.*\[wrong-type\]$',
    ),
    "half a surrogate": (b'[{"text":"\\ud800"}]', r"element 1: .*\[not-utf8\]$"),
    "zero bytes": (b'[{"text":"a\0b"}]', r"offset 11\).*\[zero-byte\]$"),
    "zero bytes far behind": (
        b"[" + (LINE[:-1] + b",") * 3000 + b'{"text":"a\0"}]',
        r"element 3001: .*\[not-json\]$",
    ),
    "another encoding": (b'[{"text":"\xe9"}]', r"element 1: .*\[not-utf8\]$"),
    "an object around it": (b'{"lines":' + ARRAY + b"}", r'element 1: .*"lines".*\[unknown-keys\]$'),
    "a column each": (
        b'{"prompt":["a"],"completion":["b"]}',
        r'element 1: "prompt" .* list.*\[wrong-type\]$',
    ),
}
PACKED = {
    "cut.csv.gz": (gzip.compress(NAMES * 1000)[:-9], "[truncated-file]"),
    "cut.zst": (lambda: as_zst(LINE * 1000)[:-5], "[truncated-file]"),
    "none.csv.gz": (b"hello world", "[damaged-file]"),
    "none.jsonl.zst": (b"hello world", "[damaged-file]"),
    "sum.jsonl.gz": (gzip.compress(LINE * 99)[:-8] + bytes(8), "[damaged-file]"),
    "tail.jsonl.gz": (gzip.compress(LINE) + b"words", "[damaged-file]"),
    "empty.csv.gz": (gzip.compress(b""), "[empty-file]"),
    "nothing.gz": (b"", "[empty-file]"),
    "twice.jsonl.gz": (gzip.compress(gzip.compress(LINE)), "[unexpected-compression]"),
    "window.zst": (b"\x28\xb5\x2f\xfd\x00\xf8" + bytes(50), "[damaged-file]"),
    "page.gz": (gzip.compress(b"<!doctype html><p>words"), "[unsupported-format]"),
    "half.txt": (
        "words".encode("utf-16")[:-1],
        "[not-utf8]",
    ),
    "surrogate.txt": (b"\xff\xfe\x00\xd8a\x00", "near byte 2"),
    "mark.txt": (b"\xff\xfe", "[empty-file]"),
    "wide.txt": ("words".encode("utf-32"), "UTF-32"),
    "mixed.jsonl": (LINE + '{"text":"a"}\n'.encode("utf-16"), "[zero-byte]"),
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
    monkeypatch.setattr(compressed, "FREE_BYTES", 1 << 16)
    monkeypatch.setattr(json_array, "MAX_ELEMENT_BYTES", 1 << 15)
    monkeypatch.setattr(csv, "MAX_ROW_BYTES", 1 << 15)
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1 << 15)
    tracemalloc.start()
    told = refusal(name, data)
    assert tracemalloc.get_traced_memory()[1] < 24 << 20
    tracemalloc.stop()
    codes = ("decompression-bomb", "line-too-long", "row-too-long", "wrong-field-count")
    assert any(f"[{code}]" in told for code in codes)


def test_a_limit_is_of_the_file_s_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "FREE_BYTES", 1000)
    dice = random.Random(1)
    rows = [json.dumps({"text": "".join(dice.choices("abc ", k=50))}) for _ in range(1000)]
    Path("a.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    (source,) = find_sources(["a.jsonl.gz"])
    assert len(list(source.rows())) == 1000


# ---- Parquet -------------------------------------------------------------------


def test_files_that_are_no_parquet() -> None:
    pytest.importorskip("pyarrow")
    whole = as_parquet([{"prompt": "a", "completion": "b"}] * 3)
    for data, told in (
        (b"", "[not-parquet]"),
        (b"PAR1", "[not-parquet]"),
        (b"prompt,completion\n", "[not-parquet]"),
        (whole[:-20], "[truncated-file]"),
        (b"PAR1" + bytes(100) + b"PAR1", "[damaged-file]"),
        (whole[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1", "[damaged-file]"),
    ):
        assert told in refusal("a.parquet", data)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"x": 1}], '"x"'),
        ([{"text": 1}], 'row 1: "text" is a number'),
        ([{"text": ["a"]}], 'row 1: "text" is a list'),
        ([{"text": {"a": "b"}}], 'row 1: "text" is an object'),
        (
            [{"prompt": "a", "completion": "b"}, {"prompt": None, "completion": "b"}],
            'row 2: "prompt" is null',
        ),
        ([{"text": b"ok"}, {"text": b"\xff"}], "row 2: not UTF-8"),
        ([{"messages": [{"role": "user", "content": None}]}], 'row 1: message 1 has no "content"'),
        ([{"text": None}], 'row 1: "text" is null'),
        ([{"text": "a" * 10**5}] * 30, "250 times the file's"),
        ([{"messages": [{"role": "user", "content": "a" * 10**5}]}] * 30, "250 times the file's"),
    ],
)
def test_rows_of_parquet_that_cannot_be(
    rows: list[dict[str, Any]], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "FREE_BYTES", 1 << 18)
    assert told in refusal("a.parquet", as_parquet(rows, compression="zstd"))


def test_a_time_is_no_text() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as library

    made = io.BytesIO()
    library.write_table(pyarrow.table({"text": pyarrow.array([1], pyarrow.timestamp("s"))}), made)
    assert "row 1: a value of type datetime" in refusal("a.parquet", made.getvalue())


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
                for _ in source.rows() if source.kind == "lines" else ():
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
        assert len(list(source.rows())) == rows
    assert "[truncated-file]" in refusal("c.jsonl.zst", data[:-3])
    assert "[damaged-file]" in refusal("d.jsonl.zst", data + b"words and more words")
    assert "[damaged-file]" in refusal("e.jsonl.zst", b"words and more words")


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
    assert done.code == 2 and "--columns: " in done.err and "'prompt'" in done.err
