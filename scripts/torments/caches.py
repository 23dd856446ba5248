"""Caches that are damaged, crafted, swapped, read-only: kernels are compiled again, and results stay."""

import json
import os
import shutil
import time
import zlib
from pathlib import Path

import numpy as np

from torments import gguf
from torments.core import Argument, Trial, judged, kind_of, last_line
from torments.disks import can_mount
from torments.house import OFTEN, TINY
from torments.processes import started
from torments.watching import POLL

LARGE = 3000  # bytes: a file with machine code in it, and not a list of such files
COMPILING = 120.0  # seconds of the processor, where kernels are compiled again


# ---- kernels ---------------------------------------------------------------


def kernels(t: Trial, place: int) -> None:
    """Some files of the kernels' cache are not what they were; a start finds it, and the next one is as if nothing had been."""
    own = t.place / "cache"
    shutil.copytree(t.house.cache, own)
    t.given("text.txt", "base.gguf", "chats.jsonl")
    folder = t.house.usual().name
    words: tuple[Argument, ...] = ("preview", "chats.jsonl", "--model", "base.gguf", "--json")
    files = sorted(
        path
        for path in (own / "llamatrain" / folder).rglob("*")
        if path.is_file() and "test" not in path.name
    )
    if place % 3 == 2:
        words = ("evaluate", "base.gguf", "text.txt", "--threads", 1, "--json")
    else:
        files = [path for path in files if "tokenizer" in str(path.relative_to(own))]
    good = t.run(*words, cache=own, judge=False)
    large = [path for path in files if path.stat().st_size > LARGE or t.random.random() < 0.3]
    hows = [
        damage(t, path, files) for path in t.random.sample(large, min(len(large), t.random.choice([1, 2, 4])))
    ]
    for attempt in ("first", "second"):
        ended = t.start(*words, real=True, cache=own, seconds=300).wait()
        faults = judged(ended, (0,), seconds=COMPILING, memory=1e9)
        t.faults += [f"{attempt} start: {each}" for each in faults]
        t.must(ended.code or ended.out == good.out, f"{attempt} start: other results")
    again = "a folder" in hows or not (
        "compil" in ended.err or "cache" in ended.err
    )  # a folder may be left to its owner
    t.must(again, f"the second start is not as if nothing had been: {ended.err[:200]}")


def damage(t: Trial, path: Path, files: list[Path]) -> str:
    if not path.is_file():
        return "damaged before"
    raw = bytearray(path.read_bytes())
    how = t.random.choice(
        [
            "flipped",
            "flipped",
            "flipped",
            "cut",
            "emptied",
            "swapped",
            "zeroed",
            "a folder",
            "a link to nowhere",
            "open to all",
        ]
    )
    t.tell(f"{path.name} {how}")
    if how == "open to all":
        path.chmod(0o666)
        return how
    if how == "flipped":
        for _ in range(t.random.choice([1, 16, 64, len(raw) // 100])):
            raw[t.random.randrange(len(raw))] ^= 1 << t.random.randrange(8)
    elif how == "zeroed":
        begin = t.random.randrange(len(raw))
        raw[begin : begin + 4096] = bytes(len(raw[begin : begin + 4096]))
    elif how == "swapped":
        raw = bytearray(
            t.random.choice(
                [each for each in files if each.suffix == path.suffix and each.is_file()]
            ).read_bytes()
        )
    elif how in ("a folder", "a link to nowhere"):
        path.unlink()
        path.mkdir() if how == "a folder" else path.symlink_to("/nowhere/at/all")
        return how
    path.write_bytes(
        raw[: t.random.randrange(len(raw))] if how == "cut" else b"" if how == "emptied" else raw
    )
    return how


def unlinked(t: Trial, place: int) -> None:
    """The linker is not there, or has no room, when kernels are compiled: the next start links them and says so."""
    own = t.place / "cache"
    shutil.copytree(t.house.cache, own)
    t.given("text.txt", "base.gguf")
    words: tuple[Argument, ...] = ("evaluate", "base.gguf", "text.txt", "--threads", 1, "--json")
    good = t.run(*words, cache=own, judge=False)
    folder = own / "llamatrain" / t.house.usual().name
    for path in t.random.sample(sorted(folder.glob("llamatrain.kernels.cpu.*")), 1 + place):
        path.unlink()
    shutil.rmtree(own / "llamatrain" / "tokens", ignore_errors=True)
    for attempt, more in (("first", {"PATH": "/nowhere"}), ("second", {}), ("third", {})):
        ended = t.start(*words, real=True, cache=own, seconds=300, more=more).wait()
        t.faults += [
            f"{attempt} start: {each}" for each in judged(ended, (0,), seconds=COMPILING, memory=1e9)
        ]
        t.must(ended.out == good.out, f"{attempt} start: other results")
        t.must(attempt != "third" or "link" not in ended.err, "they are linked again and again")


# ---- tokens ----------------------------------------------------------------


def tokens(t: Trial, place: int) -> None:
    """An entry of the tokens' cache is not what it was, or is somebody else's, with the right sums."""
    own = t.place / "cache"
    own.mkdir()
    t.given("text.txt", "base.gguf", "chats.jsonl")
    tune: tuple[Argument, ...] = (
        "finetune",
        "base.gguf",
        "chats.jsonl",
        *OFTEN,
        "--ctx",
        32,
        "--out",
        "out",
        "--overwrite",
    )
    new: tuple[Argument, ...] = ("from-scratch", "text.txt", *TINY, *OFTEN, "--out", "out", "--overwrite")
    preview: tuple[Argument, ...] = ("preview", "chats.jsonl", "--model", "base.gguf", "--json")
    words = (preview, tune, new, ("evaluate", "base.gguf", "chats.jsonl", "--threads", 1, "--json"))[
        place % 4
    ]
    good = t.run(*words, cache=own, codes=(0,))
    entries = [path.parent for path in own.rglob("sizes.json")]
    if not t.must(entries, "there is no entry of tokens: this trial does not know the cache any more"):
        return
    crafted = place % 2 == 0
    for entry in entries:
        (craft if crafted else spoil)(t, entry)
    results = good.out, weights(t)
    ended = t.run(*words, cache=own, codes=(0, 1) if crafted else (0,))
    if ended.code == 0:
        t.must((ended.out, weights(t)) == results, "other results from a damaged cache")


def weights(t: Trial) -> list[bytes]:
    made = [path for name in ("model", "adapter") if (path := t.folder / "out" / f"{name}.gguf").is_file()]
    return [gguf.parse(path.read_bytes()).data for path in made]


def spoil(t: Trial, entry: Path) -> None:
    files = sorted(path for path in entry.iterdir() if path.is_file())
    for path in t.random.sample(files, min(len(files), t.random.choice([1, 1, 2]))):
        raw = bytearray(path.read_bytes())
        how = t.random.choice(["flipped", "cut", "emptied", "longer", "gone", "a folder", "a fifo", "a link"])
        t.tell(f"{path.name} {how}")
        if how == "flipped" and raw:
            raw[t.random.randrange(len(raw))] ^= 1 << t.random.randrange(8)
        if how in ("gone", "a folder", "a fifo", "a link"):
            path.unlink()
            make_odd(path, how)
            continue
        path.write_bytes(
            raw[: len(raw) // 2]
            if how == "cut"
            else b""
            if how == "emptied"
            else raw + b"xxxx"
            if how == "longer"
            else raw
        )


def make_odd(path: Path, how: str) -> None:
    if how == "a folder":
        path.mkdir()
    elif how == "a fifo":
        os.mkfifo(path)
    elif how == "a link":
        path.symlink_to("/dev/zero")


def craft(t: Trial, entry: Path) -> None:
    """Numbers that no vocabulary has, documents that lie elsewhere; and sums that are right."""
    path = entry / t.random.choice(["tokens", "tokens", "documents"])
    if any(each.is_dir() for each in entry.iterdir()):  # it was damaged before
        return
    made = np.fromfile(path, np.int32)
    for _ in range(t.random.choice([1, 3, len(made)])):
        made[t.random.randrange(len(made))] = t.random.choice([-1, 258, 100_000, 2**31 - 1, -(2**31)])
    made.tofile(path)
    t.tell(f"{path.name} crafted")
    sums = {
        each.name: [each.stat().st_size, zlib.crc32(each.read_bytes())]
        for each in entry.iterdir()
        if each.name != "sizes.json"
    }
    (entry / "sizes.json").write_text(json.dumps(sums))


# ---- what cannot be written, and what is killed ----------------------------


def read_only(t: Trial, place: int) -> None:
    """A whole cache that cannot be written is used: nothing is compiled, nothing is complained of."""
    own = t.place / "cache"
    shutil.copytree(t.house.cache, own)
    t.given("text.txt", "base.gguf", "chats.jsonl")
    before: tuple[str, ...] = ()
    if os.geteuid() and not can_mount():
        for path in (own, *own.rglob("*")):
            path.chmod(0o500 if path.is_dir() else 0o400)
    elif can_mount():
        before = (
            "unshare",
            "-rm",
            "sh",
            "-c",
            'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && "$@"',
            str(own),
        )
    else:
        t.skipped = "nothing can be made read-only for this user"
        return
    words = (
        ("preview", "chats.jsonl", "--model", "base.gguf"),
        ("evaluate", "base.gguf", "text.txt", "--threads", 1),
        ("from-scratch", "text.txt", *TINY, *OFTEN, "--out", "o"),
    )[place]
    t.tell(f"a cache that is read-only: {' '.join(map(str, words))}")
    ended = started(t.job(words, own, before=before, seconds=300)).wait()
    t.faults += judged(ended, (0,))
    t.must("compil" not in ended.err, f"a whole cache is not used: {last_line(ended.err)}")
    for path in (own, *own.rglob("*")):
        if path.is_dir():
            path.chmod(0o700)


def killed(t: Trial, place: int) -> None:
    """Compilers end with the run that started them, however that ended."""
    t.given("text.txt")
    own = t.place / "cache"
    own.mkdir()
    running = t.start("from-scratch", "text.txt", *TINY, *OFTEN, "--out", "o", real=True, cache=own)
    running.until(lambda: "compiling" in running.files[1].read_text(), 20)
    running.until(lambda: False, 1 + 2 * t.random.random())
    running.signal([9, 15, 2, 1][place % 4])
    ended = running.wait()
    t.faults += [
        each
        for each in judged(ended, (130, 143, 129, -1, -2, -9, -15, 0), said=False, memory=2e9)
        if "outlived" in each or "traceback" in each
    ]


def first(t: Trial, place: int) -> None:
    """Two first runs at once, of a user who has no cache: both are well, and the next one compiles nothing."""
    t.given("text.txt")
    own = t.place / "cache"
    words: tuple[Argument, ...] = ("from-scratch", "text.txt", *TINY, *OFTEN)
    running = [t.start(*words, "--out", out, real=True, cache=own, seconds=1200) for out in ("a", "b")]
    if place % 2:  # one of them goes while it compiles: what it held is the other's
        running[0].until(lambda: "compiling" in running[0].files[1].read_text(), 30)
        running[0].until(lambda: False, 5 * t.random.random())
        running[0].signal(9)
    while running[0].poll() | running[1].poll():
        time.sleep(POLL)
    for each in running:
        ended = each.wait()
        t.codes.append(ended.code)
        t.faults += judged(ended, (0, -9) if place % 2 else (0,), memory=2e9, seconds=600)
    ended = t.run(*words, "--out", "c", real=True, cache=own, codes=(0,))
    t.must("compil" not in ended.err, "what was compiled is compiled again")
    made = {gguf.parse((t.folder / out / "model.gguf").read_bytes()).data for out in ("b", "c")}
    t.must(len(made) == 1, "other results")


def examined(t: Trial, place: int) -> None:
    """`doctor` looks over a cache that is damaged, and cleans it; what follows is as if nothing had been."""
    own = t.place / "cache"
    shutil.copytree(t.house.cache, own)
    t.given("text.txt", "base.gguf", "chats.jsonl")
    words: tuple[Argument, ...] = ("preview", "chats.jsonl", "--model", "base.gguf", "--json")
    good = t.run(*words, cache=own, codes=(0,))
    files = sorted(path for path in own.rglob("*") if path.is_file())
    entries = [path.parent for path in own.rglob("sizes.json")]
    damage(t, t.random.choice(files), files)
    for entry in entries:
        if t.random.random() < 0.5:
            spoil(t, entry)
    stamp = own / "llamatrain" / ".pruned"
    stamp.unlink(missing_ok=True)
    if how := t.random.choice(["", "a folder", "a fifo", "a link"]):
        make_odd(stamp, how)
    for path in own.rglob("*"):  # as old as can be: all may go
        if place % 2 and not path.is_symlink():
            os.utime(path, (0, t.random.choice([0, 2**40, -(2**31)])))
    clean = ("--clean",) if place % 3 == 0 else ()
    told = t.run("doctor", "--json", *clean, cache=own, codes=(0, 1), said=False, seconds=5)
    t.must(told.code < 0 or json.loads(told.out or "{}"), "doctor tells no JSON")
    ended = t.run(*words, cache=own, codes=(0,))
    t.must(ended.out == good.out, "other results")


KIND = kind_of(
    "caches",
    "caches damaged, crafted, read-only, two first runs at once",
    [
        (kernels, 36, 1),
        (tokens, 60, 3),
        (examined, 60, 1),
        (unlinked, 3, 0),
        (read_only, 3, 1),
        (killed, 4, 0),
        (first, 2, 0),
    ],
)
