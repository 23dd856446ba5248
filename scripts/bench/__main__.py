"""Times llamatrain on this machine.

    python scripts/bench.py kernels [NAME...]        kernels: checked against the reference, then timed
    python scripts/bench.py step [tiny S M]          whole training steps, in turns with torch
    python scripts/bench.py remat [none block ...]   time and memory of recomputation, 32 layers deep
    python scripts/bench.py memory [tiny S M]        peak resident memory of steps, in turns with torch
    python scripts/bench.py context [CTX ...]        FLOP/s of steps by context length, same tokens a step
    python scripts/bench.py finetune [TYPE ...]      the command on a quantized base, in turns with PEFT
    python scripts/bench.py experts [TYPE]           adapters of a mixture of experts, and of dense models
    python scripts/bench.py decode [TYPE]            texts generated together, and one after the other
    python scripts/bench.py rewards                  sums that a small model learns from rewards, by step
    python scripts/bench.py families [qwen3 ...]     FLOP/s of each architecture, in turns with a llama
    python scripts/bench.py quality TEXT             tokens that recipes need for the loss of tuned AdamW
    python scripts/bench.py minutes TEXT             what --minutes chooses, compared with a grid
    python scripts/bench.py tuning BASE DATA         losses of adapters by their settings
    python scripts/bench.py race TEXT                loss after a minute of training, here and in torch
    python scripts/bench.py rounding [TEXT]          perplexity with --quant-aware, and rounded after training
    python scripts/bench.py int8 BASE DATA --val V   adapters trained with int8, bf16 and f32 products
    python scripts/bench.py scale [S M lora]         steps on 1 to 4 ranks and on hosts with limited links
    python scripts/bench.py useful                   an epoch over chats, packed and not, in turns with PEFT
    python scripts/bench.py gpu [7b:1024x4 ...]      training on a GPU, in turns with torch and PEFT in 4 bits
    python scripts/bench.py modelled [CLASS ...]     what inner loops reach of the peak of modelled processors
    python scripts/bench.py products [2048x2048 ...] one product in each precision, forward and back
    python scripts/bench.py balance [S M ...]        how evenly a step can be divided among 2 to 64 threads
    python scripts/bench.py shares [S M ...]         what each op of a step reaches of this machine's peak
    python scripts/bench.py readme                   the table of README: new models and adapters

Times are medians with quartiles. Where torch is installed, both are timed in turns in one run. A ratio above
1 is in llamatrain's favor. `copy` is the share of the bandwidth of copying 256 MB with as many threads.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

if not __package__:  # `python scripts/bench` puts the folder itself on the path, and not its parent
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from bench import (
    architectures,
    arithmetic,
    balance,
    decoding,
    experts,
    finetune,
    gpu,
    int8_quality,
    memory,
    minutes,
    modelled,
    packing,
    products,
    quant_aware,
    race,
    readme_table,
    recipes,
    scaling,
    shares,
    steps,
    tuning,
)
from bench.kernels import bench_kernels
from bench.processes import MALLOC
from bench.random_models import SIZES
from bench.timer import choice_of
from llamatrain.distributed.cores import count_cores

# functions by command, with the seconds that each line takes by default
BENCHES: dict[str, tuple[Callable[[argparse.Namespace], int], float]] = {
    "kernels": (bench_kernels, 1.5),
    "step": (steps.bench_step, 10.0),
    "remat": (steps.bench_remat, 30.0),
    "memory": (memory.bench_memory, 0.0),
    "context": (steps.bench_context, 20.0),
    "finetune": (finetune.bench_finetune, 0.0),
    "quality": (recipes.bench_recipes, 0.0),
    "minutes": (minutes.bench_minutes, 0.0),
    "tuning": (tuning.bench_tuning, 0.0),
    "race": (race.bench_race, 0.0),
    "rounding": (quant_aware.bench_rounding, 0.0),
    "int8": (int8_quality.bench_int8, 0.0),
    "useful": (packing.bench_packing, 0.0),
    "experts": (experts.bench_experts, 0.0),
    "rewards": (arithmetic.bench_arithmetic, 0.0),
    "decode": (decoding.bench_decoding, 0.0),
    "families": (architectures.bench_architectures, 20.0),
    "scale": (scaling.bench_scaling, 0.0),
    "gpu": (gpu.bench_gpu, 0.0),
    "modelled": (modelled.bench_modelled, 0.0),
    "products": (products.bench_products, 20.0),
    "balance": (balance.bench_balance, 0.0),
    "shares": (shares.bench_shares, 0.0),
    "readme": (readme_table.print_table, 20.0),
}
WITHOUT_PRECISION = {
    "decode",
    "gpu",
    "int8",
    "kernels",
    "minutes",
    "quality",
    "race",
    "rewards",
    "rounding",
    "tuning",
}
ARGUMENTS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "remat": steps.add_remat_arguments,
    "context": steps.add_context_arguments,
    "finetune": finetune.add_arguments,
    "quality": recipes.add_arguments,
    "minutes": minutes.add_arguments,
    "tuning": tuning.add_arguments,
    "race": race.add_arguments,
    "rounding": quant_aware.add_arguments,
    "int8": int8_quality.add_arguments,
    "useful": packing.add_arguments,
    "experts": experts.add_arguments,
    "decode": decoding.add_arguments,
    "rewards": arithmetic.add_arguments,
    "families": architectures.add_arguments,
    "scale": scaling.add_arguments,
    "gpu": gpu.add_arguments,
    "modelled": modelled.add_arguments,
    "products": products.add_arguments,
    "balance": balance.add_arguments,
    "shares": shares.add_arguments,
    "readme": readme_table.add_arguments,
}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, (run, seconds) in BENCHES.items():
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        if name in ARGUMENTS:
            ARGUMENTS[name](command)
        else:
            kind = str if name == "kernels" else choice_of(SIZES)
            command.add_argument("names", nargs="*", type=kind, default=[], help="only these")
        command.add_argument("--threads", type=int, default=count_cores())
        command.add_argument("--seconds", type=float, default=seconds, help=f"for each line ({seconds:g})")
        command.add_argument("--kernels", choices=["cpu", "reference"], default="cpu")
        command.add_argument("--no-torch", dest="torch", action="store_false", help="leave torch out")
        if name not in WITHOUT_PRECISION:
            choices = ["f32", "bf16"] + ["int8"] * (name in ("finetune", "products", "experts"))
            command.add_argument("--precision", nargs="+", choices=choices, default=choices)
        if name == "step":
            command.add_argument("--profile", action="store_true", help="also show the most expensive ops")
        if name in ("step", "memory"):
            command.add_argument("--compile", action="store_true", help="also time torch.compile")
    return parser.parse_args()


def main() -> int:
    """Run a benchmark; the process starts anew if the settings of malloc are missing."""
    args = parse_arguments()
    if sys.platform == "linux" and not MALLOC.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
