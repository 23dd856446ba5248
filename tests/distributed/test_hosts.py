"""Several hosts, made of network namespaces: one that vanishes silently is noticed, and nothing is left of the run."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.test_comm import PROGRAM, until_at_work
from tests.helpers import mpi_programs
from tests.helpers.cli import ROOT, Done
from tests.helpers.mpi_programs import Started, needs_mpi

sys.path.insert(0, str(ROOT / "scripts"))
import hosts as made

sys.path.pop(0)

WHY_NOT = made.find_obstacle()
pytestmark = [
    needs_mpi,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "they can be made"),
]


@pytest.fixture(scope="module")
def two() -> Iterator[made.Hosts]:
    with made.create_hosts(2) as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def whole(two: made.Hosts) -> Iterator[None]:
    """Each finds them in order, and leaves nothing behind."""
    yield
    end = time.monotonic() + 10
    while left := two.processes():
        assert time.monotonic() < end, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
        time.sleep(0.02)
    for host in (1, 2):
        two.mend(host)


def struck(
    hosts: made.Hosts, folder: Path, blow: Callable[[Started, list[int]], object], timeout: int = 3
) -> tuple[Done, float]:
    with mpi_programs.launched(
        2, *PROGRAM, "steps", timeout, folder / "mark", options=tuple(hosts.options)
    ) as process:
        pids = until_at_work(folder, 2, process)
        time.sleep(0.6)  # they have told each other where they are
        begun = time.monotonic()
        blow(process, pids)
        done = mpi_programs.ended(process, 60)
        return done, time.monotonic() - begun


@pytest.mark.parametrize("host", [1, 2])
def test_a_link_that_is_cut_is_noticed_on_both_sides(host: int, two: made.Hosts, tmp_path: Path) -> None:
    done, took = struck(two, tmp_path, lambda process, pids: two.cut(host))
    assert done.code == 75 and took < 20, (done, took)
    assert "no sign of rank" in done.err and "; resume with: llamatrain --resume runs/x" in done.err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_ends_all(rank: int, two: made.Hosts, tmp_path: Path) -> None:
    """By the launcher, in many words."""
    done, took = struck(two, tmp_path, lambda process, pids: os.kill(pids[rank], signal.SIGKILL))
    assert done.code not in (0, 75) and took < 3
    assert "error:" not in done.err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_stands_still_is_noticed(rank: int, two: made.Hosts, tmp_path: Path) -> None:
    done, took = struck(two, tmp_path, lambda process, pids: os.kill(pids[rank], signal.SIGSTOP))
    assert done.code == 75 and took < 10
    assert done.err.startswith(
        f"error: no sign of rank {rank} ({two.namespace(rank + 1)}) for 3 s (last: step "
    )
