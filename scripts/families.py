"""Steps of models of other architectures beside a llama's, by the operations of their products."""

import argparse
from dataclasses import replace

from timing import header, in_turns, one_of

from llamatrain.graph.op_cost import estimate_cost
from llamatrain.model.architectures import DEFAULT, supported_names
from tests.helpers.llama_step import LlamaStep
from tests.helpers.random_models import M, S

SIZES = {"S": S, "M": M}


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("names", nargs="*", type=one_of(supported_names()), default=[], help="only these")
    command.add_argument("--size", choices=SIZES, default="M")


def flops_of(step: LlamaStep) -> float:
    return sum(estimate_cost(node).flops for program in step.programs for node in program.plan.nodes)


def bench_families(args: argparse.Namespace) -> int:
    """Each in turns with a llama of the same size."""
    header(args, None)
    print(
        f"\n{'architecture':12} {'precision':9} {'ms':>9} {'quartiles':>15} {'GFLOP/s':>9} {'llama':>9} {'x llama':>8}"
    )
    size = SIZES[args.size]
    for name in args.names or [each for each in supported_names() if each != DEFAULT]:
        for precision in args.precision:
            how = {"precision": precision, "threads": args.threads, "kept": True}
            steps = [LlamaStep(replace(size, arch=each), **how) for each in (name, DEFAULT)]
            ours, usual = in_turns(*steps, seconds=args.seconds)
            assert ours and usual
            (low, middle, high), other = ours.quartiles(), usual.quartiles()[1]
            rate, beside = (
                flops_of(step) / each / 1e6 for step, each in zip(steps, (middle, other), strict=True)
            )
            spread = f"{low:.4g}..{high:.4g}"
            print(
                f"{name:12} {precision:9} {middle:9.1f} {spread:>15} {rate:9.1f} {beside:9.1f} {rate / beside:8.3f}",
                flush=True,
            )
    return 0
