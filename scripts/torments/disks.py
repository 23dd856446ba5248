"""Disks that are full: from some write on, for a run, its caches, an export; by a shim, a limit of the system, a small disk."""

import json
import os
import shutil
import subprocess
import tomllib
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from torments import kills, shim
from torments.core import Argument, Trial, judged, kind_of, last_line
from torments.house import OFTEN, TINY
from torments.processes import Ended, started

NAMES = ("from-scratch", "lora", "full", "resume", "export-lora")
BYTE_TRIALS = 60  # that share the bytes of a save among them
SPOKEN = 4096  # bytes: all that a command says is less


def by_write(t: Trial, place: int) -> None:
    """One write after the other is the first that finds no room, or not enough."""
    name, number = NAMES[place % len(NAMES)], place // len(NAMES)
    found = kills.writes(t.house, name)
    if number >= len(found):
        t.skipped = f"{name} has {len(found)} writes"
        return
    part = t.random.choice([0, t.random.random()])
    full(t, name, {"under": [str(t.folder)], "do": "full", "at": found[number], "part": part})


def by_bytes(t: Trial, place: int) -> None:
    size = int(10 ** t.random.uniform(0, 6.5))
    full(t, NAMES[place % len(NAMES)], {"under": [str(t.folder)], "do": "full", "bytes": size})


def full(t: Trial, name: str, plan: dict[str, object]) -> None:
    """No room; then there is some again."""
    command = kills.COMMANDS[name]
    t.given(*command.given)
    before = contents(t.folder)
    ended = t.run(*command.words, plan=plan, codes=(0, 1))
    intact(t, name, before, ended)
    held = len(list((t.folder / command.run).glob("checkpoint-[0-9]*"))) if command.run != "." else 0
    kills.check(t, name, held, best=False)  # which there may have been no room for


def every_byte(t: Trial, place: int) -> None:
    """A save has room for all bytes but so many, one after the other: it fails in words, and leaves all as it was."""
    t.given("small")
    child = os.fork()
    if not child:
        with suppress(BaseException):
            (t.place / "told").write_text(saved(t.folder / "small", place))
        os._exit(0)
    os.waitpid(child, 0)
    told = (t.place / "told").read_text() if (t.place / "told").is_file() else "a save that has no words"
    t.must(told.isdecimal(), told)
    t.tell(f"{told} saves")


def saved(folder: Path, place: int) -> str:
    """How many saves failed as they should, of those that are this trial's; or what did not hold."""
    from llamatrain.checkpoints.run_folder import RunFolder
    from llamatrain.errors import FileError

    checkpoint, path, _ = RunFolder.read_newest(folder)
    with RunFolder(folder) as run:
        counters = checkpoint.state.counters
        checkpoint.state = replace(checkpoint.state, counters=replace(counters, step=counters.step + 1))
        before, count = contents(folder), 0
        for room in range(place, path.stat().st_size, BYTE_TRIALS):
            shim.begin({"under": [str(folder)], "do": "full", "bytes": room})
            try:
                run.save(checkpoint, keep=9)
            except FileError as error:
                count += 1
                if "No space left" not in str(error) or "\n" in str(error):
                    return f"with room for {room:,} bytes: {error}"
            else:
                return f"with room for {room:,} bytes: nothing was said"
            if contents(folder) != before:
                return f"with room for {room:,} bytes: it is not as it was"
        shim.begin({"under": [str(folder)]})
        run.save(checkpoint, keep=9)
    return str(count)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def intact(t: Trial, name: str, before: dict[Path, bytes], ended: Ended) -> None:
    """What was there stays as it is, or is replaced by what is whole."""
    t.whole(t.folder)
    t.tidy(t.folder)
    goes = ("checkpoint-", "best-")  # that later ones take the place of
    gone = [path.name for path in before if not path.exists() and not path.name.startswith(goes)]
    t.must(not gone, f"gone: {', '.join(gone)}")
    if ended.code and name == "export-lora":
        t.must(before == contents(t.folder), "an export that failed has changed something")
    for path in t.folder.rglob("config.toml"):
        try:
            tomllib.loads(path.read_text())
        except (ValueError, OSError) as error:
            t.must(False, f"half of a config.toml: {error}")
    for path in t.folder.rglob("adapter_config.json"):
        try:
            json.loads(path.read_text())
        except ValueError as error:
            t.must(False, f"half of an adapter_config.json: {error}")


def tokens(t: Trial, place: int) -> None:
    """Tokens that can be kept nowhere."""
    words: list[tuple[Argument, ...]] = [
        ("from-scratch", "text.txt", *TINY, *OFTEN, "--out", "out"),
        ("preview", "text.txt", "--model", "base.gguf"),
        ("evaluate", "base.gguf", "chats.jsonl", "--threads", 1),
        ("finetune", "base.gguf", "chats.jsonl", *OFTEN, "--out", "out"),
    ]
    t.given("text.txt", "chats.jsonl", "base.gguf")
    own = t.place / "cache"
    own.mkdir()
    plan = {"under": [str(own)], "do": "full", "bytes": int(10 ** t.random.uniform(0, 5))}
    t.run(*words[place % len(words)], cache=own, plan=plan, codes=(0, 1))
    left = list(own.rglob(".new-*"))
    t.must(not left, f"the cache keeps {len(left)} entries that were begun")
    if place % len(words) in (1, 2):
        t.run(*words[place % len(words)], cache=own, codes=(0,))


def drawn(t: Trial, place: int) -> None:
    """Pages, maps and plans that there is no room for: what stood there stays."""
    t.given("told", "text.txt")
    page = t.folder / "told" / "report.html"
    commands: list[tuple[tuple[Argument, ...], Path]] = [
        (("report", "told"), page),
        (("report", "told", "--out", "told/report.html"), page),
        (("plan", "from-scratch", "text.txt", *TINY, "--svg", "map.svg"), t.folder / "map.svg"),
        (("report", "told", "told", "--out", "map.svg"), t.folder / "map.svg"),
    ]
    words, file = commands[place % len(commands)]
    (t.folder / "map.svg").write_text("mine")
    before = contents(t.folder)
    room = int(10 ** t.random.uniform(0, 5.5))
    ended = t.run(*words, plan={"under": [str(t.folder)], "do": "full", "bytes": room}, codes=(0, 1))
    t.tidy(t.folder)
    if ended.code:
        t.must(contents(t.folder) == before, "what failed has changed something")
    else:
        t.must(file.read_bytes().rstrip().endswith((b"</html>", b"</svg>")), f"half of {file.name}")


@cache
def can_mount() -> bool:
    """Whether a user may have disks of their own here."""
    words = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"]
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(words, check=False, capture_output=True).returncode
    )


def small(t: Trial, place: int) -> None:
    """A real disk that is too small, mounted for this process alone."""
    if not can_mount():
        t.skipped = "no disk can be mounted here"
        return
    name = ("from-scratch", "lora", "full")[place % 3]
    command = kills.COMMANDS[name]
    t.given(*command.given)
    (t.folder / "disk").mkdir()
    size = t.random.choice([8, 64, 160, 200, 500, 800, 1200])  # kB
    words = [*command.words[: command.words.index("--out") + 1], "disk/out"]
    script = f'mount -t tmpfs -o size={size}k none disk && "$@"; code=$?; cp -a disk kept; exit $code'
    job = t.job(words, None, before=("unshare", "-rm", "sh", "-c", script, "sh"), plan={})
    t.tell(f"on a disk of {size} kB: {' '.join(map(str, words))}")
    ended = started(job).wait()
    t.faults += judged(ended, (0, 1))
    t.whole(t.folder / "kept")
    t.tidy(t.folder / "kept")


def limited(t: Trial, place: int) -> None:
    """Files that may not grow beyond a size."""
    name = NAMES[place % len(NAMES)]
    command = kills.COMMANDS[name]
    t.given(*command.given)
    before = contents(t.folder)
    size = int(10 ** t.random.uniform(2, 6))
    said = size > SPOKEN  # what it says goes to a file, too
    ended = t.run(*command.words, plan={"largest": size}, codes=(0, 1), said=said)
    intact(t, name, before, ended)


def compiled(t: Trial, place: int) -> None:
    """The kernels' cache lacks some and cannot take them: said once, and done without."""
    if not can_mount():
        t.skipped = "no disk can be mounted here"
        return
    t.given("text.txt", "base.gguf")
    own = t.place / "cache"
    shutil.copytree(t.house.cache, own)
    chosen = [
        path
        for path in own.rglob("*")
        if path.is_file() and ("splitting" if place else "merging") in path.name
    ]
    for path in chosen:
        path.unlink()
    size = sum(path.stat().st_size for path in own.rglob("*") if path.is_file()) // 1024 + 200
    script = (
        f'mkdir full && mount -t tmpfs -o size={size * 2}k none full && cp -a "$0/." full'
        ' && dd if=/dev/zero of=full/zero 2>/dev/null; "$@"'
    )
    words = ("evaluate", "base.gguf", "text.txt", "--threads", 1)
    job = t.job(
        words, t.folder / "full", before=("unshare", "-rm", "sh", "-c", script, str(own)), seconds=240
    )
    t.tell("a full disk for the kernels that are compiled")
    ended = started(job).wait()
    t.must(ended.code == 0, f"exit code {ended.code}: {last_line(ended.err)}")
    lines = [
        line
        for line in ended.err.splitlines()
        if "no space" in line.lower() or "cannot be kept" in line.lower() or "full" in line.lower()
    ]
    t.must(len(lines) == 1, f"a full disk is said {len(lines)} times: {last_line(ended.err)}")
    t.must("Traceback" not in ended.err, "a traceback")


KIND = kind_of(
    "disks",
    "a full disk at every write of a run, at every byte of a save, for caches, exports and pages",
    [
        (by_write, 5 * 131, 3),
        (every_byte, BYTE_TRIALS, 1),
        (drawn, 40, 1),
        (by_bytes, 20, 1),
        (tokens, 20, 1),
        (small, 8, 1),
        (limited, 12, 1),
        (compiled, 2, 0),
    ],
)
