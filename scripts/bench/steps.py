"""Times whole training steps: in turns with torch, with recomputation, and by context length."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from bench.llama_step import CLIP, LlamaStep
from bench.random_models import SIZES, Size
from bench.timer import TimedRun, import_torch, print_header, time_in_turns
from llamatrain.engine.profiler import Recorder, record
from llamatrain.graph.remat_policy import POLICY_NAMES
from llamatrain.report.profile import total_by_op

DEEP = Size(vocab=32000, width=512, layers=32, heads=8, kv_heads=8, ff=1376, ctx=512, batch=4)
LONG = Size(vocab=32000, width=256, layers=4, heads=8, kv_heads=8, ff=768, ctx=64, batch=1)
TOKENS = 4096  # in a step of `context`


# ---- in turns with torch ---------------------------------------------------


def build_torch_step(torch: Any, size: Size, precision: str, compiled: bool) -> Callable[[], float]:
    """Return a training step of the same model in torch."""
    from bench.torch_llama import TorchLlama, training_step

    torch.manual_seed(0)
    tokens = torch.randint(0, size.vocab, (size.batch, size.ctx))
    targets = torch.randint(0, size.vocab, (size.batch * size.ctx,))
    return training_step(
        TorchLlama(size), tokens, targets, bf16=precision == "bf16", compiled=compiled, clip=CLIP
    )


def format_times(size: Size, ours: TimedRun, theirs: TimedRun | None) -> str:
    """Return the columns of times, speeds and the ratio to torch."""
    low, middle, high = ours.quartiles()
    line = f"{middle:9.3f} {f'{low:.3g}..{high:.3g}':>15} {size.batch * size.ctx / middle * 1e3:9.0f}"
    if not theirs:
        return f"{line} {'-':>9} {'-':>8}"
    other = theirs.quartiles()[1]
    return f"{line} {other:9.3f} {other / middle:8.2f}"


def bench_step(args: argparse.Namespace) -> int:
    """Time whole steps of a few sizes, in turns with torch."""
    torch = import_torch(args.threads, args.torch)
    print_header(args, torch)
    columns = f"{'ms':>9} {'quartiles':>15} {'tokens/s':>9} {'torch ms':>9} {'x torch':>8} {'arena MB':>9}"
    print(f"\n{'size':6} {'precision':9} {columns}")
    for name in args.names or SIZES:
        size = SIZES[name]
        for precision in args.precision:
            options: dict[str, Any] = {
                "precision": precision,
                "kernels": args.kernels,
                "threads": args.threads,
                "two_programs": True,
            }
            step = LlamaStep(size, **options)
            peer = build_torch_step(torch, size, precision, args.compile) if torch else None
            ours, theirs = time_in_turns(step, peer, seconds=args.seconds)
            assert ours
            times = format_times(size, ours, theirs)
            print(f"{name:6} {precision:9} {times} {step.arena / 1e6:9.1f}", flush=True)
            if args.profile:
                print_expensive_ops(partial(LlamaStep, size, **options))
    return 0


def print_expensive_ops(make_step: Callable[[], LlamaStep], limit: int = 12, steps: int = 5) -> None:
    """Print the ops that take most of a step, each run by itself."""
    with record(recorder := Recorder()):
        step = make_step()
        step()
        recorder.discard_step()
        for number in range(steps):
            step()
            recorder.end_step(number, 0.0)
    for (op, part), total in list(total_by_op(recorder).items())[:limit]:
        print(f"{'':16} {total.seconds / steps * 1e3:9.3f}  {op} ({part}) {total.rate}")


# ---- recomputation ---------------------------------------------------------


def add_remat_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `remat`."""
    policies = f"of {', '.join(POLICY_NAMES)}"
    command.add_argument("policies", nargs="*", default=["none", "block"], help=policies)
    command.add_argument("--layers", type=int)


def bench_remat(args: argparse.Namespace) -> int:
    """Time steps without and with recomputation, in turns."""
    print_header(args, None)
    size = DEEP if args.layers is None else replace(DEEP, layers=args.layers)
    columns = f"{'ms':>9} {'quartiles':>15} {'x time':>7} {'arena MB':>9} {'x arena':>8}"
    print(f"\n{size}\n\n{'precision':9} {'remat':9} {columns}")
    for precision in args.precision:
        steps = [
            LlamaStep(size, precision=precision, threads=args.threads, remat=policy)
            for policy in args.policies
        ]
        runs = time_in_turns(*steps, seconds=args.seconds)
        arenas = [step.arena for step in steps]
        for policy, run, arena in zip(args.policies, runs, arenas, strict=True):
            assert run and runs[0]
            low, middle, high = run.quartiles()
            time_ratio = middle / runs[0].quartiles()[1]
            arena_ratio = arena / arenas[0]
            times = f"{middle:9.1f} {f'{low:.3g}..{high:.3g}':>15} {time_ratio:7.2f}"
            print(f"{precision:9} {policy:9} {times} {arena / 1e6:9.1f} {arena_ratio:8.3f}", flush=True)
    return 0


# ---- context length --------------------------------------------------------


def count_model_flops(size: Size) -> float:
    """Count the operations of a step.

    Each weight takes six operations a token, and the scores of half the context twelve.
    """
    head = size.width // size.heads
    block = size.width * (2 * size.width + 2 * size.kv_heads * head + 3 * size.ff)
    weights = size.layers * block + size.vocab * size.width
    return size.batch * size.ctx * (6.0 * weights + 6.0 * size.layers * size.width * size.ctx)


def add_context_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `context`."""
    command.add_argument("contexts", nargs="*", type=int, default=[64, 256, 1024, 2048])


def bench_context(args: argparse.Namespace) -> int:
    """Time steps of the same number of tokens with rows of different lengths, in turns."""
    print_header(args, None)
    columns = f"{'ms':>9} {'quartiles':>15} {'GFLOP/s':>9} {'x first':>8}"
    print(f"\n{TOKENS} tokens a step\n\n{'precision':9} {'ctx':>6} {columns}")
    for precision in args.precision:
        sizes = [replace(LONG, ctx=ctx, batch=max(1, TOKENS // ctx)) for ctx in args.contexts]
        steps = [
            LlamaStep(
                size, precision=precision, kernels=args.kernels, threads=args.threads, two_programs=True
            )
            for size in sizes
        ]
        rates = []
        for size, run in zip(sizes, time_in_turns(*steps, seconds=args.seconds), strict=True):
            assert run
            low, middle, high = run.quartiles()
            rates.append(count_model_flops(size) / middle / 1e6)
            spread = f"{low:.3g}..{high:.3g}"
            rate = f"{rates[-1]:9.1f} {rates[-1] / rates[0]:8.2f}"
            print(f"{precision:9} {size.ctx:6} {middle:9.3f} {spread:>15} {rate}", flush=True)
    return 0
