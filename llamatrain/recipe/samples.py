"""What a run shows of its model while it learns: text that it writes, or the sine wave that it draws."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from llamatrain.data.shuffle import mix
from llamatrain.data.sine import BEGIN, PERIOD, Sine
from llamatrain.data.tokenizer import StreamDecoder, Tokenizer
from llamatrain.errors import UsageError
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.recipe.target import Task
from llamatrain.report.report import Report
from llamatrain.sample.decoder import Decoder, Generation
from llamatrain.sample.options import SamplingOptions
from llamatrain.sample.text import stream

TOKENS = 64  # that a model writes
PHASE = 1.0  # where the wave begins that it goes on with

Weights = Mapping[str, np.ndarray]


class Watch(Protocol):
    positions: int  # of the decoder's cache; 0: none

    def show(self, step: int, weights: Weights, report: Report) -> None: ...

    def end(self, weights: Weights, report: Report) -> None: ...


class Nothing:
    positions = 0

    def show(self, step: int, weights: Weights, report: Report) -> None: ...

    def end(self, weights: Weights, report: Report) -> None: ...


class Texts:
    """A text that goes on from a prompt, drawn anew each time by seed and step."""

    def __init__(self, task: Task, tokenizer: Tokenizer, prompt: str, seed: int, threads: int, kernels: str) -> None:
        first = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
        self.prompt = [*first, *map(int, tokenizer.encode(prompt, special=True))]
        if not self.prompt:
            raise UsageError("the vocabulary has no token that begins a text: give samples something with --sample-prompt")
        self.task, h = task, task.h
        if len(self.prompt) >= h.ctx:
            raise UsageError(f"--sample-prompt has {len(self.prompt)} tokens, the context {h.ctx}; a shorter one will do")
        self.h, self.tokenizer, self.seed, self.threads, self.kernels = h, tokenizer, seed, threads, kernels
        self.positions = min(h.ctx, len(self.prompt) + TOKENS)
        self.decoder: Decoder | None = None

    def show(self, step: int, weights: Weights, report: Report) -> None:
        if not self.decoder:
            self.decoder = Decoder(
                self.h, {**self.task.frozen, **weights}, ctx=self.positions, threads=self.threads, kernels=self.kernels,
                weights=self.task.weights, drop_base=self.task.drops,
            )  # fmt: skip
        options = SamplingOptions(n=TOKENS, seed=mix(self.seed, step) >> 33)
        ends = {self.tokenizer.eos, self.tokenizer.eot, *range(len(self.tokenizer), self.h.vocab)}  # the last stand for no text
        made = Generation(self.decoder, self.prompt, options, ends)
        words = StreamDecoder(self.tokenizer)
        start = self.tokenizer.decode(self.prompt, special=False).decode("utf-8", "replace")
        report.sample(step, start + "".join(stream(made, words)))

    def end(self, weights: Weights, report: Report) -> None: ...


class Waves:
    """The wave that goes on greedily from one period of it."""

    def __init__(self, h: Hyperparameters, sine: Sine, threads: int, kernels: str) -> None:
        self.h, self.sine, self.threads, self.kernels = h, sine, threads, kernels
        self.prompt = [BEGIN, *map(int, sine.tokens(PHASE, PERIOD))]
        self.positions = len(self.prompt) + TOKENS
        self.decoder: Decoder | None = None

    def made(self, weights: Weights) -> tuple[np.ndarray, np.ndarray]:
        """The true heights of the steps after the prompt, and the model's."""
        self.decoder = self.decoder or Decoder(self.h, weights, ctx=self.positions, threads=self.threads, kernels=self.kernels)
        tokens = list(Generation(self.decoder, self.prompt, SamplingOptions(n=TOKENS, temp=0.0)))
        places = PERIOD + np.arange(1, TOKENS + 1)
        return np.sin(PHASE + 2 * np.pi / PERIOD * places), self.sine.heights(np.array(tokens))

    def show(self, step: int, weights: Weights, report: Report) -> None:
        target, model = self.made(weights)
        report.wave(target.tolist(), model.tolist())

    def end(self, weights: Weights, report: Report) -> None:
        target, model = self.made(weights)
        report.wave(target.tolist(), model.tolist())
        with np.errstate(invalid="ignore"):  # a model that stays on one level has no correlation
            correlation = float(np.nan_to_num(np.corrcoef(target, model)[0, 1]))
        report.say(f"{TOKENS} steps generated greedily: their correlation with the sine is {correlation:.3f}")
