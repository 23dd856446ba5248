"""The loss that balances experts, in the gradients of all weights, beside transformers' function for one block."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import architecture_runs as runs
from tests.helpers import architecture_torch as theirs
from tests.helpers.architecture_models import shape_of, weights
from tests.model.test_architecture_truth import BATCH

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]

BALANCE = 0.7


def balance_of_blocks(made: Any, experts: int, used: int) -> Any:
    """The mean over blocks for all trained tokens, in shares of all choices (transformers: of a token's)."""
    torch = pytest.importorskip("torch")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    tokens = torch.tensor([row["tokens"] for row in BATCH], dtype=torch.int64)
    trained = torch.tensor([row["weights"] for row in BATCH])
    assert set(trained.flatten().tolist()) == {0.0, 1.0}
    scores = made(tokens, use_cache=False, output_router_logits=True).router_logits
    terms = [load_balancing_loss_func((each,), experts, used, trained) for each in scores]
    return sum(terms) / len(terms) / used


@pytest.mark.parametrize("arch", ["qwen3moe", "olmoe"])
def test_gradients_with_balance(arch: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shape = shape_of(arch, "a")
    made = theirs.model(shape, weights(shape, last=1.0))
    found = runs.full_gradients(tmp_path, shape, "--balance", BALANCE)
    (BALANCE * balance_of_blocks(made, shape.experts, shape.experts_used)).backward()
    balanced = theirs.gradients(made, shape, BATCH)  # adds those of the data
    plain = theirs.gradients(theirs.model(shape, weights(shape, last=1.0)), shape, BATCH)
    assert np.linalg.norm(plain["blk.0.ffn_gate_inp.weight"] - balanced["blk.0.ffn_gate_inp.weight"]) > 1e-3
    for name, expected in balanced.items():
        assert np.linalg.norm(found[name] - expected) <= 1e-5 * np.linalg.norm(expected), name
