"""Checks style, types and tests, as people and hosted CI do; scripts/check starts it. The arguments go to pytest."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = ("linux", "darwin", "win32")  # that the package is for; tests and scripts may need Unix
CHECKS = {
    "ruff-check": ["ruff", "check", "."],
    "ruff-format": ["ruff", "format", "--check", "."],
    "mypy": ["mypy"],
    **{
        f"mypy-{system}": ["mypy", "--platform", system, "llamatrain"]
        for system in SYSTEMS
        if system != sys.platform
    },
    "pytest": ["pytest", "-n", "4", "--dist", "loadfile"],
}


def main() -> int:
    """Run all checks, and name those that failed."""
    failed = [
        name
        for name, words in CHECKS.items()
        if subprocess.run(
            [sys.executable, "-m", *words, *(sys.argv[1:] if name == "pytest" else [])], cwd=ROOT, check=False
        ).returncode
    ]
    if failed:
        print(f"failed: {' '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
