"""Check that eight short runs give the same bits before and after a change.

    python tests/golden/bits.py record FOLDER     run them; keep losses, hashes of tensors, and a checkpoint half way
    python tests/golden/bits.py compare FOLDER    run them again, resume those checkpoints, and name what differs

Only the command itself is used, so that a record outlives whatever is behind it. Bits are those of one kind of processor
and of one set of kernels: record and compare on the same machine.
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

ROOT = Path(__file__).resolve().parents[2]
STEPS, HALF = 8, 4
RECORD = "bits.json"

BYTES = [
    "--vocab-size",
    "bytes",
    "--embd",
    "64",
    "--head",
    "4",
    "--head-kv",
    "2",
    "--layer",
    "2",
    "--ctx",
    "48",
]
BASE = ["--vocab-size", "bytes", "--embd", "256", "--head", "4", "--layer", "2", "--ff", "256", "--ctx", "64"]
LORA = [
    "--lora-r",
    "4",
    "--lora-dropout",
    "0.1",
    "--target",
    "attn_q,attn_v,ffn_down",
    "--rank",
    "ffn_down=2",
    "--ctx",
    "64",
]

# name: command, its arguments, what comes of it; files stand in the folder of inputs
RUNS: dict[str, tuple[list[str], str]] = {
    "sine": (["from-scratch", "--sample-every", "0"], "model.gguf"),
    "bytes": (["from-scratch", "text.txt", *BYTES, "--clip", "0"], "model.gguf"),
    "learned": (
        ["from-scratch", "text.txt", "--vocab-size", "400", "--size", "tiny", "--ctx", "32"],
        "model.gguf",
    ),
    "accumulated": (
        [
            "from-scratch",
            "text.txt",
            *BYTES,
            "--grad-acc",
            "3",
            "--batch",
            "2",
            "--clip",
            "0.5",
            "--precision",
            "f32",
        ],
        "model.gguf",
    ),
    "pairs": (
        [
            "from-scratch",
            "pairs.jsonl",
            *BYTES,
            "--val-split",
            "0.2",
            "--eval-every",
            "4",
            "--tie-embeddings",
        ],
        "model.gguf",
    ),
    "packed": (
        ["from-scratch", "pairs.jsonl", *BYTES, "--pack", "--optimizer", "sgd", "--lr", "0.1"],
        "model.gguf",
    ),
    "lbfgs": (
        ["from-scratch", "text.txt", *BYTES, "--optimizer", "lbfgs", "--batch", "4", "--precision", "f32"],
        "model.gguf",
    ),
    "lora": (["finetune", "base-q4_k.gguf", "pairs.jsonl", *LORA, "--lora-plus-ratio", "4"], "adapter.gguf"),
    "full": (
        ["finetune", "base.gguf", "pairs.jsonl", "--full", "--ctx", "64", "--remat", "block"],
        "model.gguf",
    ),
}


def called(folder: Path, *arguments: str | Path) -> str:
    """The command, which must succeed; what it prints."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    words = [sys.executable, "-c", "from llamatrain.cli.main import main; main()", *map(str, arguments)]
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def make_inputs(folder: Path) -> None:
    """Text and pairs from a seed, a base, and the same base quantised."""
    draw = random.Random(7)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 8))) for _ in range(300)]

    def sentence(least: int, most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(least, most)))

    (folder / "text.txt").write_text("\n".join(sentence(5, 15) + "." for _ in range(200)))
    pairs = [{"prompt": sentence(1, 6), "completion": sentence(1, 9)} for _ in range(60)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    called(folder, "from-scratch", "text.txt", *BASE, "--iters", "2", "--out", "base", "--seed", "3")
    (folder / "base" / "model.gguf").rename(folder / "base.gguf")
    called(
        folder,
        "finetune",
        "base.gguf",
        "pairs.jsonl",
        "--iters",
        "2",
        "--lr",
        "0.01",
        "--ctx",
        "64",
        "--out",
        "small",
    )
    called(
        folder,
        "export-lora",
        "base.gguf",
        "--lora",
        "small/adapter.gguf",
        "--type",
        "q4_k",
        "--out",
        "base-q4_k.gguf",
    )


def bits_of(file: Path) -> dict[str, str]:
    tensors = GGUFReader(file).tensors
    return {
        tensor.name: hashlib.sha256(np.ascontiguousarray(tensor.data).tobytes()).hexdigest()[:16]
        for tensor in tensors
    }


def outcome(run: Path, result: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line.get("loss", line.get("val_loss")) for line in lines]
    return {"losses": losses, "tensors": bits_of(run / result)}


def all_outcomes(inputs: Path, runs: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, (words, result) in RUNS.items():
        settings = [
            "--iters",
            str(STEPS),
            "--save-every",
            str(HALF),
            "--keep",
            "9",
            "--seed",
            "11",
            "--threads",
            "2",
        ]
        called(inputs, *words, *settings, "--out", runs / name)
        yield name, outcome(runs / name, result)
    prompt = ["--prompt", "abc", "--temp", "0", "-n", "24", "--threads", "2"]
    yield (
        "generated",
        {
            "text": called(
                inputs, "generate", "base-q4_k.gguf", "--lora", runs / "lora" / "adapter.gguf", *prompt
            )
        },
    )
    judged = called(
        inputs, "evaluate", "base-q4_k.gguf", "pairs.jsonl", "--ctx", "64", "--threads", "2", "--json"
    )
    found = json.loads(judged)
    yield "evaluated", {name: found[name] for name in ("loss", "perplexity", "bits_per_byte", "tokens")}


def record(folder: Path) -> None:
    inputs, runs, halves = folder / "inputs", folder / "runs", folder / "halves"
    for each in (inputs, runs, halves):
        each.mkdir(parents=True)
    make_inputs(inputs)
    found = dict(all_outcomes(inputs, runs))
    found["base"] = {"tensors": bits_of(inputs / "base-q4_k.gguf")}
    for name in RUNS:
        shutil.copy(runs / name / f"checkpoint-{HALF}.gguf", halves / f"{name}.gguf")
        shutil.copy(runs / name / "metrics.jsonl", halves / f"{name}.jsonl")
    (folder / RECORD).write_text(json.dumps(found, indent=1))
    print(f"{len(found)} outcomes are in {folder / RECORD}")


def resumed_outcomes(folder: Path, runs: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of the recorded checkpoints, gone on with."""
    for name, (words, result) in RUNS.items():
        home = runs / f"{name}-half"
        home.mkdir()
        shutil.copy(folder / "halves" / f"{name}.gguf", home / f"checkpoint-{HALF}.gguf")
        shutil.copy(folder / "halves" / f"{name}.jsonl", home / "metrics.jsonl")
        called(folder / "inputs", words[0], "--resume", home)
        yield name, outcome(home, result)


def compare(folder: Path) -> int:
    before = json.loads((folder / RECORD).read_text())
    with tempfile.TemporaryDirectory() as place:
        runs, inputs = Path(place) / "runs", Path(place) / "inputs"
        runs.mkdir()
        inputs.mkdir()
        make_inputs(inputs)
        found = dict(all_outcomes(folder / "inputs", runs))
        found["base"] = {"tensors": bits_of(inputs / "base-q4_k.gguf")}
        differing = [name for name in before if found.get(name) != before[name]]
        differing += [
            f"{name}, resumed" for name, each in resumed_outcomes(folder, runs) if each != before[name]
        ]
    print(
        f"differ: {', '.join(differing)}"
        if differing
        else f"all {len(before)} outcomes are the same, resumed ones too"
    )
    return 1 if differing else 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["record", folder]:
            record(Path(folder).resolve())
        case ["compare", folder]:
            sys.exit(compare(Path(folder).resolve()))
        case _:
            raise SystemExit(__doc__)
