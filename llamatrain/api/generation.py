"""Generated texts and chats."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llamatrain.adapters.options import AdapterOptions, ControlOptions
from llamatrain.api.calls import check_options, in_keywords_all, path_of, translate_errors
from llamatrain.commands.chat import ChatOptions, Conversation
from llamatrain.commands.generate import LoadOptions, TextModel
from llamatrain.commands.generate_many import GeneratedText, generate_many
from llamatrain.commands.prompts import GivenPrompt, encode_given
from llamatrain.config.messages import quote
from llamatrain.config.options import build, option_specs
from llamatrain.config.signatures import document_options
from llamatrain.data.tokenizer import to_bytes
from llamatrain.errors import UsageError
from llamatrain.run.in_memory_rows import Place
from llamatrain.sample.options import SamplingOptions

if TYPE_CHECKING:
    from typing import Unpack

    from llamatrain.api.option_types import ChatOptionsGiven, LoadOptionsGiven, SamplingOptionsGiven


@document_options(LoadOptions, AdapterOptions, ControlOptions)
def load(path: Place, **options: "Unpack[LoadOptionsGiven]") -> "LoadedModel":
    """Open a model, to generate texts with it or to chat."""
    with translate_errors():
        values = check_options(options, LoadOptions, AdapterOptions, ControlOptions)
        parts = build(LoadOptions, values), build(AdapterOptions, values), build(ControlOptions, values)
        return LoadedModel(TextModel(path_of(path), *parts))


class LoadedModel:
    """A model that is open for generating texts."""

    def __init__(self, model: TextModel) -> None:
        self._model, self._last = model, list[str]()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the last text."""
        return in_keywords_all(self._last)

    @document_options(SamplingOptions)
    def generate(self, prompt: str | bytes = "", **sampling: "Unpack[SamplingOptionsGiven]") -> str:
        """Return the text that continues a prompt. The option temperature is another name of temp."""
        return "".join(self.stream(prompt, **sampling))

    @document_options(SamplingOptions)
    def stream(self, prompt: str | bytes = "", **sampling: "Unpack[SamplingOptionsGiven]") -> Iterator[str]:
        """Yield the text that continues a prompt, piece by piece."""
        with translate_errors():
            if not isinstance(prompt, str | bytes):
                raise UsageError(
                    f"the prompt must be a text or bytes (got {quote(prompt)})", code="invalid-prompt"
                )
            options = build(SamplingOptions, check_options(sampling, SamplingOptions))
            text = self._model.continue_text(
                prompt if isinstance(prompt, bytes) else to_bytes(prompt), options
            )
            self._last = text.notes
        return pieces(text)

    @document_options(SamplingOptions)
    def generate_many(
        self,
        prompts: Sequence[GivenPrompt],
        *,
        parallel: int | None = None,
        **sampling: "Unpack[SamplingOptionsGiven]",
    ) -> list[GeneratedText]:
        """Return the text that continues each prompt, in their order. All are generated together, which is faster.

        prompts: texts, or rows such as {"prompt": ...} and {"messages": [...]}, as in files to train on.
        parallel: how many are generated at a time; None: 16, or fewer for few prompts or little memory.
        """
        with translate_errors():
            if parallel is not None and (type(parallel) is not int or parallel < 1):
                raise UsageError(
                    f"parallel must be a whole number of at least 1 (got {quote(parallel)})",
                    code="invalid-option",
                )
            options = build(SamplingOptions, check_options(sampling, SamplingOptions))
            tokens = [prompt.tokens for prompt in encode_given(self._model, prompts)]
            return generate_many(self._model, tokens, options, parallel)

    @document_options(SamplingOptions)
    def chat(
        self,
        *,
        system: str = "",
        chat_template: Place | None = None,
        think: bool | None = None,
        **sampling: "Unpack[SamplingOptionsGiven]",
    ) -> "ChatSession":
        """Start a chat that uses the model's chat template.

        system: the system prompt.
        chat_template: a file with another template, or the name of a built-in one.
        think: switch thinking on or off; None: as llama-server does.
        """
        with translate_errors():
            given = {"system": system, "chat_template": chat_template, "think": think}
            values = check_options(given, ChatOptions)
            options = build(SamplingOptions, check_options(sampling, SamplingOptions))
            return ChatSession(
                Conversation(self._model, build(ChatOptions, {**values, "chat": True}), options)
            )


class ChatSession:
    """A conversation with a model.

    It ends with `close`, with a `with` block, or when it is garbage collected.
    """

    def __init__(self, talk: Conversation) -> None:
        self._talk, self.close = talk, weakref.finalize(self, talk.close)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the chat so far."""
        return in_keywords_all(self._talk.notes)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far, each with role and content."""
        return [dict(message) for message in self._talk.messages]

    def say(self, words: str) -> str:
        """Return the answer to a message."""
        return "".join(self.stream(words))

    def stream(self, words: str) -> Iterator[str]:
        """Yield the answer to a message, piece by piece.

        If it is not read to its end, the part that was read counts.
        """
        if not isinstance(words, str):
            raise UsageError(f"a message must be a text (got {quote(words)})", code="invalid-prompt")
        return pieces(piece.text for piece in self._talk.say(words) if not piece.thought)

    def __enter__(self) -> "ChatSession":
        return self

    def __exit__(self, *how: object) -> None:
        self.close()


def chat(
    path: Place,
    *,
    system: str = "",
    chat_template: Place | None = None,
    think: bool | None = None,
    **options: "Unpack[ChatOptionsGiven]",
) -> ChatSession:
    """Open a model and start a chat: `load(path, ...).chat(...)`, with the options of both."""
    overrides = dict[str, Any](options)
    with translate_errors():
        check_options(overrides, LoadOptions, AdapterOptions, ControlOptions, SamplingOptions)
    loading = {*option_specs(LoadOptions), *option_specs(AdapterOptions), *option_specs(ControlOptions)}
    model = load(path, **{name: overrides.pop(name) for name in [*overrides] if name in loading})
    return model.chat(system=system, chat_template=chat_template, think=think, **overrides)


def pieces(text: Iterable[str]) -> Iterator[str]:
    """Yield pieces of text; errors are raised as the API raises them."""
    with translate_errors():
        yield from text
