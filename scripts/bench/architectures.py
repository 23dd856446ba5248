"""Times steps of each architecture in turns with a llama of the same size: `bench.py families`."""

import argparse
from dataclasses import replace
from typing import Any

from bench.llama_step import LlamaStep
from bench.random_models import M, S
from bench.timer import choice_of, print_header, time_in_turns
from llamatrain.graph.op_cost import estimate_cost
from llamatrain.model.architectures import DEFAULT, text_model_names

SIZES = {"S": S, "M": M}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `families`."""
    command.add_argument(
        "names", nargs="*", type=choice_of(text_model_names()), default=[], help="only these"
    )
    command.add_argument("--size", choices=SIZES, default="M")


def count_flops(step: LlamaStep) -> float:
    """Count the floating point operations of a step."""
    return sum(estimate_cost(node).flops for program in step.programs for node in program.plan.nodes)


def bench_architectures(args: argparse.Namespace) -> int:
    """Time each architecture in turns with a llama, and compare their FLOP/s."""
    print_header(args, None)
    columns = f"{'ms':>9} {'quartiles':>15} {'GFLOP/s':>9} {'llama':>9} {'x llama':>8}"
    print(f"\n{'architecture':12} {'precision':9} {columns}")
    size = SIZES[args.size]
    for name in args.names or [name for name in text_model_names() if name != DEFAULT]:
        for precision in args.precision:
            options: dict[str, Any] = {"precision": precision, "threads": args.threads, "two_programs": True}
            step = LlamaStep(replace(size, arch=name), **options)
            llama_step = LlamaStep(replace(size, arch=DEFAULT), **options)
            run, llama_run = time_in_turns(step, llama_step, seconds=args.seconds)
            assert run and llama_run
            low, middle, high = run.quartiles()
            rate = count_flops(step) / middle / 1e6
            llama_rate = count_flops(llama_step) / llama_run.quartiles()[1] / 1e6
            times = f"{middle:9.1f} {f'{low:.4g}..{high:.4g}':>15}"
            rates = f"{rate:9.1f} {llama_rate:9.1f} {rate / llama_rate:8.3f}"
            print(f"{name:12} {precision:9} {times} {rates}", flush=True)
    return 0
