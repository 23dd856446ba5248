"""Times llamatrain on this machine.

    python scripts/bench.py kernels [NAME...]        each kernel: checked against the reference, then timed
    python scripts/bench.py step [tiny S M]          whole training steps, in alternation with torch's
    python scripts/bench.py remat [none block ...]   what recomputation costs and saves, 32 layers deep
    python scripts/bench.py memory [tiny S M]        peak resident memory of some steps, a process for each of ours and torch's
    python scripts/bench.py context [CTX ...]        FLOP/s of steps of as many tokens each, by length of the context
    python scripts/bench.py finetune [TYPE ...]      the command on a base of such a type, in turns with PEFT: speed and memory
    python scripts/bench.py families [qwen3 ...]     steps of each architecture in turns with a llama's, by their operations
    python scripts/bench.py quality [TEXT]           validation loss by tokens and time, AdamW's and Muon's: some ten minutes
    python scripts/bench.py scale [S M lora]         the same step on 1 to 4 ranks, on hosts with limited links, and as foretold
    python scripts/bench.py useful                   an epoch over chats as long as gsm8k's, packed and not, in turns with PEFT
    python scripts/bench.py readme                   README's table: new models in turns with torch, adapters with PEFT

Times are medians with quartiles. Where torch is installed, both are timed in turns in one run. A ratio above 1 is in
llamatrain's favour. `copy` is the share of the bandwidth of copying 256 MB with as many threads.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import families
import quality
import scale
import summary
import tuning
import useful
from kernel_bench import bench_kernels
from timing import Timed, header, in_turns, one_of, torch_if_any

from llamatrain.distributed.cores import count_cores
from llamatrain.engine.profiler import Recorder, record
from llamatrain.graph.remat_policy import POLICY_NAMES
from llamatrain.report.profile import total_by_op
from tests.helpers.llama_step import CLIP, LlamaStep
from tests.helpers.random_models import TINY, M, S, Size

SIZES = {"tiny": TINY, "S": S, "M": M}
DEEP = Size(vocab=32000, width=512, layers=32, heads=8, kv_heads=8, ff=1376, ctx=512, batch=4)
# torch allocates anew in each step: without these, what is timed is the system handing out pages
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(256 << 20)}


# ---- steps -----------------------------------------------------------------


def torch_step(torch: Any, size: Size, precision: str, compiled: bool) -> Callable[[], float]:
    from tests.helpers.torch_llama import TorchLlama, training_step

    torch.manual_seed(0)
    tokens = torch.randint(0, size.vocab, (size.batch, size.ctx))
    targets = torch.randint(0, size.vocab, (size.batch * size.ctx,))
    return training_step(
        TorchLlama(size), tokens, targets, bf16=precision == "bf16", compiled=compiled, clip=CLIP
    )


def step_figures(size: Size, ours: Timed, theirs: Timed | None) -> str:
    low, middle, high = ours.quartiles()
    line = f"{middle:9.3f} {f'{low:.3g}..{high:.3g}':>15} {size.batch * size.ctx / middle * 1e3:9.0f}"
    if not theirs:
        return f"{line} {'-':>9} {'-':>8}"
    other = theirs.quartiles()[1]
    return f"{line} {other:9.3f} {other / middle:8.2f}"


def bench_step(args: argparse.Namespace) -> int:
    torch = torch_if_any(args.threads, args.torch)
    header(args, torch)
    print(
        f"\n{'size':6} {'precision':9} {'ms':>9} {'quartiles':>15} {'tokens/s':>9} {'torch ms':>9} {'x torch':>8} {'arena MB':>9}"
    )
    for name in args.names or SIZES:
        size = SIZES[name]
        for precision in args.precision:
            how: dict[str, Any] = {
                "precision": precision,
                "kernels": args.kernels,
                "threads": args.threads,
                "kept": True,
            }
            step = LlamaStep(size, **how)
            peer = torch_step(torch, size, precision, args.compile) if torch else None
            ours, theirs = in_turns(step, peer, seconds=args.seconds)
            assert ours
            print(
                f"{name:6} {precision:9} {step_figures(size, ours, theirs)} {step.arena / 1e6:9.1f}",
                flush=True,
            )
            if args.profile:
                print_dearest(partial(LlamaStep, size, **how))
    return 0


def print_dearest(make: Callable[[], LlamaStep], most: int = 12, steps: int = 5) -> None:
    """The ops that take most of a step, each run by itself."""
    with record(recorder := Recorder()):
        step = make()
        step()
        recorder.discard_step()
        for number in range(steps):
            step()
            recorder.end_step(number, 0.0)
    for (op, part), each in list(total_by_op(recorder).items())[:most]:
        print(f"{'':16} {each.seconds / steps * 1e3:9.3f}  {op} ({part}) {each.rate}")


# ---- recomputation ---------------------------------------------------------


def bench_remat(args: argparse.Namespace) -> int:
    """Steps without and with recomputation, in turns."""
    header(args, None)
    size = DEEP if args.layers is None else replace(DEEP, layers=args.layers)
    print(
        f"\n{size}\n\n{'precision':9} {'remat':9} {'ms':>9} {'quartiles':>15} {'x time':>7} {'arena MB':>9} {'x arena':>8}"
    )
    for precision in args.precision:
        steps = [
            LlamaStep(size, precision=precision, threads=args.threads, remat=policy)
            for policy in args.policies
        ]
        timed = in_turns(*steps, seconds=args.seconds)
        arenas = [step.arena for step in steps]
        for policy, each, arena in zip(args.policies, timed, arenas, strict=True):
            assert each and timed[0]
            low, middle, high = each.quartiles()
            more, less = middle / timed[0].quartiles()[1], arena / arenas[0]
            spread = f"{low:.3g}..{high:.3g}"
            print(
                f"{precision:9} {policy:9} {middle:9.1f} {spread:>15} {more:7.2f} {arena / 1e6:9.1f} {less:8.3f}",
                flush=True,
            )
    return 0


# ---- memory ----------------------------------------------------------------


def peak_of(who: str, size: str, precision: str, remat: str, args: argparse.Namespace) -> dict[str, int]:
    """What a process of its own says, in bytes; nothing if it fails."""
    words = [
        sys.executable,
        str(Path(__file__).with_name("peak.py")),
        who,
        size,
        precision,
        remat,
        str(args.threads),
    ]
    plain = {name: value for name, value in os.environ.items() if name not in MALLOC}
    done = subprocess.run(words, env=plain, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{' '.join(words[2:])} failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}


def bench_memory(args: argparse.Namespace) -> int:
    """Kept gradients, clipping and AdamW. Of torch's modes, the one that takes least; `base`: resident once imported."""
    header(args, None)
    columns = (
        "size",
        "precision",
        "remat",
        "peak MB",
        "static MB",
        "arena MB",
        "base MB",
        "torch MB",
        "mode",
        "x torch",
    )
    print("\n" + "".join(f"{column:>10}" for column in columns))
    modes = ["eager", "compiled"] if args.compile else ["eager"]
    for name in args.names or ["S", "M"]:
        for precision in args.precision:
            found = {mode: peak_of(mode, name, precision, "none", args) for mode in modes if args.torch}
            peaks = {mode: each["peak"] for mode, each in found.items() if each}
            least = min(peaks, key=lambda mode: peaks[mode]) if peaks else ""
            for remat in ("none", "block"):
                if not (mine := peak_of("ours", name, precision, remat, args)):
                    return 1
                shown = "".join(f"{mine[key] / 1e6:10.1f}" for key in ("peak", "static", "arena", "imported"))
                theirs = (
                    f"{peaks[least] / 1e6:10.1f}{least:>10}{mine['peak'] / peaks[least]:10.3f}"
                    if least
                    else ""
                )
                print(f"{name:>10}{precision:>10}{remat:>10}{shown}{theirs}", flush=True)
    return 0


# ---- length of the context -------------------------------------------------

LONG = Size(vocab=32000, width=256, layers=4, heads=8, kv_heads=8, ff=768, ctx=64, batch=1)
TOKENS = 4096


def model_flops(size: Size) -> float:
    """Multiplications and additions of a step: each weight six times a token, and scores of half the context, twelve times."""
    head = size.width // size.heads
    block = size.width * (2 * size.width + 2 * size.kv_heads * head + 3 * size.ff)
    weights = size.layers * block + size.vocab * size.width
    return size.batch * size.ctx * (6.0 * weights + 6.0 * size.layers * size.width * size.ctx)


def bench_context(args: argparse.Namespace) -> int:
    header(args, None)
    print(
        f"\n{TOKENS} tokens a step\n\n{'precision':9} {'ctx':>6} {'ms':>9} {'quartiles':>15} {'GFLOP/s':>9} {'x first':>8}"
    )
    for precision in args.precision:
        sizes = [replace(LONG, ctx=ctx, batch=max(1, TOKENS // ctx)) for ctx in args.contexts]
        steps = [
            LlamaStep(size, precision=precision, kernels=args.kernels, threads=args.threads, kept=True)
            for size in sizes
        ]
        rates = []
        for size, timed in zip(sizes, in_turns(*steps, seconds=args.seconds), strict=True):
            assert timed
            low, middle, high = timed.quartiles()
            rates.append(model_flops(size) / middle / 1e6)
            spread, ratio = f"{low:.3g}..{high:.3g}", rates[-1] / rates[0]
            print(
                f"{precision:9} {size.ctx:6} {middle:9.3f} {spread:>15} {rates[-1]:9.1f} {ratio:8.2f}",
                flush=True,
            )
    return 0


# ---- adapters --------------------------------------------------------------


def bench_finetune(args: argparse.Namespace) -> int:
    """The command itself, in turns with PEFT's."""
    header(args, None)
    return tuning.bench(
        args.types, args.shape, args.precision, args.threads, args.rounds, args.peer if args.torch else None
    )


def bench_useful(args: argparse.Namespace) -> int:
    header(args, None)
    return useful.bench(
        args.shape,
        args.type,
        args.count,
        args.chats,
        args.threads,
        args.rounds,
        args.peer if args.torch else None,
    )


# ---- ranks -----------------------------------------------------------------


def bench_scale(args: argparse.Namespace) -> int:
    header(args, None)
    return scale.bench(args)


# ---- optimizers ------------------------------------------------------------


def bench_quality(args: argparse.Namespace) -> int:
    """How many of AdamW's tokens Muon needs; fails where it is more than is asked."""
    header(args, None)
    return quality.bench(args)


# ---- the table of README ---------------------------------------------------


def bench_readme(args: argparse.Namespace) -> int:
    return summary.bench(args, torch_if_any(args.threads, args.torch), torch_step, peak_of)


# ---- the command -----------------------------------------------------------


BENCHES: dict[str, tuple[Callable[[argparse.Namespace], int], float]] = {  # with seconds for each line
    "kernels": (bench_kernels, 1.5),
    "step": (bench_step, 10.0),
    "remat": (bench_remat, 30.0),
    "memory": (bench_memory, 0.0),
    "context": (bench_context, 20.0),
    "finetune": (bench_finetune, 0.0),
    "quality": (bench_quality, 0.0),
    "useful": (bench_useful, 0.0),
    "families": (families.bench_families, 20.0),
    "scale": (bench_scale, 0.0),
    "readme": (bench_readme, 20.0),
}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, (run, seconds) in BENCHES.items():
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        if name == "remat":
            command.add_argument(
                "policies", nargs="*", default=["none", "block"], help=f"of {', '.join(POLICY_NAMES)}"
            )
            command.add_argument("--layers", type=int)
        elif name == "finetune":
            command.add_argument("types", nargs="*", default=["q4_0"])
            command.add_argument("--shape", choices=tuning.ROWS, default="1.1b")
            command.add_argument("--rounds", type=int, default=2)
            command.add_argument(
                "--peer", default=sys.executable, help="a Python that has transformers and peft"
            )
        elif name == "quality":
            quality.arguments(command)
        elif name in (others := {"useful": useful, "scale": scale, "families": families, "readme": summary}):
            others[name].arguments(command)
        elif name == "context":
            command.add_argument("contexts", nargs="*", type=int, default=[64, 256, 1024, 2048])
        else:
            known = str if name == "kernels" else one_of(SIZES)
            command.add_argument("names", nargs="*", type=known, default=[], help="only these")
        command.add_argument("--threads", type=int, default=count_cores())
        command.add_argument("--seconds", type=float, default=seconds, help=f"for each line ({seconds:g})")
        command.add_argument("--kernels", choices=["cpu", "reference"], default="cpu")
        command.add_argument("--no-torch", dest="torch", action="store_false", help="leave torch out")
        if name not in ("kernels", "quality"):
            command.add_argument("--precision", nargs="+", choices=["f32", "bf16"], default=["f32", "bf16"])
        if name == "step":
            command.add_argument("--profile", action="store_true", help="and what takes most of it, by op")
        if name in ("step", "memory"):
            command.add_argument("--compile", action="store_true", help="torch.compile the peer, too")
    return parser.parse_args()


def main() -> int:
    args = parsed()
    if sys.platform == "linux" and not MALLOC.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
