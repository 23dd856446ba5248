"""Samples to rows: their arrays, their order, and going on where training stood."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamatrain.data import token_cache
from llamatrain.data.batches import Batch, Batches, CursorState
from llamatrain.data.dataset import open_dataset
from llamatrain.data.options import DataOptions
from llamatrain.data.shuffle import Permutation
from llamatrain.errors import DataError
from tests.helpers.byte_tokenizer import BOS, CLOSE, EOS, ByteTokenizer


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path / "cache"))
    token_cache.cache_folder.cache_clear()
    yield
    token_cache.cache_folder.cache_clear()


def open_rows(name: str, ctx: int, seed: int = 0, add_bos: bool = True, **options: object) -> Batches:
    chosen = DataOptions(**options)  # type: ignore[arg-type]
    corpus, _ = open_dataset([name], ByteTokenizer(add_bos=add_bos), chosen, ctx, seed)
    return Batches(corpus, chosen, seed, EOS, BOS)


def text(content: str) -> str:
    Path("a.txt").write_text(content)
    return "a.txt"


def prompts(*pairs: tuple[str, str]) -> str:
    Path("a.jsonl").write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in pairs))
    return "a.jsonl"


def same(a: Batch, b: Batch) -> bool:
    names = ("tokens", "targets", "weights", "positions", "starts")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names) and a.size == b.size


def words(tokens: np.ndarray) -> str:
    return ByteTokenizer().decode(tokens).decode()


def samples(batch: Batch) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tokens, targets and weights of each run that sees only itself, padding left out."""
    found = []
    for number, starts in enumerate(batch.starts):
        for begin in np.unique(starts):
            own = starts == begin
            if batch.weights[number][own].any():
                found.append(
                    (batch.tokens[number][own], batch.targets[number][own], batch.weights[number][own])
                )
    return found


MODES = st.sampled_from(
    [
        {},
        {"shuffle": False},
        {"pack": True},
        {"fill_with_next_samples": True},
        {"fill_with_next_samples": True, "separate_with_eos": True, "separate_with_bos": False},
        {"overlapping_samples": True},
        {"sample_random_offsets": True},
    ]
)
PAIRS = st.lists(
    st.tuples(st.text("abc", max_size=20), st.text("ABC", min_size=1, max_size=20)), min_size=1, max_size=30
)

# ---- what is in a row ------------------------------------------------------


def test_a_row_of_text() -> None:
    batch = open_rows(text("abcdefgh"), ctx=4, shuffle=False).batch(2)
    assert (words(batch.tokens[0]), words(batch.targets[0])) == ("<s>abc", "abcd")
    assert (words(batch.tokens[1]), words(batch.targets[1])) == ("<s>efg", "efgh")
    assert batch.weights.tolist() == [[1] * 4] * 2 and batch.size == 8
    batch = open_rows("a.txt", ctx=4, shuffle=False, add_bos=False).batch(2)
    assert (words(batch.tokens[1]), words(batch.targets[1][:3])) == ("efgh"[:3] + "</s>", "fgh")
    assert batch.weights.tolist() == [[1] * 4, [1, 1, 1, 0]] and batch.size == 7


def test_padding_has_no_weight_and_sees_only_itself() -> None:
    batch = open_rows(prompts(("ab", "c")), ctx=40, pack=False).batch(1)
    assert batch.tokens.shape == (1, 32)
    assert words(batch.tokens[0][:4]) == "<s>abc" and words(batch.targets[0][:4]) == "abc</s>"
    assert batch.weights[0].tolist() == [0, 0, 1, 1] + [0] * 28
    assert batch.positions[0][:4].tolist() == [*range(4)]
    assert batch.starts[0].tolist() == [0] * 4 + [*range(4, 32)]
    assert batch.size == 4


def test_rows_have_a_few_lengths() -> None:
    rows = open_rows(prompts(*(("a" * size, "b") for size in range(1, 160))), ctx=150, pack=False)
    assert rows.lengths == (64, 96, 128, 150)
    for _ in range(100):
        batch = rows.batch(2)
        used = max(len(tokens) for tokens, _, _ in samples(batch))
        assert batch.tokens.shape[1] == min(length for length in rows.lengths if length >= used)
    assert (
        open_rows("a.jsonl", ctx=150, pack=True).lengths
        == open_rows(text("a" * 200), ctx=150).lengths
        == (150,)
    )
    assert open_rows("a.jsonl", ctx=20, pack=False).lengths == (20,)


def test_what_is_no_plain_text_is_packed_unless_told_otherwise() -> None:
    lines, plain = prompts(("a", "b"), ("c", "d")), text("abcdefgh" * 9)
    assert open_rows(lines, ctx=150).packs and open_rows(lines, ctx=150).lengths == (150,)
    assert not open_rows(lines, ctx=150, fill_with_next_samples=True).packs
    assert not open_rows(lines, ctx=150, pack=False, fill_with_next_samples=True).packs
    assert not open_rows(plain, ctx=4).packs and not open_rows(plain, ctx=4, sample_start="c").packs
    assert open_rows(plain, ctx=4, sample_start="c", pack=True).packs


def test_samples_are_counted_within_a_window() -> None:
    rows = open_rows(prompts(*[("abcde", "xyz")] * 10), ctx=20)  # two share a row
    seen = []
    for _ in range(6):
        rows.batch(1)
        seen.append((rows.state.epoch, rows.state.position + rows.state.taken))
    assert seen == [(0, 2), (0, 4), (0, 6), (0, 8), (1, 0), (1, 2)]


def test_how_full_rows_are() -> None:
    rows = open_rows(
        prompts(*[("abcde", "xyz")] * 10), ctx=20
    )  # ten tokens each, the end's with them, of which nine are read
    filling = rows.measure_packing(1)
    assert filling.used == 18 / 20 and filling.trained == 8 / 20
    assert rows.state == open_rows("a.jsonl", ctx=20).state, "and nothing was taken"
    apart = open_rows("a.jsonl", ctx=20, pack=False).measure_packing(3)
    assert apart.used == 9 / 20 and apart.trained == 4 / 20


@given(PAIRS, st.integers(8, 60), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_rows_are_counted_as_they_are_made(pairs: list[tuple[str, str]], ctx: int, epochs: int) -> None:
    try:
        rows = open_rows(prompts(*pairs), ctx=ctx)
    except DataError:
        return
    expected = rows.count(epochs)
    taken = 0
    while rows.state.epoch < epochs:
        rows.batch(1)
        taken += 1
    assert expected == taken


@given(PAIRS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_packed_samples_see_themselves_alone(pairs: list[tuple[str, str]], lead: bool) -> None:
    pairs = [("p" + prompt, answer) for prompt, answer in pairs]
    rows = open_rows(prompts(*pairs), ctx=48, pack=True, add_bos=lead)
    found = []
    while rows.state.epoch == 0:
        batch = rows.batch(1)
        assert batch.positions.tolist() == (np.arange(48) - batch.starts).tolist()
        assert (batch.starts <= np.arange(48)).all()
        found += samples(batch)
    whole = Counter(words(np.concatenate([tokens[:1], targets])) for tokens, targets, _ in found)
    assert whole == Counter(("<s>" if lead else "") + prompt + answer + "</s>" for prompt, answer in pairs)
    assert Counter(words(targets[weights > 0]) for _, targets, weights in found) == Counter(
        answer + "</s>" for _, answer in pairs
    )


def test_packing_wastes_little() -> None:
    rows = open_rows(prompts(*(("a" * (size % 40), "b") for size in range(400))), ctx=64, pack=True)
    size = sum(rows.batch(1).size for _ in range(rows.count(1)))
    assert size / (64 * rows.count(1)) > 0.97


# ---- the ancestors' ways ---------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "one<s>two<s>t"),
        ({"separate_with_eos": True}, "one</s><s>two</s>"),
        ({"separate_with_bos": False}, "onetwothr"),
    ],
)
def test_filling_goes_on_with_the_next_samples(options: dict[str, bool], expected: str) -> None:
    rows = open_rows(
        text("#one#two#three"), ctx=9, sample_start="#", fill_with_next_samples=True, shuffle=False, **options
    )
    batch = rows.batch(1)
    assert words(batch.tokens[0]).startswith("<s>")
    assert words(batch.targets[0]) == expected
    assert batch.positions[0].tolist() == list(range(9)) and not batch.starts.any() and batch.weights.all()
    assert (rows.state.epoch, rows.state.position) == (1, 0)  # the sample that was cut counts as used


def test_an_end_token_is_not_doubled() -> None:
    options = {"fill_with_next_samples": True, "separate_with_eos": True, "shuffle": False}
    batch = open_rows(prompts(("a", "b"), ("c", "d")), ctx=7, **options).batch(1)
    assert words(batch.targets[0]) == "ab</s><s>cd</s>"
    assert batch.weights[0].tolist() == [0, 1, 1, 0, 0, 1, 1]


def test_random_offsets_begin_inside_the_sample_and_change_with_the_epoch() -> None:
    content = "".join(chr(33 + number) for number in range(64))
    rows = open_rows(text(content), ctx=16, sample_random_offsets=True, shuffle=False)
    first = [next(words(tokens) for _, tokens, _ in samples(rows.batch(1))) for _ in range(12)]
    assert len(set(first)) > 4
    for number, found in enumerate(first):
        window = content[number % 4 * 16 : number % 4 * 16 + 16]
        assert len(found) > 1 and window.endswith(found)


# ---- the order -------------------------------------------------------------


@given(st.integers(5, 300), st.integers(2, 20), st.integers(0, 99), st.booleans(), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_every_token_is_trained_once_an_epoch(size: int, ctx: int, seed: int, lead: bool, batch: int) -> None:
    content = "".join(chr(33 + number % 90) + chr(33 + number // 90) for number in range(size // 2 + 12))
    rows = open_rows(text(content), ctx, seed, lead)
    count = rows.count(1)
    trained = []
    for _ in range(-(-2 * count // batch)):
        made = rows.batch(batch)
        trained += [targets[weights > 0] for targets, weights in zip(made.targets, made.weights, strict=True)]
    for epoch in (trained[:count], trained[count : 2 * count]):
        assert Counter(chain(*(row.tolist() for row in epoch))) == Counter(content.encode()[1 - lead :])
    assert len(rows.dataset) == count


@given(PAIRS, MODES, st.integers(1, 4), st.integers(0, 12), st.booleans())
@settings(max_examples=100, deadline=None)
def test_resuming_gives_the_same_rows(
    pairs: list[tuple[str, str]], options: dict[str, object], batch: int, done: int, of_text: bool
) -> None:
    name = (
        text("".join(a + b for a, b in pairs) + "0123456789" * 3)
        if of_text
        else prompts(*(("p" + a, b) for a, b in pairs))
    )
    rows, other = (open_rows(name, 24, seed, **options) for seed in (3, 4))
    for _ in range(done):
        rows.batch(batch)
    kept = CursorState(*json.loads(json.dumps(rows.state)))
    assert other.restore(kept) and other.state == rows.state
    assert all(same(rows.batch(batch), other.batch(batch)) for _ in range(6))


def test_a_batch_size_changes_no_order() -> None:
    one, four = (open_rows(text("abcdefghij" * 20), ctx=7, seed=5) for _ in range(2))
    singles = [one.batch(1).tokens[0] for _ in range(80)]
    assert np.array_equal(np.stack(singles), np.concatenate([four.batch(4).tokens for _ in range(20)]))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def epochs(seed: int) -> list[list[bytes]]:
        rows = open_rows(text("abcdefghij" * 20), 7, seed)
        return [[rows.batch(1).tokens.tobytes() for _ in range(rows.count(1))] for _ in range(2)]

    first, second = epochs(1)
    assert first != second and sorted(first) == sorted(second)
    assert epochs(1) == [first, second] and epochs(2)[0] != first


def test_a_state_of_other_data_is_not_gone_on_with() -> None:
    rows = open_rows(text("abcdefgh" * 9), ctx=4)
    rows.batch(3)
    state = rows.state
    assert not open_rows(text("ABCDEFGH" * 9), ctx=4).restore(state)
    assert not open_rows(text("abcdefgh" * 9), ctx=5).restore(state)
    again = open_rows("a.txt", ctx=4, force_reshuffle=True, seed=7)
    assert not again.restore(state) and again.state.position == 0
    assert again.state.seed not in (7, state.seed)  # another shuffle than any that was


@given(st.integers(1, 3000), st.integers())
@settings(max_examples=60, deadline=None)
def test_a_permutation_has_every_number_once(count: int, seed: int) -> None:
    order = Permutation(count, seed)
    assert sorted(order[place] for place in range(count)) == list(range(count))


def test_permutations_are_even() -> None:
    seen = Counter(tuple(map(Permutation(4, seed, 0).__getitem__, range(4))) for seed in range(4800))
    assert len(seen) == 24
    assert (
        sum((count - 200) ** 2 / 200 for count in seen.values()) < 60
    )  # chi squared of 23 degrees: 1 in 10,000 above


def test_all_rows_once_for_validation() -> None:
    for options in ({}, {"pack": True}, {"fill_with_next_samples": True}):
        rows = open_rows(prompts(*((str(number), "x") for number in range(10))), ctx=64, **options)
        batches = list(rows.one_epoch(4))
        assert {batch.tokens.shape[0] for batch in batches} == {4}
        asked = Counter(words(tokens[1:-1]) for batch in batches for tokens, _, _ in samples(batch))
        assert asked == Counter(map(str, range(10)))
        assert rows.state.position == 0 and CLOSE not in batches[0].tokens


def test_rows_are_counted() -> None:
    for options in ({}, {"pack": True}, {"fill_with_next_samples": True}):
        rows = open_rows(prompts(*((str(number) * 3, "x") for number in range(50))), ctx=32, **options)
        count = rows.count(2)
        for _ in range(count):
            assert rows.state.epoch < 2
            rows.batch(1)
        assert rows.state.epoch >= 2
