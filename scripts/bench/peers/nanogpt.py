"""Trains a new llama in torch by nanoGPT's recipe for some seconds, and stores its weights.

    python scripts/bench/peers/nanogpt.py TOKENS.npy OUT.npz SIZE SECONDS RATE THREADS

`bench.py race` starts it. SIZE is a JSON object with the fields of `Size`. The recipe: AdamW with betas 0.9 and 0.95,
weight decay 0.1 for matrices, clipping at 1, a warm-up of 5 %, a cosine that falls to a tenth, weights with deviation 0.02 and those
before a residual sum with less; compiled, with bf16 products where they are faster. The seconds are those of
training, without compilation. Prints one JSON object: the number of steps, and the last training loss.
"""

import json
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from bench.random_models import Size
from bench.torch_llama import TorchLlama

WARMUP, LEAST = 0.05, 0.1  # shares of the time, and of the rate
COMPILING_STEPS = 3


def init_weights(model: TorchLlama, layers: int) -> None:
    """Initialize the weights as nanoGPT does."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
            torch.nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)


def find_rate(share: float, peak: float) -> float:
    """Return the learning rate after a share of the time."""
    if share < WARMUP:
        return peak * share / WARMUP
    done = min(1.0, (share - WARMUP) / (1 - WARMUP))
    return peak * (LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    model: TorchLlama, tokens: np.ndarray, size: Size, seconds: float, peak: float
) -> tuple[int, float]:
    """Train for some seconds on random rows, and return the number of steps and the last loss."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)
    compute_loss, generator = torch.compile(model.loss), np.random.default_rng(0)

    def run_step(rate: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = generator.integers(0, len(tokens) - size.ctx - 1, size.batch)
        rows = torch.from_numpy(
            np.stack([tokens[start : start + size.ctx + 1] for start in starts]).astype(np.int64)
        )
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported()):
            loss = compute_loss(rows[:, :-1].contiguous(), rows[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    for _ in range(COMPILING_STEPS):
        run_step(0.0)
    steps, loss, start = 0, math.nan, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        loss = run_step(find_rate(spent / seconds, peak))
        steps += 1
    return steps, loss


def main(tokens: str, out: str, size: str, seconds: str, rate: str, threads: str) -> None:
    """Train, and store the weights by their GGUF names."""
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    sizes = Size(**json.loads(size))
    model = TorchLlama(sizes)
    init_weights(model, sizes.layers)
    steps, loss = train(model, np.load(tokens), sizes, float(seconds), float(rate))
    np.savez(out, **{name: value.detach().numpy() for name, value in model.named_parameters()})
    print(json.dumps({"steps": steps, "loss": loss}))


if __name__ == "__main__":
    main(*sys.argv[1:])
