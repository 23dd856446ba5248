"""A child process with a memory limit, which ends with this process, as do the processes that it starts."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from llamatrain.platform.processes import end_job, put_into_job

if sys.platform != "win32":
    import fcntl
    import signal

    SHELL = "/bin/sh", "-c"
    LIMITED = *SHELL, 'ulimit -v "$0" 2> /dev/null; exec "$@"'  # macOS has no such limit
else:
    SHELL = os.environ.get("COMSPEC", "cmd.exe"), "/c"


class LimitedProcess:
    """A child process whose three streams are unbuffered pipes. It leads a group of its own, which `kill` ends."""

    def __init__(self, command: Sequence[str], memory: int, env: Mapping[str, str] | None = None) -> None:
        """Start a command with a limit on the memory of each of its processes, in bytes."""
        read_end, write_end = os.pipe()
        self._lifeline = os.fdopen(write_end, "wb")  # the group ends when it is closed
        try:
            self.process = self._start(command, memory, env, read_end)
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            os.close(read_end)
        self._job = put_into_job(self.process, memory)

    def _start(
        self, command: Sequence[str], memory: int, env: Mapping[str, str] | None, read_end: int
    ) -> "subprocess.Popen[bytes]":
        pipe = subprocess.PIPE
        if sys.platform == "win32":
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, bufsize=0)
        else:
            process = subprocess.Popen(
                [*LIMITED, str(max(1, memory >> 10)), *command],
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=env,
                bufsize=0,
                start_new_session=True,
                pass_fds=[read_end],
            )
            # the system signals the group when this process no longer holds the other end
            fcntl.fcntl(read_end, fcntl.F_SETOWN, -process.pid)
            fcntl.fcntl(read_end, fcntl.F_SETFL, fcntl.fcntl(read_end, fcntl.F_GETFL) | os.O_ASYNC)
            return process

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe to its standard input."""
        assert self.process.stdin
        return self.process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe from its standard output."""
        assert self.process.stdout
        return self.process.stdout

    @property
    def stderr(self) -> IO[bytes]:
        """The pipe from its standard error."""
        assert self.process.stderr
        return self.process.stderr

    def wait(self, seconds: float) -> int | None:
        """Wait for the process, and return its exit code; None if it still runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(max(0.0, seconds))
        return None

    def kill(self) -> None:
        """End the process and those that it started, if they still run. Its pipes can still be read."""
        if sys.platform == "win32":
            self.process.kill()
            end_job(self._job)
        else:
            with suppress(ProcessLookupError, PermissionError):  # macOS: of a group that has ended
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self.stdin, self.stdout, self.stderr, self._lifeline):
            with suppress(OSError):  # unwritten data has no reader
                pipe.close()
