"""Text to tokens: llama.cpp's own vectors, the definition in plain Python, seams, special tokens."""

import heapq
import random
import re
import subprocess
import sys
import time
import tracemalloc
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamatrain.data.tokenizer import StreamDecoder, Tokenizer, load, new_vocab, to_bytes, tokenizer
from llamatrain.data.tokenizer.pretokenizers import _KNOWN, PRE_TOKENIZERS
from llamatrain.data.tokenizer.regex import DigitGroups, compile_pattern
from llamatrain.data.tokenizer.unicode_classes import KINDS, kinds
from llamatrain.errors import DataError, UsageError
from llamatrain.gguf.reader import Metadata, open_gguf
from llamatrain.platform.terminal import show_log
from tests.helpers.mixed_text import CODE, Mixer
from tests.helpers.test_data import material

ROOT = Path(__file__).resolve().parents[3]
VOCABULARIES = ("llama-spm", "llama-bpe", "gpt-2")
Plain = dict[str, Any]


@cache
def shared(name: str) -> Tokenizer:
    return load(open_gguf(material(f"vocab/ggml-vocab-{name}.gguf")).metadata)


@cache
def learned(pre: str = "llama-bpe") -> Tokenizer:
    metadata = dict(Metadata(new_vocab.learn_vocabulary([CODE, Mixer(3).text(20_000)], 1000)))
    return load({**metadata, "tokenizer.ggml.pre": pre})


def scored(**changes: object) -> Plain:
    """A `llama` vocabulary with ties, characters that are no tokens themselves, bytes, and special tokens."""
    words = [
        "▁",
        "a",
        "b",
        "c",
        "ab",
        "bc",
        "abc",
        "aa",
        "aaa",
        "aaaa",
        "▁a",
        "▁ab",
        "▁▁",
        "▁▁▁▁",
        "xy",
        "ü",
        "üb",
        "=",
        "==",
    ]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *words,
        "<user>",
        "<user>!",
    ]
    scores = [0.0] * 259 + [-1e9 if len(word) == 1 else -float(len(word) % 3) for word in words] + [0.0, 0.0]
    told = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array(scores, np.float32),
        "token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(words) + [4, 4], np.int32),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (told | changes).items() if value is not None}


def by_definition(metadata: Plain, text: str) -> list[int]:
    """llama.cpp's way: of all neighbours that make a token the best scored, the leftmost, until there are none."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    index = {token: i for i, token in enumerate(tokens)}
    row = list((" " + text).replace(" ", "▁"))
    while True:
        found = [(-scores[index[a + b]], at) for at, (a, b) in enumerate(pairwise(row)) if a + b in index]
        if not found:
            break
        at = min(found)[1]
        row[at : at + 2] = [row[at] + row[at + 1]]
    return [
        i
        for part in row
        for i in ([index[part]] if part in index else [index[f"<0x{byte:02X}>"] for byte in part.encode()])
    ]


# ---- equal to llama.cpp ----------------------------------------------------


@pytest.mark.parametrize("name", VOCABULARIES)
def test_vectors(name: str) -> None:
    texts = (
        material(f"vocab/ggml-vocab-{name}.gguf.inp")
        .read_bytes()
        .decode()
        .split("\n__ggml_vocab_test__\n")[:-1]
    )
    lines = material(f"vocab/ggml-vocab-{name}.gguf.out").read_text().splitlines()
    assert len(texts) == len(lines) == 46
    for text, line in zip(texts, lines, strict=True):
        tokens = shared(name).encode(text)
        assert tokens.tolist() == [int(token) for token in line.split()], text
        assert (
            shared(name)
            .decode(tokens)
            .decode()
            .removeprefix(" " if shared(name).vocabulary.add_space_prefix else "")
            == text
        )


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="aabbc xyü= ▁é😀", min_size=1, max_size=30)
    | st.text(alphabet="ab =", min_size=41, max_size=120)
)
def test_merging_by_score_is_as_defined(text: str) -> None:
    assert small().encode(text).tolist() == by_definition(scored(), text)


def test_long_rows_are_merged_as_short_ones() -> None:
    """By a heap of ranks and places, as llama.cpp does it: a tree of three levels, and of one."""
    draw = random.Random(4)
    for alphabet, size in (("ab", 5000), ("a", 4200), ("aaabc", 20_000), ("abc ", 70)):
        text = "".join(draw.choices(alphabet, k=size))
        assert small().encode(text).tolist() == by_heap(scored(), text)


def by_heap(metadata: Plain, text: str) -> list[int]:
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    index = {token: i for i, token in enumerate(tokens)}
    row = list((" " + text).replace(" ", "▁"))
    before, after = list(range(-1, len(row) - 1)), list(range(1, len(row) + 1))
    heap = list[tuple[float, int, str, str]]()

    def push(at: int) -> None:
        if at >= 0 and after[at] < len(row) and (made := index.get(row[at] + row[after[at]])) is not None:
            heapq.heappush(heap, (-scores[made], at, row[at], row[after[at]]))

    for at in range(len(row)):
        push(at)
    while heap:
        _, at, left, right = heapq.heappop(heap)
        if row[at] == left and after[at] < len(row) and row[after[at]] == right:
            gone = after[at]
            row[at], row[gone], after[at] = left + right, "", after[gone]
            if after[at] < len(row):
                before[after[at]] = at
            push(before[at])
            push(at)
    return [index[part] for part in row if part]


@cache
def small() -> Tokenizer:
    return load(scored())


BYTE_LEVEL = [names for names in _KNOWN if not PRE_TOKENIZERS[names.split()[0]].characters]


@pytest.mark.parametrize("names", BYTE_LEVEL)
def test_each_pre_tokenizer_loses_nothing(names: str) -> None:
    text = Mixer(5).text(20_000)
    encoder = learned(names.split()[0])
    assert encoder.decode(encoder.encode(text)).decode() == text


@pytest.mark.parametrize(
    ("pattern", "text", "words"),
    [
        (r" ?\p{L}+|\s+(?!\S)", "  ab cd  ", [" ", " ab", " cd", "  "]),
        (r"\p{N}{1,3}", "12345 6", ["123", "45", " ", "6"]),
        (r"[\p{L}--a-z]*[\p{L}--A-Z]+", "ABcDeF", ["ABc", "De", "F"]),
        (r"a*ab|\s+$", "aaab b  ", ["aaab", " b", "  "]),
        (r"[^\s\-a-c]+", "a-x.y b", ["a-", "x.y", " b"]),
        (
            "[\u3000-\u3002]+",
            "\u3000\u3001",
            ["\u3000", "\u3001"],
        ),  # this white space is seen as a vertical tab
    ],
)
def test_expressions(pattern: str, text: str, words: list[str]) -> None:
    assert [text[a:b] for a, b in pairwise([0, *words_of(pattern, text)])] == words


@pytest.mark.parametrize(
    ("after", "text", "words"),
    [
        (True, "a1234567b123", ["a1", "234", "567", "b123"]),
        (True, " 12,٣٤٥٦", [" 12", ",٣", "٤٥٦"]),
        (True, "none", ["none"]),
        (False, "a1234567b123", ["a1", "234", "567b", "123"]),
        (False, "12 123", ["12 ", "123"]),
    ],
)
def test_groups_of_digits(after: bool, text: str, words: list[str]) -> None:
    ends = words_of(DigitGroups(r"\p{N}", after), text)
    assert [text[a:b] for a, b in pairwise([0, *ends])] == words


compiled = cache(compile_pattern)


def words_of(pattern: str | DigitGroups, text: str) -> list[int]:
    from llamatrain.data.tokenizer.pretokenize import RegexState, Splitter, split

    made, codes = compiled(pattern), np.array(list(map(ord, text)), np.int32)
    ends, marks = np.empty(len(text), np.int64), np.empty(len(text), np.uint32)
    count, _, _ = split(
        codes, Splitter.bind(made), np.array([len(text)], np.int64), ends, marks, RegexState.allocate()
    )
    return ends[:count].tolist()


@pytest.mark.parametrize(
    "pattern",
    [
        "a*[ab]+'s|a*[ab]+",
        r"\s+$|a+(?!b)|b{1,3}c|[abc]",
        "a?[ab]*[ac]+[bc]{2,3}x|[ab]{1,2}(?!c)",
        "[ab]*[bc]*[ca]+x|a+x|b+x",
    ],
)
@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="aabbcx' s", min_size=1, max_size=16))
def test_what_is_given_back_is_as_in_python(pattern: str, text: str) -> None:
    expected, at = set[int](), 0
    while at < len(text):
        found = re.compile(pattern).match(text, at)
        if found and found.end() > at:
            expected |= {at, found.end()}
        at = found.end() if found and found.end() > at else at + 1
    assert words_of(pattern, text) == sorted({*expected, len(text)} - {0})


@pytest.mark.parametrize(
    ("name", "text"), [("gpt-4o", "一" * 30_000 + "."), ("deepseek-llm", " " * 80_000 + "1")]
)
def test_what_failed_in_a_long_run_is_not_tried_again(name: str, text: str) -> None:
    patterns = PRE_TOKENIZERS[name].patterns
    words_of(patterns[0], "compiled")
    start = time.process_time()
    for pattern in patterns:
        assert words_of(pattern, text)[-1] == len(text)
    assert time.process_time() - start < 2


def test_kinds_of_characters_agree_with_this_python() -> None:
    letters = {code: unicodedata.category(chr(code)) for code in range(0x110000)}
    wrong = [
        hex(code)
        for code, category in letters.items()
        if category not in ("Cn", "Cc")
        and KINDS[kinds()[code]] != (category[0] if category[0] in KINDS else "X")
    ]
    newer = tuple(map(int, unicodedata.unidata_version.split("."))) > (15, 1, 0)
    assert len(wrong) == 0 or newer
    assert [code for code in range(128) if KINDS[kinds()[code]] == "Z"] == [9, 10, 11, 12, 13, 32]


# ---- pieces ----------------------------------------------------------------


def chunks(raw: bytes, size: int) -> Iterator[bytes]:
    return (raw[at : at + size] for at in range(0, len(raw), size))


def test_much_text_is_encoded_in_little_memory() -> None:
    encoder, text = load(Metadata(new_vocab.bytes_vocabulary())), b"some words, and more of them\n" * 100_000
    list(encoder.encode_large([b"some"]))
    tracemalloc.start()
    for _ in encoder.encode_large(chunks(text, 1 << 20), threads=2):
        pass
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 12e6


@pytest.mark.parametrize("names", ["small", *BYTE_LEVEL])
@pytest.mark.parametrize("special", [False, True])
def test_a_text_in_chunks_is_as_if_whole(names: str, special: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = small() if names == "small" else learned(names.split()[0])
    raw = Mixer(8, ["<user>", "<user>!", "<s>", new_vocab.END]).broken(30_000)
    whole = encoder.encode(raw, special=special)
    for block, chunk in ((64, 50), (700, 10_000)):
        monkeypatch.setattr(tokenizer, "BLOCK_BYTES", block)
        pieces = list(encoder.encode_large(chunks(raw, chunk), special=special, threads=2))
        assert sum(size for size, _ in pieces) == len(raw)
        assert np.array_equal(np.concatenate([tokens for _, tokens in pieces]), whole)
        assert len(pieces) > len(raw) / block / 20  # it is cut, indeed
        assert np.array_equal(encoder.encode(raw, special=special), whole)


@pytest.mark.parametrize("name", ["smollm", "hunyuan-dense", "minicpm5", "tiny_aya", "afmoe", "chameleon"])
def test_text_without_numbers_is_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first expression of these splits at numbers."""
    monkeypatch.setattr(tokenizer, "BLOCK_BYTES", 64)
    encoder, raw = learned(name), b"some words, (and) more of them:  as in\ta book\n\n" * 100
    pieces = list(encoder.encode_large(chunks(raw, 50)))
    assert np.array_equal(np.concatenate([tokens for _, tokens in pieces]), encoder.encode(raw))
    assert len(pieces) > 25


@pytest.mark.parametrize("lead", [b"\xc3", b"\xef", b"\xf0", b"\xef\xbf", b"\xf0\x9f\x98"])
def test_a_character_that_is_cut_short_by_spaces_hides_no_seam(
    lead: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "BLOCK_BYTES", 8)
    for spaces in range(1, 12):
        raw = (lead + b" " * spaces + b"ab") * 20
        pieces = list(small().encode_large(chunks(raw, 5)))
        assert len(pieces) > 5 and np.array_equal(
            np.concatenate([tokens for _, tokens in pieces]), small().encode(raw)
        )


def test_a_text_without_a_seam_is_held_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "BLOCK_BYTES", 64)
    for encoder, text in ((small(), b"=" * 5000), (learned(), b"a" * 5000)):
        assert [size for size, _ in encoder.encode_large(chunks(text, 100))] == [5000]
    assert list(small().encode_large([])) == []


@pytest.mark.parametrize("special", [False, True])
def test_a_text_without_a_seam_is_cut_where_it_is_too_long(
    special: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In no character, and in no special token."""
    monkeypatch.setattr(tokenizer, "BLOCK_BYTES", 64)
    monkeypatch.setattr(tokenizer, "MAX_HELD_BYTES", 512)
    for encoder, letters in ((small(), b"="), (learned(), b"a"), (learned(), "é".encode())):
        monkeypatch.setattr(encoder, "_has_warned", False)
        for more in (0, 1, 7):
            raw = letters * 2000 + b"=" * more + b"<user>!" + letters * 3000
            with show_log():
                pieces = list(encoder.encode_large(chunks(raw, 100), special=special))
            assert sum(size for size, _ in pieces) == len(raw) and max(size for size, _ in pieces) < 1024
            made = np.concatenate([tokens for _, tokens in pieces])
            assert encoder.decode(made).replace(b" ", b"") == raw
            assert np.array_equal(made, encoder.encode(raw, special=special))
            assert capsys.readouterr().err.count("bytes of text have no boundary between words") == (
                more == 0
            )
            if encoder.vocabulary.model == "llama":
                assert encoder.vocabulary.index["<user>!"] in made


def highest() -> int:
    """The most memory that this process ever had."""
    told = Path("/proc/self/status").read_text().split()
    return int(told[told.index("VmHWM:") + 1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is told by Linux")
@pytest.mark.parametrize("kind", ["small", "learned"])
def test_a_long_piece_takes_little_memory(kind: str) -> None:
    told = f"""
from tests.data.tokenizer.test_tokenizer import highest, {kind}
encoder = {kind}()
list(encoder.encode_large([b"a a"]))
before, text = highest(), b"a" * 20_000_000
made = sum(len(tokens) for _, tokens in encoder.encode_large([text], threads=2))
print(highest() - before - len(text))
"""
    run = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(run.stdout) < 16e6  # it was seventeen times the text


# ---- special tokens --------------------------------------------------------


def texts(encoder: Tokenizer, text: str, **how: bool) -> list[str]:
    return [encoder.vocabulary.tokens[token] for token in encoder.encode(text, **how)]


def test_user_defined_tokens_are_always_found_the_longest_first() -> None:
    assert texts(small(), "a<user>!b<user>c") == ["▁a", "<user>!", "▁", "b", "<user>", "▁", "c"]
    assert texts(small(), "<user><user>!") == ["<user>", "<user>!"]


def test_control_tokens_are_read_only_where_asked_for() -> None:
    assert texts(small(), "a<s>b", special=True) == ["▁a", "<s>", "▁", "b"]
    assert "<s>" not in texts(small(), "a<s>b")
    assert small().decode(small().encode("a<s>b")) == b" a<s>b"


def test_a_longer_token_wins_over_one_that_begins_before_it() -> None:
    tokens = [*scored()["tokenizer.ggml.tokens"], "<ab", "b====>"]
    more = scored(tokens=tokens, scores=None, token_type=np.array([1] * (len(tokens) - 2) + [4, 4], np.int32))
    assert texts(load(more), "<ab====>")[-1] == "b====>"


def test_a_token_whose_longer_form_is_broken_by_a_still_longer_one() -> None:
    tokens = [*scored()["tokenizer.ggml.tokens"], "!abcabcabc"]
    more = scored(tokens=tokens, scores=None, token_type=np.array([1] * 278 + [4, 4, 4], np.int32))
    assert texts(load(more), "<user>!abcabcabc") == ["<user>", "!abcabcabc"]


def test_white_space_behind_special_tokens_goes_in_phi_3() -> None:
    encoder = load(scored() | {"general.name": "Phi-3 mini"})
    assert texts(encoder, "<user> \n a") == ["<user>", "▁a"]


def test_white_space_that_is_a_token_goes_before_it_is_looked_for() -> None:
    tokens = [*scored()["tokenizer.ggml.tokens"], "\n\n"]
    kinds = np.array([*scored()["tokenizer.ggml.token_type"], 4], np.int32)
    more = scored(tokens=tokens, scores=None, token_type=kinds)
    assert texts(load(more), "a\n\n \n\n b") == ["▁a", "\n\n", "▁▁", "\n\n", "▁▁", "b"]
    assert texts(load(more | {"general.name": "phi3"}), "a\n\n \n\n b") == ["▁a", "\n\n", "▁", "b"]


@settings(max_examples=60, deadline=None)
@given(
    specials=st.sets(st.text(alphabet="ab \n", min_size=1, max_size=5), min_size=1, max_size=8),
    text=st.text(alphabet="aab \nc", min_size=60, max_size=300),
    name=st.sampled_from(["model", "phi3"]),
)
def test_special_tokens_that_share_bytes_are_the_same_in_pieces(
    specials: set[str], text: str, name: str
) -> None:
    tokens = [*scored()["tokenizer.ggml.tokens"], *sorted(specials - {*scored()["tokenizer.ggml.tokens"]})]
    kinds = np.array([*scored()["tokenizer.ggml.token_type"], *[4] * (len(tokens) - 280)], np.int32)
    encoder = load(scored(tokens=tokens, scores=None, token_type=kinds) | {"general.name": name})
    whole = encoder.encode(text)
    assert whole.tolist() == found_first(encoder, text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "BLOCK_BYTES", 16)
        pieces = list(encoder.encode_large(chunks(text.encode(), 7), threads=1))
    assert np.array_equal(np.concatenate([part for _, part in pieces]), whole)


def test_a_token_that_more_text_completes_begins_in_no_piece_before(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [*scored()["tokenizer.ggml.tokens"], "!!", "a!!!!!!b"]
    kinds = np.array([*scored()["tokenizer.ggml.token_type"], 4, 4], np.int32)
    encoder = load(scored(tokens=tokens, scores=None, token_type=kinds))
    raw = b"ca!!!!!!bcba!!cc" * 20
    for block in range(9, 40):
        monkeypatch.setattr(tokenizer, "BLOCK_BYTES", block)
        pieces = [part for _, part in encoder.encode_large(chunks(raw, 3), threads=1)]
        assert len(pieces) > 1 and np.array_equal(np.concatenate(pieces), encoder.encode(raw))


def found_first(encoder: Tokenizer, text: str) -> list[int]:
    """llama.cpp's way with user-defined tokens: the longest first, each in all that is left of the text."""
    known, parts = encoder.vocabulary, list[str | int]([text])
    shown = [token for token in range(len(encoder)) if known.kinds[token] == 4]
    for token in sorted(shown, key=lambda token: -len(known.tokens[token].encode())):
        cut = list[str | int]()
        for part in parts:
            while isinstance(part, str) and known.tokens[token] in part:
                before, _, part = part.partition(known.tokens[token])
                cut += [before, token]
                part = part.lstrip(" \n") if known.strips_spaces else part
            cut.append(part)
        parts = [part for part in cut if part != ""]
    first = [isinstance(part, int) for part in [0, *parts]]
    made = [
        [part] if isinstance(part, int) else encoder._engine.encode(part.encode(), start)
        for part, start in zip(parts, first, strict=False)
    ]
    return [token for tokens in made for token in tokens]


def test_control_tokens_are_known_by_their_texts() -> None:
    tokens = [*scored()["tokenizer.ggml.tokens"], "<|im_end|>", "<|message|>"]
    plain = scored(tokens=tokens, scores=None, token_type=None)
    encoder = load(plain)
    assert encoder.eot == len(tokens) - 2
    assert "<|im_end|>" not in texts(encoder, "<|im_end|>")
    assert texts(encoder, "<|im_end|>", special=True) == ["<|im_end|>"]
    assert texts(encoder, "<|message|>") == ["<|message|>"]


def test_begin_and_end_are_told_and_not_put() -> None:
    encoder = load(scored(add_eos_token=True))
    assert encoder.add_bos and encoder.add_eos and not load(scored(add_bos_token=False)).add_bos
    assert texts(encoder, "a") == ["▁a"]
    assert texts(encoder, "<s>a</s>", special=True) == ["<s>", "▁a", "</s>"]
    assert texts(encoder, "") == []


def test_defaults_by_model() -> None:
    assert (small().bos, small().eos, small().add_bos, small().add_eos) == (1, 2, True, False)
    plain = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": list("abcdefghijklm"),
        "tokenizer.ggml.merges": ["a b"],
    }
    encoder = load(plain)
    assert (encoder.bos, encoder.eos, encoder.add_bos, encoder.vocabulary.pre) == (11, 11, False, "default")
    assert load(plain | {"tokenizer.ggml.pre": "llama-bpe"}).add_bos
    assert (
        load(plain | {"tokenizer.ggml.bos_token_id": 99}).bos == 11
    )  # not among the tokens: as if it were not said
    assert texts(load(scored(add_space_prefix=False)), "a") == ["a"]


# ---- bytes -----------------------------------------------------------------


def test_text_may_be_bytes_that_are_no_text() -> None:
    raw = b"a \xff\xe2\x96!\xf0\x9f\x98"
    assert small().decode(small().encode(raw)) == b" " + raw
    # byte-level vocabularies get each byte that cannot be read replaced, as in llama.cpp
    assert learned().decode(learned().encode(raw)).decode() == "a \ufffd\ufffd\ufffd!\ufffd\ufffd\ufffd"


@pytest.mark.parametrize(
    ("text", "raw"),
    [("ä", b"\xc3\xa4"), ("a\udcff", b"a\xff"), ("\ud83d", b"\xed\xa0\xbd"), (b"\xff", b"\xff")],
)
def test_surrogates(text: str | bytes, raw: bytes) -> None:
    assert to_bytes(text) == raw


def test_a_byte_without_a_token_is_an_error_that_names_it() -> None:
    tokens = ["<unk>", "<s>", "</s>", "a", "▁"]
    encoder = load(scored(tokens=tokens, scores=None, token_type=None))
    assert texts(encoder, "a a") == ["▁", "a", "▁", "a"]
    with pytest.raises(DataError, match="no token for the byte 0xC3"):
        encoder.encode("aä")


def test_a_stream_gives_whole_characters() -> None:
    decoder = StreamDecoder(small())
    pieces = [decoder.feed(token) for token in small().encode("a😀<s>", special=True)]
    assert pieces == [" a", "", "", "", "😀", ""]
    assert decoder.feed(3 + 0xF0) == "" and decoder.flush() == "\ufffd"
    assert StreamDecoder(small(), special=True).feed(1) == "<s>"


def test_decoding() -> None:
    ids = small().encode("ab<s>", special=True)
    assert small().decode(ids) == b" ab<s>"
    assert small().decode(ids, special=False) == b" ab"
    with pytest.raises(UsageError, match="token 9999 is not in the vocabulary of 280"):
        small().decode([1, 9999])
