"""Files that trials start from, which the command itself makes once.

They are models, adapters, checkpoints, data, runs and a warm cache.
"""

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
from torments.proc import become_subreaper
from torments.processes import ROOT, Job, find_cached_paths, fork_process
from torments.trial import Argument, last_line

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
FIXED: tuple[Argument, ...] = ("--precision", "f32", "--threads", 1, "--batch", 4)
SAVING: tuple[Argument, ...] = (
    *FIXED,
    "--iters",
    4,
    "--save-every",
    2,
    "--eval-every",
    2,
    "--val-split",
    0.1,
)
LATE_MODULES = ("run.train", "commands.evaluate", "commands.generate", "commands.merge_adapters")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Fixtures:
    """A folder of files that trials copy; it is used again if the program has not changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files, self.cache, self.trials = (folder / name for name in ("things", "cache", "trials"))

    def prepare(self) -> None:
        """Make the files unless they exist, and load all code that forks need."""
        become_subreaper()
        load_commands()
        ready, key = self.folder / "ready", compute_fingerprint()
        if ready.is_file() and ready.read_text() == key:
            self.load_kernels()
            return
        for folder in (self.files, self.cache, self.trials):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        (self.folder / "output").mkdir(exist_ok=True)
        self.write_data()
        self.train_models()
        self.copy_kernels()
        self.load_kernels()
        ready.write_text(key)

    def make(self, *words: Argument) -> str:
        """Run a command that must succeed, and return its output."""
        result = fork_process(
            Job(words=tuple(map(str, words)), folder=self.files, cache=None, seconds=600)
        ).wait()
        if result.code:
            raise SystemExit(
                f"error: cannot prepare the fixtures: {' '.join(map(str, words))}: {last_line(result.err)}"
            )
        return result.out

    def copy_kernels(self) -> None:
        """Copy the kernels that this user has compiled, so that none is compiled for the trials alone."""
        cache_dir = self.kernel_cache_dir()
        if cache_dir.is_dir():
            shutil.copytree(cache_dir, self.cache / "llamatrain" / cache_dir.name)

    def kernel_cache_dir(self) -> Path:
        """Return the folder of this user's compiled kernels."""
        from llamatrain.compiler.cache import cache_key
        from llamatrain.platform.cache_dir import default_cache_dir

        return default_cache_dir(cache_key()) or Path("/nowhere")

    def write_data(self) -> None:
        """Write texts, chats, prompts and preferences."""
        rng = Random(1)
        words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 8))) for _ in range(40)]
        text = "".join(" ".join(rng.choices(words, k=9)) + ".\n" for _ in range(140))[:6016]
        (self.files / "text.txt").write_text(text)
        (self.files / "val.txt").write_text(text[:1000])
        chats = [
            {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
            for a, b in pairwise(words)
        ]
        (self.files / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
        pairs = [{"prompt": a, "completion": b} for a, b in pairwise(words)]
        (self.files / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
        better = [{"prompt": a, "chosen": b, "rejected": b[::-1] + "x"} for a, b in pairwise(words)]
        (self.files / "better.jsonl").write_text("".join(json.dumps(row) + "\n" for row in better))

    def train_models(self) -> None:
        """Train and export the models, adapters and runs."""
        self.make("from-scratch", "text.txt", *TINY, *SAVING, "--out", "run")
        shutil.copyfile(self.files / "run" / "model.gguf", self.files / "plain.gguf")
        self.make("from-scratch", "text.txt", *TINY[2:], "--vocab-size", 300, *SAVING, "--out", "learned")
        shutil.copyfile(self.files / "learned" / "model.gguf", self.files / "learned.gguf")
        base = gguf.parse((self.files / "plain.gguf").read_bytes())
        base.entries.append(gguf.Entry(b"tokenizer.chat_template", gguf.STRING, gguf.text(TEMPLATE)))
        (self.files / "base.gguf").write_bytes(base.pack())
        big = gguf.parse((self.files / "learned.gguf").read_bytes())
        big.entries.append(gguf.Entry(b"padding", gguf.STRING, gguf.text("x" * 50_000)))
        (self.files / "bigger.gguf").write_bytes(big.pack())
        self.make(
            "finetune", "base.gguf", "text.txt", *SAVING, "--ctx", 32, "--peft", "peft", "--out", "tune"
        )
        shutil.copyfile(self.files / "tune" / "adapter.gguf", self.files / "adapter.gguf")
        self.make("finetune", "base.gguf", "text.txt", *SAVING, "--ctx", 32, "--full", "--out", "full")
        self.make("export-lora", "base.gguf", "--lora", "adapter.gguf", "--out", "merged.gguf")
        self.make("export-lora", "base.gguf", "--type", "q8_0", "--lora", "adapter.gguf", "--out", "q8.gguf")
        self.make(
            "from-scratch",
            "text.txt",
            *TINY,
            *SAVING,
            "--arch",
            "qwen3",
            "--sample-every",
            2,
            "--profile",
            "--out",
            "profiled",
        )
        shutil.copyfile(self.files / "profiled" / "model.gguf", self.files / "other.gguf")
        for path in (self.files / "profiled").glob("*.gguf"):
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
        self.make("from-scratch", "text.txt", *least, *FIXED, "--iters", 1, "--keep", 1, "--out", "small")
        self.make("evaluate", "base.gguf", "chats.jsonl", "--threads", 1)
        self.make("generate", "base.gguf", "--prompt", "ab", "-n", 4, "--threads", 1)
        (self.files / "old.bin").write_bytes(make_old_adapter(self.files / "adapter.gguf"))
        (self.files / "recipe.toml").write_text(
            'embd = 32\nhead = 4\nlayer = 2\nff = 64\nctx = 32\nvocab-size = "bytes"\nlr = 1e-3\n'
        )

    def load_kernels(self) -> None:
        """Load the kernels into this process, for its forks.

        It must keep one thread, or it could not fork."""
        scratch = self.folder / "warm"
        shutil.rmtree(scratch, ignore_errors=True)
        files = self.files
        run_here("from-scratch", files / "text.txt", *TINY, *SAVING, "--out", scratch / "a")
        run_here(
            "finetune", files / "base.gguf", files / "text.txt", *SAVING, "--ctx", 32, "--out", scratch / "b"
        )
        run_here("evaluate", files / "base.gguf", files / "chats.jsonl", "--threads", 1)
        run_here("generate", files / "base.gguf", "--prompt", "ab", "-n", 4, "--threads", 1)
        run_here("preview", files / "chats.jsonl", "--model", files / "base.gguf")
        tasks = len(list(Path("/proc/self/task").iterdir()))
        if tasks > 1:
            raise SystemExit(f"error: this process cannot fork any more: it has {tasks} threads")
        find_cached_paths()
        gc.collect()
        gc.freeze()


def run_here(*words: Argument) -> None:
    """Run the command in this process."""
    from llamatrain.cli.main import main

    out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", ["llamatrain", *map(str, words)]),
    ):
        try:
            main()
        except SystemExit as end:
            if end.code:
                message = err.buffer.getvalue().decode()
                raise SystemExit(f"error: cannot prepare the fixtures: {last_line(message)}") from None


def make_old_adapter(path: Path, rank: int = 8) -> bytes:
    """Return an adapter in the format of llama.cpp's old finetune, with the factors of a newer one."""
    parts = gguf.parse(path.read_bytes())
    raw = b"algg" + struct.pack("<III", 1, rank, rank)
    for info in parts.infos:
        name = info.name.replace(b".lora_a", b".loraA").replace(b".lora_b", b".loraB")
        axes = [*reversed(info.axes)] if name.endswith(b"A") else info.axes
        raw += struct.pack(f"<III{len(axes)}I", len(axes), len(name), 0, *axes) + name
        raw += bytes(-len(raw) % 32) + parts.data[info.offset : info.offset + 4 * axes[0] * axes[1]]
    return raw


def compute_fingerprint() -> str:
    """Return a hash of the program and of these scripts."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "llamatrain").rglob("*.py"), *Path(__file__).parent.glob("*.py")]):
        digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()


def load_commands() -> None:
    """Import all that commands import."""
    from llamatrain.cli.main import COMMANDS, load_command

    for name in COMMANDS:
        load_command(name)
    for name in LATE_MODULES:
        import_module(f"llamatrain.{name}")
