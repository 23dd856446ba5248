"""What stands below a run's lines on a terminal: in any width, of any length of run."""

import math

import pytest
from rich.text import Text

from llamatrain.report.progress import MAX_LOSSES, TRAIL, Display, LossTrail, Progress
from llamatrain.report.records import Score, StepLine
from llamatrain.report.terminal_plot import ASCII, UNICODE, Glyphs

SCORE = Score(loss=2.5, loss_error=None, accuracy=None, accuracy_error=None, tokens=100)


def line(step: int, loss: float | None) -> StepLine:
    known = {"lr": 1e-3, "grad_norm": 0.8, "tokens": 512 * step, "seconds": 0.5, "tokens_per_second": 1000.0}
    return StepLine(step=step, loss=loss, **known)  # type: ignore[arg-type]


def display(steps: int = 40, planned: int = 100_000_000, signs: Glyphs = UNICODE) -> tuple[Progress, Display]:
    progress = Progress(iters=100, start=0.0, planned_bytes=planned)
    for step in range(1, steps + 1):
        progress.step(line(step, 4.0 / step), float(step))
    return progress, Display(progress, signs, used_bytes=lambda: 75_000_000)


def shown(lines: list[Text]) -> list[str]:
    return [each.plain for each in lines]


def test_all_of_it() -> None:
    progress, told = display()
    progress.score, progress.last_save = SCORE, "saved at 40"
    progress.lowest = 2.5
    loss, below, memory = shown(told.lines(40.0, 100, 30))
    assert loss.startswith("█") and "loss 0.1000  lowest 0.1000  val 2.5000  best  lr 1.00e-03" in loss
    assert "40/100  1,000 tok/s  0:40  1:00 left  saved at 40" in below
    assert memory.startswith("━" * 24 + "─" * 8 + "  memory") and memory.endswith(
        "memory 75 MB of 100 MB planned"
    )


@pytest.mark.parametrize("signs", [UNICODE, ASCII])
@pytest.mark.parametrize("width", [10, 20, 40, 59, 60, 79, 200])
def test_no_line_is_too_wide(width: int, signs: Glyphs) -> None:
    progress, told = display(signs=signs)
    progress.score, progress.activity = SCORE, "validating"
    lines = shown(told.lines(40.0, width, 30))
    assert all(len(each) <= max(width, 30) for each in lines) and len(lines) == 3
    if width >= 40:
        assert all(len(each) <= width for each in lines)
    assert "loss 0.1000" in lines[0] and "40/100" in lines[1]
    assert signs is UNICODE or all(each.isascii() for each in lines)


def test_what_is_not_known_is_left_out() -> None:
    begun, told = display(steps=0)
    assert len(told.lines(0.0, 80, 30)) == 1 and "0/100" in told.lines(0.0, 80, 30)[0].plain
    begun.step(line(1, math.nan), 1.0)
    assert "loss nan" in told.lines(1.0, 80, 30)[0].plain
    assert len(display(planned=0)[1].lines(40.0, 80, 30)) == 2
    (only,) = shown(display()[1].lines(40.0, 80, 10))  # of a terminal of few lines
    assert "40/100  loss 0.1000" in only


def test_a_trail_of_any_length() -> None:
    """What lies far back counts as much as what is near; memory stays as it is."""
    trail = LossTrail()
    for step in range(10 * MAX_LOSSES):
        trail.add(2.0 if step < 5 * MAX_LOSSES else 1.0)
    drawn = trail.draw(TRAIL)
    assert (
        len(drawn) == TRAIL
        and drawn[: TRAIL // 2 - 1] == "█" * (TRAIL // 2 - 1)
        and set(drawn[TRAIL // 2 + 1 :]) == {"▁"}
    )
    assert len(trail._means) < MAX_LOSSES and trail.lowest == 1.0


def test_trails_of_little() -> None:
    trail = LossTrail()
    assert trail.draw(10) == ""
    for loss in (1.0, math.inf, math.nan, 1.0):
        trail.add(loss)
    assert trail.draw(10) == "▁▁" and trail.draw(1) == ""
