"""The peak resident memory of whole training steps, in a process of its own: what `bench.py memory` starts.

    python scripts/peak.py ours|eager|compiled SIZE f32|bf16 REMAT THREADS

Prints one JSON object: the peak, and what was resident at stations on the way, in bytes.
"""

import json
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

STEPS = 3


def resident(field: str) -> int:
    """VmRSS: now; VmHWM: at most so far. (ru_maxrss knows the parent's memory, too.)"""
    try:
        found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        return int(found[1]) * 1024
    except (OSError, AssertionError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def ours(name: str, precision: str, remat: str, threads: int) -> tuple[dict[str, int], Callable[[], float]]:
    from tests.helpers import random_models
    from tests.helpers.llama_step import LlamaStep

    imported = resident("VmRSS")
    step = LlamaStep(
        getattr(random_models, name.upper()), precision=precision, threads=threads, remat=remat, kept=True
    )
    leaves = {
        leaf for each in step.programs for role in ("parameter", "state") for leaf in each.plan.leaves(role)
    }
    static = sum(leaf.nbytes for leaf in leaves if not leaf.name.endswith(".grad"))  # these lie in the arena
    return {"imported": imported, "bound": resident("VmRSS"), "static": static, "arena": step.arena}, step


def torchs(
    name: str, precision: str, compiled: bool, threads: int
) -> tuple[dict[str, int], Callable[[], float]]:
    import torch

    from tests.helpers import random_models
    from tests.helpers.torch_llama import TorchLlama, training_step

    imported, size = resident("VmRSS"), getattr(random_models, name.upper())
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tokens = torch.randint(0, size.vocab, (size.batch, size.ctx))
    targets = torch.randint(0, size.vocab, (size.batch * size.ctx,))
    step = training_step(
        TorchLlama(size), tokens, targets, bf16=precision == "bf16", compiled=compiled, clip=1.0
    )
    return {"imported": imported, "bound": resident("VmRSS")}, step


def main(who: str, name: str, precision: str, remat: str, threads: str) -> None:
    if who == "ours":
        stations, step = ours(name, precision, remat, int(threads))
    else:
        stations, step = torchs(name, precision, who == "compiled", int(threads))
    for _ in range(STEPS):
        step()
    print(json.dumps({"peak": resident("VmHWM"), "now": resident("VmRSS"), **stations}))


if __name__ == "__main__":
    main(*sys.argv[1:])
