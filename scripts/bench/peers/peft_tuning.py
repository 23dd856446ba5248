"""Trains an adapter with transformers and PEFT on rows of tokens, on a base in GGUF.

    python scripts/bench/peers/peft_tuning.py BASE.gguf ROWS.json RATE BATCH THREADS INIT NOISE

`bench.py tuning` starts it. ROWS.json has the rows of all steps in their order and those of the validation, each
with tokens, targets, weights, positions, and the first token that each may see. INIT is `lora`, `pissa` or
`olora`; NOISE is the alpha of NEFTune (Jain et al. 2023), 0 for none. Prints the loss of the validation rows.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from llamatrain.optim.schedule import Schedule

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 8
Row = dict[str, list[float]]


def batches(rows: list[Row], count: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield rows together, filled up to the length of the longest one."""
    for first in range(0, len(rows), count):
        group = rows[first : first + count]
        length = max(len(row["tokens"]) for row in group)
        whole = {
            name: torch.tensor([row[name] + [0] * (length - len(row["tokens"])) for row in group])
            for name in ("tokens", "targets", "weights", "positions")
        }
        starts = torch.tensor([row["starts"] + [*range(len(row["starts"]), length)] for row in group])
        index = torch.arange(length)
        seen = (index[None, None, :] >= starts[:, :, None]) & (index[None, None, :] <= index[None, :, None])
        yield {**whole, "mask": torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None]}


def losses(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the weighted loss of each token."""
    logits = model(
        input_ids=batch["tokens"], attention_mask=batch["mask"], position_ids=batch["positions"]
    ).logits
    each = cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    return each * batch["weights"].flatten()


def add_noise(model: Any, alpha: float) -> None:
    """Add uniform noise to the embeddings of tokens while the model is trained."""

    def disturb(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        scale = alpha / (output.shape[1] * output.shape[2]) ** 0.5
        return output + torch.empty_like(output).uniform_(-scale, scale) if module.training else output

    model.get_input_embeddings().register_forward_hook(disturb)


def evaluate(model: Any, rows: list[Row], count: int) -> float:
    """Return the mean loss of rows."""
    model.eval()
    with torch.no_grad():
        sums = [(losses(model, batch).sum(), batch["weights"].sum()) for batch in batches(rows, count)]
    model.train()
    return float(sum(loss for loss, _ in sums) / sum(weight for _, weight in sums))


def main(base: str, rows_file: str, rate: str, batch: str, threads: str, init: str, noise: str) -> None:
    """Train on the rows in their order, and print the loss of those for validation."""
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    rows = json.loads(Path(rows_file).read_text("utf-8"))
    path = Path(base).resolve()
    plain = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = LoraConfig(
        r=RANK,
        lora_alpha=RANK,
        target_modules=LINEAR,
        init_lora_weights=True if init == "lora" else init,
    )
    model = get_peft_model(plain, config).train()
    add_noise(model, float(noise))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    steps = len(rows["training"]) // int(batch)
    schedule = Schedule(
        peak=float(rate), minimum=float(rate) / 10, warmup=round(0.05 * steps), decay_steps=steps
    )
    for step, part in enumerate(batches(rows["training"], int(batch)), 1):
        optimizer.param_groups[0]["lr"] = schedule.rate(step)
        (losses(model, part).sum() / part["weights"].sum()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps({"loss": evaluate(model, rows["validation"], int(batch))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
