"""The engine knows no llama: two dense layers learn digits, the optimizer's step in their graph."""

import numpy as np
import pytest

from scripts.digits import BATCH, OPTIMIZER, Classifier, draw_digits


def test_it_learns() -> None:
    random, classifier = np.random.default_rng(1), Classifier()
    unseen = draw_digits(16 * BATCH, random)
    assert classifier.measure_accuracy(*unseen) < 0.3
    losses = [classifier.learn(*draw_digits(BATCH, random)) for _ in range(400)]
    assert losses[0] > 2 and np.mean(losses[-20:]) < 0.3
    assert classifier.measure_accuracy(*unseen) > 0.95


def test_its_step_is_in_the_graph() -> None:
    """By the formulas of Adam (Kingma and Ba 2015): a first step goes as far as the rate, against each gradient."""
    random, classifier = np.random.default_rng(1), Classifier()
    before = {weight.name: array.copy() for weight, array in classifier.memory.items()}
    images, digits = draw_digits(BATCH, random)
    hidden = np.maximum(images @ before["in.weight"].T + before["in.bias"], 0)
    scores = hidden @ before["out.weight"].T + before["out.bias"]
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    loss = -np.mean(np.log(shares[np.arange(BATCH), digits]))
    shares[np.arange(BATCH), digits] -= 1
    wanted = shares.sum(0) / BATCH  # of the last bias
    assert classifier.learn(images, digits) == pytest.approx(loss, rel=1e-5)
    (bias,) = (array for weight, array in classifier.memory.items() if weight.name == "out.bias")
    rate = float(OPTIMIZER.schedule(1, 3e-3)[0])
    np.testing.assert_allclose(bias, -rate * wanted / (np.abs(wanted) + OPTIMIZER.eps), rtol=1e-4)
