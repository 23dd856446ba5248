"""Times whole training steps of a small llama in plain torch on a GPU.

    python scripts/bench/peers/torch_gpu_step.py EMBD LAYERS HEADS KV_HEADS FF VOCAB CTX BATCH
        eager|compiled|graphs STEPS [--device cuda]

`bench.py gpu` starts it. Weights are in float32, products in bf16 by autocast, AdamW is fused; `graphs` is
torch.compile with CUDA graphs. Prints one JSON object: the seconds and the loss of each step, and the peak of
the device's memory in bytes.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from bench.random_models import Size
from bench.torch_llama import TorchLlama

SIZES = ("embd", "layers", "heads", "kv_heads", "ff", "vocab", "ctx", "batch")
WARM_UP = 4  # steps that are not counted: they compile, allocate the moments, and record CUDA graphs


def build_step(size: Size, mode: str, device: str) -> Callable[[], float]:
    """Return a step on random tokens; it returns the loss."""
    torch.set_float32_matmul_precision("high")
    with torch.device(device):
        model = TorchLlama(size)
        tokens = torch.randint(0, size.vocab, (size.batch, size.ctx))
        targets = torch.randint(0, size.vocab, (size.batch * size.ctx,))
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    gains = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    kind = "reduce-overhead" if mode == "graphs" else "default"
    compute_loss = model.loss if mode == "eager" else torch.compile(model.loss, mode=kind, dynamic=False)

    def step() -> float:
        if mode == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            loss = compute_loss(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return float(loss.item())

    return step


def main() -> None:
    """Run the steps and print what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in SIZES:
        parser.add_argument(name, type=int)
    parser.add_argument("mode", choices=["eager", "compiled", "graphs"])
    parser.add_argument("steps", type=int)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    sizes = {name: getattr(args, name) for name in SIZES}
    step = build_step(Size(width=sizes.pop("embd"), **sizes), args.mode, args.device)
    seconds: list[float] = []
    losses: list[float] = []
    for _ in range(WARM_UP + args.steps):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
        print(f"{args.mode}: loss {losses[-1]:.4f}, {seconds[-1]:.4f} s", file=sys.stderr)
    peaks = {"peak": 0, "reserved": 0}
    if args.device == "cuda":
        peaks = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    print(json.dumps({"seconds": seconds[WARM_UP:], "warm_up": seconds[:WARM_UP], "losses": losses, **peaks}))


if __name__ == "__main__":
    main()
