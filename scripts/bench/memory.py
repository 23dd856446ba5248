"""Measures the peak memory of training steps, ours and torch's, each in a process of its own."""

import argparse
import json
import os
import subprocess
import sys

from bench.processes import MALLOC, SCRIPTS
from bench.timer import print_header

COLUMNS = (
    "size",
    "precision",
    "remat",
    "peak MB",
    "static MB",
    "arena MB",
    "base MB",
    "torch MB",
    "mode",
    "x torch",
)


def measure_step(program: str, size: str, precision: str, remat: str, threads: int) -> dict[str, int]:
    """Return what `peak_memory` reports about steps, in bytes; nothing if it fails.

    `program` is ours, eager or compiled.
    """
    words = [sys.executable, "-m", "bench.peak_memory", program, size, precision, remat, str(threads)]
    environment = {name: value for name, value in os.environ.items() if name not in MALLOC}
    done = subprocess.run(words, cwd=SCRIPTS, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{' '.join(words[3:])} failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return {}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def bench_memory(args: argparse.Namespace) -> int:
    """Measure steps that hold their gradients, clip, and take an AdamW update.

    Of torch's modes, the one with the least memory counts. `base` is what is resident after imports.
    """
    print_header(args, None)
    print("\n" + "".join(f"{column:>10}" for column in COLUMNS))
    modes = ["eager", "compiled"] if args.compile else ["eager"]
    for name in args.names or ["S", "M"]:
        for precision in args.precision:
            peaks = {}
            for mode in modes if args.torch else []:
                if result := measure_step(mode, name, precision, "none", args.threads):
                    peaks[mode] = result["peak"]
            best = min(peaks, key=lambda mode: peaks[mode]) if peaks else ""
            for remat in ("none", "block"):
                if not (ours := measure_step("ours", name, precision, remat, args.threads)):
                    return 1
                line = "".join(f"{ours[key] / 1e6:10.1f}" for key in ("peak", "static", "arena", "imported"))
                if best:
                    line += f"{peaks[best] / 1e6:10.1f}{best:>10}{ours['peak'] / peaks[best]:10.3f}"
                print(f"{name:>10}{precision:>10}{remat:>10}{line}", flush=True)
    return 0
