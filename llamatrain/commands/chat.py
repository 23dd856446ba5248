"""Chats with a model through the chat template that it was trained with."""

import shlex
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from llamatrain.adapters.options import AdapterOptions, ControlOptions
from llamatrain.commands.generate import TextModel
from llamatrain.config.options import Option, OptionError, Options, format_flag
from llamatrain.data.options import TEMPLATE, DataOptions
from llamatrain.errors import UsageError
from llamatrain.sample.options import SamplingOptions
from llamatrain.sources.names import locate, locate_model

if TYPE_CHECKING:
    from llamatrain.data.chat.messages import Message
    from llamatrain.sample.thoughts import AnswerPiece


@dataclass(frozen=True)
class ChatOptions(Options, panel="Text"):
    """Options of a chat."""

    chat: Annotated[
        bool,
        Option(
            "Chat: each line is a turn; Ctrl-C ends an answer, Ctrl-D the chat. --prompt or --file is "
            "the first turn."
        ),
    ] = False
    system: Annotated[str, Option("System prompt.")] = ""
    chat_template: Annotated[Path | None, TEMPLATE] = None
    think: Annotated[
        bool | None,
        Option(
            "Switch thinking on or off, if the chat template has a switch (enable_thinking); auto: like "
            "llama-server."
        ),
    ] = None
    verbose: Annotated[bool, Option("Print the llama.cpp command that does the same.", short="v")] = False

    def validate(self) -> None:
        """Raise OptionError if options have no effect without --chat."""
        given = {
            "system": self.system,
            "chat_template": self.chat_template,
            "think": self.think,
            "no_think": self.think is False,
        }
        for name, value in given.items():
            if value and not self.chat:
                raise OptionError(partial(self._without_chat, name))

    @staticmethod
    def _without_chat(name: str, spelt: Callable[[str], str]) -> str:
        return f"{spelt(name)} has no effect without {spelt('chat')}; leave it out"


class Conversation:
    """A conversation with a model. `notes` collects remarks for the user."""

    def __init__(self, model: TextModel, options: ChatOptions, sampling: SamplingOptions) -> None:
        from llamatrain.data.chat.builtin import CHATML
        from llamatrain.data.chat.prompt import PromptReader
        from llamatrain.data.chat.template import ChatTemplate
        from llamatrain.data.warnings import find_plain_marks, format_notes

        if model.tokenizer is None:
            raise UsageError(
                f"{model.gguf.path}: the model has no text vocabulary, so it cannot chat",
                code="no-vocabulary",
            )
        self.model, self.sampling, self.reader = model, sampling, PromptReader(model.tokenizer)
        own = DataOptions(chat_template=options.chat_template).template or model.tokenizer.chat_template
        bos, eos = map(self.reader.token_text, (model.tokenizer.bos, model.tokenizer.eos))
        self.template = ChatTemplate(own or CHATML, bos, eos, self.reader.ends.values(), think=options.think)
        self.template.check_switch(format_flag("think" if options.think else "no_think"))
        self.messages: list[Message] = (
            [{"role": "system", "content": options.system}] if options.system else []
        )
        self.turns, self.prompt = 0, ""
        self.noted: dict[str, str] = {} if own else {"fallback": ""}
        if marks := find_plain_marks(self.template, self.reader):
            self.noted["marks"] = ", ".join(marks)
        self.notes = list(format_notes(self.noted, str(model.gguf.path)))

    def say(self, message: str) -> Generator["AnswerPiece", None, None]:
        """Yield the answer as it is generated, thoughts separately.

        An answer that is interrupted counts as far as it came.
        """
        from llamatrain.data.warnings import format_notes
        from llamatrain.sample.thoughts import AnswerPiece, split_thoughts

        self.messages.append({"role": "user", "content": message})
        try:
            tokens = self.encode_messages()
        except UsageError:  # the turn is not taken
            self.messages.pop()
            raise
        new_notes = dict.fromkeys(sorted(self.template.notes - self.noted.keys()), "")
        self.notes += format_notes(
            {kind: "" for kind in new_notes if kind == "system"}, str(self.model.gguf.path)
        )
        self.noted |= new_notes
        seed = self.sampling.seed
        stream = self.model.continue_tokens(
            tokens,
            replace(self.sampling, seed=seed if seed < 0 else seed + self.turns),
            reuse_cache=True,
            shown_tokens=self.mark_tokens(),
        )
        pieces = (
            split_thoughts(stream, self.prompt, self.marks)
            if self.marks
            else (AnswerPiece(text, thought=False) for text in stream)
        )
        answer, thoughts = list[str](), list[str]()
        try:
            for piece in pieces:
                (thoughts if piece.thought else answer).append(piece.text)
                yield piece
        finally:
            reasoning = {"reasoning_content": "".join(thoughts)} if thoughts else {}
            self.messages.append({"role": "assistant", "content": "".join(answer), **reasoning})
            self.turns += 1
            if thoughts and not answer:
                self.notes.append(
                    "the answer is a thought that does not end: llama-server returns it as reasoning, "
                    "without content"
                )
            for note in stream.notes:
                self.note_once(note)

    def mark_tokens(self) -> list[int]:
        """Return the control tokens that mark thoughts."""
        tokens = (self.reader.find_token(mark) for mark in self.marks or ())
        return [token for token in tokens if token is not None]

    @property
    def marks(self) -> tuple[str, str] | None:
        """The marks of thoughts, where llama-server looks for them."""
        from llamatrain.sample.thoughts import find_marks

        return find_marks(self.template.source) if "thinks" in self.template.notes else None

    def encode_messages(self) -> list[int]:
        """Return the tokens of the conversation.

        With --ctx-shift the older half is dropped if it is too long.
        """
        while True:
            prompt = self.template.render(self.messages, answer_next=True)
            self.prompt = prompt.decode("utf-8", "replace")
            tokens = [
                *([] if self.reader.bos is None else [self.reader.bos]),
                *self.reader.encode_prompt(prompt).tolist(),
            ]
            if len(tokens) <= self.model.ctx:
                return tokens
            turns = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
            if len(turns) == 1 or not self.sampling.ctx_shift:
                problem = (
                    f"the chat has {len(tokens)} tokens, more than the context of {self.model.ctx}; "
                    "raise --ctx, "
                )
                raise UsageError(
                    problem
                    + (
                        "or start a new chat"
                        if len(turns) == 1
                        else "or add --ctx-shift to drop the oldest turns"
                    ),
                    code="context-full",
                )
            del self.messages[turns[0] : turns[(len(turns) + 1) // 2]]
            self.note_once("the context is full: the oldest turns of the chat are dropped")

    def note_once(self, note: str) -> None:
        """Add a note, once per conversation."""
        if note not in self.noted:
            self.noted[note] = ""
            self.notes.append(note)

    def close(self) -> None:
        """Stop the template's child process."""
        self.template.close()


def llama_command(
    path: Path,
    options: ChatOptions,
    lora: AdapterOptions,
    control: ControlOptions,
    sampling: SamplingOptions,
    ctx: int,
    prompt: str,
) -> str:
    """Return the llama.cpp command that does the same: llama-cli for chats, llama-completion for texts."""
    words = [
        "llama-cli" if options.chat else "llama-completion",
        "-m",
        str(locate_model(path)),
        "-c",
        str(ctx),
        "-n",
        str(sampling.n),
    ]
    words += ["-s", str(sampling.seed), "--temp", f"{sampling.temp:g}", "--top-k", str(sampling.top_k)]
    words += ["--top-p", f"{sampling.top_p:g}", "--min-p", f"{sampling.min_p:g}"]
    words += [
        "--repeat-penalty",
        f"{sampling.repeat_penalty:g}",
        "--repeat-last-n",
        str(sampling.repeat_last_n),
    ]
    words += ["--context-shift", "--keep", str(sampling.keep)] if sampling.ctx_shift else []
    words += [word for text in sampling.stop for word in ("-r", escape(text))]
    adapters = [(locate(path, "adapter"), scale) for path, scale in lora.scaled]
    vectors = [(locate(path), scale) for path, scale in control.scaled]
    files = scaled_flags("--lora", adapters) | scaled_flags("--control-vector", vectors)
    for option, names in files.items():
        words += [option, ",".join(names)] if names else []
    if control.scaled and (control.control_vector_first > 1 or control.control_vector_last is not None):
        last = control.control_vector_last or 0  # llama.cpp takes 0 for the last of all
        words += ["--control-vector-layer-range", str(control.control_vector_first), str(last)]
    if options.chat:
        words += ["-cnv", "--jinja", *(["-sys", options.system] if options.system else [])]
        words += [] if options.think is None else ["--reasoning", "on" if options.think else "off"]
        if template := options.chat_template:
            given = DataOptions(chat_template=template)
            named = (
                ["--chat-template", given.template or ""]
                if given.is_named_template
                else ["--chat-template-file", str(template)]
            )
            words += named
    else:
        words.append("-no-cnv")
    words += ["-p", escape(prompt)] if prompt or not options.chat else []
    return " ".join(map(quote_word, words))


def scaled_flags(flag: str, files: Iterable[tuple[Path, float]]) -> dict[str, list[str]]:
    """Return llama.cpp's flags for adapters or control vectors, and their values."""
    files = list(files)
    return {
        flag: [str(path) for path, scale in files if scale == 1],
        f"{flag}-scaled": [f"{path}:{scale:g}" for path, scale in files if scale != 1],
    }


SURROGATES = range(0xDC80, 0xDD00)  # Python's characters for bytes that are not UTF-8


def escape(text: str) -> str:
    """Escape backslashes."""
    return text.replace("\\", "\\\\")


def quote_word(word: str) -> str:
    """Quote a word for a shell, on one line."""
    if word.isprintable():
        return shlex.quote(word)
    inside = escape(word).replace("'", "\\'")
    return "$'" + "".join(sign if sign.isprintable() else escape_char(sign) for sign in inside) + "'"


def escape_char(sign: str) -> str:
    r"""Escape a character for $'...' in a shell.

    There \x is a byte, as in a path that is not UTF-8, and \u a character.
    """
    number = ord(sign)
    if number in SURROGATES:
        return f"\\x{number - SURROGATES[0] + 0x80:02x}"
    return f"\\u{number:04x}" if 0x80 <= number <= 0xFF else ascii(sign)[1:-1]
