"""Checks style, types and tests, as people and hosted CI do; scripts/check starts it. The arguments go to pytest."""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = ("linux", "darwin", "win32")  # that the package is for; tests and scripts may need Unix
STATIC_CHECKS = {
    "mypy": ["mypy"],
    **{
        f"mypy-{system}": ["mypy", "--platform", system, "--cache-dir", f".mypy_cache/{system}", "llamatrain"]
        for system in SYSTEMS
        if system != sys.platform
    },
    "ruff-check": ["ruff", "check", "."],
    "ruff-format": ["ruff", "format", "--check", "."],
}
# files in their order: by default, those with few tests come last, which are some of the longest
TESTS = ["pytest", "-n", "4", "--dist", "loadfile", "--no-loadscope-reorder"]


def check_statically(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program that checks the sources, and keep its output: several run at once."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def main() -> int:
    """Run all checks, and name those that failed."""
    failed = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(check_statically, STATIC_CHECKS.values())
        for name, done in zip(STATIC_CHECKS, results, strict=True):
            print(f"{name}: {done.stdout.strip()}", flush=True)
            failed += [name] if done.returncode else []
    if subprocess.run([sys.executable, "-m", *TESTS, *sys.argv[1:]], cwd=ROOT, check=False).returncode:
        failed.append("pytest")
    if failed:
        print(f"failed: {' '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
