"""Files to samples: what is found, what each line becomes, what is refused and how it is said."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llamatrain.data import find_files, token_cache
from llamatrain.data.dataset import Dataset, format_places, open_dataset
from llamatrain.data.find_files import DataFile, find_sources
from llamatrain.data.options import DataOptions, unescape
from llamatrain.data.readers import text as samples
from llamatrain.errors import DataError, UsageError
from tests.helpers.byte_tokenizer import ByteTokenizer


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Names in the tests are those of files in a folder of their own; so is the cache."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path))
    token_cache.cache_folder.cache_clear()
    yield
    token_cache.cache_folder.cache_clear()


def write(name: str, content: str | bytes) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return name


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def corpus(
    *data: str, ctx: int = 64, tokenizer: ByteTokenizer | None = None, seed: int = 0, **options: object
) -> Dataset:
    return open_dataset(data, tokenizer or ByteTokenizer(), DataOptions(**options), ctx, seed)[0]  # type: ignore[arg-type]


def texts(made: Dataset) -> list[str]:
    return [ByteTokenizer().decode(made[number].tokens).decode() for number in range(len(made))]


def trained(made: Dataset) -> list[str]:
    tokenizer = ByteTokenizer()
    return [
        tokenizer.decode(tokens[weights > 0]).decode()
        for tokens, weights, _ in (made[i] for i in range(len(made)))
    ]


# ---- what is found ---------------------------------------------------------


def test_files_folders_and_globs() -> None:
    for name in ("d/b.txt", "d/a.md", "d/sub/c.txt", "d/.hidden/x.txt", "d/picture.png", "e.py"):
        write(name, "text")
    assert [source.name for source in find_sources(["d"])] == ["d/a.md", "d/b.txt", "d/sub/c.txt"]
    assert [source.name for source in find_sources(["d/*.txt", "e.py"])] == ["d/b.txt", "e.py"]
    assert [source.name for source in find_sources(["d/**/*.txt"])] == ["d/b.txt", "d/sub/c.txt"]
    write("[1].txt", "a name that looks like a glob")
    assert [source.name for source in find_sources(["[1].txt"])] == ["[1].txt"]


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"{ not JSON\nmore", "text"), (b'{"text": "a"}\n', "lines"), (b"a\r\n" * 9**6, "text")],
)
def test_standard_input(monkeypatch: pytest.MonkeyPatch, content: bytes, kind: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    find_files._standard_input.cache_clear()
    (source,) = find_sources(["-"])
    assert (source.kind, source.name, source.path.read_bytes()) == (kind, "standard input", content)
    find_files._standard_input.cache_clear()


# ---- what each becomes -----------------------------------------------------


def test_text_steps_by_rows() -> None:
    assert texts(corpus(write("a.txt", "abcdefghij"), ctx=4)) == ["abcd", "efgh", "ij"]
    assert texts(corpus("a.txt", ctx=4, tokenizer=ByteTokenizer(add_bos=False))) == ["abcde", "efghi", "ij"]
    assert texts(corpus("a.txt", ctx=4, tokenizer=ByteTokenizer(add_eos=True)))[-1] == "ij</s>"


def test_files_are_documents_of_their_own() -> None:
    for number in range(300):
        write(f"d/{number:03}.txt", f"{number:05}")
    assert texts(corpus("d", ctx=4))[:4] == ["0000", "0", "0000", "1"]
    write("d/0.jsonl", lines({"text": "x"}, {"prompt": "p" * 9, "completion": "c"}))
    write("d/1.jsonl", lines({"prompt": "p" * 9, "completion": "c"}, {"text": "y"}))
    made = corpus("d/1.jsonl", "d/000.txt", "d/0.jsonl", ctx=4)
    assert (texts(made), made.skipped) == (["y</s>", "0000", "0", "x</s>"], ["d/1.jsonl:1", "d/0.jsonl:2"])


def test_overlapping_text_begins_at_every_token_as_the_ancestor_did() -> None:
    made = corpus(write("a.txt", "abcdefghij"), ctx=4, overlapping_samples=True)
    assert texts(made) == ["abcd", "bcde", "cdef", "defg", "efgh", "fghi"]


def test_lines_by_their_keys() -> None:
    rows: list[object] = [
        {"text": "free"},
        {"prompt": "2+2=", "completion": "4"},
        {"question": "why?", "answer": "so", "id": 1},
        {"instruction": "add", "input": "1 2", "output": "3"},
        {"instruction": "greet", "input": "", "output": "hi"},
        {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
        {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
    ]
    made = corpus(write("a.jsonl", lines(*rows)), ctx=99)
    chat = "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na<|im_end|>"
    asked = ["free</s>", "2+2=4</s>", "why?\nso</s>", "add\n\n1 2\n3</s>", "greet\nhi</s>", chat, chat]
    assert texts(made) == asked
    assert trained(made) == ["free</s>", "4</s>", "so</s>", "3</s>", "hi</s>", "a<|im_end|>", "a<|im_end|>"]
    assert trained(corpus("a.jsonl", ctx=99, train_on="all")) == [*asked[:5], f"{chat}\n", f"{chat}\n"]
    assert trained(corpus("a.jsonl", ctx=99, as_chat=True))[1:3] == ["4<|im_end|>", "so<|im_end|>"]


def test_a_byte_order_mark_and_blank_lines_are_no_data() -> None:
    assert texts(corpus(write("a.txt", b"\xef\xbb\xbfabcd"), ctx=4)) == ["abcd"]
    assert texts(corpus(write("a.jsonl", b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}'), ctx=4)) == [
        "a</s>",
        "b</s>",
    ]


def test_places_name_a_file_once_and_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{tmp_path / 'a.jsonl'}:{number}" for number in (3, 8)] + [
        "/elsewhere/b.jsonl:1",
        "standard input:2",
        "/c",
    ]
    assert format_places(rows[:1]) == "a.jsonl:3" and format_places(rows[:2]) == "a.jsonl:3, 8"
    assert format_places(rows) == "a.jsonl:3, 8, /elsewhere/b.jsonl:1 and 2 more"
    assert format_places(rows[3:]) == "standard input:2, /c"


def test_rows_without_a_trained_token_are_counted_and_named() -> None:
    rows = [{"prompt": "p" * 70, "completion": "late"}, {"prompt": "p", "completion": "c" * 70}, {"text": ""}]
    rows.append({"messages": [{"role": "user", "content": "no answer"}]})  # type: ignore[dict-item]
    made = corpus(write("a.jsonl", lines(*rows)))
    assert (len(made), made.truncated, made.skipped) == (
        1,
        ["a.jsonl:2"],
        ["a.jsonl:1", "a.jsonl:3", "a.jsonl:4"],
    )


@given(prompt=st.text("ab<é\n", max_size=8), answer=st.text("ab<é\n", max_size=8), add_bos=st.booleans())
@settings(max_examples=60, deadline=None)
def test_weights_stand_on_answers_alone(prompt: str, answer: str, add_bos: bool) -> None:
    assume(
        prompt or answer or add_bos
    )  # without any, an end token would be the first of all, and nothing predicts that
    made = corpus(
        write("a.jsonl", lines({"prompt": prompt, "completion": answer})),
        tokenizer=ByteTokenizer(add_bos=add_bos),
    )
    assert trained(made) == [answer + "</s>"]


# ---- the ancestors' samples ------------------------------------------------

POEM = "intro\n#one\n#two words\n#three"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["one\n</s>", "two words\n</s>", "three</s>"]),
        ({"include_sample_start": True}, ["#one\n</s>", "#two words\n</s>", "#three</s>"]),
        ({"overlapping_samples": True}, ["one\n#tw", "two wor", "three</s>"]),
        ({"overlapping_samples": True, "include_sample_start": True}, ["#one\n#t", "#two wo", "#three</s>"]),
        ({"fill_with_next_samples": True}, ["one\n", "two words\n", "three"]),
        ({"sample_start": "\\n#", "escape": True}, ["one</s>", "two words</s>", "three</s>"]),
    ],
)
def test_samples_begin_after_the_pattern(options: dict[str, object], expected: list[str]) -> None:
    assert texts(corpus(write("a.txt", POEM), ctx=6, **{"sample_start": "#", **options})) == expected


def test_samples_longer_than_a_row_are_cut_and_counted() -> None:
    assert corpus(write("a.txt", POEM), ctx=6, sample_start="#").truncated == ["a.txt:2"]


def test_an_overlapping_sample_ends_between_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    source = DataFile(Path(write("a.txt", "#éé")), "a.txt", samples.TEXT)
    assert [sample.decode() for sample in samples.read_samples(source, "#", False, max_bytes=1)] == ["é"]


def test_a_pattern_that_is_not_there() -> None:
    with pytest.raises(DataError, match=r"a\.txt: the sample start '\\\\n#' "):
        corpus(write("a.txt", POEM), sample_start="\\n#")


def test_escapes() -> None:
    assert unescape(r"a\n\r\t\'\"\\n\x") == "a\n\r\t'\"\\n\\x"


# ---- validation ------------------------------------------------------------


@given(
    size=st.integers(20, 400),
    ctx=st.integers(2, 9),
    share=st.floats(0.01, 0.6),
    seed=st.integers(0, 99),
    lead=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_split_shares_no_target(size: int, ctx: int, share: float, seed: int, lead: bool) -> None:
    """The text counts up, so that a token says where it stood."""
    write("a.txt", "".join(chr(0x100 + number) for number in range(size)))
    for overlapping in (False, True):
        options = DataOptions(val_split=share, overlapping_samples=overlapping)
        try:
            made = open_dataset(["a.txt"], Runes(add_bos=lead), options, ctx, seed)
        except DataError as error:
            assert "split in two" in str(error)
            continue
        train, validation = (
            {int(token) for i in range(len(part)) for token in part[i].tokens[1 - lead :]}
            for part in made
            if part
        )
        assert not train & validation and validation
        if not overlapping:
            assert len(train | validation) == size - 1 + lead


class Runes(ByteTokenizer):
    """A token for each character."""

    def __len__(self) -> int:
        return 0x110000

    def encode(self, text: str | bytes, *, special: bool = False, start: bool = True) -> np.ndarray:
        return np.array([ord(c) for c in (text if isinstance(text, str) else text.decode())], np.int32)

    @property
    def fingerprint(self) -> str:
        return "runes"


def test_a_split_follows_the_seed_and_keeps_its_size() -> None:
    write("a.jsonl", lines(*({"prompt": f"{number}", "completion": "x"} for number in range(100))))

    def held(seed: int) -> list[str]:
        validation = open_dataset(["a.jsonl"], ByteTokenizer(), DataOptions(val_split=0.05), 64, seed)[1]
        assert validation is not None
        return texts(validation)

    assert held(1) == held(1) != held(2)
    assert len(held(1)) == 5


def test_validation_from_files_of_its_own() -> None:
    write("a.txt", "abcdefgh")
    write("b.txt", "12345678")
    train, validation = open_dataset(["a.txt"], ByteTokenizer(), DataOptions(val=("b.txt",)), 8, 0)
    assert validation is not None and (texts(train), texts(validation)) == (["abcdefgh"], ["12345678"])
    with pytest.raises(DataError, match="both training and validation"):
        open_dataset(["a.txt"], ByteTokenizer(), DataOptions(val=("*.txt",)), 8, 0)


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_validation_is_not_the_training_data_under_another_name(link: Callable[[str, str], None]) -> None:
    link(write("a.txt", "abcdefgh"), "b.txt")
    with pytest.raises(DataError, match=r"^b\.txt \(the same as a\.txt\): is both training and validation"):
        open_dataset(["a.txt"], ByteTokenizer(), DataOptions(val=("b.txt",)), 8, 0)


def test_standard_input_is_named_as_such_where_it_is_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abcdefgh")))
    find_files._standard_input.cache_clear()
    with pytest.raises(DataError, match=r"^standard input: is both"):
        open_dataset(["-"], ByteTokenizer(), DataOptions(val=("-",)), 8, 0)
    find_files._standard_input.cache_clear()


def test_validation_does_not_overlap() -> None:
    write("a.txt", "abcdefghij")
    write("b.txt", "#123456#78")
    options = DataOptions(val=("b.txt",), overlapping_samples=True)
    train, validation = open_dataset(["a.txt"], ByteTokenizer(), options, 4, 0)
    assert validation is not None and (len(train), texts(validation)) == (6, ["#123", "456#", "78"])
    options = DataOptions(val=("b.txt",), overlapping_samples=True, sample_start="#")
    _, validation = open_dataset([write("c.txt", "#ab#cd")], ByteTokenizer(), options, 9, 0)
    assert validation is not None and texts(validation) == ["123456</s>", "78</s>"]


# ---- what is refused -------------------------------------------------------

REFUSED = {
    "bad JSON": ('{"text": "a"}\n' * 6 + '{"text": "a",,}\n', r"a\.jsonl, line 7: not JSON .*column 14\)"),
    "no object": ("[1]\n", r"a\.jsonl, line 1: a list instead of an object"),
    "no known keys": (
        '{"text": "a"}\n\n{"body": "b", "title": 1}\n',
        r'a\.jsonl, line 3: no known keys .*"body", "title".*"messages"',
    ),
    "not text": ('{"text": 7}\n', r'a\.jsonl, line 1: "text" is a number; expected a string'),
    "no list": ('{"messages": "hi"}\n', r'a\.jsonl, line 1: "messages" is a string; expected a list'),
    "no messages": ('{"messages": []}\n', r'a\.jsonl, line 1: "messages" is empty'),
    "no role": ('{"messages": [{"content": "a"}]}\n', r'a\.jsonl, line 1: message 1 has no "role"'),
    "no content": ('{"messages": [{"role": "user"}]}\n', r'a\.jsonl, line 1: message 1 has no "content"'),
    "no turn": ('{"conversations": [{"from": "gpt"}]}\n', r"a\.jsonl, line 1: message 1 is not"),
    "half a character": ('{"text": "\\ud800"}\n', r"a\.jsonl, line 1: not UTF-8"),
    "latin": (b'{"text": "\xe9"}\n', r"a\.jsonl, line 1: not UTF-8"),
    "deep": ('{"text": ' + "[" * 99999 + "\n", r"a\.jsonl, line 1: the JSON nests"),
    "empty": ("", r"a\.jsonl: the file is empty"),
    "binary": (b'{"text": "\0"}', r"a\.jsonl: binary data .*offset 10\)"),
    "blank": (" \n\n", r"a\.jsonl: the file contains only white space"),
    "no answer": (
        '{"messages": [{"role": "user", "content": "a"}]}',
        r"a\.jsonl: no row has a token to train on .*a\.jsonl:1\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_lines_that_are_refused(name: str) -> None:
    content, message = REFUSED[name]
    with pytest.raises(DataError, match=message) as info:
        corpus(write("a.jsonl", content))
    assert "\n" not in str(info.value)


def test_files_that_are_refused() -> None:
    for name in ("d/a.txt", "d/b.jsonl", "pictures/a.png", "a.json", "sparse/.hidden.txt"):
        write(name, "[1]")
    write("utf32.txt", "text".encode("utf-32"))
    write("unmarked.txt", "text".encode("utf-16-le"))
    write("late.txt", b"a b\n" * 9**6 + b"\0")
    for data, message in {
        "nowhere.txt": r"nowhere\.txt: no such file or folder",
        "*.csv": r"\*\.csv: no file matches",
        "d": r"d: the folder mixes text \(d/a\.txt\) and JSON lines \(d/b\.jsonl\)",
        "pictures": r"pictures: the folder has no usable file .*1 \.png.*\.txt, \.md, \.jsonl",
        "sparse": r"sparse: the folder has no usable file .*nothing",
        "utf32.txt": r"utf32\.txt: the text is UTF-32",
        "unmarked.txt": r"unmarked\.txt: binary data .*offset 1\); .*UTF-16 with a byte order mark",
        "late.txt": rf"late\.txt: binary data .*offset {4 * 9**6}\)",
    }.items():
        with pytest.raises(DataError, match=message):
            corpus(data)


def test_text_shorter_than_the_context() -> None:
    with pytest.raises(DataError, match=r"a\.txt: too short for a row of 16 tokens; .*--ctx 15 or less"):
        corpus(write("a.txt", "a" * 15), ctx=16)
    assert len(corpus("a.txt", ctx=15)) == 1
    with pytest.raises(DataError, match="--ctx 14 or less"):
        corpus("a.txt", ctx=15, tokenizer=ByteTokenizer(add_bos=False))
    assert len(corpus("a.txt", ctx=14, tokenizer=ByteTokenizer(add_bos=False))) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"val_split": 1.0},
        {"val_split": -0.1},
        {"val": ("a.txt",), "val_split": 0.1},
        {"pack": True, "fill_with_next_samples": True},
        {"sample_start": "#", "overlapping_samples": True, "val_split": 0.1},
    ],
)
def test_options_that_cannot_be(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        DataOptions(**options)  # type: ignore[arg-type]


# ---- the cache -------------------------------------------------------------


def test_tokens_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = texts(corpus(write("a.txt", "abcdefgh"), ctx=4))
    encode = ByteTokenizer.encode  # which may still be asked for a template's marks
    refuse = lambda *given, special=False: encode(*given, special=True) if special else 1 / 0
    monkeypatch.setattr(ByteTokenizer, "encode", refuse)
    assert texts(corpus("a.txt", ctx=4)) == made
    assert texts(corpus("a.txt", ctx=2)) == ["ab", "cd", "ef", "gh"]
    write("b.txt", "abcdefgh")  # the same content under another name
    assert texts(corpus("b.txt", ctx=4)) == made
    with pytest.raises(ZeroDivisionError):
        corpus(write("a.txt", "ABCDEFGH"), ctx=4)


def test_another_tokenizer_has_tokens_of_its_own() -> None:
    made = corpus(write("a.txt", "éabcdefgh"), ctx=4)
    assert texts(made)[0] == "éab" and corpus("a.txt", ctx=4, tokenizer=Runes())[0].tokens[0] == ord("é")


def test_a_damaged_entry_is_made_anew() -> None:
    made = texts(corpus(write("a.txt", "abcdefgh"), ctx=4))
    (entry,) = token_cache.cache_folder().iterdir()
    (entry / "tokens").write_bytes(b"")
    assert texts(corpus("a.txt", ctx=4)) == made


def test_an_entry_is_whole_or_not_there() -> None:
    with pytest.raises(DataError):
        corpus(write("a.jsonl", '{"text": "a"}\n' * 5000 + "{"))
    assert list(token_cache.cache_folder().iterdir()) == []


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMATRAIN_CACHE", write("no-folder", "x"))
    token_cache.cache_folder.cache_clear()
    assert texts(corpus(write("a.txt", "abcd"), ctx=4)) == ["abcd"]


MEASURE = """
import resource, sys
from llamatrain.data.dataset import open_dataset
from llamatrain.data.options import DataOptions
from llamatrain.data.batches import Batches
from tests.helpers.byte_tokenizer import ByteTokenizer
options = DataOptions()
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
start = peak()
made, _ = open_dataset(sys.argv[1:], ByteTokenizer(), options, 128, 0)
rows = Batches(made, options, 0, 257)
for _ in range(len(made) // 8):
    rows.batch(8)
print(peak() - start)
"""


@pytest.mark.slow
def test_large_text_takes_little_memory() -> None:
    with Path("large.txt").open("w") as file:
        file.writelines(f"{number} a line of text\n" for number in range(10**6))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "large.txt"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < 120, "MB; the text is 24 MB, its tokens of 4 bytes each are 96"


def test_a_bad_line_is_not_repeated_whole() -> None:
    """Keys may be as long as the line."""
    path = write("a.jsonl", json.dumps({"k" * 100_000: 1, "b" * 5_000: 2}) + "\n")
    with pytest.raises(DataError, match=r"line 1: no known keys .*\"kkk.*\.\.\.\", \"bbb") as failed:
        corpus(path)
    assert len(str(failed.value)) < 1000
