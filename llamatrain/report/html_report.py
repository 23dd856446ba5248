"""Writes report.html while a run goes on, and the files that the page is drawn from."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llamatrain.errors import FileError
from llamatrain.io.atomic_write import AtomicFile
from llamatrain.report.html import run_page
from llamatrain.report.metrics import ENCODE, MAX_LINE, Metrics
from llamatrain.report.output_file import write_text
from llamatrain.report.run_data import PAGE, REPORT_FILE, SAMPLES, read_run_data

SLOW = 0.1  # seconds; a faster page is drawn at each save
SHARE = 50  # a slower one at most for 1 / SHARE of the time
DIGITS = 3  # of the values of a wave


class RunPage:
    """The page of a run. An error while drawing or writing is reported once and ends nothing."""

    def __init__(
        self, metrics: Metrics, samples: Metrics, facts: dict[str, Any], warn: Callable[[str], None]
    ) -> None:
        self.metrics, self.samples, self.facts, self.warn = metrics, samples, facts, warn
        self._written: tuple[Path, dict[str, Any]] | None = None
        self._due = 0.0
        self._failed = set[str]()

    @property
    def folder(self) -> Path:
        """The run's folder, which may have moved."""
        return self.metrics.path.parent

    # ---- samples -----------------------------------------------------------

    def add_sample(self, step: int, text: str) -> None:
        """Add a text sample, truncated to the limit of a line."""
        while len(ENCODE(line := {"step": step, "text": text})) > MAX_LINE - 2:
            text = text[: len(text) * 3 // 4]
        self._write_sample(line)

    def add_waves(self, step: int, target: Sequence[float], model: Sequence[float]) -> None:
        """Add the waves of the sine demo."""
        self._write_sample(
            {
                "step": step,
                "target": [round(x, DIGITS) for x in target],
                "model": [round(x, DIGITS) for x in model],
            }
        )

    def _write_sample(self, line: dict[str, Any]) -> None:
        with self._warn_on_errors():
            self.samples.path = self.folder / SAMPLES
            self.samples.write(line)
            self.samples.flush()

    # ---- the page ----------------------------------------------------------

    def draw_if_due(self) -> None:
        """Draw the page again, unless drawing is slow and was done recently."""
        if time.monotonic() >= self._due:
            self._draw()

    def end(self, ended: str) -> None:
        """Draw the page a last time, with the reason of the end."""
        self.facts = {**self.facts, "ended": ended}
        self._draw()

    def close(self) -> None:
        """Close the file of samples."""
        with self._warn_on_errors():
            self.samples.close()

    def _draw(self) -> None:
        start = time.monotonic()
        with self._warn_on_errors():
            self.samples.path = self.folder / SAMPLES
            if self.samples.has_history:
                self.samples.open()
            if self._written != (self.folder, self.facts):
                with AtomicFile(self.folder / REPORT_FILE) as file:
                    file.write(json.dumps(self.facts).encode())
                self._written = self.folder, self.facts
            write_text(self.folder / PAGE, run_page(read_run_data(self.folder)))
        seconds = time.monotonic() - start
        self._due = start + seconds * (SHARE if seconds > SLOW else 0)

    @contextmanager
    def _warn_on_errors(self) -> Iterator[None]:
        try:
            yield
        except (FileError, OSError, ValueError, MemoryError) as error:
            message = (
                str(error)
                if isinstance(error, FileError)
                else f"{self.folder / PAGE}: cannot be drawn: {error}"
            )
            if message not in self._failed:
                self._failed.add(message)
                self.warn(message)
