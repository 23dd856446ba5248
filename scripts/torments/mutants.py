"""Passes twenty thousand files and options with small errors to the command.

Each command must end well or with one line of error, soon and with little memory.
"""

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from torments import gguf
from torments.fixtures import FIXED, TINY
from torments.mutate import ENTRY, change_json, encode_json, mutate_bytes, mutate_gguf
from torments.trial import Argument, Kind, Trial
from torments.words import (
    attempt,
    mutate_json_lines,
    mutate_options,
    mutate_recipe,
    mutate_run_files,
    mutate_template,
)

FULL = 20_000
CHECKSUM = b"training.checksum"


def write_mutant(t: Trial, name: str, of: str = "") -> Path:
    """Write a mutated copy of a fixture and return its path."""
    path = t.folder / name
    path.write_bytes(mutate_gguf((t.fixtures.files / (of or name)).read_bytes(), t.random))
    return path


# ---- files of the llama.cpp world ------------------------------------------


def try_model(t: Trial) -> None:
    """Use a mutated model."""
    path = write_mutant(t, "m.gguf", t.random.choice(["base.gguf", "learned.gguf", "q8.gguf", "other.gguf"]))
    t.copy_files("text.txt", "chats.jsonl")
    commands: list[tuple[Argument, ...]] = [
        ("inspect", path),
        ("inspect", "--json", path),
        ("generate", path, "--prompt", "ab", "-n", 2, "--threads", 1),
        ("preview", "chats.jsonl", "--model", path),
        ("plan", "finetune", path, "text.txt", "--ctx", 32),
        ("evaluate", path, "text.txt", "--threads", 1, "--ctx", 32),
        ("export-lora", path, "--lora", t.fixtures.files / "adapter.gguf", "--out", "o.gguf", "--threads", 1),
        ("finetune", path, "text.txt", *FIXED, "--iters", 1, "--ctx", 32, "--out", "o"),
        (
            "from-scratch",
            "text.txt",
            "--checkpoint-in",
            path,
            *FIXED,
            "--iters",
            1,
            "--ctx",
            32,
            "--out",
            "o",
        ),
    ]
    attempt(t, *t.random.choices(commands, [6, 2, 2, 3, 2, 1, 2, 2, 1])[0])
    t.check_gguf(*t.folder.glob("o*"))


def try_vocabulary(t: Trial) -> None:
    """Use a model with a mutated vocabulary."""
    parts = gguf.parse(
        (t.fixtures.files / t.random.choice(["base.gguf", "learned.gguf", "plain.gguf"])).read_bytes()
    )
    words = [entry for entry in parts.entries if entry.key.startswith(b"tokenizer.")]
    for _ in range(t.random.choice([1, 1, 2])):
        t.random.choice(ENTRY)(t.random.choice(words), t.random)
    (t.folder / "v.gguf").write_bytes(parts.pack())
    t.copy_files("text.txt", "chats.jsonl")
    commands: list[tuple[Argument, ...]] = [
        ("preview", "chats.jsonl", "--model", "v.gguf"),
        ("preview", "text.txt", "--model", "v.gguf"),
        ("plan", "from-scratch", "text.txt", *TINY[2:], "--vocab-from", "v.gguf"),
        ("generate", "v.gguf", "--prompt", "<0x41> a", "-n", 1, "--threads", 1),
        ("from-scratch", "text.txt", *TINY[2:], *FIXED, "--vocab-from", "v.gguf", "--iters", 1, "--out", "o"),
    ]
    attempt(t, *t.random.choices(commands, [4, 4, 1, 2, 1])[0])


def try_adapter(t: Trial) -> None:
    """Use a mutated adapter."""
    path = write_mutant(t, "a.gguf", "adapter.gguf")
    base = t.fixtures.files / "base.gguf"
    merge = ("export-lora", base, "--lora", path, "--out", "o.gguf", "--threads", 1)
    attempt(
        t,
        *t.random.choice(
            [("inspect", path), merge, merge, ("generate", base, "--lora", path, "--prompt", "a", "-n", 1)]
        ),
    )


def try_old_adapter(t: Trial) -> None:
    """Use a mutated adapter in the old format."""
    raw = (t.fixtures.files / "old.bin").read_bytes()
    parts = bytearray(raw)
    for _ in range(t.random.choice([1, 1, 2])):
        offset = t.random.choice([0, 4, 8, 12, 16, 20, 24, 28, 32])
        parts[offset : offset + 4] = t.random.choice([0, 1, 8, 255, 2**31, 2**32 - 1]).to_bytes(4, "little")
    (t.folder / "old.bin").write_bytes(
        bytes(parts) if t.random.random() < 0.5 else mutate_bytes(raw, t.random)
    )
    attempt(
        t,
        "export-lora",
        t.fixtures.files / "base.gguf",
        "--lora",
        "old.bin",
        "--out",
        "o.gguf",
        "--threads",
        1,
    )


def try_peft_folder(t: Trial) -> None:
    """Use a PEFT folder with mutated JSON."""
    t.copy_files("peft")
    config, weights = (
        t.folder / "peft" / "adapter_config.json",
        t.folder / "peft" / "adapter_model.safetensors",
    )
    if t.random.random() < 0.5:
        config.write_bytes(encode_json(change_json(json.loads(config.read_text()), t.random), t.random))
    else:
        raw = weights.read_bytes()
        (size,) = struct.unpack_from("<Q", raw)
        header = encode_json(change_json(json.loads(raw[8 : 8 + size]), t.random), t.random)
        length = len(header) if t.random.random() < 0.8 else t.random.choice([0, 1, 2**31, 2**63, 2**64 - 1])
        weights.write_bytes(struct.pack("<Q", length) + header + raw[8 + size :])
    attempt(
        t, "export-lora", t.fixtures.files / "base.gguf", "--lora", "peft", "--out", "o.gguf", "--threads", 1
    )


# ---- checkpoints -----------------------------------------------------------


def sign_checkpoint(raw: bytes) -> bytes:
    """Return a checkpoint with a valid checksum, which is its first value."""
    offset = raw.find(CHECKSUM, 0, 200)
    if offset < 0:
        return raw
    start = offset + len(CHECKSUM) + 4
    checksum = zlib.crc32(raw[start + 4 :], zlib.crc32(bytes(4), zlib.crc32(raw[:start])))
    return raw[:start] + checksum.to_bytes(4, "little") + raw[start + 4 :]


def mutate_state(raw: bytes, t: Trial) -> bytes:
    """Mutate the values of a run in a checkpoint, or the JSON in them."""
    parts = gguf.parse(raw)
    texts = [
        entry for entry in parts.entries if entry.key.startswith(b"training.") and entry.raw[8:9] == b"{"
    ]
    if texts and t.random.random() < 0.6:
        entry = t.random.choice(texts)
        entry.raw = gguf.text(json.dumps(change_json(json.loads(entry.raw[8:]), t.random)))
        return parts.pack()
    own = [
        entry
        for entry in parts.entries
        if entry.key.startswith((b"training.", b"optimizer.")) and entry.key != CHECKSUM
    ]
    t.random.choice(ENTRY)(t.random.choice(own), t.random)
    return parts.pack()


def try_checkpoint(t: Trial) -> None:
    """Use a mutated checkpoint."""
    run = t.random.choice(["run", "tune", "full"])
    t.copy_files(run, "text.txt", "base.gguf")
    for path in (t.folder / run).glob("checkpoint-*"):
        if path.name != "checkpoint-4.gguf":
            path.unlink()
    path = t.folder / run / "checkpoint-4.gguf"
    raw = path.read_bytes()
    path.write_bytes(
        sign_checkpoint(mutate_state(raw, t) if t.random.random() < 0.7 else mutate_gguf(raw, t.random))
    )
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
                ("from-scratch", "--checkpoint-in", path, "text.txt", "--iters", 5, *FIXED, "--out", "o"),
            ]
        ),
    )


ATTEMPTS: list[tuple[Callable[[Trial], None], int]] = [
    (try_model, 5),
    (try_vocabulary, 4),
    (try_adapter, 3),
    (try_old_adapter, 1),
    (try_peft_folder, 2),
    (try_checkpoint, 3),
    (mutate_json_lines, 3),
    (mutate_template, 2),
    (mutate_run_files, 3),
    (mutate_recipe, 2),
    (mutate_options, 4),
]


def trial(t: Trial) -> None:
    """Run one of the functions at random."""
    chosen = t.random.choices([function for function, _ in ATTEMPTS], [weight for _, weight in ATTEMPTS])[0]
    t.log(f"{chosen.__name__}:")
    chosen(t)
    shutil.rmtree(t.folder / "o", ignore_errors=True)


KIND = Kind(
    name="mutants",
    what="mutate files and options",
    count=lambda _: FULL,
    short=40,
    trial=trial,
)
