"""A list of compiled calls, run by a team of threads.

One thread leads: it goes through the rows in order. A row of several blocks is published; whoever is there takes the next
block from the row's counter until none is left, and the leader goes on when all are done. Nobody is waited for who has not
taken a block, so a thread that comes late, or never, costs nothing but its help. A published row costs 0.3 microseconds; a
row of one block costs a function call.

The others are threads of Python that sleep on a lock between steps. Within one they are in compiled code, without Python's
lock, and look for rows, and for the next table of the step. The team's words say which table is open, and how many are inside:
the leader leaves last.

Which thread does a block is left to chance; what a block is, is not: a result must not depend on the number of threads.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import ClassVar

import numpy as np

from llamatrain.compiler.cache import HELP, CompilerError, code, missing
from llamatrain.compiler.declare import Call, Compilable, LazyCompiled, Routine, inline
from llamatrain.compiler.parallel import compile_ahead
from llamatrain.platform.threads import start_thread

LINE = 8  # words in a cache line

# A row: entry, args, items, block | next, done, and padding to a cache line
ENTRY, ARGS, ITEMS, BLOCK, NEXT, DONE = range(0, 6 * 8, 8)
ROW_BYTES = LINE * 8

# The team's words, in lines of their own: whether a table is open, which, which row is published; how many are inside
OPEN, TABLE, ROW, INSIDE = (line * ROW_BYTES for line in range(4))
FINISHED = -1
PATIENCE = 2000  # turns of waiting before others are let run
LINGER = 10_000  # turns, some 200 microseconds, for which who helped waits for the next table: to be woken costs as much


def _atomic(name: str) -> LazyCompiled:
    return LazyCompiled(lambda: getattr(import_module("llamatrain.compiler.atomics"), name))


enter, fetch_add, load, store, give_way, pause = map(
    _atomic, ("enter", "fetch_add", "load", "store", "give_way", "pause")
)


# ---- compiled --------------------------------------------


@inline
def work(row, thread):
    items, block = load(row + ITEMS), load(row + BLOCK)
    blocks = (items + block - 1) // block
    while True:
        mine = fetch_add(row + NEXT, 1)
        if mine >= blocks:
            break
        enter(load(row + ENTRY), mine * block, min(items, (mine + 1) * block), thread, load(row + ARGS))
        fetch_add(row + DONE, 1)


@inline
def wait(turns):
    """Spin for a few microseconds, then let others run between looks."""
    if turns < PATIENCE:
        pause()
    else:
        give_way()
    return turns + 1


@Routine
def begin(table, team):
    store(team + TABLE, table)
    store(team + ROW, 0)
    store(team + OPEN, 1)


@Routine
def lead(table, rows, team, alone):
    for at in range(rows):
        row = table + at * ROW_BYTES
        items, block = load(row + ITEMS), load(row + BLOCK)
        blocks = (items + block - 1) // block
        if blocks > 1 and not alone:
            store(row + NEXT, 0)
            store(row + DONE, 0)
            store(team + ROW, at + 1)
            work(row, 0)
            turns = 0
            while load(row + DONE) < blocks:
                turns = wait(turns)
        else:
            for lo in range(0, items, block):
                enter(load(row + ENTRY), lo, min(items, lo + block), 0, load(row + ARGS))
    if not alone:
        store(team + OPEN, 0)
        store(team + ROW, FINISHED)
        turns = 0
        while load(team + INSIDE):
            turns = wait(turns)


@inline
def help_along(team, thread):
    seen, turns, table = 0, 0, load(team + TABLE)
    while seen != FINISHED:
        row = load(team + ROW)
        if row == seen:
            turns = wait(turns)
            continue
        seen, turns = row, 0
        if seen > 0:
            work(table + (seen - 1) * ROW_BYTES, thread)


@Routine
def follow(team, thread):
    turns = LINGER  # who comes when all is done goes at once
    while load(team + OPEN) or turns < LINGER:
        fetch_add(team + INSIDE, 1)
        if load(team + OPEN):
            help_along(team, thread)
            turns = 0
        fetch_add(team + INSIDE, -1)
        while not load(team + OPEN) and turns < LINGER:
            pause()
            turns += 1


@cache
def _getcpu() -> Callable[[], int] | None:
    found: Callable[[], int] | None = (
        getattr(ctypes.CDLL(None), "sched_getcpu", None) if sys.platform == "linux" else None
    )
    return found


def processor_at() -> int:
    """The number of the processor that this thread is on; -1 where nobody says."""
    found = _getcpu()
    return found() if found else -1


# ---- the team --------------------------------------------


class ThreadPool:
    """Those who help a leader, as many as were ever needed at once."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.words = np.zeros(5 * LINE, np.int64)
        self.at, _ = aligned(self.words)
        self.asleep: list[threading.Lock] = []
        self.helpers: list[threading.Thread] = []
        self.led_on = -1  # the leader's processor, where none of them runs

    def run(self, table: int, rows: int, threads: int) -> None:
        with self.turn:
            try:
                self._lead(table, rows, threads - 1)
            except (
                BaseException
            ):  # a signal's: nobody stays in a table that is given up, whose memory will be another's
                lead.entered(table, 0, self.at, 0)
                raise

    def _lead(self, table: int, rows: int, others: int) -> None:
        with suppress(MemoryError):  # there can be no more threads: those that are there do it
            while len(self.asleep) < others:
                self._hire()
        if (here := processor_at()) != self.led_on:
            self._leave_to_leader(here)
        begin.entered(table, self.at)
        for each in self.asleep[:others]:
            if each.locked():
                each.release()
        lead.entered(table, rows, self.at, 0)

    def _hire(self) -> None:
        asleep, number, at, enters = threading.Lock(), len(self.asleep) + 1, self.at, follow.entered
        asleep.acquire()

        def serve(_: np.ndarray) -> None:
            while True:
                asleep.acquire()
                enters(at, number)

        # The thread holds the team's words: freed while it lingers, they could become another team's, which it would then help.
        helper = threading.Thread(target=serve, args=[self.words], name=f"llamatrain-{number}", daemon=True)
        start_thread(helper)
        self.asleep.append(asleep)
        self.helpers.append(helper)
        self.led_on = -1

    def _leave_to_leader(self, here: int) -> None:
        """A system may wake them where the leader is, to wait for it as it waits for them."""
        self.led_on = here
        others = os.sched_getaffinity(0) - {here} if here >= 0 else set()
        with suppress(OSError):
            for helper in self.helpers if others else ():
                os.sched_setaffinity(helper.native_id or 0, others)


class CallTable:
    """A list of calls, to be run again and again. What they need is found, or compiled, when one of them is made ready: with
    what all others need that are there by then, or foreseen, so that a run waits for the compiler once."""

    wanted: ClassVar[dict[Compilable, None]] = {}
    foreseen: ClassVar[list[Callable[[], object]]] = []

    def __init__(self, calls: Sequence[Call], threads: int) -> None:
        self.calls = list(calls)  # keeps arguments alive
        self.threads = threads if any(c.items > c.block for c in calls) else 1
        self.rows = np.zeros((len(self.calls) + 1, LINE), np.int64)
        self.at = 0
        needed = (*(call.entry for call in self.calls), lead, *([begin, follow] if self.threads > 1 else ()))
        self.wanted.update(dict.fromkeys(needed))

    def __call__(self) -> None:
        self.ready()
        if self.threads == 1:
            lead.entered(self.at, len(self.calls), 0, 1)
        else:
            team.run(self.at, len(self.calls), self.threads)

    def ready(self) -> None:
        if self.at:
            return
        if self.foreseen and missing(self.wanted):
            while self.foreseen:
                self.foreseen.pop()()
        compile_ahead(self.wanted)
        at, first = aligned(self.rows)
        rows = self.rows.reshape(-1)[first : first + len(self.calls) * LINE].reshape(-1, LINE)
        for row, call in zip(rows, self.calls, strict=True):
            row[:4] = call.entry.address, call.words.ctypes.data, call.items, call.block
            if not call.entry.address:
                raise CompilerError(f"{call.entry.where} is in no library that is there; {HELP}")
        self.wanted.clear()
        self.at = at
        code.report()


@contextmanager
def foreseeing(make: Callable[[], object]) -> Iterator[None]:
    """Meanwhile this is called before anything is compiled, to make the tables that will be run later."""
    CallTable.foreseen.append(make)
    try:
        yield
    finally:
        with suppress(ValueError):
            CallTable.foreseen.remove(make)


def aligned(words: np.ndarray) -> tuple[int, int]:
    """The address of the first word at the beginning of a cache line, and its place."""
    at = -(-words.ctypes.data // ROW_BYTES) * ROW_BYTES
    return at, (at - words.ctypes.data) // 8


team = ThreadPool()


def _anew() -> None:
    """A fork leaves the others behind, and what they held."""
    global team
    team = ThreadPool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_anew)
