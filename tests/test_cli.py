"""The command itself: how fast it answers, and how it fails."""

import subprocess
import sys
import time

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


@pytest.mark.parametrize(("error", "code"), [(LlamatrainError("no room"), 1), (UsageError("no sense"), 2)])
def test_an_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: LlamatrainError, code: int
) -> None:
    def fail(prog_name: str) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert run(monkeypatch) == code
    assert capsys.readouterr().err == f"error: {error}\n"
