"""Compares settings of adapters on some data: `bench.py tuning`.

The learning rate is tuned first, with all other options at their defaults. Each other setting is then tried with
the best rate, and with a half and twice of it, since some of them change the size of a step. With `--peer`, PEFT
trains the same rows from several first values of the adapter and with noise, which llamatrain does not have.
"""

import argparse
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import llamatrain
from bench.processes import PEERS, run_program
from bench.timer import print_header

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "rank 4": {"lora_r": 4},
    "rank 16": {"lora_r": 16},
    "rank 32": {"lora_r": 32},
    "alpha 16": {"lora_alpha": 16},
    "LoRA+ 4": {"lora_plus_ratio": 4},
    "LoRA+ 16": {"lora_plus_ratio": 16},
    "rsLoRA, rank 32": {"rslora": True, "lora_r": 32},
    "dropout": {"lora_dropout": 0.05},
    "attention": {"target": ["attention"]},
    "beta 2": {"beta2": 0.95},
    "no decay": {"weight_decay": 0.0},
    "linear": {"schedule": "linear", "lr_min": 0.0},
}
PEER_SETTINGS = {  # how PEFT begins an adapter, and the noise of NEFTune
    "PEFT": ("lora", 0),
    "PEFT, PiSSA": ("pissa", 0),
    "PEFT, OLoRA": ("olora", 0),
    "PEFT, NEFTune 5": ("lora", 5),
}
PEER_RATES = (0.1, 0.5, 1)  # relative to the best
MOST_ROWS = 1_000_000  # for validation
BATCH = 4  # rows of a step
ROWS: Mapping[str, Any] = {"batch": BATCH, "pack": False}


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
            **{**ROWS, "ctx": args.ctx, "iters": args.steps, "eval_every": args.steps, **options},
        )
        return min(loss for _, loss in run.validations)


def measure(args: argparse.Namespace, name: str, rate: float) -> float:
    """Print and return the mean loss of a setting over some seeds."""
    losses = [train(args, rate, seed, **SETTINGS[name]) for seed in range(args.seeds)]
    spread = f" ({min(losses):.4f} to {max(losses):.4f})" if len(losses) > 1 else ""
    print(f"{name:16} {rate:7g} {mean(losses):8.4f}{spread}", flush=True)
    return mean(losses)


def write_rows(args: argparse.Namespace, file: Path) -> None:
    """Write the rows that a run reads, in their order, and those for validation."""
    count = BATCH * args.steps
    same: dict[str, Any] = {"model": args.base, "ctx": args.ctx, **ROWS}
    training = llamatrain.preview(args.data, n=count, **same)
    validation = llamatrain.preview(args.val, n=MOST_ROWS, shuffle=False, **same)
    rows = {
        "training": [*itertools.islice(itertools.cycle(map(dataclasses.asdict, training)), count)],
        "validation": [*map(dataclasses.asdict, validation)],
    }
    file.write_text(json.dumps(rows), "utf-8")


def compare_peer(args: argparse.Namespace, best: float) -> None:
    """Print the losses that PEFT reaches from the same rows at rates near the best."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        write_rows(args, rows)
        for (name, (first, noise)), factor in itertools.product(PEER_SETTINGS.items(), PEER_RATES):
            rate = factor * best
            words = [PEERS / "peft_tuning.py", args.base, rows, rate, BATCH, args.threads, first, noise]
            loss = json.loads(run_program([args.peer, *words]).splitlines()[-1])["loss"]
            print(f"{name:16} {rate:7g} {loss:8.4f}", flush=True)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `tuning`."""
    command.add_argument("base", type=Path)
    command.add_argument("data", type=Path)
    command.add_argument("--val", type=Path, required=True)
    command.add_argument("--steps", type=int, default=100)
    command.add_argument("--ctx", type=int, help="most tokens of a row")
    command.add_argument("--seeds", type=int, default=1)
    command.add_argument("--peer", help="a Python that has transformers and peft")
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
    if args.peer:
        compare_peer(args, best)
    return 0
