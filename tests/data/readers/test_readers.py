"""Data as people have it: arrays, tables, packed files, UTF-16, and folders in which files are named for what they are for."""

import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.data.dataset import open_dataset
from llamatrain.data.find_files import find_data, find_sources
from llamatrain.data.options import DataOptions
from llamatrain.data.readers.json_array import read_elements, warn_about_other_rows
from llamatrain.data.readers.text import read_chunks, read_samples
from llamatrain.errors import UsageError
from llamatrain.platform import terminal
from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.chat_templates import LAYOUTS
from tests.helpers.cli import TINY, ran, run, text_file
from tests.helpers.errors import raises
from tests.helpers.llama_cpp import model_with

ROWS = [
    {"prompt": "one, two", "completion": 'he said "three"'},
    {"prompt": "a line\nand another", "completion": "né 你好 😀"},
    {"prompt": "", "completion": "\\ [{ ]} ,"},
]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def as_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_table(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    made = io.StringIO()
    writer = csv.DictWriter(made, list(rows[0]), delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return made.getvalue().encode()


def as_parquet(rows: list[dict[str, Any]], compression: str = "snappy") -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    made = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), made, row_group_size=20, compression=compression)
    return made.getvalue()


def as_zst(data: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


FORMS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "a.jsonl": as_lines,
    "array.json": lambda rows: json.dumps(rows).encode(),
    "pretty.json": lambda rows: json.dumps(rows, indent=4, ensure_ascii=False).encode(),
    "lines.json": as_lines,
    "objects.json": lambda rows: "\n".join(json.dumps(row, indent=2) for row in rows).encode(),
    "a.csv": as_table,
    "windows.csv": lambda rows: b"\xef\xbb\xbf" + as_table(rows),
    "semicolon.csv": lambda rows: as_table(rows, ";"),
    "a.tsv": lambda rows: as_table(rows, "\t"),
    "a.parquet": as_parquet,
    "array": lambda rows: json.dumps(rows, indent=1).encode(),
    "columns": as_parquet,
    "wide.jsonl": lambda rows: as_lines(rows).decode().encode("utf-16"),
    "wide.csv": lambda rows: b"\xfe\xff" + as_table(rows).decode().encode("utf-16-be"),
    "wide.json": lambda rows: json.dumps(rows, ensure_ascii=False).encode("utf-16"),
}
PACKED = {".gz": gzip.compress, ".zst": as_zst}


def corpus_of(*names: str, **options: Any) -> list[tuple[str, str]]:
    """Of each sample all of its text, and what is trained of it."""
    corpus, _ = open_dataset(names, tokenizer := ByteTokenizer(), DataOptions(**options), 4096, 0)
    return [
        (tokenizer.decode(tokens).decode(), tokenizer.decode(tokens[weights > 0]).decode())
        for tokens, weights, _ in (corpus[at] for at in range(len(corpus)))
    ]


def rows_in(name: str, **columns: str) -> list[tuple[int, dict[str, Any]]]:
    (source,) = find_sources([name], columns)
    return [(number, json.loads(row)) for number, row in source.rows()]


# ---- the same rows in every form ----------------------------------------------


@pytest.mark.parametrize("packed", ["", *PACKED])
@pytest.mark.parametrize("name", FORMS)
def test_rows_are_the_same_in_every_form(name: str, packed: str) -> None:
    data = FORMS[name](ROWS)
    Path(name + packed).write_bytes(PACKED[packed](data) if packed else data)
    assert [row for _, row in rows_in(name + packed)] == ROWS
    assert corpus_of(name + packed) == [
        (row["prompt"] + row["completion"] + "</s>", row["completion"] + "</s>") for row in ROWS
    ]


def test_places_are_lines_elements_and_rows() -> None:
    """A table's row is where it begins, as an editor shows it."""
    for name, numbers in {
        "a.jsonl": [1, 2, 3],
        "pretty.json": [1, 2, 3],
        "a.csv": [2, 3, 5],
        "a.tsv": [2, 3, 5],
    }.items():
        Path(name).write_bytes(FORMS[name](ROWS))
        assert [number for number, _ in rows_in(name)] == numbers


@pytest.mark.parametrize("packed", ["", *PACKED])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
def test_text_is_the_same_however_it_is_written(packed: str, encoding: str) -> None:
    text = "a né 你好 😀\n" * 30_000
    data = (b"\xfe\xff" if encoding == "utf-16-be" else b"") + text.encode(encoding)
    Path("a.txt" + packed).write_bytes(PACKED[packed](data) if packed else data)
    (source,) = find_sources(["a.txt" + packed])
    assert b"".join(read_chunks(source)).decode() == text
    found = list(read_samples(source, "a né", True, None))
    assert len(found) == 30_000 and {each.decode() for each in found} == {"a né 你好 😀\n"}


def test_standard_input_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamatrain.data import find_files as sources

    for data in (
        gzip.compress(as_lines(ROWS)),
        as_lines(ROWS).decode().encode("utf-16"),
        json.dumps(ROWS).encode(),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        sources._standard_input.cache_clear()
        assert [row for _, row in rows_in("-")] == ROWS
    sources._standard_input.cache_clear()


def test_elements_are_found_wherever_chunks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(1)
    values = ["\\", '"', '\\"', "]", "[", "{}", ",", "é", 'a\\\\"', "\n"]
    rows = [
        {"text": "".join(dice.choices(values, k=dice.randrange(9))), "b": [[1, {}], [], {"c": [2]}]}
        for _ in range(200)
    ]
    text = json.dumps(rows, ensure_ascii=False, indent=dice.choice([None, 1])).encode()
    for size in (1, 2, 3, 7, 64, 1000):
        monkeypatch.setattr("llamatrain.data.readers.json_array.CHUNK", size)
        assert [json.loads(row) for _, row in read_elements(io.BytesIO(text), "a")] == rows


# ---- names of columns ----------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "array.json", "a.csv", "a.parquet"])
def test_columns_may_have_other_names(name: str) -> None:
    """Also where there is a column of the form's own name that means something else."""
    rows = [{"id": "7", "q, or so": "why?", "said": "so", "completion": "?", "text": "whole"}]
    Path(name).write_bytes(FORMS[name](rows))
    assert corpus_of(name, columns="prompt=q, or so,completion=said") == [("why?so</s>", "so</s>")]
    assert corpus_of(name, columns="text=said") == [("so</s>", "so</s>")]
    assert corpus_of(name, columns="prompt=text") == [("whole?</s>", "?</s>")]
    with raises("no-such-column", match='"asked".* prompt .*"id", "q, or so", "said"'):
        corpus_of(name, columns="prompt=asked,completion=said")


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ("prompt", "'prompt'"),
        ("prompt=", "'prompt='"),
        ("promt=a", "'promt'; did you mean prompt"),
        ("prompt=a,prompt=b", "'prompt'"),
        ("prompt=a,completion=a", "'a'"),
    ],
)
def test_columns_that_cannot_be_meant(told: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as failed:
        DataOptions(columns=told)
    assert str(failed.value).startswith("--columns: ")


def test_a_table_is_read_only_where_it_is_wanted() -> None:
    rows = [{"messages": json.dumps(CHAT), "id": str(number), "more": "x" * 100} for number in range(3)]
    Path("a.csv").write_bytes(as_table(rows))
    assert [{*row} for _, row in rows_in("a.csv")] == [{"messages"}] * 3
    assert [trained for _, trained in corpus_of("a.csv")] == ["hello<|im_end|>"] * 3


def test_parquet_holds_chats_as_lists() -> None:
    Path("a.parquet").write_bytes(as_parquet([{"messages": CHAT, "text": None}] * 40))
    assert [trained for _, trained in corpus_of("a.parquet")] == ["hello<|im_end|>"] * 40


# ---- folders -------------------------------------------------------------------


def test_files_named_for_it_are_never_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("data")
    for name in (
        "train-00000-of-00002.jsonl",
        "sub/train-00001-of-00002.json",
        "validation.jsonl",
        "test.csv",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        made = FORMS[
            "array.json" if name.endswith(".json") else "a.csv" if name.endswith(".csv") else "a.jsonl"
        ]
        (folder / name).write_bytes(made([{"prompt": name, "completion": "x"}]))
    (folder / "README.md").write_text("about it")
    found = find_data(["data"])
    assert [source.path.name[:11] for source in found.sources] == ["train-00001", "train-00000"]
    assert [source.path.name for source in found.validation] == ["validation.jsonl"]
    with terminal.show_log():
        corpus, validation = open_dataset(["data"], ByteTokenizer(), DataOptions(), 64, 0)
    assert (len(corpus), validation and len(validation)) == (2, 1)
    assert (
        "never on 1 named test, 1 named validation; validating with data/validation.jsonl"
        in capsys.readouterr().err
    )
    for options in (DataOptions(val=("data/test.csv",)), DataOptions(val_split=0.5)):
        corpus, validation = open_dataset(["data"], ByteTokenizer(), options, 64, 0)
        assert validation and len(corpus) + len(validation) == (2 if options.val_split else 3)
    assert [source.path.name for source in find_sources(["data"], use="judge")] == ["test.csv"]
    assert [source.path.name for source in find_sources(["data"], use="validate")] == ["validation.jsonl"]


def test_a_folder_s_other_files_stay_what_they_were(tmp_path: Path) -> None:
    """Text is no table, files beside text were never looked at, and names alone make no split."""
    for name, others in {
        "trainer.txt": ["test.txt"],
        "a.jsonl": ["testament.jsonl", "trained.jsonl"],
        "b.csv": ["c.json", "d.tsv.gz"],
        "README.md": [],
    }.items():
        folder = Path(name.partition(".")[0])
        folder.mkdir()
        for each in (name, *others):
            (folder / each).write_text("words")
        sources = find_data_names(folder)
        assert sources == sorted([name, *others])
    (Path("trainer") / "table.csv").write_text("a,b\n")
    assert find_data_names(Path("trainer")) == ["test.txt", "trainer.txt"]
    (Path("b") / "README.md").write_text("about it")
    assert find_data_names(Path("b")) == ["b.csv", "c.json", "d.tsv.gz"]


def find_data_names(folder: Path) -> list[str]:
    from llamatrain.data.find_files import scan_folder

    return sorted(path.name for path in scan_folder(folder).train)


def test_a_folder_without_training_data_is_refused() -> None:
    Path("data").mkdir()
    (Path("data") / "test.jsonl").write_bytes(as_lines(ROWS))
    with raises("no-training-files", match="data: .* test"):
        find_sources(["data"])
    assert len(find_sources(["data/test.jsonl"])) == 1


# ---- whole runs ----------------------------------------------------------------


def test_a_table_is_trained_on_and_its_tokens_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": f"what is {number}?", "answer": f"it is {number}"} for number in range(40)]
    losses = []
    for name in ("a.jsonl", "a.csv"):
        Path(name).write_bytes(FORMS[name](rows))
        tuned = (
            "from-scratch",
            name,
            *TINY,
            "--ctx",
            64,
            "--iters",
            2,
            "--seed",
            1,
            "--out",
            tmp_path / f"run-{name}",
        )
        ran(*tuned)
        kept = (tmp_path / f"run-{name}" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in kept])
    assert losses[0] and all(each == losses[0] for each in losses)


def test_tokens_are_made_once_and_anew_where_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamatrain.data import encode
    from llamatrain.data.token_cache import cache_folder

    monkeypatch.setenv("LLAMATRAIN_CACHE", "cache")
    cache_folder.cache_clear()
    made = list[str]()
    whole = encode.Encoder._encode_rows
    monkeypatch.setattr(
        encode.Encoder,
        "_encode_rows",
        lambda self, sources, writer: made.append("") or whole(self, sources, writer),
    )
    for name in ("a.csv", "array.json", "a.csv.gz"):
        data = FORMS[name.removesuffix(".gz")](ROWS)
        Path(name).write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
        for _ in range(2):
            corpus_of(name)
        assert len(made) == 1
        corpus_of(name, columns="prompt=completion,completion=prompt")
        Path(name).write_bytes(
            gzip.compress(data + b"x,y\n") if name.endswith(".gz") else data.replace(b"three", b"four")
        )
        corpus_of(name)
        assert len(made) == 3
        made.clear()
    cache_folder.cache_clear()


def test_a_long_array_is_never_held(tmp_path: Path) -> None:
    """Some 20 MB of elements, of which one at a time is in memory."""
    import tracemalloc

    row = json.dumps({"prompt": "x" * 500, "completion": "y" * 500})
    with Path("a.json").open("w") as file:
        file.write("[" + row)
        file.writelines(",\n" + row for _ in range(20_000))
        file.write("]")
    with gzip.open("a.json.gz", "wb", 1) as packed:
        packed.write(Path("a.json").read_bytes())
    for name in ("a.json", "a.json.gz"):
        (source,) = find_sources([name])
        tracemalloc.start()
        assert sum(1 for _ in source.rows()) == 20_001
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
        tracemalloc.stop()


def test_evaluate_takes_what_judges(tmp_path: Path) -> None:
    text = text_file(tmp_path)
    ran("from-scratch", text, *TINY, "--ctx", 32, "--iters", 1, "--out", tmp_path / "run")
    folder = tmp_path / "data"
    folder.mkdir()
    for name, count in {"train.jsonl": 5, "test.jsonl": 2}.items():
        (folder / name).write_bytes(as_lines([{"prompt": "a", "completion": "bc"}] * count))
    done = ran("evaluate", tmp_path / "run" / "model.gguf", folder, "--json")
    alone = ran("evaluate", tmp_path / "run" / "model.gguf", folder / "test.jsonl", "--json")
    assert json.loads(done.out) == json.loads(alone.out)
    assert "named test (1)" in done.err
    shown = ran("preview", folder, "--model", tmp_path / "run" / "model.gguf", "--ctx", 16)
    assert "5 samples" in shown.out and "2 samples for validation" in shown.out


def test_a_preview_shows_each_form(tmp_path: Path) -> None:
    model = model_with(LAYOUTS["chatml"].vocabulary(), tmp_path / "m.gguf")
    rows = [{"question": "what,\nthen?", "answer": "so"}, {"question": "b", "answer": "no"}]
    for name, packed in (("a.csv", ".gz"), ("array.json", ""), ("wide.csv", "")):
        Path(name + packed).write_bytes(gzip.compress(FORMS[name](rows)) if packed else FORMS[name](rows))
        named = ("--columns", "prompt=question,completion=answer", "--as-chat", "--no-shuffle", "--ctx", 100)
        shown = ran("preview", name + packed, "--model", model, *named)
        assert (
            "what,\nthen?<|im_end|>" in shown.out
            and "[[so<|im_end|>]]" in shown.out
            and "[[no<|im_end|>]]" in shown.out
        )
    failed = run("preview", "array.json", "--model", model, "--columns", "prompt=question,completion=ansver")
    (error,) = failed.errors
    assert "array.json, element 1: " in error and '"ansver"' in error and "[no-such-column]" in error


def test_parquet_without_pyarrow_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamatrain.data.readers import compressed, parquet

    Path("a.parquet").write_bytes(b"PAR1" + bytes(20) + b"PAR1")
    Path("a.csv.zst").write_bytes(b"\x28\xb5\x2f\xfd words")
    for module in (parquet, compressed):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    with raises("missing-package", match=r"^a\.parquet: .*pip install pyarrow"):
        find_sources(["a.parquet"])
    with raises("missing-package", match=r"^a\.csv\.zst: .*pip install zstandard"):
        find_sources(["a.csv.zst"])
    done = run("from-scratch", "a.parquet", *TINY)
    assert (done.code, len(done.errors)) == (1, 1)
    assert np.size(done.errors) == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"data": [{"text": "a"}, {"text": "b"}], "version": 1}',
        ' {"rows":[{"text": "a"},{"text": "b"}]}',
        '{"version": 1, "train": [{"text": "a"}, {"text": "b"}]}',
    ],
)
def test_rows_in_an_object_around_them(text: str) -> None:
    assert [json.loads(row) for _, row in read_elements(io.BytesIO(text.encode()), "d.json")] == [
        {"text": "a"},
        {"text": "b"},
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"train": [{"text": "a"}], "test": [{"text": "b"}]}',
        '{"version": 1, "test": [{"text": "b"}], "train": [{"text": "a"}]}',
    ],
)
def test_rows_under_another_key_are_left_out_and_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    warn_about_other_rows.cache_clear()
    with terminal.show_log():
        for _ in range(2):  # it is said once, however often the file is read
            assert [json.loads(row) for _, row in read_elements(io.BytesIO(text.encode()), "d.json")] == [
                {"text": "a"}
            ]
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith('warning: d.json: rows under "test" ')


def test_columns_of_images_and_of_labels(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer,image\na,b,x.png\n")
    (tmp_path / "b.csv").write_text("prompt,completion,kto_tag\na,b,True\n")
    rows = [
        json.loads(row) for name in "ab" for _, row in find_sources([str(tmp_path / f"{name}.csv")])[0].rows()
    ]
    assert rows == [
        {"question": "a", "answer": "b", "media": True},
        {"prompt": "a", "completion": "b", "kto_tag": True},
    ]
