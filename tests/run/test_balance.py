"""Runs that balance experts: the loss that is shown, and who cannot."""

from pathlib import Path

import pytest

from tests.helpers import architecture_runs as runs
from tests.helpers.architecture_models import shape_of
from tests.helpers.cli import TINY, losses, metrics, ran, run, text_file

MIXTURE = ("--arch", "qwen3moe", "--experts", 4, "--experts-used", 2)


def test_the_training_loss_has_the_balance_loss_and_validation_has_not(tmp_path: Path) -> None:
    data = text_file(tmp_path)
    how = (*TINY, *MIXTURE, "--ctx", 16, "--batch", 4, "--seed", 1, "--val-split", 0.2, "--eval-every", 1)
    found = {}
    for balance in (0, 2):
        out = tmp_path / f"{balance}"
        ran("from-scratch", data, *how, "--iters", 1, "--lr", 0, "--balance", balance, "--out", out)
        (validation,) = [line["val_loss"] for line in metrics(out) if "val_loss" in line]
        found[balance] = losses(out)[0], validation
    assert 1.9 < found[2][0] - found[0][0] < 2.6  # new routers choose almost evenly
    assert found[0][1] == found[2][1]


def test_an_adapter_of_routers_is_balanced(tmp_path: Path) -> None:
    shape = shape_of("qwen3moe", "a")
    given = (runs.base(tmp_path, shape), runs.data(tmp_path), *runs.PLAIN, "--iters", 1)
    for balance in (0, 2):
        more = ("--target", "router", "--balance", balance, "--out", tmp_path / f"{balance}")
        ran("finetune", *given, *more)
    assert losses(tmp_path / "2")[0] > losses(tmp_path / "0")[0] + 1


@pytest.mark.parametrize(
    ("arch", "options", "problem"),
    [
        ("llama", ("--full",), "--balance has no effect on a model without experts; leave it out"),
        ("llama", (), "--balance has no effect on a model without experts; leave it out"),
        (
            "qwen3moe",
            (),
            "--balance trains routers, which this adapter leaves as they are; add --target router",
        ),
        ("qwen3moe", ("--balance", -1), "--balance must be 0 or more, such as 0.01 (got -1)"),
    ],
)
def test_models_that_cannot_be_balanced(
    arch: str, options: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    base, data = runs.base(tmp_path, shape_of(arch, "a")), runs.data(tmp_path)
    done = run("finetune", base, data, "--balance", 0.1, *options, "--out", tmp_path / "run")
    assert done.code == 2 and problem in done.errors[-1]
    assert not (tmp_path / "run").exists()
