"""Generates text that continues a prompt."""

import operator
import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from llamatrain.adapters.options import AdapterOptions, ControlOptions
from llamatrain.config.common import CTX, DEVICE, THREADS, DeviceName
from llamatrain.config.options import Options
from llamatrain.errors import FileError, UsageError
from llamatrain.sample.options import SamplingOptions

if TYPE_CHECKING:
    from llamatrain.data.tokenizer import Tokenizer
    from llamatrain.gguf.reader import Gguf
    from llamatrain.model.hyperparameters import Hyperparameters
    from llamatrain.sample.decoder import Decoder
    from llamatrain.sample.text import TextPieces

MIN_DROPPED = 4  # tokens of a context that do not stay
DEFAULT_CTX = 4096  # at most, where it is not given
NO_CONTROL = ControlOptions()
NEEDS_PROMPT = "the model has no begin token, so it needs a prompt; give one with --prompt or --file"


@dataclass(frozen=True)
class LoadOptions(Options, panel="Text"):
    """Options of opening a model."""

    ctx: Annotated[
        int | None,
        replace(
            CTX,
            sentence="Tokens of prompt and text together; default: the context of the model, at most 4096.",
        ),
    ] = None
    threads: Annotated[int | None, THREADS] = None
    device: Annotated[DeviceName, DEVICE] = "cpu"


class TextModel:
    """A model that is opened once for any number of texts."""

    def __init__(
        self,
        path: Path,
        options: LoadOptions,
        lora: AdapterOptions,
        control: ControlOptions = NO_CONTROL,
    ) -> None:
        from llamatrain.adapters.control_vector import add_directions, load_control_vectors
        from llamatrain.adapters.load_adapted import load_with_adapters
        from llamatrain.distributed.cores import count_cores
        from llamatrain.engine.device import create_device, resolve_device
        from llamatrain.gguf.reader import open_gguf
        from llamatrain.model.load import check_memory
        from llamatrain.sample.decoder import Decoder

        self.gguf, self.threads = open_gguf(path), options.threads or count_cores()
        self.device = resolve_device(options.device)
        device = create_device(self.device, self.threads)
        self.h, self.weights, self.arrays = load_with_adapters(
            self.gguf, lora, self.threads, device.can_decode
        )
        if directions := load_control_vectors(control, self.h):
            self.weights, self.arrays = add_directions(self.weights, self.arrays, directions)
        self.ctx = options.ctx or min(DEFAULT_CTX, self.h.ctx)
        if device.memory_limit() is None:
            cost = Decoder.plan(self.h, self.ctx, self.threads, self.device, self.weights)
            check_memory(self.gguf, cost.total, "a smaller --ctx")
        self.memory = {name: device.upload(array) for name, array in self.arrays.items()}
        self.tokenizer = load_tokenizer(self.gguf, self.h)
        # several, if a text begins before another has ended
        self._free_decoders: list[Decoder] = []

    def continue_text(self, prompt: bytes, sampling: SamplingOptions) -> "TextStream":
        """Return a text that continues the prompt; it is generated while it is read."""
        return self.continue_tokens(self.encode(prompt), sampling)

    def encode(self, prompt: bytes, name: str = "the prompt") -> list[int]:
        """Return the tokens of a prompt; raise UsageError if they do not fit the context."""
        tokens, count = encode_prompt(self.gguf, self.tokenizer, prompt, self.ctx)
        if count > self.ctx:
            raise UsageError(
                f"{name} must fit the context of {self.ctx} tokens (got {count}); raise --ctx or shorten it",
                code="prompt-too-long",
            )
        return tokens

    def continue_tokens(
        self,
        tokens: list[int],
        sampling: SamplingOptions,
        reuse_cache: bool = False,
        shown_tokens: Collection[int] = (),
    ) -> "TextStream":
        """Return a text that continues some tokens.

        `reuse_cache`: tokens that a decoder has from an earlier text are not computed again, which may round
        differently. `shown_tokens`: control tokens that count as text.
        """
        if sampling.ctx_shift and not self.h.architecture.shifts_context:
            raise UsageError(
                f"--ctx-shift is not possible with a {self.h.architecture.name}, whose state depends on all tokens; "
                "choose a larger --ctx",
                code="no-context-shift",
            )
        if sampling.seed < 0:
            sampling = replace(sampling, seed=secrets.randbits(32))
        return TextStream(self, tokens, sampling, reuse_cache, shown_tokens)

    def notes(self) -> list[str]:
        """Return remarks on the context for the user."""
        if self.ctx <= self.h.ctx:
            return []
        return [
            f"the model was made for {self.h.ctx} tokens; with --ctx {self.ctx} its text may become incoherent"
        ]

    @property
    def ends(self) -> Collection[int]:
        """The tokens that end a text."""
        return self.tokenizer.ends.all if self.tokenizer else ()

    def text_pieces(self, shown_tokens: Collection[int] = ()) -> "TextPieces":
        """Return a decoder of tokens to text. `shown_tokens`: control tokens that count as text."""
        from llamatrain.data.tokenizer import StreamDecoder
        from llamatrain.sample.text import TokenNumbers

        return StreamDecoder(self.tokenizer, shown=shown_tokens) if self.tokenizer else TokenNumbers()

    def take_decoder(self) -> "Decoder":
        """Return a decoder that no other text uses."""
        from llamatrain.sample.decoder import Decoder

        try:
            return self._free_decoders.pop()
        except IndexError:
            return Decoder(
                self.h,
                self.memory,
                ctx=self.ctx,
                threads=self.threads,
                kernels=self.device,
                weights=self.weights,
            )

    def return_decoder(self, decoder: "Decoder") -> None:
        """Make a decoder available for other texts."""
        self._free_decoders.append(decoder)


class TextStream:
    """A text that is generated while it is read, once. `notes` collects remarks for the user."""

    def __init__(
        self,
        model: TextModel,
        tokens: list[int],
        sampling: SamplingOptions,
        reuse_cache: bool = False,
        shown_tokens: Collection[int] = (),
    ) -> None:
        self.shown_tokens = shown_tokens
        self.model = model
        self.tokens = tokens
        self.sampling = sampling
        self.reuse_cache = reuse_cache
        self.notes = model.notes()

    def __iter__(self) -> Iterator[str]:
        from llamatrain.io.mapped_file import check_files, mapped_files, verify_unchanged
        from llamatrain.sample.decoder import Generation
        from llamatrain.sample.text import stream_text

        model, tokenizer = self.model, self.model.tokenizer
        decoder = model.take_decoder()
        files = mapped_files(model.arrays.values())
        keep = self.tokens_to_keep(bool(tokenizer and tokenizer.add_bos))
        generation = Generation(decoder, self.tokens, self.sampling, model.ends, keep, self.reuse_cache)
        try:
            with verify_unchanged(files):
                for piece in stream_text(
                    generation, model.text_pieces(self.shown_tokens), self.sampling.stop
                ):
                    check_files(files)
                    yield piece
        finally:
            self.model.return_decoder(decoder)
        if generation.stop_reason == "ctx":
            further = ", or add --ctx-shift to continue" if self.model.h.architecture.shifts_context else ""
            self.notes.append(f"the context of {self.model.ctx} tokens is full; raise --ctx{further}")

    def tokens_to_keep(self, has_bos: bool) -> int | None:
        """Return how many tokens stay when the context is shifted, like llama-server; None if it is not shifted.

        llama-server counts one more token if the vocabulary has a begin token. At least four tokens can be
        dropped.
        """
        if not self.sampling.ctx_shift:
            return None
        keep = self.sampling.keep if self.sampling.keep >= 0 else len(self.tokens)
        return max(0, min(keep + has_bos, self.model.ctx - MIN_DROPPED))


# ---- prompts ---------------------------------------------------------------


def load_tokenizer(gguf: "Gguf", h: "Hyperparameters") -> "Tokenizer | None":
    """Return the model's tokenizer, or None if its tokens are not text."""
    from llamatrain.data.tokenizer import load
    from llamatrain.data.tokenizer.vocabulary import has_no_text

    if has_no_text(gguf.metadata):
        return None
    tokenizer = load(gguf.metadata, gguf.path)
    if len(tokenizer) != h.vocab:
        raise FileError(
            f"{gguf.path}: the vocabulary has {len(tokenizer)} tokens, but token_embd.weight has "
            f"{h.vocab} rows",
            code="damaged-model",
        )
    return tokenizer


def encode_prompt(
    gguf: "Gguf", tokenizer: "Tokenizer | None", prompt: bytes, limit: int
) -> tuple[list[int], int]:
    """Return the first tokens of a prompt, at most `limit`, and how many it has in total."""
    if tokenizer is None:
        return parse_token_numbers(prompt, limit)
    tokens, count, bos = list[int](), 0, tokenizer.bos
    for piece in tokenizer.encode_pieces(prompt, special=True):
        tokens += piece[: max(0, limit - len(tokens))].tolist()
        count += len(piece)
    if bos is not None and (not count or (tokenizer.add_bos and tokens[0] != bos)):
        tokens, count = [bos, *tokens][:limit], count + 1
    if not count:
        raise UsageError(f"{gguf.path}: {NEEDS_PROMPT}", code="no-prompt")
    return tokens, count


def parse_token_numbers(prompt: bytes, limit: int) -> tuple[list[int], int]:
    """Return the first token numbers of a prompt, at most `limit`, and how many it has in total."""
    numbers, count = list[int](), 0
    for word in map(operator.itemgetter(0), re.finditer(rb"\S+", prompt)):
        if not word.isdigit() or len(word) >= 10:
            count = 0
            break
        count += 1
        if count <= limit:
            numbers.append(int(word))
    if not count:
        raise UsageError(
            "the model has no text vocabulary; give a prompt of token numbers, such as --prompt '0 3 5'",
            code="no-vocabulary",
        )
    return numbers, count
