"""Callbacks, learning rates and rows that a Python program supplies."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamatrain
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.data.supplied_rows import SuppliedRows
from llamatrain.distributed.launcher import LaunchInfo
from llamatrain.errors import DataError, LlamatrainError
from tests.helpers.cli import metrics, run, same_bits, text_file
from tests.helpers.errors import raises

SMALL: dict[str, Any] = {
    "embd": 32,
    "head": 4,
    "layer": 1,
    "ctx": 16,
    "vocab_size": 40,
    "batch": 2,
    "iters": 6,
    "save_every": 0,
}


def row(number: int) -> list[int]:
    """A row of 5 to 17 ids."""
    return [(7 * number + place) % 40 for place in range(5 + number % 13)]


def rate(step: int) -> float:
    return 1e-3 * step


def train(out: Path, **more: Any) -> llamatrain.Run:
    return llamatrain.from_scratch(**{"rows": row, "out": out, **SMALL, **more})


# ---- on_step ---------------------------------------------------------------


def test_a_callback_sees_the_metrics_of_each_step(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    data = text_file(tmp_path)
    llamatrain.from_scratch(
        data,
        **{**SMALL, "vocab_size": "bytes"},
        val_split=0.2,
        eval_every=2,
        out=tmp_path / "run",
        on_step=seen.append,
    )
    assert seen == [line for line in metrics(tmp_path / "run") if "val_loss" not in line]
    assert [line["step"] for line in seen] == [1, 2, 3, 4, 5, 6] and seen[0]["loss"] > 0


def test_a_callback_stops_a_run_that_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    stopped = train(tmp_path / "stopped", lr_schedule=rate, on_step=lambda line: line["step"] == 3)
    assert not stopped.finished and stopped.steps == 3 and "callback" in stopped.reason
    assert RunFolder.read_newest(stopped.folder)[0].state.counters.step == 3
    resumed = llamatrain.from_scratch(resume=stopped.folder, rows=row, lr_schedule=rate)
    whole = train(tmp_path / "whole", lr_schedule=rate)
    assert resumed.finished and resumed.losses == whole.losses
    same_bits(resumed.result, whole.result)


def test_a_callback_that_stops_the_last_step_changes_nothing(tmp_path: Path) -> None:
    assert train(tmp_path / "run", on_step=lambda line: line["step"] == 6).finished


def test_an_error_of_a_callback_ends_the_run_behind_its_checkpoint(tmp_path: Path) -> None:
    def fail(line: dict[str, Any]) -> None:
        if line["step"] == 5:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train(tmp_path / "run", on_step=fail, save_every=2)
    assert RunFolder.read_newest(tmp_path / "run")[0].state.counters.step == 4
    resumed = llamatrain.from_scratch(resume=tmp_path / "run", rows=row)
    assert resumed.losses == train(tmp_path / "whole").losses


# ---- lr_schedule -----------------------------------------------------------


def test_the_rate_is_the_functions(tmp_path: Path) -> None:
    rates: list[float] = []
    done = train(tmp_path / "run", lr_schedule=rate, on_step=lambda line: rates.append(line["lr"]))
    assert any("lr_schedule=" in note for note in done.notes)
    assert rates == [rate(step) for step in range(1, 7)]


def test_a_constant_function_is_the_constant_schedule(tmp_path: Path) -> None:
    own = train(tmp_path / "own", lr_schedule=lambda step: np.float64(2e-3))
    option = train(tmp_path / "option", lr=2e-3, schedule="constant", warmup=0)
    same_bits(own.result, option.result)


@pytest.mark.parametrize("value", [-1e-3, math.nan, math.inf, "high", None])
def test_a_rate_that_is_none_ends_the_run(tmp_path: Path, value: Any) -> None:
    with raises("invalid-rate", match="step 2"):
        train(tmp_path / "run", lr_schedule=lambda step: value if step == 2 else 1e-3)


# ---- rows ------------------------------------------------------------------


def test_a_function_a_list_and_an_iterator_are_the_same_rows(tmp_path: Path) -> None:
    sources = {
        "function": row,
        "list": [row(number) for number in range(40)],
        "iterator": map(row, itertools.count()),
        "arrays": (np.array(row(number), np.uint16) for number in range(40)),
    }
    results = [train(tmp_path / name, rows=rows).result for name, rows in sources.items()]
    for result in results[1:]:
        same_bits(result, results[0])


def test_each_row_is_read_in_its_place() -> None:
    rows = SuppliedRows([[1, 2, 3], [4, 5], [6, 7, 8, 9]], 10, 3, seed=0)
    batch = rows.batch(2)
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 0], [4, 0, 0]])
    np.testing.assert_array_equal(batch.targets, [[2, 3, 0], [5, 0, 0]])
    np.testing.assert_array_equal(batch.weights, [[1, 1, 0], [1, 0, 0]])
    rows.skip(1)
    assert rows.state.position == 3
    np.testing.assert_array_equal(rows.batch(1).tokens, [[1, 2, 0]])  # the list is repeated
    other = SuppliedRows(iter([[1, 2], [3, 4], [5, 6]]), 10, 3, seed=0)
    assert other.restore(rows.state._replace(position=2)) and other.batch(1).tokens[0, 0] == 5
    assert not other.restore(rows.state._replace(fingerprint="of a file"))


def test_rows_finetune_a_model_and_its_adapter_is_resumed(tmp_path: Path) -> None:
    base = train(tmp_path / "base").result
    few = {"ctx": 16, "batch": 2, "lora_r": 2, "save_every": 0}
    stopped = llamatrain.finetune(
        base, rows=row, iters=6, out=tmp_path / "stopped", on_step=lambda line: line["step"] == 2, **few
    )
    assert not stopped.finished
    resumed = llamatrain.finetune(resume=stopped.folder, rows=row)
    whole = llamatrain.finetune(base, rows=row, iters=6, out=tmp_path / "whole", **few)
    assert resumed.steps == 6 and resumed.losses == whole.losses
    same_bits(resumed.result, whole.result)


def test_rows_of_a_model_with_text_are_resumed(tmp_path: Path) -> None:
    stopped = train(tmp_path / "run", vocab_size="bytes", on_step=lambda line: line["step"] == 2)
    resumed = llamatrain.from_scratch(resume=stopped.folder, rows=row)
    assert resumed.finished and llamatrain.load(resumed.result).generate("a", n=2, seed=1) is not None


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ([1], "2 to 17"),
        ([1] * 18, "2 to 17"),
        ([], "token ids"),
        ([1, 40], "1 to 40"),
        ([-1, 3], "-1 to 3"),
        ([1, 2.0], "token ids"),
        ([True, False], "token ids"),
        ([[1, 2], [3, 4]], "token ids"),
        ([1, [2]], "token ids"),
        ([1, 10**30], "token ids"),
        ("ab", "token ids"),
        (7, "token ids"),
        (None, "token ids"),
        ({"text": "a"}, "token ids"),
    ],
)
def test_a_row_that_is_none_ends_the_run(tmp_path: Path, bad: Any, told: str) -> None:
    with raises("invalid-row", DataError, match=told) as error:
        train(tmp_path / "run", rows=lambda number: bad if number == 5 else row(number))
    assert "row 5" in str(error.value) and "\n" not in str(error.value)


def test_rows_that_end_and_rows_that_fail(tmp_path: Path) -> None:
    with raises("rows-ended", DataError, match="only 7"):
        train(tmp_path / "ended", rows=iter([row(1)] * 7))

    def failing() -> Iterator[list[int]]:
        yield from map(row, range(5))
        raise RuntimeError("of the generator")

    with pytest.raises(RuntimeError, match="of the generator"):
        train(tmp_path / "failed", rows=failing())


# ---- what is refused -------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "callback": ({"on_step": 3}, "invalid-on_step"),
    "schedule": ({"lr_schedule": 1e-3}, "invalid-lr_schedule"),
    "rows of nothing": ({"rows": []}, "invalid-rows"),
    "a number as rows": ({"rows": 3}, "invalid-rows"),
    "a text as rows": ({"rows": "abc"}, "invalid-rows"),
    "a table as rows": ({"rows": {"text": "a"}}, "invalid-rows"),
    "rate": ({"lr_schedule": rate, "lr": 1e-3}, "invalid-option"),
    "warm-up": ({"lr_schedule": rate, "warmup": 2}, "invalid-option"),
    "kind of schedule": ({"lr_schedule": rate, "schedule": "linear"}, "invalid-option"),
    "L-BFGS": ({"lr_schedule": rate, "optimizer": "lbfgs"}, "unused-option"),
    "epochs": ({"epochs": 2, "iters": None}, "invalid-option"),
    "validation": ({"val_split": 0.1}, "invalid-option"),
    "loss of the wave": ({"loss": "squared-error"}, "sine-only"),
    "one token": ({"vocab_size": 1}, "invalid-option"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_before_the_run(tmp_path: Path, name: str) -> None:
    more, code = REFUSED[name]
    with raises(code):
        train(tmp_path / "run", **more)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_rows_and_data_are_refused_together(tmp_path: Path) -> None:
    data = text_file(tmp_path)
    with raises("two-data"):
        llamatrain.from_scratch(data, rows=row, **SMALL)
    with raises("no-model"):
        llamatrain.finetune(rows=row)


def test_a_resumed_run_needs_what_it_began_with(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", lr_schedule=rate, on_step=lambda line: line["step"] == 2).folder
    for hooks in ({}, {"rows": row}, {"lr_schedule": rate}):
        with raises("missing-hook", match=r"checkpoint-2\.gguf"):
            llamatrain.from_scratch(resume=folder, **hooks)
    done = run("from-scratch", "--resume", folder)
    assert done.code == 2 and "missing-hook" in done.err and "lr_schedule=" in done.err
    other = train(tmp_path / "other", on_step=lambda line: line["step"] == 2).folder
    with raises("fixed-option", match="lr_schedule="):
        llamatrain.from_scratch(resume=other, rows=row, lr_schedule=rate)


@pytest.mark.parametrize("hook", [{"on_step": print}, {"lr_schedule": rate}, {"rows": row}])
def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch, hook: dict[str, Any]) -> None:
    monkeypatch.setattr(
        "llamatrain.distributed.launcher.get_launch_info", lambda: LaunchInfo(0, 2, can_join=True)
    )
    with raises("single-process"):
        llamatrain.from_scratch(**hook)


def test_a_forged_checkpoint_names_no_other_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamatrain.run import hooks
    from llamatrain.run.resume import ResumePoint

    folder = train(tmp_path / "run").folder
    checkpoint, path, _ = RunFolder.read_newest(folder)
    for forged in ("rows", ["rows", "eval"], {"rows": 1}, [["rows"]]):
        checkpoint.extra[hooks.HOOKS] = json.loads(json.dumps(forged))
        with pytest.raises(LlamatrainError) as error:
            hooks.stored_hooks(ResumePoint(checkpoint, path))
        assert error.value.code == "damaged-checkpoint"
