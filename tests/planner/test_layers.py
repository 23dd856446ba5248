"""Plans of deep models, extrapolated from few layers."""

from pathlib import Path
from typing import Any

import pytest

from llamatrain.planner import layers, limits, speeds
from llamatrain.run import fit_memory
from tests.helpers.cli import TINY, Argument, ran, text_file
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small
from tests.helpers.timeout import in_time
from tests.planner.test_plan_command import parts, planned

LAYERS = 18


@pytest.fixture(autouse=True)
def small_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "DEPTHS", (6, 10))
    for module in (fit_memory, limits):  # other tests have left different amounts in this process
        monkeypatch.setattr(module, "resident_bytes", lambda: 10**8)


def unused(*args: Any, **named: Any) -> Any:
    raise AssertionError("not to be called")


@pytest.fixture(autouse=True)
def own_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure speeds once for both plans of a test.

    What other tests measure at the same time on a busy machine is kept for a short while, and is replaced.
    """
    monkeypatch.setattr(speeds, "default_cache_dir", lambda kind: tmp_path / "measured" / kind)
    monkeypatch.setattr(
        speeds, "wait_share", lambda work: work() or 0.0
    )  # what is measured counts as undisturbed


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--precision", "f32", "--remat", "none"),
        ("--no-flash", "--remat", "block", "--optimizer", "lbfgs"),
        ("--clip", 0, "--embd", 256, "--batch", 1, "--ctx", 8),
        ("--grad-acc", 2, "--val-split", 0.1, "--sample-every", 1),
    ],
)
def test_it_is_what_all_layers_take(
    more: tuple[Argument, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (text_file(tmp_path), *TINY, *more, "--layer", LAYERS)
    all_of_them = planned(*arguments)
    few_alone(monkeypatch)
    nearly(planned(*arguments), all_of_them)


def few_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a graph of all layers is built."""
    whole = layers.plan_memory
    monkeypatch.setattr(
        layers, "plan_memory", lambda spec, *more: whole(spec, *more) if spec.h.layers < 12 else unused()
    )
    monkeypatch.setattr(fit_memory, "MANY_LAYERS", 6)


def nearly(told: dict[str, Any], known: dict[str, Any]) -> None:
    """Equal, but for an arena that is told with some room."""
    assert 0 <= told["arena"] - known["arena"] <= 0.004 * known["total"]
    seconds = ("seconds", "seconds_of_step", "tokens_per_second")
    assert [told[name] or 0 for name in seconds] == pytest.approx(
        [known[name] or 0 for name in seconds], rel=0.01
    )
    assert told | dict.fromkeys(("arena", "total", *seconds)) == known | dict.fromkeys(
        ("arena", "total", *seconds)
    )


@pytest.mark.parametrize("how", [("--cache-base", "off"), ("--cache-base", "bf16"), ("--full",)])
def test_of_a_base_too(how: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "F32" if "--full" in how else "Q4_0"
    model = base(
        tmp_path / "base.gguf", small(embd=64, heads=4, head_size=16, ff=96, vocab=259, layers=LAYERS), kind
    )
    arguments = (model, text_file(tmp_path), "--precision", "bf16", "--ctx", 32, "--batch", 2, *how)
    all_of_them = planned(*arguments, command="finetune")
    few_alone(monkeypatch)
    nearly(planned(*arguments, command="finetune"), all_of_them)


def test_layers_that_are_not_alike_are_all_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = base(
        tmp_path / "base.gguf", small(embd=64, heads=4, head_size=16, ff=96, vocab=259, layers=LAYERS)
    )
    arguments = (model, text_file(tmp_path), "--ctx", 32, "--batch", 2, "--target", "blk.3.attn_q")
    all_of_them = planned(*arguments, command="finetune")
    monkeypatch.setattr(fit_memory, "MANY_LAYERS", 6)
    assert planned(*arguments, command="finetune") == all_of_them


def test_thousands_of_layers_are_planned_soon(tmp_path: Path) -> None:
    shallow, arguments = (
        planned(text_file(tmp_path), *TINY, "--layer", 128),
        (tmp_path / "text.txt", *TINY, "--layer", 4096),
    )
    with in_time(10):  # it was a minute
        plan = planned(*arguments)
    assert parts(plan)["arena"] > 25 * parts(shallow)["arena"] and plan["remat"] == shallow["remat"]


def test_a_run_is_planned_whole_and_keeps_to_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it takes the recomputation that its plan told of."""
    monkeypatch.setattr(fit_memory, "MANY_LAYERS", 6)
    arguments = (text_file(tmp_path), *TINY, "--layer", LAYERS, "--embd", 64, "--ctx", 1024, "--batch", 1)
    light, most = planned(*arguments), planned(*arguments, "--remat", "block")
    assert light["remat"] == "light" and most["total"] < 0.95 * light["total"]
    limit = ("--memory", f"{(most['total'] + light['total']) // 2 // 10**6}MB")
    plan = planned(*arguments, *limit)
    assert plan["remat"] == "block"
    done = ran("from-scratch", *arguments, *limit, "--iters", 1, "--out", tmp_path / "run")
    assert "recomputing block" in " ".join((done.out + done.err).split())
