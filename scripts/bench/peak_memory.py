"""Reports the peak resident memory of whole training steps; `bench.py memory` starts it as a process.

    python -m bench.peak_memory ours|eager|compiled SIZE f32|bf16 REMAT THREADS      (in the folder scripts)

Prints one JSON object with bytes: the peak, and what was resident after imports, after building, and at the
end.
"""

import json
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

STEPS = 3


def resident(field: str) -> int:
    """Return VmRSS (now) or VmHWM (the peak). ru_maxrss would count the parent's memory, too."""
    try:
        match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        match = None
    return int(match[1]) * 1024 if match else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build_step(
    name: str, precision: str, remat: str, threads: int
) -> tuple[dict[str, int], Callable[[], float]]:
    """Return a step of ours, and what it takes before it runs."""
    from bench.llama_step import LlamaStep
    from bench.random_models import SIZES

    imported = resident("VmRSS")
    step = LlamaStep(SIZES[name], precision=precision, threads=threads, remat=remat, two_programs=True)
    leaves = {
        leaf
        for program in step.programs
        for role in ("parameter", "state")
        for leaf in program.plan.leaves(role)
    }
    static = sum(leaf.nbytes for leaf in leaves if not leaf.name.endswith(".grad"))  # those are in the arena
    return {"imported": imported, "bound": resident("VmRSS"), "static": static, "arena": step.arena}, step


def build_torch_step(
    name: str, precision: str, compiled: bool, threads: int
) -> tuple[dict[str, int], Callable[[], float]]:
    """Return a step of torch, and what is resident before it runs."""
    import torch

    from bench.random_models import SIZES
    from bench.torch_llama import TorchLlama, training_step

    imported = resident("VmRSS")
    size = SIZES[name]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tokens = torch.randint(0, size.vocab, (size.batch, size.ctx))
    targets = torch.randint(0, size.vocab, (size.batch * size.ctx,))
    step = training_step(
        TorchLlama(size), tokens, targets, bf16=precision == "bf16", compiled=compiled, clip=1.0
    )
    return {"imported": imported, "bound": resident("VmRSS")}, step


def main(program: str, name: str, precision: str, remat: str, threads: str) -> None:
    """Run some steps and print the report."""
    if program == "ours":
        report, step = build_step(name, precision, remat, int(threads))
    else:
        report, step = build_torch_step(name, precision, program == "compiled", int(threads))
    for _ in range(STEPS):
        step()
    print(json.dumps({"peak": resident("VmHWM"), "now": resident("VmRSS"), **report}))


if __name__ == "__main__":
    main(*sys.argv[1:])
