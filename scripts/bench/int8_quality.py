"""Compares adapters that are trained with int8, bf16 and float32 products with the base: `bench.py int8`."""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

import llamatrain
from bench.timer import print_header
from llamatrain.gguf.reader import open_gguf

MODES: dict[str, dict[str, Any]] = {
    "f32": {"precision": "f32", "base_precision": "same"},
    "bf16": {"precision": "bf16", "base_precision": "same"},
    "int8": {"precision": "f32", "base_precision": "int8"},
}
MOMENTS = "optimizer.adam.first_moments"


def train(folder: Path, mode: str, seed: int, args: Any, **options: Any) -> llamatrain.Run:
    """Train an adapter."""
    common = {
        "val": str(args.val),
        "batch": args.batch,
        "lr": args.lr,
        "threads": args.threads,
        "eval_every": 100,
    }
    out = folder / f"{mode}-{seed}-{'-'.join(map(str, options.values())).replace('/', '_')}"
    return llamatrain.finetune(args.base, args.data, seed=seed, out=out, **common, **MODES[mode], **options)


def compare_losses(folder: Path, args: argparse.Namespace) -> Path:
    """Print the last validation loss of each mode and seed; return the adapter of the first float32 run."""
    losses: dict[str, list[float]] = {}
    first: Path | None = None
    for seed in range(args.seeds):
        for mode in args.modes:
            run = train(folder, mode, seed, args, iters=args.steps)
            first = first or run.folder / "adapter.gguf"
            losses.setdefault(mode, []).append(run.validations[-1][1])
            quarters = run.validations[:: max(1, len(run.validations) // 4)]
            before = ", ".join(f"{loss:.5f} at {step}" for step, loss, *_ in quarters)
            print(f"{mode:5} seed {seed}: {losses[mode][-1]:.5f} ({before})", flush=True)
    spread = max(losses["f32"]) - min(losses["f32"])
    print(f"\nspread of f32 between seeds: {spread:.5f}")
    for mode, reached in losses.items():
        print(f"{mode:5} mean {mean(reached):.5f}, {mean(reached) - mean(losses['f32']):+.5f} to f32")
    assert first
    return first


def compare_gradients(folder: Path, adapter: Path, args: argparse.Namespace) -> None:
    """Print the cosine between the gradients of a step in float32 and in the other modes, by layer."""
    gradients = {
        mode: read_gradients(
            train(folder, mode, 0, args, iters=1, lora_init=adapter, save_every=1).folder
            / "checkpoint-1.gguf"
        )
        for mode in args.modes
    }
    layers = sorted({name.split(".")[1] for name in gradients["f32"]}, key=int)
    print(f"\ncosine with f32 {' '.join(f'{layer:>8}' for layer in layers)}")
    for mode in args.modes[1:]:
        cosines = [cosine(gradients["f32"], gradients[mode], f"blk.{layer}.") for layer in layers]
        print(f"{mode:15} {' '.join(f'{each:8.5f}' for each in cosines)}")


def read_gradients(checkpoint: Path) -> dict[str, np.ndarray]:
    """Return the gradients of a checkpoint's first step; AdamW's first moments are multiples of them."""
    tensors = open_gguf(checkpoint).tensors
    moments, gradients, start = tensors[MOMENTS].raw.view(np.float32).ravel(), {}, 0
    for name, tensor in tensors.items():
        if name.startswith("blk."):
            size = int(np.prod(tensor.shape))
            gradients[name] = moments[start : start + size].astype(np.float64)
            start += size
    return gradients


def cosine(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray], prefix: str) -> float:
    """Return the cosine between the gradients of all weights whose names have a prefix."""
    a, b = (
        np.concatenate([array for name, array in each.items() if name.startswith(prefix)])
        for each in (left, right)
    )
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `int8`."""
    command.add_argument("base", type=Path)
    command.add_argument("data", type=Path)
    command.add_argument("--val", type=Path, required=True)
    command.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES], help="f32 must be the first")
    command.add_argument("--steps", type=int, default=300)
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--batch", type=int, default=4)
    command.add_argument("--lr", type=float, default=5e-4)


def bench_int8(args: argparse.Namespace) -> int:
    """Print validation losses and gradient cosines of each mode."""
    print_header(args, None)
    print(f"\n{args.base}, {args.steps} steps of {args.batch} rows, rank 8\n")
    with tempfile.TemporaryDirectory() as name:
        compare_gradients(Path(name), compare_losses(Path(name), args), args)
    return 0
