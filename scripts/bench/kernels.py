"""Checks each kernel against its reference implementation and times it: `bench.py kernels`."""

import argparse
import sys
from typing import Any

import numpy as np

from bench import family_cases, stream_cases  # noqa: F401 - they register their cases
from bench.kernel_cases import Case, build_cases
from bench.timer import (
    COPIED_BYTES,
    import_torch,
    measure_copy_bandwidth,
    print_header,
    time_in_turns,
    time_once,
)
from llamatrain.engine.program import Program
from llamatrain.graph.tensor import BF16, Tensor, collect_nodes
from llamatrain.kernels import cpu
from llamatrain.kernels.reference.registry import from_bf16
from llamatrain.platform.memory import allocate


def build_program(case: Case, kernels: str, threads: int) -> tuple[Program, list[Tensor]]:
    """Return a program of the case over arrays of its own, and its outputs."""
    own = [output for output in case.outputs if output.node and output.index not in output.node.aliases]
    memory = {tensor: allocate(tensor.nbytes) for tensor in own}
    program = Program.build(case.outputs, memory, kernels=kernels, threads=threads)
    for tensor, array in case.arrays.items():
        program.write(tensor, array)
    return program, list(case.outputs)


def largest_error(fast: Program, reference: Program, outputs: list[Tensor]) -> float:
    """Return the largest difference of all outputs, relative to the largest element of each."""
    largest = 0.0
    for output in outputs:
        actual = read_output(fast, output)
        expected = read_output(reference, output)
        scale = max(1e-30, float(np.max(np.abs(expected))))
        largest = max(largest, float(np.max(np.abs(actual - expected)) / scale))
    return largest


def read_output(program: Program, output: Tensor) -> np.ndarray:
    """Return an output in float32 or float64."""
    array = program.read(output)
    return from_bf16(array) if output.dtype is BF16 else array


def make_torch_leaves(torch: Any, case: Case) -> list[Any]:
    """Return the inputs of a case as torch tensors."""
    arrays = (
        from_bf16(array) if tensor.dtype is BF16 else array.copy() for tensor, array in case.arrays.items()
    )
    return [torch.from_numpy(array) for array in arrays]


def check_floor(floor: str, ratios: dict[str, float]) -> str:
    """Return whether a required ratio is reached, as text."""
    if not floor:
        return ""
    peer, minimum = floor.split()
    if peer not in ratios:
        return f"{floor}: ?"
    return f"{floor}: {'yes' if ratios[peer] >= float(minimum) else 'NO'}"


def bench_case(name: str, case: Case, bandwidth: float, torch: Any, args: argparse.Namespace) -> bool:
    """Check, time and print one case; return whether its results are right."""
    fast, outputs = build_program(case, args.kernels, args.threads)
    reference, _ = build_program(case, "reference", 1)
    fast()
    reference()
    error = largest_error(fast, reference, outputs)
    is_right = error <= case.tolerance
    numpy_time = time_once(reference) * 1e3
    peer = case.peer(torch, make_torch_leaves(torch, case)) if torch and case.peer else None
    ours, theirs = time_in_turns(fast, peer, seconds=args.seconds)
    assert ours
    low, middle, high = ours.quartiles()
    rate = (case.flops or case.bytes_moved) / middle / 1e6
    ratios = {"copy": rate / bandwidth} if case.bytes_moved else {}
    if theirs:
        ratios["torch"] = theirs.quartiles()[1] / middle
    cells = {kind: f"{ratios[kind]:.2f}" if kind in ratios else "-" for kind in ("copy", "torch")}
    print(
        f"{name:27.27} {case.shape:22.22} {middle:9.3f} {f'{low:.3g}..{high:.3g}':>15} {rate:8.1f} "
        f"{'GFLOP/s' if case.flops else 'GB/s':8}{numpy_time / middle:8.1f} {cells['copy']:>6} "
        f"{cells['torch']:>6} {fast.plan.arena / 1e6:9.1f} {error:8.1e}{' ' if is_right else '!'} "
        f"{check_floor(case.floor, ratios)}",
        flush=True,
    )
    return is_right


def bench_kernels(args: argparse.Namespace) -> int:
    """Check and time the cases whose names contain one of the given words."""
    torch = import_torch(args.threads, args.torch)
    bandwidth = measure_copy_bandwidth(args.threads)
    print_header(args, torch)
    print(f"copy of {COPIED_BYTES >> 20} MB: {bandwidth:.1f} GB/s (read and written)\n")
    print(
        f"{'kernel':27} {'shape':22} {'ms':>9} {'quartiles':>15} {'rate':>8} {'':8}{'x numpy':>8} {'copy':>6} "
        f"{'torch':>6} {'arena MB':>9} {'error':>8}  floor"
    )
    wrong = list[str]()
    timed_ops = set[str]()
    for name, case in build_cases(args.names):
        timed_ops |= {node.op.name for node in collect_nodes(case.outputs)}
        if not bench_case(name, case, bandwidth, torch, args):
            wrong.append(name)
    if missing := sorted(cpu.BINDINGS.keys() - timed_ops) if not args.names else []:
        print(f"\ncompiled, but not timed here: {', '.join(missing)}")
    if wrong:
        print(f"wrong results: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0
