"""`llamatrain generate`: text that goes on from a prompt."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.adapters.options import LoraOptions
from llamatrain.cli.application import Command, a_path, application, options_of
from llamatrain.config.options import Checked, Option, build
from llamatrain.config.whole import contents, limited
from llamatrain.machine import terminal
from llamatrain.machine.printable import printable
from llamatrain.recipe.generation import LoadOptions, TextModel
from llamatrain.sample.options import SamplingOptions

LONGEST, NEEDED = 1 << 24, "a prompt"  # bytes: sixteen for each token of the largest context
KEPT = "\n\t\u200c\u200d"  # on a terminal; the last two join signs to others


command = application()


@dataclass(frozen=True)
class PromptOptions(Checked, panel="Text"):
    prompt: Annotated[
        str,
        Option("The text to go on from; -: read it from standard input.", excludes=(("file", "both say what to go on from"),)),
    ] = ""
    file: Annotated[Path | None, Option("Read the prompt from a file; a newline at its very end is left out.")] = None


@command.command(cls=Command)
@options_of(PromptOptions, LoadOptions, LoraOptions, SamplingOptions)
def generate(model: Annotated[Path, typer.Argument(metavar="MODEL", parser=a_path)], **said: Any) -> None:
    """Go on from a prompt with MODEL, a GGUF file: the generated text alone goes to standard output.

    Where the model's tokens stand for no text (the sine wave's do not), prompt and text are token numbers.
    """
    options, loading, sampling = build(PromptOptions, said), build(LoadOptions, said), build(SamplingOptions, said)
    prompt = read_prompt(options)
    text = TextModel(model, loading, build(LoraOptions, said)).text(prompt, sampling)
    tell(text.notes)
    for piece in text:
        say(piece)
    if sys.stdout.isatty():
        say("\n")
    tell(text.notes)


def tell(notes: list[str]) -> None:
    """Each once."""
    while notes:
        terminal.say(f"note: {notes.pop(0)}")


def read_prompt(options: PromptOptions) -> bytes:
    """As bytes: they need not be text."""
    from llamatrain.data.tokenizer import to_bytes

    if options.prompt == "-":
        return limited(sys.stdin.buffer.read(LONGEST + 1), LONGEST, "standard input", NEEDED).removesuffix(b"\n")
    return contents(options.file, LONGEST, NEEDED).removesuffix(b"\n") if options.file else to_bytes(options.prompt)


def say(text: str) -> None:
    """Into a pipe as it is, in UTF-8; on a terminal without what would move the cursor or colour it."""
    if sys.stdout.isatty():
        text = printable(text, sys.stdout.encoding, keep=KEPT)
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
