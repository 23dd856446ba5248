"""Streams generated tokens as text: no partial characters, and nothing of a stop text."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol


class TextPieces(Protocol):
    """A decoder of tokens to text, such as `data.tokenizer.StreamDecoder`."""

    def feed(self, token: int) -> str:
        """Return the text that is complete with this token."""

    def flush(self) -> str:
        """Return the remaining text."""


class TokenNumbers:
    """Formats token ids, separated by spaces, for models without a text vocabulary."""

    def __init__(self) -> None:
        self.separator = ""

    def feed(self, token: int) -> str:
        """Return the token's id."""
        text, self.separator = f"{self.separator}{token}", " "
        return text

    def flush(self) -> str:
        """Return nothing."""
        return ""


class StopText:
    """Passes text through up to the first complete stop text, and holds back what may begin one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, self.buffer, self.is_complete = texts, "", False

    def feed(self, text: str) -> str:
        """Return the text that can be passed on."""
        self.buffer += text
        ends = [
            (self.buffer.find(stop) + len(stop), -len(stop)) for stop in self.texts if stop in self.buffer
        ]
        if ends:
            end, negative = min(ends)
            self.is_complete, self.buffer = True, self.buffer[: end + negative]
            return self.flush()
        size = max((partial_stop(self.buffer, stop) for stop in self.texts), default=0)
        ready, self.buffer = self.buffer[: len(self.buffer) - size], self.buffer[len(self.buffer) - size :]
        return ready

    def flush(self) -> str:
        """Return the text held back, which turned out to be no stop text."""
        rest, self.buffer = self.buffer, ""
        return rest


def partial_stop(text: str, stop: str) -> int:
    """Return the number of characters at the text's end that may begin a stop text."""
    return next(
        (size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0
    )


class TextBuilder:
    """Turns the tokens of a text into pieces of text, up to a complete stop text."""

    def __init__(self, decoder: TextPieces, stop: Sequence[str] = ()) -> None:
        self.decoder, self.guard = decoder, StopText(stop)

    @property
    def is_complete(self) -> bool:
        """True if a stop text is complete, so that no token is needed any more."""
        return self.guard.is_complete

    def feed(self, token: int) -> str:
        """Return the text that is ready with this token."""
        return self.guard.feed(self.decoder.feed(token))

    def flush(self) -> Iterator[str]:
        """Yield the rest behind the last token."""
        if not self.is_complete:
            yield self.guard.feed(self.decoder.flush())
        if not self.is_complete:
            yield self.guard.flush()


def stream_text(tokens: Iterable[int], decoder: TextPieces, stop: Sequence[str] = ()) -> Iterator[str]:
    """Yield the text of tokens as they come; no token is requested after a complete stop text."""
    text = TextBuilder(decoder, stop)
    for token in tokens:
        if ready := text.feed(token):
            yield ready
        if text.is_complete:
            return
    yield from filter(None, text.flush())
