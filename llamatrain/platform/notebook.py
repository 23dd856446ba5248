"""Shows HTML in a notebook of Jupyter: below the cell that runs, and again when it changes."""

import sys
import time
from html import escape
from typing import Any

INTERVAL = 1.0  # seconds between two drawings


def in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook, whose output can show HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class NotebookArea:
    """A piece of HTML below a cell, which is drawn again at most once a second."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._next = 0.0

    @property
    def is_due(self) -> bool:
        """True if the last drawing is old enough for another one."""
        return time.monotonic() >= self._next

    def show(self, html: str) -> None:
        """Draw this HTML in place of what is there."""
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(html), display_id=True)
        else:
            self._handle.update(HTML(html))
        self._next = time.monotonic() + INTERVAL


class NotebookBar:
    """A progress bar below a cell."""

    def __init__(
        self, title: str, total: int | None = None, unit: str = "", unit_scale: bool = False
    ) -> None:
        self.title, self.total, self.unit, self.n = title, total, unit, 0
        self._divisor = 1e6 if unit_scale else 1.0
        self._area = NotebookArea()
        self._start = time.monotonic()

    def __enter__(self) -> "NotebookBar":
        self._area.show(self._html())
        return self

    def update(self, count: int = 1) -> None:
        """Count and redraw."""
        self.n += count
        if self._area.is_due:
            self._area.show(self._html())

    def _html(self) -> str:
        numbers = [f"{number / self._divisor:,.0f}" for number in (self.n, self.total) if number is not None]
        scale = " M" if self._divisor > 1 else ""
        text = (
            f"{self.title}: {' of '.join(numbers)}{scale}{self.unit}, {time.monotonic() - self._start:.0f} s"
        )
        return bar_html(text, self.n, self.total)

    def __exit__(self, *how: object) -> None:
        self._area.show(self._html())


def bar_html(text: str, done: int, total: int | None) -> str:
    """Return a bar with a text; without a total it only shows that something goes on."""
    share = f' value="{min(done, total)}" max="{max(total, 1)}"' if total is not None else ""
    return f'<div><progress{share} style="width: 20em"></progress> {escape(text)}</div>'
