"""Fills disks: by the shim, by a limit of the system, and by small disks, for runs, caches and exports."""

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
from torments.fixtures import SAVING, TINY
from torments.processes import ProcessResult, start_process
from torments.trial import Argument, Trial, build_kind, find_faults, last_line

NAMES = ("from-scratch", "lora", "full", "resume", "export-lora")
BYTE_TRIALS = 60  # that share the sizes to test
MAX_OUTPUT = 4096  # bytes; a command prints less


def fill_at_write(t: Trial, index: int) -> None:
    """Let one write after the other be the first that finds no room, or not enough."""
    name, number = NAMES[index % len(NAMES)], index // len(NAMES)
    writes = kills.list_writes(t.fixtures, name)
    if number >= len(writes):
        t.skipped = f"{name} has {len(writes)} writes"
        return
    part = t.random.choice([0, t.random.random()])
    run_on_full_disk(t, name, {"under": [str(t.folder)], "do": "full", "at": writes[number], "part": part})


def fill_after_bytes(t: Trial, index: int) -> None:
    """Fill the disk after a random number of bytes."""
    size = int(10 ** t.random.uniform(0, 6.5))
    run_on_full_disk(t, NAMES[index % len(NAMES)], {"under": [str(t.folder)], "do": "full", "bytes": size})


def run_on_full_disk(t: Trial, name: str, plan: dict[str, object]) -> None:
    """Run a command on a full disk, and resume it when there is room again."""
    command = kills.COMMANDS[name]
    t.copy_files(*command.inputs)
    before = read_contents(t.folder)
    result = t.run(*command.words, plan=plan, codes=(0, 1))
    check_intact(t, name, before, result)
    checkpoints = len(list((t.folder / command.run).glob("checkpoint-[0-9]*"))) if command.run != "." else 0
    kills.check_resumed(t, name, checkpoints, best=False)  # there may have been no room for best.gguf


def fill_at_every_byte(t: Trial, index: int) -> None:
    """Save a checkpoint with room for all sizes but the full one; each save must fail and change nothing."""
    t.copy_files("small")
    child = os.fork()
    if not child:
        with suppress(BaseException):
            (t.root / "result").write_text(save_with_little_room(t.folder / "small", index))
        os._exit(0)
    os.waitpid(child, 0)
    message = (
        (t.root / "result").read_text()
        if (t.root / "result").is_file()
        else "a save failed without a message"
    )
    t.expect(message.isdecimal(), message)
    t.log(f"{message} saves")


def save_with_little_room(folder: Path, index: int) -> str:
    """Return how many saves failed as they should, or what went wrong."""
    from llamatrain.checkpoints.run_folder import RunFolder
    from llamatrain.errors import FileError

    checkpoint, path, _ = RunFolder.read_newest(folder)
    with RunFolder(folder) as run:
        counters = checkpoint.state.counters
        checkpoint.state = replace(checkpoint.state, counters=replace(counters, step=counters.step + 1))
        before, count = read_contents(folder), 0
        for room in range(index, path.stat().st_size, BYTE_TRIALS):
            shim.start({"under": [str(folder)], "do": "full", "bytes": room})
            try:
                run.save(checkpoint, keep=9)
            except FileError as error:
                count += 1
                if "No space left" not in str(error) or "\n" in str(error):
                    return f"with room for {room:,} bytes: {error}"
            else:
                return f"with room for {room:,} bytes: the save did not fail"
            if read_contents(folder) != before:
                return f"with room for {room:,} bytes: the folder has changed"
        shim.start({"under": [str(folder)]})
        run.save(checkpoint, keep=9)
    return str(count)


def read_contents(folder: Path) -> dict[Path, bytes]:
    """Return the contents of all files in a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_intact(t: Trial, name: str, before: dict[Path, bytes], result: ProcessResult) -> None:
    """Check that files stay as they were, or are replaced by complete ones."""
    t.check_gguf(t.folder)
    t.check_leftovers(t.folder)
    replaced = ("checkpoint-", "best-")  # later files replace them
    missing = [path.name for path in before if not path.exists() and not path.name.startswith(replaced)]
    t.expect(not missing, f"missing: {', '.join(missing)}")
    if result.code and name == "export-lora":
        t.expect(before == read_contents(t.folder), "a failed export has changed a file")
    for path in t.folder.rglob("config.toml"):
        try:
            tomllib.loads(path.read_text())
        except (ValueError, OSError) as error:
            t.expect(False, f"config.toml is incomplete: {error}")
    for path in t.folder.rglob("adapter_config.json"):
        try:
            json.loads(path.read_text())
        except ValueError as error:
            t.expect(False, f"adapter_config.json is incomplete: {error}")


def fill_token_cache(t: Trial, index: int) -> None:
    """Leave no room for the cache of tokens."""
    words: list[tuple[Argument, ...]] = [
        ("from-scratch", "text.txt", *TINY, *SAVING, "--out", "out"),
        ("preview", "text.txt", "--model", "base.gguf"),
        ("evaluate", "base.gguf", "chats.jsonl", "--threads", 1),
        ("finetune", "base.gguf", "chats.jsonl", *SAVING, "--out", "out"),
    ]
    t.copy_files("text.txt", "chats.jsonl", "base.gguf")
    cache_dir = t.root / "cache"
    cache_dir.mkdir()
    plan = {"under": [str(cache_dir)], "do": "full", "bytes": int(10 ** t.random.uniform(0, 5))}
    t.run(*words[index % len(words)], cache=cache_dir, plan=plan, codes=(0, 1))
    left = list(cache_dir.rglob(".new-*"))
    t.expect(not left, f"the cache has {len(left)} unfinished entries")
    if index % len(words) in (1, 2):
        t.run(*words[index % len(words)], cache=cache_dir, codes=(0,))


def fill_while_drawing(t: Trial, index: int) -> None:
    """Leave no room for pages, maps and plans; existing files must stay."""
    t.copy_files("profiled", "text.txt")
    page = t.folder / "profiled" / "report.html"
    commands: list[tuple[tuple[Argument, ...], Path]] = [
        (("report", "profiled"), page),
        (("report", "profiled", "--out", "profiled/report.html"), page),
        (("plan", "from-scratch", "text.txt", *TINY, "--svg", "map.svg"), t.folder / "map.svg"),
        (("report", "profiled", "profiled", "--out", "map.svg"), t.folder / "map.svg"),
    ]
    words, file = commands[index % len(commands)]
    (t.folder / "map.svg").write_text("mine")
    before = read_contents(t.folder)
    room = int(10 ** t.random.uniform(0, 5.5))
    result = t.run(*words, plan={"under": [str(t.folder)], "do": "full", "bytes": room}, codes=(0, 1))
    t.check_leftovers(t.folder)
    if result.code:
        t.expect(read_contents(t.folder) == before, "a failed command has changed a file")
    else:
        t.expect(file.read_bytes().rstrip().endswith((b"</html>", b"</svg>")), f"{file.name} is incomplete")


@cache
def can_mount() -> bool:
    """Return whether this user may mount disks."""
    words = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"]
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(words, check=False, capture_output=True).returncode
    )


def use_small_disk(t: Trial, index: int) -> None:
    """Mount a disk that is too small, for one process."""
    if not can_mount():
        t.skipped = "no disk can be mounted here"
        return
    name = ("from-scratch", "lora", "full")[index % 3]
    command = kills.COMMANDS[name]
    t.copy_files(*command.inputs)
    (t.folder / "disk").mkdir()
    size = t.random.choice([8, 64, 160, 200, 500, 800, 1200])  # kB
    words = [*command.words[: command.words.index("--out") + 1], "disk/out"]
    script = f'mount -t tmpfs -o size={size}k none disk && "$@"; code=$?; cp -a disk kept; exit $code'
    job = t.job(words, None, before=("unshare", "-rm", "sh", "-c", script, "sh"), plan={})
    t.log(f"on a disk of {size} kB: {' '.join(map(str, words))}")
    result = start_process(job).wait()
    t.faults += find_faults(result, (0, 1))
    t.check_gguf(t.folder / "kept")
    t.check_leftovers(t.folder / "kept")


def limit_file_size(t: Trial, index: int) -> None:
    """Limit the size of files."""
    name = NAMES[index % len(NAMES)]
    command = kills.COMMANDS[name]
    t.copy_files(*command.inputs)
    before = read_contents(t.folder)
    size = int(10 ** t.random.uniform(2, 6))
    check_errors = size > MAX_OUTPUT  # its output is in a file, too
    result = t.run(*command.words, plan={"largest": size}, codes=(0, 1), check_errors=check_errors)
    check_intact(t, name, before, result)


def fill_kernel_cache(t: Trial, index: int) -> None:
    """Remove kernels from a cache on a full disk; the command must warn once and run without the cache."""
    if not can_mount():
        t.skipped = "no disk can be mounted here"
        return
    t.copy_files("text.txt", "base.gguf")
    cache_dir = t.root / "cache"
    shutil.copytree(t.fixtures.cache, cache_dir)
    chosen = [
        path
        for path in cache_dir.rglob("*")
        if path.is_file() and ("tokenizer.pretokenize" if index else "tokenizer.bpe_merge") in path.name
    ]
    for path in chosen:
        path.unlink()
    size = sum(path.stat().st_size for path in cache_dir.rglob("*") if path.is_file()) // 1024 + 200
    script = (
        f'mkdir full && mount -t tmpfs -o size={size * 2}k none full && cp -a "$0/." full'
        ' && dd if=/dev/zero of=full/zero 2>/dev/null; "$@"'
    )
    words = ("evaluate", "base.gguf", "text.txt", "--threads", 1)
    job = t.job(
        words, t.folder / "full", before=("unshare", "-rm", "sh", "-c", script, str(cache_dir)), seconds=240
    )
    t.log("a full disk for the kernels that are compiled")
    result = start_process(job).wait()
    t.expect(result.code == 0, f"exit code {result.code}: {last_line(result.err)}")
    lines = [
        line
        for line in result.err.splitlines()
        if "no space" in line.lower() or "cannot be kept" in line.lower() or "full" in line.lower()
    ]
    t.expect(len(lines) == 1, f"{len(lines)} lines mention the full disk: {last_line(result.err)}")
    t.expect("Traceback" not in result.err, "a traceback")


KIND = build_kind(
    "disks",
    "fill the disk at every write of a run and every byte of a save, for caches, exports and pages",
    [
        (fill_at_write, 5 * 131, 3),
        (fill_at_every_byte, BYTE_TRIALS, 1),
        (fill_while_drawing, 40, 1),
        (fill_after_bytes, 20, 1),
        (fill_token_cache, 20, 1),
        (use_small_disk, 8, 1),
        (limit_file_size, 12, 1),
        (fill_kernel_cache, 2, 0),
    ],
)
