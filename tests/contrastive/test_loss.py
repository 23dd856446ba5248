"""The contrastive loss and its gradient beside finite differences, torch and sentence-transformers."""

from typing import Any

import numpy as np
import pytest

from llamatrain.contrastive.loss import build_comparison, comparison_inputs
from llamatrain.contrastive.settings import Contrastive
from llamatrain.engine.program import Program
from llamatrain.graph.tensor import F32, F64, DType
from tests.helpers.groups import torch_loss

ROWS, TEXTS, WIDTH = 6, 4, 10
PRESENT = np.ones((ROWS, TEXTS), bool)
PRESENT[1, 3] = PRESENT[2, 2:] = False
PADDED = PRESENT.copy()
PADDED[4:] = False
Found = tuple[float, int, np.ndarray, np.ndarray]


def embeddings(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, TEXTS, WIDTH))


def settings(sizes: tuple[int, ...] = (WIDTH,), temperature: float = 0.3) -> Contrastive:
    return Contrastive(pooling="last", temperature=temperature, sizes=sizes, texts=TEXTS, rows=ROWS)


def compared(
    array: np.ndarray, present: np.ndarray, chosen: Contrastive, dtype: DType = F64, threads: int = 1
) -> Found:
    """Return loss, correct queries, losses of rows and gradient."""
    graph = build_comparison(chosen, WIDTH, dtype)
    outputs = [graph.loss, graph.correct, graph.row_losses, graph.gradient]
    program = Program.build(outputs, {}, kernels="reference" if dtype is F64 else "cpu", threads=threads)
    for name, values in comparison_inputs(array.astype(dtype.numpy), present).items():
        program.write(graph.inputs[name], values)
    program()
    loss, correct, row_losses, gradient = (np.array(program.read(output)) for output in outputs)
    return float(loss), int(correct), row_losses, gradient


@pytest.mark.parametrize("present", [PRESENT, PADDED], ids=["absent texts", "padding"])
@pytest.mark.parametrize("sizes", [(WIDTH,), (WIDTH, 7, 3)], ids=["whole", "parts"])
def test_gradient_of_finite_differences(sizes: tuple[int, ...], present: np.ndarray) -> None:
    array, chosen, step = embeddings(), settings(sizes), 1e-6
    _, _, _, gradient = compared(array, present, chosen)
    random = np.random.default_rng(1)
    for _ in range(3):
        way = random.standard_normal(array.shape) * present[..., None]
        higher, lower = (compared(array + sign * step * way, present, chosen)[0] for sign in (1, -1))
        assert (gradient * way).sum() == pytest.approx((higher - lower) / (2 * step), rel=1e-6)
    assert np.abs(gradient[~present]).max() == 0


@pytest.mark.reference
@pytest.mark.parametrize("sizes", [(WIDTH,), (WIDTH, 7, 3)], ids=["whole", "parts"])
def test_beside_torch(sizes: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    array = torch.tensor(embeddings(), requires_grad=True)
    expected = torch_loss(
        [group[torch.from_numpy(there)] for group, there in zip(array, PRESENT, strict=True)], sizes, 0.3
    )
    expected.backward()
    loss, _, row_losses, gradient = compared(embeddings(), PRESENT, settings(sizes))
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert row_losses.mean() == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(gradient, array.grad.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sizes", [(WIDTH,), (WIDTH, 7, 3)], ids=["whole", "parts"])
def test_beside_sentence_transformers(sizes: tuple[int, ...]) -> None:
    """Compare with its losses, which take the embeddings of each column; theirs cannot be absent."""
    torch = pytest.importorskip("torch")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    array = torch.tensor(embeddings(3), requires_grad=True)
    ranking: Any = losses.MultipleNegativesRankingLoss(torch.nn.Identity(), scale=1 / 0.3)
    expected: Any = sum(
        ranking.compute_loss_from_embeddings([array[:, text, :size] for text in range(TEXTS)], None)
        for size in sizes
    )
    expected.backward()
    loss, _, _, gradient = compared(embeddings(3), np.ones((ROWS, TEXTS), bool), settings(sizes))
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    np.testing.assert_allclose(gradient, array.grad.numpy(), rtol=1e-7, atol=1e-10)


def test_fast_kernels_agree_and_threads_do_not_matter() -> None:
    exact = compared(embeddings(), PRESENT, settings((WIDTH, 4)))
    one, several = (compared(embeddings(), PRESENT, settings((WIDTH, 4)), F32, threads) for threads in (1, 3))
    assert one[0] == pytest.approx(exact[0], rel=1e-5) and one[1] == exact[1]
    np.testing.assert_allclose(one[3], exact[3], atol=1e-5)
    assert one[0] == several[0] and one[3].tobytes() == several[3].tobytes()


def test_what_counts_as_correct() -> None:
    """A query is right if its own positive is the most similar of all texts."""
    array = np.zeros((ROWS, TEXTS, WIDTH))
    for row in range(ROWS):
        array[row, :, row] = 1.0
        array[row, 2:, row + 1] = 1.0
    loss, correct, row_losses, _ = compared(array, PRESENT, settings())
    assert correct == ROWS and loss == pytest.approx(row_losses.mean())
    array[3, 1] = array[0, 0]
    _, correct, _, _ = compared(array, PRESENT, settings())
    assert correct == ROWS - 1


def test_low_temperature_stays_finite() -> None:
    loss, _, _, gradient = compared(embeddings(), PADDED, settings(temperature=1e-4), F32)
    assert np.isfinite(loss) and np.isfinite(gradient).all()
