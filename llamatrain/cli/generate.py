"""`llamatrain generate`: continues a prompt, or chats."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.adapters.options import AdapterOptions, ControlOptions
from llamatrain.cli.typer_app import (
    MultiProcessCommand,
    check_single_process,
    make_app,
    parse_path,
    with_options,
)
from llamatrain.commands.chat import ChatOptions, Conversation, llama_command
from llamatrain.commands.generate import LoadOptions, TextModel
from llamatrain.config.options import (
    COUNT,
    Option,
    Options,
    build,
    changed_options,
    needs,
    reject_unused,
    unused_options,
)
from llamatrain.config.read_limited import check_size, read_limited
from llamatrain.errors import UsageError
from llamatrain.platform import terminal
from llamatrain.platform.escape import make_printable
from llamatrain.rewards.options import RewardOptions
from llamatrain.sample.options import SamplingOptions

MAX_PROMPT, NEEDED = 1 << 24, "a prompt"  # most bytes of a prompt: 16 for each token of the largest context
KEPT_CHARS = "\n\t\u200c\u200d"  # on a terminal; the last two join signs to others


MANY = (needs("prompts"),)

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
    prompts: Annotated[
        Path | None,
        Option(
            "Continue each prompt of this file, and print JSON lines: rows with a prompt or a chat, as finetune reads "
            "them.",
            unit="FILE",
            excludes=(("prompt", "both give prompts"), ("file", "both give prompts")),
        ),
    ] = None
    each_line: Annotated[
        bool,
        Option("Take each line of that file as a prompt, and continue it like --prompt.", when=MANY),
    ] = False
    columns: Annotated[
        str,
        Option(
            "The column names that that file has for known keys: prompt=question.",
            unit="KEY=NAME,...",
            excludes=(("each_line", "lines of text have no columns"),),
            when=MANY,
        ),
    ] = ""
    best_of: Annotated[
        int | None,
        Option(
            "Generate so many answers to each prompt, and print the one with the highest --reward as a row for finetune.",
            unit="ANSWERS",
            least=1,
            most=COUNT,
            when=MANY,
        ),
    ] = None
    parallel: Annotated[
        int | None,
        Option(
            "Prompts to continue at a time; default: 16, or fewer for few prompts or little memory.",
            unit="TEXTS",
            least=1,
            most=COUNT,
            when=MANY,
        ),
    ] = None


@command.command(cls=MultiProcessCommand)
@with_options(
    PromptOptions,
    ChatOptions,
    LoadOptions,
    AdapterOptions,
    ControlOptions,
    SamplingOptions,
    RewardOptions,
)
def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", parser=parse_path)], **overrides: Any
) -> None:
    """Go on from a prompt with MODEL, a GGUF file, or talk with it: its text alone goes to standard output.

    Many prompts (--prompts) are continued together, and several processes can share them. A talk (--chat) has
    several turns, typed or read line by line, through the chat template that MODEL was trained with. Where the
    model's tokens stand for no text (the sine wave's do not), prompt and text are token numbers.
    """
    options = build(PromptOptions, overrides)
    rewards = build(RewardOptions, overrides)
    check_prompt_options(options, rewards, overrides)
    loading = build(LoadOptions, overrides)
    sampling = build(SamplingOptions, overrides)
    chat, lora = build(ChatOptions, overrides), build(AdapterOptions, overrides)
    control = build(ControlOptions, overrides)
    if chat.chat and options.prompt == "-":
        raise UsageError(
            "--prompt - has no effect with --chat, which reads turns from standard input; leave it out",
            code="unused-option",
        )
    if options.prompts:
        check_no_chat(chat)
        print_texts(TextModel(model, loading, lora, control), options, sampling, rewards)
        return
    check_single_process("llamatrain generate without --prompts")
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


def check_no_chat(chat: ChatOptions) -> None:
    """Raise if options of a chat are given."""
    for name, is_given in (("chat", chat.chat), ("verbose", chat.verbose)):
        if is_given:
            raise UsageError(
                f"--{name} has no effect with --prompts; leave one of them out", code="unused-option"
            )


def check_prompt_options(options: PromptOptions, rewards: RewardOptions, given: Mapping[str, Any]) -> None:
    """Raise if an option of prompts or rewards has no effect, or if --best-of lacks a reward."""
    classes = PromptOptions, RewardOptions
    unused = unused_options(vars(options) | vars(rewards), *classes)
    reject_unused(unused, changed_options(given, *classes))
    if options.best_of and not rewards.reward:
        raise UsageError("--best-of needs a --reward that scores the answers; add one", code="no-reward")
    if rewards.reward and not options.best_of:
        raise UsageError("--reward has no effect without --best-of; leave it out", code="unused-option")


def print_texts(
    model: TextModel, options: PromptOptions, sampling: SamplingOptions, rewards: RewardOptions
) -> None:
    """Print the text after each prompt of a file as JSON lines, in the order of the file."""
    from llamatrain.commands.best_of import best_answers
    from llamatrain.commands.generate_many import generate_many
    from llamatrain.commands.prompts import read_lines, read_rows
    from llamatrain.data.column_names import parse_mapping
    from llamatrain.distributed.comm import is_printing_rank

    assert options.prompts
    print_notes(model.notes())
    prompts = (
        read_lines(model, options.prompts)
        if options.each_line
        else read_rows(model, options.prompts, options.columns)
    )
    if options.best_of:
        mapping = parse_mapping(options.columns)
        rows = best_answers(model, prompts, sampling, options.best_of, rewards, mapping, options.parallel)
    else:
        texts = generate_many(model, [prompt.tokens for prompt in prompts], sampling, options.parallel)
        rows = [
            {"index": index, "prompt": prompt.text, **asdict(text)}
            for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
        ]
    if is_printing_rank():
        for row in rows:
            sys.stdout.write(json.dumps(row) + "\n")


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
