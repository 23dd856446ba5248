"""The command itself: how fast it answers, and how it fails."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llamatrain import __version__
from llamatrain.cli import main as cli
from llamatrain.errors import LlamatrainError, UsageError

HELP = "from llamatrain.cli.main import main; import sys; sys.argv = ['llamatrain', '--help']; main()"


def best_of(runs: int, code: str) -> float:
    """Seconds that a Python of its own needs for `code`, at best."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return min(times)


def test_the_package_is_imported_fast() -> None:
    assert best_of(5, "import llamatrain") - best_of(5, "pass") < 0.15


def test_help_comes_fast() -> None:
    assert best_of(5, HELP) < 0.4


def test_help_loads_nothing_heavy() -> None:
    heavy = "assert not {'numpy', 'numba', 'gguf', 'torch'} & sys.modules.keys(), sorted(sys.modules)"
    code = f"import sys\ntry:\n    exec({HELP!r})\nexcept SystemExit:\n    {heavy}"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["llamatrain", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    return exit_info.value.code


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"llamatrain {__version__}\n"


def test_without_arguments_it_says_what_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch) == 0
    assert "Usage: llamatrain" in capsys.readouterr().out


def test_an_unknown_option_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--verzion") == 2
    assert "--verzion" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (LlamatrainError("no room"), 1, "error: no room"),
        (UsageError("no sense"), 2, "error: no sense"),
        (LlamatrainError("\x1b[2J\nx"), 1, r"error: \x1b[2J\nx"),
        (OSError(28, "No space left on device", "a.bin"), 1, "error: a.bin: No space left on device"),
        (OSError(5, "Input/output error"), 1, "error: Input/output error"),
        (OSError("told nothing"), 1, "error: told nothing"),
        (MemoryError(), 1, "error: not enough memory; a smaller model, --ctx or --batch takes less"),
        (MemoryError("9 GiB"), 1, "error: not enough memory (9 GiB); a smaller model, --ctx or --batch takes less"),
    ],
)
def test_an_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int, line: str
) -> None:
    def fail(program: object, context: object) -> None:
        raise error

    monkeypatch.setattr(cli.Program, "invoke", fail)
    assert run(monkeypatch) == code
    assert capsys.readouterr().err == line + "\n"


def test_an_interrupt_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(program: object, context: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Program, "invoke", stop)
    assert run(monkeypatch) == 130
    assert not capsys.readouterr().err.strip()


@pytest.mark.skipif(os.name == "nt", reason="streams are others there")
@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_streams_that_are_closed(closed: str) -> None:
    """Nothing is put into the place of another, nothing fails, and nothing has to be closed at the end."""
    code = (
        "import sys; from llamatrain.cli import main as cli; from llamatrain.errors import LlamatrainError\n"
        "def all(program, context):\n"
        "    print(sys.stdin.isatty(), sys.stdin.buffer.read(1), file=sys.stderr); sys.stdout.buffer.write(b'out')\n"
        "    raise LlamatrainError('failed')\n"
        "cli.Program.invoke = all; sys.argv = ['llamatrain']; cli.main()"
    )
    words = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-W", "error", "-X", "dev", "-c", code]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ("" if "1>" in closed else "out")
    assert done.stderr == ("" if "2>" in closed else "False b''\nerror: failed\n")


@pytest.mark.skipif(os.name == "nt", reason="pipes break otherwise there")
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_leaves_is_no_error(tmp_path: Path, lines: int) -> None:
    """Few lines meet the closed pipe when they are flushed, many when they are printed."""
    printing = f"cli.Program.invoke = lambda program, context: print('line\\n' * {lines})"
    code = f"import sys\nfrom llamatrain.cli import main as cli\nsys.argv = ['llamatrain']\n{printing}\ncli.main()"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
