"""What trials start from: models, adapters, checkpoints, data and runs, made once by the command itself, and a warm cache."""

import gc
import hashlib
import io
import json
import shutil
import struct
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from random import Random
from unittest.mock import patch

from torments import gguf
from torments.core import Argument, last_line
from torments.processes import ROOT, Job, forked, know_places
from torments.watching import adopt

TINY: tuple[Argument, ...] = (
    "--vocab-size",
    "bytes",
    "--embd",
    32,
    "--head",
    4,
    "--layer",
    2,
    "--ff",
    64,
    "--ctx",
    32,
)
SAME: tuple[Argument, ...] = ("--precision", "f32", "--threads", 1, "--batch", 4)
OFTEN: tuple[Argument, ...] = (*SAME, "--iters", 4, "--save-every", 2, "--eval-every", 2, "--val-split", 0.1)
WORK = ("run.train", "commands.evaluate", "commands.generate", "commands.merge")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class House:
    """A folder of things to do harm with; found again where it was made by the same program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.things, self.cache, self.trials = (folder / name for name in ("things", "cache", "trials"))

    def prepare(self) -> None:
        adopt()
        warm()
        ready, key = self.folder / "ready", fingerprint()
        if ready.is_file() and ready.read_text() == key:
            self.load_kernels()
            return
        for each in (self.things, self.cache, self.trials):
            shutil.rmtree(each, ignore_errors=True)
            each.mkdir(parents=True)
        (self.folder / "said").mkdir(exist_ok=True)
        self.data()
        self.models()
        self.kernels()
        self.load_kernels()
        ready.write_text(key)

    def make(self, *words: Argument) -> str:
        """What must succeed before anything can be tried."""
        ended = forked(Job(words=tuple(map(str, words)), folder=self.things, cache=None, seconds=600)).wait()
        if ended.code:
            raise SystemExit(f"error: cannot prepare: {' '.join(map(str, words))}: {last_line(ended.err)}")
        return ended.out

    def kernels(self) -> None:
        """Those that this user's cache has by now, so that none is compiled for trials alone."""
        own = self.usual()
        if own.is_dir():
            shutil.copytree(own, self.cache / "llamatrain" / own.name)

    def usual(self) -> Path:
        from llamatrain.compiler.cache import cache_key
        from llamatrain.platform.cache_dir import default_cache_dir

        return default_cache_dir(cache_key()) or Path("/nowhere")

    def data(self) -> None:
        chance = Random(1)
        words = [
            "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(1, 8))) for _ in range(40)
        ]
        text = "".join(" ".join(chance.choices(words, k=9)) + ".\n" for _ in range(140))[:6016]
        (self.things / "text.txt").write_text(text)
        (self.things / "val.txt").write_text(text[:1000])
        chats = [
            {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
            for a, b in pairwise(words)
        ]
        (self.things / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats))
        pairs = [{"prompt": a, "completion": b} for a, b in pairwise(words)]
        (self.things / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in pairs))
        better = [{"prompt": a, "chosen": b, "rejected": b[::-1] + "x"} for a, b in pairwise(words)]
        (self.things / "better.jsonl").write_text("".join(json.dumps(each) + "\n" for each in better))

    def models(self) -> None:
        self.make("from-scratch", "text.txt", *TINY, *OFTEN, "--out", "run")
        shutil.copyfile(self.things / "run" / "model.gguf", self.things / "plain.gguf")
        self.make("from-scratch", "text.txt", *TINY[2:], "--vocab-size", 300, *OFTEN, "--out", "learned")
        shutil.copyfile(self.things / "learned" / "model.gguf", self.things / "learned.gguf")
        base = gguf.parse((self.things / "plain.gguf").read_bytes())
        base.entries.append(gguf.Entry(b"tokenizer.chat_template", gguf.STRING, gguf.text(TEMPLATE)))
        (self.things / "base.gguf").write_bytes(base.packed())
        big = gguf.parse((self.things / "learned.gguf").read_bytes())
        big.entries.append(gguf.Entry(b"padding", gguf.STRING, gguf.text("x" * 50_000)))
        (self.things / "bigger.gguf").write_bytes(big.packed())
        self.make("finetune", "base.gguf", "text.txt", *OFTEN, "--ctx", 32, "--peft", "peft", "--out", "tune")
        shutil.copyfile(self.things / "tune" / "adapter.gguf", self.things / "adapter.gguf")
        self.make("finetune", "base.gguf", "text.txt", *OFTEN, "--ctx", 32, "--full", "--out", "full")
        self.make("export-lora", "base.gguf", "--lora", "adapter.gguf", "--out", "merged.gguf")
        self.make("export-lora", "base.gguf", "--type", "q8_0", "--lora", "adapter.gguf", "--out", "q8.gguf")
        self.make(
            "from-scratch",
            "text.txt",
            *TINY,
            *OFTEN,
            "--arch",
            "qwen3",
            "--sample-every",
            2,
            "--profile",
            "--out",
            "told",
        )
        shutil.copyfile(self.things / "told" / "model.gguf", self.things / "other.gguf")
        for path in (self.things / "told").glob("*.gguf"):
            path.unlink()
        least = (
            "--vocab-size",
            "bytes",
            "--embd",
            4,
            "--head",
            1,
            "--layer",
            1,
            "--ff",
            4,
            "--ctx",
            8,
            "--tie-embeddings",
        )
        self.make("from-scratch", "text.txt", *least, *SAME, "--iters", 1, "--keep", 1, "--out", "small")
        self.make("evaluate", "base.gguf", "chats.jsonl", "--threads", 1)
        self.make("generate", "base.gguf", "--prompt", "ab", "-n", 4, "--threads", 1)
        (self.things / "old.bin").write_bytes(old_adapter(self.things / "adapter.gguf"))
        (self.things / "recipe.toml").write_text(
            'embd = 32\nhead = 4\nlayer = 2\nff = 64\nctx = 32\nvocab-size = "bytes"\nlr = 1e-3\n'
        )

    def load_kernels(self) -> None:
        """Into this process, whose forks then have them; with one thread, or it could not be forked."""
        scratch = self.folder / "warm"
        shutil.rmtree(scratch, ignore_errors=True)
        things = self.things
        run_inside("from-scratch", things / "text.txt", *TINY, *OFTEN, "--out", scratch / "a")
        run_inside(
            "finetune", things / "base.gguf", things / "text.txt", *OFTEN, "--ctx", 32, "--out", scratch / "b"
        )
        run_inside("evaluate", things / "base.gguf", things / "chats.jsonl", "--threads", 1)
        run_inside("generate", things / "base.gguf", "--prompt", "ab", "-n", 4, "--threads", 1)
        run_inside("preview", things / "chats.jsonl", "--model", things / "base.gguf")
        tasks = len(list(Path("/proc/self/task").iterdir()))
        if tasks > 1:
            raise SystemExit(f"error: {tasks} threads: this process cannot be forked any more")
        know_places()
        gc.collect()
        gc.freeze()


def run_inside(*words: Argument) -> None:
    """The command in this very process."""
    from llamatrain.cli.main import main

    out, said = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    with (
        redirect_stdout(out),
        redirect_stderr(said),
        patch.object(sys, "argv", ["llamatrain", *map(str, words)]),
    ):
        try:
            main()
        except SystemExit as end:
            if end.code:
                told = said.buffer.getvalue().decode()
                raise SystemExit(f"error: cannot prepare: {last_line(told)}") from None


def old_adapter(path: Path, rank: int = 8) -> bytes:
    """An adapter as llama.cpp's old finetune wrote it, of the factors in a newer one."""
    made = gguf.parse(path.read_bytes())
    raw = b"algg" + struct.pack("<III", 1, rank, rank)
    for info in made.infos:
        name = info.name.replace(b".lora_a", b".loraA").replace(b".lora_b", b".loraB")
        axes = [*reversed(info.axes)] if name.endswith(b"A") else info.axes
        raw += struct.pack(f"<III{len(axes)}I", len(axes), len(name), 0, *axes) + name
        raw += bytes(-len(raw) % 32) + made.data[info.offset : info.offset + 4 * axes[0] * axes[1]]
    return raw


def fingerprint() -> str:
    """Of the program and of this script."""
    found = hashlib.sha256()
    for path in sorted([*(ROOT / "llamatrain").rglob("*.py"), *Path(__file__).parent.glob("*.py")]):
        found.update(str(path).encode() + path.read_bytes())
    return found.hexdigest()


def warm() -> None:
    """Load all that commands load."""
    from llamatrain.cli.main import COMMANDS, load_command

    for name in COMMANDS:
        load_command(name)
    for name in WORK:
        import_module(f"llamatrain.{name}")
