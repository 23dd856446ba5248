"""Times one product with a weight in each precision, in turns: `bench.py products`.

A weight in int8 is rounded and packed before, as `--cache-base int8` does. LLAMATRAIN_WITHOUT leaves units out.
"""

import argparse

import numpy as np

from bench.timer import print_header, time_in_turns
from llamatrain.engine.program import Program
from llamatrain.graph import ops as O
from llamatrain.graph.tensor import BF16, F32, Tensor, placeholder, state
from llamatrain.kernels.cpu.int8_weight import pack_weight, packed_type
from llamatrain.kernels.reference.registry import to_bf16
from llamatrain.platform.cpu import has_int8_products
from llamatrain.platform.memory import allocate

SHAPES = ["2048x2048", "5632x2048"]
TOKENS = 512
RANDOM = np.random.default_rng(0)


def build_product(w: np.ndarray, precision: str, backward: bool, threads: int) -> Program:
    """Return a program of x wᵀ, or of dy w, for a weight in float32."""
    values: dict[Tensor, np.ndarray] = {}

    def leaf(tensor: Tensor, value: np.ndarray) -> Tensor:
        values[tensor] = value
        return tensor

    rows, columns = w.shape
    x = RANDOM.standard_normal((TOKENS, rows if backward else columns), np.float32)
    is_half = precision == "bf16"
    left = leaf(placeholder("x", x.shape, BF16 if is_half else F32), to_bf16(x) if is_half else x)
    if precision == "int8":
        packed = pack_weight(w, int(backward), threads)
        weight = leaf(state("w", w.shape, packed_type(w.shape, int(backward))), packed)
        y = (O.matmul_nn_int8 if backward else O.matmul_int8)(left, weight)
    else:
        weight = leaf(state("w", w.shape, BF16 if is_half else F32), to_bf16(w) if is_half else w)
        y = (O.matmul_nn if backward else O.matmul)(left, weight)
    program = Program.build([y], {y: allocate(y.nbytes)}, kernels="cpu", threads=threads)
    for tensor, value in values.items():
        program.write(tensor, value)
    return program


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the weights that are multiplied."""
    command.add_argument("shapes", nargs="*", metavar="ROWSxCOLUMNS", help=f"of weights; default: {SHAPES}")


def bench_products(args: argparse.Namespace) -> int:
    """Print the time of each product, forward and back, and how many times as fast as the first it is."""
    print_header(args, None)
    chosen = [each for each in args.precision if each != "int8" or has_int8_products()]
    print(f"\n{'weight':12} {'precision':10} {'forward ms':>11} {'back ms':>9} {f'x {chosen[0]}':>12}")
    for shape in args.shapes or SHAPES:
        w = RANDOM.standard_normal(tuple(map(int, shape.split("x"))), np.float32)
        programs = [build_product(w, each, back, args.threads) for each in chosen for back in (False, True)]
        timed = time_in_turns(*programs, seconds=args.seconds)
        medians = np.reshape([each.quartiles()[1] for each in timed if each], (-1, 2))
        for precision, (forward, back) in zip(chosen, medians, strict=True):
            ratios = medians[0] / (forward, back)
            print(
                f"{shape:12} {precision:10} {forward:11.2f} {back:9.2f} {ratios[0]:6.2f} {ratios[1]:5.2f}",
                flush=True,
            )
    return 0
