"""The terminal report of a run: lines, a progress display below them, plots at the end."""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from llamatrain.errors import FileError
from llamatrain.io.atomic_write import AtomicFile
from llamatrain.platform.escape import make_printable
from llamatrain.platform.terminal import progress_area
from llamatrain.report import svg_plot, terminal_plot
from llamatrain.report.console import stderr_console
from llamatrain.report.format import format_duration, format_loss, format_step_time, line_interval
from llamatrain.report.html_report import RunPage
from llamatrain.report.layout import (
    GAP,
    Segment,
    fit_segments,
    join_segments,
    position_segments,
    retained_summary,
    reward_segments,
    run_summary,
    score_metrics,
    score_segments,
)
from llamatrain.report.metrics import Metrics
from llamatrain.report.progress import RECENT, Display, Progress
from llamatrain.report.records import ANSWER_FIELDS, PREFERENCE_FIELDS, Score, StepLine
from llamatrain.report.series import Losses

MIN_INTERVAL, MAX_INTERVAL = 1.0, 300.0  # seconds between lines: at least, at most
SAMPLE_CHARS, SAMPLE_LINES = 1000, 12
REFRESH = 4  # per second


class Report:
    """Prints a line every `every` steps, including the first and the last.

    Without `every`: each step of a short run, each 2nd, 5th, 10th ... of a longer one, so that there are at
    most 150 lines, and no more than one a second; but at least one every five minutes.
    """

    page: RunPage | None = None  # drawn at each save

    def __init__(
        self,
        metrics: Metrics,
        *,
        iters: int,
        every: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics, metrics.warn = metrics, self.warn
        self.iters = iters
        self.console = console or stderr_console()
        self._every = every or line_interval(iters)
        self._min_interval, self._max_interval = (0.0, math.inf) if every else (MIN_INTERVAL, MAX_INTERVAL)
        self._clock = clock
        self._progress = Progress(iters=iters, start=clock())
        self._seconds = deque[float](maxlen=RECENT)
        self._printed, self._printed_at = -1, -math.inf  # so the first step is printed
        self.warnings: list[str] = []
        self._waves: tuple[tuple[float, ...], tuple[float, ...]] | None = None
        # the font of the Linux console has no braille
        has_unicode = self.console.encoding.startswith("utf") and os.environ.get("TERM") != "linux"
        self._glyphs = terminal_plot.UNICODE if has_unicode else terminal_plot.ASCII
        self._display_lines = Display(self._progress, self._glyphs)
        self._exit_stack = ExitStack()
        self._live: Live | None = None
        if self.console.is_interactive:
            self._live = Live(
                console=self.console,
                get_renderable=self._display,
                refresh_per_second=REFRESH,
                transient=True,
                redirect_stdout=False,  # standard output is for data
            )

    # ---- messages ----------------------------------------------------------

    def print_header(self, facts: Sequence[tuple[str, str]], planned_bytes: int = 0) -> None:
        """Print names and values, and start the progress display, which shows the planned bytes."""
        self._progress.planned_bytes = planned_bytes
        margin = max((len(name) for name, _ in facts), default=0) + len(GAP)
        for name, value in facts:
            lines = Text(self._printable(value)).wrap(self.console, max(16, self.console.width - margin))
            for n, line in enumerate(lines):
                line.rstrip()
                self._print(
                    Text.assemble(
                        (f"{self._printable(name) if n == 0 else '':{margin}}", "bright_black"), line
                    )
                )
        self.log("")
        self._start_display()

    def log(self, line: str) -> None:
        """Print a line."""
        self._print(self._wrap(Text(self._printable(line))))

    def warn(self, line: str) -> None:
        """Print a warning, and keep it."""
        self.warnings.append(line)
        self._print(self._wrap(Text(f"warning: {self._printable(line)}", "yellow")))

    def print_sample(self, step: int, text: str) -> None:
        """Print a text that the model wrote, set off from other lines."""
        self._progress.activity = ""
        if self.page:
            self.page.add_sample(step, text)
        cut = text[:SAMPLE_CHARS]
        shown = make_printable(cut + "..." * (cut != text), self.console.encoding, keep="\n\t").expandtabs(4)
        bar = f"{self._glyphs.left[0]} "
        wrapped = Text(shown).wrap(self.console, max(16, self.console.width - len(bar)))
        block = Text.assemble((f"sample at step {step}", "bright_black"))
        for line in [*wrapped[:SAMPLE_LINES], *([Text("...")] if len(wrapped) > SAMPLE_LINES else [])]:
            line.rstrip()
            block.append("\n").append(bar, "green").append_text(line)
        self._print(block)

    def print_waves(self, target: Sequence[float], model: Sequence[float]) -> None:
        """Show two waves between -1 and 1: on a terminal above the progress, elsewhere when they change."""
        if self.page:
            self.page.add_waves(self._progress.steps_done, target, model)
        before, self._waves = self._waves, (tuple(target), tuple(model))
        if not self._live and self._waves != before:
            self._print(self._draw_waves())

    def on_save(self, step: int, path: str) -> None:
        """Report a checkpoint."""
        self._progress.activity, self._progress.last_save = "", f"saved at {step}"
        if self.page:
            self.page.draw_if_due()
        if not self._live:
            self.log(f"saved at step {step}: {path}")

    def on_save_error(self, step: int, why: str) -> None:
        """Warn that a checkpoint could not be written."""
        self.warn(f"could not save at step {step}: {why}; the next save will try again")

    def show_activity(self, what: str = "validating") -> None:
        """Set the activity that the progress display shows between steps."""
        self._progress.activity = self._printable(what)

    # ---- steps -------------------------------------------------------------

    def set_start(self, step: int) -> None:
        """Set the number of steps completed by earlier processes."""
        self._progress.steps_done = step

    def on_step(self, line: StepLine) -> None:
        """Record a step, and print its line if one is due."""
        facts = {
            "step": line.step,
            "loss": line.loss,
            "lr": line.lr,
            "grad_norm": line.grad_norm,
            "tokens": line.tokens,
        }
        facts["seconds"] = round(line.seconds, 6)
        facts["tokens_per_second"] = round(line.tokens_per_second, 1)
        facts |= {
            name: getattr(line, name)
            for name in ("seconds_waited", "evaluations", "epoch", "sample", "samples")
        }
        facts |= {name: getattr(line, name) for name in (*PREFERENCE_FIELDS, *ANSWER_FIELDS)}
        facts |= {
            name: getattr(line, name) for name in ("ranks", "seconds_exposed", "slowest", "device_peak_bytes")
        }
        facts["total_seconds"] = line.total_seconds and round(line.total_seconds, 6)
        self.metrics.write(
            {name: value for name, value in facts.items() if value is not None or name == "loss"}
        )
        now = self._clock()
        self._seconds.append(line.seconds)
        self._progress.step(line, now)
        waited = now - self._printed_at
        if (
            (line.step % self._every == 0 and waited >= self._min_interval)
            or waited >= self._max_interval
            or line.step == self.iters
        ):
            self._print_step(line)

    def on_validation(self, step: int, score: Score, best: bool = False) -> None:
        """Record and print a validation."""
        self._progress.activity, self._progress.score = "", score
        self._progress.lowest = min(self._progress.lowest, score.loss)
        self.metrics.write(score_metrics(step, score, best))
        pieces = [
            Segment(" val", self._step_position(step), 9),
            *score_segments(score, self.console.encoding),
        ]
        pieces += [Segment("", "best", 4)] if best else []
        self._print(join_segments(fit_segments(pieces, self._width)))

    def on_retained(self, step: int, score: Score) -> None:
        """Record and print the score of data that should not be forgotten."""
        self._progress.activity, self._progress.retained = "", score
        self.metrics.write(score_metrics(step, score, kind="retain"))
        pieces = [
            Segment("kept", self._step_position(step), 9),
            *score_segments(score, self.console.encoding),
        ]
        self._print(join_segments(fit_segments(pieces, self._width)))

    def end(self, folder: Path) -> None:
        """Stop the display and plot the losses: here, and as loss.svg in the folder."""
        self._stop_display()
        if self._live and self._waves:
            self._print(self._draw_waves())
        losses = Losses.from_lines(self.metrics.lines())
        if len(losses.training) + len(losses.validation) + len(losses.retained) > 1:
            self._print(
                Text("\n").append_text(terminal_plot.draw_losses(losses, self.console.width, self._glyphs))
            )
        try:
            with AtomicFile(folder / "loss.svg") as file:
                file.write(svg_plot.draw_svg(losses, str(folder)).encode())
        except FileError as error:  # the run itself succeeded
            self.warn(str(error))
        if (last := self._progress.last) and last.total_seconds is not None:
            self.log(run_summary(last, last.total_seconds, self._progress.score, self.console.encoding))
        if len(losses.retained):
            self.log(retained_summary(losses.retained.values.tolist(), self.console.encoding))

    def close(self) -> None:
        """Stop the display and close all files."""
        try:
            self._stop_display()
        finally:
            if self.page:
                self.page.close()
            self.metrics.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error and self.metrics.sink:
            self.metrics.sink.failed = True
        with suppress(FileError) if error else nullcontext():  # only report the error that ended the run
            self.close()

    # ---- how it is shown ---------------------------------------------------

    @property
    def _width(self) -> int | None:
        """The width that a line must fit, or None."""
        return self.console.width if self.console.is_terminal else None

    def _printable(self, text: str) -> str:
        return make_printable(text, self.console.encoding)

    def _wrap(self, text: Text) -> Text:
        """Wrap text at words if it is wider than the terminal, which would break it anywhere."""
        if self._width is None or text.cell_len <= self._width:
            return text
        lines = text.wrap(self.console, self._width)
        for line in lines:
            line.rstrip()
        return Text("\n").join(lines)

    def _print(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)

    def _step_position(self, step: int) -> str:
        return f"{step:>{len(str(self.iters))}}/{self.iters}"

    def _print_step(self, line: StepLine) -> None:
        now = self._clock()
        self._printed, self._printed_at = line.step, now
        left = self._progress.pace.seconds_left(now, self.iters)
        norm = (
            ""
            if line.grad_norm is None
            else f"{line.grad_norm:.3f}"
            if line.grad_norm < 100
            else f"{line.grad_norm:.2g}"
        )
        pieces = [
            Segment("step", self._step_position(line.step), 9),
            Segment("loss", f"{format_loss(line.loss):>7}", 10, "bold cyan"),
            *reward_segments(line),
            Segment("lr", f"{line.lr:.2e}", 3),
            *([Segment("norm", f"{norm:>6}", 2)] if norm else []),
            *position_segments(line),
            Segment("", f"{self._progress.speed:>7,.0f} tok/s", 5),
            *(
                [Segment("", f"{format_step_time(median(self._seconds)):>8}/step", 2)]
                if line.total_seconds is not None
                else []
            ),
            Segment("", f"{format_duration(now - self._progress.start):>5}", 4),
            *([] if left is None else [Segment("", f"{format_duration(left):>5} left", 6)]),
        ]
        self._print(join_segments(fit_segments(pieces, self._width)))
        self._start_display()

    def _draw_waves(self) -> Text:
        return terminal_plot.draw_waves(*(self._waves or ((), ())), self.console.width, self._glyphs)

    def _start_display(self) -> None:
        if self._live and not self._live.is_started:
            self._live.start()
            self._exit_stack.enter_context(progress_area(self.show_activity))

    def _stop_display(self) -> None:
        """Stop the display, and print the line of the last step."""
        try:
            if (last := self._progress.last) and last.step != self._printed:
                self._print_step(last)
        finally:
            self._exit_stack.close()
            if self._live:
                self._live.stop()

    def _display(self) -> Group:
        """Draw the display; called by a thread, so it only reads."""
        width, height = self.console.width - 1, self.console.height
        waves = [self._draw_waves()] if self._waves and height > terminal_plot.WAVE_ROWS + 6 else []
        return Group(
            *waves,
            *self._display_lines.lines(
                self._clock(), width, height - len(waves) * (terminal_plot.WAVE_ROWS + 1)
            ),
        )
