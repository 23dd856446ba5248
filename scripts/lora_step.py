"""Steps of an adapter on a large base with random weights, in a process of its own: what `bench.py finetune` starts.

    python scripts/lora_step.py SIZE TYPE off|bf16 f32|bf16 REMAT THREADS [STEPS]

SIZE is 1.1B or 7B, TYPE what the base's file holds (Q4_0, Q4_K, ...). `off`: its weights are decoded where they are needed, and
their pages dropped; `bf16`: a copy of each is kept. A step is forward and backward; the adapters' update is a thousandth of it.
Prints one JSON object: seconds, model FLOP (forward and dx), peak resident memory, and what was planned, in bytes.
"""

import json
import mmap
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from peak import resident

from llamatrain.engine.program import Program, packed_copy
from llamatrain.graph.tensor import BF16, Quantised, Tensor, quantised
from llamatrain.optim.step import differentiate
from tests.llama_graph import Llama, Size, frozen_array, llama

SIZES = {
    "1.1B": Size(vocab=32000, width=2048, layers=22, heads=32, kv_heads=4, ff=5632, ctx=512, batch=1, lora=8),
    "7B": Size(vocab=32000, width=4096, layers=32, heads=32, kv_heads=32, ff=11008, ctx=256, batch=1, lora=8),
}


def flops(size: Size) -> float:
    """Of each weight four times a token (y and dx), and of attention."""
    block = size.width * (2 * size.width + 2 * size.kv_heads * size.width // size.heads + 3 * size.ff)
    weights = size.layers * block + size.vocab * size.width
    return size.batch * size.ctx * (4.0 * weights + 6.0 * size.layers * size.width * size.ctx)


def write(model: Llama, path: Path) -> None:
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for weight in model.frozen:
            file.write(frozen_array(weight, rng).data)


def read(model: Llama, path: Path) -> dict[str, np.ndarray]:
    """The weights as they lie in the file, by their names."""
    with path.open("rb") as file:
        whole = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    ends = np.cumsum([weight.nbytes for weight in model.frozen])
    parts = np.split(whole, ends[:-1])
    return {w.name: part.reshape(w.dtype.held(w.shape)) for w, part in zip(model.frozen, parts, strict=True)}


def held(weight: Tensor, raw: np.ndarray, kind: Quantised, threads: int) -> np.ndarray:
    return raw if weight.dtype is kind else packed_copy(raw, kind.kind, weight.shape, threads)


def main(name: str, kind: str, cache: str, precision: str, remat: str, threads: str, steps: str = "3") -> None:
    base, workers = quantised(kind), int(threads)
    size = replace(SIZES[name], base=base)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base"
        write(llama(size), path)
        raws = read(llama(size), path)
        model = llama(size if cache == "off" else replace(size, base=BF16))
        arrays = model.random(base=False)
        arrays |= {weight: held(weight, raws[weight.name], base, workers) for weight in model.frozen}
        policy = int(remat) if remat.isdecimal() else remat
        made = differentiate(model.loss, model.trained, precision=precision, borders=model.borders, remat=policy)
        program = Program.of([made.loss, *made.grads.values()], arrays, threads=workers, drop_base=True)
        program()
        times = []
        for _ in range(int(steps)):
            start = time.perf_counter()
            program()
            times.append(time.perf_counter() - start)
    print(json.dumps({
        "seconds": float(np.median(times)), "flops": flops(size), "tokens": size.batch * size.ctx,
        "peak": resident("VmHWM"), "planned": program.plan.total, "loss": float(program[made.loss]),
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
