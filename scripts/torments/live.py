"""What changes around a run: its folder moves or goes, clocks stand still, streams close; limits of memory, and plans."""

import json
import os
import shutil
import signal

from torments import kills
from torments.core import INTERRUPTED, Argument, Trial, judged, kind_of, last_line
from torments.house import OFTEN, SAME, TINY

SCRATCH: tuple[Argument, ...] = ("from-scratch", "text.txt", *TINY, *OFTEN)
MODELS: tuple[tuple[Argument, ...], ...] = (
    (),
    ("--no-flash", "--ctx", 512, "--batch", 8),
    ("--no-flash", "--ctx", 1024, "--batch", 4, "--remat", "none"),
    ("--ctx", 512, "--embd", 256, "--ff", 512, "--batch", 16),
    ("--vocab-size", 400, "--embd", 256),  # which the text has: where it is not read, all that is asked for counts
    ("--optimizer", "lbfgs", "--embd", 256, "--iters", 8),  # whose history is full then
)
OWN = (7, 120)  # MB of a command's own, between which a limit is tried


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
    found = any(kills.same(each / "model.gguf", good) for each in places)
    t.must(found, f"the run's last steps are nowhere (exit code {ended.code}): {last_line(ended.err)}")
    t.whole(*[each for each in places if each.exists()])


def still_clock(t: Trial, place: int) -> None:
    t.given("text.txt", "base.gguf", "adapter.gguf", "chats.jsonl")
    commands: list[tuple[Argument, ...]] = [
        (*SCRATCH, "--out", "out"),
        ("finetune", "base.gguf", "text.txt", *OFTEN, "--ctx", 32, "--out", "out"),
        ("evaluate", "base.gguf", "text.txt", "--threads", 1),
        ("generate", "base.gguf", "--prompt", "ab", "-n", 5, "--threads", 1),
        ("export-lora", "base.gguf", "--lora", "adapter.gguf", "--out", "m.gguf"),
        ("preview", "chats.jsonl", "--model", "base.gguf"),
    ]
    t.run(*commands[place % len(commands)], plan={"clock": "still"}, codes=(0,))


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
                t.folder / "out" / "model.gguf", kills.undisturbed(t.house, "from-scratch") / "here" / "out" / "model.gguf"
            ),
            "the run is not whole",
        )


def planned(t: Trial, place: int) -> None:
    """A plan is within five parts in a hundred of what the run takes; who learns a vocabulary for it is gone by then."""
    t.given("text.txt")
    options: list[Argument] = ["text.txt", *TINY, *SAME, "--iters", 3, "--eval-every", 0, *MODELS[place % len(MODELS)]]
    t.run("from-scratch", *options, "--out", "first", real=True, judge=False)  # so that its kernels are there
    told = t.run("plan", "from-scratch", "--json", *options, real=True, codes=(0,))
    ended = t.start("from-scratch", *options, "--out", "out", real=True, seconds=120).wait()
    t.faults += judged(ended, (0,), seconds=60, memory=1.5e9)
    if told.code == 0:
        total = max(value for value in flat(json.loads(told.out)) if value < 10**12)
        off = total / ended.own - 1
        t.must(abs(off) <= 0.05, f"planned {total / 1e6:.0f} MB, took {ended.own / 1e6:.0f}: {off:+.1%}")


def flat(value: object) -> list[float]:
    if isinstance(value, dict):
        return [each for item in value.values() for each in flat(item)]
    return [value] if isinstance(value, int | float) else []


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
    t.must(ended.code == told.code, f"the plan ends with {told.code} and the run with {ended.code}: {last_line(ended.err)}")


def quiet_limits(t: Trial, place: int) -> None:
    """Numbers that take long are refused or planned soon."""
    t.given("text.txt", "base.gguf")
    words = (
        ("--layer", 4096),
        ("--layer", 4096, "--embd", 32, "--head", 1),
        ("--ctx", 100_000),
        ("--head", 32, "--embd", 32768),
    )[place % 4]
    t.run("plan", "from-scratch", "text.txt", *TINY[:2], *words, codes=(0, 1, 2), memory=6e8)


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


KIND = kind_of(
    "live",
    [
        (moved, 45, 3),
        (still_clock, 6, 2),
        (streams, 12, 1),
        (planned, 6, 0),
        (limited, 24, 1),
        (quiet_limits, 4, 0),
        (twice, 6, 1),
    ],
)
