"""Detects failed and silent processes: each one reports to rank 0, and rank 0 to all, twice a second.

A process that is silent for too long, or reports a failure, ends all of them. One thread communicates over
MPI; another measures the silence, and ends the process even if MPI itself hangs.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from llamatrain.distributed.single import AGAIN, ExitStatus
from llamatrain.distributed.stderr import fault
from llamatrain.platform.threads import start_thread

BEAT, FAILED, OVER, BYE = range(
    1, 5
)  # tags; what each carries: step and what is done, a Failure, an exit code, nothing
TIMEOUT = 120.0  # seconds, until a run says another
OFTEN, THOUSAND = (
    0.5,
    1000,
)  # seconds between two beats; of many, so many beats a second are what the first hears
LEAST = 2.0  # seconds, of any timeout
LISTEN = 0.05  # seconds between two looks for what came
GATHER = 0.25  # seconds in which more may fail of the same
ALONE = 1.5  # seconds after which one that has failed ends all by itself
TURN = 0.1  # seconds between two that would say the same of the first


class Heartbeat:
    """Exchanges heartbeats with the other processes, and ends all when one is lost."""

    def __init__(self, comm: Any, called: Callable[[int], str], end: Callable[[int, str], None]) -> None:
        self.comm, self.called, self.end = comm, called, end
        self.rank, self.size = comm.rank, comm.size
        self.often = max(OFTEN, self.size / THOUSAND)
        self.doing = 0, "starting"
        self.timeout, self.words = TIMEOUT, lambda: ""
        self.failure: ExitStatus | None = None  # this process's own
        self._peers = range(1, self.size) if self.rank == 0 else range(1)
        self._watched = {*self._peers}
        self._silent = dict.fromkeys(self._peers, 0.0)  # seconds
        self._last = dict.fromkeys(self._peers, (0, "starting"))  # what they were doing
        self._failed = dict[int, ExitStatus]()
        self._sent = dict[int, Any]()  # the last to each
        self._kept = list[Any]()  # a few that were not waited for
        self._leaving = self._left = False
        self._next = self._choosing = 0.0  # when it tells again, and when it says what failed
        self._over, self._ending = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._speak, self._look)]
        for each in self._threads:
            start_thread(each)

    def fail(self, failure: ExitStatus) -> None:
        """Report a failure to rank 0, which ends all; end all from here if that does not happen in time."""
        self.failure = failure
        time.sleep(ALONE)
        self._finish(self.rank, failure)

    def stop(self) -> None:
        """Stop the threads (collective): returns when all have stopped and no message is under way."""
        self._leaving = True
        for each in self._threads:
            each.join()

    # ---- what is told ------------------------------------------------------

    def _speak(self) -> None:
        try:
            while self._watched or not self._left:
                self._hear()
                self._tell()
                time.sleep(LISTEN)
        except Exception as error:
            time.sleep(GATHER)  # one that is gone may have been heard of
            self._finish(self.rank, fault(error))
        self._over.set()

    def _tell(self) -> None:
        now = time.monotonic()
        if self.failure and self.rank == 0:
            self._failed.setdefault(0, self.failure)
        elif self.failure:
            self._send(0, FAILED, self.failure)
            self.failure = None
        if self._failed:
            self._choosing = self._choosing or now + GATHER
            if len(self._failed) == self.size or now >= self._choosing:
                self._choose()
        if not self._left and (self._leaving or now >= self._next):
            self._next = now + self.often
            self._tell_all(BYE if self._leaving else BEAT, self.doing)
            self._left = self._leaving

    def _tell_all(self, tag: int, what: Any) -> None:
        for peer in self._peers:
            if (before := self._sent.get(peer)) and before.Test():
                del self._sent[peer]
            if tag != BEAT or peer not in self._sent:
                self._send(peer, tag, what)

    def _send(self, peer: int, tag: int, what: Any) -> None:
        if before := self._sent.get(peer):
            self._kept.append(before)  # what is on its way is not to be let go
        self._sent[peer] = self.comm.isend(what, peer, tag)

    def _hear(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        while message := self.comm.improbe(status=status):
            peer, tag = status.source, status.tag
            what = message.recv()
            if tag == BYE:
                self._watched.discard(peer)
            elif tag == FAILED:
                self._failed.setdefault(peer, ExitStatus(*what))
            elif tag == OVER:
                time.sleep(TURN * 5)  # the launcher ends it before
                self.end(what, "")
            else:
                self._last[peer], self._silent[peer] = what, 0.0

    def _choose(self) -> None:
        """Pick the root failure: prefer errors that are not "peer lost"; if all ranks report the same, blame
        none.
        """
        rank = min(self._failed, key=lambda each: self._failed[each].lost)
        same = len(self._failed) == self.size and len({*self._failed.values()}) == 1
        self._finish(None if same else rank, self._failed[rank])

    # ---- who is silent -----------------------------------------------------

    def _look(self) -> None:
        """Measure silence. Time in which this process itself was suspended does not count."""
        before = time.monotonic()
        while not self._over.wait(self.often):
            now = time.monotonic()
            passed, before = min(now - before, 2 * self.often), now
            for peer in self._watched.copy():
                self._silent[peer] += passed
            lost = [peer for peer in sorted(self._watched) if self._silent[peer] > max(self.timeout, LEAST)]
            if lost:
                time.sleep(min(TURN * max(0, self.rank - 1), 2))
                self._finish(None, ExitStatus(self._told_of(lost), AGAIN))

    def _told_of(self, lost: list[int]) -> str:
        (step, what), more = self._last[lost[0]], f" (nor of {len(lost) - 1} more)" if lost[1:] else ""
        place = f"step {step}, {what}" if step else what
        words = self.words()
        told = f"nothing was heard of {self.called(lost[0])}{more} for {self.timeout:g} s; it was last at {place}"
        return f"{told}; to go on: {words}" if words else told

    def _finish(self, rank: int | None, failure: ExitStatus) -> None:
        with self._ending:  # never given back
            words = (
                failure.words
                if rank is None or not failure.words
                else f"{self.called(rank)}: {failure.words}"
            )
            if self.rank == 0:
                with suppress(MemoryError):
                    start_thread(
                        threading.Thread(target=self._tell_all, args=(OVER, failure.code), daemon=True)
                    )
            self.end(failure.code, words)
