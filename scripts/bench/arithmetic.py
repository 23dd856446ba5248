"""Trains a small model on sums with wrong answers, and improves it by rewards: `bench.py rewards`."""

import argparse
import json
import random
import tempfile
from pathlib import Path

import llamatrain

RIGHT = 0.15  # share of the sums that are certainly right; others are drawn
REWARD = """
def reward(prompt, answer, row):
    return float(answer == str(row["sum"]))
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `rewards`."""
    command.add_argument("--digits", type=int, default=10, help="numbers that are added, from 0")
    command.add_argument("--base-iters", type=int, default=1200)
    command.add_argument("--iters", type=int, default=100)


def write_sums(folder: Path, digits: int) -> None:
    """Write sums with answers of which most are wrong, the prompts without answers, and the reward."""
    draw = random.Random(0)
    pairs = [(a, b) for a in range(digits) for b in range(digits)]
    with (folder / "noisy.jsonl").open("w") as file:
        for a, b in draw.choices(pairs, k=400 * len(pairs)):
            answer = a + b if draw.random() < RIGHT else draw.randrange(2 * digits - 1)
            file.write(json.dumps({"prompt": f"{a}+{b}=", "completion": str(answer)}) + "\n")
    with (folder / "prompts.jsonl").open("w") as file:
        for a, b in pairs:
            file.write(json.dumps({"prompt": f"{a}+{b}=", "sum": a + b}) + "\n")
    (folder / "reward.py").write_text(REWARD)


def improve_sums(folder: Path, digits: int, base_iters: int, iters: int) -> list[float]:
    """Train a model on noisy sums, then by rewards; return the mean reward of the sampled answers of each step."""
    write_sums(folder, digits)
    base = llamatrain.from_scratch(
        folder / "noisy.jsonl",
        out=folder / "base",
        vocab_size="bytes",
        embd=64,
        head=4,
        layer=2,
        ff=128,
        ctx=32,
        pack=False,
        batch=64,
        lr=3e-3,
        iters=base_iters,
    )
    tuned = llamatrain.finetune(
        base.result,
        folder / "prompts.jsonl",
        objective="grpo",
        reward=(str(folder / "reward.py"),),
        out=folder / "tuned",
        full=True,
        batch=128,
        num_generations=8,
        max_completion_length=4,
        lr=1e-3,
        schedule="constant",
        warmup=0,
        iters=iters,
    )
    return [reward for _, reward in tuned.rewards]


def bench_arithmetic(args: argparse.Namespace) -> int:
    """Print the mean reward of each step in tens of steps."""
    with tempfile.TemporaryDirectory() as folder:
        rewards = improve_sums(Path(folder), args.digits, args.base_iters, args.iters)
    print("steps      mean reward")
    for first in range(0, len(rewards), 10):
        part = rewards[first : first + 10]
        print(f"{first + 1:>3} to {first + len(part):>3}  {sum(part) / len(part):.3f}")
    return 0
