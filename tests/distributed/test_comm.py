"""Processes that a launcher has started together: what they tell each other, who prints, and how they end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from llamatrain.distributed.launcher import LaunchInfo, get_launch_info
from llamatrain.distributed.single import SingleProcess
from tests.helpers import mpi_programs
from tests.helpers.cli import Done, environment
from tests.helpers.mpi_programs import Started, alone, descendants, needs_mpi, python

PROGRAM = "-m", "tests.helpers.rank_program"
PATIENT = """
from llamatrain.distributed import heartbeat
heartbeat.COLLECT = heartbeat.END_ALONE = 60.0  # all fail: however long it takes until the last has, on a machine that is busy
from llamatrain.__main__ import main
main()
"""
OURS = (
    "PMI_RANK",
    "PMI_SIZE",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
)
MEETS = """
from llamatrain.distributed.comm import get_comm
there = get_comm()
print(there.rank, there.size, there.all_gather(there.rank * 2), there.broadcast("of %d" % there.rank), flush=True)
"""


def together(count: int, *words: object) -> Done:
    return python(count, *PROGRAM, *map(str, words))


# ---- what a launcher says ----------------------------------------------------


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({}, None),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, LaunchInfo(3, 4, can_join=True)),
        ({"PMIX_RANK": "0"}, LaunchInfo(0, None, can_join=True)),
        (
            {"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
            LaunchInfo(1, 2, can_join=True),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"},
            LaunchInfo(1, 2, can_join=True),
        ),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, LaunchInfo(1, 2, can_join=False)),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),  # a shell on a node that was allocated
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", "SLURM_STEP_NUM_TASKS": "9"},
            LaunchInfo(0, 2, can_join=True),
        ),  # mpiexec within a step
        ({"PMI_RANK": ""}, None),
        ({"PMI_RANK": "-1", "PMI_SIZE": "two"}, None),
        ({"PMI_RANK": "٣"}, None),
        ({"PMI_RANK": "9" * 5000, "SLURM_STEP_NUM_TASKS": "0x2"}, None),
    ],
)
def test_what_a_launcher_says(
    told: dict[str, str], found: LaunchInfo | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert get_launch_info() == found


def said_with(**told: str) -> Done:
    """Of the second function of the program, by an interpreter in which mpi4py is not to be found where so asked."""
    done = subprocess.run(
        [sys.executable, *PROGRAM, "nobody"],
        env=alone(**told),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_one_that_nobody_has_launched_loads_no_mpi(tmp_path: Path) -> None:
    assert said_with() == Done(0, "False 1\n", "")
    whole = "import sys; from llamatrain.__main__ import main\ntry: main()\nfinally: print('mpi4py' in sys.modules)"
    words = [
        "from-scratch",
        "--vocab-size",
        "20",
        "--embd",
        "16",
        "--head",
        "2",
        "--layer",
        "1",
        "--ctx",
        "16",
        "--iters",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, "-c", whole, *words],
        env=alone(),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.endswith("False\n"), done.stderr


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_singletons_of_slurm_are_refused_once(rank: str, lines: int) -> None:
    done = said_with(SLURM_STEP_NUM_TASKS="2", SLURM_PROCID=rank)
    assert done.code == 2 and not done.out
    told = "error: 2 processes were started together but cannot find each other; start them with srun --mpi=pmix (or pmi2) [mpi-not-joined]"
    assert done.errors == [told][:lines]


@pytest.fixture
def no_mpi4py(tmp_path: Path) -> str:
    """A folder in which a module hides it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *of: None if name == 'mpi4py' else find(name, *of)\n"
    )
    return os.pathsep.join((str(tmp_path), environment()["PYTHONPATH"]))


def test_without_mpi4py(no_mpi4py: str) -> None:
    for told in ({"PMI_RANK": "0", "PMI_SIZE": "1"}, {"PMIX_RANK": "0"}):
        assert said_with(PYTHONPATH=no_mpi4py, **told) == Done(0, "False 1\n", "")
    done = said_with(PYTHONPATH=no_mpi4py, PMI_RANK="0", PMI_SIZE="2")
    assert done.code == 2
    assert done.errors == [
        "error: 2 processes were started together but mpi4py is not installed; run pip install 'llamatrain[mpi]' [mpi4py-missing]"
    ]
    assert said_with(PYTHONPATH=no_mpi4py, PMIX_RANK="1").code == 2


@needs_mpi
def test_a_launcher_of_another_mpi_is_refused() -> None:
    """It says two, and MPI finds one."""
    done = said_with(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2")
    assert done.code == 2 and not done.out
    assert done.errors[0].startswith(
        "error: 2 processes were started together but did not find each other: the launcher belongs to another MPI"
    )


# ---- what they tell each other -----------------------------------------------


@needs_mpi
def test_what_each_has_comes_to_all() -> None:
    done = python(3, "-c", MEETS)
    assert done.code == 0 and not done.err
    assert sorted(done.out.splitlines()) == [f"{rank} 3 [0, 2, 4] of 0" for rank in range(3)]


@needs_mpi
def test_one_rank_is_a_world_too() -> None:
    done = together(1, "one", "usage")
    assert (done.code, done.err) == (0, "")


@needs_mpi
@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ((), 0, ""),
        (("base", "options"), 1, "its options batch is 9 (not 8)"),
        (("base", "version"), 1, "its version is 'another' (not '1')"),
        (("base",), 1, f"its base is 'another' (not '{'a' * 40}'...)"),
    ],
)
def test_what_differs_first_is_named(words: tuple[str, ...], code: int, told: str) -> None:
    done = together(2, "differ", *words)
    host = os.uname().nodename
    expected = (
        [
            f"error: rank 1 ({host}) differs from rank 0 ({host}): {told}; start all ranks in the same way [ranks-differ]"
        ]
        if told
        else []
    )
    assert (done.code, done.errors) == (code, expected)


def test_one_that_is_alone_differs_from_nobody() -> None:
    there = SingleProcess()
    there.assert_equal_on_all({"base": 1})
    there.set_status(1, "anything")
    with there.watch(1, lambda: ""), there.raise_on_all():
        assert there.all_gather(5) == [5]


# ---- who prints --------------------------------------------------------------


@needs_mpi
def test_only_the_first_prints() -> None:
    assert together(3, "says") == Done(0, "0 of 3\n", "0 of 3\n")


@needs_mpi
@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        (("--version",), 0, "llamatrain ", ""),
        (("evaluate", "--help"), 0, "Usage:", ""),
        (("--nothing",), 2, "", "error: no such option --nothing; see llamatrain --help [unknown-option]\n"),
        (("from-scratch", "--batch", 0), 2, "", "error: --batch must be 1 to 65536 (got 0)"),
        (
            ("evaluate", "/no/such.gguf", "/at/all"),
            2,
            "",
            "error: /no/such.gguf: No such file or directory [no-such-file]\n",
        ),
        *(
            (
                (*words,),
                2,
                "",
                f"error: llamatrain {name} runs in a single process (got: 2 processes were started together)",
            )
            for name, words in {
                "plan from-scratch": ("plan", "from-scratch"),
                "inspect": ("inspect", "x"),
                "generate without --prompts": ("generate", "x"),
            }.items()
        ),
    ],
)
def test_what_all_have_to_say_is_said_once(
    words: tuple[str | int, ...], code: int, out: str, err: str
) -> None:
    done = python(2, "-c", PATIENT, *words)
    assert done.code == code
    assert done.out.lstrip().startswith(out) and done.out.count(out or "\n") <= 1
    assert done.err.startswith(err) and done.err.count("\n") == bool(err)


# ---- what fails --------------------------------------------------------------


@needs_mpi
@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("shared",), 3, "no step is left"),
        (("everywhere",), 2, "no such thing"),
        (("agreed",), 1, "{1}: a.txt: not UTF-8"),
        (("first",), 1, "{0}: disk full"),
        (("one", "usage"), 2, "{1}: it cannot be"),
        (("one", "os"), 1, "{1}: /no/such/file: No such file or directory"),
        (("one", "memory"), 1, "{1}: not enough memory; a smaller model, --ctx or --batch takes less"),
    ],
)
def test_what_fails_is_said_once_and_ends_all(words: tuple[str, ...], code: int, told: str) -> None:
    done = together(3, *words)
    named = told.format(*(f"rank {rank} ({os.uname().nodename})" for rank in range(3)))
    assert done == Done(code, "", f"error: {named}\n")


@needs_mpi
def test_a_fault_of_the_program_comes_with_its_traceback() -> None:
    done = together(3, "one", "bug")
    assert done.code == 1 and done.err.count("Traceback") == 1
    assert done.errors == [f"error: rank 1 ({os.uname().nodename}): ZeroDivisionError: a fault"]


CALLS = """
import time
from llamatrain.distributed.comm import get_comm
there = get_comm()
if there.rank == 1:
    {ends}
there.all_gather(0)
"""


@needs_mpi
@pytest.mark.parametrize(
    "ends", ["raise KeyError('of the caller')", "with there.watch(9, str): raise KeyError('of the caller')"]
)
def test_a_program_that_calls_the_package_ends_as_a_whole(ends: str) -> None:
    done = python(2, "-c", CALLS.format(ends=ends))
    assert done.code == 1
    assert done.errors == [f"error: rank 1 ({os.uname().nodename}): KeyError: 'of the caller'"]


# ---- signals, and processes that are gone ------------------------------------


def until_at_work(folder: Path, count: int, process: Started) -> list[int]:
    """The processes of the ranks, which have told each other where they are by then."""
    end = time.monotonic() + 30
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError, ValueError):
            told = [(folder / f"mark{rank}").read_text().split() for rank in range(count)]
            if all(len(each) == 2 and int(each[0]) > 3 for each in told):
                return [int(pid) for _, pid in told]
        time.sleep(0.01)
    raise AssertionError("they did not begin")


def struck(
    folder: Path, blow: Callable[[Started, list[int]], object], words: tuple[str, ...] = ("steps", "60", "{}")
) -> tuple[Done, float]:
    """What comes of a run that something happens to, and how long it took; nothing is left of it."""
    with mpi_programs.launched(3, *PROGRAM, *(word.format(folder / "mark") for word in words)) as process:
        pids, all_ = until_at_work(folder, 3, process), descendants(process.pid)
        begun = time.monotonic()
        blow(process, pids)
        done, took = mpi_programs.ended(process, 30), time.monotonic() - begun
        end = time.monotonic() + 2
        while left := [pid for pid in all_ if is_there(pid)]:
            assert time.monotonic() < end, left
            time.sleep(0.01)
    return done, took


def is_there(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def to(rank: int, number: int) -> Callable[[Started, list[int]], object]:
    return lambda process, pids: os.kill(pids[rank], number)


def to_all(number: int) -> Callable[[Started, list[int]], object]:
    return lambda process, pids: [os.kill(pid, number) for pid in pids]


def to_launcher(number: int) -> Callable[[Started, list[int]], object]:
    return lambda process, pids: process.send_signal(number)


@needs_mpi
@pytest.mark.parametrize(
    ("blow", "code"),
    [
        (to_launcher(signal.SIGINT), 130),
        (to_launcher(signal.SIGTERM), 143),
        (to(2, signal.SIGTERM), 143),
        (to_all(signal.SIGINT), 130),
    ],
)
def test_a_signal_to_any_asks_all(
    blow: Callable[[Started, list[int]], object], code: int, tmp_path: Path
) -> None:
    done, _ = struck(tmp_path, blow)
    assert (done.code, done.err) == (code, "")
    assert done.out.count("saved at ") == 1


def twice(process: Started, pids: list[int]) -> None:
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)


@needs_mpi
@pytest.mark.parametrize(("blow", "saving"), [(twice, "saving"), (to_launcher(signal.SIGTERM), "nothing")])
def test_a_second_signal_ends_all_at_once(
    blow: Callable[[Started, list[int]], object], saving: str, tmp_path: Path
) -> None:
    """And the first where nothing can be saved yet."""
    done, took = struck(tmp_path, blow, ("deaf", "{}", saving))
    assert done == Done(143, "", "") and took < 2


@needs_mpi
@pytest.mark.parametrize("rank", [0, 2])
def test_one_that_is_killed_ends_all(rank: int, tmp_path: Path) -> None:
    """By the launcher, which says so, too."""
    done, took = struck(tmp_path, to(rank, signal.SIGKILL))
    assert done.code == 9 and took < 2
    assert done.err == ""


@needs_mpi
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_nobody_outlives_the_launcher(number: int, tmp_path: Path) -> None:
    done, took = struck(tmp_path, to_launcher(number))
    assert done.code == -number and took < 2


@needs_mpi
@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_stands_still_is_noticed(rank: int, tmp_path: Path) -> None:
    begun = time.monotonic()
    done = together(3, "stuck", rank)
    told = f"no sign of rank {rank} ({os.uname().nodename}) for 2 s (last: step 17, bucket 3)"
    assert done == Done(75, "", f"error: {told}; resume with: llamatrain --resume runs/x\n")
    assert time.monotonic() - begun < 10


@needs_mpi
def test_one_that_is_at_work_for_long_is_not() -> None:
    """In Python, in compiled code, or waiting in MPI for those."""
    assert together(3, "busy") == Done(0, "all well\n", "")
