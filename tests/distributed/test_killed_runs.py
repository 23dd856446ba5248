"""Runs on several ranks that are killed at any moment, and gone on with by another number of ranks: nothing is lost."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.distributed.test_runs import same_run
from tests.helpers.cli import PROGRAM, TINY, Argument, lines, pairs_file, run, text_file, until
from tests.helpers.lora_runs import WIDE, base
from tests.helpers.mpi_programs import by_rank, descendants, launched, needs_mpi, ran

pytestmark = [needs_mpi, pytest.mark.slow]
KILLS = 10
SECONDS = 30  # in which all are gone
RUN = ("--save-every", 2, "--keep", 2, "--threads", 1, "--grad-groups", 8, "--batch", 8, "--sample-every", 0)


def lora(folder: Path) -> tuple[Argument, ...]:
    model, data = base(folder / "base.gguf", WIDE, "Q4_K"), pairs_file(folder, 90)
    more = (
        "--ctx",
        64,
        "--lora-r",
        4,
        "--lora-dropout",
        0.1,
        "--precision",
        "f32",
        "--val-split",
        0.2,
        "--eval-every",
        7,
    )
    return ("finetune", model, data, *more, "--iters", 100, *RUN)


def lbfgs(folder: Path) -> tuple[Argument, ...]:
    """Whose evaluations are all ranks' together."""
    return (
        "from-scratch",
        text_file(folder, 4096),
        *TINY,
        "--ctx",
        32,
        "--optimizer",
        "lbfgs",
        "--lbfgs-fresh",
        4,
        "--iters",
        300,
        *RUN,
    )


def is_there(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.mark.parametrize("made", [lora, lbfgs], ids=["lora", "lbfgs"])
def test_killed_and_gone_on_with_by_others(
    made: Callable[[Path], tuple[Argument, ...]], tmp_path: Path
) -> None:
    """Of a rank or of mpiexec, by SIGKILL, whatever they are about to do."""
    draw, given, folder = random.Random(made.__name__), made(tmp_path), tmp_path / "several"
    assert run(*given, "--out", tmp_path / "alone").code == 0
    killed = 0
    for number in range(KILLS):
        resumes = (folder / "checkpoint-LATEST.gguf").exists()
        going = (given[0], "--resume", folder) if resumes else (*given, "--out", folder, "--overwrite")
        with launched(draw.choice((2, 3, 4)), *PROGRAM[1:], *going) as process:
            enough = lines(folder) + draw.randint(0, 6) if resumes else draw.randint(0, 6)
            if number % 3:
                until(lambda enough=enough: lines(folder) > enough, process)  # type: ignore[misc]
            time.sleep(draw.random() * (0.1 if number % 3 else 3.0))
            ranks = by_rank(process)
            every = {process.pid, *descendants(process.pid)}
            with suppress(ProcessLookupError):
                os.kill(
                    draw.choice(list(ranks.values())) if ranks and number % 2 else process.pid, signal.SIGKILL
                )
                killed += process.poll() is None
            process.communicate(timeout=SECONDS)
            until(lambda every=every: not any(map(is_there, every)), seconds=SECONDS)  # type: ignore[misc]
    ran(2, given[0], "--resume", folder)
    same_run(folder, tmp_path / "alone")
    assert killed > KILLS // 2
