"""Runs the command and other programs, each in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

PEERS = Path(__file__).resolve().parent / "peers"
SCRIPTS = Path(__file__).resolve().parent.parent
ROOT = SCRIPTS.parent
COMMAND = [sys.executable, "-c", "from llamatrain.cli.main import main; main()"]
MEASURED_PROGRAM = r"""
import re, sys
from llamatrain.cli.main import main
try:
    main()
finally:
    print("VmHWM", re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1], file=sys.stderr)
"""
# torch allocates in each step; without these settings, the system's page allocation would be timed
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(256 << 20)}


def run_program(words: Iterable[object], folder: Path | None = None) -> str:
    """Run a program and return its standard output; exit if it fails."""
    command = list(map(str, words))
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-1000:]}")
    return done.stdout


def run_command(*words: object) -> str:
    """Run llamatrain and return its standard output."""
    return run_program([*COMMAND, *words], ROOT)


def make_random_model(path: Path, *options: object) -> None:
    """Write a model with random weights; `options` are those of scripts/random_model.py."""
    run_program([sys.executable, SCRIPTS / "random_model.py", path, *options])


def run_measured(*words: object) -> int:
    """Run llamatrain and return its peak resident memory in bytes, pages of files included.

    The process reports its peak itself: what the system counts for a child begins with its parent's memory.
    """
    command = [sys.executable, "-c", MEASURED_PROGRAM, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    peak = re.search(r"VmHWM (\d+)", done.stderr)
    if done.returncode or not peak:
        raise SystemExit(f"llamatrain {' '.join(command[3:])} failed: {done.stderr[-1000:]}")
    return int(peak[1]) * 1024
