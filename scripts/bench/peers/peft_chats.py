"""Times an epoch of an adapter over chats by transformers and PEFT, on a base in GGUF.

    python scripts/bench/peers/peft_chats.py BASE.gguf COUNT RATE CTX BATCH THREADS padding|packing

`bench.py useful` starts it. With `padding` each batch is as long as its longest chat, as the usual collator
does it; with `packing` chats share rows of CTX tokens, best fit over all, and see only themselves. Prints one
JSON object: the seconds of the epoch without its first step, the chats in that time, the loss afterwards, and
the peak resident memory in bytes.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from bench.synthetic_chats import make_pairs

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BOS, EOS, FIRST, IGNORED = 0, 1, 2, -100  # tokens of the random model's vocabulary, and the label to ignore
Chat = tuple[list[int], int]  # tokens, and how many of them are the prompt
Row = list[Chat]


def make_chats(count: int) -> list[Chat]:
    """Return chats as tokens."""
    chats = []
    for pair in make_pairs(count):
        prompt = [FIRST + letter for letter in pair.prompt.encode()]
        answer = [FIRST + letter for letter in pair.answer.encode()]
        chats.append(([BOS, *prompt, *answer, EOS], 1 + len(prompt)))
    return chats


def make_rows(chats: list[Chat], ctx: int, packing: bool) -> list[Row]:
    """Return rows of one chat each, or with packing of as many chats as fit."""
    if not packing:
        return [[chat] for chat in chats]
    rows: list[Row] = []
    room: list[int] = []
    for chat in sorted(chats, key=lambda chat: -len(chat[0])):
        fits = [number for number, left in enumerate(room) if left >= len(chat[0])]
        number = min(fits, key=lambda number: room[number], default=len(rows))
        if number == len(rows):
            rows.append([])
            room.append(ctx)
        rows[number].append(chat)
        room[number] -= len(chat[0])
    return rows


def make_batch(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Return the model's inputs for some rows."""
    length = max(sum(len(tokens) for tokens, _ in row) for row in rows)
    tokens = torch.full((len(rows), length), EOS)
    labels = torch.full_like(tokens, IGNORED)
    positions = torch.zeros_like(tokens)
    mask = torch.zeros_like(tokens)
    for number, row in enumerate(rows):
        start = 0
        for chat, prompt_length in row:
            end = start + len(chat)
            tokens[number, start:end] = torch.tensor(chat)
            labels[number, start + prompt_length : end] = tokens[number, start + prompt_length : end]
            positions[number, start:end] = torch.arange(len(chat))
            mask[number, start:end] = 1
            start = end
    batch = {"input_ids": tokens, "labels": labels}
    if max(map(len, rows)) > 1:
        return batch | {"position_ids": positions}
    return batch | {"attention_mask": mask}


def evaluate(model: Any, chats: list[Chat]) -> float:
    """Return the mean loss of the answers."""
    total = count = 0.0
    with torch.no_grad():
        for chat in chats:
            batch = make_batch([[chat]])
            logits = model(input_ids=batch["input_ids"]).logits[0, :-1].float()
            labels = batch["labels"][0, 1:]
            total += cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum").item()
            count += (labels != IGNORED).sum().item()
    return total / count


def main(base: str, count: str, rate: str, ctx: str, batch: str, threads: str, mode: str) -> None:
    """Train an epoch and print the report."""
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    path = Path(base).resolve()
    plain = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    config = LoraConfig(r=8, lora_alpha=8, target_modules=LINEAR)
    model = get_peft_model(plain, config, autocast_adapter_dtype=False).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=float(rate), weight_decay=0.0)
    chats = make_chats(int(count))
    rows = make_rows(chats, int(ctx), mode == "packing")
    order = torch.randperm(len(rows)).tolist()
    seconds = 0.0
    timed_chats = 0
    for first in range(0, len(rows), int(batch)):
        start = time.perf_counter()
        batch_rows = [rows[number] for number in order[first : first + int(batch)]]
        model(**make_batch(batch_rows)).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if first:
            seconds += time.perf_counter() - start
            timed_chats += sum(map(len, batch_rows))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    loss = evaluate(model.eval(), chats[:200])
    print(json.dumps({"seconds": seconds, "chats": timed_chats, "loss": loss, "peak": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
