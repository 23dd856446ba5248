"""Conversations with two models at a time: the same words go to both."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import llamatrain
from llamatrain.errors import LlamatrainError, UsageError

MAX_TALKS = 8  # conversations that are kept, one for each open page
Source = tuple[str, str]  # a model and its adapter; either may be empty


@dataclass
class Talk:
    """A conversation with some models."""

    sources: tuple[Source, ...]
    sessions: dict[Source, llamatrain.ChatSession]

    def close(self) -> None:
        """End the sessions of all models."""
        for session in self.sessions.values():
            session.close()


class Talks:
    """The conversations of all open pages. Models stay open while the last conversation uses them."""

    def __init__(self) -> None:
        self._talks = OrderedDict[str, Talk]()
        self._models = dict[Source, llamatrain.LoadedModel]()

    def say(self, given: "Turn") -> Iterator[dict[str, Any]]:
        """Yield the answers of all models to a prompt, piece by piece, and errors."""
        if not given.chat:
            for side, source in enumerate(given.sources):
                yield from self._pieces(side, source, None, given)
            return
        talk = self._talks.pop(given.name, None)
        if talk is None or talk.sources != given.sources:
            if talk:
                talk.close()
            talk = Talk(given.sources, {})
        self._talks[given.name] = talk
        while len(self._talks) > MAX_TALKS:
            self._talks.popitem(last=False)[1].close()
        for side, source in enumerate(given.sources):
            yield from self._pieces(side, source, talk, given)

    def _pieces(
        self, side: int, source: Source, talk: Talk | None, given: "Turn"
    ) -> Iterator[dict[str, Any]]:
        try:
            model, notes = self._open(source, given.sources), tuple[str, ...]()
            if talk is None:
                texts = model.stream(given.prompt, **given.sampling)
            else:
                if source not in talk.sessions:
                    talk.sessions[source] = model.chat(system=given.system, **given.sampling)
                texts = talk.sessions[source].stream(given.prompt)
            for text in texts:
                yield {"side": side, "text": text}
            notes = model.notes if talk is None else talk.sessions[source].notes
            yield {"side": side, "done": True, "notes": notes}
        except LlamatrainError as error:
            yield {"side": side, "done": True, "error": str(error)}

    def _open(self, source: Source, used: tuple[Source, ...]) -> llamatrain.LoadedModel:
        """Return an open model, after closing those that are not used."""
        if source not in self._models:
            for other in [*self._models]:
                if other not in used:
                    del self._models[other]
                    for name in [name for name, talk in self._talks.items() if other in talk.sources]:
                        self._talks.pop(name).close()
            path, adapter = source
            self._models[source] = llamatrain.load(path, lora=[adapter] if adapter else [])
        return self._models[source]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A prompt of a user, and the models that it goes to."""

    name: str  # of the conversation
    sources: tuple[Source, ...]
    prompt: str
    system: str
    chat: bool  # with the chat template, and with what was said before
    sampling: dict[str, Any]


def read_turn(given: dict[str, Any]) -> Turn:
    """Return a turn as the page sends it, or raise UsageError."""
    match given:
        case {"name": str(name), "sources": list(sources), "prompt": str(prompt), **more} if (
            prompt and sources
        ):
            pass
        case _:
            raise UsageError("prompt must be a text that is not empty", code="invalid-prompt")
    pairs = list[Source]()
    for source in sources:
        match source:
            case {"model": str(model), "lora": str(lora)} if model:
                pairs.append((model, lora))
            case _:
                raise UsageError("model must be a path", code="invalid-option")
    system = more.get("system", "")
    sampling = more.get("sampling", {})
    if not isinstance(system, str) or not isinstance(sampling, dict):
        raise UsageError("system must be a text", code="invalid-option")
    return Turn(
        name=name,
        sources=tuple(dict.fromkeys(pairs)),
        prompt=prompt,
        system=system,
        chat=more.get("chat") is not False,
        sampling={str(key): value for key, value in sampling.items() if value is not None},
    )
