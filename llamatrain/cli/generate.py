"""`llamatrain generate`: text that goes on from a prompt."""

import secrets
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamatrain.adapters.options import LoraOptions
from llamatrain.cli.application import Command, application, options_of
from llamatrain.recipe.loading import opened
from llamatrain.config.options import Checked, Option, build
from llamatrain.config.shared import CTX as TOKENS
from llamatrain.config.shared import THREADS
from llamatrain.errors import FileError, UsageError
from llamatrain.machine.printable import printable
from llamatrain.sample.options import SamplingOptions

if TYPE_CHECKING:
    from llamatrain.files.reader import Gguf
    from llamatrain.model.hyperparameters import Hyperparameters
    from llamatrain.sample.text import Words

CTX = 4096  # at most, where it is not given
KEPT = "\n\t\u200c\u200d"  # on a terminal; the last two join signs to others
PROMPT = "the model has no token that begins a text, so it needs a prompt to go on from: give one with --prompt or --file"


command = application()


@dataclass(frozen=True)
class GenerateOptions(Checked, panel="Text"):
    prompt: Annotated[
        str,
        Option("The text to go on from; -: read it from standard input.", excludes=(("file", "both say what to go on from"),)),
    ] = ""
    file: Annotated[Path | None, Option("Read the prompt from a file; a newline at its very end is left out.")] = None
    ctx: Annotated[
        int | None,
        replace(TOKENS, sentence="Tokens of prompt and text together; else what the model was made for, at most 4096."),
    ] = None
    threads: Annotated[int | None, THREADS] = None


@command.command(cls=Command)
@options_of(GenerateOptions, LoraOptions, SamplingOptions)
def generate(model: Annotated[Path, typer.Argument(metavar="MODEL")], **said: Any) -> None:
    """Go on from a prompt with MODEL, a GGUF file: the generated text alone goes to standard output.

    Where the model's tokens stand for no text (the sine wave's do not), prompt and text are token numbers.
    """
    from llamatrain.files.reader import open_gguf
    from llamatrain.machine.units import cores
    from llamatrain.model.load import check_memory
    from llamatrain.sample.decoder import Decoder, Generation
    from llamatrain.sample.text import stream

    options, sampling = build(GenerateOptions, said), build(SamplingOptions, said)
    if sampling.seed < 0:
        sampling = replace(sampling, seed=secrets.randbits(32))
    prompt, gguf, threads = read_prompt(options), open_gguf(model), options.threads or cores()
    h, weights, arrays = opened(gguf, build(LoraOptions, said), threads)
    check_memory(gguf, Decoder.plan(h, context(options, h), threads, weights=weights).total, "a smaller --ctx")
    tokens, ends, words = understood(gguf, h, prompt)
    ctx = context(options, h)
    if len(tokens) > ctx:
        raise UsageError(f"the prompt has {len(tokens)} tokens, the context {ctx}: a larger --ctx or a shorter prompt will do")
    if ctx > h.ctx:
        print(f"note: the model was made for {h.ctx} tokens; with --ctx {ctx} its text may lose the thread", file=sys.stderr)
    made = Generation(Decoder(h, arrays, ctx=ctx, threads=threads, weights=weights), tokens, sampling, ends)
    for text in stream(made, words, sampling.stop):
        say(text)
    if sys.stdout.isatty():
        say("\n")
    if made.ended == "ctx":
        print(f"note: the context of {ctx} tokens is full; a larger --ctx takes more", file=sys.stderr)


def context(options: GenerateOptions, h: "Hyperparameters") -> int:
    return options.ctx or min(CTX, h.ctx)


def read_prompt(options: GenerateOptions) -> bytes:
    """As bytes: they need not be text."""
    from llamatrain.data.tokenizer import to_bytes

    if options.prompt == "-":
        return sys.stdin.buffer.read().removesuffix(b"\n")
    return options.file.read_bytes().removesuffix(b"\n") if options.file else to_bytes(options.prompt)


def understood(gguf: "Gguf", h: "Hyperparameters", prompt: bytes) -> "tuple[list[int], set[int], Words]":
    """The prompt's tokens, the tokens that end a text, and what makes text of tokens."""
    from llamatrain.data.tokenizer import StreamDecoder, load
    from llamatrain.data.tokenizer.vocabulary import KEY, WITHOUT_TEXT
    from llamatrain.sample.text import Numbers

    if gguf.metadata.get(f"{KEY}model") in WITHOUT_TEXT:
        return numbers_in(prompt), set(), Numbers()
    tokenizer = load(gguf.metadata, gguf.path)
    if len(tokenizer) != h.vocab:
        raise FileError(f"{gguf.path}: its vocabulary has {len(tokenizer)} tokens, token_embd.weight {h.vocab} rows")
    tokens: list[int] = tokenizer.encode(prompt, special=True).tolist()
    bos = tokenizer.bos
    if bos is not None and (not tokens or (tokenizer.add_bos and tokens[0] != bos)):
        tokens.insert(0, bos)
    if not tokens:
        raise UsageError(f"{gguf.path}: {PROMPT}")
    return tokens, tokenizer.vocabulary.ends, StreamDecoder(tokenizer)


def numbers_in(prompt: bytes) -> list[int]:
    words = prompt.split()
    if not words or not all(word.isdigit() and len(word) < 10 for word in words):
        raise UsageError("this model's tokens stand for no text: it takes their numbers as a prompt, such as --prompt '0 3 5'")
    return [int(word) for word in words]


def say(text: str) -> None:
    """Into a pipe as it is, in UTF-8; on a terminal without what would move the cursor or colour it."""
    if sys.stdout.isatty():
        text = printable(text, sys.stdout.encoding, keep=KEPT)
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
