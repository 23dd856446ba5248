"""report.html of a run that goes on, and the files that it is drawn from beside the others."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llamatrain.errors import FileError
from llamatrain.io.atomic_write import AtomicFile
from llamatrain.report.html import page
from llamatrain.report.metrics import ENCODE, LONGEST, Metrics
from llamatrain.report.output_file import put
from llamatrain.report.run_data import PAGE, SAMPLES, TOLD, kept_in

LONG = 0.1  # seconds that may be drawn at each save
SHARE = 50  # what takes longer is drawn once in so many times as long
DIGITS = 3  # of a wave


class RunPage:
    """Whatever cannot be drawn or written is told once, and ends nothing."""

    def __init__(
        self, metrics: Metrics, samples: Metrics, told: dict[str, Any], warn: Callable[[str], None]
    ) -> None:
        self.metrics, self.samples, self.told, self.warn = metrics, samples, told, warn
        self._written: tuple[Path, dict[str, Any]] | None = None
        self._due = 0.0
        self._failed = set[str]()

    @property
    def folder(self) -> Path:
        """As it is called by now."""
        return self.metrics.path.parent

    # ---- samples -----------------------------------------------------------

    def sample(self, step: int, text: str) -> None:
        """Its beginning, where it is longer than a line may be."""
        while len(ENCODE(line := {"step": step, "text": text})) > LONGEST - 2:
            text = text[: len(text) * 3 // 4]
        self._keep(line)

    def wave(self, step: int, target: Sequence[float], model: Sequence[float]) -> None:
        self._keep(
            {
                "step": step,
                "target": [round(x, DIGITS) for x in target],
                "model": [round(x, DIGITS) for x in model],
            }
        )

    def _keep(self, line: dict[str, Any]) -> None:
        with self._guarded():
            self.samples.path = self.folder / SAMPLES
            self.samples.write(line)
            self.samples.flush()

    # ---- the page ----------------------------------------------------------

    def saved(self) -> None:
        """Drawn again, unless that takes so long that it was done often enough."""
        if time.monotonic() >= self._due:
            self._draw()

    def end(self, ended: str) -> None:
        self.told = {**self.told, "ended": ended}
        self._draw()

    def close(self) -> None:
        with self._guarded():
            self.samples.close()

    def _draw(self) -> None:
        begun = time.monotonic()
        with self._guarded():
            self.samples.path = self.folder / SAMPLES
            if self.samples.goes_on:
                self.samples.begin()
            if self._written != (self.folder, self.told):
                with AtomicFile(self.folder / TOLD) as file:
                    file.write(json.dumps(self.told).encode())
                self._written = self.folder, self.told
            put(self.folder / PAGE, page(kept_in(self.folder)))
        taken = time.monotonic() - begun
        self._due = begun + taken * (SHARE if taken > LONG else 0)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (FileError, OSError, ValueError, MemoryError) as error:
            told = (
                str(error)
                if isinstance(error, FileError)
                else f"{self.folder / PAGE}: cannot be drawn: {error}"
            )
            if told not in self._failed:
                self._failed.add(told)
                self.warn(told)
