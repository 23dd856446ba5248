"""Prints what each op of a step reaches, as a share of this machine's peak: `bench.py shares`.

The peak of products is the speed of one that is large but stays in the caches, by number type; of all other ops,
it is the bandwidth of a copy of 256 MB.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bench.llama_step import LlamaStep
from bench.random_models import M, S, Size
from bench.shapes import SHAPES
from bench.timer import choice_of, measure_copy_bandwidth, print_header, time_in_turns
from llamatrain.engine.profiler import OpTimer, Recorder, record
from llamatrain.engine.program import Program
from llamatrain.graph import ops as O
from llamatrain.graph.int8 import INT8_FORMS
from llamatrain.graph.tensor import BF16, F32, Node, placeholder, quantized
from llamatrain.kernels.reference.registry import to_bf16
from llamatrain.platform.cpu import has_int8_products

SIDE = 1024  # rows and columns of the product that shows the peak
STEPS = 5
LEAST_SHARE = 0.005  # ops that take less of a step are left out
EMBD, _, HEADS, KV_HEADS, FF, VOCAB, _ = SHAPES["1.1b"]
ADAPTER = Size(
    vocab=VOCAB,
    width=EMBD,
    layers=2,  # of 22 that are alike
    heads=HEADS,
    kv_heads=KV_HEADS,
    ff=FF,
    ctx=512,
    batch=1,
    lora=8,
    base=quantized("Q4_K"),
)
CASES = {
    "S": (S, False),
    "S, one of 8 micro-batches": (replace(S, batch=1), False),
    "M": (M, False),
    "adapter of 1.1b": (ADAPTER, False),
    "adapter of 1.1b, int8": (ADAPTER, True),
}


@dataclass
class Total:
    """Seconds, operations and bytes of all nodes of one op."""

    seconds: float = 0.0
    flops: int = 0
    moved: int = 0

    def add(self, op: OpTimer) -> None:
        """Add the calls of a node."""
        self.seconds += op.seconds
        self.flops += op.calls * op.cost.flops
        self.moved += op.calls * op.cost.bytes_moved


def number_type(node: Node) -> str:
    """Return the number type of a product: that of its coarsest source."""
    if node.op in INT8_FORMS.values():
        return "int8"
    return "bf16" if BF16 in [source.dtype for source in node.sources] else "f32"


def measure_peaks(threads: int) -> dict[str, float]:
    """Return the GFLOP/s of a product by number type, and the GB/s of copies."""
    peaks, random = {}, np.random.default_rng(0)
    values = random.standard_normal((SIDE, SIDE), np.float32)
    for kind in ("f32", "bf16", *["int8"] * has_int8_products()):
        dtype = BF16 if kind == "bf16" else F32
        x, w = placeholder("x", (SIDE, SIDE), dtype), placeholder("w", (SIDE, SIDE), dtype)
        made = (O.matmul_int8 if kind == "int8" else O.matmul)(x, w)
        array = to_bf16(values) if dtype is BF16 else values
        run = time_in_turns(Program.build([made], {x: array, w: array}, threads=threads), seconds=1.0)[0]
        assert run
        peaks[kind] = 2 * SIDE**3 / run.quartiles()[0] / 1e6
    return peaks | {"copy": measure_copy_bandwidth(threads)}


def profile_step(size: Size, int8: bool, precision: str, threads: int) -> dict[tuple[str, str], Total]:
    """Return what each op of a step takes, by name and by the kind of its peak."""
    with record(recorder := Recorder()):
        step = LlamaStep(size, precision=precision, threads=threads, int8=int8, two_programs=True)
        step()
        recorder.discard_step()
        for number in range(STEPS):
            step()
            recorder.end_step(number, 0.0)
    totals: dict[tuple[str, str], Total] = defaultdict(Total)
    for op in recorder.ops:
        if op.calls:
            totals[op.node.op.name, number_type(op.node) if op.cost.flops else "copy"].add(op)
    return totals


def format_shares(totals: dict[tuple[str, str], Total], peaks: dict[str, float]) -> Iterator[str]:
    """Yield a line for each op that takes much of a step, the slowest first, and one for the whole step."""
    whole = sum(total.seconds for total in totals.values())
    reached = 0.0
    for (op, kind), total in sorted(totals.items(), key=lambda entry: -entry[1].seconds):
        rate = (total.flops or total.moved) / total.seconds / 1e9
        reached += rate / peaks[kind] * total.seconds
        if total.seconds >= LEAST_SHARE * whole:
            unit, milliseconds = "GFLOP/s" if total.flops else "GB/s", total.seconds / STEPS * 1e3
            yield (
                f"  {op:28} {kind:5} {milliseconds:9.3f} {total.seconds / whole:6.1%} {rate:9.1f} {unit:8}"
                f"{rate / peaks[kind]:6.0%}"
            )
    yield f"  {'all':28} {'':5} {whole / STEPS * 1e3:9.3f} {'':6} {'':9} {'':8}{reached / whole:6.0%}"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `shares`."""
    command.add_argument("names", nargs="*", type=choice_of(CASES), default=[], help="only these")


def bench_shares(args: argparse.Namespace) -> int:
    """Print the shares of each case."""
    print_header(args, None)
    peaks = measure_peaks(args.threads)
    units = {kind: "GB/s" if kind == "copy" else "GFLOP/s" for kind in peaks}
    print("peaks: " + ", ".join(f"{kind} {peak:.0f} {units[kind]}" for kind, peak in peaks.items()))
    for name in args.names or CASES:
        size, int8 = CASES[name]
        for precision in ["f32"] if int8 else args.precision:
            print(f"\n{name}, {size.batch * size.ctx:,} tokens, {precision}")
            print(f"  {'op':34} {'ms':>9} {'of all':>6} {'speed':>9} {'':8}{'of peak'}")
            print(
                "\n".join(format_shares(profile_step(size, int8, precision, args.threads), peaks)), flush=True
            )
    return 0
