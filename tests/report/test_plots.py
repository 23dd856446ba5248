"""Loss curves, waves and loss.svg: readable at any width, whatever the numbers are."""

import math
import random
import tracemalloc
import xml.etree.ElementTree as ET
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamatrain.report.series import MAX_POINTS, Losses, RunSeries, ticks
from llamatrain.report.svg_plot import draw_svg
from llamatrain.report.terminal_plot import ASCII, ROWS, UNICODE, WAVE_ROWS, Glyphs, draw_losses, draw_waves

SVG = "{http://www.w3.org/2000/svg}"


def falling(steps: int) -> list[dict]:
    noise = random.Random(1)
    return [
        {"step": n, "loss": 1.2 + 7 * math.exp(-8 * n / steps) + noise.gauss(0, 0.1)}
        for n in range(1, steps + 1)
    ]


def validations(steps: Iterable[int]) -> list[dict]:
    return [{"step": n, "val_loss": 2.0, "val_tokens": 10} for n in steps]


def polylines(text: str, kind: str) -> list[list[tuple[float, float]]]:
    """The points of the plot's lines of a kind."""
    plot = ET.fromstring(text).find(f"{SVG}g")
    assert plot is not None
    found = [
        line.attrib["points"].split() for line in plot.iter(f"{SVG}polyline") if line.attrib["class"] == kind
    ]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in points)] for points in found]


# ---- what is drawn ---------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.9, 8.3, "2 4 6 8"),
        (0.0, 0.011, "0.000 0.005 0.010"),
        (-1.0, 1.0, "-1.0 -0.5 0.0 0.5 1.0"),
        (0.0, 1e-6, "0 2e-07 4e-07 6e-07 8e-07 1e-06"),
        (1.0, 20_000.0, "5,000 10,000 15,000 20,000"),
        (0.0, 3e9, "0 1e+09 2e+09 3e+09"),
    ],
)
def test_ticks_are_round(low: float, high: float, labels: str) -> None:
    assert [label for _, label in ticks(low, high, 5)] == labels.split()


def test_ticks_of_steps_are_whole() -> None:
    assert [label for _, label in ticks(1, 3, 8, whole=True)] == ["1", "2", "3"]


def test_one_outlier_does_not_flatten_the_rest() -> None:
    losses = Losses.from_lines([{"step": 0, "loss": 1e30}, *falling(200)])
    assert losses.high < 10
    assert max(losses.smooth.values) < 10
    assert Losses.from_lines(falling(200)).high > 8  # a fall from the beginning on is no outlier


def test_what_is_no_loss_is_left_out() -> None:
    odd = [None, "x", True, math.nan, math.inf, 10**400, -(10**4000)]
    lines = [{"step": n, "loss": value} for n, value in enumerate(odd)] + [
        {"step": 10**400, "loss": 1.0},
        {"step": 50, "loss": 2.0},
    ]
    assert Losses.from_lines(lines).training.values.tolist() == [2.0]


def test_of_a_step_twice_the_last_counts() -> None:
    losses = Losses.from_lines([{"step": 2, "loss": 1.0}, {"step": 1, "loss": 5.0}, {"step": 2, "loss": 3.0}])
    assert (losses.training.steps.tolist(), losses.training.values.tolist()) == ([1, 2], [5.0, 3.0])


def test_the_smooth_line_follows_the_middle_of_the_noise() -> None:
    losses = Losses.from_lines(falling(4000))
    truth = [1.2 + 7 * math.exp(-8 * n / 4000) for n in range(1, 4001)]
    assert max(abs(losses.smooth.values - truth)) < 0.2
    assert max(abs(losses.training.values - truth)) > 0.3


# ---- loss.svg --------------------------------------------------------------


def test_the_picture_shows_all_that_was_measured() -> None:
    text = draw_svg(Losses.from_lines(falling(300) + validations(range(100, 301, 100))), "runs/one")
    (noise,), (smooth,), (validation,) = (
        polylines(text, kind) for kind in ("training noise", "training", "validation")
    )
    assert len(noise) == len(smooth) == 300
    assert len(validation) == 3
    assert [x for x, _ in smooth] == sorted(x for x, _ in smooth)
    assert smooth[0][1] < smooth[-1][1]  # down is more
    assert ET.fromstring(text).findtext(f"{SVG}title") == "runs/one"
    assert "validation loss 2.0000" in text
    assert "prefers-color-scheme: dark" in text


def test_many_steps_are_thinned_and_keep_their_spikes() -> None:
    lines = falling(30_000)
    lines[20_000]["loss"] = 8.0
    text = draw_svg(Losses.from_lines(lines), "long")
    (noise,), (smooth,) = polylines(text, "training noise"), polylines(text, "training")
    assert 500 < len(noise) <= 1002
    assert 300 < len(smooth) <= 1002
    assert min(y for x, y in noise if x > 300) < 110  # where 8 is
    assert len(text) < 40_000


def test_nothing_of_a_name_gets_into_the_markup() -> None:
    text = draw_svg(Losses.from_lines(falling(5)), 'a</text><script x="1">&\x1b[2J\udc80\x00')
    root = ET.fromstring(text.encode())  # neither signs that XML forbids nor halves of a pair
    assert not [item for item in root.iter() if item.tag.endswith("script")]
    assert root.findtext(f"{SVG}title") == 'a</text><script x="1">&\\x1b[2J\\udc80\\x00'


def test_one_point_is_a_dot_and_none_is_said() -> None:
    one = draw_svg(Losses.from_lines([{"step": 3, "loss": 2.5}]), "one")
    assert one.count("<circle") == 1
    assert not polylines(one, "training")
    nothing = draw_svg(Losses.from_lines([]), "none")
    assert "no losses yet" in nothing
    ET.fromstring(nothing)


# ---- in the terminal -------------------------------------------------------


def test_the_curve_falls_in_the_terminal() -> None:
    rows = draw_losses(Losses.from_lines(falling(300) + validations([300])), 80, ASCII).plain.splitlines()
    assert len(rows) == ROWS + 3
    columns = [row.split("|", 1)[1] for row in rows[:ROWS]]
    lowest = [max(y for y in range(ROWS) if columns[y][x : x + 1] == "*") for x in range(59)]
    assert lowest == sorted(lowest)
    assert columns[0].index("*") == 0
    assert sum(column.count("o") for column in columns) == 1
    assert rows[-1].split() == ["loss", "by", "step", "*", "training", "o", "validation"]
    assert rows[-2].split() == ["50", "100", "150", "200", "250", "300"]


NUMBERS = st.one_of(st.floats(), st.none(), st.integers(), st.floats(-10, 10))
LINES = st.lists(
    st.fixed_dictionaries(
        {"step": st.one_of(st.integers(0, 50), st.integers())},
        optional={"loss": NUMBERS, "val_loss": NUMBERS},
    )
)


@settings(max_examples=300, deadline=None)
@given(LINES, st.integers(40, 120), st.sampled_from([UNICODE, ASCII]))
def test_whatever_the_losses_are_they_are_drawn(lines: list[dict], width: int, signs: Glyphs) -> None:
    losses = Losses.from_lines(lines)
    drawn = draw_losses(losses, width, signs).plain
    assert max(map(len, drawn.splitlines())) <= width
    assert signs is UNICODE or drawn.isascii()
    ET.fromstring(draw_svg(losses, "any"))


def test_waves_lie_over_each_other() -> None:
    sine = [math.sin(n / 8) for n in range(64)]
    rows = draw_waves(sine, [-value for value in sine], 80, ASCII).plain.splitlines()
    assert len(rows) == WAVE_ROWS + 1
    plot = [row[4:].ljust(64) for row in rows[:WAVE_ROWS]]
    assert all(sum(row[x] != " " for row in plot) == (1 if plot[4][x] == "#" else 2) for x in range(64))
    assert plot[0][12] == "."
    assert plot[8][12] == "o"
    assert plot[4][0] == "#"  # both are 0


@given(st.lists(st.floats()), st.lists(st.floats()), st.integers(40, 120))
def test_whatever_the_waves_are_they_are_drawn(target: list[float], model: list[float], width: int) -> None:
    rows = draw_waves(target, model, width, UNICODE).plain.splitlines()
    assert len(rows) == WAVE_ROWS + 1
    assert max(map(len, rows)) <= width


def test_a_run_of_any_length_takes_the_same_memory() -> None:
    """With its highest and lowest losses, its first and its last: 153,519 steps took 23 MB once."""

    def peak(count: int) -> tuple[int, Losses]:
        chance = random.Random(1)
        lines = (
            {"step": step, "loss": 5 + chance.random() + 9 * (step == 70_001) - 5 * (step == 90_003)}
            for step in range(1, count)
        )
        tracemalloc.start()
        losses = Losses.from_lines(lines)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most, losses

    (few, _), (many, losses) = peak(100_000), peak(400_000)
    assert many < 1.3 * few < 8e6, (few, many)
    steps, values = losses.training.steps, losses.training.values
    assert len(steps) < MAX_POINTS and steps[-1] == 399_999 and steps[0] == 1
    assert np.diff(steps).max() < 200  # as many of the first as of the last
    assert (
        values.max() > 14
        and steps[values.argmax()] == 70_001
        and values.min() < 1
        and steps[values.argmin()] == 90_003
    )
    assert abs(losses.smooth.values.mean() - 5.5) < 0.05


def test_figures_of_many_steps_are_thinned_likewise() -> None:
    lines = (
        {"step": step, "loss": math.nan if step % 3 else 2.0, "lr": step / 1e6} for step in range(1, 100_000)
    )
    found = RunSeries.from_lines(lines)
    assert (
        found.step == 99_999
        and len(found.series("lr")) < MAX_POINTS
        and set(found.series("loss").values) == {2.0}
    )
    assert (np.diff(found.series("lr").values) > 0).all() and found.series("lr").values[-1] == 99_999 / 1e6
