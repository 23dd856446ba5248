"""Batches that a thread makes ahead of the steps: the same bits, nothing waits, and what fails is told where it is needed."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llamatrain.data.batches import Batch, CursorState
from llamatrain.errors import DataError
from llamatrain.train.prefetch import Prefetcher
from tests.helpers.cli import TINY, Argument, losses, ran, run, same_bits, steps, text_file
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small


class Counted:
    """Rows that say their number, slowly."""

    def __init__(self, seconds: float = 0.0, bad: int = -1) -> None:
        self.seconds, self.bad, self.given = seconds, bad, 0

    @property
    def state(self) -> CursorState:
        return CursorState(seed=0, position=self.given)

    def batch(self, count: int) -> Batch:
        time.sleep(self.seconds)
        if self.given == self.bad:
            raise DataError("no such row")
        self.given += 1
        numbers = np.full((count, 1), self.given, np.int32)
        return Batch(
            tokens=numbers, targets=numbers, weights=numbers, positions=numbers, starts=numbers, size=count
        )

    def one_epoch(self, count: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        return iter(())


def test_they_come_in_order_and_their_state_is_of_what_was_taken() -> None:
    rows = Counted()
    with Prefetcher(rows, 2, ready=3, remaining=10) as ahead:
        for number in range(1, 11):
            assert ahead.state.position == number - 1
            assert ahead.batch(2).tokens.tolist() == [[number]] * 2
    assert ahead.state.position == rows.given == 10


def test_no_more_are_made_than_are_ready_or_wanted() -> None:
    rows = Counted()
    with Prefetcher(rows, 1, ready=2, remaining=3) as ahead:
        for _ in range(100):
            time.sleep(0.001)
        assert rows.given == 2
        ahead.batch(1)
        ahead.batch(1)
    assert rows.given == 3


def test_nobody_waits_where_steps_take_longer_than_rows() -> None:
    with Prefetcher(Counted(seconds=0.01), 1, ready=1, remaining=6) as ahead:
        for _ in range(6):
            time.sleep(0.05)
            ahead.batch(1)
    assert ahead.seconds_waited < 0.03  # six batches take 0.06


def test_what_is_waited_for_is_told() -> None:
    with Prefetcher(Counted(seconds=0.02), 1, ready=1, remaining=2) as ahead:
        ahead.batch(1)
        ahead.batch(1)
    assert 0.03 < ahead.seconds_waited < 5


def test_what_fails_is_told_by_the_step_that_needs_it_and_again() -> None:
    with Prefetcher(Counted(bad=2), 1, ready=3, remaining=9) as ahead:
        ahead.batch(1)
        ahead.batch(1)
        for _ in range(2):
            with pytest.raises(DataError, match="no such row"):
                ahead.batch(1)
        assert ahead.state.position == 2


def test_the_thread_ends_with_the_run() -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), Prefetcher(Counted(), 1, ready=2, remaining=9) as ahead:
        ahead.batch(1)
        raise KeyError
    assert threading.active_count() == before


def test_more_than_was_announced_is_a_mistake() -> None:
    with Prefetcher(Counted(), 1, ready=1, remaining=1) as ahead:
        with pytest.raises(RuntimeError, match="2 rows were not announced"):
            ahead.batch(2)
        ahead.batch(1)
        with pytest.raises(RuntimeError, match="0 batches of 1 are in flight"):
            ahead.batch(1)


# ---- whole runs ------------------------------------------------------------

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def chats(path: Path, count: int = 300) -> Path:
    draw = np.random.default_rng(3)
    with path.open("w") as out:
        for _ in range(count):
            words = [
                "".join(chr(97 + letter) for letter in draw.integers(0, 26, size))
                for size in draw.integers(1, 12, 6)
            ]
            talk = [{"role": role, "content": " ".join(words[:3])} for role in ("user", "assistant") * 2]
            out.write(json.dumps({"messages": talk}) + "\n")
    return path


GIVEN: tuple[Argument, ...] = (
    "--ctx",
    64,
    "--batch",
    2,
    "--grad-acc",
    2,
    "--save-every",
    5,
    "--keep",
    9,
    "--precision",
    "f32",
)


@pytest.mark.parametrize("more", [(), ("--pack",)], ids=["rows", "packed"])
def test_a_run_on_chats_never_waits_and_goes_on_with_the_same_bits(
    more: tuple[Argument, ...], tmp_path: Path
) -> None:
    model, data = (
        base(tmp_path / "base.gguf", small(layers=1), template=TEMPLATE),
        chats(tmp_path / "chats.jsonl"),
    )
    ran("finetune", model, data, *GIVEN, *more, "--iters", 12, "--out", tmp_path / "whole")
    waited = [line["seconds_waited"] for line in steps(tmp_path / "whole")]
    assert (
        len(waited) == 12 and sorted(waited)[8] <= 0.001 and sum(waited) < 0.05
    )  # others may have the processor
    for step in (0, 5, 10):
        other = tmp_path / f"from-{step}"
        ran("finetune", model, "--resume", tmp_path / "whole" / f"checkpoint-{step}.gguf", "--out", other)
        assert losses(other) == losses(tmp_path / "whole")
        same_bits(other / "adapter.gguf", tmp_path / "whole" / "adapter.gguf")


def test_rows_that_cannot_be_read_end_the_run_in_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the one before, which runs while they are read."""
    from llamatrain.data.batches import Batches

    batch, calls = Batches.batch, list[int]()

    def failing(rows: Batches, count: int) -> Batch:
        calls.append(count)
        if len(calls) == 4:
            raise DataError("tokens there were cut short")
        return batch(rows, count)

    monkeypatch.setattr(Batches, "batch", failing)
    before = threading.active_count()
    done = run(
        "from-scratch",
        text_file(tmp_path),
        *TINY,
        "--ctx",
        32,
        "--batch",
        2,
        "--iters",
        9,
        "--out",
        tmp_path / "run",
    )
    assert done.errors == ["error: tokens there were cut short"] and done.code == 1
    assert len(steps(tmp_path / "run")) == 3
    assert threading.active_count() <= before + 1  # that of the progress display
