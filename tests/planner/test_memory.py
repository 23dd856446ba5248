"""What a run that does not fit is advised to change."""

from types import SimpleNamespace
from typing import Any

import pytest

from llamatrain.optim.registry import get_optimizer
from llamatrain.planner.memory import list_savings

SMALLER = "a smaller --batch, --ctx or model"


@pytest.mark.parametrize(
    ("spec", "copies", "advice"),
    [
        ({"precision": "f32"}, 0, ["--precision bf16", SMALLER]),
        ({"precision": "bf16"}, 0, [SMALLER]),
        ({"precision": "f32", "optimizer": "lbfgs"}, 0, [SMALLER]),
        ({"precision": "bf16"}, 1, ["--cache-base off", SMALLER]),
        ({"precision": "bf16", "drop_base": True}, 1, [SMALLER]),
        (
            {"precision": "f32", "drop_base": True, "int8_copies": True},
            1,
            ["--cache-base off", "--precision bf16", SMALLER],
        ),
    ],
)
def test_what_takes_less_memory(spec: dict[str, Any], copies: int, advice: list[str]) -> None:
    spec = {"optimizer": "adamw", "int8_copies": False, "drop_base": False} | spec
    spec["optimizer"] = get_optimizer(spec["optimizer"])
    plan: Any = SimpleNamespace(spec=SimpleNamespace(**spec), breakdown=SimpleNamespace(packed_copies=copies))
    assert list(list_savings(plan)) == advice


def test_a_run_without_training_has_no_precision_to_change() -> None:
    spec = SimpleNamespace(optimizer=None, precision="f32", int8_copies=False, drop_base=False)
    plan: Any = SimpleNamespace(spec=spec, breakdown=SimpleNamespace(packed_copies=0))
    assert list(list_savings(plan)) == [SMALLER]
