"""Where words go: a terminal that may go away, a stream, or nowhere."""

import io
import sys

from rich.console import Console

from llamatrain.report.devnull import open_null

WIDTH = 100  # where the output is no terminal


class QuietConsole(Console):
    """A console that goes silent when nobody reads it any more: a training is not to end for that."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        self.file = open_null()

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:  # a terminal that was closed
            self.on_broken_pipe()


def stderr_console() -> Console:
    """The terminal as it is, or a stream for plain lines: no colours and no movements in it, whatever the environment says."""
    terminal = sys.stderr.isatty()
    return QuietConsole(
        stderr=True,
        force_terminal=terminal,
        force_jupyter=False,
        width=None if terminal else WIDTH,
        highlight=False,
    )


def null_console() -> Console:
    """Nothing is shown, and the terminal left alone."""
    return Console(
        file=io.StringIO(),
        quiet=True,
        force_terminal=False,
        force_jupyter=False,
        width=WIDTH,
        highlight=False,
    )
