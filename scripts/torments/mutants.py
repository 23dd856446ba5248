"""Twenty thousand files and options that are a little wrong: each ends in success or in one line, soon and with little memory."""

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from torments import gguf
from torments.core import Argument, Kind, Trial
from torments.house import SAME, TINY
from torments.mutate import ENTRY, any_bytes, as_json, changed_json, mutated
from torments.words import attempt, json_lines, options, recipes, runs, templates

FULL = 20_000
CHECKSUM = b"training.checksum"


def mutant(t: Trial, name: str, of: str = "") -> Path:
    path = t.folder / name
    path.write_bytes(mutated((t.house.things / (of or name)).read_bytes(), t.random))
    return path


# ---- files of the llama.cpp world ------------------------------------------


def models(t: Trial) -> None:
    path = mutant(t, "m.gguf", t.random.choice(["base.gguf", "learned.gguf", "q8.gguf", "other.gguf"]))
    t.given("text.txt", "chats.jsonl")
    commands: list[tuple[Argument, ...]] = [
        ("inspect", path),
        ("inspect", "--json", path),
        ("generate", path, "--prompt", "ab", "-n", 2, "--threads", 1),
        ("preview", "chats.jsonl", "--model", path),
        ("plan", "finetune", path, "text.txt", "--ctx", 32),
        ("evaluate", path, "text.txt", "--threads", 1, "--ctx", 32),
        ("export-lora", path, "--lora", t.house.things / "adapter.gguf", "--out", "o.gguf", "--threads", 1),
        ("finetune", path, "text.txt", *SAME, "--iters", 1, "--ctx", 32, "--out", "o"),
        ("from-scratch", "text.txt", "--checkpoint-in", path, *SAME, "--iters", 1, "--ctx", 32, "--out", "o"),
    ]
    attempt(t, *t.random.choices(commands, [6, 2, 2, 3, 2, 1, 2, 2, 1])[0])
    t.whole(*t.folder.glob("o*"))


def vocabularies(t: Trial) -> None:
    """What is wrong is in the words."""
    made = gguf.parse(
        (t.house.things / t.random.choice(["base.gguf", "learned.gguf", "plain.gguf"])).read_bytes()
    )
    words = [entry for entry in made.entries if entry.key.startswith(b"tokenizer.")]
    for _ in range(t.random.choice([1, 1, 2])):
        t.random.choice(ENTRY)(t.random.choice(words), t.random)
    (t.folder / "v.gguf").write_bytes(made.packed())
    t.given("text.txt", "chats.jsonl")
    commands: list[tuple[Argument, ...]] = [
        ("preview", "chats.jsonl", "--model", "v.gguf"),
        ("preview", "text.txt", "--model", "v.gguf"),
        ("plan", "from-scratch", "text.txt", *TINY[2:], "--vocab-from", "v.gguf"),
        ("generate", "v.gguf", "--prompt", "<0x41> a", "-n", 1, "--threads", 1),
        ("from-scratch", "text.txt", *TINY[2:], *SAME, "--vocab-from", "v.gguf", "--iters", 1, "--out", "o"),
    ]
    attempt(t, *t.random.choices(commands, [4, 4, 1, 2, 1])[0])


def adapters(t: Trial) -> None:
    path = mutant(t, "a.gguf", "adapter.gguf")
    base = t.house.things / "base.gguf"
    merge = ("export-lora", base, "--lora", path, "--out", "o.gguf", "--threads", 1)
    attempt(
        t,
        *t.random.choice(
            [("inspect", path), merge, merge, ("generate", base, "--lora", path, "--prompt", "a", "-n", 1)]
        ),
    )


def old_adapters(t: Trial) -> None:
    raw = (t.house.things / "old.bin").read_bytes()
    made = bytearray(raw)
    for _ in range(t.random.choice([1, 1, 2])):
        place = t.random.choice([0, 4, 8, 12, 16, 20, 24, 28, 32])
        made[place : place + 4] = t.random.choice([0, 1, 8, 255, 2**31, 2**32 - 1]).to_bytes(4, "little")
    (t.folder / "old.bin").write_bytes(bytes(made) if t.random.random() < 0.5 else any_bytes(raw, t.random))
    attempt(
        t, "export-lora", t.house.things / "base.gguf", "--lora", "old.bin", "--out", "o.gguf", "--threads", 1
    )


def peft_folders(t: Trial) -> None:
    t.given("peft")
    config, weights = (
        t.folder / "peft" / "adapter_config.json",
        t.folder / "peft" / "adapter_model.safetensors",
    )
    if t.random.random() < 0.5:
        config.write_bytes(as_json(changed_json(json.loads(config.read_text()), t.random), t.random))
    else:
        raw = weights.read_bytes()
        (size,) = struct.unpack_from("<Q", raw)
        head = as_json(changed_json(json.loads(raw[8 : 8 + size]), t.random), t.random)
        told = len(head) if t.random.random() < 0.8 else t.random.choice([0, 1, 2**31, 2**63, 2**64 - 1])
        weights.write_bytes(struct.pack("<Q", told) + head + raw[8 + size :])
    attempt(
        t, "export-lora", t.house.things / "base.gguf", "--lora", "peft", "--out", "o.gguf", "--threads", 1
    )


# ---- checkpoints -----------------------------------------------------------


def signed(raw: bytes) -> bytes:
    """With the checksum that the file should have; it is the first value."""
    place = raw.find(CHECKSUM, 0, 200)
    if place < 0:
        return raw
    begin = place + len(CHECKSUM) + 4
    found = zlib.crc32(raw[begin + 4 :], zlib.crc32(bytes(4), zlib.crc32(raw[:begin])))
    return raw[:begin] + found.to_bytes(4, "little") + raw[begin + 4 :]


def wrong_state(raw: bytes, t: Trial) -> bytes:
    """Of the values of a run, and the JSON in them."""
    made = gguf.parse(raw)
    texts = [each for each in made.entries if each.key.startswith(b"training.") and each.raw[8:9] == b"{"]
    if texts and t.random.random() < 0.6:
        entry = t.random.choice(texts)
        entry.raw = gguf.text(json.dumps(changed_json(json.loads(entry.raw[8:]), t.random)))
        return made.packed()
    own = [
        each
        for each in made.entries
        if each.key.startswith((b"training.", b"optimizer.")) and each.key != CHECKSUM
    ]
    t.random.choice(ENTRY)(t.random.choice(own), t.random)
    return made.packed()


def checkpoints(t: Trial) -> None:
    run = t.random.choice(["run", "tune", "full"])
    t.given(run, "text.txt", "base.gguf")
    for path in (t.folder / run).glob("checkpoint-*"):
        if path.name != "checkpoint-4.gguf":
            path.unlink()
    path = t.folder / run / "checkpoint-4.gguf"
    raw = path.read_bytes()
    path.write_bytes(signed(wrong_state(raw, t) if t.random.random() < 0.7 else mutated(raw, t.random)))
    command = "from-scratch" if run == "run" else "finetune"
    words = (command, "--resume", t.random.choice([run, f"{run}/checkpoint-4.gguf"]), "--iters", 5)
    attempt(
        t,
        *t.random.choice(
            [
                words,
                words,
                words,
                ("inspect", path),
                ("from-scratch", "--checkpoint-in", path, "text.txt", "--iters", 5, *SAME, "--out", "o"),
            ]
        ),
    )


KINDS: list[tuple[Callable[[Trial], None], int]] = [
    (models, 5),
    (vocabularies, 4),
    (adapters, 3),
    (old_adapters, 1),
    (peft_folders, 2),
    (checkpoints, 3),
    (json_lines, 3),
    (templates, 2),
    (runs, 3),
    (recipes, 2),
    (options, 4),
]


def trial(t: Trial) -> None:
    attempt_of = t.random.choices([each for each, _ in KINDS], [weight for _, weight in KINDS])[0]
    t.tell(f"{attempt_of.__name__}:")
    attempt_of(t)
    shutil.rmtree(t.folder / "o", ignore_errors=True)


KIND = Kind(
    name="mutants",
    what="files and options that are a little wrong",
    count=lambda _: FULL,
    short=40,
    trial=trial,
)
