"""`llamatrain ui`: a page in the browser to train, watch, talk and export."""

import signal
import sys
import threading
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from llamatrain.cli.typer_app import Command, make_app, with_options
from llamatrain.config.options import Option, Options, build
from llamatrain.errors import FileError
from llamatrain.platform.exit import exit_on_signal, exit_signals
from llamatrain.platform.terminal import log_line

if TYPE_CHECKING:
    from llamatrain.ui.server import Server

command = make_app()


@dataclass(frozen=True)
class UiOptions(Options, panel="The page"):
    """Options of `ui`."""

    port: Annotated[
        int,
        Option("Port of this machine to listen on; 0: one that is free.", unit="PORT", least=0, most=65535),
    ] = 0
    folder: Annotated[
        Path, Option("Folder whose files and runs are shown; relative paths begin there.", unit="FOLDER")
    ] = Path()
    browser: Annotated[bool, Option("Open the page in a browser.")] = True


@command.command(cls=Command)
@with_options(UiOptions)
def ui(**overrides: Any) -> None:
    """Open a page in the browser: choose a model and data, train, watch, talk to the result, export it.

    The server listens on this machine only (127.0.0.1), and answers only a browser that has the token in the
    printed address. Ctrl-C ends it; a run that goes on is saved first.
    """
    from llamatrain.ui.server import Server

    options = build(UiOptions, overrides)
    if not options.folder.is_dir():
        raise FileError(f"{options.folder}: no such folder; give --folder a folder", code="no-such-folder")
    with chdir(options.folder), Server(Path.cwd(), options.port) as server:
        serve(server, options.browser)


def serve(server: "Server", open_browser: bool) -> None:
    """Answer requests until a signal comes, and save the run that goes on."""
    from llamatrain.platform.threads import start_thread

    ended = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        """End the server; the second time, exit at once, as the run does."""
        if ended.is_set():
            server.app.runs.close()
            exit_on_signal(number)
        ended.set()

    for number in exit_signals():
        signal.signal(number, on_signal)
    start_thread(threading.Thread(target=server.serve_forever, daemon=True))
    log_line(f"open {server.guard.url} in a browser; Ctrl-C ends the server")
    if open_browser:
        show(server.guard.url)
    while not ended.wait(3600):
        pass
    server.shutdown()
    for child in server.app.runs.close():
        log_line(f"saving the run in {child.folder}; resume it with --resume {child.folder}")
        child.process.wait()


def show(url: str) -> None:
    """Open a page in the user's browser, if there is a desktop."""
    import os
    import webbrowser

    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(url)
