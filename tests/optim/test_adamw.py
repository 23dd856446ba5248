"""The host's part of AdamW."""

import numpy as np

from llamatrain.graph.tensor import parameter
from llamatrain.optim.methods.adamw import AdamW


def test_schedule() -> None:
    found = AdamW(beta1=0.9, beta2=0.999).schedule(3, 0.01)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [0.01, 1 - 0.9**3, 1 - 0.999**3], rtol=1e-6)


def test_tensors_of_few_dimensions_do_not_decay() -> None:
    matrix, gains = parameter("matrix", (4, 3)), parameter("gains", (4,))
    assert AdamW(weight_decay=0.1).decay_for(matrix) == 0.1
    assert AdamW(weight_decay=0.1).decay_for(gains) == 0.0
    assert AdamW(weight_decay=0.1, decay_min_ndim=1).decay_for(gains) == 0.1
