"""Puts links, pipes, devices and folders in place of files, and changes the paths in checkpoints."""

import json
import os
import shutil
from pathlib import Path

from torments import gguf
from torments.fixtures import SAVING, TINY
from torments.kills import count_checkpoints
from torments.mutants import sign_checkpoint
from torments.trial import Argument, Trial, build_kind, last_line

NAMES = (
    "model.gguf",
    "config.toml",
    "loss.svg",
    "report.html",
    "report.json",
    "metrics.jsonl",
    "checkpoint-LATEST.gguf",
    "checkpoint-4.gguf",
    "checkpoint-1.gguf",
)
SPECIAL_KINDS = ("fifo", "folder", "full folder", "zero", "null", "socket", "loop")
RESUME: tuple[Argument, ...] = ("from-scratch", "--resume", "run", "--iters", 6)
WAITING = (2, 3, 4, 10, 14, 15)  # commands that read a pipe as data, options or prompt
SCRATCH: tuple[Argument, ...] = ("from-scratch", "text.txt", *TINY, *SAVING)


def create_victim(t: Trial) -> Path:
    """Create a file outside of the run's folder that must not change."""
    path = t.root / "outside" / "victim"
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")
    return path


def check_unharmed(t: Trial, path: Path) -> None:
    """Check that the file outside has not changed."""
    t.expect(
        path.is_file() and path.read_bytes() == b"precious",
        f"{path.name}, outside of the run's folder, was changed",
    )


def link_outputs(t: Trial, index: int) -> None:
    """Replace files of a run by links to a file outside."""
    t.copy_files("run", "text.txt")
    outside = create_victim(t)
    for name in {NAMES[index % 4], *t.random.sample(NAMES[:5], t.random.randrange(3))}:
        path = t.folder / "run" / name
        path.unlink(missing_ok=True)
        path.symlink_to(outside)
        t.log(f"{name} is a link")
    result = t.run(*RESUME, *(("--out", "run") if index % 2 else ()), codes=(0, 1, 2))
    check_unharmed(t, outside)
    if result.code == 0:
        t.check_gguf(t.folder / "run" / "model.gguf")


def overwrite_links(t: Trial, index: int) -> None:
    """Replace a run whose files are links."""
    t.copy_files("run", "text.txt")
    outside = create_victim(t)
    path = t.folder / "run" / NAMES[index % len(NAMES)]
    path.unlink(missing_ok=True)
    path.symlink_to(outside)
    t.run(*SCRATCH, "--out", "run", "--overwrite")
    check_unharmed(t, outside)


def plant_backups(t: Trial, index: int) -> None:
    """Create folders that look like the backup of a replaced run."""
    t.copy_files("run", "text.txt")
    run = t.folder / "run"
    backup = run / (".replaced-x", ".replaced-1", ".replacing-x")[index % 3]
    shutil.copytree(run, t.root / "copy")
    shutil.move(t.root / "copy", backup)
    (backup / "config.toml").write_text("lr = 0.666\n")
    bare = index // 3 % 2
    if bare:  # a folder with options, but no run
        for path in run.glob("*.*"):
            path.unlink() if path.is_file() and path.name != "config.toml" else None
        (run / "config.toml").write_text("lr = 0.0015\nctx = 32\n")
    mine = (run / "config.toml").read_bytes()
    new: tuple[Argument, ...] = (*SCRATCH, "--out", "run", *(("--config", "run/config.toml") if bare else ()))
    words = (RESUME, new, (*new, "--overwrite"))[index // 6 % 3]
    if index // 18 % 2:
        t.run(
            *words,
            plan={"under": [str(t.folder)], "at": t.random.randint(1, 60), "do": "kill"},
            codes=(0, 1, 2, -9),
            check_errors=False,
        )
    t.run(*words)
    now = (run / "config.toml").read_bytes() if (run / "config.toml").is_file() else b""
    t.expect(b"0.666" not in now, "a planted config.toml has replaced the user's")
    t.expect(now == mine or b"command" in now or b"iters" in now, "the user's config.toml is missing")
    t.check_gguf(run)


def use_special_files(t: Trial, index: int) -> None:
    """Put a pipe, a device or a folder in place of a run's file."""
    t.copy_files("run", "text.txt")
    path = t.folder / "run" / NAMES[index % len(NAMES)]
    kind = SPECIAL_KINDS[index // len(NAMES) % len(SPECIAL_KINDS)]
    commands: list[tuple[Argument, ...]] = [
        RESUME,
        (*RESUME, "--out", "run"),
        (*RESUME, "--out", "other"),
        (*SCRATCH, "--out", "run", "--overwrite"),
        ("inspect", path),
    ]
    path.unlink(missing_ok=True)
    create_special_file(path, kind)
    t.log(f"{path.name} is a {kind}")
    words = commands[index // len(NAMES) // len(SPECIAL_KINDS)]
    result = t.run(*words, seconds=5)
    if result.code and words[0] != "inspect":
        t.expect(count_checkpoints(t.folder / "run"), "no checkpoint is left")
    if words[-1] == "--overwrite" and "folder" in kind and path.name != "checkpoint-4.gguf":
        t.expect(
            result.code == 0 or path.name in result.err,
            f"--overwrite fails because of a folder: {last_line(result.err)}",
        )
    t.expect(kind != "full folder" or list(t.folder.rglob("mine")), "a file in a folder is missing")


def create_special_file(path: Path, kind: str) -> None:
    """Create a pipe, socket, folder or link."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        import socket

        here = Path.cwd()
        os.chdir(path.parent)
        socket.socket(socket.AF_UNIX).bind(path.name)
        os.chdir(here)
    elif "folder" in kind:
        path.mkdir()
        if kind == "full folder":
            (path / "mine").write_text("mine")
    else:
        path.symlink_to({"zero": "/dev/zero", "null": "/dev/null", "loop": str(path)}[kind])


def change_stored_paths(t: Trial, index: int) -> None:
    """Change the output paths in a checkpoint; they must not be written."""
    t.copy_files("tune", "base.gguf", "text.txt")
    outside = create_victim(t)
    others = t.root / "outside"
    for path in (t.folder / "tune").glob("checkpoint-*.gguf"):
        parts = gguf.parse(path.read_bytes())
        for entry in parts.entries:
            if entry.key.startswith(b"training.") and entry.raw[8:9] == b"{":
                entry.raw = gguf.text(json.dumps(redirect_paths(json.loads(entry.raw[8:]), others, index)))
        path.write_bytes(sign_checkpoint(parts.pack()))
    shutil.copyfile(t.folder / "base.gguf", others / "adapter_model.safetensors")
    before = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in others.iterdir())
    t.run("finetune", "--resume", "tune", "--iters", 6)
    t.run("finetune", "--resume", "tune", "--iters", 6, "--trust")
    t.expect(
        before
        == sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in others.iterdir()),
        "a checkpoint has caused a write outside",
    )
    check_unharmed(t, outside)


def redirect_paths(value: object, others: Path, index: int) -> object:
    """Return options whose paths lead to another folder, and whose files are devices."""
    if isinstance(value, dict):
        options = {key: redirect_paths(item, others, index) for key, item in value.items()}
        if index % 2:
            options |= {
                key: ["/dev/zero"]
                for key in ("files", "data", "inputs")
                if isinstance(options.get(key), list)
            }
            if "files" in options:
                options |= {"peft_files": ["/dev/zero"], "files": ["/dev/zero"]}
        return options | {key: str(others) for key in ("peft", "out") if isinstance(options.get(key), str)}
    return [redirect_paths(item, others, index) for item in value] if isinstance(value, list) else value


OUTSIDE = ("model_out", "checkpoint_out", "lora_out", "peft", "fn_latest", "log")
RESUMED: tuple[tuple[Argument, ...], ...] = (
    ("--resume", "RUN"),
    ("--resume", "RUN/checkpoint-4.gguf", "--out", "new"),
    ("--checkpoint-in", "RUN/checkpoint-4.gguf", "--only-write"),
)


def name_outside_path(t: Trial, index: int) -> None:
    """Let each path that a checkpoint may hold lead to a private file, and log folders be links."""
    name, words = OUTSIDE[index % len(OUTSIDE)], RESUMED[index // len(OUTSIDE) % len(RESUMED)]
    command, run = (
        ("finetune", "tune") if name in ("lora_out", "peft") or index % 2 else ("from-scratch", "run")
    )
    t.copy_files(run, "base.gguf", "text.txt")
    outside = create_victim(t)
    outside.chmod(0o600)
    value: object = {
        "log": ["tensorboard", "csv"],
        "peft": str(outside.parent),
        "fn_latest": "../victim",
    }.get(name, str(outside))
    for path in (t.folder / run).glob("checkpoint-*.gguf"):
        change_options(path, name, value)
    if name == "log":
        for folder in ("tensorboard", "wandb", "trackio"):
            (t.folder / run / folder).symlink_to(outside.parent)
    before = sorted(outside.parent.iterdir())
    write = "--only-write-lora" if command == "finetune" else "--only-write-model"
    given = [write if word == "--only-write" else str(word).replace("RUN", run) for word in words]
    more = () if write in given else ("--iters", 6)
    result = t.run(command, *given, *more)
    t.expect(
        result.code == 2 or name == "fn_latest" or write in given,
        "files that only the checkpoint names are read without --trust",
    )
    t.run(command, *given, *more, "--trust")
    check_unharmed(t, outside)
    t.expect(outside.stat().st_mode & 0o777 == 0o600, "a private file can be read by others")
    t.expect(sorted(outside.parent.iterdir()) == before, "a file was written next to it")


def change_options(path: Path, name: str, value: object) -> None:
    """Change an option in a checkpoint."""
    parts = gguf.parse(path.read_bytes())
    for entry in parts.entries:
        if entry.key == b"training.options":
            options = json.loads(entry.raw[8:])
            part = next(value for value in options.values() if isinstance(value, dict) and name in value)
            part[name] = value
            entry.raw = gguf.text(json.dumps(options))
    path.write_bytes(sign_checkpoint(parts.pack()))


def read_from_run_folder(t: Trial, index: int) -> None:
    """Overwrite a folder that holds what the run reads."""
    t.copy_files("run")
    name, option = [("text.txt", None), ("val.txt", "--val"), ("recipe.toml", "--config")][index % 3]
    inside = t.folder / "run" / (name if index % 2 else f"deep-{name}")
    if index % 4 == 3:
        inside = t.folder / "run" / "checkpoint-9.gguf" / name if option != "--config" else inside
        inside.parent.mkdir(exist_ok=True)
    for file in {name, "text.txt"}:
        shutil.copyfile(t.fixtures.files / file, inside if file == name else t.folder / file)
    if name == "recipe.toml" and index % 2:
        inside = inside.rename(t.folder / "run" / "config.toml")
    content = inside.read_bytes()
    words = [
        "from-scratch",
        inside if option is None else "text.txt",
        *(() if option is None else (option, inside)),
    ]
    t.run(*words, *TINY, *SAVING, "--out", "run", "--overwrite")
    own = inside.name == "config.toml"
    t.expect(
        inside.is_file() and (own or inside.read_bytes() == content),
        f"--overwrite has removed {inside.name}, which the run reads",
    )


def pass_special_files(t: Trial, index: int) -> None:
    """Pass special files as --out, data and models."""
    t.copy_files("text.txt", "base.gguf", "adapter.gguf")
    special = t.folder / "strange"
    kind = SPECIAL_KINDS[index // 16]
    create_special_file(special, kind)
    t.log(f"strange is a {kind}")
    commands: list[tuple[Argument, ...]] = [
        (*SCRATCH, "--out", "strange"),
        (*SCRATCH, "--out", "strange", "--overwrite"),
        ("from-scratch", "strange", *TINY, *SAVING, "--out", "o"),
        ("from-scratch", "text.txt", "--val", "strange", *TINY, *SAVING, "--out", "o"),
        ("from-scratch", "text.txt", *TINY, *SAVING, "--config", "strange", "--out", "o"),
        ("from-scratch", "--resume", "strange"),
        ("from-scratch", "text.txt", "--checkpoint-in", "strange"),
        ("from-scratch", "text.txt", "--vocab-from", "strange"),
        ("finetune", "strange", "text.txt"),
        ("inspect", "strange"),
        ("generate", "base.gguf", "--file", "strange", "-n", 1),
        ("generate", "base.gguf", "--lora", "strange", "-n", 1),
        ("export-lora", "base.gguf", "--lora", "adapter.gguf", "--out", "strange"),
        ("export-lora", "base.gguf", "--lora", "strange", "--out", "o.gguf"),
        ("evaluate", "base.gguf", "strange"),
        ("preview", "strange", "--model", "base.gguf"),
    ]
    words = commands[index % len(commands)]
    if kind == "fifo" and index % len(commands) in WAITING:
        t.skipped = "reading the pipe would wait for a writer"
        return
    t.run(*words)
    t.expect(special.is_symlink() or special.exists(), "the special file is missing")


KIND = build_kind(
    "folders",
    "put links, pipes, devices and folders in place of files; change paths in checkpoints",
    [
        (link_outputs, 16, 1),
        (overwrite_links, 14, 1),
        (plant_backups, 36, 2),
        (use_special_files, 7 * 7 * 5, 4),
        (change_stored_paths, 8, 1),
        (name_outside_path, 36, 6),
        (read_from_run_folder, 24, 1),
        (pass_special_files, 16 * 7, 2),
    ],
)
