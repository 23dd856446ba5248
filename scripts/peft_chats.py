"""An epoch of an adapter over a chat set by transformers and PEFT, on a base in GGUF: the peer that `bench.py useful` starts.

    python scripts/peft_chats.py BASE.gguf COUNT RATE CTX BATCH THREADS padding|packing

With `padding` each batch is as long as its longest chat, as the usual collator has it; with `packing` chats share rows of CTX,
best fit over all, and see only themselves. Prints one JSON object: seconds of the epoch without its first step, chats in that
time, the loss over all afterwards, and peak resident memory in bytes.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from chats import pairs
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BOS, EOS, FIRST, IGNORED = 0, 1, 2, -100  # tokens of the random model's vocabulary, and what is not trained
Chat = tuple[list[int], int]  # tokens, and how many of them are given
Row = list[Chat]


def chats_of(count: int) -> list[Chat]:
    made = []
    for prompt, answer in pairs(count):
        ask, tell = ([FIRST + letter for letter in text.encode()] for text in (prompt, answer))
        made.append(([BOS, *ask, *tell, EOS], 1 + len(ask)))
    return made


def rows_of(chats: list[Chat], ctx: int, packing: bool) -> list[Row]:
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


def batch_of(rows: list[Row]) -> dict[str, torch.Tensor]:
    length = max(sum(len(tokens) for tokens, _ in row) for row in rows)
    tokens = torch.full((len(rows), length), EOS)
    labels, positions = torch.full_like(tokens, IGNORED), torch.zeros_like(tokens)
    mask = torch.zeros_like(tokens)
    for number, row in enumerate(rows):
        at = 0
        for chat, given in row:
            end = at + len(chat)
            tokens[number, at:end] = torch.tensor(chat)
            labels[number, at + given : end] = tokens[number, at + given : end]
            positions[number, at:end] = torch.arange(len(chat))
            mask[number, at:end] = 1
            at = end
    made = {"input_ids": tokens, "labels": labels}
    if max(map(len, rows)) > 1:
        return made | {"position_ids": positions}
    return made | {"attention_mask": mask}


def loss_over(model: Any, chats: list[Chat]) -> float:
    total = count = 0.0
    with torch.no_grad():
        for chat in chats:
            made = batch_of([[chat]])
            logits, labels = model(input_ids=made["input_ids"]).logits[0, :-1].float(), made["labels"][0, 1:]
            total += cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum").item()
            count += (labels != IGNORED).sum().item()
    return total / count


def main(base: str, count: str, rate: str, ctx: str, batch: str, threads: str, how: str) -> None:
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    path = Path(base).resolve()
    plain = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    config = LoraConfig(r=8, lora_alpha=8, target_modules=LINEAR)
    model = get_peft_model(plain, config, autocast_adapter_dtype=False).train()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=float(rate), weight_decay=0.0)
    chats = chats_of(int(count))
    rows = rows_of(chats, int(ctx), how == "packing")
    order = torch.randperm(len(rows)).tolist()
    seconds, done = 0.0, 0
    for first in range(0, len(rows), int(batch)):
        start = time.perf_counter()
        here = [rows[number] for number in order[first : first + int(batch)]]
        model(**batch_of(here)).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if first:
            seconds += time.perf_counter() - start
            done += sum(map(len, here))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    loss = loss_over(model.eval(), chats[:200])
    print(json.dumps({"seconds": seconds, "chats": done, "loss": loss, "peak": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
