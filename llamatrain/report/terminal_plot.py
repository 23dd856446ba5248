"""Plots of characters: the losses of a run, and the waves of the sine demo."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from llamatrain.report.series import Losses, ticks

COLUMNS, ROWS = 60, 12  # of the loss plot
WAVE_COLUMNS, WAVE_ROWS = 64, 9
# a braille character has two columns of four dots
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
BRAILLE = 0x2800
AXIS = "bright_black"


@dataclass(frozen=True)
class Glyphs:
    """The characters of plots, for terminals with Unicode or only ASCII."""

    training: str
    validation: str
    retained: str
    corner: str
    below: str  # the line below, and a tick in it
    left: str  # the line at the left, and a tick in it
    waves: str  # target, model, both
    dots: tuple[int, int]  # per character: across, down


UNICODE = Glyphs("─", "●", "◆", "└", "─┬", "│┤", "·○●", (2, 4))
ASCII = Glyphs("*", "o", "x", "+", "-+", "||", ".o#", (1, 1))


# ---- losses ----------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """Maps steps and losses to dots, counted from the upper left."""

    losses: Losses
    width: int
    height: int

    def x(self, steps: np.ndarray | float) -> np.ndarray:
        """Return the columns of steps."""
        first, last = self.losses.step_range
        return np.rint((np.asarray(steps) - first) / (last - first) * (self.width - 1)).astype(int)

    def y(self, values: np.ndarray | float) -> np.ndarray:
        """Return the rows of losses."""
        low, high = self.losses.low, self.losses.high
        return np.rint((high - np.clip(values, low, high)) / (high - low) * (self.height - 1)).astype(int)


def draw_losses(losses: Losses, width: int, glyphs: Glyphs) -> Text:
    """Draw the smoothed training losses as a line and validations as marks."""
    across, down = glyphs.dots
    places = ticks(losses.low, losses.high, 5)
    margin = max(len(label) for _, label in places)
    columns = max(8, min(COLUMNS, width - margin - 3))
    frame = Frame(losses, columns * across, ROWS * down)
    bits = np.zeros((ROWS, columns), int)
    for x, y in training_dots(losses, frame):
        bits[y // down, x // across] |= DOTS[x % across][y % down]
    marked = {
        cell: mark
        for series, mark in (
            (losses.retained, (glyphs.retained, "green")),
            (losses.validation, (glyphs.validation, "yellow")),
        )
        for cell in zip(frame.y(series.values) // down, frame.x(series.steps) // across, strict=True)
    }
    labels = {int(frame.y(value)) // down: label for value, label in places}
    text = Text()
    for row in range(ROWS):
        text.append(f"{labels.get(row, ''):>{margin}} {glyphs.left[row in labels]}", AXIS)
        last = max(
            (column for column in range(columns) if bits[row, column] or (row, column) in marked), default=-1
        )
        for column in range(last + 1):
            text.append(*(marked.get((row, column)) or cell_glyph(bits[row, column], glyphs)))
        text.append("\n")
    for below in draw_step_axis(losses, frame, columns, glyphs):
        text.append(f"{'':{margin}} {below}\n", AXIS)
    return text.append(" " * margin).append_text(draw_legend(losses, glyphs, columns > 40))


def training_dots(losses: Losses, frame: Frame) -> Iterator[tuple[int, int]]:
    """Yield the dots of the training losses; each column connects to the one before."""
    if not len(losses.smooth):
        return
    begin, end = frame.x(losses.smooth.steps[[0, -1]])
    first, last = losses.step_range
    columns = np.arange(begin, end + 1)
    steps = first + columns / (frame.width - 1) * (last - first)
    heights = frame.y(np.interp(steps, losses.smooth.steps, losses.smooth.values))
    before = heights[0]
    for x, y in zip(columns, heights, strict=True):
        towards = 1 if y >= before else -1
        for between in range(before if y == before else before + towards, y + towards, towards):
            yield x, between
        before = y


def cell_glyph(bits: int, glyphs: Glyphs) -> tuple[str, str]:
    """Return character and style of a cell without a mark."""
    if not bits:
        return " ", ""
    return (chr(BRAILLE + bits) if glyphs is UNICODE else glyphs.training), "cyan"


def draw_legend(losses: Losses, glyphs: Glyphs, wide: bool) -> Text:
    """Return the legend."""
    text = Text("  loss by step" if wide else "")
    if len(losses.training):
        text.append(f"  {glyphs.training} ", "cyan").append("training")
    if len(losses.validation):
        text.append(f"  {glyphs.validation} ", "yellow").append("validation")
    if len(losses.retained):
        text.append(f"  {glyphs.retained} ", "green").append("retained")
    return text


def draw_step_axis(losses: Losses, frame: Frame, columns: int, glyphs: Glyphs) -> tuple[str, str]:
    """Return the horizontal axis, and the steps at its ticks."""
    axis, names = [glyphs.corner, *glyphs.below[0] * columns], ""
    for step, label in ticks(*losses.step_range, max(2, columns // 10), whole=True):
        column = 1 + int(frame.x(step)) // glyphs.dots[0]
        begin = min(max(column - len(label) // 2, 0), columns + 1 - len(label))
        if begin > len(names) or not names:
            axis[column] = glyphs.below[1]
            names = f"{names:{begin}}{label}"
    return "".join(axis), names


# ---- waves -----------------------------------------------------------------


def draw_waves(target: Sequence[float], model: Sequence[float], width: int, glyphs: Glyphs) -> Text:
    """Draw two waves between -1 and 1 over each other."""
    columns = max(8, min(WAVE_COLUMNS, width - 5))
    cells: dict[tuple[int, int], int] = {}
    for which, wave in ((1, target), (2, model)):
        for n, value in enumerate(wave):
            if -np.inf < value < np.inf:
                column = round(n * (columns - 1) / max(len(target) - 1, len(model) - 1, 1))
                row = round((1 - min(max(value, -1.0), 1.0)) / 2 * (WAVE_ROWS - 1))
                cells[row, column] = cells.get((row, column), 0) | which
    labels = {0: "1", WAVE_ROWS // 2: "0", WAVE_ROWS - 1: "-1"}
    styles = ("blue", "yellow", "green")
    text = Text()
    for row in range(WAVE_ROWS):
        text.append(f"{labels.get(row, ''):>2} {glyphs.left[row in labels]}", AXIS)
        for column in range(1 + max((x for y, x in cells if y == row), default=-1)):
            which = cells.get((row, column), 0)
            text.append(glyphs.waves[which - 1] if which else " ", styles[which - 1] if which else "")
        text.append("\n")
    text.append("    ")
    for letter, style, name in zip(glyphs.waves, styles, ("target", "model", "both"), strict=True):
        text.append(f"{letter} ", style).append(f"{name}   " if name != "both" else name)
    return text
