"""How the benches time things, in turns with their peers, and what they say of the machine."""

import argparse
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import numpy as np

from llamatrain.commands.doctor.system import processor_name
from llamatrain.platform import cpu

ROUND = 10e-3  # seconds: shorter things are repeated within a round
QUIET = 0.12  # seconds between two rounds: threads of OpenBLAS spin for 0.1 s after a product, and slow whatever follows
COPIED = 256 << 20


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """A word of the command line that may be given any number of times: with none, argparse holds [] against `choices`."""

    def known(word: str) -> str:
        if word not in names:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(names)}")
        return word

    return known


class Timed:
    """Something to run, and how long it took each time."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run, self.times = run, list[float]()
        run()
        start = time.perf_counter()
        run()
        self.repeats = max(1, round(ROUND / max(1e-7, time.perf_counter() - start)))

    def round(self) -> None:
        time.sleep(QUIET)
        self.run()  # wakes its threads and fills its caches
        start = time.perf_counter()
        for _ in range(self.repeats):
            self.run()
        self.times.append((time.perf_counter() - start) / self.repeats)

    def quartiles(self) -> tuple[float, float, float]:
        """In milliseconds."""
        low, middle, high = np.quantile(self.times, [0.25, 0.5, 0.75]) * 1e3
        return float(low), float(middle), float(high)


def in_turns(*runs: Callable[[], Any] | None, seconds: float, rounds: int = 50) -> list[Timed | None]:
    """Each once a round, until the time is up; at least three rounds."""
    timed = [Timed(run) if run else None for run in runs]
    end = time.perf_counter() + seconds
    for done in range(rounds):
        if done >= 3 and time.perf_counter() > end:
            break
        for each in timed:
            if each:
                each.round()
    return timed


def copy_bandwidth(workers: int) -> float:
    """GB/s, read and written, of copying 256 MB with so many threads."""
    source, target = np.ones(COPIED, np.uint8), np.ones(COPIED, np.uint8)
    parts = list(zip(np.array_split(source, workers), np.array_split(target, workers), strict=True))
    with ThreadPoolExecutor(workers) as pool:
        timed = in_turns(
            lambda: list(pool.map(lambda part: np.copyto(part[1], part[0]), parts)), seconds=1.0
        )[0]
    assert timed
    return 2 * COPIED / timed.quartiles()[1] / 1e6


def torch_if_any(workers: int, wanted: bool) -> Any:
    if not wanted or not find_spec("torch"):
        return None
    import torch

    torch.set_num_threads(workers)
    return torch


def time_once(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def header(args: argparse.Namespace, torch: Any) -> None:
    print(f"{machine(args)}; kernels: {args.kernels}; {versions(torch)}")


def machine(args: argparse.Namespace) -> str:
    has = ", ".join(sorted(cpu.enabled_units())) or "none"
    return f"{processor_name() or cpu.processor().name}, units: {has}; {args.threads} threads"


def versions(torch: Any) -> str:
    from importlib.metadata import version

    return f"numpy {np.__version__}, numba {version('numba')}, torch {torch.__version__ if torch else '-'}"
