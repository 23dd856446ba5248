"""What changes around a run: its folder moves or goes, clocks stand still, streams close; limits of memory, and plans."""

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
from torments.core import INTERRUPTED, Argument, Trial, judged, kind_of, last_line
from torments.house import OFTEN, SAME, TINY
from torments.mutants import signed
from torments.processes import ROOT
from torments.watching import POLL

SCRATCH: tuple[Argument, ...] = ("from-scratch", "text.txt", *TINY, *OFTEN)
COMMANDS: tuple[tuple[Argument, ...], ...] = (
    (*SCRATCH, "--out", "out"),
    ("finetune", "base.gguf", "text.txt", *OFTEN, "--ctx", 32, "--out", "out"),
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
    ),  # which the text has: where it is not read, all that is asked for counts
    ("--optimizer", "lbfgs", "--embd", 256, "--iters", 8),  # whose history is full then
)
GROWS = 8_000_000  # bytes that 19,000 more steps may take: the figures of the page
ALLOWED = 10_000_000  # bytes that a plan may be beyond a small run
CHAT = [{"role": "user", "content": "a" * 60}, {"role": "assistant", "content": "b" * 90}]
LEAST, ENOUGH = 150_000, 350_000  # kB that a process may map, with which a command fails, or is well


def moved(t: Trial, place: int) -> None:
    """The run's folder is moved or removed, or a file in it."""
    t.given("text.txt")
    what = ("move", "remove", "delete")[place % 3]
    ops = int((kills.undisturbed(t.house, "from-scratch") / "operations").read_text())
    out = t.folder / "out"
    target = out / ("metrics.jsonl" if place % 2 else "model.gguf") if what == "delete" else out
    late = t.random.randint(ops // 3, ops - 1)
    plan = {"under": [str(t.folder)], "at": late, "do": what, "folder": str(target)}
    ended = t.run(*SCRATCH, "--out", "out", plan=plan, codes=(0, 1))
    places = [out, t.folder / "out-moved"]
    good = kills.undisturbed(t.house, "from-scratch") / "here" / "out" / "model.gguf"
    if what == "delete" and not (out / "model.gguf").exists():  # after it was written for the last time
        t.run("from-scratch", "--resume", "out", codes=(0,))
    found = any(kills.same(each / "model.gguf", good) for each in places)
    t.must(found, f"the run's last steps are nowhere (exit code {ended.code}): {last_line(ended.err)}")
    t.whole(*[each for each in places if each.exists()])


def still_clock(t: Trial, place: int) -> None:
    t.given("text.txt", "base.gguf", "adapter.gguf", "chats.jsonl")
    t.run(*COMMANDS[place % len(COMMANDS)], plan={"clock": "still"}, codes=(0,))


def streams(t: Trial, place: int) -> None:
    """Who reads has left, or was never there."""
    t.given("text.txt", "base.gguf", "chats.jsonl")
    run: tuple[Argument, ...] = (*SCRATCH, "--out", "out", "--sample-every", 1)
    words: tuple[Argument, ...] = (
        run,
        ("preview", "chats.jsonl", "--model", "base.gguf", "-n", 39),
        ("generate", "base.gguf", "--prompt", "ab", "--threads", 1),
    )[place % 3]
    ways = (">&-", "2>&-", ">&- 2>&-")
    if place < 9:
        t.tell(ways[place // 3])
        ended = t.start(*words, real=True, before=("sh", "-c", f'exec "$@" {ways[place // 3]}', "sh")).wait()
    else:
        reading, writing = os.pipe()
        t.tell("2>&1 | head -c 1")
        running = t.start(*words, real=True, streams={1: writing, 2: writing})
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        ended = running.wait()
    t.faults += judged(ended, (0, 1) if words is not run else (0,), said=False)
    if words is run:
        t.must(
            kills.same(
                t.folder / "out" / "model.gguf",
                kills.undisturbed(t.house, "from-scratch") / "here" / "out" / "model.gguf",
            ),
            "the run is not whole",
        )


def planned(t: Trial, place: int) -> None:
    """A plan is within five parts in a hundred of what the run takes, or of what is allowed for what an interpreter loads late;
    who learns a vocabulary for it is gone by then."""
    t.given("text.txt")
    options: list[Argument] = [
        "text.txt",
        *TINY,
        *SAME,
        "--iters",
        3,
        "--eval-every",
        0,
        *MODELS[place % len(MODELS)],
    ]
    t.run("from-scratch", *options, "--out", "first", real=True, judge=False)  # so that its kernels are there
    told = t.run("plan", "from-scratch", "--json", *options, real=True, codes=(0,))
    ended = t.start("from-scratch", *options, "--out", "out", real=True, seconds=120).wait()
    t.faults += judged(ended, (0,), seconds=60, memory=1.5e9)
    if told.code == 0:
        total = json.loads(told.out)["total"]
        off = total / ended.own - 1
        t.must(
            abs(off) <= 0.05 or 0 < off * ended.own < ALLOWED,
            f"planned {total / 1e6:.0f} MB, took {ended.own / 1e6:.0f}: {off:+.1%}",
        )


def limited(t: Trial, place: int) -> None:
    """No more than --memory is taken, also where it is refused in the end."""
    t.given("text.txt")
    limit = 200 + t.random.choice([0, 20, 40, 60, 100, 200])
    words: tuple[Argument, ...] = (
        "from-scratch",
        "text.txt",
        *TINY,
        *SAME,
        "--iters",
        2,
        *MODELS[place % len(MODELS)],
        "--memory",
        f"{limit}MB",
        "--out",
        "out",
    )
    t.run(*words[:-4], "--out", "first", real=True, judge=False)  # so that its kernels are there
    ended = t.run(*words, real=True, codes=(0, 1), memory=limit * 1e6, seconds=60)
    told = t.run("plan", *words[:-2], real=True, codes=(0, 1))
    t.must(
        ended.code == told.code,
        f"the plan ends with {told.code} and the run with {ended.code}: {last_line(ended.err)}",
    )


def starved(t: Trial, place: int) -> None:
    """The system gives no more than so much, as in a container: one line, and what was saved is whole."""
    t.given("text.txt", "base.gguf", "adapter.gguf", "chats.jsonl", "told")
    commands: list[tuple[Argument, ...]] = [*COMMANDS, ("report", "told"), ("inspect", "base.gguf")]
    words = commands[place % len(commands)]
    if place % 5 == 4:  # from its first moment, and with all its threads
        before = ("sh", "-c", f'ulimit -v {t.random.randint(LEAST, ENOUGH)}; exec "$@"', "sh")
        ended = t.start(
            *words[:1], *("2" if word == 1 else word for word in words[1:]), real=True, before=before
        ).wait()
        t.codes.append(ended.code)
        loading = f"{ROOT}/llamatrain/run" not in ended.err  # the interpreter's own first moments are its own
        t.faults += (
            judged(ended, (0, 1), said=False)
            if ended.code >= 0 and not (loading and "Traceback" in ended.err)
            else []
        )
    else:
        t.run(*words, plan={"memory": int(10 ** t.random.uniform(3, 7.5))}, codes=(0, 1))
    t.whole(t.folder)
    t.tidy(t.folder)


def together(t: Trial, place: int) -> None:
    """Two at once in one place, and over an empty cache of tokens: one is refused, or both are well, and the bits are one's."""
    name = list(kills.COMMANDS)[place % len(kills.COMMANDS)]
    command = kills.COMMANDS[name]
    t.given(*command.given)
    own = t.place / "cache"
    shutil.copytree(t.house.cache, own, ignore=shutil.ignore_patterns("tokens"))
    first = t.start(*command.words, cache=own)
    first.until(lambda: False, 0.3 * t.random.random())
    second = t.start(*command.words, cache=own)
    while first.poll() | second.poll():
        time.sleep(POLL)
    ends = first.wait(), second.wait()
    for ended in ends:
        t.codes.append(ended.code)
        t.faults += judged(ended, (0, 1, 2))
    t.must(0 in (ended.code for ended in ends), f"none of the two is well: {last_line(ends[0].err)}")
    good = kills.undisturbed(t.house, name) / "here" / command.result
    t.must(kills.same(t.folder / command.result, good), "what two have made is what neither would have made")
    t.whole(t.folder)
    t.tidy(t.folder)


def base_moved(t: Trial, place: int) -> None:
    """A run's base or data is elsewhere, or another, when it is gone on with, or while it runs: a line, or the same bits."""
    t.given("base.gguf", "text.txt")
    command = kills.COMMANDS["lora" if place % 2 else "full"]
    moved = t.folder / ("text.txt" if place % 5 == 4 else "base.gguf")
    other = t.folder / "elsewhere" / "other.gguf"
    other.parent.mkdir()
    at = t.random.randint(
        1, int((kills.undisturbed(t.house, kills.name_of(command)) / "operations").read_text())
    )
    while_it_runs = place % 3 == 0
    plan: dict[str, object] = {"under": [str(t.folder / "out")], "at": at, "do": "kill"}
    if while_it_runs:
        plan |= {"do": "move", "folder": str(moved)}
        other = moved.with_name(moved.name + "-moved")
    t.run(*command.words, plan=plan, codes=(0, 1) if while_it_runs else (0, -9), said=False)
    if not while_it_runs:
        moved.rename(other)
        if place % 3 == 1:  # another of the same size in its place
            raw = other.read_bytes()
            moved.write_bytes(raw[: len(raw) // 2] + raw[: len(raw) // 2 - 1 : -1])
        if (
            "not what it was" in t.run(*command.again, codes=(0, 1, 2)).err
        ):  # then the shuffle begins anew, and bits are others
            t.whole(t.folder / "out")
            t.tidy(t.folder)
            return
    if other.exists():
        other.replace(moved)
    kills.check(t, kills.name_of(command), 0)


def quiet_limits(t: Trial, place: int) -> None:
    """Numbers that take long are refused or planned soon."""
    t.given("text.txt", "base.gguf")
    words = (
        ("--layer", 4096),
        ("--layer", 4096, "--embd", 32, "--head", 1),
        ("--ctx", 100_000),
        ("--head", 32, "--embd", 32768),
    )[place % 4]
    t.run("plan", "from-scratch", "text.txt", *TINY[:2], *words, codes=(0, 1, 2), seconds=10, memory=6e8)


def twice(t: Trial, place: int) -> None:
    """A signal, and another one while the run is saved."""
    t.given("text.txt")
    running = t.start(*SCRATCH[:-8], *SAME, "--iters", 100_000, "--out", "out", real=True)
    running.until((t.folder / "out" / "metrics.jsonl").exists)
    running.until(lambda: False, t.random.random())
    for _ in range(2):
        running.signal(t.random.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
        running.until(lambda: False, t.random.random())
    ended = running.wait()
    unheard = (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP)  # when all is done and Python listens no more
    t.faults += judged(ended, (0, INTERRUPTED, 143, 129, *unheard), said=False)
    t.whole(t.folder / "out")
    t.tidy(t.folder)
    shutil.rmtree(t.folder / "out", ignore_errors=True)


def half_characters(t: Trial, place: int) -> None:
    """Strings of a checkpoint hold half a surrogate pair: each command that reads it ends well, or in one line."""
    t.given("run", "text.txt")
    path = t.folder / "run" / "checkpoint-4.gguf"
    for other in path.parent.glob("checkpoint-*"):
        if other != path:
            other.unlink()
    made = gguf.parse(path.read_bytes())
    texts = [each for each in made.entries if each.key.startswith(b"training.") and each.raw[8:9] == b"{"]
    entry = t.random.choice(texts)
    words = entry.raw[8:].decode()
    entry.raw = gguf.text(
        t.random.choice([words.replace('": "', '": "\\ud800', 1), words.replace('{"', '{"\\udfff', 1)])
    )
    path.write_bytes(signed(made.packed()))
    command: tuple[Argument, ...] = (
        ("from-scratch", "--resume", "run", "--iters", 5),
        ("inspect", path),
        ("report", "run"),
    )[place % 3]
    t.run(*command)


def bytes_of_paths(t: Trial, place: int) -> None:
    """A model lies under a name that is no UTF-8: the line for llama.cpp names it as a shell reads it."""
    t.given("base.gguf")
    name = os.fsdecode(b"m\xff\xfe.gguf")
    (t.folder / "base.gguf").rename(t.folder / name)
    ended = t.run("generate", name, "--prompt", "ab", "-n", 2, "--threads", 1, "-v", real=True, codes=(0,))
    t.must(
        "\\xff\\xfe.gguf" in ended.err and "udcff" not in ended.err,
        f"the path is not one for a shell: {last_line(ended.err)}",
    )


def no_place_for_kernels(t: Trial, place: int) -> None:
    """The cache is no folder: kernels are compiled once, and found again by the next start."""
    t.given("base.gguf", "text.txt")
    (blocked := t.place / "blocked").write_text("no folder")
    words: tuple[Argument, ...] = ("evaluate", "base.gguf", "text.txt", "--threads", 1)
    t.run(*words, real=True, cache=blocked, codes=(0,), judge=False, seconds=600)
    ended = t.run(*words, real=True, cache=blocked, codes=(0,), judge=False)
    t.must(
        ended.code == 0 and "compiled" not in ended.err, f"kernels are compiled again: {last_line(ended.err)}"
    )


def other_sources(t: Trial, place: int) -> None:
    """Two ranks have different sources of one version: both end with a line."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        t.skipped = "MPI is not installed beside this Python"
        return
    t.given("text.txt")
    other = t.place / "other"
    shutil.copytree(ROOT / "llamatrain", other / "llamatrain", ignore=shutil.ignore_patterns("__pycache__"))
    changed = t.random.choice(sorted((other / "llamatrain").rglob("*.py")))
    changed.write_text(changed.read_text() + "# changed\n")
    ranks = f"import os, sys; sys.path.insert(0, {str(other)!r} if os.environ.get('PMI_RANK') == '1' else {str(ROOT)!r}); "
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
    t.must(
        done.returncode == 1 and "source code" in done.stderr, f"they run together: {last_line(done.stderr)}"
    )
    t.must("Traceback" not in done.stderr, f"a traceback: {last_line(done.stderr)}")


def logged(t: Trial, place: int) -> None:
    """Standard error goes to a log: who tokenizes for long writes a line every 15 seconds, by a clock that runs fast."""
    base, times, count = (("plain.gguf", 20, 60_000), ("base.gguf", 5, 15_000))[place]
    t.given(base)
    row = ({"prompt": "a" * 60, "completion": "b" * 90}, {"messages": CHAT})[place]
    (t.folder / "many.jsonl").write_text((json.dumps(row) + "\n") * count)
    words: tuple[Argument, ...] = (
        "finetune",
        base,
        "many.jsonl",
        *SAME,
        "--iters",
        1,
        "--ctx",
        256,
        "--out",
        "out",
    )
    ended = t.run(*words, plan={"clock": times}, codes=(0,), seconds=60, cache=t.place / "cache")
    told = [
        int(each) for each in re.findall(r"^tokenizing .* of .*, after (\d+) s$", ended.err, re.MULTILINE)
    ]
    begins = [0, *told]
    t.must(
        len(told) >= 2,
        f"no line tells of it in {ended.wall:.1f} s, which the clock took for {ended.wall * times:.0f}",
    )
    t.must(all(b - a >= 14 for a, b in pairwise(begins)), f"lines too close together, after {told} s")
    t.must(all(b - a <= 15 + 2 * times for a, b in pairwise(begins)), f"lines too far apart, after {told} s")


def many_steps(t: Trial, place: int) -> None:
    """A long run of short steps takes no more memory than a short one, but for what is drawn."""
    words: tuple[Argument, ...] = ("from-scratch", *TINY[2:], "--save-every", 0, "--threads", 1)
    peaks = [
        t.run(
            *words, "--iters", count, "--out", f"o{count}", real=True, codes=(0,), seconds=600, memory=1e9
        ).peak
        for count in (1000, 20_000)
    ]
    t.must(
        peaks[1] < peaks[0] + GROWS,
        f"{peaks[0] / 1e6:.1f} MB for 1,000 steps, {peaks[1] / 1e6:.1f} MB for 20,000",
    )


KIND = kind_of(
    "live",
    "folders and bases that move, clocks that stand still, closed streams, little memory, two runs at once",
    [
        (moved, 45, 1),
        (still_clock, 6, 1),
        (streams, 12, 1),
        (planned, 6, 0),
        (limited, 24, 1),
        (starved, 160, 3),
        (together, 45, 1),
        (base_moved, 30, 1),
        (quiet_limits, 4, 0),
        (twice, 6, 1),
        (half_characters, 30, 1),
        (bytes_of_paths, 1, 1),
        (no_place_for_kernels, 1, 0),
        (other_sources, 2, 0),
        (logged, 2, 0),
        (many_steps, 1, 0),
    ],
)
