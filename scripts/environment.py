"""Creates an environment and installs the package, on every system.

    python scripts/environment.py demo [OPTIONS OF from-scratch]    and trains on the built-in sine wave
    python scripts/environment.py test [ARGUMENTS OF pytest]        and runs scripts/check; the environment is new

The environment is .venv, or the folder named by VENV; PYTHON names another interpreter than this one.
`scripts/demo` and `scripts/test` start it.
"""

from __future__ import annotations  # an older Python shall say that it is too old

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)


def fail(message: str, code: int) -> None:
    """Print an error and exit."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def check_python(python: str, what: str) -> None:
    """Exit if an interpreter cannot be started or is too old."""
    program = f"import sys; sys.exit(sys.version_info < {OLDEST})"
    try:
        is_old = subprocess.run([python, "-c", program], stderr=subprocess.DEVNULL, check=False).returncode
    except OSError:
        is_old = 1
    if is_old:
        wanted = ".".join(map(str, OLDEST))
        fail(
            f"{python} is not Python {wanted} or newer; set PYTHON, as in PYTHON=/path/to/python{wanted} {what}",
            1,
        )


def find_program(venv: Path, name: str) -> Path:
    """Return the path of a program in an environment."""
    return venv / "Scripts" / f"{name}.exe" if sys.platform == "win32" else venv / "bin" / name


def install(python: str, venv: Path, package: str) -> None:
    """Create an environment, in place of another one, and install the package."""
    subprocess.run([python, "-m", "venv", "--clear", str(venv)], check=True)
    words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--editable", package]
    subprocess.run([str(find_program(venv, "python")), *words], cwd=ROOT, check=True)


def wait_for(words: list[str], **settings: str | Path | dict[str, str]) -> int:
    """Run a program to its end, also after Ctrl-C, which it gets itself; return its exit code."""
    with subprocess.Popen(words, **settings) as process:  # type: ignore[call-overload]
        signal.signal(signal.SIGINT, lambda number, frame: None)
        return int(process.wait())


def run_demo(python: str, venv: Path, arguments: list[str]) -> int:
    """Train on the sine wave, in an environment that is made if it does not exist."""
    if venv.exists() and not (venv / "pyvenv.cfg").is_file():
        fail(
            f"{venv} exists and is not a virtual environment; set VENV, as in VENV=FOLDER scripts/demo",
            2,
        )
    program = find_program(venv, "llamatrain")
    if not program.exists():
        print(f"creating {venv} and installing llamatrain into it", file=sys.stderr)
        install(python, venv, ".[compile]")
    code = wait_for([str(program), "from-scratch", *arguments])
    if code == 0:
        activate = (
            find_program(venv, "Activate").with_suffix(".ps1")
            if sys.platform == "win32"
            else f". {shlex.quote(str(venv / 'bin' / 'activate'))}"
        )
        print(f"more: {program} --help; to use the command by its name: {activate}", file=sys.stderr)
    return code


def run_tests(python: str, venv: Path, arguments: list[str]) -> int:
    """Run all checks in a new environment."""
    if venv.is_dir() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").is_file():
        fail(f"{venv} is not empty and is not a virtual environment; set VENV to another folder", 2)
    install(python, venv, ".[compile,mpi,test]")
    inner = str(find_program(venv, "python"))
    return wait_for([inner, str(ROOT / "scripts" / "check.py"), *arguments])


def main() -> int:
    """Run what the first word names."""
    tasks = {"demo": run_demo, "test": run_tests}
    what, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if what not in tasks:
        fail(f"the first word must be {' or '.join(tasks)} (got {what!r})", 2)
    python = os.environ.get("PYTHON") or sys.executable
    check_python(python, f"scripts/{what}")
    venv = ROOT / (os.environ.get("VENV") or ".venv")
    try:
        return tasks[what](python, venv, arguments)
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
