"""Folders that come from elsewhere: links, pipes, devices, folders named as files are, and checkpoints that name other places."""

import json
import os
import shutil
from pathlib import Path

from torments import gguf
from torments.core import Argument, Trial, kind_of, last_line
from torments.house import OFTEN, TINY
from torments.kills import held
from torments.mutants import signed

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
HOWS = ("fifo", "folder", "full folder", "zero", "null", "socket", "loop")
AGAIN: tuple[Argument, ...] = ("from-scratch", "--resume", "run", "--iters", 6)
WAITING = (2, 3, 4, 10, 14, 15)  # of the commands with odd places: a pipe may be data, options, a prompt
SCRATCH: tuple[Argument, ...] = ("from-scratch", "text.txt", *TINY, *OFTEN)


def victim(t: Trial) -> Path:
    """A file that is none of the run's business."""
    path = t.place / "outside" / "victim"
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")
    return path


def unharmed(t: Trial, path: Path) -> None:
    t.must(
        path.is_file() and path.read_bytes() == b"precious",
        f"{path.name}, outside of the run's folder, has been written",
    )


def links(t: Trial, place: int) -> None:
    """The run's files are links to what is elsewhere."""
    t.given("run", "text.txt")
    outside = victim(t)
    for name in {NAMES[place % 4], *t.random.sample(NAMES[:5], t.random.randrange(3))}:
        path = t.folder / "run" / name
        path.unlink(missing_ok=True)
        path.symlink_to(outside)
        t.tell(f"{name} is a link")
    ended = t.run(*AGAIN, *(("--out", "run") if place % 2 else ()), codes=(0, 1, 2))
    unharmed(t, outside)
    if ended.code == 0:
        t.whole(t.folder / "run" / "model.gguf")


def overwritten_links(t: Trial, place: int) -> None:
    t.given("run", "text.txt")
    outside = victim(t)
    path = t.folder / "run" / NAMES[place % len(NAMES)]
    path.unlink(missing_ok=True)
    path.symlink_to(outside)
    t.run(*SCRATCH, "--out", "run", "--overwrite")
    unharmed(t, outside)


def planted(t: Trial, place: int) -> None:
    """What a replaced run would leave aside, put there by somebody."""
    t.given("run", "text.txt")
    run = t.folder / "run"
    aside = run / (".replaced-x", ".replaced-1", ".replacing-x")[place % 3]
    shutil.copytree(run, t.place / "copy")
    shutil.move(t.place / "copy", aside)
    (aside / "config.toml").write_text("lr = 0.666\n")
    bare = place // 3 % 2
    if bare:  # a folder with the user's options, and no run in it
        for path in run.glob("*.*"):
            path.unlink() if path.is_file() and path.name != "config.toml" else None
        (run / "config.toml").write_text("lr = 0.0015\nctx = 32\n")
    mine = (run / "config.toml").read_bytes()
    new: tuple[Argument, ...] = (*SCRATCH, "--out", "run", *(("--config", "run/config.toml") if bare else ()))
    words = (AGAIN, new, (*new, "--overwrite"))[place // 6 % 3]
    if place // 18 % 2:
        t.run(
            *words,
            plan={"under": [str(t.folder)], "at": t.random.randint(1, 60), "do": "kill"},
            codes=(0, 1, 2, -9),
            said=False,
        )
    t.run(*words)
    now = (run / "config.toml").read_bytes() if (run / "config.toml").is_file() else b""
    t.must(b"0.666" not in now, "a planted config.toml has taken the place of the user's own")
    t.must(now == mine or b"command" in now or b"iters" in now, "the user's config.toml is gone")
    t.whole(run)


def odd_files(t: Trial, place: int) -> None:
    """A pipe, a device, a folder, where the run has a file."""
    t.given("run", "text.txt")
    path = t.folder / "run" / NAMES[place % len(NAMES)]
    how = HOWS[place // len(NAMES) % len(HOWS)]
    commands: list[tuple[Argument, ...]] = [
        AGAIN,
        (*AGAIN, "--out", "run"),
        (*AGAIN, "--out", "other"),
        (*SCRATCH, "--out", "run", "--overwrite"),
        ("inspect", path),
    ]
    path.unlink(missing_ok=True)
    odd(path, how)
    t.tell(f"{path.name} is a {how}")
    words = commands[place // len(NAMES) // len(HOWS)]
    ended = t.run(*words, seconds=5)
    if ended.code and words[0] != "inspect":
        t.must(held(t.folder / "run"), "no checkpoint is left")
    if words[-1] == "--overwrite" and "folder" in how and path.name != "checkpoint-4.gguf":
        t.must(
            ended.code == 0 or path.name in ended.err,
            f"--overwrite is broken by a folder: {last_line(ended.err)}",
        )
    t.must(how != "full folder" or list(t.folder.rglob("mine")), "what was in a folder is gone")


def odd(path: Path, how: str) -> None:
    if how == "fifo":
        os.mkfifo(path)
    elif how == "socket":
        import socket

        here = Path.cwd()
        os.chdir(path.parent)
        socket.socket(socket.AF_UNIX).bind(path.name)
        os.chdir(here)
    elif "folder" in how:
        path.mkdir()
        if how == "full folder":
            (path / "mine").write_text("mine")
    else:
        path.symlink_to({"zero": "/dev/zero", "null": "/dev/null", "loop": str(path)}[how])


def outside_paths(t: Trial, place: int) -> None:
    """A checkpoint says where to write: not its business."""
    t.given("tune", "base.gguf", "text.txt")
    outside = victim(t)
    others = t.place / "outside"
    for path in (t.folder / "tune").glob("checkpoint-*.gguf"):
        made = gguf.parse(path.read_bytes())
        for entry in made.entries:
            if entry.key.startswith(b"training.") and entry.raw[8:9] == b"{":
                entry.raw = gguf.text(json.dumps(told(json.loads(entry.raw[8:]), others, place)))
        path.write_bytes(signed(made.packed()))
    shutil.copyfile(t.folder / "base.gguf", others / "adapter_model.safetensors")
    before = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in others.iterdir())
    t.run("finetune", "--resume", "tune", "--iters", 6)
    t.run("finetune", "--resume", "tune", "--iters", 6, "--trust")
    t.must(
        before
        == sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in others.iterdir()),
        "a checkpoint has had something written elsewhere",
    )
    unharmed(t, outside)


def told(value: object, others: Path, place: int) -> object:
    """Options whose places are elsewhere, and files that are devices."""
    if isinstance(value, dict):
        made = {key: told(each, others, place) for key, each in value.items()}
        if place % 2:
            made |= {
                key: ["/dev/zero"] for key in ("files", "data", "inputs") if isinstance(made.get(key), list)
            }
            made |= {"peft_files": ["/dev/zero"], "files": ["/dev/zero"]} if "files" in made else {}
        return made | {key: str(others) for key in ("peft", "out") if isinstance(made.get(key), str)}
    return [told(each, others, place) for each in value] if isinstance(value, list) else value


OUTSIDE = ("model_out", "checkpoint_out", "lora_out", "peft", "fn_latest", "log")
RESUMED: tuple[tuple[Argument, ...], ...] = (
    ("--resume", "RUN"),
    ("--resume", "RUN/checkpoint-4.gguf", "--out", "new"),
    ("--checkpoint-in", "RUN/checkpoint-4.gguf", "--only-write"),
)


def written_outside(t: Trial, place: int) -> None:
    """Each path that a checkpoint may hold leads to a file of the user's, which is private; so does a link in its folder."""
    name, words = OUTSIDE[place % len(OUTSIDE)], RESUMED[place // len(OUTSIDE) % len(RESUMED)]
    command, run = (
        ("finetune", "tune") if name in ("lora_out", "peft") or place % 2 else ("from-scratch", "run")
    )
    t.given(run, "base.gguf", "text.txt")
    outside = victim(t)
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
    ended = t.run(command, *given, *more)
    t.must(
        ended.code == 2 or name == "fn_latest" or write in given,
        "files that only the checkpoint names are read unasked",
    )
    t.run(command, *given, *more, "--trust")
    unharmed(t, outside)
    t.must(outside.stat().st_mode & 0o777 == 0o600, "a private file can be read by others")
    t.must(sorted(outside.parent.iterdir()) == before, "something has been written beside it")


def change_options(path: Path, name: str, value: object) -> None:
    """Give a checkpoint's option another value."""
    made = gguf.parse(path.read_bytes())
    for entry in made.entries:
        if entry.key == b"training.options":
            options = json.loads(entry.raw[8:])
            part = next(each for each in options.values() if isinstance(each, dict) and name in each)
            part[name] = value
            entry.raw = gguf.text(json.dumps(options))
    path.write_bytes(signed(made.packed()))


def inputs_within(t: Trial, place: int) -> None:
    """--overwrite of a folder that holds what the run reads."""
    t.given("run")
    name, option = [("text.txt", None), ("val.txt", "--val"), ("recipe.toml", "--config")][place % 3]
    inside = t.folder / "run" / (name if place % 2 else f"deep-{name}")
    if place % 4 == 3:
        inside = t.folder / "run" / "checkpoint-9.gguf" / name if option != "--config" else inside
        inside.parent.mkdir(exist_ok=True)
    for each in {name, "text.txt"}:
        shutil.copyfile(t.house.things / each, inside if each == name else t.folder / each)
    if name == "recipe.toml" and place % 2:
        inside = inside.rename(t.folder / "run" / "config.toml")
    kept = inside.read_bytes()
    words = [
        "from-scratch",
        inside if option is None else "text.txt",
        *(() if option is None else (option, inside)),
    ]
    t.run(*words, *TINY, *OFTEN, "--out", "run", "--overwrite")
    own = inside.name == "config.toml"
    t.must(
        inside.is_file() and (own or inside.read_bytes() == kept),
        f"--overwrite has removed {inside.name}, which the run reads",
    )


def odd_places(t: Trial, place: int) -> None:
    """--out, data and models that are no such thing."""
    t.given("text.txt", "base.gguf", "adapter.gguf")
    strange = t.folder / "strange"
    how = HOWS[place // 16]
    odd(strange, how)
    t.tell(f"strange is a {how}")
    commands: list[tuple[Argument, ...]] = [
        (*SCRATCH, "--out", "strange"),
        (*SCRATCH, "--out", "strange", "--overwrite"),
        ("from-scratch", "strange", *TINY, *OFTEN, "--out", "o"),
        ("from-scratch", "text.txt", "--val", "strange", *TINY, *OFTEN, "--out", "o"),
        ("from-scratch", "text.txt", *TINY, *OFTEN, "--config", "strange", "--out", "o"),
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
    words = commands[place % len(commands)]
    if how == "fifo" and place % len(commands) in WAITING:
        t.skipped = "who reads from a pipe waits for who writes"
        return
    t.run(*words)
    t.must(strange.is_symlink() or strange.exists(), "what was there is gone")


KIND = kind_of(
    "folders",
    "links, pipes, devices and folders where files should be; checkpoints that name other places",
    [
        (links, 16, 1),
        (overwritten_links, 14, 1),
        (planted, 36, 2),
        (odd_files, 7 * 7 * 5, 4),
        (outside_paths, 8, 1),
        (written_outside, 36, 6),
        (inputs_within, 24, 1),
        (odd_places, 16 * 7, 2),
    ],
)
