"""Numbers for people, and the time that is left."""

import pytest

from llamatrain.report.format import Pace, format_duration, format_loss, format_perplexity


def test_numbers_are_as_people_read_them() -> None:
    assert [format_duration(seconds) for seconds in (0, 59.6, 3599, 3600, 90_061)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "1d 1:01:01",
    ]
    assert [format_loss(loss) for loss in (0.0, 0.5, 0.001, -3.0, 1e5)] == [
        "0.0000",
        "0.5000",
        "1.00e-03",
        "-3.0000",
        "1.00e+05",
    ]
    assert [format_loss(float(loss)) for loss in ("nan", "inf")] == ["nan", "inf"]
    assert [format_perplexity(loss) for loss in (0.0, 8.0, 800.0, float("nan"))] == [
        "1.00",
        "2,981",
        "inf",
        "nan",
    ]


def test_what_is_left_follows_the_pace_of_late() -> None:
    pace, now, step = Pace(), 1000.0, 50
    assert pace.seconds_left(now, 100) is None
    pace.mark(now, step)
    assert pace.seconds_left(now, 100) is None  # one step may have been compiled in
    for _ in range(1000):
        now, step = now + 1.0, step + 1
        pace.mark(now, step)
    for _ in range(200):
        now, step = now + (3.0 if step % 10 else 13.0), step + 1  # saving, each tenth step
        pace.mark(now, step)
    left = pace.seconds_left(now, step + 500)
    assert left
    assert left == pytest.approx(2000, rel=0.03)
    assert pace.seconds_left(now + 100, step + 500) == pytest.approx(left - 100)
    assert pace.seconds_left(now + 1e6, step + 500) == 0


def test_one_long_pause_does_not_make_the_rest_long() -> None:
    pace = Pace()
    for step in range(1, 101):
        pace.mark(step / 10, step)
    pace.mark(15.1, 101)
    left = pace.seconds_left(15.1, 1001)
    assert left
    assert left < 190  # half the steps, 10 s


def test_a_pace_of_many_steps_is_kept_in_little_room() -> None:
    pace = Pace()
    for step in range(200_000):
        pace.mark(step / 2000, step)
    assert len(pace._marks) < 100
    assert pace.seconds_left(100.0, 202_000) == pytest.approx(1.0, rel=0.01)
