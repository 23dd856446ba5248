"""Shows how evenly steps can be divided among more threads than this machine has: `bench.py balance`.

A step is planned for a number of threads, and one thread times each of its calls. Then the calls are handed out in
blocks, as the thread pool does: a thread that is free takes the next block, and all wait at the end of a call. The
model leaves out what threads compete for (memory, caches, the counters of the pool).
"""

import argparse
import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bench.llama_step import LlamaStep
from bench.random_models import M, S, Size
from bench.shares import ADAPTER
from bench.timer import choice_of, print_header
from llamatrain.compiler.thread_pool import CallTable

CASES: dict[str, Size] = {"S": S, "M": M, "adapter of 1.1b": ADAPTER}
THREADS = [2, 4, 8, 16, 32, 64]
SLOW = 0.5  # the speed of every second core of a hybrid processor
STEPS = 3


@dataclass
class TimedCall:
    """A call of a step: its blocks, and the seconds that one thread takes for all of them."""

    blocks: int
    seconds: float

    def divide(self, speeds: Sequence[float]) -> float:
        """Return the seconds until the last block is done, if threads with these speeds take one after the other."""
        share = self.seconds / self.blocks
        free = [(share / speed, share / speed) for speed in sorted(speeds, reverse=True)[: self.blocks]]
        heapq.heapify(free)  # by the time at which a thread would have done its next block
        end = 0.0
        for _ in range(self.blocks):
            done, block = heapq.heappop(free)
            end = max(end, done)
            heapq.heappush(free, (done + block, block))
        return end


def time_calls(size: Size, precision: str, threads: int) -> list[TimedCall]:
    """Plan a step for some threads, run it with one, and return its calls with their shortest times."""
    step = LlamaStep(size, precision=precision, threads=threads)
    parts = [part for program in step.programs for segment in program.segments for part in segment.batches]
    tables = [CallTable([call], 1) for part in parts if isinstance(part, CallTable) for call in part.calls]
    best = [float("inf")] * len(tables)
    step()
    for _ in range(STEPS):
        for number, table in enumerate(tables):
            start = time.perf_counter()
            table()
            best[number] = min(best[number], time.perf_counter() - start)
    calls = (table.calls[0] for table in tables)
    return [
        TimedCall(max(1, -(-call.items // call.block)), seconds)
        for call, seconds in zip(calls, best, strict=True)
    ]


def format_row(calls: list[TimedCall], threads: int) -> str:
    """Return a line of the table."""
    alone = sum(call.seconds for call in calls)
    shared = [call for call in calls if call.blocks > 1]
    few = sum(call.seconds for call in calls if call.blocks < threads)
    kinds = ([1.0] * threads, [1.0, SLOW] * (threads // 2))
    reached = [alone / sum(map(partial(TimedCall.divide, speeds=each), calls)) / sum(each) for each in kinds]
    return f"{threads:8} {len(shared):9} {few / alone:14.1%} {reached[0]:12.0%} {reached[1]:12.0%}"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `balance`."""
    command.add_argument("names", nargs="*", type=choice_of(CASES), default=[], help="only these")


def bench_balance(args: argparse.Namespace) -> int:
    """Print for each step how many calls are shared, and the share of all threads that is used."""
    print_header(args, None)
    for name in args.names or CASES:
        for precision in args.precision:
            size = CASES[name]
            print(f"\n{name}, {size.batch * size.ctx:,} tokens, {precision}")
            print(
                f"{'threads':>8} {'barriers':>9} {'too few blocks':>14} {'equal cores':>12} {'half of half':>12}"
            )
            for threads in THREADS:
                print(format_row(time_calls(size, precision, threads), threads), flush=True)
    return 0
