"""Dropout: the share that is left out, what becomes of the rest, whose masks differ, and where they must not."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.engine.program import Program
from llamatrain.graph import ops
from llamatrain.graph.autodiff import gradients
from llamatrain.graph.tensor import I32, collect_nodes, parameter, placeholder
from llamatrain.train import programs
from tests.helpers.cli import Argument, losses, pairs_file, ran, same_bits, text_file
from tests.helpers.lora_runs import LINEAR, base, random_adapter
from tests.helpers.small_models import small

Key = tuple[int, int]
RATES = (0.01, 0.1, 0.3, 0.5, 0.75, 0.9)
KEYS = ((0, 0), (0, 1), (1, 0), (1, 1), (7, 3), (7, 4), (-1, 3), (7, 1 << 30))


def dropped(
    x: np.ndarray,
    rate: float,
    key: Key = (7, 3),
    salt: int = 0,
    kernels: str = "reference",
    threads: int = 1,
    length: int = 64,
    tokens: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """What it makes of x, and of x as a gradient."""
    at, told, dy = parameter("x", x.shape), placeholder("key", (2,), I32), placeholder("dy", x.shape)
    numbers = (
        {placeholder("tokens", tokens.shape, I32): tokens.astype(np.int32)} if tokens is not None else {}
    )
    y = ops.dropout(at, told, *numbers, rate=rate, salt=salt, length=length)
    (dx,) = gradients(ops.sum(ops.mul(y, dy)), [at])
    arrays = {at: x, told: np.array(key, np.int32), dy: x, **numbers}
    program = Program.build([y, dx], arrays, kernels=kernels, threads=threads)
    program()
    return program.read(y).copy(), program.read(dx).copy()


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def kept_of(rate: float, key: Key = (7, 3), salt: int = 0) -> np.ndarray:
    return dropped(np.ones((512, 256), np.float32), rate, key, salt)[0] != 0


def expect(count: np.ndarray | int, of: int, chance: float) -> None:
    """So many of them are within five deviations of what chance makes."""
    assert np.abs(np.asarray(count) - of * chance).max() <= 5 * np.sqrt(of * chance * (1 - chance)) + 1


def independent(one: np.ndarray, other: np.ndarray, rate: float) -> None:
    expect(int((one == other).sum()), one.size, rate**2 + (1 - rate) ** 2)


# ---- the op ----------------------------------------------------------------


@pytest.mark.parametrize("rate", RATES)
def test_a_share_is_left_out_anywhere(rate: float) -> None:
    kept = kept_of(rate)
    expect(int(kept.sum()), kept.size, 1 - rate)
    for axis in (0, 1):
        expect(kept.sum(axis=axis), kept.shape[axis], 1 - rate)
    independent(kept[1:], kept[:-1], rate)
    independent(kept[:, 1:], kept[:, :-1], rate)


def test_none_is_left_out_at_no_rate() -> None:
    x = normal(33, 7)
    for found in dropped(x, 0.0):
        np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("rate", RATES)
def test_the_rest_is_as_much_larger(rate: float) -> None:
    x = normal(300, 257)
    found, _ = dropped(x, rate)
    np.testing.assert_array_equal(found[found != 0], (x * np.float32(1 / (1 - rate)))[found != 0])
    ones, _ = dropped(np.ones_like(x), rate)
    assert abs(ones.mean() - 1) <= 5 * np.sqrt(rate / (1 - rate) / x.size)


@pytest.mark.parametrize("rate", (0.1, 0.5))
def test_masks_of_other_keys_and_salts_are_other_masks(rate: float) -> None:
    masks = [kept_of(rate, key) for key in KEYS] + [kept_of(rate, salt=salt) for salt in (1, 2, 3, 1000)]
    for one, other in combinations(masks, 2):
        independent(one, other, rate)
    assert np.array_equal(kept_of(rate, salt=2), kept_of(rate, salt=2))


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("rate", RATES)
def test_a_gradient_goes_where_the_elements_went(rate: float, kernels: str) -> None:
    x = normal(130, 65)
    found, dx = dropped(x, rate, kernels=kernels)
    assert np.array_equal(dx != 0, found != 0) and (found == 0).any() and (found != 0).any()
    np.testing.assert_array_equal(dx, np.where(found == 0, 0, x * np.float32(1 / (1 - rate))))


@pytest.mark.parametrize("rate", (0.0, *RATES))
def test_the_compiled_one_is_the_plain_one(rate: float) -> None:
    for shape in ((1,), (7,), (3, 33), (2, 5, 64), (1001, 300)):
        for number, key in enumerate(KEYS):
            wanted = dropped(normal(*shape), rate, key, number)
            for threads in (1, 2):
                found = dropped(normal(*shape), rate, key, number, "cpu", threads)
                assert [each.tobytes() for each in found] == [each.tobytes() for each in wanted]


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_a_mask_follows_from_rows_and_not_from_batches(kernels: str) -> None:
    """Four rows of 30 tokens at once, one by one, in longer rows, and of each row some tokens alone."""
    x = normal(120, 33)
    whole, _ = dropped(x, 0.3, (7, 8), kernels=kernels, length=30)
    for row in range(4):
        mine = np.s_[30 * row : 30 * row + 30]
        found, _ = dropped(x[mine], 0.3, (7, 8 + row), kernels=kernels, length=30)
        np.testing.assert_array_equal(found, whole[mine])
        longer, _ = dropped(np.concatenate([x[mine], x[:10]]), 0.3, (7, 8 + row), kernels=kernels, length=40)
        np.testing.assert_array_equal(longer[:30], whole[mine])
    some = np.array([0, 1, 29, 30, 64, 65, 119])
    for threads in (1, 2):
        for found in dropped(x[some], 0.3, (7, 8), kernels=kernels, threads=threads, length=30, tokens=some):
            np.testing.assert_array_equal(found, whole[some])


# ---- whole runs ------------------------------------------------------------


RATE, H = 0.3, small()
Masks = dict[int, np.ndarray]  # by salts: each adapter has one
WAYS: dict[str, tuple[Argument, ...]] = {
    "in the arena": (),
    "streamed": ("--clip", 0),
    "added up": ("--grad-acc", 2),
    "recomputed": ("--grad-acc", 2, "--remat", "block"),
}


class Watched(programs.BoundGraph):
    """A program of a run: before each time, the plain kernels do the same with what it was fed, and their masks are kept."""

    passes: list[Masks]
    pairs: list[tuple[float, float]]  # the losses, of the run and by the plain kernels

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.dropouts = [node for node in collect_nodes(self.graph.outputs) if node.op.name == "dropout"]
        if self.dropouts:
            outputs = [
                self.graph.first,
                *(each for node in self.dropouts for each in (node.sources[0], node.outputs[0])),
            ]
            arrays = {leaf: self.program.get_view(leaf) for leaf in programs.collect_leaves(outputs)}
            self.plain = Program.build(outputs, arrays, kernels="reference")

    def run(self) -> float:
        if not self.dropouts:
            return super().run()
        self.plain()
        masks: Masks = {}
        for node in self.dropouts:  # forward, made again, and of gradients: one mask
            x, y = self.plain.read(node.sources[0]), self.plain.read(node.outputs[0])
            mask = masks.setdefault(node.attrs["salt"], y != 0)
            np.testing.assert_array_equal(y, np.where(mask, x * np.float32(1 / (1 - RATE)), 0))
        self.passes.append(masks)
        expected = float(self.plain.read(self.graph.first))
        loss = super().run()
        self.pairs.append((loss, expected))
        return loss


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    base(tmp_path / "base.gguf", H)
    names = [name for name in H.shapes if name.removesuffix(".weight").rpartition(".")[2] in LINEAR]
    random_adapter(tmp_path / "start.gguf", H, names)  # B is not 0: what A sees counts from the first step on
    return tmp_path


def finetuned(out: str, *more: Argument, seed: int = 3) -> Path:
    given = (
        "--lora-init",
        "start.gguf",
        "--lora-dropout",
        RATE,
        "--ctx",
        32,
        "--batch",
        2,
        "--precision",
        "f32",
    )
    ran("finetune", "base.gguf", "text.txt", *given, "--seed", seed, "--iters", 2, *more, "--out", out)
    return Path(out)


def watched(monkeypatch: pytest.MonkeyPatch, *more: Argument, seed: int = 3) -> list[Masks]:
    """The masks of each pass of a run of two steps."""
    monkeypatch.setattr(Watched, "passes", [], raising=False)
    monkeypatch.setattr(Watched, "pairs", [], raising=False)
    monkeypatch.setattr(programs, "BoundGraph", Watched)
    finetuned(f"run-{seed}", *more, seed=seed)
    for loss, expected in Watched.pairs:
        assert loss == pytest.approx(expected, rel=1e-5)
    return Watched.passes


@pytest.mark.parametrize("way", WAYS)
def test_no_two_masks_of_a_run_are_the_same(way: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values are made of one input, yet each adapter has a mask of its own: in each step and micro-batch."""
    passes = watched(monkeypatch, *WAYS[way])
    assert len(passes) == (4 if "--grad-acc" in WAYS[way] else 2)
    assert all(len(masks) == len(LINEAR) * H.layers for masks in passes)
    other = watched(monkeypatch, *WAYS[way], seed=4)
    masks = [mask for each in passes + other for mask in each.values()]
    for mask in masks:
        expect(int(mask.sum()), mask.size, 1 - RATE)
    for one, another in combinations(masks, 2):
        if one.shape == another.shape:
            independent(one, another, RATE)


def test_lbfgs_descends_on_one_function(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line searches compare losses: the masks of a micro-batch stay."""
    passes = watched(monkeypatch, "--optimizer", "lbfgs", "--grad-acc", 2)
    assert len(passes) >= 6
    for number, masks in enumerate(passes):
        for salt, mask in masks.items():
            assert np.array_equal(mask, passes[number % 2][salt])
    for salt, mask in passes[0].items():
        independent(mask, passes[1][salt], RATE)


@pytest.mark.parametrize("more", [(), ("--clip", 0), ("--grad-acc", 2)])
def test_however_recomputed_the_same_bits(more: tuple[Argument, ...], place: Path) -> None:
    kept, *others = (
        finetuned(f"run-{remat}", *more, "--remat", remat) for remat in ("none", "light", "block")
    )
    for other in others:
        assert losses(other) == losses(kept)
        same_bits(other / "adapter.gguf", kept / "adapter.gguf")


DIVIDED: dict[str, tuple[Argument, ...]] = {
    "groups": ("--batch", 4, "--shards", 4),
    "batches": ("--batch", 2, "--grad-acc", 2),
    "one by one": ("--batch", 1, "--grad-acc", 4),
    "streamed": ("--batch", 4, "--clip", 0),
}


@pytest.mark.parametrize("data", ["text.txt", "pairs.jsonl"])
@pytest.mark.parametrize("way", DIVIDED)
def test_a_step_is_the_same_however_it_is_divided(way: str, data: str, place: Path) -> None:
    """Into groups for ranks, or batches; where few tokens are trained, too, whose rows are then of other lengths."""
    pairs_file(place)
    given = (
        "--lora-init",
        "start.gguf",
        "--lora-dropout",
        RATE,
        "--ctx",
        40,
        "--precision",
        "f32",
        "--iters",
        2,
    )
    found = list[list[float]]()
    for name, more in (("whole", ("--batch", 4)), ("divided", DIVIDED[way])):
        ran(
            "finetune",
            "base.gguf",
            data,
            *given,
            *(() if data == "text.txt" else ("--no-pack",)),
            *more,
            "--out",
            name,
        )
        found.append(losses(Path(name)))
    if way == "streamed":  # which clips nothing
        found = [each[:1] for each in found]
    assert found[0] == pytest.approx(found[1], rel=2e-6)
