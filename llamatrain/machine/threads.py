"""A list of compiled calls, run by a team of threads inside one parallel region.

One thread leads: it goes through the rows in order. A row of several blocks is published; whoever is there takes the next
block from the row's counter until none is left, and the leader goes on when all are done. Nobody is waited for who has not
taken a block, so a thread that never comes costs nothing but its help. A published row costs 0.3 microseconds where a
parallel call of Numba's costs 7; a row of one block costs a function call.

Which thread does a block is left to chance; what a block is, is not: a result must not depend on the number of threads.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llamatrain.machine.ahead import compile_ahead
from llamatrain.machine.entry import Call, function
from llamatrain.machine.jit import compiler

WORD, VOID = ir.IntType(64), ir.VoidType()
ENTRY_TYPE = ir.FunctionType(VOID, [WORD] * 4)
LINE = 8  # words in a cache line

# ---- instructions that Python has no word for ------------------------------


@intrinsic
def enter(typing_context: Any, address: Any, lo: Any, hi: Any, thread: Any, args: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.call(builder.inttoptr(values[0], ENTRY_TYPE.as_pointer()), list(values[1:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def fetch_add(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(values[0], WORD.as_pointer()), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def load(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], WORD.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def store(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store_atomic(values[1], builder.inttoptr(values[0], WORD.as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def give_way(typing_context: Any) -> Any:
    """Let another thread have the processor: there may be fewer of them than threads."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if sys.platform != "win32":
            builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def pause(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if "x86" in builder.module.triple:
            spin = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VOID, []), "llvm.x86.sse2.pause")
            builder.call(spin, [])
        return context.get_dummy_value()

    return types.void(), generate


# ---- the team --------------------------------------------------------------

# A row: entry, args, items, block | next, done, and padding to a cache line
ENTRY, ARGS, ITEMS, BLOCK, NEXT, DONE = range(6)
LEADERS, ROW = 0, LINE  # of the team's own words: how many came, which row is published
FINISHED = -1
PATIENCE = 2000  # turns of waiting before others are let run


@numba.njit(nogil=True)
def _work(table, row, thread):
    counters = table.ctypes.data + (row * LINE + NEXT) * 8
    items, block = table[row, ITEMS], table[row, BLOCK]
    blocks = (items + block - 1) // block
    while True:
        mine = fetch_add(counters, 1)
        if mine >= blocks:
            break
        enter(table[row, ENTRY], mine * block, min(items, (mine + 1) * block), thread, table[row, ARGS])
        fetch_add(counters + 8, 1)


@numba.njit(nogil=True)
def _wait(turns):
    """Spin for a few microseconds, then let others run between looks."""
    if turns < PATIENCE:
        pause()
    else:
        give_way()
    return turns + 1


@numba.njit(nogil=True)
def _lead(table, published, thread, alone):
    for row in range(table.shape[0]):
        blocks = (table[row, ITEMS] + table[row, BLOCK] - 1) // table[row, BLOCK]
        if blocks > 1 and not alone:
            store(published, row + 1)
            _work(table, row, thread)
            turns = 0
            while load(table.ctypes.data + (row * LINE + DONE) * 8) < blocks:
                turns = _wait(turns)
        else:
            for block in range(blocks):
                lo = block * table[row, BLOCK]
                enter(table[row, ENTRY], lo, min(table[row, ITEMS], lo + table[row, BLOCK]), thread, table[row, ARGS])
    store(published, FINISHED)


@numba.njit(nogil=True)
def _follow(table, published, thread):
    seen, turns = 0, 0
    while seen != FINISHED:
        row = load(published)
        if row == seen:
            turns = _wait(turns)
            continue
        seen, turns = row, 0
        if seen > 0:
            _work(table, seen - 1, thread)


TABLE, TEAM = types.int64[:, ::1], types.int64[::1]


@function(types.void(TABLE, TEAM))
def _alone(table, team):
    _lead(table, team.ctypes.data + ROW * 8, 0, True)


@function(types.void(TABLE, TEAM, types.int64), parallel=True)
def _together(table, team, threads):
    table[:, NEXT] = 0
    table[:, DONE] = 0
    team[:] = 0
    for thread in numba.prange(threads):
        if fetch_add(team.ctypes.data + LEADERS * 8, 1) == 0:
            _lead(table, team.ctypes.data + ROW * 8, thread, False)
        else:
            _follow(table, team.ctypes.data + ROW * 8, thread)


@cache
def runner(threads: int) -> Callable[..., None]:
    """What runs a table, by one thread or by a team."""
    if threads == 1:
        return _alone.compiled
    run = _together.compiled

    def together(table: np.ndarray, team: np.ndarray) -> None:
        numba.set_num_threads(threads)
        run(table, team, threads)

    return together


class Table:
    """A list of calls, ready to run again and again."""

    def __init__(self, calls: Sequence[Call], threads: int) -> None:
        self.calls = list(calls)  # keeps arguments alive
        self.threads = min(threads, numba.config.NUMBA_NUM_THREADS) if any(c.items > c.block for c in calls) else 1
        compile_ahead([*(call.entry for call in self.calls), _alone if self.threads == 1 else _together])
        self.rows = np.zeros((len(self.calls), LINE), np.int64)
        for row, call in zip(self.rows, self.calls, strict=True):
            row[:4] = call.entry.address, call.words.ctypes.data, call.items, call.block
        self.team = np.zeros(2 * LINE, np.int64)
        self.run = runner(self.threads)
        compiler.report()

    def __call__(self) -> None:
        if forked or self.threads == 1:
            runner(1)(self.rows, self.team)
        else:
            with turn:
                self.run(self.rows, self.team)


turn = threading.Lock()  # the workqueue of Numba ends the process where two threads ask it for a team
forked = False  # the thread layer does not outlive a fork: in the child one thread does it all


def _note_fork() -> None:
    global forked
    forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
