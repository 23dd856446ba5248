"""The command as a process: started anew, or forked from this one, which has loaded all that it needs; watched until it ends."""

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

from torments.watching import POLL, fields, outlived, resident, tree_bytes

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
PROGRAM = "import sys; from llamatrain.__main__ import main; main()"
PLAN = "TORTURE_PLAN"  # the environment's name for what the shim shall do
PLAIN = 60_000_000  # bytes of a command that has done nothing yet: a fork's own are counted from there
HIGHEST = 1_500_000_000  # bytes, at which a process is ended for the sake of others
PLACES: list[Any] = []  # functions that remember where the user's caches are


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that has ended, and what it took."""

    words: tuple[str, ...]
    code: int  # of a signal: minus its number
    out: str
    err: str
    cpu: float
    wall: float
    peak: int  # bytes of the process and those below it
    own: int = 0  # of the process alone
    late: bool = False  # it did not end by itself
    left: tuple[str, ...] = ()  # processes that outlived it

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]

    @property
    def compiled(self) -> bool:
        """Kernels, which is once for a machine, whatever comes in."""
        return any(line.startswith("compil") for line in self.err.splitlines())


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be run, where, and how long at most."""

    words: tuple[str, ...]
    folder: Path
    cache: Path | None  # else the user's own
    plan: Mapping[str, Any] = field(default_factory=dict)
    stdin: bytes | None = None
    seconds: float = 60.0  # by the clock
    streams: Mapping[int, int] = field(default_factory=dict)  # where 1 and 2 go instead of files
    before: tuple[str, ...] = ()  # a program that starts it
    more: Mapping[str, str] = field(default_factory=dict)  # of the environment

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        plan = {PLAN: json.dumps(dict(self.plan))}
        quiet = {"PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "100"}
        cache = {"LLAMATRAIN_CACHE": str(self.cache)} if self.cache else {}
        passing = {"TMPDIR": str(self.folder.parent)}  # a run that is saved there goes with the trial
        return {**os.environ, "PYTHONPATH": path, **cache, **quiet, **plan, **passing, **self.more}


class Running:
    """A process under way."""

    def __init__(self, job: Job, pid: int, files: tuple[Path, Path], above: int = 0) -> None:
        self.job, self.pid, self.files, self.above = job, pid, files, above
        self.start = time.monotonic()
        self.peak = self.own = 0
        self.ended: Ended | None = None
        self._status: tuple[int, Any] | None = None

    def poll(self) -> bool:
        """Whether it still runs."""
        if self._status is None:
            self.own = max(self.own, fields(self.pid).get("VmHWM", 0))
            self.peak = max(self.peak, tree_bytes(self.pid) - self.above)
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self._status = status, usage
        return self._status is None

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> bool:
        """Wait for something; not longer than it lives."""
        end = time.monotonic() + seconds
        while not condition():
            if not self.poll() or time.monotonic() > end:
                return condition()
            time.sleep(POLL / 4)
        return True

    def signal(self, number: int) -> None:
        if self._status is None:
            os.kill(self.pid, number)

    def wait(self) -> Ended:
        late = False
        while self.poll():
            if not late and (time.monotonic() - self.start > self.job.seconds or self.peak > HIGHEST):
                late = True
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(POLL)
        assert self._status is not None
        status, usage = self._status
        left = outlived()
        self.ended = Ended(
            words=self.job.words,
            code=os.waitstatus_to_exitcode(status),
            out=self.files[0].read_bytes().decode(errors="replace"),
            err=self.files[1].read_bytes().decode(errors="replace"),
            cpu=usage.ru_utime + usage.ru_stime,
            wall=time.monotonic() - self.start,
            peak=self.peak,
            own=self.own,
            late=late,
            left=left,
        )
        return self.ended


# ---- starting --------------------------------------------------------------


def started(job: Job) -> Running:
    """A process of its own, from the interpreter's first moment."""
    files = files_of(job)
    text = f"import sys; sys.path.insert(0, {str(HERE)!r}); import shim; shim.install()\n" if job.plan else ""
    words = [*job.before, sys.executable, "-c", text + PROGRAM, *job.words]
    stdin = spool(job)
    with files[0].open("wb") as out, files[1].open("wb") as err, stdin.open("rb") as given:
        process = subprocess.Popen(
            words,
            cwd=job.folder,
            env=job.environment(),
            stdin=given,
            stdout=job.streams.get(1, out.fileno()),
            stderr=job.streams.get(2, err.fileno()),
            start_new_session=True,
        )
    process.returncode = 0  # it is waited for here, and not by its object
    return Running(job, process.pid, files)


def forked(job: Job) -> Running:
    """A copy of this process, which must have one thread, runs the command: nothing has to be loaded."""
    files = files_of(job)
    stdin = spool(job)
    sys.stdout.flush(), sys.stderr.flush()
    above = max(0, resident(os.getpid()) - PLAIN)
    pid = os.fork()
    if not pid:
        code = 70
        try:
            code = _child(job, files, stdin)
        finally:
            os._exit(code)
    return Running(job, pid, files, above)


def _child(job: Job, files: tuple[Path, Path], stdin: Path) -> int:
    import faulthandler

    faulthandler.disable()
    os.setsid()
    for number, (path, flags) in enumerate(
        [(stdin, os.O_RDONLY), (files[0], os.O_WRONLY), (files[1], os.O_WRONLY)]
    ):
        place = os.open(path, flags)
        os.dup2(place, number)
        os.close(place)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115  it stays
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    environment = job.environment()  # before it is cleared, of which it is made
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(job.folder)
    forget_places()
    from torments import shim

    shim.install()
    from llamatrain.cli.main import main

    sys.argv = ["llamatrain", *job.words]
    return _ended(main)


def _ended(main: Callable[[], None]) -> int:
    """As the interpreter ends: what is not caught is told, and what was to go with the program goes."""
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


def forget_places() -> None:
    """What this process has found out about places is not so for one with another environment."""
    tempfile.tempdir = None
    for found in PLACES:
        found.cache_clear()


def know_places() -> None:
    """Looked for once, in the process that is forked: to look takes longer than most commands do."""
    modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("llamatrain.")]
    PLACES[:] = [
        value
        for values in modules
        for name, value in values.items()
        if (name.endswith("cache_folder") or name == "passing") and hasattr(value, "cache_clear")
    ]


def files_of(job: Job) -> tuple[Path, Path]:
    """New files for what it says, beside the folder that it runs in."""
    place = job.folder.parent / "said"
    place.mkdir(exist_ok=True)
    number = len(list(place.iterdir()))
    files = place / f"{number}.out", place / f"{number}.err"
    for path in files:
        path.touch()
    return files


def spool(job: Job) -> Path:
    if job.stdin is None:
        return Path(os.devnull)
    path = job.folder.parent / "said" / "stdin"
    path.write_bytes(job.stdin)
    return path
