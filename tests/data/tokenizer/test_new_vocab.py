"""A vocabulary is learned as `tokenizers` learns it, from any text in time that grows with it, in tables that are bounded."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llamatrain.data import vocabulary_text as files
from llamatrain.data.find_files import find_sources
from llamatrain.data.tokenizer import bpe_train, new_vocab, word_counts
from llamatrain.data.tokenizer.bpe_tables import ALPHABET
from llamatrain.data.tokenizer.bpe_train import BpeTrainer
from llamatrain.data.tokenizer.pretokenizers import LLAMA3, PRE_TOKENIZERS
from llamatrain.data.tokenizer.word_counts import WordCounter
from llamatrain.errors import DataError
from llamatrain.gguf.reader import Metadata
from tests.data.tokenizer.test_tokenizer import ROOT
from tests.helpers.emulator import is_emulated
from tests.helpers.mixed_text import CODE

TEXTS = ["hello hello, hello again\n" * 9, "", "a hello that was never said: été, 你好 你好\n" * 7]


def words(count: int, seed: int = 1) -> str:
    """Ordinary ones: some come often, most are rare."""
    draw = random.Random(seed)
    known = ["".join(draw.choices("etaoinshrdluéß你好", k=draw.randint(1, 9))) for _ in range(count // 8)]
    return " ".join(known[int(draw.random() ** 3 * len(known))] for _ in range(count))


def drawn(letters: str, count: int) -> str:
    return "".join(random.Random(2).choices(letters, k=count))


def merges(texts: list[str], size: int) -> list[str]:
    found: list[str] = list(Metadata(new_vocab.learn_vocabulary(texts, size))["tokenizer.ggml.merges"])
    return found


def counted(texts: list[str]) -> WordCounter:
    counter = WordCounter(PRE_TOKENIZERS["llama-bpe"].expressions()[0])
    for text in texts:
        counter.add(text)
    return counter


def by_tokenizers(texts: list[str], size: int) -> list[str]:
    tokenizers = pytest.importorskip("tokenizers")
    cut, pre = tokenizers.Regex(LLAMA3), tokenizers.pre_tokenizers
    witness = tokenizers.Tokenizer(tokenizers.models.BPE())
    steps = [pre.Split(cut, "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    witness.pre_tokenizer = pre.Sequence(steps)
    how = {
        "vocab_size": size - 2,
        "min_frequency": 2,
        "show_progress": False,
        "initial_alphabet": list(ALPHABET),
    }
    witness.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(**how))
    return [" ".join(pair) for pair in json.loads(witness.to_str())["model"]["merges"]]


# ---- what is learned -------------------------------------------------------


@pytest.mark.parametrize("size", [258, 300, 1000, 40_000])
def test_it_is_what_tokenizers_learns(size: int) -> None:
    # to the very end, where pairs of equal counts, and tokens that two merges make, abound
    texts = [*TEXTS, CODE * 3, words(20_000), words(20_000, 2) + "aaaaaaa abababab " * 9]
    found = merges(texts, size)
    assert found == by_tokenizers(texts, size)
    assert size < 40_000 or len(found) > 2000


def test_a_text_in_blocks_is_as_if_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = merges([*TEXTS, CODE, words(3000)], 900)
    monkeypatch.setattr(word_counts, "BLOCK", 150)  # characters, and the longest piece has fewer
    assert merges([*TEXTS, CODE, words(3000)], 900) == whole


def test_bytes_are_read_as_text() -> None:
    raw = ["été 你好 ".encode() * 50 + b"\xff", b""]
    assert new_vocab.learn_vocabulary(raw, 300) == new_vocab.learn_vocabulary(
        ["été 你好 " * 50 + "\ufffd"], 300
    )


def test_no_text_and_an_error_in_the_text() -> None:
    with pytest.raises(DataError, match="there is no text to learn a vocabulary from"):
        new_vocab.learn_vocabulary(["", b""], 300)

    def broken() -> Iterator[str]:
        yield "a text"
        raise DataError("a.jsonl, line 2: not JSON")

    with pytest.raises(DataError, match="line 2: not JSON"):
        new_vocab.learn_vocabulary(broken(), 300)


# ---- any text, in time and memory ------------------------------------------


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


@pytest.mark.parametrize(
    "letters",
    ["ACGT", "a", "ab", "0123456789", " ", "\n", "😀😁😂", "".join(map(chr, range(0x4E00, 0x6000)))],
)
def test_text_without_spaces_takes_time_by_its_length(letters: str) -> None:
    merges(TEXTS, 300)  # compiles
    texts = [drawn(letters, 120_000)]
    assert seconds(lambda: merges(texts, 4096)) < 3  # half a second or less; it was minutes


def test_long_pieces_are_cut_between_characters() -> None:
    counter = counted([drawn("你好吗", 1000)])
    pieces = [
        counter.known.text[a:b].tobytes().decode()
        for a, b in zip(counter.known.ends, counter.known.ends[1:], strict=False)
    ]
    assert "".join(pieces) == drawn("你好吗", 1000)
    assert {len(piece) for piece in pieces[: counter.pieces - 1]} == {word_counts.MAX_WORD_BYTES // 3}


def test_rare_pieces_are_given_up_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_counts, "MAX_PIECES", 500)
    monkeypatch.setattr(word_counts, "MAX_PIECE_BYTES", 4000)
    noise = random.Random(3)
    text = " ".join(f"wonder {noise.randrange(10**9):x}q" for _ in range(5000))
    counter = counted([text])
    assert counter.pieces <= 500 and counter.known.ends[counter.pieces] <= 4000
    assert counter.counts.max() == 4999  # " wonder", counted all along
    assert "Ġwonder" in Metadata(new_vocab.learn_vocabulary([text], 400))["tokenizer.ggml.tokens"]
    assert new_vocab.learn_vocabulary([text], 400) == new_vocab.learn_vocabulary([text], 400)


def test_rare_pairs_are_left_out_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [words(20_000) + drawn("abcdefghijklm", 30_000)]
    whole, begun, count = merges(texts, 1500), list[int](), BpeTrainer._count_all
    monkeypatch.setattr(BpeTrainer, "_count_all", lambda self: begun.append(1) or count(self))
    monkeypatch.setattr(bpe_train, "MAX_PAIRS", 1 << 12)
    tight = merges(texts, 1500)
    assert len(begun) > 2
    assert len(tight) == len(whole) and tight[:150] == whole[:150]
    monkeypatch.setattr(bpe_train, "MAX_PAIRS", 1 << 20)
    monkeypatch.setattr(bpe_train, "MAX_LISTED", 100_000)
    assert len(merges(texts, 1500)) == len(whole)


def test_its_memory_is_bounded_and_nothing_of_it_is_left() -> None:
    told = """
import random
from llamatrain.data.tokenizer import new_vocab
from llamatrain.platform.memory import resident_bytes
from tests.data.tokenizer.test_tokenizer import highest
new_vocab.learn_vocabulary(["a a a"], 300)
before, top = resident_bytes(), highest()
new_vocab.learn_vocabulary(["".join(map(chr, random.Random(1).choices(range(0x4E00, 0xA000), k=120_000)))], 8000)
print(highest() - top, resident_bytes() - before)
"""
    if sys.platform != "linux":
        pytest.skip("the peak is told by Linux")
    run = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, cwd=ROOT)
    peak, left = map(int, run.stdout.split())
    assert peak < 60e6
    assert left < 20e6 or is_emulated()  # what an emulator has translated is left


# ---- while it is learned ---------------------------------------------------


class Bar:
    def __init__(self, title: str, **settings: Any) -> None:
        self.title, self.total, self.n = title, settings["total"], 0
        self.seen = list[int]()

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, more: int) -> None:
        self.n += more
        self.seen.append(self.n)


def test_bars_show_how_far_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bars = list[Bar]()
    for module in (files, new_vocab):
        monkeypatch.setattr(
            module,
            "progress_bar",
            lambda *title, **settings: bars.append(Bar(*title, **settings)) or bars[-1],
        )
    (tmp_path / "a.txt").write_text(words(250_000))
    lines = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "a", "completion": "b"},
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name in ("a.txt", "b.jsonl"):
        new_vocab.learn_vocabulary(files.read_texts(find_sources([str(tmp_path / name)])), 4096)
    read, learned, lines_read, _ = bars
    assert read.total == read.n == (tmp_path / "a.txt").stat().st_size and len(read.seen) > 2
    assert (
        learned.total == learned.n == 4096 - 258 and len(learned.seen) > 2
    )  # Python has its turn, and may be interrupted
    assert 0 <= lines_read.n - lines_read.total <= 1  # each line is counted with its end
