"""Detects failed and silent processes: each one reports to rank 0, and rank 0 to all, twice a second.

A process that is silent for too long, or reports a failure, ends all of them. One thread communicates over
MPI; another measures the silence, and ends the process even if MPI itself hangs.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from llamatrain.distributed.single import EXIT_RETRY, ExitStatus
from llamatrain.distributed.stderr import exit_status_for
from llamatrain.platform.threads import start_thread

BEAT, FAILED, END, BYE = range(1, 5)  # tags; content: (step, status), ExitStatus, exit code, nothing
TIMEOUT = 120.0  # seconds, until a run sets another
INTERVAL = 0.5  # seconds between two beats
MAX_BEATS = 1000  # the most beats that rank 0 receives per second
MIN_TIMEOUT = 2.0  # seconds, the smallest timeout
POLL = 0.05  # seconds between two polls for messages
COLLECT = 0.25  # seconds to wait for further failures with the same cause
END_ALONE = 1.5  # seconds after which a failed process ends all by itself
STAGGER = 0.1  # seconds between ranks that would report the same


class Heartbeat:
    """Exchanges heartbeats with the other processes, and ends all when one is lost."""

    def __init__(
        self, comm: Any, describe_rank: Callable[[int], str], end: Callable[[int, str], None]
    ) -> None:
        self.comm, self.describe_rank, self.end = comm, describe_rank, end
        self.rank, self.size = comm.rank, comm.size
        self.interval = max(INTERVAL, self.size / MAX_BEATS)
        self.status = 0, "starting"
        self.timeout, self.get_command = TIMEOUT, lambda: ""
        self.failure: ExitStatus | None = None  # of this process
        self._peers = range(1, self.size) if self.rank == 0 else range(1)
        self._watched = {*self._peers}
        self._silent = dict.fromkeys(self._peers, 0.0)  # seconds
        self._last = dict.fromkeys(self._peers, (0, "starting"))  # (step, status)
        self._failed = dict[int, ExitStatus]()
        self._sent = dict[int, Any]()  # the last request to each
        self._old_requests = list[Any]()  # requests that must stay alive
        self._stopping = self._stopped = False
        self._next_beat = self._decide_at = 0.0  # times of the next beat, and of picking the failure
        self._finished, self._end_lock = threading.Event(), threading.Lock()
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._communicate, self._watch_silence)
        ]
        for run in self._threads:
            start_thread(run)

    def fail(self, failure: ExitStatus) -> None:
        """Report a failure to rank 0, which ends all; end all from here if that does not happen in time."""
        self.failure = failure
        time.sleep(END_ALONE)
        self._finish(self.rank, failure)

    def stop(self) -> None:
        """Stop the threads (collective): returns when all have stopped and no message is under way."""
        self._stopping = True
        for thread in self._threads:
            thread.join()

    # ---- what is told ------------------------------------------------------

    def _communicate(self) -> None:
        try:
            while self._watched or not self._stopped:
                self._receive()
                self._send_updates()
                time.sleep(POLL)
        except Exception as error:
            time.sleep(COLLECT)  # the failure of a lost process may still arrive
            self._finish(self.rank, exit_status_for(error))
        self._finished.set()

    def _send_updates(self) -> None:
        now = time.monotonic()
        if self.failure and self.rank == 0:
            self._failed.setdefault(0, self.failure)
        elif self.failure:
            self._send(0, FAILED, self.failure)
            self.failure = None
        if self._failed:
            self._decide_at = self._decide_at or now + COLLECT
            if len(self._failed) == self.size or now >= self._decide_at:
                self._pick_failure()
        if not self._stopped and (self._stopping or now >= self._next_beat):
            self._next_beat = now + self.interval
            self._send_all(BYE if self._stopping else BEAT, self.status)
            self._stopped = self._stopping

    def _send_all(self, tag: int, content: Any) -> None:
        for peer in self._peers:
            if (before := self._sent.get(peer)) and before.Test():
                del self._sent[peer]
            if tag != BEAT or peer not in self._sent:
                self._send(peer, tag, content)

    def _send(self, peer: int, tag: int, content: Any) -> None:
        if before := self._sent.get(peer):
            self._old_requests.append(before)  # a request under way must stay alive
        self._sent[peer] = self.comm.isend(content, peer, tag)

    def _receive(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        while message := self.comm.improbe(status=status):
            peer, tag = status.source, status.tag
            content = message.recv()
            if tag == BYE:
                self._watched.discard(peer)
            elif tag == FAILED:
                self._failed.setdefault(peer, ExitStatus(*content))
            elif tag == END:
                time.sleep(STAGGER * 5)  # the launcher usually ends it first
                self.end(content, "")
            else:
                self._last[peer], self._silent[peer] = content, 0.0

    def _pick_failure(self) -> None:
        """Pick the root failure: prefer errors that are not "peer lost".

        If all ranks report the same, blame none.
        """
        rank = min(self._failed, key=lambda peer: self._failed[peer].peer_lost)
        same = len(self._failed) == self.size and len({*self._failed.values()}) == 1
        self._finish(None if same else rank, self._failed[rank])

    # ---- who is silent -----------------------------------------------------

    def _watch_silence(self) -> None:
        """Measure silence. Time in which this process itself was suspended does not count."""
        before = time.monotonic()
        while not self._finished.wait(self.interval):
            now = time.monotonic()
            passed, before = min(now - before, 2 * self.interval), now
            for peer in self._watched.copy():
                self._silent[peer] += passed
            lost = [
                peer for peer in sorted(self._watched) if self._silent[peer] > max(self.timeout, MIN_TIMEOUT)
            ]
            if lost:
                time.sleep(min(STAGGER * max(0, self.rank - 1), 2))
                self._finish(None, ExitStatus(self._describe_lost(lost), EXIT_RETRY))

    def _describe_lost(self, lost: list[int]) -> str:
        (step, status), more = self._last[lost[0]], f" and {len(lost) - 1} more" if lost[1:] else ""
        place = f"step {step}, {status}" if step else status
        command = self.get_command()
        message = f"no sign of {self.describe_rank(lost[0])}{more} for {self.timeout:g} s (last: {place})"
        return f"{message}; resume with: {command}" if command else message

    def _finish(self, rank: int | None, failure: ExitStatus) -> None:
        with self._end_lock:  # never released
            message = (
                failure.message
                if rank is None or not failure.message
                else f"{self.describe_rank(rank)}: {failure.message}"
            )
            if self.rank == 0:
                with suppress(MemoryError):
                    start_thread(
                        threading.Thread(target=self._send_all, args=(END, failure.exit_code), daemon=True)
                    )
            self.end(failure.exit_code, message)
