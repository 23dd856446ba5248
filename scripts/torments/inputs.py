"""Changes inputs while a command runs: replaced, overwritten, cut short, unlinked, edited in place."""

from pathlib import Path

from torments import gguf
from torments.fixtures import FIXED, TINY
from torments.processes import ProcessResult
from torments.trial import Argument, Kind, Trial

OWN: tuple[Argument, ...] = ("--iters", 12, "--save-every", 3, "--eval-every", 0, *FIXED, "--ctx", 32)
COMMANDS: dict[str, tuple[Argument, ...]] = {
    "checkpoint-in": ("from-scratch", "text.txt", *OWN, "--checkpoint-in", "base.gguf", "--out", "out"),
    "vocab-from": (
        "from-scratch",
        "text.txt",
        *OWN,
        *TINY[2:-2],
        "--vocab-from",
        "base.gguf",
        "--out",
        "out",
    ),
    "finetune": ("finetune", "base.gguf", "text.txt", *OWN, "--out", "out"),
    "chats": ("finetune", "base.gguf", "chats.jsonl", *OWN, "--out", "out"),
    "full": ("finetune", "base.gguf", "text.txt", *OWN, "--full", "--out", "out"),
    "export-lora": ("export-lora", "base.gguf", "--lora", "adapter.gguf", "--out", "merged.gguf"),
    "quantised": (
        "export-lora",
        "base.gguf",
        "--type",
        "q8_0",
        "--lora",
        "adapter.gguf",
        "--check",
        "ab",
        "--out",
        "merged.gguf",
    ),
    "evaluate": ("evaluate", "base.gguf", "text.txt", "--threads", 1, "--lora", "adapter.gguf"),
    "generate": (
        "generate",
        "base.gguf",
        "--prompt",
        "ab",
        "-n",
        20,
        "--threads",
        1,
        "--lora",
        "adapter.gguf",
    ),
    "preview": ("preview", "chats.jsonl", "--model", "base.gguf"),
    "inspect": ("inspect", "base.gguf"),
    "plan": ("plan", "finetune", "base.gguf", "text.txt"),
    "resume": ("finetune", "--resume", "tune", "--iters", 10, "--save-every", 3),
    "resume-run": ("from-scratch", "--resume", "run", "--iters", 10, "--save-every", 3),
}
MANNERS = ("replaced", "overwritten larger", "overwritten smaller", "halved", "emptied", "unlinked", "edited")
LIKELY = 0.75  # share of trials that change the model, and not another input
FULL = 1000
NAMES = list(COMMANDS)


def trial(t: Trial) -> None:
    """Change an input at a random moment and check what was written."""
    name, manner = NAMES[t.number % len(NAMES)], MANNERS[t.number // len(NAMES) % len(MANNERS)]
    words = COMMANDS[name]
    t.copy_files("base.gguf", "text.txt", "chats.jsonl", "adapter.gguf", "bigger.gguf", "plain.gguf")
    if "--resume" in words:
        t.copy_files(str(words[2]))
    others_dir = t.root / "others"
    others_dir.mkdir()
    for other in ("bigger.gguf", "plain.gguf"):
        (t.folder / other).rename(others_dir / other)
    target = choose_target(t, words, name)
    bytes_before = {path.name: path.read_bytes() for path in t.folder.glob("*.gguf")}
    count = count_events(t, name, target)
    if not count:
        t.skipped = f"{name} does not read {target.name}"
        return
    plan = {
        "after": target.name,
        "at": t.random.randint(1, count),
        "do": "change",
        "input": str(target),
        **describe_change(target, manner, others_dir),
    }
    result = t.run(*words, plan=plan, codes=(0, 1, 2))
    check_outputs(t, result, bytes_before, others_dir, target)
    if manner == "edited" and target.name == "base.gguf":
        t.expect(
            "lower learning rate" not in result.err,
            f"the changed input is blamed on the learning rate: {result.errors}",
        )


def choose_target(t: Trial, words: tuple[Argument, ...], name: str) -> Path:
    """Return the path of the input to change."""
    if name == "resume-run":
        return t.folder / "text.txt" if t.random.random() < 0.5 else t.folder / "run" / "checkpoint-4.gguf"
    others = [file for file in ("text.txt", "chats.jsonl", "adapter.gguf") if file in words]
    return t.folder / (t.random.choice(others) if others and t.random.random() > LIKELY else "base.gguf")


def describe_change(target: Path, manner: str, others_dir: Path) -> dict[str, str]:
    """Return the part of the plan that says how the file changes."""
    kind, _, size = manner.partition(" ")
    other = others_dir / ("plain.gguf" if size == "smaller" else "bigger.gguf")
    if target.suffix != ".gguf":
        other = others_dir / "other"
        words = target.read_bytes()
        other.write_bytes(words[: len(words) // 3] if size == "smaller" else words * 3)
    return {"manner": kind, "other": str(other)}


def count_events(t: Trial, name: str, target: Path) -> int:
    """Count the file events of an undisturbed run after the input is first opened."""
    path = t.fixtures.folder / "events" / f"{name}-{target.name}"
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        other = Trial(
            kind="events", number=0, seed=0, root=t.fixtures.folder / "counting", fixtures=t.fixtures
        )
        other.copy_files(
            "base.gguf",
            "text.txt",
            "chats.jsonl",
            "adapter.gguf",
            *([str(COMMANDS[name][2])] if "--resume" in COMMANDS[name] else []),
        )
        counted = other.root / "counted"
        result = other.run(*COMMANDS[name], plan={"after": target.name, "count": str(counted)})
        if result.code:
            raise SystemExit(f"error: an undisturbed {name} fails: {result.err}")
        path.write_bytes(counted.read_bytes() if counted.is_file() else b"0")
    return int(path.read_text())


def check_outputs(
    t: Trial, result: ProcessResult, before: dict[str, bytes], others_dir: Path, target: Path
) -> None:
    """Check that outputs open and have the vocabulary of one of the two inputs."""
    outputs = [
        path
        for path in (t.folder / "out", t.folder / "merged.gguf", t.folder / "tune", t.folder / "run")
        if path.exists()
    ]
    files = [path for path in outputs for path in ([path] if path.is_file() else sorted(path.glob("*.gguf")))]
    files = [
        path for path in files if not (target.exists() and path.samefile(target))
    ]  # checkpoints are hard links
    if not t.check_gguf(*files):
        return
    t.check_leftovers(t.folder)
    known = {
        read_vocabulary(raw)
        for raw in (before["base.gguf"], *(path.read_bytes() for path in others_dir.glob("*.gguf")))
    }
    for path in files:
        if path.name in ("model.gguf", "merged.gguf"):
            t.expect(
                read_vocabulary(path.read_bytes()) in known,
                f"{path.name} has the vocabulary of neither input",
            )
    if result.code == 0 and "--out" in result.words and result.words[0] != "export-lora":
        t.expect(
            any(path.name in ("model.gguf", "adapter.gguf") for path in files),
            "exit code 0, but no model was written",
        )


def read_vocabulary(raw: bytes) -> bytes:
    """Return the bytes of a file's vocabulary."""
    return b"".join(entry.raw for entry in gguf.parse(raw).entries if entry.key == b"tokenizer.ggml.tokens")


KIND = Kind(
    name="inputs",
    what="replace, cut, unlink or edit inputs while they are read",
    count=lambda _: FULL,
    short=6,
    trial=trial,
)
