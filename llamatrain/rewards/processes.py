"""The processes that compute rewards: one for each Python file, and one for each batch that a command scores.

Every process has a limit on its memory, and must give each number within a limit of time after the one before.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamatrain.config.messages import PATH, quote, shorten
from llamatrain.distributed.launcher import env_without_launcher
from llamatrain.errors import LlamatrainError
from llamatrain.platform.limited_process import SHELL, LimitedProcess
from llamatrain.platform.processes import read_pipe
from llamatrain.platform.threads import start_thread
from llamatrain.rewards.options import python_file

WORKER = Path(__file__).with_name("worker.py")
MAX_LINE = 1 << 16  # bytes of a line
TAIL = 2000  # bytes of standard error that are kept for a message
BLOCK = 1 << 16
LARGEST = 1e18  # of numbers, so that their weighted sums and the losses of answers fit into float32
START_SECONDS = 60.0  # at least, for a file's imports
WAIT_SECONDS = 0.2  # between two calls while a number is awaited
END_SECONDS = 2.0  # for what a process wrote to standard error before its end


class RewardError(LlamatrainError):
    """A reward failed. The message names the reward, the problem, and the row of the answer."""


def shared_reward_error(problem: str) -> RewardError:
    """Return an error that all ranks raise."""
    error = RewardError(problem, code="reward-failed")
    error.shared = True
    return error


class ProcessFailed(Exception):
    """A process hung, died or broke the protocol."""


@dataclass(frozen=True)
class Answer:
    """An answer to score, with the row that its prompt comes from."""

    prompt: str
    text: str
    row: Mapping[str, Any] = field(default_factory=dict)  # all columns of the data
    place: str = ""  # of the row, for messages

    def as_json(self) -> bytes:
        """Return the answer as a line of JSON."""
        values = {"prompt": self.prompt, "answer": self.text, "row": self.row}
        return json.dumps(values, default=str).encode() + b"\n"


@dataclass(frozen=True)
class Failure:
    """Takes the place of a number that a reward did not give."""

    problem: str


def do_nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Limits:
    """The limits of a reward, and what is called meanwhile."""

    timeout: float  # seconds until the next number
    memory: int  # bytes of each process
    log: Callable[[str], None]  # gets the lines that are written to standard error
    on_wait: Callable[[], None] = do_nothing  # is called again and again while a number is awaited; may raise


class Stream:
    """Exchanges lines with a process; what it writes to standard error is passed on."""

    def __init__(self, command: Sequence[str], limits: Limits) -> None:
        self.process = LimitedProcess(command, limits.memory, env_without_launcher())
        self._received, self._log, self._on_wait = bytearray(), limits.log, limits.on_wait
        self._errors = bytearray()  # the last bytes of standard error
        self._is_closed = False
        self._error_reader = threading.Thread(target=self._read_errors, daemon=True)
        start_thread(self._error_reader)

    def send(self, data: bytes, end: bool = False) -> None:
        """Write data in a thread, because the process may write before it has read all; then end its input."""
        descriptor = self.process.stdin.fileno()

        def write() -> None:
            rest = memoryview(data)
            with suppress(OSError):  # a process that died is reported by what reads its output
                while rest and not self._is_closed:
                    rest = rest[os.write(descriptor, rest) :]
                if end:
                    self.process.stdin.close()

        start_thread(threading.Thread(target=write, daemon=True))

    def read_line(self, seconds: float) -> bytes | None:
        """Return the next line that is not empty, or None at the end; raise ProcessFailed if it is late."""
        deadline = time.monotonic() + seconds
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if newline:
                self._received = rest
                if line.strip():
                    return bytes(line)
                continue
            if len(self._received) > MAX_LINE:
                raise ProcessFailed("it wrote a line that is too long to be a number")
            seconds_left = deadline - time.monotonic()
            block = read_pipe(self.process.stdout.fileno(), BLOCK, min(seconds_left, WAIT_SECONDS))
            if block is None and seconds_left > WAIT_SECONDS:
                self._on_wait()
                continue
            if block is None:
                raise ProcessFailed(f"it gave no number for {seconds:g} s; the limit is --reward-timeout")
            if not block:
                self._received.clear()
                return bytes(line) if line.strip() else None
            self._received += block

    def exit_code(self, seconds: float) -> int:
        """Return the exit code of a process that closed its output; raise ProcessFailed if it still runs."""
        code = self.process.wait(seconds)
        if code is None:
            raise ProcessFailed(
                f"it did not end for {seconds:g} s after its output; the limit is --reward-timeout"
            )
        return code

    def describe_exit(self, code: int) -> str:
        """Describe how the process ended, with the last line that it wrote to standard error."""
        self._error_reader.join(END_SECONDS)
        lines = self._errors.decode("utf-8", "replace").split("\n")
        last = next(filter(None, map(str.strip, reversed(lines))), "")
        ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"it {ended}{f': {last[:300]}' if last else ''}"

    def close(self) -> None:
        """End the process and all that it started, and pass on the rest of what it wrote."""
        self.process.kill()
        self._error_reader.join(END_SECONDS)  # longer only if a process escaped that holds the pipe
        self._is_closed = True
        self.process.close()

    def _read_errors(self) -> None:
        descriptor, line = self.process.stderr.fileno(), b""
        with suppress(OSError):
            while not self._is_closed and (block := os.read(descriptor, BLOCK)):
                self._errors += block
                del self._errors[:-TAIL]
                *lines, line = (line + block).split(b"\n")
                line = line[:MAX_LINE]
                for text in lines:
                    self._log(text.decode("utf-8", "replace").rstrip())
        if line:
            self._log(line.decode("utf-8", "replace").rstrip())


def parse_number(line: bytes) -> float | Failure:
    """Return the number in a line of a reward's output."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return Failure(f"it wrote {quote(line.decode('utf-8', 'replace').strip())} instead of a number")
    if isinstance(value, dict) and "error" in value:
        return Failure(str(value["error"]))
    if isinstance(value, dict):
        value = value.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Failure(f"it wrote {quote(line.decode('utf-8', 'replace').strip())} instead of a number")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if number - number != 0:
        return Failure(f"it returned {number}")
    if abs(number) > LARGEST:
        return Failure(f"it returned {number:g}; a reward must be between {-LARGEST:g} and {LARGEST:g}")
    return number


class RewardProcess:
    """Scores answers by one reward."""

    def __init__(self, source: str, limits: Limits) -> None:
        self.source, self.limits, self.timeout = source, limits, limits.timeout
        self.name = shorten(f"--reward {' '.join(source.split())}", PATH)
        self._stream: Stream | None = None

    def start(self) -> None:
        """Start what can be started before there are answers; raise RewardError if it fails."""

    def scores(self, answers: Sequence[Answer]) -> Iterator[float | Failure]:
        """Yield the score of each answer. After a failure of the process another one scores the rest."""
        done = 0
        while done < len(answers):
            try:
                for number in self._score(answers[done:]):
                    done += 1
                    yield number
            except ProcessFailed as error:
                self.close()
                done += 1
                yield Failure(str(error))

    def _score(self, answers: Sequence[Answer]) -> Iterator[float | Failure]:
        raise NotImplementedError

    def _read(self, stream: Stream, number: int, count: int) -> float | Failure:
        """Read the score of one of `count` answers."""
        line = stream.read_line(self.timeout)
        if line is None:
            code = stream.exit_code(self.timeout)
            if code == 0:
                raise self.error(f"it ended after {number} numbers for {count} answers")
            raise ProcessFailed(stream.describe_exit(code))
        return parse_number(line)

    def error(self, problem: str) -> RewardError:
        """Return the error for a problem that concerns all answers."""
        return RewardError(f"{self.name}: {problem}", code="reward-failed")

    def close(self) -> None:
        """End the process."""
        if self._stream:
            self._stream.close()
        self._stream = None


class FileProcess(RewardProcess):
    """Calls the function of a Python file, in one process for all batches."""

    def start(self) -> None:
        """Import the file."""
        self._open()

    def _open(self) -> Stream:
        if self._stream:
            return self._stream
        command = [sys.executable, "-P", str(WORKER), self.source]
        stream = self._stream = Stream(command, self.limits)
        try:
            line = stream.read_line(max(START_SECONDS, self.timeout))
            if line is None:
                raise ProcessFailed(stream.describe_exit(stream.exit_code(self.timeout)))
        except ProcessFailed as failure:
            self.close()
            raise self.error(f"it cannot be imported: {failure}") from None
        if isinstance(failed := parse_number(line), Failure) and line != b'"ready"':
            self.close()
            raise self.error(failed.problem)
        return stream

    def _score(self, answers: Sequence[Answer]) -> Iterator[float | Failure]:
        stream = self._open()
        stream.send(b"%d\n" % len(answers) + b"".join(answer.as_json() for answer in answers))
        for number in range(len(answers)):
            yield self._read(stream, number, len(answers))


class CommandProcess(RewardProcess):
    """Runs a command for each batch: it reads lines of JSON until its input ends."""

    def _score(self, answers: Sequence[Answer]) -> Iterator[float | Failure]:
        stream = self._stream = Stream([*SHELL, self.source], self.limits)
        stream.send(b"".join(answer.as_json() for answer in answers), end=True)
        for number in range(len(answers) - 1):
            yield self._read(stream, number, len(answers))
        last = self._read(stream, len(answers) - 1, len(answers))
        self._check_end(stream, len(answers))
        self.close()
        yield last

    def _check_end(self, stream: Stream, count: int) -> None:
        """Raise unless the command ends in order after its last number."""
        try:
            if stream.read_line(self.timeout) is not None:
                raise self.error(f"it wrote more than {count} numbers for {count} answers")
            if code := stream.exit_code(self.timeout):
                raise ProcessFailed(stream.describe_exit(code))
        except ProcessFailed as failure:
            raise self.error(str(failure)) from None


def create_process(source: str, limits: Limits) -> RewardProcess:
    """Return the process for a Python file or a command."""
    return (FileProcess if python_file(source) else CommandProcess)(source, limits)
