"""What `bench.py quality` runs: AdamW and Muon, each at the best of three rates, on a text from a seed, or one that is named."""

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import llamatrain

RATES = {"adamw": (0.003, 0.006, 0.012), "muon": (0.006, 0.012, 0.024)}
SHAPE: dict[str, Any] = {"vocab_size": "bytes", "embd": 64, "head": 4, "layer": 4, "ctx": 64, "batch": 16}
EVERY = 20  # steps between validations
ASKED = 0.7  # of AdamW's tokens


@dataclass(frozen=True)
class Course:
    """Of a run, at each validation."""

    tokens: list[int]
    losses: list[float]
    seconds: list[float]

    def until(self, loss: float) -> float:
        """The tokens that it took to come down to a loss, between two validations as if it fell in a line; infinite, if never."""
        before: tuple[float, float] | None = None
        for tokens, found in zip(self.tokens, self.losses, strict=True):
            if found <= loss:
                return (
                    tokens
                    if before is None
                    else before[0] + (tokens - before[0]) * (before[1] - loss) / (before[1] - found)
                )
            before = tokens, found
        return float("inf")


def trained(text: Path, optimizer: Any, rate: float, seed: int, args: Any) -> Course:
    with tempfile.TemporaryDirectory() as folder:
        run = llamatrain.from_scratch(
            text,
            **SHAPE,
            optimizer=optimizer,
            lr=rate,
            seed=seed,
            iters=args.steps,
            val_split=0.02,
            eval_every=EVERY,
            save_every=0,
            threads=args.threads,
            out=Path(folder) / "run",
        )
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "loss" in line}
    at = [step for step, _ in run.validations]
    seconds = [steps[step]["total_seconds"] for step in at]
    return Course([steps[step]["tokens"] for step in at], [loss for _, loss in run.validations], seconds)


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("text", nargs="?", type=Path, help="else one is made from a seed")
    command.add_argument("--steps", type=int, default=400)
    command.add_argument("--seeds", type=int, default=3)


def bench(args: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        text = args.text or Path(folder) / "text.txt"
        if not args.text:
            text.write_text(play(random.Random(1), 1 << 20))
        print(f"\n{args.text or 'a text from a seed'}, {args.steps} steps")
        print(f"\n{'optimizer':9} {'rate':>6} {'seed':>4} {'loss':>8}")
        found = {optimizer: best_of(text, optimizer, args) for optimizer in RATES}
    adamw, muon = found.values()
    print(f"\n{'tokens':>9} {'AdamW':>8} {'s':>7} {'Muon':>8} {'s':>7}   medians of {len(adamw)} seeds")
    for at in range(len(adamw[0].tokens)):
        figures = [
            (median(run.losses[at] for run in runs), median(run.seconds[at] for run in runs))
            for runs in (adamw, muon)
        ]
        print(
            f"{adamw[0].tokens[at]:9,}" + "".join(f" {loss:8.4f} {seconds:7.1f}" for loss, seconds in figures)
        )
    parts = [
        after.until(before.losses[-1]) / before.tokens[-1] for before, after in zip(adamw, muon, strict=True)
    ]
    told = ", ".join(f"{part:.2f}" for part in parts)
    print(
        f"\nof AdamW's tokens Muon needs {median(parts):.2f} for its last validation loss ({told}); asked is at most {ASKED}"
    )
    return int(median(parts) > ASKED)


def best_of(text: Path, optimizer: str, args: Any) -> list[Course]:
    """Its runs at the rate that is best with the first seed, one for each seed."""
    courses = {rate: told(text, optimizer, rate, 0, args) for rate in RATES[optimizer]}
    rate = min(courses, key=lambda rate: courses[rate].losses[-1])
    return [courses[rate], *(told(text, optimizer, rate, seed, args) for seed in range(1, args.seeds))]


def told(text: Path, optimizer: str, rate: float, seed: int, args: Any) -> Course:
    course = trained(text, optimizer, rate, seed, args)
    print(f"{optimizer:9} {rate:6g} {seed:4} {course.losses[-1]:8.4f}", flush=True)
    return course


# ---- a text ----------------------------------------------------------------

PARTS = (
    ("b", "br", "c", "d", "f", "g", "h", "l", "m", "n", "p", "r", "s", "st", "t", "th", "v", "w"),
    ("a", "e", "i", "o", "u", "ea", "ou"),
)
PATTERNS = ("dns", "dansdn", "dnsdan", "pdnsdn", "dnspdan", "dansr", "pdndns")


def play(chance: random.Random, size: int) -> str:
    """Like a play: speakers with words of their own, verbs that agree with their nouns, few words often and many rarely."""
    nouns, verbs, adjectives, names = (words_of(chance, count) for count in (600, 300, 200, 20))
    own = {name: chance.sample(nouns, 60) for name in names}
    made, length = list[str](), 0
    while length < size:
        name = chance.choice(names)
        lines = [sentence(chance, own[name], verbs, adjectives) for _ in range(chance.randint(1, 4))]
        made.append(f"{name.upper()}:\n" + "\n".join(lines) + "\n\n")
        length += len(made[-1])
    return "".join(made)[:size]


def words_of(chance: random.Random, count: int) -> list[str]:
    first, second = PARTS
    return [
        "".join(chance.choice(first) + chance.choice(second) for _ in range(chance.randint(1, 3)))
        for _ in range(count)
    ]


def often(chance: random.Random, words: Sequence[str]) -> str:
    """The first of them far more often than the last."""
    return words[int(len(words) * chance.random() ** 3)]


def sentence(
    chance: random.Random, nouns: Sequence[str], verbs: Sequence[str], adjectives: Sequence[str]
) -> str:
    made, many = list[str](), False
    for part in chance.choice(PATTERNS):
        if part == "d":
            many = chance.random() < 0.4
            made.append("the" if chance.random() < 0.6 else "these" if many else "a")
        elif part == "n":
            made.append(often(chance, nouns) + "s" * many)
        elif part == "s":
            made.append(often(chance, verbs) + ("" if many else "eth"))
        elif part == "a":
            made.append(often(chance, adjectives))
        else:
            made.append(
                chance.choice(("in", "by", "with", "upon") if part == "p" else ("well", "now", "again"))
            )
    return " ".join(made).capitalize() + chance.choice((".", ".", ",", "!", "?"))
