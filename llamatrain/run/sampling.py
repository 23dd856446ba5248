"""Shows what the model has learned while it trains: a text, or the sine wave."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from llamatrain.data.shuffle import mix
from llamatrain.data.sine import BEGIN, PERIOD, Sine
from llamatrain.data.tokenizer import StreamDecoder, Tokenizer
from llamatrain.engine.device import Memory
from llamatrain.errors import UsageError
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.report.report import Report
from llamatrain.run.model import RunModel
from llamatrain.run.trainable import TrainableWeights
from llamatrain.sample.decoder import Decoder, Generation
from llamatrain.sample.options import SamplingOptions
from llamatrain.sample.text import stream_text

SAMPLE_TOKENS = 64  # tokens of a sample
Leaves = Mapping[str, Memory]  # of all weights, by name
PHASE = 1.0  # phase of the sine wave in the prompt


class Sampler(Protocol):
    """Shows samples of a model in training."""

    positions: int  # of the decoder's cache; 0: none

    def compile(self, weights: TrainableWeights, memory: Leaves) -> None:
        """Compile the programs that samples need."""

    def show(self, step: int, weights: TrainableWeights, memory: Leaves, report: Report) -> None:
        """Show a sample at a step."""

    def end(self, weights: TrainableWeights, memory: Leaves, report: Report) -> None:
        """Show a sample at the end of the run."""


class NoSampler:
    """Shows no samples."""

    positions = 0

    def compile(self, weights: TrainableWeights, memory: Leaves) -> None:
        """Do nothing."""

    def show(self, step: int, weights: TrainableWeights, memory: Leaves, report: Report) -> None:
        """Do nothing."""

    def end(self, weights: TrainableWeights, memory: Leaves, report: Report) -> None:
        """Do nothing."""


class TextSampler:
    """Continues a prompt; each sample is drawn by the seed and the step."""

    def __init__(
        self, h: Hyperparameters, tokenizer: Tokenizer, prompt: str, seed: int, threads: int, kernels: str
    ) -> None:
        first = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
        self.prompt = [*first, *map(int, tokenizer.encode(prompt, special=True))]
        if not self.prompt:
            raise UsageError(
                "the vocabulary has no begin token, so samples need a prompt; give one with --sample-prompt",
                code="no-prompt",
            )
        if len(self.prompt) >= h.ctx:
            raise UsageError(
                f"--sample-prompt must have fewer tokens than the context, {h.ctx} (got {len(self.prompt)})",
                code="prompt-too-long",
            )
        self.h, self.tokenizer, self.seed, self.threads, self.kernels = h, tokenizer, seed, threads, kernels
        self.positions = min(h.ctx, len(self.prompt) + SAMPLE_TOKENS)
        self.decoder: Decoder | None = None

    def compile(self, weights: TrainableWeights, memory: Leaves) -> None:
        """Compile the decoder."""
        self.get_decoder(weights, memory).precompile(len(self.prompt), 1)

    def get_decoder(self, leaves: TrainableWeights, memory: Leaves) -> Decoder:
        """Return the decoder, which shares its weights with training."""
        self.decoder = self.decoder or Decoder(
            self.h,
            memory,
            ctx=self.positions,
            threads=self.threads,
            kernels=self.kernels,
            weights=leaves.read_weights,
            drop_base=leaves.drop_base,
        )
        return self.decoder

    def show(self, step: int, weights: TrainableWeights, memory: Leaves, report: Report) -> None:
        """Print a sample."""
        options = SamplingOptions(n=SAMPLE_TOKENS, seed=mix(self.seed, step) >> 33)
        # the last stand for no text
        ends = {*self.tokenizer.ends.all, *range(len(self.tokenizer), self.h.vocab)}
        generation = Generation(self.get_decoder(weights, memory), self.prompt, options, ends)
        decoder = StreamDecoder(self.tokenizer)
        start = self.tokenizer.decode(self.prompt, special=False).decode("utf-8", "replace")
        report.print_sample(step, start + "".join(stream_text(generation, decoder)))

    def end(self, weights: TrainableWeights, memory: Leaves, report: Report) -> None:
        """Do nothing."""


class SineSampler:
    """Continues one period of the sine wave greedily."""

    def __init__(self, h: Hyperparameters, sine: Sine, threads: int, kernels: str) -> None:
        self.h, self.sine, self.threads, self.kernels = h, sine, threads, kernels
        self.prompt = [BEGIN, *map(int, sine.to_tokens(PHASE, PERIOD))]
        self.positions = len(self.prompt) + SAMPLE_TOKENS
        self.decoder: Decoder | None = None

    def compile(self, weights: TrainableWeights, memory: Leaves) -> None:
        """Compile the decoder."""
        self.get_decoder(weights, memory).precompile(len(self.prompt), 1)

    def get_decoder(self, leaves: TrainableWeights, memory: Leaves) -> Decoder:
        """Return the decoder, which shares its weights with training."""
        self.decoder = self.decoder or Decoder(
            self.h,
            memory,
            ctx=self.positions,
            threads=self.threads,
            kernels=self.kernels,
            weights=leaves.read_weights,
        )
        return self.decoder

    def compare(self, weights: TrainableWeights, memory: Leaves) -> tuple[np.ndarray, np.ndarray]:
        """Return the true heights after the prompt, and those of the model."""
        tokens = list(
            Generation(
                self.get_decoder(weights, memory), self.prompt, SamplingOptions(n=SAMPLE_TOKENS, temp=0.0)
            )
        )
        steps = PERIOD + np.arange(1, SAMPLE_TOKENS + 1)
        return np.sin(PHASE + 2 * np.pi / PERIOD * steps), self.sine.to_heights(np.array(tokens))

    def show(self, step: int, weights: TrainableWeights, memory: Leaves, report: Report) -> None:
        """Draw both waves."""
        target, model = self.compare(weights, memory)
        report.print_waves(target.tolist(), model.tolist())

    def end(self, weights: TrainableWeights, memory: Leaves, report: Report) -> None:
        """Draw both waves, and print their correlation."""
        target, model = self.compare(weights, memory)
        report.print_waves(target.tolist(), model.tolist())
        with np.errstate(invalid="ignore"):  # a model that stays on one level has no correlation
            correlation = float(np.nan_to_num(np.corrcoef(target, model)[0, 1]))
        report.log(
            f"correlation of {SAMPLE_TOKENS} greedily generated steps with the sine: {correlation:.3f}"
        )


def make_sampler(
    model: RunModel, sine: Sine | None, prompt: str | None, seed: int, threads: int, kernels: str
) -> Sampler:
    """Return the sampler for the sine wave, for a prompt, or for neither."""
    if sine:
        return SineSampler(model.h, sine, threads, kernels)
    if prompt is None or not model.tokenizer:
        return NoSampler()
    return TextSampler(model.h, model.tokenizer, prompt, seed, threads, kernels)
