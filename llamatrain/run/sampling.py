"""Shows what the model has learned while it trains: a text, or the sine wave."""

from collections.abc import Mapping, Sequence
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
from llamatrain.sample.batch import BatchDecoder, Request, complete
from llamatrain.sample.decoder import Decoder, Generation
from llamatrain.sample.options import SamplingOptions
from llamatrain.sample.text import stream_text

SAMPLE_TOKENS = 64  # tokens of a sample
MOST_SLOTS = 16  # samples that are generated together
Leaves = Mapping[str, Memory]  # of all weights, by name
PHASE = 1.0  # phase of the sine wave in the prompt


class Sampler(Protocol):
    """Shows samples of a model in training."""

    positions: int  # of the decoder's cache; 0: none
    slots: int  # texts that are decoded together

    def compile(self, weights: TrainableWeights, memory: Leaves) -> None:
        """Compile the programs that samples need."""

    def show(self, step: int, weights: TrainableWeights, memory: Leaves, report: Report) -> None:
        """Show a sample at a step."""

    def end(self, weights: TrainableWeights, memory: Leaves, report: Report) -> None:
        """Show a sample at the end of the run."""


class NoSampler:
    """Shows no samples."""

    positions = 0
    slots = 1

    def compile(self, weights: TrainableWeights, memory: Leaves) -> None:
        """Do nothing."""

    def show(self, step: int, weights: TrainableWeights, memory: Leaves, report: Report) -> None:
        """Do nothing."""

    def end(self, weights: TrainableWeights, memory: Leaves, report: Report) -> None:
        """Do nothing."""


class TextSampler:
    """Continues a prompt; each sample is drawn by the seed and the step."""

    slots = 1

    def __init__(
        self, h: Hyperparameters, tokenizer: Tokenizer, prompt: str, seed: int, threads: int, kernels: str
    ) -> None:
        self.prompt = encode_sample_prompt(h, tokenizer, prompt)
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
        ends = tokens_without_text(self.h, self.tokenizer)
        generation = Generation(self.get_decoder(weights, memory), self.prompt, options, ends)
        decoder = StreamDecoder(self.tokenizer)
        start = self.tokenizer.decode(self.prompt, special=False).decode("utf-8", "replace")
        report.print_sample(step, start + "".join(stream_text(generation, decoder)))

    def end(self, weights: TrainableWeights, memory: Leaves, report: Report) -> None:
        """Do nothing."""


class TextsSampler:
    """Continues several prompts together; all samples of a step have the same seed."""

    def __init__(
        self,
        h: Hyperparameters,
        tokenizer: Tokenizer,
        prompts: Sequence[str],
        seed: int,
        threads: int,
        kernels: str,
    ) -> None:
        self.prompts = [encode_sample_prompt(h, tokenizer, prompt) for prompt in prompts]
        self.h, self.tokenizer, self.seed, self.threads, self.kernels = h, tokenizer, seed, threads, kernels
        self.positions = min(h.ctx, max(map(len, self.prompts)) + SAMPLE_TOKENS)
        self.slots = min(len(prompts), MOST_SLOTS)
        self.decoder: BatchDecoder | None = None

    def compile(self, weights: TrainableWeights, memory: Leaves) -> None:
        """Compile the decoder."""
        self.get_decoder(weights, memory)

    def get_decoder(self, leaves: TrainableWeights, memory: Leaves) -> BatchDecoder:
        """Return the decoder, which shares its weights with training."""
        self.decoder = self.decoder or BatchDecoder(
            self.h,
            memory,
            ctx=self.positions,
            slots=self.slots,
            threads=self.threads,
            kernels=self.kernels,
            weights=leaves.read_weights,
            drop_base=leaves.drop_base,
        )
        return self.decoder

    def show(self, step: int, weights: TrainableWeights, memory: Leaves, report: Report) -> None:
        """Print a sample of each prompt, in their order."""
        options = SamplingOptions(n=SAMPLE_TOKENS, seed=mix(self.seed, step) >> 33)
        requests = [Request(prompt, options) for prompt in self.prompts]
        ends = tokens_without_text(self.h, self.tokenizer)
        completions = complete(self.get_decoder(weights, memory), requests, ends)
        for completion in sorted(completions, key=lambda one: one.index):
            tokens = np.array([*self.prompts[completion.index], *completion.tokens], np.int32)
            text = self.tokenizer.decode(tokens, special=False).decode("utf-8", "replace")
            report.print_sample(step, text)

    def end(self, weights: TrainableWeights, memory: Leaves, report: Report) -> None:
        """Do nothing."""


def encode_sample_prompt(h: Hyperparameters, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the tokens of a prompt."""
    first = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    tokens = [*first, *map(int, tokenizer.encode(prompt, special=True))]
    if not tokens:
        raise UsageError(
            "the vocabulary has no begin token, so samples need a prompt; give one with --sample-prompt",
            code="no-prompt",
        )
    if len(tokens) >= h.ctx:
        raise UsageError(
            f"--sample-prompt must have fewer tokens than the context, {h.ctx} (got {len(tokens)})",
            code="prompt-too-long",
        )
    return tokens


def tokens_without_text(h: Hyperparameters, tokenizer: Tokenizer) -> set[int]:
    """Return the tokens that end a text, and those that stand for none."""
    return {*tokenizer.ends.all, *range(len(tokenizer), h.vocab)}


class SineSampler:
    """Continues one period of the sine wave greedily."""

    slots = 1

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
    model: RunModel,
    sine: Sine | None,
    prompts: Sequence[str] | None,
    seed: int,
    threads: int,
    kernels: str,
) -> Sampler:
    """Return the sampler for the sine wave, for prompts, or for neither; without a prompt, texts begin with nothing."""
    if sine:
        return SineSampler(model.h, sine, threads, kernels)
    if prompts is None or not model.tokenizer:
        return NoSampler()
    if len(prompts) > 1:
        return TextsSampler(model.h, model.tokenizer, prompts, seed, threads, kernels)
    return TextSampler(model.h, model.tokenizer, "".join(prompts), seed, threads, kernels)
