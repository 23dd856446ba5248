"""Run one of these functions on each rank: `python -m tests.helpers.rank_program NAME WORDS...`."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import typer

import llamatrain.cli.evaluate as command
from llamatrain.__main__ import main
from llamatrain.distributed import heartbeat
from llamatrain.distributed.comm import Comm, get_comm
from llamatrain.errors import FileError, LlamatrainError, UsageError
from llamatrain.run.signals import CommandInterrupts

STEPS = 100_000
PATIENCE = 60.0  # seconds


class OneForAll(LlamatrainError):
    shared = True
    exit_code = 3


def says(there: Comm) -> None:
    print(f"{there.rank} of {there.size}", flush=True)
    print(f"{there.rank} of {there.size}", file=sys.stderr, flush=True)


def nobody(there: Comm) -> None:
    print("mpi4py" in sys.modules, there.size)


def patiently(what: Callable[..., None]) -> Callable[..., None]:
    """All fail: however long it takes until the last has, it is heard before one is chosen."""

    def done(there: Comm) -> None:
        heartbeat.COLLECT = heartbeat.END_ALONE = PATIENCE
        what(there)

    return done


@patiently
def shared(there: Comm) -> None:
    raise OneForAll("no step is left")


@patiently
def agreed(there: Comm) -> None:
    with there.raise_on_all():
        if there.rank == 1:
            raise FileError("a.txt: not UTF-8")


@patiently
def everywhere(there: Comm) -> None:
    raise UsageError("no such thing")


def one(there: Comm, kind: str) -> None:
    """Fails on the second, while the others wait for it."""
    heartbeat.END_ALONE = PATIENCE
    if there.rank == 1:
        if kind == "os":
            Path("/no/such/file").read_text()
        raise {
            "usage": UsageError("it cannot be"),
            "bug": ZeroDivisionError("a fault"),
            "memory": MemoryError(),
        }[kind]
    there.all_gather(0)


def first(there: Comm) -> None:
    """Fails on the first, which also prints."""
    heartbeat.END_ALONE = PATIENCE
    if there.rank == 0:
        raise FileError("disk full")
    there.barrier()


def steps(there: Comm, timeout: str = "60", mark: str = "") -> None:
    """A run that is told nothing but when to end: it asks at each step, and leaves a mark where it is."""
    asked = 0
    with CommandInterrupts() as interrupts, there.watch(float(timeout), lambda: "llamatrain --resume runs/x"):
        interrupts.can_save = True
        for step in range(1, STEPS):
            there.set_status(step, "bucket 3")
            asked = max(there.all_gather(interrupts.pending))
            if mark:
                Path(f"{mark}{there.rank}").write_text(f"{step} {os.getpid()}")
            if asked:
                break
            there.barrier()
            time.sleep(0.005)
    print(f"saved at {step}", flush=True)
    raise typer.Exit(128 + asked)


def deaf(there: Comm, mark: str, saving: str) -> None:
    """Asked to end, it goes on."""
    with CommandInterrupts() as interrupts:
        interrupts.can_save = saving == "saving"
        for step in range(1, STEPS):
            Path(f"{mark}{there.rank}").write_text(f"{step} {os.getpid()}")
            time.sleep(0.005)


def busy(there: Comm) -> None:
    """Longer than the timeout: in Python, in compiled code, in MPI."""
    with there.watch(2, lambda: ""):
        end = time.monotonic() + 3
        while there.rank == 0 and time.monotonic() < end:
            sum(range(1000))
        if there.rank == 1:
            ctypes.CDLL(None).usleep(3_000_000)
        there.all_gather(0)
    if there.rank == 0:
        print("all well")


def differ(there: Comm, *names: str) -> None:
    facts: dict[str, Any] = {"options": {"lr": 0.1, "batch": 8}, "version": "1", "base": "a" * 64}
    if there.rank == 1:
        facts |= {"options": {"lr": 0.1, "batch": 9}} if "options" in names else {}
        facts |= {name: "another" for name in names if name != "options"}
    there.assert_equal_on_all(facts)
    if there.rank == 0:
        print("the same")


def stuck(there: Comm, which: str) -> None:
    """One stands still, and the others wait in MPI for it."""
    with there.watch(2, lambda: "llamatrain --resume runs/x"):
        there.set_status(17, "bucket 3")
        time.sleep(0.6)
        if there.rank == int(which):
            os.kill(os.getpid(), signal.SIGSTOP)
        there.all_gather(0)


def work(*_: object) -> NoReturn:
    globals()[name](get_comm(), *words)
    raise typer.Exit


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    command.evaluate_model, command.check_model = work, lambda *_: None
    sys.argv = ["llamatrain", "evaluate", "model", "data"]
    main()
