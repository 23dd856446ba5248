"""Checks style, types and tests, as people and hosted CI do; scripts/check starts it. The arguments go to pytest."""

import os
import shutil
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
# compiles the modules of all tests, which each worker would do for itself in a new checkout
COLLECTION = {"collection": ["pytest", "--collect-only", "-q"]}
# files in their order: by default, those with few tests come last, which are some of the longest
TESTS = ["pytest", "-n", "4", "--dist", "loadfile", "--no-loadscope-reorder"]
MEMORY_FOLDER = Path("/dev/shm")  # where Linux has it, with half of the machine's memory
ROOM = 6 << 30  # more than twice of what all tests have there at a time


def run_quietly(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program and keep its output: several run at once."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def environment_of_tests() -> dict[str, str]:
    """Keep the tests' files in memory if there is room: they flush thousands, which took up to a fifth of the time."""
    roomy = MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free >= ROOM
    return {"TMPDIR": str(MEMORY_FOLDER), **os.environ} if roomy else dict(os.environ)


def main() -> int:
    """Run all checks, and name those that failed."""
    failed, checks = [], STATIC_CHECKS if sys.argv[1:] else STATIC_CHECKS | COLLECTION
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, done in zip(checks, pool.map(run_quietly, checks.values()), strict=True):
            lines = done.stdout.strip().splitlines()
            print(f"{name}: " + "\n".join(lines if done.returncode else lines[-1:]), flush=True)
            failed += [name] if done.returncode else []
    words = [sys.executable, "-m", *TESTS, *sys.argv[1:]]
    if subprocess.run(words, cwd=ROOT, env=environment_of_tests(), check=False).returncode:
        failed.append("pytest")
    if failed:
        print(f"failed: {' '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
