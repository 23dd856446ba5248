"""Compares AdamW and Muon, each at the best of three learning rates: `bench.py quality`."""

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
from bench.timer import print_header

RATES = {"adamw": (0.003, 0.006, 0.012), "muon": (0.006, 0.012, 0.024)}
SHAPE: dict[str, Any] = {"vocab_size": "bytes", "embd": 64, "head": 4, "layer": 4, "ctx": 64, "batch": 16}
EVAL_EVERY = 20  # steps
MAX_SHARE = 0.7  # of AdamW's tokens that Muon may need


@dataclass(frozen=True)
class Curve:
    """The validations of a run: tokens and seconds until then, and the loss."""

    tokens: list[int]
    losses: list[float]
    seconds: list[float]

    def tokens_until(self, target: float) -> float:
        """Return the tokens until a loss is reached, interpolated linearly; infinite if it never is."""
        before: tuple[float, float] | None = None
        for tokens, loss in zip(self.tokens, self.losses, strict=True):
            if loss <= target:
                if before is None:
                    return tokens
                share = (before[1] - target) / (before[1] - loss)
                return before[0] + (tokens - before[0]) * share
            before = tokens, loss
        return float("inf")


def train(text: Path, optimizer: Any, rate: float, seed: int, args: Any) -> Curve:
    """Train a small model and return its validations; print the last one."""
    with tempfile.TemporaryDirectory() as folder:
        run = llamatrain.from_scratch(
            text,
            **SHAPE,
            optimizer=optimizer,
            lr=rate,
            seed=seed,
            iters=args.steps,
            val_split=0.02,
            eval_every=EVAL_EVERY,
            save_every=0,
            threads=args.threads,
            out=Path(folder) / "run",
        )
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    metrics = {line["step"]: line for line in lines if "loss" in line}
    steps = [step for step, _ in run.validations]
    curve = Curve(
        tokens=[metrics[step]["tokens"] for step in steps],
        losses=[loss for _, loss in run.validations],
        seconds=[metrics[step]["total_seconds"] for step in steps],
    )
    print(f"{optimizer:9} {rate:6g} {seed:4} {curve.losses[-1]:8.4f}", flush=True)
    return curve


def train_at_best_rate(text: Path, optimizer: str, args: Any) -> list[Curve]:
    """Return a run for each seed, at the rate that is best with the first seed."""
    curves = {rate: train(text, optimizer, rate, 0, args) for rate in RATES[optimizer]}
    best = min(curves, key=lambda rate: curves[rate].losses[-1])
    return [curves[best], *(train(text, optimizer, best, seed, args) for seed in range(1, args.seeds))]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `quality`."""
    command.add_argument("text", nargs="?", type=Path, help="default: a synthetic text")
    command.add_argument("--steps", type=int, default=400)
    command.add_argument("--seeds", type=int, default=3)


def bench_optimizers(args: argparse.Namespace) -> int:
    """Print the loss by tokens and time; return 1 if Muon needs too many of AdamW's tokens."""
    print_header(args, None)
    with tempfile.TemporaryDirectory() as folder:
        text = args.text or Path(folder) / "text.txt"
        if not args.text:
            text.write_text(make_play(random.Random(1), 1 << 20))
        print(f"\n{args.text or 'a synthetic text'}, {args.steps} steps")
        print(f"\n{'optimizer':9} {'rate':>6} {'seed':>4} {'loss':>8}")
        adamw = train_at_best_rate(text, "adamw", args)
        muon = train_at_best_rate(text, "muon", args)
    print(f"\n{'tokens':>9} {'AdamW':>8} {'s':>7} {'Muon':>8} {'s':>7}   medians of {len(adamw)} seeds")
    for index, tokens in enumerate(adamw[0].tokens):
        line = f"{tokens:9,}"
        for runs in (adamw, muon):
            loss = median(run.losses[index] for run in runs)
            line += f" {loss:8.4f} {median(run.seconds[index] for run in runs):7.1f}"
        print(line)
    shares = [
        after.tokens_until(before.losses[-1]) / before.tokens[-1]
        for before, after in zip(adamw, muon, strict=True)
    ]
    seeds = ", ".join(f"{share:.2f}" for share in shares)
    print(
        f"\nMuon reaches AdamW's last validation loss with {median(shares):.2f} of its tokens ({seeds}); "
        f"the limit is {MAX_SHARE}"
    )
    return int(median(shares) > MAX_SHARE)


# ---- a synthetic text ------------------------------------------------------

CONSONANTS = ("b", "br", "c", "d", "f", "g", "h", "l", "m", "n", "p", "r", "s", "st", "t", "th", "v", "w")
VOWELS = ("a", "e", "i", "o", "u", "ea", "ou")
# of sentences: determiner, noun, verb (s), adjective, preposition, adverb (r)
PATTERNS = ("dns", "dansdn", "dnsdan", "pdnsdn", "dnspdan", "dansr", "pdndns")


def make_play(rng: random.Random, size: int) -> str:
    """Return a text like a play.

    Speakers have their own words, verbs agree with their nouns, and few words are frequent.
    """
    nouns, verbs, adjectives, names = (make_words(rng, count) for count in (600, 300, 200, 20))
    vocabularies = {name: rng.sample(nouns, 60) for name in names}
    speeches = list[str]()
    length = 0
    while length < size:
        name = rng.choice(names)
        lines = [make_sentence(rng, vocabularies[name], verbs, adjectives) for _ in range(rng.randint(1, 4))]
        speeches.append(f"{name.upper()}:\n" + "\n".join(lines) + "\n\n")
        length += len(speeches[-1])
    return "".join(speeches)[:size]


def make_words(rng: random.Random, count: int) -> list[str]:
    """Return words of one to three syllables."""
    return [
        "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 3)))
        for _ in range(count)
    ]


def choose_word(rng: random.Random, words: Sequence[str]) -> str:
    """Return one of the words, the first far more often than the last."""
    return words[int(len(words) * rng.random() ** 3)]


def make_sentence(
    rng: random.Random, nouns: Sequence[str], verbs: Sequence[str], adjectives: Sequence[str]
) -> str:
    """Return a sentence of one of the patterns."""
    words = list[str]()
    plural = False
    for part in rng.choice(PATTERNS):
        if part == "d":
            plural = rng.random() < 0.4
            words.append("the" if rng.random() < 0.6 else "these" if plural else "a")
        elif part == "n":
            words.append(choose_word(rng, nouns) + "s" * plural)
        elif part == "s":
            words.append(choose_word(rng, verbs) + ("" if plural else "eth"))
        elif part == "a":
            words.append(choose_word(rng, adjectives))
        elif part == "p":
            words.append(rng.choice(("in", "by", "with", "upon")))
        else:
            words.append(rng.choice(("well", "now", "again")))
    return " ".join(words).capitalize() + rng.choice((".", ".", ",", "!", "?"))
