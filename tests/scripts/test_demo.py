"""Tests of scripts/demo, with stand-ins for Python and the installer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "scripts" / "demo"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script")


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def demo(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(Path(sys.executable).parent), "/usr/bin", "/bin"))
    env = {"PATH": path, "PYTHON": sys.executable, **environment}
    return subprocess.run(
        [DEMO, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def test_a_new_environment_gets_the_package_and_runs_it_where_the_user_is(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    here = tmp_path / "here"
    here.mkdir()
    command = f"{venv}/bin/llamatrain"
    installer = program(
        tmp_path / "installer",
        f'echo "$@" >> "$0.log"; printf "#!/bin/sh\\npwd; echo ran: \\$@\\n" > "{command}"; chmod +x "{command}"',
    )
    maker = f'case "$1" in -c) ;; -m) mkdir -p "{venv}/bin"; touch "{venv}/pyvenv.cfg"; cp "{installer}" "{venv}/bin/python";; esac'
    done = demo(here, "--iters", "5", PYTHON=str(program(tmp_path / "python", maker)), VENV=str(venv))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(here), "ran: from-scratch --iters 5"]
    assert "pip install" in (venv / "bin" / "python.log").read_text()


def test_an_environment_that_is_there_is_used(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").touch()
    program(tmp_path / "bin" / "llamatrain", "echo $@; exit 3")
    done = demo(tmp_path, VENV=str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "from-scratch\n")
    assert "installing" not in done.stderr


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear all")
    done = demo(tmp_path, VENV=str(tmp_path))
    assert done.returncode == 2
    assert f"{tmp_path} exists and is not a virtual environment" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["letters.txt"]


def test_a_python_that_is_too_old_is_named(tmp_path: Path) -> None:
    done = demo(tmp_path, PYTHON=str(program(tmp_path / "python2", "exit 1")), VENV=str(tmp_path / "venv"))
    assert done.returncode == 1
    assert "python2 is not Python 3.11 or newer" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_error_of_the_installer_ends_it(tmp_path: Path) -> None:
    done = demo(
        tmp_path,
        PYTHON=str(program(tmp_path / "python", "case $1 in -c) ;; *) exit 7;; esac")),
        VENV=str(tmp_path / "venv"),
    )
    assert done.returncode == 7 and "Traceback" not in done.stderr


def test_the_programs_of_an_environment_on_each_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEMO.parent))
    from environment import find_program

    assert find_program(Path("e"), "python") == Path("e/bin/python")
    monkeypatch.setattr(sys, "platform", "win32")
    assert find_program(Path("e"), "python") == Path("e/Scripts/python.exe")
