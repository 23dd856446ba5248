"""What a person sees of a training run: lines, a progress display below them on a terminal, drawings at the end."""

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
from llamatrain.report.console import stderr
from llamatrain.report.format import amount, duration, stride, time_of_step
from llamatrain.report.html_report import RunPage
from llamatrain.report.layout import (
    GAP,
    Segment,
    assembled,
    figures_of,
    fitted,
    place_of,
    rewards_of,
    scores_of,
    summary,
)
from llamatrain.report.metrics import Metrics
from llamatrain.report.progress import RECENT, Display, Progress
from llamatrain.report.records import Score, StepLine
from llamatrain.report.series import Losses

PAUSE, PATIENCE = 1.0, 300.0  # seconds between lines: at least, at most
SAMPLE_SIGNS, SAMPLE_LINES = 1000, 12
REFRESH = 4  # times a second


class Report:
    """A line for each `every` steps, the first and the last among them.

    Without `every`: each step of a short run, each 2nd, 5th, 10th ... of a longer one, so that there are 150 lines at most,
    and no more than one a second; but after five minutes without a line there is one.
    """

    page: RunPage | None = None  # that is drawn at each save

    def __init__(
        self,
        metrics: Metrics,
        *,
        iters: int,
        every: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics, metrics.tell = metrics, self.warn
        self.iters = iters
        self.console = console or stderr()
        self._every = every or stride(iters)
        self._pause, self._patience = (0.0, math.inf) if every else (PAUSE, PATIENCE)
        self._clock = clock
        self._progress = Progress(iters=iters, begun=clock())
        self._seconds = deque[float](maxlen=RECENT)
        self._printed, self._printed_at = -1, -math.inf  # the first step's line is due
        self.warnings: list[str] = []
        self._waves: tuple[tuple[float, ...], tuple[float, ...]] | None = None
        fine = (
            self.console.encoding.startswith("utf") and os.environ.get("TERM") != "linux"
        )  # whose font has no braille
        self._signs = terminal_plot.FINE if fine else terminal_plot.PLAIN
        self._shown = Display(self._progress, self._signs)
        self._standing = ExitStack()
        self._live: Live | None = None
        if self.console.is_interactive:
            self._live = Live(
                console=self.console,
                get_renderable=self._display,
                refresh_per_second=REFRESH,
                transient=True,
                redirect_stdout=False,  # data is no part of the display
            )

    # ---- what is said ------------------------------------------------------

    def header(self, facts: Sequence[tuple[str, str]], planned: int = 0) -> None:
        """Names and values; with them the progress display begins, which shows the bytes that are planned."""
        self._progress.planned = planned
        margin = max((len(name) for name, _ in facts), default=0) + len(GAP)
        for name, value in facts:
            lines = Text(self._safe(value)).wrap(self.console, max(16, self.console.width - margin))
            for n, line in enumerate(lines):
                line.rstrip()
                self._print(
                    Text.assemble((f"{self._safe(name) if n == 0 else '':{margin}}", "bright_black"), line)
                )
        self.log("")
        self._show()

    def log(self, line: str) -> None:
        self._print(self._folded(Text(self._safe(line))))

    def warn(self, line: str) -> None:
        self.warnings.append(line)
        self._print(self._folded(Text(f"warning: {self._safe(line)}", "yellow")))

    def sample(self, step: int, text: str) -> None:
        """A text that the model wrote, set off from the lines around."""
        self._progress.doing = ""
        if self.page:
            self.page.sample(step, text)
        cut = text[:SAMPLE_SIGNS]
        shown = make_printable(cut + "..." * (cut != text), self.console.encoding, keep="\n\t").expandtabs(4)
        bar = f"{self._signs.left[0]} "
        wrapped = Text(shown).wrap(self.console, max(16, self.console.width - len(bar)))
        drawn = Text.assemble((f"sample at step {step}", "bright_black"))
        for line in [*wrapped[:SAMPLE_LINES], *([Text("...")] if len(wrapped) > SAMPLE_LINES else [])]:
            line.rstrip()
            drawn.append("\n").append(bar, "green").append_text(line)
        self._print(drawn)

    def wave(self, target: Sequence[float], model: Sequence[float]) -> None:
        """Two waves between -1 and 1: on a terminal above the progress, drawn anew each time; elsewhere where they changed."""
        if self.page:
            self.page.wave(self._progress.done, target, model)
        before, self._waves = self._waves, (tuple(target), tuple(model))
        if not self._live and self._waves != before:
            self._print(self._drawn_waves())

    def on_save(self, step: int, path: str) -> None:
        self._progress.doing, self._progress.saved = "", f"saved at {step}"
        if self.page:
            self.page.saved()
        if not self._live:
            self.log(f"saved at step {step}: {path}")

    def on_save_error(self, step: int, why: str) -> None:
        self.warn(f"nothing was saved at step {step}: {why}; the next save tries again")

    def show_activity(self, what: str = "validating") -> None:
        """What goes on between two steps, for the progress display."""
        self._progress.doing = self._safe(what)

    # ---- steps -------------------------------------------------------------

    def resumed(self, step: int) -> None:
        """So many steps were done before."""
        self._progress.done = step

    def on_step(self, line: StepLine) -> None:
        facts = {
            "step": line.step,
            "loss": line.loss,
            "lr": line.lr,
            "grad_norm": line.grad_norm,
            "tokens": line.tokens,
        }
        facts["seconds"], facts["tokens_per_second"] = (
            round(line.seconds, 6),
            round(line.tokens_per_second, 1),
        )
        facts |= {
            name: getattr(line, name)
            for name in ("seconds_waited", "evaluations", "epoch", "sample", "samples")
        }
        facts |= {
            name: getattr(line, name) for name in ("margin", "accuracy", "reward_chosen", "reward_rejected")
        }
        facts |= {name: getattr(line, name) for name in ("ranks", "seconds_exposed", "slowest")}
        facts["total_seconds"] = line.total_seconds and round(line.total_seconds, 6)
        self.metrics.write(
            {name: value for name, value in facts.items() if value is not None or name == "loss"}
        )
        now = self._clock()
        self._seconds.append(line.seconds)
        self._progress.step(line, now)
        waited = now - self._printed_at
        if (
            (line.step % self._every == 0 and waited >= self._pause)
            or waited >= self._patience
            or line.step == self.iters
        ):
            self._print_step(line)

    def on_validation(self, step: int, score: Score, best: bool = False) -> None:
        self._progress.doing, self._progress.scored = "", score
        self._progress.lowest = min(self._progress.lowest, score.loss)
        self.metrics.write(figures_of(step, score, best))
        pieces = [Segment(" val", self._place(step), 9), *scores_of(score, self.console.encoding)]
        pieces += [Segment("", "best", 4)] if best else []
        self._print(assembled(fitted(pieces, self._width)))

    def end(self, folder: Path) -> None:
        """Take the display down, and draw the losses: here, and in loss.svg in the folder."""
        self._take_down()
        if self._live and self._waves:
            self._print(self._drawn_waves())
        losses = Losses.of(self.metrics.lines())
        if len(losses.training) + len(losses.validation) > 1:
            self._print(
                Text("\n").append_text(terminal_plot.draw_losses(losses, self.console.width, self._signs))
            )
        try:
            with AtomicFile(folder / "loss.svg") as file:
                file.write(svg_plot.picture(losses, str(folder)).encode())
        except FileError as error:  # the run itself is well, and nothing that it made is lost
            self.warn(str(error))
        if (last := self._progress.last) and last.total_seconds is not None:
            self.log(summary(last, last.total_seconds, self._progress.scored, self.console.encoding))

    def close(self) -> None:
        try:
            self._take_down()
        finally:
            if self.page:
                self.page.close()
            self.metrics.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error and self.metrics.also:
            self.metrics.also.failed = True
        with suppress(FileError) if error else nullcontext():  # what ends the run is told, and no more
            self.close()

    # ---- how it is shown ---------------------------------------------------

    @property
    def _width(self) -> int | None:
        """What a line must fit in, if anything."""
        return self.console.width if self.console.is_terminal else None

    def _safe(self, text: str) -> str:
        return make_printable(text, self.console.encoding)

    def _folded(self, text: Text) -> Text:
        """Broken between words where it is wider than the terminal, which would break it anywhere."""
        if self._width is None or text.cell_len <= self._width:
            return text
        lines = text.wrap(self.console, self._width)
        for line in lines:
            line.rstrip()
        return Text("\n").join(lines)

    def _print(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)

    def _place(self, step: int) -> str:
        return f"{step:>{len(str(self.iters))}}/{self.iters}"

    def _print_step(self, line: StepLine) -> None:
        now = self._clock()
        self._printed, self._printed_at = line.step, now
        left = self._progress.pace.left(now, self.iters)
        norm = (
            ""
            if line.grad_norm is None
            else f"{line.grad_norm:.3f}"
            if line.grad_norm < 100
            else f"{line.grad_norm:.2g}"
        )
        pieces = [
            Segment("step", self._place(line.step), 9),
            Segment("loss", f"{amount(line.loss):>7}", 10, "bold cyan"),
            *rewards_of(line),
            Segment("lr", f"{line.lr:.2e}", 3),
            *([Segment("norm", f"{norm:>6}", 2)] if norm else []),
            *place_of(line),
            Segment("", f"{self._progress.speed:>7,.0f} tok/s", 5),
            *(
                [Segment("", f"{time_of_step(median(self._seconds)):>8}/step", 2)]
                if line.total_seconds is not None
                else []
            ),
            Segment("", f"{duration(now - self._progress.begun):>5}", 4),
            *([] if left is None else [Segment("", f"{duration(left):>5} left", 6)]),
        ]
        self._print(assembled(fitted(pieces, self._width)))
        self._show()

    def _drawn_waves(self) -> Text:
        return terminal_plot.draw_waves(*(self._waves or ((), ())), self.console.width, self._signs)

    def _show(self) -> None:
        if self._live and not self._live.is_started:
            self._live.start()
            self._standing.enter_context(progress_area(self.show_activity))

    def _take_down(self) -> None:
        """The display goes; the line of the last step stays."""
        try:
            if (last := self._progress.last) and last.step != self._printed:
                self._print_step(last)
        finally:
            self._standing.close()
            if self._live:
                self._live.stop()

    def _display(self) -> Group:
        """Drawn by a thread of its own, so it only reads."""
        width, height = self.console.width - 1, self.console.height
        waves = [self._drawn_waves()] if self._waves and height > terminal_plot.WAVE_ROWS + 6 else []
        return Group(
            *waves,
            *self._shown.lines(self._clock(), width, height - len(waves) * (terminal_plot.WAVE_ROWS + 1)),
        )
