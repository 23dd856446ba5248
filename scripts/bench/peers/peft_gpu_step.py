"""Times steps of an adapter by transformers and PEFT on a GPU, on a base in 4 bits with random weights.

    python scripts/bench/peers/peft_gpu_step.py SHAPE CTX BATCH eager|blocks|compiled STEPS
        [--checkpointing] [--adapter f32|autocast|bf16] [--base nf4|bf16] [--device cuda]

`bench.py gpu` starts it. The base is that of QLoRA: NF4 by bitsandbytes, products in bf16, and embeddings,
norms and the head in bf16. It is made layer by layer on the device and never held in float32. A step is
forward, backward, clipping and AdamW; `blocks` compiles each transformer block, `compiled` the whole model.
Prints one JSON object: the seconds and the loss of each step, and the peak of the device's memory in bytes.
"""

import argparse
import json
import sys
import time
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bench.shapes import SHAPES

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WARM_UP = 3  # steps that are not counted: they compile, and allocate the moments


def random_weight(shape: torch.Size, device: str) -> torch.Tensor:
    """Return a matrix of small numbers in bf16, or a vector of ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(0.5 / shape[-1] ** 0.5)


def quantize_linear(layer: nn.Linear, device: str) -> nn.Module:
    """Return a layer in NF4 of the same shape, with random weights."""
    bitsandbytes = import_module("bitsandbytes")  # not needed for a base in bf16
    settings = {"compress_statistics": False, "quant_type": "nf4"}
    quantized = bitsandbytes.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=False,
        compute_dtype=torch.bfloat16,
        device=torch.device("meta"),
        **settings,
    )
    weight = random_weight(layer.weight.shape, device)
    quantized.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, **settings)
    return quantized.to(device)


def materialize(module: nn.Module, device: str) -> None:
    """Give random values to the parameters of a module that are on the meta device."""
    for child in module.modules():
        for name, weight in list(child.named_parameters(recurse=False)):
            if weight.is_meta:
                values = random_weight(weight.shape, device)
                setattr(child, name, nn.Parameter(values, requires_grad=False))


def build_base(shape: str, ctx: int, kind: str, device: str) -> LlamaForCausalLM:
    """Return a frozen llama with random weights on the device."""
    embd, layers, heads, kv_heads, ff, vocab, _ = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=embd,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ff,
        max_position_embeddings=ctx,
        use_cache=False,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    if kind == "nf4":
        for block in model.model.layers:
            for part in (block.self_attn, block.mlp):
                for name in [name for name, _ in part.named_children() if name in LINEAR]:
                    setattr(part, name, quantize_linear(getattr(part, name), device))
        model.is_loaded_in_4bit = True  # PEFT asks for it
    materialize(model, device)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)  # its table is no parameter
    return model


def build_model(args: argparse.Namespace) -> nn.Module:
    """Return the base with an adapter on each linear layer of its blocks, ready for training."""
    base = build_base(args.shape, args.ctx, args.base, args.device)
    if args.checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    adapter = LoraConfig(r=8, lora_alpha=8, target_modules=LINEAR)
    model = get_peft_model(base, adapter, autocast_adapter_dtype=args.adapter != "bf16").train()
    if args.mode == "blocks":
        for block in base.model.layers:
            block.compile(dynamic=False)
    elif args.mode == "compiled":
        model.compile(dynamic=False)
    return model


def run_steps(model: nn.Module, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Return the seconds and the loss of each step, those of the warm-up included."""
    cuda = args.device == "cuda"
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    rows = (args.batch, args.ctx)
    tokens = torch.randint(0, SHAPES[args.shape][5], rows, device=args.device)
    seconds: list[float] = []
    losses: list[float] = []
    for _ in range(WARM_UP + args.steps):
        start = time.perf_counter()
        with torch.autocast(args.device, torch.bfloat16, enabled=args.adapter == "autocast"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        print(f"{args.mode}: loss {losses[-1]:.4f}, {seconds[-1]:.3f} s", file=sys.stderr)
    return seconds, losses


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("ctx", type=int)
    parser.add_argument("batch", type=int)
    parser.add_argument("mode", choices=["eager", "blocks", "compiled"])
    parser.add_argument("steps", type=int)
    parser.add_argument("--checkpointing", action="store_true", help="recompute each block's activations")
    parser.add_argument(
        "--adapter",
        choices=["f32", "autocast", "bf16"],
        default="f32",
        help="f32: PEFT's default; autocast: with products in bf16; bf16: autocast_adapter_dtype=False",
    )
    parser.add_argument("--base", choices=["nf4", "bf16"], default="nf4")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def main() -> None:
    """Run the steps and print what was measured."""
    args = parse_arguments()
    torch.manual_seed(0)
    model = build_model(args)
    seconds, losses = run_steps(model, args)
    peaks = {"peak": 0, "reserved": 0}
    if args.device == "cuda":
        peaks = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    print(json.dumps({"seconds": seconds[WARM_UP:], "warm_up": seconds[:WARM_UP], "losses": losses, **peaks}))


if __name__ == "__main__":
    main()
