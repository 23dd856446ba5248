"""What a person sees of a run on a terminal of its own, in its colours, and when it goes away."""

import errno
import io
import os
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from llamatrain.distributed import stderr as voice
from llamatrain.platform import terminal
from llamatrain.report.console import QuietConsole, stderr_console
from llamatrain.report.metrics import Metrics
from llamatrain.report.report import Report
from tests.helpers.step_records import line_of

SCENE = """
import sys, time
from pathlib import Path
from llamatrain.report.metrics import Metrics
from llamatrain.report.report import Report
from tests.helpers.step_records import line_of
folder, ending = Path(sys.argv[1]), sys.argv[2]
with Report(Metrics.create(folder / "metrics.jsonl"), iters=200) as report:
    report.print_header([("model", "llama")])
    report.print_waves([0.0, 0.5], [0.5, 0.0])
    for step in range(1, 101):
        report.on_step(line_of(step, 2.0, 1e-3, 0.5, step, 0.01, 100.0))
        time.sleep(0.006)
    report.log("a note")
    print("a warning of another", file=sys.stderr)
    print("data")
    report.on_save(100, "there")
    if ending == "fails":
        raise RuntimeError("it broke")
    report.end(folder)
print("after", file=sys.stderr)
"""


def played(folder: Path, ending: str, terminal: bool = True, **environment: str) -> tuple[str, str]:
    """What the scene writes to stdout, and to a stderr that is a terminal or a pipe."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")
    }
    arguments = [sys.executable, "-c", SCENE, str(folder), ending]
    settings: dict[str, Any] = {
        "env": {**clean, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment}
    }
    if not terminal:
        done = subprocess.run(arguments, check=False, capture_output=True, encoding="utf-8", **settings)
        return done.stdout, done.stderr
    import pty

    ours, theirs = pty.openpty()
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=theirs, stdin=theirs, **settings
    ) as process:
        os.close(theirs)
        shown = bytearray()
        while select.select([ours], [], [], 30)[0]:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # how Linux says that nobody writes any more
                break
        os.close(ours)
        assert process.stdout
        return process.stdout.read().decode(), shown.decode()


needs_terminals = pytest.mark.skipif(sys.platform == "win32", reason="terminals are made otherwise there")


@needs_terminals
@pytest.mark.parametrize("ending", ["fails", "ends"])
def test_the_terminal_is_left_in_order(tmp_path: Path, ending: str) -> None:
    data, shown = played(tmp_path, ending)
    assert data == "data\n"
    assert "━" in shown  # there was a display
    hidden, visible = shown.rfind("\x1b[?25l"), shown.rfind("\x1b[?25h")
    assert 0 < hidden < visible
    assert visible < shown.index("it broke" if ending == "fails" else "after")
    assert shown[visible:].count("\x1b[2K") == 12  # nothing of it stays
    assert "saved at step" not in shown
    assert "a warning of another\r\n" in shown
    assert ("loss by step" in shown[visible:]) == (ending == "ends")


@needs_terminals
def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    _, shown = played(tmp_path, "ends", TERM="dumb")
    assert "\x1b" not in shown
    assert "step   1/200  loss  2.0000" in shown
    assert "saved at step 100: there\r\n" in shown


@needs_terminals
def test_no_color_is_heeded(tmp_path: Path) -> None:
    _, shown = played(tmp_path, "ends", NO_COLOR="1")
    assert "\x1b[?25h" in shown
    assert not re.search(r"\x1b\[[\d;]*3\dm", shown)


def test_a_pipe_gets_plain_lines_even_where_colours_are_asked_for(tmp_path: Path) -> None:
    data, shown = played(
        tmp_path, "ends", terminal=False, FORCE_COLOR="1", TTY_COMPATIBLE="1", TTY_INTERACTIVE="1"
    )
    assert data == "data\n"
    assert "\x1b" not in shown
    assert "a note\n" in shown
    assert shown.endswith("after\n")


class Closed(io.TextIOBase):
    """As a terminal is that is no more."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_what_nobody_can_read_any_more_ends_no_run(tmp_path: Path) -> None:
    console = QuietConsole(file=Closed())  # type: ignore[arg-type]
    with Report(Metrics.create(tmp_path / "metrics.jsonl"), iters=2, every=1, console=console) as report:
        for step in (1, 2):
            report.on_step(line_of(step, 2.0, 1e-3, 0.5, step, 1.0, 1.0))
    assert console.quiet and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


class Coloured(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("said", "coloured", "moves"), [({}, 1, 1), ({"NO_COLOR": "1"}, 0, 1), ({"TERM": "dumb"}, 0, 0)]
)
def test_no_colour_where_none_is_wished(
    said: dict[str, str], coloured: bool, moves: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm-256color"} | said).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", shown := Coloured())
    with Report(
        Metrics.create(tmp_path / "metrics.jsonl"), iters=2, every=1, console=stderr_console()
    ) as report:
        report.print_header([("model", "llama")])
        report.warn("beware")
        report.on_step(line_of(1, 2.0, 1e-3, 0.5, 1, 1.0, 1.0))
    codes = re.findall(r"\x1b\[([\d;]*)m", shown.getvalue())
    assert (
        any(part in map(str, [*range(30, 50), *range(90, 98)]) for code in codes for part in code.split(";"))
        == coloured
    )
    assert (
        bool(re.search(r"\x1b\[[\d;?]*[A-KlhH]", shown.getvalue())) == moves and "beware" in shown.getvalue()
    )


def test_what_is_counted_meanwhile_stands_in_the_display(capsys: pytest.CaptureFixture[str]) -> None:
    """A bar of its own would be drawn over, and draw over it."""
    with terminal.show_log():
        told = list[str]()
        with (
            terminal.progress_area(told.append),
            terminal.progress_bar("compiling kernels", total=2, unit="kernel") as bar,
        ):
            bar.update()
        assert told == ["compiling kernels: 0 of 2", "compiling kernels: 1 of 2", ""]
        assert (
            not isinstance(terminal.progress_bar("merging", total=1), terminal.CountedProgress)
            and not capsys.readouterr().err
        )


LONG = "the run goes on with what it began with, and --resume will need that; nothing else is to be done about it here"


def test_long_lines_break_between_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whoever says them; what is read by programs stays whole."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", stream := Coloured())
    with terminal.show_log():
        terminal.log_line(LONG)
    voice.print_error(LONG)
    console = Console(file=stream, width=40, height=24, force_terminal=True, color_system=None)
    with Report(Metrics(tmp_path / "metrics.jsonl"), iters=10, console=console) as report:
        report.log(LONG)
        report.warn(LONG)
        lines = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stream.getvalue()).splitlines()
    words = {word for line in lines for word in line.split()}
    assert max(map(len, lines)) <= 40 and words == {*LONG.split(), "error:", "warning:"}
    assert " ".join(lines).split().count("began") == 4
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with terminal.show_log():
        terminal.log_line(LONG)
    assert stream.getvalue() == LONG + "\n"


def screen_of(drawn: str) -> list[str]:
    """The lines of a terminal after this was written to it."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", drawn):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            rows += [""] * (row >= len(rows))
        elif part == "\x1b[A":
            row = max(0, row - 1)
        elif part == "\x1b[K":
            rows[row] = rows[row][:column]
        elif not part.startswith("\x1b"):
            rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in rows]


def test_a_bar_within_a_bar_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where kernels are compiled while adapters are merged."""
    monkeypatch.setattr(sys, "stderr", stream := Coloured())
    monkeypatch.setattr(terminal, "BAR_DELAY", 0.0, raising=False)
    with terminal.show_log(), terminal.progress_bar("merging", total=100, unit="B") as merging:
        merging.update(10)
        terminal.log_line("compiling kernels for this machine, once")
        with terminal.progress_bar("compiling kernels", total=2, unit="kernel") as compiling:
            for count in (1, 2):
                compiling.update()
                said, drawn = screen_of(stream.getvalue())
                assert said == "compiling kernels for this machine, once"
                assert drawn.startswith(f"compiling kernels: {count} of 2") and "10/100" in drawn
        terminal.log_line("compiled 2 kernels")
        _, said, drawn = screen_of(stream.getvalue())
        assert said == "compiled 2 kernels" and drawn.startswith("merging: ")
        merging.update(20)
    assert screen_of(stream.getvalue())[-1] == "" and merging.n == 30


def test_a_bar_that_is_soon_done_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Coloured())
    with (
        terminal.show_log(),
        terminal.progress_bar("merging", total=2) as merging,
        terminal.progress_bar("compiling", total=1) as compiling,
    ):
        compiling.update()
        terminal.log_line("a word")
        merging.update()
    assert stream.getvalue() == "a word\n"


def test_a_display_that_stands_is_told_of_and_gone_with_the_report(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100, height=24, force_terminal=True, color_system=None)
    with Report(Metrics(tmp_path / "metrics.jsonl"), iters=10, console=console) as report:
        report.print_header([])
        with terminal.progress_bar("compiling kernels", total=31) as bar:
            bar.update(12)
            assert report._live
            report._live.refresh()
        assert isinstance(bar, terminal.CountedProgress)
    assert "compiling kernels: 12 of 31" in stream.getvalue()
    assert not isinstance(terminal.progress_bar("merging", total=1), terminal.CountedProgress)


def test_work_that_goes_on_is_told_in_a_log_every_so_often(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """300,000 rows were tokenized for 97 s without a line."""
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with (
        terminal.show_log(),
        terminal.progress_bar("tokenizing a.txt", total=300_000_000, unit="B", unit_scale=True) as told,
    ):
        for _ in range(100):
            now[0] += 1
            told.update(3_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert (
        lines[0] == "tokenizing a.txt: 45.0 MB of 300.0 MB, after 15 s"
        and len(lines) == 6
        and told.n == 300_000_000
    )
    with (
        terminal.show_log(),
        terminal.progress_bar("tokenizing a.gz", total=None, unit="B", unit_scale=True) as told,
    ):
        now[0] += 14
        told.update(1)
        now[0] += 2
        told.update(2_000_000)
    assert capsys.readouterr().err == "tokenizing a.gz: 2.0 MB, after 16 s\n"
    with terminal.progress_bar(
        "tokenizing a.gz", total=None, unit="B", unit_scale=True
    ) as told:  # nobody asked
        now[0] += 20
        told.update(1)
    assert not capsys.readouterr().err
