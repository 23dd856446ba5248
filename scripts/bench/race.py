"""Compares new models after equal time with torch and nanoGPT's recipe: `bench.py race`.

Both train a llama of the same shape and vocabulary on the same text, for the same seconds of steps, at the best of
some rates and batches. `llamatrain evaluate` computes the loss of both on the same validation text.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

import llamatrain
from bench.processes import PEERS, run_program
from bench.recipes import RECIPES, SHAPE, WARMUP, Texts, prepare_texts
from bench.timer import import_torch, print_header
from llamatrain.data.tokenizer import load
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import TensorInfo
from llamatrain.gguf.writer import create_gguf
from llamatrain.model.hyperparameters import read_hyperparameters

RATES = (0.012, 0.008)
PEER_RATES = (0.006, 0.003, 0.0015)
PEER_BATCHES = (8, 16)  # rows
TIMED_STEPS = 100  # their time decides how many steps fit


def train_ours(texts: Texts, rate: float, args: argparse.Namespace, folder: Path) -> Path:
    """Train as many steps as fit into the seconds, and return the model."""

    def run(steps: int, out: Path) -> float:
        """Run some steps and return their seconds."""
        result = llamatrain.from_scratch(
            texts.training,
            vocab_from=texts.vocabulary,
            **SHAPE,
            **RECIPES["adamuon"].options,
            lr=rate,
            iters=steps,
            warmup=steps // WARMUP,
            save_every=0,
            threads=args.threads,
            out=out,
        )
        lines = (result.folder / "metrics.jsonl").read_text().splitlines()
        return float(max(json.loads(line).get("total_seconds", 0.0) for line in lines))

    steps = round(args.budget / run(TIMED_STEPS, folder / f"timed-{rate}") * TIMED_STEPS)
    spent = run(steps, folder / f"ours-{rate}")
    print(f"{'llamatrain':10} {rate:6g} {SHAPE['batch']:5} {steps:6} {spent:7.1f}", end=" ", flush=True)
    return folder / f"ours-{rate}" / "model.gguf"


def train_peer(texts: Texts, rate: float, batch: int, args: argparse.Namespace, folder: Path) -> Path:
    """Train in torch, and return the model as a GGUF file."""
    template = open_gguf(texts.vocabulary)
    h = read_hyperparameters(template)
    size = {
        "vocab": h.vocab,
        "width": h.embd,
        "layers": h.layers,
        "heads": h.heads,
        "kv_heads": h.kv_heads,
        "ff": h.ff,
        "ctx": h.ctx,
        "batch": batch,
    }
    weights, model = folder / f"torch-{rate}-{batch}.npz", folder / f"torch-{rate}-{batch}.gguf"
    words = [PEERS / "nanogpt.py", folder / "tokens.npy", weights, json.dumps(size)]
    done = json.loads(run_program([sys.executable, *words, args.budget, rate, args.threads]))
    print(f"{'torch':10} {rate:6g} {batch:5} {done['steps']:6} {args.budget:7.1f}", end=" ", flush=True)
    arrays = np.load(weights)
    infos = [TensorInfo(name, info.type, info.shape) for name, info in template.tensors.items()]
    with create_gguf(model, dict(template.metadata.raw_values), infos) as out:
        for info in infos:
            out.write(info.name, arrays[info.name])
    return model


def compare(texts: Texts, args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, float]]:
    """Yield the losses of both sides, at each of their rates."""
    np.save(
        folder / "tokens.npy",
        load(open_gguf(texts.vocabulary).metadata).encode(texts.training.read_text("utf-8")),
    )
    peers = [(rate, batch) for rate in PEER_RATES for batch in PEER_BATCHES] if args.torch else []
    models = [
        *(("torch", partial(train_peer, texts, rate, batch, args, folder)) for rate, batch in peers),
        *(("llamatrain", partial(train_ours, texts, rate, args, folder)) for rate in RATES),
    ]
    for side, train in models:
        loss = llamatrain.evaluate(train(), texts.validation, threads=args.threads).loss
        assert loss is not None
        print(f"{loss:8.4f}", flush=True)
        yield side, loss


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `race`."""
    command.add_argument("text", type=Path, help="of at least a few megabytes, in a natural language")
    command.add_argument("--budget", type=float, default=60.0, help="seconds of training (60)")


def bench_race(args: argparse.Namespace) -> int:
    """Print the losses after equal time; return 1 if ours is not the lowest."""
    print_header(args, import_torch(args.threads, args.torch))
    print(f"\n{'trained by':10} {'rate':>6} {'batch':>5} {'steps':>6} {'seconds':>7} {'loss':>8}")
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = prepare_texts(args.text.read_text(encoding="utf-8"), folder, args.threads)
        for side, loss in compare(texts, args, folder):
            best[side] = min(loss, best.get(side, math.inf))
    return int(best["llamatrain"] > min(best.values()))
