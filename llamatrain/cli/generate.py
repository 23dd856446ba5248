"""`llamatrain generate`: text that goes on from a prompt."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.adapters.options import AdapterOptions
from llamatrain.cli.typer_app import Command, a_path, application, options_of
from llamatrain.commands.chat import ChatOptions, Conversation, line_for_llama
from llamatrain.commands.generate import LoadOptions, TextModel
from llamatrain.config.options import Option, Options, build
from llamatrain.config.read_limited import check_size, read_limited
from llamatrain.errors import UsageError
from llamatrain.platform import terminal
from llamatrain.platform.escape import make_printable
from llamatrain.sample.options import SamplingOptions

LONGEST, NEEDED = 1 << 24, "a prompt"  # bytes: sixteen for each token of the largest context
KEPT = "\n\t\u200c\u200d"  # on a terminal; the last two join signs to others


command = application()


@dataclass(frozen=True)
class PromptOptions(Options, panel="Text"):
    prompt: Annotated[
        str,
        Option(
            "The text to go on from; -: read it from standard input.",
            excludes=(("file", "both say what to go on from"),),
        ),
    ] = ""
    file: Annotated[
        Path | None, Option("Read the prompt from a file; a newline at its very end is left out.")
    ] = None


@command.command(cls=Command)
@options_of(PromptOptions, ChatOptions, LoadOptions, AdapterOptions, SamplingOptions)
def generate(model: Annotated[Path, typer.Argument(metavar="MODEL", parser=a_path)], **said: Any) -> None:
    """Go on from a prompt with MODEL, a GGUF file, or talk with it: its text alone goes to standard output.

    A talk (--chat) has several turns, typed or read line by line, through the chat template that MODEL was trained with. Where
    the model's tokens stand for no text (the sine wave's do not), prompt and text are token numbers.
    """
    options, loading, sampling = (
        build(PromptOptions, said),
        build(LoadOptions, said),
        build(SamplingOptions, said),
    )
    chat, lora = build(ChatOptions, said), build(AdapterOptions, said)
    if chat.chat and options.prompt == "-":
        raise UsageError("--chat reads standard input itself, each line as a turn; leave --prompt - out")
    prompt, opened = read_prompt(options), TextModel(model, loading, lora)
    if chat.verbose:
        first = prompt.decode("utf-8", "replace")
        terminal.log_line(f"in llama.cpp: {line_for_llama(model, chat, lora, sampling, opened.ctx, first)}")
    if chat.chat:
        with closing(Conversation(opened, chat, sampling)) as talk:
            talked(talk, prompt.decode("utf-8", "replace"))
        return
    text = opened.text(prompt, sampling)
    tell(text.notes)
    for piece in text:
        say(piece)
    if sys.stdout.isatty():
        say("\n")
    tell(text.notes)


def talked(talk: Conversation, first: str) -> None:
    """Turn by turn; on a terminal Ctrl-C ends an answer, and from a pipe all."""
    typed = sys.stdin.isatty() and sys.stdout.isatty()
    tell(talk.notes)
    for words in chain([first] if first else [], typed_lines() if typed else piped_lines()):
        answer = talk.said(words)
        try:
            for piece in answer:
                (say_thought if piece.thought else say)(piece.text)
        except KeyboardInterrupt:
            if not typed:
                raise
        finally:
            answer.close()  # what was said so far is part of the talk
        say("\n")
        tell(talk.notes)


def typed_lines() -> Iterator[str]:
    while True:
        try:
            words = input("> ")
        except EOFError:
            say("\n")
            return
        except KeyboardInterrupt:
            terminal.log_line("\nCtrl-D ends the talk")
            continue
        if words.strip():
            yield words


def piped_lines() -> Iterator[str]:
    while line := sys.stdin.buffer.readline(LONGEST + 1):
        words = (
            check_size(line, LONGEST, "standard input", "a turn").decode("utf-8", "replace").rstrip("\r\n")
        )
        if words.strip():
            yield words


def tell(notes: list[str]) -> None:
    """Each once."""
    while notes:
        note = notes.pop(0)
        terminal.log_line(note if note.startswith("warning: ") else f"note: {note}")


def read_prompt(options: PromptOptions) -> bytes:
    """As bytes: they need not be text."""
    from llamatrain.data.tokenizer import to_bytes

    if options.prompt == "-":
        return check_size(sys.stdin.buffer.read(LONGEST + 1), LONGEST, "standard input", NEEDED).removesuffix(
            b"\n"
        )
    return (
        read_limited(options.file, LONGEST, NEEDED).removesuffix(b"\n")
        if options.file
        else to_bytes(options.prompt)
    )


def say_thought(text: str) -> None:
    """Show a thought dimly on a terminal; a pipe gets words alone, as the content of a server's answer."""
    if sys.stdout.isatty():
        text = make_printable(text, sys.stdout.encoding, keep=KEPT)
        sys.stdout.write(text if os.environ.get("NO_COLOR") else f"\033[2m{text}\033[0m")
        sys.stdout.flush()


def say(text: str) -> None:
    """Into a pipe as it is, in UTF-8; on a terminal without what would move the cursor or colour it."""
    if sys.stdout.isatty():
        text = make_printable(text, sys.stdout.encoding, keep=KEPT)
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
