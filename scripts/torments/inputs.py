"""Inputs that change while a command runs: replaced, overwritten, cut short, unlinked, edited in place."""

from pathlib import Path

from torments import gguf
from torments.core import Argument, Kind, Trial
from torments.house import SAME, TINY
from torments.processes import Ended

OWN: tuple[Argument, ...] = ("--iters", 12, "--save-every", 3, "--eval-every", 0, *SAME, "--ctx", 32)
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
LIKELY = 0.75  # of trials strike the model, the others another of the inputs
FULL = 1000
NAMES = list(COMMANDS)


def trial(t: Trial) -> None:
    name, manner = NAMES[t.number % len(NAMES)], MANNERS[t.number // len(NAMES) % len(MANNERS)]
    words = COMMANDS[name]
    t.given("base.gguf", "text.txt", "chats.jsonl", "adapter.gguf", "bigger.gguf", "plain.gguf")
    if "--resume" in words:
        t.given(str(words[2]))
    elsewhere = t.place / "others"
    elsewhere.mkdir()
    for each in ("bigger.gguf", "plain.gguf"):
        (t.folder / each).rename(elsewhere / each)
    target = chosen(t, words, name)
    bytes_before = {path.name: path.read_bytes() for path in t.folder.glob("*.gguf")}
    total = events(t, name, target)
    if not total:
        t.skipped = f"{name} does not read {target.name}"
        return
    plan = {
        "after": target.name,
        "at": t.random.randint(1, total),
        "do": "change",
        "input": str(target),
        **changed(target, manner, elsewhere),
    }
    ended = t.run(*words, plan=plan, codes=(0, 1, 2))
    written(t, ended, bytes_before, elsewhere, target)
    if manner == "edited" and target.name == "base.gguf":
        t.must(
            "lower learning rate" not in ended.err, f"what was changed is blamed on the rate: {ended.errors}"
        )


def chosen(t: Trial, words: tuple[Argument, ...], name: str) -> Path:
    if name == "resume-run":
        return t.folder / "text.txt" if t.random.random() < 0.5 else t.folder / "run" / "checkpoint-4.gguf"
    others = [each for each in ("text.txt", "chats.jsonl", "adapter.gguf") if each in words]
    return t.folder / (t.random.choice(others) if others and t.random.random() > LIKELY else "base.gguf")


def changed(target: Path, manner: str, elsewhere: Path) -> dict[str, str]:
    """How the file becomes another: text becomes more or less text."""
    kind, _, size = manner.partition(" ")
    other = elsewhere / ("plain.gguf" if size == "smaller" else "bigger.gguf")
    if target.suffix != ".gguf":
        other = elsewhere / "other"
        words = target.read_bytes()
        other.write_bytes(words[: len(words) // 3] if size == "smaller" else words * 3)
    return {"manner": kind, "other": str(other)}


def events(t: Trial, name: str, target: Path) -> int:
    """How many moments there are in an undisturbed run after the input was first opened."""
    place = t.house.folder / "events" / f"{name}-{target.name}"
    if not place.is_file():
        place.parent.mkdir(exist_ok=True)
        other = Trial(kind="events", number=0, seed=0, place=t.house.folder / "counting", house=t.house)
        other.given(
            "base.gguf",
            "text.txt",
            "chats.jsonl",
            "adapter.gguf",
            *([str(COMMANDS[name][2])] if "--resume" in COMMANDS[name] else []),
        )
        counted = other.place / "counted"
        ended = other.run(*COMMANDS[name], plan={"after": target.name, "count": str(counted)})
        if ended.code:
            raise SystemExit(f"error: an undisturbed {name} fails: {ended.err}")
        place.write_bytes(counted.read_bytes() if counted.is_file() else b"0")
    return int(place.read_text())


def written(t: Trial, ended: Ended, before: dict[str, bytes], elsewhere: Path, target: Path) -> None:
    """What was written opens, is whole, and has the words of one of the two inputs."""
    made = [
        path
        for path in (t.folder / "out", t.folder / "merged.gguf", t.folder / "tune", t.folder / "run")
        if path.exists()
    ]
    own = [path for place in made for path in ([place] if place.is_file() else sorted(place.glob("*.gguf")))]
    own = [
        path for path in own if not (target.exists() and path.samefile(target))
    ]  # a checkpoint has two names
    if not t.whole(*own):
        return
    t.tidy(t.folder)
    known = {
        vocabulary(raw)
        for raw in (before["base.gguf"], *(path.read_bytes() for path in elsewhere.glob("*.gguf")))
    }
    for path in own:
        if path.name in ("model.gguf", "merged.gguf"):
            t.must(vocabulary(path.read_bytes()) in known, f"{path.name} has the words of neither input")
    if ended.code == 0 and "--out" in ended.words and ended.words[0] != "export-lora":
        t.must(
            any(path.name in ("model.gguf", "adapter.gguf") for path in own),
            "exit code 0, and nothing was written",
        )


def vocabulary(raw: bytes) -> bytes:
    return b"".join(entry.raw for entry in gguf.parse(raw).entries if entry.key == b"tokenizer.ggml.tokens")


KIND = Kind(
    name="inputs",
    what="inputs replaced, cut short, unlinked or edited while they are read",
    count=lambda _: FULL,
    short=6,
    trial=trial,
)
