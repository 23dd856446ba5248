"""Changes the environment of a run: moves folders, stops clocks, closes streams, limits memory."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from torments import gguf, kills
from torments.fixtures import FIXED, SAVING, TINY
from torments.mutants import sign_checkpoint
from torments.proc import POLL
from torments.processes import ROOT
from torments.trial import INTERRUPTED, SECONDS, Argument, Trial, build_kind, find_faults, last_line

SCRATCH: tuple[Argument, ...] = ("from-scratch", "text.txt", *TINY, *SAVING)
COMMANDS: tuple[tuple[Argument, ...], ...] = (
    (*SCRATCH, "--out", "out"),
    ("finetune", "base.gguf", "text.txt", *SAVING, "--ctx", 32, "--out", "out"),
    ("evaluate", "base.gguf", "text.txt", "--threads", 1),
    ("generate", "base.gguf", "--prompt", "ab", "-n", 5, "--threads", 1),
    ("export-lora", "base.gguf", "--lora", "adapter.gguf", "--out", "m.gguf"),
    ("preview", "chats.jsonl", "--model", "base.gguf"),
)
MODELS: tuple[tuple[Argument, ...], ...] = (
    (),
    ("--no-flash", "--ctx", 512, "--batch", 8),
    ("--no-flash", "--ctx", 1024, "--batch", 4, "--remat", "none"),
    ("--ctx", 512, "--embd", 256, "--ff", 512, "--batch", 16),
    (
        "--vocab-size",
        400,
        "--embd",
        256,
    ),
    ("--optimizer", "lbfgs", "--embd", 256, "--iters", 8),  # its history is full then
)
TRAINING_SECONDS = 4.0  # CPU seconds that a run trains until its signals
GROWS = 8_000_000  # bytes that 19,000 more steps may take, for the page's curves
ALLOWED = 10_000_000  # bytes by which a plan may exceed a small run
CHAT = [{"role": "user", "content": "a" * 60}, {"role": "assistant", "content": "b" * 90}]
LEAST, ENOUGH = 150_000, 350_000  # kB of address space with which commands fail, and with which they succeed


def move_run(t: Trial, index: int) -> None:
    """Move or remove the folder of a run, or a file in it."""
    t.copy_files("text.txt")
    what = ("move", "remove", "delete")[index % 3]
    ops = int((kills.undisturbed_run(t.fixtures, "from-scratch") / "operations").read_text())
    out = t.folder / "out"
    target = out / ("metrics.jsonl" if index % 2 else "model.gguf") if what == "delete" else out
    moment = t.random.randint(ops // 3, ops - 1)
    plan = {"under": [str(t.folder)], "at": moment, "do": what, "folder": str(target)}
    result = t.run(*SCRATCH, "--out", "out", plan=plan, codes=(0, 1))
    places = [out, t.folder / "out-moved"]
    expected = kills.undisturbed_run(t.fixtures, "from-scratch") / "here" / "out" / "model.gguf"
    if what == "delete" and not (out / "model.gguf").exists():  # deleted after the last save
        t.run("from-scratch", "--resume", "out", codes=(0,))
    saved = any(kills.same_tensors(place / "model.gguf", expected) for place in places)
    t.expect(saved, f"the last steps of the run are lost (exit code {result.code}): {last_line(result.err)}")
    t.check_gguf(*[place for place in places if place.exists()])


def stop_clock(t: Trial, index: int) -> None:
    """Run commands with a clock that stands still."""
    t.copy_files("text.txt", "base.gguf", "adapter.gguf", "chats.jsonl")
    t.run(*COMMANDS[index % len(COMMANDS)], plan={"clock": "still"}, codes=(0,))


def close_streams(t: Trial, index: int) -> None:
    """Close standard output or standard error, or their reader."""
    t.copy_files("text.txt", "base.gguf", "chats.jsonl")
    run: tuple[Argument, ...] = (*SCRATCH, "--out", "out", "--sample-every", 1)
    words: tuple[Argument, ...] = (
        run,
        ("preview", "chats.jsonl", "--model", "base.gguf", "-n", 39),
        ("generate", "base.gguf", "--prompt", "ab", "--threads", 1),
    )[index % 3]
    redirections = (">&-", "2>&-", ">&- 2>&-")
    if index < 9:
        t.log(redirections[index // 3])
        result = t.start(
            *words, real=True, before=("sh", "-c", f'exec "$@" {redirections[index // 3]}', "sh")
        ).wait()
    else:
        reading, writing = os.pipe()
        t.log("2>&1 | head -c 1")
        running = t.start(*words, real=True, streams={1: writing, 2: writing})
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        result = running.wait()
    t.faults += find_faults(result, (0, 1) if words is not run else (0,), check_errors=False)
    if words is run:
        t.expect(
            kills.same_tensors(
                t.folder / "out" / "model.gguf",
                kills.undisturbed_run(t.fixtures, "from-scratch") / "here" / "out" / "model.gguf",
            ),
            "the run is incomplete",
        )


def compare_plan(t: Trial, index: int) -> None:
    """Compare the plan's memory to that of the run.

    They may differ by 5 %, or by what an interpreter loads late. The process that learns a vocabulary has
    ended by then.
    """
    t.copy_files("text.txt")
    options: list[Argument] = [
        "text.txt",
        *TINY,
        *FIXED,
        "--iters",
        3,
        "--eval-every",
        0,
        *MODELS[index % len(MODELS)],
    ]
    t.run("from-scratch", *options, "--out", "first", real=True, check=False)  # compiles the kernels
    plan = t.run("plan", "from-scratch", "--json", *options, real=True, codes=(0,))
    result = t.start("from-scratch", *options, "--out", "out", real=True, seconds=120).wait()
    t.faults += find_faults(result, (0,), seconds=60, memory=1.5e9)
    if plan.code == 0:
        total = json.loads(plan.out)["total"]
        off = total / result.own - 1
        t.expect(
            abs(off) <= 0.05 or 0 < off * result.own < ALLOWED,
            f"planned {total / 1e6:.0f} MB, took {result.own / 1e6:.0f}: {off:+.1%}",
        )


def limit_memory(t: Trial, index: int) -> None:
    """Check that a run takes no more than --memory, also if it is refused in the end."""
    t.copy_files("text.txt")
    limit = 200 + t.random.choice([0, 20, 40, 60, 100, 200])
    words: tuple[Argument, ...] = (
        "from-scratch",
        "text.txt",
        *TINY,
        *FIXED,
        "--iters",
        2,
        *MODELS[index % len(MODELS)],
        "--memory",
        f"{limit}MB",
        "--out",
        "out",
    )
    t.run(*words[:-4], "--out", "first", real=True, check=False)  # compiles the kernels
    result = t.run(*words, real=True, codes=(0, 1), memory=limit * 1e6, seconds=60)
    plan = t.run("plan", *words[:-2], real=True, codes=(0, 1))
    t.expect(
        result.code == plan.code,
        f"the plan ends with {plan.code} and the run with {result.code}: {last_line(result.err)}",
    )


def starve_memory(t: Trial, index: int) -> None:
    """Limit the memory as a container does; the command must end with one line and keep saved files."""
    t.copy_files("text.txt", "base.gguf", "adapter.gguf", "chats.jsonl", "profiled")
    commands: list[tuple[Argument, ...]] = [*COMMANDS, ("report", "profiled"), ("inspect", "base.gguf")]
    words = commands[index % len(commands)]
    if index % 5 == 4:  # limited from the start, with two threads
        before = ("sh", "-c", f'ulimit -v {t.random.randint(LEAST, ENOUGH)}; exec "$@"', "sh")
        result = t.start(
            *words[:1], *("2" if word == 1 else word for word in words[1:]), real=True, before=before
        ).wait()
        t.codes.append(result.code)
        loading = f"{ROOT}/llamatrain/run" not in result.err  # the interpreter may be starting
        t.faults += (
            find_faults(result, (0, 1), check_errors=False)
            if result.code >= 0 and not (loading and "Traceback" in result.err)
            else []
        )
    else:
        t.run(*words, plan={"memory": int(10 ** t.random.uniform(3, 7.5))}, codes=(0, 1))
    t.check_gguf(t.folder)
    t.check_leftovers(t.folder)


def run_two_at_once(t: Trial, index: int) -> None:
    """Start two runs in one folder with an empty token cache.

    One is refused, or both end with the same bits.
    """
    name = list(kills.COMMANDS)[index % len(kills.COMMANDS)]
    command = kills.COMMANDS[name]
    t.copy_files(*command.inputs)
    own = t.root / "cache"
    shutil.copytree(t.fixtures.cache, own, ignore=shutil.ignore_patterns("tokens"))
    first = t.start(*command.words, cache=own)
    first.until(lambda: False, 0.3 * t.random.random())
    second = t.start(*command.words, cache=own)
    while first.poll() | second.poll():
        time.sleep(POLL)
    ends = first.wait(), second.wait()
    for result in ends:
        t.codes.append(result.code)
        t.faults += find_faults(result, (0, 1, 2))
    t.expect(0 in (result.code for result in ends), f"both runs failed: {last_line(ends[0].err)}")
    expected = kills.undisturbed_run(t.fixtures, name) / "here" / command.result
    t.expect(kills.same_tensors(t.folder / command.result, expected), "the result of two runs is neither's")
    t.check_gguf(t.folder)
    t.check_leftovers(t.folder)


def move_inputs(t: Trial, index: int) -> None:
    """Move or replace the base or the data of a run, before it is resumed or while it runs."""
    t.copy_files("base.gguf", "text.txt")
    command = kills.COMMANDS["lora" if index % 2 else "full"]
    moved = t.folder / ("text.txt" if index % 5 == 4 else "base.gguf")
    other = t.folder / "elsewhere" / "other.gguf"
    other.parent.mkdir()
    at = t.random.randint(
        1, int((kills.undisturbed_run(t.fixtures, kills.get_name(command)) / "operations").read_text())
    )
    while_it_runs = index % 3 == 0
    plan: dict[str, object] = {"under": [str(t.folder / "out")], "at": at, "do": "kill"}
    if while_it_runs:
        plan |= {"do": "move", "folder": str(moved)}
        other = moved.with_name(moved.name + "-moved")
    t.run(*command.words, plan=plan, codes=(0, 1) if while_it_runs else (0, -9), check_errors=False)
    if not while_it_runs:
        moved.rename(other)
        if index % 3 == 1:  # another file of the same size
            raw = other.read_bytes()
            moved.write_bytes(raw[: len(raw) // 2] + raw[: len(raw) // 2 - 1 : -1])
        if (
            "not what it was" in t.run(*command.resume_words, codes=(0, 1, 2)).err
        ):  # the shuffle starts again then, with other bits
            t.check_gguf(t.folder / "out")
            t.check_leftovers(t.folder)
            return
    if other.exists():
        other.replace(moved)
    kills.check_resumed(t, kills.get_name(command), 0)


def plan_huge_models(t: Trial, index: int) -> None:
    """Check that sizes that would take long are refused or planned soon."""
    t.copy_files("text.txt", "base.gguf")
    words = (
        ("--layer", 4096),
        ("--layer", 4096, "--embd", 32, "--head", 1),
        ("--ctx", 100_000),
        ("--head", 32, "--embd", 32768),
    )[index % 4]
    t.run("plan", "from-scratch", "text.txt", *TINY[:2], *words, codes=(0, 1, 2), seconds=10, memory=6e8)


def signal_twice(t: Trial, index: int) -> None:
    """Send a signal, and another one while the run is saved."""
    t.copy_files("text.txt")
    running = t.start(*SCRATCH[:-8], *FIXED, "--iters", 100_000, "--out", "out", real=True)
    running.until((t.folder / "out" / "metrics.jsonl").exists)
    running.until(lambda: False, t.random.random())
    for _ in range(2):
        running.signal(t.random.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
        running.until(lambda: False, t.random.random())
    result = running.wait()
    unhandled = (
        -signal.SIGINT,
        -signal.SIGTERM,
        -signal.SIGHUP,
    )  # Python no longer handles signals at its end
    codes = (0, INTERRUPTED, 143, 129, *unhandled)
    t.faults += find_faults(result, codes, seconds=SECONDS + TRAINING_SECONDS, check_errors=False)
    t.check_gguf(t.folder / "out")
    t.check_leftovers(t.folder)
    shutil.rmtree(t.folder / "out", ignore_errors=True)


def write_surrogates(t: Trial, index: int) -> None:
    """Write half a surrogate pair into a checkpoint; commands that read it must end well or with one line."""
    t.copy_files("run", "text.txt")
    path = t.folder / "run" / "checkpoint-4.gguf"
    for other in path.parent.glob("checkpoint-*"):
        if other != path:
            other.unlink()
    parts = gguf.parse(path.read_bytes())
    texts = [
        entry for entry in parts.entries if entry.key.startswith(b"training.") and entry.raw[8:9] == b"{"
    ]
    entry = t.random.choice(texts)
    words = entry.raw[8:].decode()
    entry.raw = gguf.text(
        t.random.choice([words.replace('": "', '": "\\ud800', 1), words.replace('{"', '{"\\udfff', 1)])
    )
    path.write_bytes(sign_checkpoint(parts.pack()))
    command: tuple[Argument, ...] = (
        ("from-scratch", "--resume", "run", "--iters", 5),
        ("inspect", path),
        ("report", "run"),
    )[index % 3]
    t.run(*command)


def use_undecodable_path(t: Trial, index: int) -> None:
    """Use a model whose path is not UTF-8; the line for llama.cpp must quote it for the shell."""
    t.copy_files("base.gguf")
    name = os.fsdecode(b"m\xff\xfe.gguf")
    (t.folder / "base.gguf").rename(t.folder / name)
    result = t.run("generate", name, "--prompt", "ab", "-n", 2, "--threads", 1, "-v", real=True, codes=(0,))
    t.expect(
        "\\xff\\xfe.gguf" in result.err and "udcff" not in result.err,
        f"the path is not quoted for the shell: {last_line(result.err)}",
    )


def block_cache(t: Trial, index: int) -> None:
    """Put a file where the cache should be; the next start must find the compiled kernels again."""
    t.copy_files("base.gguf", "text.txt")
    (blocked := t.root / "blocked").write_text("no folder")
    words: tuple[Argument, ...] = ("evaluate", "base.gguf", "text.txt", "--threads", 1)
    t.run(*words, real=True, cache=blocked, codes=(0,), check=False, seconds=600)
    result = t.run(*words, real=True, cache=blocked, codes=(0,), check=False)
    t.expect(
        result.code == 0 and "compiled" not in result.err,
        f"kernels are compiled again: {last_line(result.err)}",
    )


def mix_sources(t: Trial, index: int) -> None:
    """Start two ranks with different sources of one version; both must end with one line."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        t.skipped = "MPI is not installed for this Python"
        return
    t.copy_files("text.txt")
    other = t.root / "other"
    shutil.copytree(ROOT / "llamatrain", other / "llamatrain", ignore=shutil.ignore_patterns("__pycache__"))
    changed = t.random.choice(sorted((other / "llamatrain").rglob("*.py")))
    changed.write_text(changed.read_text() + "# changed\n")
    root = f"{str(other)!r} if os.environ.get('PMI_RANK') == '1' else {str(ROOT)!r}"
    ranks = f"import os, sys; sys.path.insert(0, {root}); "
    words = [
        str(mpiexec),
        "-n",
        "2",
        sys.executable,
        "-c",
        ranks + "from llamatrain.cli.main import main; main()",
    ]
    words += ["from-scratch", "text.txt", *map(str, TINY), "--iters", "1", "--out", "out"]
    environment = t.job((), None).environment() | {"PYTHONPATH": ""}
    done = subprocess.run(
        words, cwd=t.folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    t.expect(
        done.returncode == 1 and "source code" in done.stderr,
        f"the ranks run with different sources: {last_line(done.stderr)}",
    )
    t.expect("Traceback" not in done.stderr, f"a traceback: {last_line(done.stderr)}")


def check_progress_lines(t: Trial, index: int) -> None:
    """Check that a long tokenization writes a line every 15 seconds to a log, by a clock that runs fast."""
    base, times, count = (("plain.gguf", 20, 60_000), ("base.gguf", 5, 15_000))[index]
    t.copy_files(base)
    row = ({"prompt": "a" * 60, "completion": "b" * 90}, {"messages": CHAT})[index]
    (t.folder / "many.jsonl").write_text((json.dumps(row) + "\n") * count)
    words: tuple[Argument, ...] = (
        "finetune",
        base,
        "many.jsonl",
        *FIXED,
        "--iters",
        1,
        "--ctx",
        256,
        "--out",
        "out",
    )
    result = t.run(*words, plan={"clock": times}, codes=(0,), seconds=60, cache=t.root / "cache")
    seconds = [
        int(match) for match in re.findall(r"^tokenizing .* of .*, after (\d+) s$", result.err, re.MULTILINE)
    ]
    starts = [0, *seconds]
    t.expect(
        len(seconds) >= 2,
        f"no progress line in {result.wall:.1f} s, which the clock took for {result.wall * times:.0f}",
    )
    t.expect(all(b - a >= 14 for a, b in pairwise(starts)), f"lines too close together, after {seconds} s")
    t.expect(
        all(b - a <= 15 + 2 * times for a, b in pairwise(starts)), f"lines too far apart, after {seconds} s"
    )


def run_many_steps(t: Trial, index: int) -> None:
    """Check that a long run takes no more memory than a short one, except for its plots."""
    words: tuple[Argument, ...] = ("from-scratch", *TINY[2:], "--save-every", 0, "--threads", 1)
    peaks = [
        t.run(
            *words, "--iters", count, "--out", f"o{count}", real=True, codes=(0,), seconds=600, memory=1e9
        ).peak
        for count in (1000, 20_000)
    ]
    t.expect(
        peaks[1] < peaks[0] + GROWS,
        f"{peaks[0] / 1e6:.1f} MB for 1,000 steps, {peaks[1] / 1e6:.1f} MB for 20,000",
    )


KIND = build_kind(
    "live",
    "move folders and bases, stop clocks, close streams, limit memory, start two runs at once",
    [
        (move_run, 45, 1),
        (stop_clock, 6, 1),
        (close_streams, 12, 1),
        (compare_plan, 6, 0),
        (limit_memory, 24, 1),
        (starve_memory, 160, 3),
        (run_two_at_once, 45, 1),
        (move_inputs, 30, 1),
        (plan_huge_models, 4, 0),
        (signal_twice, 6, 1),
        (write_surrogates, 30, 1),
        (use_undecodable_path, 1, 1),
        (block_cache, 1, 0),
        (mix_sources, 2, 0),
        (check_progress_lines, 2, 0),
        (run_many_steps, 1, 0),
    ],
)
