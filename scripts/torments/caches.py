"""Damages caches, makes them read-only, and starts two first runs at once.

Results must stay the same.
"""

import json
import os
import shutil
import time
import zlib
from pathlib import Path

import numpy as np

from torments import gguf
from torments.disks import can_mount
from torments.fixtures import SAVING, TINY
from torments.proc import POLL
from torments.processes import start_process
from torments.trial import Argument, Trial, build_kind, find_faults, last_line

LARGE = 3000  # bytes; smaller files are lists of files
COMPILING = 120.0  # CPU seconds if kernels are compiled again


# ---- kernels ---------------------------------------------------------------


def damage_kernels(t: Trial, index: int) -> None:
    """Damage compiled kernels; the next start must find it, and the one after must see a good cache."""
    cache_dir = t.root / "cache"
    shutil.copytree(t.fixtures.cache, cache_dir)
    t.copy_files("text.txt", "base.gguf", "chats.jsonl")
    folder = t.fixtures.kernel_cache_dir().name
    words: tuple[Argument, ...] = ("preview", "chats.jsonl", "--model", "base.gguf", "--json")
    files = sorted(
        path
        for path in (cache_dir / "llamatrain" / folder).rglob("*")
        if path.is_file() and "test" not in path.name
    )
    if index % 3 == 2:
        words = ("evaluate", "base.gguf", "text.txt", "--threads", 1, "--json")
    else:
        files = [path for path in files if "tokenizer" in str(path.relative_to(cache_dir))]
    expected = t.run(*words, cache=cache_dir, check=False)
    large = [path for path in files if path.stat().st_size > LARGE or t.random.random() < 0.3]
    manners = [
        damage_file(t, path, files)
        for path in t.random.sample(large, min(len(large), t.random.choice([1, 2, 4])))
    ]
    for attempt in ("first", "second"):
        result = t.start(*words, real=True, cache=cache_dir, seconds=300).wait()
        faults = find_faults(result, (0,), seconds=COMPILING, memory=1e9)
        t.faults += [f"{attempt} start: {fault}" for fault in faults]
        t.expect(result.code or result.out == expected.out, f"{attempt} start: other results")
    again = "a folder" in manners or not (
        "compil" in result.err or "cache" in result.err
    )  # a folder may stay where it is
    t.expect(again, f"the second start does not use the cache: {result.err[:200]}")


def damage_file(t: Trial, path: Path, files: list[Path]) -> str:
    """Damage a file in one of several ways, and return how."""
    if not path.is_file():
        return "damaged before"
    raw = bytearray(path.read_bytes())
    manner = t.random.choice(
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
    t.log(f"{path.name} {manner}")
    if manner == "open to all":
        path.chmod(0o666)
        return manner
    if manner == "flipped":
        for _ in range(t.random.choice([1, 16, 64, len(raw) // 100])):
            raw[t.random.randrange(len(raw))] ^= 1 << t.random.randrange(8)
    elif manner == "zeroed":
        begin = t.random.randrange(len(raw))
        raw[begin : begin + 4096] = bytes(len(raw[begin : begin + 4096]))
    elif manner == "swapped":
        raw = bytearray(
            t.random.choice(
                [other for other in files if other.suffix == path.suffix and other.is_file()]
            ).read_bytes()
        )
    elif manner in ("a folder", "a link to nowhere"):
        path.unlink()
        path.mkdir() if manner == "a folder" else path.symlink_to("/nowhere/at/all")
        return manner
    path.write_bytes(
        raw[: t.random.randrange(len(raw))] if manner == "cut" else b"" if manner == "emptied" else raw
    )
    return manner


def remove_linker(t: Trial, index: int) -> None:
    """Compile kernels without a linker; the next start must link them and mention it."""
    cache_dir = t.root / "cache"
    shutil.copytree(t.fixtures.cache, cache_dir)
    t.copy_files("text.txt", "base.gguf")
    words: tuple[Argument, ...] = ("evaluate", "base.gguf", "text.txt", "--threads", 1, "--json")
    expected = t.run(*words, cache=cache_dir, check=False)
    folder = cache_dir / "llamatrain" / t.fixtures.kernel_cache_dir().name
    for path in t.random.sample(sorted(folder.glob("llamatrain.kernels.cpu.*")), 1 + index):
        path.unlink()
    shutil.rmtree(cache_dir / "llamatrain" / "tokens", ignore_errors=True)
    for attempt, more in (("first", {"PATH": "/nowhere"}), ("second", {}), ("third", {})):
        result = t.start(*words, real=True, cache=cache_dir, seconds=300, variables=more).wait()
        t.faults += [
            f"{attempt} start: {fault}" for fault in find_faults(result, (0,), seconds=COMPILING, memory=1e9)
        ]
        t.expect(result.out == expected.out, f"{attempt} start: other results")
        t.expect(attempt != "third" or "link" not in result.err, "kernels are linked at each start")


# ---- tokens ----------------------------------------------------------------


def damage_tokens(t: Trial, index: int) -> None:
    """Damage entries of the token cache, or craft them with valid checksums."""
    cache_dir = t.root / "cache"
    cache_dir.mkdir()
    t.copy_files("text.txt", "base.gguf", "chats.jsonl")
    tune: tuple[Argument, ...] = (
        "finetune",
        "base.gguf",
        "chats.jsonl",
        *SAVING,
        "--ctx",
        32,
        "--out",
        "out",
        "--overwrite",
    )
    new: tuple[Argument, ...] = ("from-scratch", "text.txt", *TINY, *SAVING, "--out", "out", "--overwrite")
    preview: tuple[Argument, ...] = ("preview", "chats.jsonl", "--model", "base.gguf", "--json")
    words = (preview, tune, new, ("evaluate", "base.gguf", "chats.jsonl", "--threads", 1, "--json"))[
        index % 4
    ]
    expected = t.run(*words, cache=cache_dir, codes=(0,))
    entries = [path.parent for path in cache_dir.rglob("sizes.json")]
    if not t.expect(entries, "the token cache has no entry: this trial must follow its format"):
        return
    crafted = index % 2 == 0
    for entry in entries:
        (craft_entry if crafted else spoil_entry)(t, entry)
    results = expected.out, read_weights(t)
    result = t.run(*words, cache=cache_dir, codes=(0, 1) if crafted else (0,))
    if result.code == 0:
        t.expect((result.out, read_weights(t)) == results, "other results from a damaged cache")


def read_weights(t: Trial) -> list[bytes]:
    """Return the data of the models and adapters in the run's folder."""
    paths = [path for name in ("model", "adapter") if (path := t.folder / "out" / f"{name}.gguf").is_file()]
    return [gguf.parse(path.read_bytes()).data for path in paths]


def spoil_entry(t: Trial, entry: Path) -> None:
    """Damage files of an entry."""
    files = sorted(path for path in entry.iterdir() if path.is_file())
    for path in t.random.sample(files, min(len(files), t.random.choice([1, 1, 2]))):
        raw = bytearray(path.read_bytes())
        manner = t.random.choice(
            ["flipped", "cut", "emptied", "longer", "gone", "a folder", "a fifo", "a link"]
        )
        t.log(f"{path.name} {manner}")
        if manner == "flipped" and raw:
            raw[t.random.randrange(len(raw))] ^= 1 << t.random.randrange(8)
        if manner in ("gone", "a folder", "a fifo", "a link"):
            path.unlink()
            make_special_file(path, manner)
            continue
        path.write_bytes(
            raw[: len(raw) // 2]
            if manner == "cut"
            else b""
            if manner == "emptied"
            else raw + b"xxxx"
            if manner == "longer"
            else raw
        )


def make_special_file(path: Path, manner: str) -> None:
    """Create a folder, a pipe or a link."""
    if manner == "a folder":
        path.mkdir()
    elif manner == "a fifo":
        os.mkfifo(path)
    elif manner == "a link":
        path.symlink_to("/dev/zero")


def craft_entry(t: Trial, entry: Path) -> None:
    """Write invalid tokens or documents into an entry, with valid checksums."""
    path = entry / t.random.choice(["tokens", "tokens", "documents"])
    if any(path.is_dir() for path in entry.iterdir()):  # damaged before
        return
    tokens = np.fromfile(path, np.int32)
    for _ in range(t.random.choice([1, 3, len(tokens)])):
        tokens[t.random.randrange(len(tokens))] = t.random.choice([-1, 258, 100_000, 2**31 - 1, -(2**31)])
    tokens.tofile(path)
    t.log(f"{path.name} crafted")
    sums = {
        file.name: [file.stat().st_size, zlib.crc32(file.read_bytes())]
        for file in entry.iterdir()
        if file.name != "sizes.json"
    }
    (entry / "sizes.json").write_text(json.dumps(sums))


# ---- read-only caches and killed runs --------------------------------------


def use_read_only_cache(t: Trial, index: int) -> None:
    """Use a complete cache that is read-only; nothing may be compiled, and no warning is printed."""
    cache_dir = t.root / "cache"
    shutil.copytree(t.fixtures.cache, cache_dir)
    t.copy_files("text.txt", "base.gguf", "chats.jsonl")
    before: tuple[str, ...] = ()
    if os.geteuid() and not can_mount():
        for path in (cache_dir, *cache_dir.rglob("*")):
            path.chmod(0o500 if path.is_dir() else 0o400)
    elif can_mount():
        before = (
            "unshare",
            "-rm",
            "sh",
            "-c",
            'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && "$@"',
            str(cache_dir),
        )
    else:
        t.skipped = "this user cannot make folders read-only"
        return
    words = (
        ("preview", "chats.jsonl", "--model", "base.gguf"),
        ("evaluate", "base.gguf", "text.txt", "--threads", 1),
        ("from-scratch", "text.txt", *TINY, *SAVING, "--out", "o"),
    )[index]
    t.log(f"a cache that is read-only: {' '.join(map(str, words))}")
    result = start_process(t.job(words, cache_dir, before=before, seconds=300)).wait()
    t.faults += find_faults(result, (0,))
    t.expect("compil" not in result.err, f"the cache is not used: {last_line(result.err)}")
    for path in (cache_dir, *cache_dir.rglob("*")):
        if path.is_dir():
            path.chmod(0o700)


def kill_compilers(t: Trial, index: int) -> None:
    """Kill a run while it compiles; its compilers must end with it."""
    t.copy_files("text.txt")
    cache_dir = t.root / "cache"
    cache_dir.mkdir()
    running = t.start("from-scratch", "text.txt", *TINY, *SAVING, "--out", "o", real=True, cache=cache_dir)
    running.until(lambda: "compiling" in running.files[1].read_text(), 20)
    running.until(lambda: False, 1 + 2 * t.random.random())
    running.signal([9, 15, 2, 1][index % 4])
    result = running.wait()
    t.faults += [
        fault
        for fault in find_faults(result, (130, 143, 129, -1, -2, -9, -15, 0), check_errors=False, memory=2e9)
        if "still runs" in fault or "traceback" in fault
    ]


def start_two_first_runs(t: Trial, index: int) -> None:
    """Start two first runs at once without a cache; both must end well, and the next one compiles nothing."""
    t.copy_files("text.txt")
    cache_dir = t.root / "cache"
    words: tuple[Argument, ...] = ("from-scratch", "text.txt", *TINY, *SAVING)
    running = [t.start(*words, "--out", out, real=True, cache=cache_dir, seconds=1200) for out in ("a", "b")]
    if index % 2:  # kill one while it compiles; the other takes over its locks
        running[0].until(lambda: "compiling" in running[0].files[1].read_text(), 30)
        running[0].until(lambda: False, 5 * t.random.random())
        running[0].signal(9)
    while running[0].poll() | running[1].poll():
        time.sleep(POLL)
    for process in running:
        result = process.wait()
        t.codes.append(result.code)
        t.faults += find_faults(result, (0, -9) if index % 2 else (0,), memory=2e9, seconds=600)
    result = t.run(*words, "--out", "c", real=True, cache=cache_dir, codes=(0,))
    t.expect("compil" not in result.err, "kernels are compiled again")
    results = {gguf.parse((t.folder / out / "model.gguf").read_bytes()).data for out in ("b", "c")}
    t.expect(len(results) == 1, "other results")


def run_doctor(t: Trial, index: int) -> None:
    """Let `doctor` examine and clean a damaged cache; results must stay the same."""
    cache_dir = t.root / "cache"
    shutil.copytree(t.fixtures.cache, cache_dir)
    t.copy_files("text.txt", "base.gguf", "chats.jsonl")
    words: tuple[Argument, ...] = ("preview", "chats.jsonl", "--model", "base.gguf", "--json")
    expected = t.run(*words, cache=cache_dir, codes=(0,))
    files = sorted(path for path in cache_dir.rglob("*") if path.is_file())
    entries = [path.parent for path in cache_dir.rglob("sizes.json")]
    damage_file(t, t.random.choice(files), files)
    for entry in entries:
        if t.random.random() < 0.5:
            spoil_entry(t, entry)
    stamp = cache_dir / "llamatrain" / ".pruned"
    stamp.unlink(missing_ok=True)
    if manner := t.random.choice(["", "a folder", "a fifo", "a link"]):
        make_special_file(stamp, manner)
    for path in cache_dir.rglob("*"):  # old enough to be deleted
        if index % 2 and not path.is_symlink():
            os.utime(path, (0, t.random.choice([0, 2**40, -(2**31)])))
    clean = ("--clean",) if index % 3 == 0 else ()
    report = t.run("doctor", "--json", *clean, cache=cache_dir, codes=(0, 1), check_errors=False, seconds=5)
    t.expect(report.code < 0 or json.loads(report.out or "{}"), "doctor prints no JSON")
    result = t.run(*words, cache=cache_dir, codes=(0,))
    t.expect(result.out == expected.out, "other results")


KIND = build_kind(
    "caches",
    "damage caches, make them read-only, start two first runs at once",
    [
        (damage_kernels, 36, 1),
        (damage_tokens, 60, 3),
        (run_doctor, 60, 1),
        (remove_linker, 3, 0),
        (use_read_only_cache, 3, 1),
        (kill_compilers, 4, 0),
        (start_two_first_runs, 2, 0),
    ],
)
