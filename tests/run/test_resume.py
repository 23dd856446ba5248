"""Killed, stopped or damaged, and gone on with: the same bits as a run that nothing happened to."""

import os
import pty
import random
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llamatrain.gguf.reader import open_gguf
from tests.helpers.cli import (
    PROGRAM,
    TINY,
    Argument,
    Done,
    environment,
    finished,
    lines,
    losses,
    metrics,
    ran,
    run,
    same_bits,
    started,
    steps,
    text_file,
    timeless,
    until,
)

ALL_ON = (
    "--batch",
    2,
    "--grad-acc",
    3,
    "--ctx",
    32,
    "--val-split",
    0.05,
    "--eval-every",
    7,
    "--sample-every",
    9,
    "--seed",
    5,
)
LBFGS = ("--optimizer", "lbfgs", "--batch", 2, "--ctx", 32, "--seed", 5)


def arguments(data: Path, *more: Argument) -> list[Argument]:
    return ["from-scratch", data, *TINY, "--save-every", 3, *more]


def go_on(folder: Path) -> None:
    """Until it is done; at most a few times, if somebody else kills it."""
    ran("from-scratch", "--resume", folder)


def alike(one: Path, other: Path) -> None:
    assert timeless(one) == timeless(other)
    same_bits(one / "model.gguf", other / "model.gguf")


def kill_at(moment: Callable[[], bool], *command: Argument) -> bool:
    """Whether the run was still there to be killed."""
    with started(*command) as process:
        until(moment, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return process.returncode == -signal.SIGKILL


def killed_and_resumed(data: Path, folder: Path, chance: random.Random, moments: int, *more: Argument) -> int:
    """One run, killed at some moments and resumed after each; how many moments met it alive."""
    command, alive = arguments(data, *more, "--out", folder), 0
    for _ in range(moments):
        least, pause, inside = (
            lines(folder) + chance.randint(0, 8),
            chance.random() * 0.03,
            chance.random() < 0.5,
        )

        def moment(least: int = least, pause: float = pause, inside: bool = inside) -> bool:
            if lines(folder) < least:
                return False
            if inside and not saving(folder):
                return False
            time.sleep(0 if inside else pause)
            return True

        alive += kill_at(moment, *command)
        if (folder / "checkpoint-LATEST.gguf").exists():
            command = ["from-scratch", "--resume", folder]
        elif folder.exists():
            shutil.rmtree(folder)  # killed before the first save: nothing was done
    go_on(folder)
    return alive


KEPT = re.compile(
    r"config\.toml|(metrics|samples)\.jsonl|(checkpoint-(LATEST|\d+)|model|best(-\d+)?)\.gguf|loss\.svg|report\.(html|json)"
)


def saving(folder: Path) -> bool:
    """Whether a file is being written that is not in its place yet."""
    return folder.exists() and any(not KEPT.fullmatch(path.name) for path in folder.iterdir())


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed else []) for seed in range(6)]
)
def test_killed_at_any_moment(seed: int, tmp_path: Path) -> None:
    data = text_file(tmp_path)
    ran(*arguments(data, *ALL_ON, "--iters", 40, "--out", tmp_path / "whole"))
    alive = killed_and_resumed(
        data, tmp_path / "killed", random.Random(seed), 2 if seed == 0 else 4, *ALL_ON, "--iters", 40
    )
    assert alive
    assert [line["step"] for line in steps(tmp_path / "killed")] == list(range(1, 41))
    assert any("val_loss" in line for line in metrics(tmp_path / "killed"))
    samples = [(tmp_path / name / "samples.jsonl").read_bytes() for name in ("whole", "killed")]
    assert samples[0] == samples[1] and samples[0].count(b"\n") > 1
    assert not saving(tmp_path / "killed"), "what the kill left half-written is swept away"
    alike(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [LBFGS, (*ALL_ON, "--precision", "bf16"), (*ALL_ON, "--optimizer", "sgd", "--past", 3)]
)
def test_killed_in_other_ways_of_training(more: tuple[Argument, ...], tmp_path: Path) -> None:
    data = text_file(tmp_path)
    ran(*arguments(data, *more, "--iters", 40, "--out", tmp_path / "whole"))
    assert killed_and_resumed(data, tmp_path / "killed", random.Random(1), 4, *more, "--iters", 40)
    alike(tmp_path / "whole", tmp_path / "killed")


# ---- without a kill: some steps, then the rest -----------------------------


SCHEDULE = ("--warmup", 2, "--decay-steps", 18)  # else it follows from how many steps there are


@pytest.mark.parametrize(
    "given",
    [(*ALL_ON, *SCHEDULE), LBFGS, (*LBFGS, "--lbfgs-fresh", 4), (*LBFGS, "--lbfgs-fresh", 11)],
    ids=["adamw", "lbfgs", "fresh", "fresh-then"],
)
def test_some_steps_and_then_the_rest(given: tuple[Argument, ...], tmp_path: Path) -> None:
    data = text_file(tmp_path)
    ran(*arguments(data, *given, "--iters", 20, "--out", tmp_path / "whole"))
    ran(*arguments(data, *given, "--iters", 11, "--out", tmp_path / "parts"))
    assert len(steps(tmp_path / "parts")) == 11
    ran("from-scratch", "--resume", tmp_path / "parts", "--iters", 20)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    same_bits(tmp_path / "whole" / "model.gguf", tmp_path / "parts" / "model.gguf")


def test_the_same_command_gives_the_same_bits(tmp_path: Path) -> None:
    data = text_file(tmp_path)
    for name in ("one", "two"):
        ran(*arguments(data, *ALL_ON, "--iters", 8, "--out", tmp_path / name))
    alike(tmp_path / "one", tmp_path / "two")
    ran(*arguments(data, *ALL_ON, "--iters", 8, "--seed", 6, "--out", tmp_path / "three"))
    assert losses(tmp_path / "one")[0] != losses(tmp_path / "three")[0]


def test_what_is_saved_more_often_changes_nothing(tmp_path: Path) -> None:
    data = text_file(tmp_path)
    ran(*arguments(data, *ALL_ON, "--iters", 12, "--out", tmp_path / "one"))
    ran(*arguments(data, *ALL_ON, "--iters", 12, "--save-every", 1, "--keep", 3, "--out", tmp_path / "two"))
    alike(tmp_path / "one", tmp_path / "two")
    kept = sorted(path.name for path in (tmp_path / "two").glob("checkpoint-*.gguf"))
    assert len(kept) == 4 and "checkpoint-LATEST.gguf" in kept, kept


def test_a_finished_run_is_resumed_to_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ran(*arguments(text_file(tmp_path), *ALL_ON, "--iters", 4, "--out", folder))
    before, weights = timeless(folder), (folder / "model.gguf").read_bytes()
    ran("from-scratch", "--resume", folder)
    assert timeless(folder) == before and (folder / "model.gguf").read_bytes() == weights


def test_other_threads_and_precision_are_said(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ran(*arguments(text_file(tmp_path), *ALL_ON, "--iters", 4, "--threads", 2, "--out", folder))
    done = ran("from-scratch", "--resume", folder, "--iters", 6, "--threads", 1, "--precision", "bf16")
    assert "thread" in done.err and "bf16" in done.err
    assert [line["step"] for line in steps(folder)] == list(range(1, 7))


@pytest.mark.parametrize("harm", ["cut", "flipped", "empty"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(harm: str, tmp_path: Path) -> None:
    data, given = text_file(tmp_path), (*ALL_ON, *SCHEDULE)
    ran(*arguments(data, *given, "--iters", 9, "--out", tmp_path / "whole"))
    ran(*arguments(data, *given, "--iters", 6, "--out", tmp_path / "run"))
    newest = tmp_path / "run" / "checkpoint-6.gguf"
    if not newest.exists():
        newest = next((tmp_path / "run").glob("checkpoint-*6.gguf"))
    content = bytearray(newest.read_bytes())
    if harm == "flipped":
        content[len(content) // 2] ^= 0x40
    else:
        del content[len(content) - 5000 if harm == "cut" else 0 :]
    with newest.open("r+b") as file:  # in place: checkpoint-LATEST.gguf is the same file
        file.truncate(len(content))
        file.write(content)
    done = ran("from-scratch", "--resume", tmp_path / "run", "--iters", 9)
    assert "checkpoint-" in done.err and re.search(
        "damaged|broken|cannot be read|not whole|invalid", done.err
    ), done.err
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "run")
    same_bits(tmp_path / "whole" / "model.gguf", tmp_path / "run" / "model.gguf")


# ---- signals ---------------------------------------------------------------


def printed_command(done: Done) -> list[str]:
    told = [
        line for line in done.err.splitlines() if "llamatrain from-scratch" in line and "--resume" in line
    ]
    assert told, done.err
    words = shlex.split(told[-1][told[-1].index("llamatrain from-scratch") :])
    return words[1:]


def interrupted(number: signal.Signals, folder: Path, *command: Argument) -> Done:
    """A run that is stopped after some steps."""
    with started(*command, "--out", folder) as process:
        until(lambda: lines(folder) >= 5, process)
        process.send_signal(number)
        done = finished(process)
    assert "Traceback" not in done.err and done.out == "" and not done.errors
    assert 5 <= len(steps(folder)) < 400
    return done


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    """In a folder whose name a shell would take apart."""
    command, folder = (
        arguments(text_file(tmp_path), *ALL_ON, "--iters", 400, "--save-every", 1000),
        tmp_path / "it's a run",
    )
    done = interrupted(signal.SIGINT, folder, *command)
    assert done.code == 130, done.err
    subprocess.run(
        [*PROGRAM, *printed_command(done)], env=environment(), check=True, capture_output=True, timeout=60
    )
    ran(*command, "--out", tmp_path / "whole")
    alike(tmp_path / "whole", folder)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_others_do_the_same(tmp_path: Path, number: signal.Signals, code: int) -> None:
    done = interrupted(number, tmp_path / "run", *arguments(text_file(tmp_path), *ALL_ON, "--iters", 400))
    assert done.code == code and printed_command(done)


ON_ITS_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from llamatrain.cli.main import main; main()"


def test_the_terminal_is_closed(tmp_path: Path) -> None:
    """What was done is saved, though there is nothing left to say it to."""
    folder, (master, slave) = tmp_path / "run", pty.openpty()
    command = arguments(
        text_file(tmp_path), "--ctx", 32, "--iters", 100_000, "--save-every", 100_000, "--out", folder
    )
    words, streams = (
        [sys.executable, "-c", ON_ITS_TERMINAL, *map(str, command)],
        dict.fromkeys(("stdin", "stdout", "stderr"), slave),
    )
    with subprocess.Popen(words, env=environment(TERM="xterm"), start_new_session=True, **streams) as process:
        os.close(slave)
        threading.Thread(target=drained, args=(master, lambda: lines(folder) >= 5), daemon=True).start()
        assert process.wait(60) == 129
    assert (
        5
        <= open_gguf(folder / "checkpoint-LATEST.gguf").get_value("training.iteration_count", int)
        == len(steps(folder))
    )


def drained(terminal: int, until: Callable[[], bool]) -> None:
    """What is shown is read for a while; then the terminal is closed."""
    while not until():
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 1 << 16)
    os.close(terminal)


def test_under_nohup_the_end_of_the_terminal_is_none(tmp_path: Path) -> None:
    command = arguments(text_file(tmp_path), "--ctx", 32, "--iters", 30, "--out", tmp_path / "run")
    with started(*command, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as process:
        until(lambda: lines(tmp_path / "run") >= 3, process)
        process.send_signal(signal.SIGHUP)
        assert finished(process).code == 0
    assert len(steps(tmp_path / "run")) == 30


def test_a_signal_is_heard_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    """A step of many micro-batches: it is not waited for, and what it has gathered is not lost."""
    data, folder = text_file(tmp_path, 40_000), tmp_path / "run"
    command = arguments(data, "--batch", 2, "--ctx", 64, "--grad-acc", 400, "--iters", 2, "--eval-every", 0)
    ran(*command, "--out", tmp_path / "whole")
    for pause in (
        0.05,
        0.2,
        0.02,
        0.5,
        2.0,
    ):  # one of them ends within the second step, however busy the machine is
        with started(*command, "--out", folder, "--overwrite") as process:
            until(lambda: lines(folder) >= 1, process)
            time.sleep(pause)
            process.send_signal(signal.SIGINT)
            done = finished(process)
        if "training.partial" in open_gguf(folder / "checkpoint-LATEST.gguf").metadata:
            break
    else:
        pytest.fail("it was never cut within a step")
    assert done.code == 130, done.err
    assert len(steps(folder)) == 1
    ran(*printed_command(done))
    alike(tmp_path / "whole", folder)


@pytest.mark.slow
def test_a_signal_stops_lbfgs(tmp_path: Path) -> None:
    """It is saved at the last whole iteration."""
    data, folder = text_file(tmp_path, 40_000), tmp_path / "run"
    command = arguments(data, *LBFGS, "--grad-acc", 20, "--iters", 30, "--save-every", 1000)
    with started(*command, "--out", folder) as process:
        until(lambda: lines(folder) >= 4, process)
        process.send_signal(signal.SIGINT)
        done = finished(process)
    assert done.code == 130, done.err
    ran(*printed_command(done))
    ran(*command, "--out", tmp_path / "whole")
    alike(tmp_path / "whole", folder)


LONG = ("--ctx", 8192, "--batch", 8, "--iters", 9, "--remat", "none")  # a micro-batch of seconds


def test_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    data, folder = text_file(tmp_path, 200_000), tmp_path / "run"
    with started(*arguments(data, *LONG), "--out", folder) as process:
        until(lambda: lines(folder) >= 1, process)
        time.sleep(0.5)  # the next one is under way
        process.send_signal(signal.SIGINT)
        time.sleep(0.6)  # two at once are meant as one
        assert process.poll() is None, "the first one waits for the micro-batch"
        process.send_signal(signal.SIGINT)
        done = finished(process)
    assert lines(folder) == 1, "the second one does not"
    assert done.code in (130, -signal.SIGINT), done
    assert "Traceback" not in done.err
    assert (folder / "checkpoint-LATEST.gguf").exists() and not saving(folder)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [2.0, 4.8, 5.6, 6.4, 7.2, 8.0, 8.8])
def test_a_signal_while_kernels_are_compiled(seconds: float, tmp_path: Path) -> None:
    """The compiler must not swallow it, nor end in a fault of its own."""
    command = arguments(text_file(tmp_path), "--ctx", 32, "--iters", 1_000_000, "--out", tmp_path / "run")
    with started(*command, env=environment(LLAMATRAIN_CACHE=str(tmp_path / "cache"))) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        done = finished(process, 10)
    assert done.code == 130 and "Traceback" not in done.err, done.err[-2000:]


def test_handlers_are_given_back(tmp_path: Path) -> None:
    each_one = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(each) for each in each_one]
    ran(*arguments(text_file(tmp_path), "--ctx", 32, "--iters", 1, "--out", tmp_path / "run"))
    assert [signal.getsignal(each) for each in each_one] == before


# ---- what may change -------------------------------------------------------


def test_only_some_options_may_change(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ran(*arguments(text_file(tmp_path), *ALL_ON, "--iters", 4, "--out", folder))
    before = (folder / "checkpoint-LATEST.gguf").read_bytes()
    for option in (
        ("--lr", 0.5),
        ("--embd", 64),
        ("--batch", 3),
        ("--seed", 6),
        ("--optimizer", "sgd"),
        ("--ctx", 16),
    ):
        done = run("from-scratch", "--resume", folder, "--iters", 6, *option)
        assert done.code in (1, 2) and len(done.errors) == 1, (option, done.err)
        assert str(option[0]) in done.errors[0], done.err
        assert (folder / "checkpoint-LATEST.gguf").read_bytes() == before
    ran(
        "from-scratch",
        "--resume",
        folder,
        "--iters",
        6,
        "--save-every",
        2,
        "--eval-every",
        3,
        "--sample-every",
        0,
    )
    assert len(steps(folder)) == 6


def test_a_checkpoint_file_is_resumed_into_a_folder(tmp_path: Path) -> None:
    data, given = text_file(tmp_path), (*ALL_ON, *SCHEDULE)
    ran(*arguments(data, *given, "--iters", 9, "--out", tmp_path / "whole"))
    ran(*arguments(data, *given, "--iters", 6, "--out", tmp_path / "run"))
    ran(
        "from-scratch",
        "--resume",
        tmp_path / "run" / "checkpoint-LATEST.gguf",
        "--iters",
        9,
        "--out",
        tmp_path / "other",
    )
    assert losses(tmp_path / "other")[-3:] == losses(tmp_path / "whole")[-3:]
    same_bits(tmp_path / "whole" / "model.gguf", tmp_path / "other" / "model.gguf")


def test_moved_data_is_named_again(tmp_path: Path) -> None:
    data, given = text_file(tmp_path), (*ALL_ON, *SCHEDULE)
    ran(*arguments(data, *given, "--iters", 6, "--out", tmp_path / "whole"))
    ran(*arguments(data, *given, "--iters", 3, "--out", tmp_path / "run"))
    resume = ("from-scratch", "--resume", tmp_path / "run", "--iters", 6)
    elsewhere = tmp_path / "elsewhere" / data.name
    elsewhere.parent.mkdir()
    shutil.copy(data, elsewhere)
    done = run(*resume, elsewhere)
    assert done.code == 2 and "the data must stay the same" in done.err  # the old file is still there
    data.unlink()
    assert "no such file" in run(*resume).err
    ran(*resume, elsewhere)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    same_bits(tmp_path / "whole" / "model.gguf", tmp_path / "run" / "model.gguf")
    ran("from-scratch", "--resume", tmp_path / "run", "--iters", 7)  # the new place is remembered
