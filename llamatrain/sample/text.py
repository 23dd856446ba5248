"""Generated tokens as text that streams: no half characters, and nothing of a text that ends it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol


class TextPieces(Protocol):
    """Tokens to text, one after the other, as `data.tokenizer.StreamDecoder` does it."""

    def feed(self, token: int) -> str: ...

    def flush(self) -> str: ...


class TokenNumbers:
    """For models whose tokens stand for no text: their numbers, with a space between."""

    def __init__(self) -> None:
        self.separator = ""

    def feed(self, token: int) -> str:
        text, self.separator = f"{self.separator}{token}", " "
        return text

    def flush(self) -> str:
        return ""


class StopText:
    """Lets text through up to the first of some texts that is complete, and holds back what may be the beginning of one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, self.buffer, self.is_complete = texts, "", False

    def feed(self, text: str) -> str:
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
        """What was held back, and is no stop text after all."""
        rest, self.buffer = self.buffer, ""
        return rest


def partial_stop(text: str, stop: str) -> int:
    """How many characters at the text's end are the beginning of a stop text."""
    return next(
        (size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0
    )


def stream_text(tokens: Iterable[int], decoder: TextPieces, stop: Sequence[str] = ()) -> Iterator[str]:
    """The text of tokens as they come; it takes no further token once a stop text is complete."""
    guard = StopText(stop)
    for token in tokens:
        if ready := guard.feed(decoder.feed(token)):
            yield ready
        if guard.is_complete:
            return
    if last := guard.feed(decoder.flush()):
        yield last
    if not guard.is_complete and (rest := guard.flush()):
        yield rest
