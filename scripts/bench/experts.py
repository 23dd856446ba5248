"""Times adapters of a mixture of experts, in turns with dense models: `bench.py experts`.

The dense models have the same blocks with a single feed-forward part: as wide as the experts that a token uses
together, or as wide as all experts.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median

from bench.finetune import (
    Contender,
    build_contender,
    build_peft_contender,
    choose_peer_precision,
    format_row,
    has_peft,
    precision_options,
    write_text,
)
from bench.processes import make_random_model
from bench.timer import print_header

ATTENTION = ["--target", "attention"]
SHAPES = ("3b-experts", "3b-active", "3b-total")
TITLES = {"3b-experts": "64 experts, 8 used", "3b-active": "dense, active size", "3b-total": "dense, all"}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `experts`."""
    command.add_argument("type", nargs="?", default="q4_k")
    command.add_argument("--ctx", type=int, default=512)
    command.add_argument("--batch", type=int, default=4)
    command.add_argument("--rounds", type=int, default=2)
    command.add_argument("--cache", nargs="+", default=["off"], choices=["off", "bf16"])
    command.add_argument("--peer", default="", help="a Python that has transformers and peft")


def build_contenders(args: argparse.Namespace, folder: Path) -> list[Contender]:
    """Return runs on each model, in each precision and with each kind of copies."""
    text = write_text(folder, args.ctx * args.batch)
    sizes: list[object] = ["--ctx", args.ctx, "--batch", args.batch, "--threads", args.threads, *ATTENTION]
    found = []
    for shape in SHAPES:
        base = folder / f"{shape}.gguf"
        make_random_model(base, "--shape", shape, "--type", args.type)
        for precision in args.precision:
            for cache in args.cache if precision == "bf16" else ["off"]:
                options = [*sizes, *precision_options(precision), "--cache-base", cache]
                name = f"{TITLES[shape]} {precision} {cache}"
                found.append(build_contender(name, base, text, folder, options))
    return found


def bench_experts(args: argparse.Namespace) -> int:
    """Time the command on a mixture of experts and on dense models, in turns."""
    print_header(args, None)
    with tempfile.TemporaryDirectory() as folder:
        found = build_contenders(args, Path(folder))
        if args.peer and has_peft(args.peer):
            precision = choose_peer_precision()
            found.append(build_peft_contender(args.peer, "3b-experts", "eager", args.threads, precision))
        for _ in range(args.rounds):
            for contender in found:
                contender.run_round()
    print(
        f"\n{args.type}, ctx {args.ctx}, batch {args.batch}, rank 8 on attention; x: times the speed of the first row"
    )
    print(
        f"\n{'run':34} {'tokens/s':>9} {'slowest..fastest':>17} {'peak MB':>9} {'planned MB':>11} plan/peak x"
    )
    first = median(found[0].seconds)
    for contender in found:
        print(format_row(contender, args.ctx * args.batch, first, width=34))
    return 0
