"""Compares settings of adapters on some data: `bench.py tuning`.

The learning rate is tuned first, with all other options at their defaults. Each other setting is then tried with
the best rate, and with a half and twice of it, since most of them change the size of a step.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import llamatrain
from bench.timer import print_header

RATES = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3)
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "rank 4": {"lora_r": 4},
    "rank 16": {"lora_r": 16},
    "rank 32": {"lora_r": 32},
    "alpha 2 r": {"lora_alpha": 16},
    "LoRA+ 4": {"lora_plus_ratio": 4},
    "LoRA+ 16": {"lora_plus_ratio": 16},
    "rsLoRA, rank 32": {"rslora": True, "lora_r": 32, "lora_alpha": 8},
    "dropout": {"lora_dropout": 0.05},
    "attention": {"target": ["attention"]},
    "beta 2": {"beta2": 0.95},
    "no decay": {"weight_decay": 0.0},
    "linear": {"schedule": "linear", "lr_min": 0.0},
}


def train(args: argparse.Namespace, rate: float, seed: int, **options: Any) -> float:
    """Train an adapter, and return its lowest validation loss."""
    with tempfile.TemporaryDirectory() as folder:
        run = llamatrain.finetune(
            args.base,
            args.data,
            val=[args.val],
            lr=rate,
            seed=seed,
            threads=args.threads,
            save_every=0,
            out=Path(folder) / "run",
            **{"iters": args.steps, "eval_every": args.steps, **options},
        )
        return min(loss for _, loss in run.validations)


def measure(args: argparse.Namespace, name: str, rate: float) -> float:
    """Print and return the mean loss of a setting over some seeds."""
    losses = [train(args, rate, seed, **SETTINGS[name]) for seed in range(args.seeds)]
    spread = f" ({min(losses):.4f} to {max(losses):.4f})" if len(losses) > 1 else ""
    print(f"{name:16} {rate:7g} {mean(losses):8.4f}{spread}", flush=True)
    return mean(losses)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `tuning`."""
    command.add_argument("base", type=Path)
    command.add_argument("data", type=Path)
    command.add_argument("--val", type=Path, required=True)
    command.add_argument("--steps", type=int, default=100)
    command.add_argument("--seeds", type=int, default=1)
    names = ", ".join(f"'{name}'" for name in SETTINGS)
    command.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS], metavar="NAME", help=names
    )


def bench_tuning(args: argparse.Namespace) -> int:
    """Print the losses of all rates, and of each setting at the best of them; return 0."""
    print_header(args, None)
    print(f"\n{args.base}, {args.data}, {args.steps} steps\n\n{'':16} {'rate':>7} {'loss':>8}")
    losses = {rate: measure(args, "defaults", rate) for rate in RATES}
    best = min(losses, key=lambda rate: losses[rate])
    for name in args.settings:
        for rate in (best / 2, best, 2 * best) if name != "defaults" else ():
            measure(args, name, rate)
    return 0
