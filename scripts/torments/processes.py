"""Runs the command in a new interpreter, or in a fork of this process, and watches it until it ends."""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torments.proc import POLL, kill_survivors, read_status, resident_bytes, tree_bytes

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
PROGRAM = "import sys; from llamatrain.__main__ import main; main()"
PLAN = "TORTURE_PLAN"  # the environment variable with the plan of the shim
PLAIN_BYTES = (
    60_000_000  # bytes of an idle command; a fork is charged for more than this process had beyond that
)
MAX_BYTES = 1_500_000_000  # a process with more is killed, to protect others on the machine
CACHED_PATHS: list[Any] = []  # functions that cache paths


@dataclass(frozen=True, kw_only=True)
class ProcessResult:
    """The result of a process, and the resources that it used."""

    words: tuple[str, ...]
    code: int  # minus the number of a signal
    out: str
    err: str
    cpu: float
    wall: float
    peak: int  # bytes of the process and its descendants
    own: int = 0  # bytes of the process alone
    timed_out: bool = False  # it was killed at a limit of time or memory
    survivors: tuple[str, ...] = ()  # processes that still ran after it

    @property
    def errors(self) -> list[str]:
        """The lines of error."""
        return [line for line in self.err.splitlines() if line.startswith("error:")]

    @property
    def compiled(self) -> bool:
        """True if kernels were compiled, which happens once on a machine and may take long."""
        return any(line.startswith("compil") for line in self.err.splitlines())


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command to run, its folder, and its limits."""

    words: tuple[str, ...]
    folder: Path
    cache: Path | None  # None: the user's own
    plan: Mapping[str, Any] = field(default_factory=dict)
    stdin: bytes | None = None
    seconds: float = 60.0  # of wall time
    streams: Mapping[int, int] = field(default_factory=dict)  # descriptors for 1 and 2 in place of files
    before: tuple[str, ...] = ()  # words in front of the command, such as a shell
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment

    def environment(self) -> dict[str, str]:
        """Return the environment of the process."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        plan = {PLAN: json.dumps(dict(self.plan))}
        quiet = {"PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "100"}
        cache = {"LLAMATRAIN_CACHE": str(self.cache)} if self.cache else {}
        passing = {"TMPDIR": str(self.folder.parent)}  # fallback folders go with the trial
        return {**os.environ, "PYTHONPATH": path, **cache, **quiet, **plan, **passing, **self.variables}


class Running:
    """A process that runs."""

    def __init__(self, job: Job, pid: int, files: tuple[Path, Path], shared: int = 0) -> None:
        self.job, self.pid, self.files, self.shared = job, pid, files, shared
        self.start = time.monotonic()
        self.peak = self.own = 0
        self.result: ProcessResult | None = None
        self._status: tuple[int, Any] | None = None

    def poll(self) -> bool:
        """Update the peaks and return whether the process still runs."""
        if self._status is None:
            self.own = max(self.own, read_status(self.pid).get("VmHWM", 0))
            self.peak = max(self.peak, tree_bytes(self.pid) - self.shared)
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self._status = status, usage
        return self._status is None

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> bool:
        """Wait for a condition, the end of the process or a time limit; return the condition."""
        end = time.monotonic() + seconds
        while not condition():
            if not self.poll() or time.monotonic() > end:
                return condition()
            time.sleep(POLL / 4)
        return True

    def signal(self, number: int) -> None:
        """Send a signal if the process still runs."""
        if self._status is None:
            os.kill(self.pid, number)

    def wait(self) -> ProcessResult:
        """Wait for the end and return the result; kill the process at its limits of time and memory."""
        timed_out = False
        while self.poll():
            if not timed_out and (time.monotonic() - self.start > self.job.seconds or self.peak > MAX_BYTES):
                timed_out = True
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(POLL)
        assert self._status is not None
        status, usage = self._status
        survivors = kill_survivors()
        self.result = ProcessResult(
            words=self.job.words,
            code=os.waitstatus_to_exitcode(status),
            out=self.files[0].read_bytes().decode(errors="replace"),
            err=self.files[1].read_bytes().decode(errors="replace"),
            cpu=usage.ru_utime + usage.ru_stime,
            wall=time.monotonic() - self.start,
            peak=self.peak,
            own=self.own,
            timed_out=timed_out,
            survivors=survivors,
        )
        return self.result


# ---- starting --------------------------------------------------------------


def start_process(job: Job) -> Running:
    """Start the command in a new interpreter."""
    files = create_output_files(job)
    text = f"import sys; sys.path.insert(0, {str(HERE)!r}); import shim; shim.install()\n" if job.plan else ""
    words = [*job.before, sys.executable, "-c", text + PROGRAM, *job.words]
    stdin = spool_stdin(job)
    with files[0].open("wb") as out, files[1].open("wb") as err, stdin.open("rb") as stdin_file:
        process = subprocess.Popen(
            words,
            cwd=job.folder,
            env=job.environment(),
            stdin=stdin_file,
            stdout=job.streams.get(1, out.fileno()),
            stderr=job.streams.get(2, err.fileno()),
            start_new_session=True,
        )
    process.returncode = 0  # this class waits for it, and not the Popen object
    return Running(job, process.pid, files)


def fork_process(job: Job) -> Running:
    """Run the command in a fork of this process, which must have one thread; nothing has to be loaded."""
    files = create_output_files(job)
    stdin = spool_stdin(job)
    sys.stdout.flush(), sys.stderr.flush()
    shared = max(0, resident_bytes(os.getpid()) - PLAIN_BYTES)
    pid = os.fork()
    if not pid:
        code = 70
        try:
            code = _child(job, files, stdin)
        finally:
            os._exit(code)
    return Running(job, pid, files, shared)


def _child(job: Job, files: tuple[Path, Path], stdin: Path) -> int:
    import faulthandler

    faulthandler.disable()
    os.setsid()
    for number, (path, flags) in enumerate(
        [(stdin, os.O_RDONLY), (files[0], os.O_WRONLY), (files[1], os.O_WRONLY)]
    ):
        folder = os.open(path, flags)
        os.dup2(folder, number)
        os.close(folder)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115  stays open
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    environment = job.environment()  # made from os.environ, so before that is cleared
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(job.folder)
    clear_cached_paths()
    from torments import shim

    shim.install()
    from llamatrain.cli.main import main

    sys.argv = ["llamatrain", *job.words]
    return _finish(main)


def _finish(main: Callable[[], None]) -> int:
    """Run the command and end as the interpreter does; return the exit code."""
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    return code if isinstance(code, int) else int(code is not None)


def clear_cached_paths() -> None:
    """Forget the paths that depend on the environment."""
    tempfile.tempdir = None
    for function in CACHED_PATHS:
        function.cache_clear()


def find_cached_paths() -> None:
    """Find the functions that cache paths, once in the parent: the search takes longer than most commands."""
    modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("llamatrain.")]
    CACHED_PATHS[:] = [
        value
        for values in modules
        for name, value in values.items()
        if name == "get_temp_folder" and hasattr(value, "cache_clear")
    ]


def create_output_files(job: Job) -> tuple[Path, Path]:
    """Create files for standard output and standard error."""
    folder = job.folder.parent / "output"
    folder.mkdir(exist_ok=True)
    number = len(list(folder.iterdir()))
    files = folder / f"{number}.out", folder / f"{number}.err"
    for path in files:
        path.touch()
    return files


def spool_stdin(job: Job) -> Path:
    """Write the standard input to a file and return its path."""
    if job.stdin is None:
        return Path(os.devnull)
    path = job.folder.parent / "output" / "stdin"
    path.write_bytes(job.stdin)
    return path
