"""`llamatrain generate`: continues a prompt, or chats."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.adapters.options import AdapterOptions, ControlOptions
from llamatrain.cli.typer_app import Command, make_app, parse_path, with_options
from llamatrain.commands.chat import ChatOptions, Conversation, llama_command
from llamatrain.commands.generate import LoadOptions, TextModel
from llamatrain.config.options import Option, Options, build
from llamatrain.config.read_limited import check_size, read_limited
from llamatrain.errors import UsageError
from llamatrain.platform import terminal
from llamatrain.platform.escape import make_printable
from llamatrain.sample.options import SamplingOptions

MAX_PROMPT, NEEDED = 1 << 24, "a prompt"  # most bytes of a prompt: 16 for each token of the largest context
KEPT_CHARS = "\n\t\u200c\u200d"  # on a terminal; the last two join signs to others


command = make_app()


@dataclass(frozen=True)
class PromptOptions(Options, panel="Text"):
    """Options of the prompt."""

    prompt: Annotated[
        str,
        Option(
            "Text to continue; -: read it from standard input.",
            excludes=(("file", "both give the prompt"),),
        ),
    ] = ""
    file: Annotated[Path | None, Option("Read the prompt from a file; a newline at its end is dropped.")] = (
        None
    )


@command.command(cls=Command)
@with_options(PromptOptions, ChatOptions, LoadOptions, AdapterOptions, ControlOptions, SamplingOptions)
def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", parser=parse_path)], **overrides: Any
) -> None:
    """Go on from a prompt with MODEL, a GGUF file, or talk with it: its text alone goes to standard output.

    A talk (--chat) has several turns, typed or read line by line, through the chat template that MODEL was
    trained with. Where the model's tokens stand for no text (the sine wave's do not), prompt and text are
    token numbers.
    """
    options = build(PromptOptions, overrides)
    loading = build(LoadOptions, overrides)
    sampling = build(SamplingOptions, overrides)
    chat, lora = build(ChatOptions, overrides), build(AdapterOptions, overrides)
    control = build(ControlOptions, overrides)
    if chat.chat and options.prompt == "-":
        raise UsageError(
            "--prompt - has no effect with --chat, which reads turns from standard input; leave it out",
            code="unused-option",
        )
    prompt, text_model = read_prompt(options), TextModel(model, loading, lora, control)
    if chat.verbose:
        first = prompt.decode("utf-8", "replace")
        terminal.log_line(
            f"in llama.cpp: {llama_command(model, chat, lora, control, sampling, text_model.ctx, first)}"
        )
    if chat.chat:
        with closing(Conversation(text_model, chat, sampling)) as conversation:
            run_chat(conversation, prompt.decode("utf-8", "replace"))
        return
    text = text_model.continue_text(prompt, sampling)
    print_notes(text.notes)
    for piece in text:
        print_text(piece)
    if sys.stdout.isatty():
        print_text("\n")
    print_notes(text.notes)


def run_chat(conversation: Conversation, first: str) -> None:
    """Chat turn by turn. On a terminal Ctrl-C ends an answer, in a pipe everything."""
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    print_notes(conversation.notes)
    for turn in chain([first] if first else [], typed_lines() if is_interactive else piped_lines()):
        answer = conversation.say(turn)
        try:
            for piece in answer:
                (print_thought if piece.thought else print_text)(piece.text)
        except KeyboardInterrupt:
            if not is_interactive:
                raise
        finally:
            answer.close()  # the answer so far is part of the chat
        print_text("\n")
        print_notes(conversation.notes)


def typed_lines() -> Iterator[str]:
    """Yield lines that are typed on a terminal."""
    while True:
        try:
            line = input("> ")
        except EOFError:
            print_text("\n")
            return
        except KeyboardInterrupt:
            terminal.log_line("\nCtrl-D ends the chat")
            continue
        if line.strip():
            yield line


def piped_lines() -> Iterator[str]:
    """Yield lines from a pipe."""
    while line := sys.stdin.buffer.readline(MAX_PROMPT + 1):
        turn = (
            check_size(line, MAX_PROMPT, "standard input", "a turn").decode("utf-8", "replace").rstrip("\r\n")
        )
        if turn.strip():
            yield turn


def print_notes(notes: list[str]) -> None:
    """Print notes, and remove them from the list."""
    while notes:
        note = notes.pop(0)
        terminal.log_line(note if note.startswith("warning: ") else f"note: {note}")


def read_prompt(options: PromptOptions) -> bytes:
    """Return the prompt as bytes, which need not be valid text."""
    from llamatrain.data.tokenizer import to_bytes

    if options.prompt == "-":
        return check_size(
            sys.stdin.buffer.read(MAX_PROMPT + 1), MAX_PROMPT, "standard input", NEEDED
        ).removesuffix(b"\n")
    return (
        read_limited(options.file, MAX_PROMPT, NEEDED).removesuffix(b"\n")
        if options.file
        else to_bytes(options.prompt)
    )


def print_thought(text: str) -> None:
    """Print a thought dimly on a terminal.

    A pipe gets only answers, like the content of a server's answer.
    """
    if sys.stdout.isatty():
        text = make_printable(text, sys.stdout.encoding, keep=KEPT_CHARS)
        sys.stdout.write(text if os.environ.get("NO_COLOR") else f"\033[2m{text}\033[0m")
        sys.stdout.flush()


def print_text(text: str) -> None:
    """Print text: to a pipe as UTF-8, on a terminal without control characters."""
    if sys.stdout.isatty():
        text = make_printable(text, sys.stdout.encoding, keep=KEPT_CHARS)
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
