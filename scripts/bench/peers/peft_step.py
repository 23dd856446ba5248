"""Times steps of an adapter by transformers and PEFT on a base with random weights.

    python scripts/bench/peers/peft_step.py SHAPE CTX BATCH THREADS eager|compiled STEPS bf16|f32

`bench.py finetune` starts it. A step is forward, backward and AdamW. Prints one JSON object: the seconds of
each step, and the peak resident memory in bytes.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from bench.shapes import EXPERTS, FAMILIES, SHAPES

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DELTA_NET = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]


def choose_model(shape: str, ctx: int) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return the class and the configuration of a model."""
    embd, layers, heads, kv_heads, ff, vocab, _ = SHAPES[shape]
    sizes = {
        "vocab_size": vocab,
        "hidden_size": embd,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ff,
        "max_position_embeddings": ctx,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    if shape not in FAMILIES:
        return LlamaForCausalLM, LlamaConfig(**sizes, tie_word_embeddings=False)
    _, head_size, _, tied = FAMILIES[shape]
    if shape in EXPERTS:
        experts, used, expert_ff = EXPERTS[shape]
        mixture = {"num_experts": experts, "num_experts_per_tok": used, "moe_intermediate_size": expert_ff}
        own = {"head_dim": head_size, "norm_topk_prob": True, "tie_word_embeddings": tied}
        return Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes, **mixture, **own)
    heads_of_values = {"linear_num_value_heads": 16, "head_dim": head_size}
    return Qwen3_5ForCausalLM, Qwen3_5TextConfig(**sizes, **heads_of_values, tie_word_embeddings=tied)


def build_model(shape: str, ctx: int, precision: str) -> torch.nn.Module:
    """Return a model with random weights and an adapter on each linear layer."""
    kind, config = choose_model(shape, ctx)
    targets = LINEAR[:4] if shape in EXPERTS else LINEAR + DELTA_NET * (shape in FAMILIES)
    if precision == "bf16":
        torch.set_default_dtype(torch.bfloat16)  # so that the base never takes the memory of float32
    base = kind(config)
    torch.set_default_dtype(torch.float32)
    # adapters in bf16, too: in float32, PEFT's default, each of their products would first convert its input
    return get_peft_model(
        base, LoraConfig(r=8, lora_alpha=8, target_modules=targets), autocast_adapter_dtype=False
    ).train()


def main(shape: str, ctx: str, batch: str, threads: str, mode: str, steps: str, precision: str) -> None:
    """Run the steps and print the times."""
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    model = build_model(shape, int(ctx), precision)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    run = torch.compile(model, dynamic=False) if mode == "compiled" else model
    tokens = torch.randint(0, SHAPES[shape][5], (int(batch), int(ctx)))
    times = []
    for _ in range(2 + int(steps)):  # the first compiles, the second allocates the moments
        start = time.perf_counter()
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        print(f"{mode}: loss {loss.item():.4f}, {times[-1]:.2f} s", file=sys.stderr)
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    print(json.dumps({"seconds": times[2:], "peak": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
