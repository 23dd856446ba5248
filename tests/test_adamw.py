"""The host's part of AdamW."""

import numpy as np

from llamatrain.optim.methods.adamw import decay_of, schedule_input


def test_schedule_input() -> None:
    found = schedule_input(3, 0.01, 0.9, 0.999)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [0.01, 1 - 0.9**3, 1 - 0.999**3], rtol=1e-6)


def test_tensors_of_few_dimensions_do_not_decay() -> None:
    assert decay_of((4, 3), 0.1) == 0.1
    assert decay_of((4,), 0.1) == 0.0
    assert decay_of((4,), 0.1, decay_min_ndim=1) == 0.1
