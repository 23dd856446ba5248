"""Runs a table of compiled calls with a pool of threads.

One thread leads: it runs the rows in order. A row with several blocks is published; each thread takes the
next block from the row's counter until none is left, and the leader continues when all are done. It does not
wait for threads that have taken no block, so a late thread only costs its help. A published row costs
0.3 microseconds, a row of one block a function call.

The other threads are Python threads that sleep on a lock between steps. During a step, they run compiled code
without the GIL and look for rows, and for the next table. The words of the pool say which table is open and
how many threads are inside; the leader leaves last.

Chance decides which thread runs a block, but not what a block is: results must not depend on the number of
threads.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import ClassVar

import numpy as np

from llamatrain.compiler.cache import INSTALL_HINT, CompilerError, code_cache, find_missing
from llamatrain.compiler.declare import Call, Compilable, LazyCompiled, Routine, inline
from llamatrain.compiler.parallel import precompile
from llamatrain.platform.affinity import current_cpu, move_threads, usable_cpus
from llamatrain.platform.threads import start_thread

LINE = 8  # words in a cache line

# A row: entry, args, items, block | next, done, and padding to a cache line.
ENTRY, ARGS, ITEMS, BLOCK, NEXT, DONE = range(0, 6 * 8, 8)
ROW_BYTES = LINE * 8

# The words of the pool, each in its own cache line: the threads of the open table (0: none is open), its address,
# the published row, the helpers inside.
OPEN, TABLE, ROW, INSIDE = (line * ROW_BYTES for line in range(4))
FINISHED = -1
SPINS_BEFORE_YIELD = 2000  # checks before the processor is yielded
LINGER_SPINS = 10_000  # checks (about 200 microseconds) for which a helper waits for the next table: waking up costs as much


def _atomic(name: str) -> LazyCompiled:
    return LazyCompiled(lambda: getattr(import_module("llamatrain.compiler.atomics"), name))


call_entry, fetch_add, load, store, yield_processor, pause_spinning = map(
    _atomic, ("call_entry", "fetch_add", "load", "store", "yield_processor", "pause_spinning")
)


# ---- compiled --------------------------------------------


@inline
def run_blocks(row, thread):
    """Run blocks of a published row until none is left."""
    items, block = load(row + ITEMS), load(row + BLOCK)
    blocks = (items + block - 1) // block
    while True:
        block_index = fetch_add(row + NEXT, 1)
        if block_index >= blocks:
            break
        call_entry(
            load(row + ENTRY),
            block_index * block,
            min(items, (block_index + 1) * block),
            thread,
            load(row + ARGS),
        )
        fetch_add(row + DONE, 1)


@inline
def spin(spins):
    """Spin for a few microseconds, then let other threads run between checks."""
    if spins < SPINS_BEFORE_YIELD:
        pause_spinning()
    else:
        yield_processor()
    return spins + 1


@Routine
def open_table(table, pool, threads):
    """Open a table for this many threads, so that helpers may enter."""
    store(pool + TABLE, table)
    store(pool + ROW, 0)
    store(pool + OPEN, threads)


@Routine
def run_table(table, rows, pool, alone):
    """Run all rows of a table as the leader, then close it and wait until helpers have left."""
    for index in range(rows):
        row = table + index * ROW_BYTES
        items, block = load(row + ITEMS), load(row + BLOCK)
        blocks = (items + block - 1) // block
        if blocks > 1 and not alone:
            store(row + NEXT, 0)
            store(row + DONE, 0)
            store(pool + ROW, index + 1)
            run_blocks(row, 0)
            spins = 0
            while load(row + DONE) < blocks:
                spins = spin(spins)
        else:
            for lo in range(0, items, block):
                call_entry(load(row + ENTRY), lo, min(items, lo + block), 0, load(row + ARGS))
    if not alone:
        store(pool + OPEN, 0)
        store(pool + ROW, FINISHED)
        spins = 0
        while load(pool + INSIDE):
            spins = spin(spins)


@inline
def help_with_table(pool, thread):
    """Help with the published rows of a table until it is finished."""
    seen, spins, table = 0, 0, load(pool + TABLE)
    while seen != FINISHED:
        row = load(pool + ROW)
        if row == seen:
            spins = spin(spins)
            continue
        seen, spins = row, 0
        if seen > 0:
            run_blocks(table + (seen - 1) * ROW_BYTES, thread)


@Routine
def help_leader(pool, thread):
    """Help with open tables, and wait a moment for the next one before returning.

    A table with fewer threads than the one before has no scratch memory for the last helpers: they stay outside.
    """
    spins = LINGER_SPINS  # a helper that comes too late leaves at once
    while load(pool + OPEN) > thread or spins < LINGER_SPINS:
        fetch_add(pool + INSIDE, 1)
        if load(pool + OPEN) > thread:
            help_with_table(pool, thread)
            spins = 0
        fetch_add(pool + INSIDE, -1)
        while load(pool + OPEN) <= thread and spins < LINGER_SPINS:
            pause_spinning()
            spins += 1


# ---- the team --------------------------------------------


class ThreadPool:
    """The helpers of a leader, as many as were ever needed at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.words = np.zeros(5 * LINE, np.int64)
        self.address, _ = align_to_line(self.words)
        self.wake_locks: list[threading.Lock] = []
        self.helpers: list[threading.Thread] = []
        self.leader_cpu = -1  # the leader's processor, which helpers avoid

    def run(self, table: int, rows: int, threads: int) -> None:
        """Run a table with `threads` threads."""
        with self.lock:
            try:
                self._run_table(table, rows, threads - 1)
            except (
                BaseException
            ):  # from a signal: no helper may stay in an abandoned table, whose memory will be reused
                run_table.native(table, 0, self.address, 0)
                raise

    def _run_table(self, table: int, rows: int, helper_count: int) -> None:
        with suppress(MemoryError):  # no more threads can start: the existing ones do the work
            while len(self.wake_locks) < helper_count:
                self._start_helper()
        if (cpu := current_cpu()) != self.leader_cpu:
            self._move_helpers_off(cpu)
        open_table.native(table, self.address, helper_count + 1)
        for wake_lock in self.wake_locks[:helper_count]:
            if wake_lock.locked():
                wake_lock.release()
        run_table.native(table, rows, self.address, 0)

    def _start_helper(self) -> None:
        wake_lock = threading.Lock()
        number = len(self.wake_locks) + 1
        address = self.address
        help_pool = help_leader.native
        wake_lock.acquire()

        def serve(_: np.ndarray) -> None:
            while True:
                wake_lock.acquire()
                help_pool(address, number)

        # The thread keeps the pool's words alive: if freed while it waits, they could become another pool's, which it would help.
        helper = threading.Thread(target=serve, args=[self.words], name=f"llamatrain-{number}", daemon=True)
        start_thread(helper)
        self.wake_locks.append(wake_lock)
        self.helpers.append(helper)
        self.leader_cpu = -1

    def _move_helpers_off(self, cpu: int) -> None:
        """Keep helpers off the leader's processor.

        The system may wake them there, and then they would wait for each other.
        """
        self.leader_cpu = cpu
        if cpu >= 0:
            move_threads((helper.native_id or 0 for helper in self.helpers), usable_cpus() - {cpu})


class CallTable:
    """A list of calls that is run repeatedly.

    When a table is first run, everything it needs is found or compiled, together with what all other tables
    need that exist by then or are announced, so that a run waits for the compiler once.
    """

    needed_functions: ClassVar[dict[Compilable, None]] = {}
    table_makers: ClassVar[list[Callable[[], object]]] = []

    def __init__(self, calls: Sequence[Call], threads: int) -> None:
        self.calls = list(calls)  # keep the arguments alive
        self.threads = threads if any(c.items > c.block for c in calls) else 1
        self.rows = np.zeros((len(self.calls) + 1, LINE), np.int64)
        self.address = 0
        needed = (
            *(call.entry for call in self.calls),
            run_table,
            *([open_table, help_leader] if self.threads > 1 else ()),
        )
        self.needed_functions.update(dict.fromkeys(needed))

    def __call__(self) -> None:
        """Run all calls, compiling them first if necessary."""
        self.compile()
        if self.threads == 1:
            run_table.native(self.address, len(self.calls), 0, 1)
        else:
            pool.run(self.address, len(self.calls), self.threads)

    def compile(self) -> None:
        """Find or compile all entries, and fill the table."""
        if self.address:
            return
        if self.table_makers and find_missing(self.needed_functions):
            while self.table_makers:
                self.table_makers.pop()()
        precompile(self.needed_functions)
        address, first = align_to_line(self.rows)
        rows = self.rows.reshape(-1)[first : first + len(self.calls) * LINE].reshape(-1, LINE)
        for row, call in zip(rows, self.calls, strict=True):
            row[:4] = call.entry.address, call.words.ctypes.data, call.items, call.block
            if not call.entry.address:
                raise CompilerError(
                    f"no library contains the kernel {call.entry.qualified_name}; {INSTALL_HINT}",
                    code="no-compiler",
                )
        self.needed_functions.clear()
        self.address = address
        code_cache.report()


@contextmanager
def compile_together_with(make: Callable[[], object]) -> Iterator[None]:
    """Call `make` before anything is compiled during the block: it makes tables that will run later."""
    CallTable.table_makers.append(make)
    try:
        yield
    finally:
        with suppress(ValueError):
            CallTable.table_makers.remove(make)


def align_to_line(words: np.ndarray) -> tuple[int, int]:
    """Return the address and index of the first word at the start of a cache line."""
    address = -(-words.ctypes.data // ROW_BYTES) * ROW_BYTES
    return address, (address - words.ctypes.data) // 8


pool = ThreadPool()


def _reset_after_fork() -> None:
    """Start with a new pool: a fork has no helpers, and locks may be held."""
    global pool
    pool = ThreadPool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
