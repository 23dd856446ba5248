"""A step that is divided: who has which groups and segments, and that sums do not depend on who makes them."""

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from llamatrain.distributed.single import SingleProcess
from llamatrain.run.resolve import default_groups
from llamatrain.train.evaluate import BatchLoss, gather_batch_losses
from llamatrain.train.parallel import partition as dividing
from llamatrain.train.parallel.accumulate import plan_accumulation
from llamatrain.train.parallel.gather import GatheredState
from llamatrain.train.parallel.partition import Partition, TreeNode, cover_with_nodes, rank_range
from llamatrain.train.parallel.reduce import TreeReduce, add_nodes
from llamatrain.train.protocols import InputChanged, TrainingInterrupted
from tests.helpers.cli import ran, text_file
from tests.helpers.small_models import small, weights, written

SHAPES = {"token_embd.weight": (100, 64), "blk.0.w": (64, 60), "blk.0.norm": (64,), "output.weight": (7, 9)}
ORDER = ["output.weight", "blk.0.norm", "blk.0.w", "token_embd.weight"]
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())
NO_UNITS = np.zeros((0, 2))


def divisions(ranks: int, groups: int = 8, whole_weights: bool = False) -> list[Partition]:
    more: dict[str, Any] = {
        "shapes": SHAPES,
        "order": ORDER,
        "groups": groups,
        "whole_weights": whole_weights,
    }
    return [Partition(ranks=ranks, rank=rank, **more) for rank in range(ranks)]


@pytest.fixture(params=[1 << 23, 3000, 500])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(dividing, "BUCKET", request.param)
    return int(request.param)


# ---- who has what ----------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("whole", [False, True])
def test_each_element_is_one_rank_s(bucket: int, ranks: int, whole: bool) -> None:
    made = divisions(ranks, whole_weights=whole)
    owners = np.zeros(SIZE, int)
    for division in made:
        for number in range(len(division.buckets)):
            for run in division.bucket_ranges(number, division.rank):
                owners[run] += 1
    assert (owners == 1).all()
    assert all(division.buckets == made[0].buckets for division in made)


@pytest.mark.parametrize("whole", [False, True])
def test_segments_do_not_depend_on_ranks(bucket: int, whole: bool) -> None:
    assert (
        divisions(1, whole_weights=whole)[0].buckets
        == divisions(3, whole_weights=whole)[2].buckets
        == divisions(8, whole_weights=whole)[7].buckets
    )


def test_a_cut_has_as_many_axes_as_its_weight(bucket: int) -> None:
    for cut in divisions(1)[0].rank_slices(0):
        assert len(cut.shape) == len(SHAPES[cut.name]) and int(np.prod(cut.shape)) == cut.stop - cut.start


def test_whole_weights_stay_whole(bucket: int) -> None:
    cuts = divisions(1, whole_weights=True)[0].rank_slices(0)
    assert sorted(cut.name for cut in cuts) == sorted(SHAPES)
    assert all(cut.shape == SHAPES[cut.name] for cut in cuts)


def test_whole_weights_lie_evenly(bucket: int) -> None:
    """One is not cut; where there are more ranks than weights some have none."""
    made = divisions(8, whole_weights=True)
    held = [sum(cut.stop - cut.start for cut in division.rank_slices(division.rank)) for division in made]
    assert sorted(held) == [0] * 4 + sorted(int(np.prod(shape)) for shape in SHAPES.values())
    assert held[0] == max(held)


def test_buckets_come_as_gradients_do(bucket: int) -> None:
    first = divisions(2)[0].buckets[0]
    names = {cut.name for segment in first for cut in segment}
    assert ORDER[0] in names
    assert (ORDER[-1] in names) is (bucket > SIZE)


def test_segments_are_alike(bucket: int) -> None:
    """Each rank has as much to do, and to hold."""
    for ranks in (2, 4, 8):
        held = [
            sum(cut.stop - cut.start for cut in division.rank_slices(division.rank))
            for division in divisions(ranks)
        ]
        assert max(held) - min(held) <= 2 * 16 * (1 + SIZE // bucket)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_groups_are_whole_branches(ranks: int) -> None:
    found = [branch for rank in range(ranks) for branch in cover_with_nodes(rank_range(8, ranks, rank))]
    assert sum(branch.size for branch in found) == 8
    assert all(one.start + one.size == other.start for one, other in pairwise(found))
    assert all(branch.start % branch.size == 0 for branch in found)


# ---- sums ------------------------------------------------------------------


def tree(values: list[np.ndarray]) -> np.ndarray:
    """As it is defined."""
    while len(values) > 1:
        values = [one + other for one, other in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def micro_batches(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    return [
        rng.standard_normal(SIZE).astype(np.float32) * np.float32(10.0) ** (number % 4)
        for number in range(count)
    ]


def summed(groups: int, batches: list[np.ndarray]) -> np.ndarray:
    leaves = []
    for group in range(groups):
        first, *more = rank_range(len(batches), groups, group)
        leaf = batches[first]
        for number in more:
            leaf = leaf + batches[number]
        leaves.append(leaf)
    return tree(leaves)


class Joined(SingleProcess):
    """Several in one process: what is swapped goes by queues."""

    def __init__(
        self, rank: int, size: int, lines: dict[tuple[int, int], SimpleQueue], meeting: threading.Barrier
    ) -> None:
        self.rank, self.size, self._lines, self._meeting = rank, size, lines, meeting  # type: ignore[misc]

    def barrier(self) -> None:
        self._meeting.wait()

    def all_to_all(self, out: Any, into: Any) -> None:
        for to in range(self.size):
            for array in out[to] if to != self.rank else ():
                self._lines[self.rank, to].put(array.copy())
        for source in range(self.size):
            for array in into[source] if source != self.rank else ():
                array[...] = self._lines[source, self.rank].get(timeout=10)


def together(ranks: int, act: Callable[[Joined], None]) -> None:
    lines = {(one, other): SimpleQueue[Any]() for one in range(ranks) for other in range(ranks)}
    meeting, failed = threading.Barrier(ranks, timeout=10), list[BaseException]()

    def run(rank: int) -> None:
        try:
            act(Joined(rank, ranks, lines, meeting))
        except BaseException as error:
            failed.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    if failed:
        raise failed[0]


def gradient(ranks: int, groups: int, batches: list[np.ndarray], half: bool = False) -> np.ndarray:
    """By ranks that each add up their own micro-batches, in two steps one after the other."""
    found = np.full(SIZE, np.nan, np.float32)

    def work(world: Joined) -> None:
        division = divisions(ranks, groups)[world.rank]
        own = rank_range(groups, ranks, world.rank)
        turns = plan_accumulation(own, groups, len(batches))
        vectors = [np.zeros(SIZE, np.float32) for _ in range(turns.vector_count)]
        exchange = TreeReduce(world, division, turns, vectors, half)
        start = rank_range(len(batches), groups, own[0])[0]
        for _ in range(2):
            for number in range(turns.count):
                last = number == turns.count - 1
                if last:
                    exchange.start()
                mine = batches[start + number]
                vectors[0][:] = mine if turns.starts_sum(number) else vectors[0] + mine
                if last:
                    exchange.mark_final(0)
                    exchange.finish()
                if last or not (turn := turns.ending_group(number)):
                    continue
                for to, what in turn.additions:
                    vectors[to] += vectors[what]
                if turn.move_to:
                    vectors[turn.move_to][:] = vectors[0]
        for bucket in range(len(division.buckets)):
            for run in division.bucket_ranges(bucket, world.rank):
                found[run] = vectors[0][run]

    together(ranks, work)
    return found


@pytest.mark.parametrize(("groups", "more"), [(1, 1), (4, 3), (8, 0), (8, 5)])
def test_a_sum_has_the_same_bits_for_any_number_of_ranks(bucket: int, groups: int, more: int) -> None:
    batches = micro_batches(groups + more)
    wanted = summed(groups, batches)
    for ranks in range(1, groups + 1):
        assert gradient(ranks, groups, batches).tobytes() == wanted.tobytes()


def test_half_of_the_wire_is_nearly_as_good(bucket: int) -> None:
    batches = [np.random.default_rng(number).standard_normal(SIZE).astype(np.float32) for number in range(4)]
    exact, found = summed(4, batches), gradient(4, 4, batches, half=True)
    assert 0 < np.abs(found - exact).max() < 0.02 * np.abs(exact).max()


def test_vectors_that_sums_take() -> None:
    """One where a rank has two groups; on one rank as many as the tree of pairs is high."""
    assert (
        plan_accumulation(range(2), 8, 8).vector_count
        == plan_accumulation(range(6, 8), 8, 8).vector_count
        == 1
    )
    assert plan_accumulation(range(8), 8, 8).vector_count == 3
    assert (
        plan_accumulation(range(8), 8, 16).vector_count == 4
    )  # a group of two is not added to what is there


def test_branches_are_added_by_their_places() -> None:
    one, other, third = (np.array([value], np.float32) for value in (1e8, 1.0, -1e8))
    (found,) = add_nodes(
        [(TreeNode(0, 1), [one.copy()]), (TreeNode(1, 1), [other]), (TreeNode(2, 2), [third])]
    )
    assert found == 0  # (1e8 + 1) - 1e8: the last bit is lost first


def test_a_failure_beside_the_backward_pass_comes_to_it() -> None:
    class Broken(SingleProcess):
        rank, size = 0, 2  # type: ignore[misc]

        def barrier(self) -> None:
            raise OSError("the line is dead")

    turns = plan_accumulation(rank_range(8, 2, 0), 8, 8)
    exchange = TreeReduce(
        Broken(), divisions(2)[0], turns, [np.zeros(SIZE, np.float32)] * turns.vector_count, False
    )
    exchange.start()
    with pytest.raises(OSError, match="the line is dead"):
        exchange.finish()


@pytest.mark.parametrize("command", ["from-scratch", "finetune"])
def test_a_bucket_is_final_when_that_is_said(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two calls of the backward pass: nothing is added to it any more."""
    monkeypatch.setattr(dividing, "BUCKET", 700)
    finish, seen, late = TreeReduce.finish, dict[int, list[np.ndarray]](), list[int]()

    def values(exchange: TreeReduce, bucket: int) -> list[np.ndarray]:
        return [exchange.vectors[0][run].copy() for run in exchange.partition.bucket_ranges(bucket, 0)]

    def ready(exchange: TreeReduce, bucket: int) -> None:
        if exchange._thread:
            seen[bucket] = values(exchange, bucket)

    def finished(exchange: TreeReduce) -> float:
        buckets = range(len(exchange.partition.buckets))
        late.extend(
            b
            for b in buckets
            if any((x != y).any() for x, y in zip(seen[b], values(exchange, b), strict=True))
        )
        seen.clear()
        return finish(exchange)

    monkeypatch.setattr(TreeReduce, "mark_final", ready)
    monkeypatch.setattr(TreeReduce, "finish", finished)
    text = text_file(tmp_path)
    base = [written(tmp_path / "base.gguf", small(), weights(small()))] if command == "finetune" else []
    words = (
        ("--lora-r", 16, "--ctx", 16) if base else ("--size", "tiny", "--vocab-size", "bytes", "--ctx", 16)
    )
    ran(
        command,
        *base,
        text,
        *words,
        "--iters",
        2,
        "--grad-groups",
        8,
        "--batch",
        8,
        "--out",
        tmp_path / "run",
    )
    assert not late


# ---- what has befallen one -------------------------------------------------


class Talking(Joined):
    """They tell each other, too."""

    def all_gather(self, value: Any) -> list[Any]:
        for to in range(self.size):
            self._lines[self.rank, to].put(value)
        return [self._lines[source, self.rank].get(timeout=10) for source in range(self.size)]


def judging(befalls: Exception | None) -> Iterator[BatchLoss]:
    yield BatchLoss(1.0, 2.0, 3, None, NO_UNITS)
    if befalls:
        raise befalls
    yield BatchLoss(4.0, 5.0, 6, None, NO_UNITS)


@pytest.mark.parametrize("asked", [0, 15])
def test_what_befalls_one_in_a_validation_befalls_all(asked: int) -> None:
    """Data that changed under one rank, or a signal that came to it."""
    lines = {(one, other): SimpleQueue[Any]() for one in range(3) for other in range(3)}
    ended = dict[int, tuple[int, str]]()

    def work(rank: int) -> None:
        world, seen = Talking(rank, 3, lines, threading.Barrier(1)), list[BatchLoss]()
        mine = judging(InputChanged("gone") if rank == 1 and not asked else None)
        try:
            for each in gather_batch_losses(world, mine, lambda: asked if rank == 1 and seen else 0):
                seen.append(each)
        except (InputChanged, TrainingInterrupted) as error:
            ended[rank] = len(seen), repr(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert len(ended) == 3 and len({*ended.values()}) == 1
    assert ended[0] == (3, "TrainingInterrupted(15)" if asked else "InputChanged('gone')")


# ---- vectors that nobody has whole -----------------------------------------


class Pieces(Joined):
    def broadcast(self, value: Any) -> Any:
        return value

    def send(self, array: np.ndarray, to: int) -> None:
        self._lines[self.rank, to].put(array.copy())

    def receive(self, into: np.ndarray, of: int) -> None:
        into[...] = self._lines[of, self.rank].get(timeout=10)


class Held:
    def __init__(self, parts: dict[str, np.ndarray]) -> None:
        self.parts = parts


@pytest.mark.parametrize("stop", [None, 2])
def test_a_vector_comes_in_its_own_order(bucket: int, stop: int | None) -> None:
    """And where the file takes no more of it, the rest comes all the same: the others have sent it."""
    whole, ranks = np.arange(SIZE, dtype=np.float32), 3
    lines = {(one, other): SimpleQueue[Any]() for one in range(ranks) for other in range(ranks)}
    made = divisions(ranks)
    owned = sorted(
        ((cut, rank) for rank in range(ranks) for cut in made[rank].rank_slices(rank)),
        key=lambda each: each[0].start,
    )
    vectors = []
    for rank in range(ranks):
        held = Held(
            {cut.key: whole[cut.start : cut.stop].reshape(cut.shape) for cut in made[rank].rank_slices(rank)}
        )
        world = Pieces(rank, ranks, lines, threading.Barrier(1))
        vectors.append(GatheredState(world, "m", owned, held))  # type: ignore[arg-type]
    for each in vectors[1:]:
        each.send_pieces()
    pieces = iter(vectors[0])
    found = [piece.copy() for piece, _ in zip(pieces, range(stop or len(owned)), strict=False)]
    del pieces
    assert np.array_equal(np.concatenate(found), whole[: sum(piece.size for piece in found)])
    assert stop or sum(piece.size for piece in found) == SIZE == vectors[0].shape[0]
    assert all(line.empty() for line in lines.values())


# ---- how many groups -------------------------------------------------------


def test_groups_where_none_are_asked_for() -> None:
    steps = ((8, 1), (8, 2), (32, 16), (32, 12), (6, 2), (1, 1))  # rows, ranks
    assert [default_groups(rows, ranks, several=True) for rows, ranks in steps] == [8, 8, 16, 16, 4, 1]
    assert default_groups(64, 1, several=False) == 1
