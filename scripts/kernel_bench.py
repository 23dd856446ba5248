"""What `bench.py kernels` does: each kernel checked against its definition, then timed."""

import argparse
import sys
from typing import Any

import family_cases  # noqa: F401 - it registers
import numpy as np
import stream_cases  # noqa: F401 - it registers too
from kernel_cases import Case, cases
from timing import COPIED, copy_bandwidth, header, in_turns, time_once, torch_if_any

from llamatrain.engine.program import Program
from llamatrain.graph.tensor import BF16, Tensor, collect_nodes
from llamatrain.kernels import cpu
from llamatrain.kernels.reference.registry import from_bf16
from llamatrain.platform.memory import allocate


def bound(case: Case, kernels: str, workers: int) -> tuple[Program, list[Tensor]]:
    """The case over arrays of its own."""
    own = [output for output in case.outputs if output.node and output.index not in output.node.aliases]
    program = Program.build(
        case.outputs, {each: allocate(each.nbytes) for each in own}, kernels=kernels, threads=workers
    )
    for tensor, array in case.arrays.items():
        program.write(tensor, array)
    return program, list(case.outputs)


def largest_error(fast: Program, plain: Program, outputs: list[Tensor]) -> float:
    """Of all outputs, as a share of each one's largest element."""
    worst = 0.0
    for output in outputs:
        found, expected = (
            from_bf16(p.read(output)) if output.dtype is BF16 else p.read(output) for p in (fast, plain)
        )
        worst = max(
            worst, float(np.max(np.abs(found - expected)) / max(1e-30, float(np.max(np.abs(expected)))))
        )
    return worst


def torch_leaves(torch: Any, case: Case) -> list[Any]:
    full = (
        from_bf16(array) if tensor.dtype is BF16 else array.copy() for tensor, array in case.arrays.items()
    )
    return [torch.from_numpy(array) for array in full]


def met(floor: str, ratios: dict[str, float]) -> str:
    if not floor:
        return ""
    against, least = floor.split()
    if against not in ratios:
        return f"{floor}: ?"
    return f"{floor}: {'yes' if ratios[against] >= float(least) else 'NO'}"


def kernel_row(name: str, case: Case, copied: float, torch: Any, args: argparse.Namespace) -> bool:
    """Check, time and print one case; whether the check held."""
    fast, outputs = bound(case, args.kernels, args.threads)
    plain, _ = bound(case, "reference", 1)
    fast()
    plain()
    error = largest_error(fast, plain, outputs)
    right = error <= case.tolerance
    numpy_time = time_once(plain) * 1e3
    peer = case.peer(torch, torch_leaves(torch, case)) if torch and case.peer else None
    ours, theirs = in_turns(fast, peer, seconds=args.seconds)
    assert ours
    low, middle, high = ours.quartiles()
    rate = (case.flops or case.moved) / middle / 1e6
    ratios = {"copy": rate / copied} if case.moved else {}
    if theirs:
        ratios["torch"] = theirs.quartiles()[1] / middle
    shown = {kind: f"{ratios[kind]:.2f}" if kind in ratios else "-" for kind in ("copy", "torch")}
    print(
        f"{name:27.27} {case.shape:22.22} {middle:9.3f} {f'{low:.3g}..{high:.3g}':>15} {rate:8.1f} "
        f"{'GFLOP/s' if case.flops else 'GB/s':8}{numpy_time / middle:8.1f} {shown['copy']:>6} {shown['torch']:>6} "
        f"{fast.plan.arena / 1e6:9.1f} {error:8.1e}{' ' if right else '!'} {met(case.floor, ratios)}",
        flush=True,
    )
    return right


def bench_kernels(args: argparse.Namespace) -> int:
    torch, copied = torch_if_any(args.threads, args.torch), copy_bandwidth(args.threads)
    header(args, torch)
    print(f"copy of {COPIED >> 20} MB: {copied:.1f} GB/s (read and written)\n")
    print(
        f"{'kernel':27} {'shape':22} {'ms':>9} {'quartiles':>15} {'rate':>8} {'':8}{'x numpy':>8} {'copy':>6} "
        f"{'torch':>6} {'arena MB':>9} {'error':>8}  floor"
    )
    wrong, run = [], set[str]()
    for name, case in cases(args.names):
        run |= {node.op.name for node in collect_nodes(case.outputs)}
        if not kernel_row(name, case, copied, torch, args):
            wrong.append(name)
    if missing := sorted(cpu.BINDINGS.keys() - run) if not args.names else []:
        print(f"\ncompiled, but not timed here: {', '.join(missing)}")
    if wrong:
        print(f"wrong results: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0
