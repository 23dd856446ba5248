"""Rows that are gone past: those behind them are the same as if they had been made, and so is where training stands."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamatrain.data import token_cache
from llamatrain.data.batches import Batch, CursorState
from llamatrain.data.dataset import open_dataset
from llamatrain.data.options import DataOptions
from llamatrain.data.preference_records import PreferenceKind
from llamatrain.data.shuffle import Order
from llamatrain.data.sine import Sine
from llamatrain.data.token_cache import DiskArray
from llamatrain.run.dataset import CountedBatches
from llamatrain.run.row_kinds import KINDS
from llamatrain.train.parallel.batch_shard import BatchShard
from llamatrain.train.prefetch import Prefetcher
from tests.helpers.byte_tokenizer import BOS, EOS, ByteTokenizer

SAMPLES = 600  # more than are packed together
Opened = Callable[[int], CountedBatches]  # of a seed


@pytest.fixture(autouse=True, scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("skipping"))
        patch.setenv("LLAMATRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        token_cache.cache_folder.cache_clear()
        draw = np.random.default_rng(7)

        def words(most: int) -> str:
            return "".join(chr(97 + each) for each in draw.integers(0, 26, draw.integers(1, most)))

        Path("a.txt").write_text("#" + "#".join(words(30) for _ in range(90)))
        lines = [{"prompt": words(20), "completion": words(12)} for _ in range(SAMPLES)]
        Path("a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        labels = [line | {"label": bool(draw.integers(2))} for line in lines]
        Path("l.jsonl").write_text("".join(json.dumps(line) + "\n" for line in labels))
        pairs = [
            {"prompt": words(20), "chosen": words(12) + "A", "rejected": words(12)} for _ in range(SAMPLES)
        ]
        Path("p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in pairs))
        yield
    token_cache.cache_folder.cache_clear()


def of_files(name: str, ctx: int = 24, compare: PreferenceKind | None = None, **options: Any) -> Opened:
    said = DataOptions(**options)
    corpus = functools.cache(
        lambda: open_dataset([name], ByteTokenizer(), said, ctx, 0, KINDS[compare].dataset)[0]
    )
    return lambda seed: KINDS[compare].batches(corpus(), said, seed, EOS, BOS)  # type: ignore[arg-type]


FILLED: dict[str, Any] = {"fill_with_next_samples": True, "separate_with_eos": True}
KIND: dict[str, Opened] = {
    "text": of_files("a.txt"),
    "text, overlapping": of_files("a.txt", overlapping_samples=True),
    "text, anywhere": of_files("a.txt", sample_random_offsets=True, sample_start="#"),
    "text, filled": of_files("a.txt", ctx=50, sample_start="#", **FILLED),
    "text, filled, anywhere": of_files(
        "a.txt", ctx=50, sample_start="#", sample_random_offsets=True, **FILLED
    ),
    "rows": of_files("a.jsonl", pack=False),
    "packed": of_files("a.jsonl", ctx=70),
    "filled": of_files("a.jsonl", ctx=50, **FILLED),
    "filled, unseparated": of_files("a.jsonl", ctx=50, fill_with_next_samples=True, separate_with_bos=False),
    "pairs": of_files("p.jsonl", compare="pairs", pack=False),
    "pairs, packed": of_files("p.jsonl", ctx=40, compare="pairs"),
    "answers": of_files("l.jsonl", ctx=40, compare="answers"),
    "a wave": lambda seed: Sine(9, 12, seed),
}
kinds = pytest.mark.parametrize("kind", KIND)


def arrays(batch: Batch) -> list[Any]:
    """All that a batch is."""
    told = [
        batch.tokens,
        batch.targets,
        batch.weights,
        batch.positions,
        batch.starts,
        np.int64([batch.size, batch.samples]),
    ]
    if batch.answers:
        told += [batch.answers.sequences, batch.answers.chosen, batch.answers.sides]
    others = arrays(batch.answers.others) if batch.answers and batch.answers.others else []
    return [(each.dtype, each.shape, each.tobytes()) for each in told] + others


@kinds
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 7)), min_size=1, max_size=12),
    st.integers(0, 900),
    st.data(),
)
@settings(max_examples=10, deadline=None)
def test_skipped_rows_change_nothing(
    kind: str, moves: list[tuple[bool, int]], first: int, data: st.DataObject
) -> None:
    """Across windows and epochs, and from wherever it is gone on."""
    one, other = KIND[kind](3), KIND[kind](3)
    one.skip(first)
    for _ in range(first // 50):
        other.batch(50)
    other.skip(first % 50)
    assert one.state == other.state
    for makes, count in moves:
        made = other.batch(count)
        if makes:
            assert arrays(one.batch(count)) == arrays(made)
        else:
            one.skip(count)
        assert one.state == other.state
        if data.draw(st.booleans()):
            kept = CursorState(*json.loads(json.dumps(one.state)))
            one = KIND[kind](4)
            assert one.restore(kept)


@kinds
def test_of_what_is_gone_past_nothing_is_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, reads = KIND[kind](0), list[int]()
    read = DiskArray.read

    def counted(array: DiskArray, begin: int, end: int) -> np.ndarray:
        reads.append(end - begin)
        return read(array, begin, end)

    monkeypatch.setattr(DiskArray, "read", counted)
    rows.skip(700)
    assert set(reads) <= ({1} if kind in ("text, filled", "text, filled, anywhere", "filled") else set()), (
        "whether one ends"
    )
    reads.clear()
    rows.batch(1)
    samples = rows.batch(1).samples
    assert kind == "a wave" or 0 < len(reads) <= 24 * max(samples, 1), (
        "of a window no more than the rows that are taken"
    )


@kinds
@pytest.mark.parametrize("of", [1, 2, 3])
def test_a_validation_is_shared_out(kind: str, of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [arrays(batch) for batch in KIND[kind](1).one_epoch(5)]
    rows = KIND[kind](1)
    before = rows.state
    assert [[arrays(batch) for batch in rows.one_epoch(5, mine, of)] for mine in range(of)] == [
        whole[mine::of] for mine in range(of)
    ]
    assert rows.state == before and (len(whole) > 3 or kind == "a wave")


def test_others_batches_of_a_validation_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read, reads = DiskArray.read, list[int]()
    monkeypatch.setattr(DiskArray, "read", lambda *place: (reads.append(0), read(*place))[1])
    for _ in KIND["packed"](1).one_epoch(5):
        pass
    every = len(reads)
    for _ in KIND["packed"](1).one_epoch(5, 1, 4):
        pass
    assert len(reads) - every < every / 3


# ---- dealt to one of several ------------------------------------------------


@kinds
def test_each_has_its_own_and_all_stand_alike(kind: str) -> None:
    batches, parts = 7, [range(1), range(1, 4), range(4, 7)]
    whole, dealt = KIND[kind](2), [BatchShard(KIND[kind](2), batches, own) for own in parts]
    for _ in range(30):
        assert all(each.state == whole.state for each in dealt)
        made = [arrays(whole.batch(3)) for _ in range(batches)]
        assert [arrays(each.batch(3)) for each in dealt for _ in each.own] == made
    assert all(each.state == whole.state for each in dealt)


def test_who_has_all_skips_none(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, whole = KIND["packed"](2), KIND["packed"](2)
    dealt = BatchShard(rows, 3, range(3))
    for _ in range(7):
        assert arrays(dealt.batch(2)) == arrays(whole.batch(2)) and dealt.state == whole.state
    assert list(map(arrays, dealt.one_epoch(9, 1, 2))) == list(map(arrays, whole.one_epoch(9, 1, 2)))


def test_they_are_read_ahead() -> None:
    whole, dealt = KIND["packed"](2), BatchShard(KIND["packed"](2), 4, range(1, 3))
    with Prefetcher(dealt, 2, ready=4, remaining=12) as ahead:
        for _ in range(6):
            assert ahead.state == whole.state
            step = [arrays(whole.batch(2)) for _ in range(4)]
            assert [arrays(ahead.batch(2)), arrays(ahead.batch(2))] == step[1:3]
        assert ahead.state == whole.state


@pytest.mark.parametrize("own", [range(0), range(2, 2), range(3, 5), range(-1, 2), range(0, 4, 2)])
def test_nobody_has_none(own: range) -> None:
    with pytest.raises(ValueError, match="of 4 batches: each process has some"):
        BatchShard(KIND["a wave"](0), 4, own)


# ---- the order ----------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(), st.integers(0, 9), st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_many_places_of_an_order_are_found_together(
    count: int, seed: int, epoch: int, shuffle: bool, data: st.DataObject
) -> None:
    begin, end = sorted(data.draw(st.integers(0, count)) for _ in range(2))
    places = range(epoch * count + begin, epoch * count + end)
    if places:
        order = Order(count, seed, shuffle)
        assert order.take(places).tolist() == [order[place] for place in places]


@kinds
@pytest.mark.parametrize("count", [1, 7])
def test_rows_end_with_an_epoch(kind: str, count: int) -> None:
    """What is left over of a batch is padding, also where rows are skipped, and the end is part of the state."""
    rows, skipped, endless = KIND[kind](3), KIND[kind](3), KIND[kind](3)
    rows.end = skipped.end = 2
    wanted, taken = endless.count(2), 0
    while taken < wanted:
        batch, other = rows.batch(count), endless.batch(count)
        skipped.skip(count)
        there = min(count, wanted - taken)
        assert skipped.state == rows.state and batch.empty == count - there and other.empty == 0
        assert (batch.weights[:there] > 0).any(axis=1).all() and not batch.weights[there:].any()
        if there == count:
            assert arrays(batch) == arrays(other)
        taken += there
    assert (rows.state.epoch, rows.state.row) == (2, 0) or "filled" in kind
    for each in (rows, KIND[kind](4)):
        assert each.restore(CursorState(*json.loads(json.dumps(rows.state))))
        assert each.batch(3).empty == 3 and each.state == rows.state
