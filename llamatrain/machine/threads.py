"""A list of compiled calls, run by a team of threads.

One thread leads: it goes through the rows in order. A row of several blocks is published; whoever is there takes the next
block from the row's counter until none is left, and the leader goes on when all are done. Nobody is waited for who has not
taken a block, so a thread that comes late, or never, costs nothing but its help. A published row costs 0.3 microseconds; a
row of one block costs a function call.

The others are threads of Python that sleep on a lock between runs. Within one they are in compiled code, without Python's
lock, and look for rows. The team's words say which table is open, and how many are inside: the leader leaves last.

Which thread does a block is left to chance; what a block is, is not: a result must not depend on the number of threads.
"""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

import numpy as np

from llamatrain.machine.ahead import compile_ahead
from llamatrain.machine.code import HELP, CompilerError, code
from llamatrain.machine.entry import Call, Later, Routine, inline

LINE = 8  # words in a cache line

# A row: entry, args, items, block | next, done, and padding to a cache line
ENTRY, ARGS, ITEMS, BLOCK, NEXT, DONE = range(0, 6 * 8, 8)
ROW_BYTES = LINE * 8

# The team's words, in lines of their own: whether a table is open, which, which row is published; how many are inside
OPEN, TABLE, ROW, INSIDE = (line * ROW_BYTES for line in range(4))
FINISHED = -1
PATIENCE = 2000  # turns of waiting before others are let run


def _atomic(name: str) -> Later:
    return Later(lambda: getattr(import_module("llamatrain.machine.compiler.atomics"), name))


enter, fetch_add, load, store, give_way, pause = map(_atomic, ("enter", "fetch_add", "load", "store", "give_way", "pause"))


# ---- compiled -------------------------------------------------------------


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


@Routine
def follow(team, thread):
    fetch_add(team + INSIDE, 1)
    if load(team + OPEN):
        seen, turns, table = 0, 0, load(team + TABLE)
        while seen != FINISHED:
            row = load(team + ROW)
            if row == seen:
                turns = wait(turns)
                continue
            seen, turns = row, 0
            if seen > 0:
                work(table + (seen - 1) * ROW_BYTES, thread)
    fetch_add(team + INSIDE, -1)


# ---- the team -------------------------------------------------------------


class Team:
    """Those who help a leader, as many as were ever needed at once."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.words = np.zeros(5 * LINE, np.int64)
        self.at = -(-self.words.ctypes.data // ROW_BYTES) * ROW_BYTES
        self.shared = self.words[(self.at - self.words.ctypes.data) // 8 :]
        self.asleep: list[threading.Lock] = []

    def run(self, table: int, rows: int, threads: int) -> None:
        with self.turn:
            try:
                self._lead(table, rows, threads - 1)
            except BaseException:  # a signal's: nobody stays in a table that is given up, whose memory will be another's
                lead.entered(table, 0, self.at, 0)
                raise

    def _lead(self, table: int, rows: int, others: int) -> None:
        with suppress(RuntimeError):  # there can be no more threads: those that are there do it
            while len(self.asleep) < others:
                self._hire()
        self.shared[TABLE // 8], self.shared[ROW // 8] = table, 0
        self.shared[OPEN // 8] = 1
        for each in self.asleep[:others]:
            if each.locked():
                each.release()
        lead.entered(table, rows, self.at, 0)

    def _hire(self) -> None:
        asleep, number, at, enters = threading.Lock(), len(self.asleep) + 1, self.at, follow.entered
        asleep.acquire()

        def serve() -> None:
            while True:
                asleep.acquire()
                enters(at, number)

        threading.Thread(target=serve, name=f"llamatrain-{number}", daemon=True).start()
        self.asleep.append(asleep)


class Table:
    """A list of calls, ready to run again and again."""

    def __init__(self, calls: Sequence[Call], threads: int) -> None:
        self.calls = list(calls)  # keeps arguments alive
        self.threads = threads if any(c.items > c.block for c in calls) else 1
        compile_ahead([*(call.entry for call in self.calls), lead, *([follow] if self.threads > 1 else [])])
        self.rows = np.zeros((len(self.calls) + 1, LINE), np.int64)
        self.at = -(-self.rows.ctypes.data // ROW_BYTES) * ROW_BYTES
        shift = (self.at - self.rows.ctypes.data) // 8
        rows = self.rows.reshape(-1)[shift : shift + len(self.calls) * LINE].reshape(-1, LINE)
        for row, call in zip(rows, self.calls, strict=True):
            row[:4] = call.entry.address, call.words.ctypes.data, call.items, call.block
            if not call.entry.address:
                raise CompilerError(f"{call.entry.where} is in no library that is there; {HELP}")
        code.report()

    def __call__(self) -> None:
        if self.threads == 1:
            lead.entered(self.at, len(self.calls), 0, 1)
        else:
            team.run(self.at, len(self.calls), self.threads)


team = Team()


def _anew() -> None:
    """A fork leaves the others behind, and what they held."""
    global team
    team = Team()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_anew)
