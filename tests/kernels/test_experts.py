"""The routing of mixtures of experts, by definition and by each device: ties, NaN, groups, and the order of choices."""

from importlib.util import find_spec

import numpy as np
import pytest

from llamatrain.engine.device import create_device
from llamatrain.engine.program import Program
from llamatrain.graph import ops
from llamatrain.graph.tensor import I32, Tensor, placeholder

DEVICES = [
    "reference",
    "cpu",
    pytest.param(
        "torch-cpu", marks=pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
    ),
]


def run(outputs: list[Tensor], arrays: dict[Tensor, np.ndarray], kernels: str) -> list[np.ndarray]:
    device = create_device(kernels)
    memory = {leaf: device.upload(array.copy()) for leaf, array in arrays.items()}
    program = Program.build(outputs, memory, kernels=kernels)
    program()
    return [program.read(output).copy() for output in outputs]


def best(scores: np.ndarray, kernels: str, **how: int) -> list[list[int]]:
    x = placeholder("scores", scores.shape)
    return run([ops.top_k(x, **how)], {x: scores.astype(np.float32)}, kernels)[0].tolist()


@pytest.mark.parametrize("kernels", DEVICES)
def test_of_equal_scores_the_first_is_chosen(kernels: str) -> None:
    scores = np.array([[1, 3, 3, 0, 3], [0, 0, 0, 0, 0], [-np.inf, 2, -np.inf, 2, 5]])
    assert best(scores, kernels, k=3) == [[1, 2, 4], [0, 1, 2], [4, 1, 3]]


@pytest.mark.parametrize("kernels", DEVICES)
def test_nan_is_chosen_last(kernels: str) -> None:
    scores = np.array([[np.nan, 1, np.nan, -5], [np.nan] * 4])
    assert best(scores, kernels, k=3) == [[1, 3, 0], [0, 1, 2]]


@pytest.mark.parametrize("kernels", DEVICES)
def test_groups_are_chosen_by_their_two_largest_scores(kernels: str) -> None:
    scores = np.array([[9, 0, 0, 5, 5, 0, 6, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
    assert best(scores, kernels, k=4, groups=3, groups_used=2) == [[0, 3, 4, 1], [0, 1, 2, 3]]
    assert best(scores, kernels, k=2, groups=3, groups_used=1) == [[3, 4], [0, 1]]


@pytest.mark.parametrize("kernels", DEVICES)
def test_random_scores(kernels: str) -> None:
    scores = np.random.default_rng(0).standard_normal((50, 64)).round(1)
    wanted = [sorted(range(64), key=lambda column: (-row[column], column))[:8] for row in scores]
    assert best(scores, kernels, k=8) == wanted


@pytest.mark.parametrize("kernels", DEVICES)
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_choices_are_sorted_by_expert_and_stay_in_order(kernels: str, rows: int) -> None:
    ids = placeholder("ids", (rows, 3), I32)
    array = np.random.default_rng(rows).integers(0, 9, (rows, 3)).astype(np.int32)
    array[array == 4] = 5  # nobody chooses expert 4
    order, expert, ends = run([*ops.sort_choices(ids, experts=9)], {ids: array}, kernels)
    flat = array.ravel().tolist()
    assert order.ravel().tolist() == sorted(range(3 * rows), key=lambda choice: (flat[choice], choice))
    assert expert.ravel().tolist() == sorted(flat)
    assert ends.tolist() == [sum(each <= expert for each in flat) for expert in range(9)]
