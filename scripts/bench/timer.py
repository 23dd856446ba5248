"""Times functions in turns with their peers, and describes the machine."""

import argparse
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np

from llamatrain.commands.doctor.system import processor_name
from llamatrain.platform import cpu

ROUND_SECONDS = 10e-3  # shorter functions are repeated within a round
PAUSE_SECONDS = 0.12  # between two rounds: OpenBLAS's threads spin for 0.1 s after a product and slow others
COPIED_BYTES = 256 << 20


def choice_of(names: Collection[str]) -> Callable[[str], str]:
    """Return an argparse type that accepts one of the names.

    Use it in place of `choices` with nargs="*", where argparse would compare an empty list to the choices.
    """

    def parse(word: str) -> str:
        if word not in names:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(names)}")
        return word

    return parse


class TimedRun:
    """A function to time, and the seconds that it took in each round."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run
        self.times = list[float]()
        run()
        start = time.perf_counter()
        run()
        self.repeats = max(1, round(ROUND_SECONDS / max(1e-7, time.perf_counter() - start)))

    def run_round(self) -> None:
        """Run the function for about a round's length and note the mean time."""
        time.sleep(PAUSE_SECONDS)
        self.run()  # wakes its threads and fills its caches
        start = time.perf_counter()
        for _ in range(self.repeats):
            self.run()
        self.times.append((time.perf_counter() - start) / self.repeats)

    def quartiles(self) -> tuple[float, float, float]:
        """Return the quartiles of the times in milliseconds."""
        low, middle, high = np.quantile(self.times, [0.25, 0.5, 0.75]) * 1e3
        return float(low), float(middle), float(high)


def time_in_turns(
    *runs: Callable[[], Any] | None, seconds: float, max_rounds: int = 50
) -> list[TimedRun | None]:
    """Run each function once a round until the time is up, at least three rounds."""
    timed = [TimedRun(run) if run else None for run in runs]
    end = time.perf_counter() + seconds
    for count in range(max_rounds):
        if count >= 3 and time.perf_counter() > end:
            break
        for run in timed:
            if run:
                run.run_round()
    return timed


def measure_copy_bandwidth(threads: int) -> float:
    """Return the GB/s, read and written, of copying 256 MB."""
    source = np.ones(COPIED_BYTES, np.uint8)
    target = np.ones(COPIED_BYTES, np.uint8)
    parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        run = time_in_turns(
            lambda: list(pool.map(lambda part: np.copyto(part[1], part[0]), parts)), seconds=1.0
        )[0]
    assert run
    return 2 * COPIED_BYTES / run.quartiles()[1] / 1e6


def import_torch(threads: int, wanted: bool) -> Any:
    """Return the torch module with this number of threads; None if it is not wanted or not installed."""
    if not wanted or not find_spec("torch"):
        return None
    import torch

    torch.set_num_threads(threads)
    return torch


def time_once(run: Callable[[], Any]) -> float:
    """Return the seconds of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def print_header(args: argparse.Namespace, torch: Any) -> None:
    """Print the machine, the kernels and the versions of libraries."""
    print(f"{describe_machine(args.threads)}; kernels: {args.kernels}; {describe_versions(torch)}")


def describe_machine(threads: int) -> str:
    """Return the processor, its vector units and the number of threads as text."""
    units = ", ".join(sorted(cpu.enabled_units())) or "none"
    return f"{processor_name() or cpu.processor().name}, units: {units}; {threads} threads"


def describe_versions(torch: Any) -> str:
    """Return the versions of libraries as text."""
    torch_version = torch.__version__ if torch else "-"
    return f"numpy {np.__version__}, numba {version('numba')}, torch {torch_version}"
