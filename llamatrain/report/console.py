"""Consoles for output: a terminal that may close, a stream, or nothing."""

import io
import sys

from rich.console import Console

from llamatrain.report.devnull import open_null

WIDTH = 100  # if the output is not a terminal


class QuietConsole(Console):
    """A console that goes silent when its terminal closes: training must not end because of that."""

    def on_broken_pipe(self) -> None:
        """Discard all output from now on."""
        self.quiet = True
        self.file = open_null()

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:  # the terminal was closed
            self.on_broken_pipe()


def stderr_console() -> Console:
    """Return a console for standard error; if that is no terminal, plain lines without color or animation."""
    terminal = sys.stderr.isatty()
    return QuietConsole(
        stderr=True,
        force_terminal=terminal,
        force_jupyter=False,
        width=None if terminal else WIDTH,
        highlight=False,
    )


def null_console() -> Console:
    """Return a console that shows nothing and leaves the terminal alone."""
    return Console(
        file=io.StringIO(),
        quiet=True,
        force_terminal=False,
        force_jupyter=False,
        width=WIDTH,
        highlight=False,
    )
