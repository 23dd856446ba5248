"""Generated tokens as text that streams: no half characters, and nothing of a text that ends it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol


class TextPieces(Protocol):
    """Tokens to text, one after the other, as `data.tokenizer.StreamDecoder` does it."""

    def feed(self, token: int) -> str: ...

    def end(self) -> str: ...


class TokenNumbers:
    """For models whose tokens stand for no text: their numbers, with a space between."""

    def __init__(self) -> None:
        self.before = ""

    def feed(self, token: int) -> str:
        said, self.before = f"{self.before}{token}", " "
        return said

    def end(self) -> str:
        return ""


class StopText:
    """Lets text through up to the first of some texts that is complete, and holds back what may be the beginning of one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, self.held, self.found = texts, "", False

    def feed(self, text: str) -> str:
        self.held += text
        ends = [(self.held.find(each) + len(each), -len(each)) for each in self.texts if each in self.held]
        if ends:
            end, negative = min(ends)
            self.found, self.held = True, self.held[: end + negative]
            return self.end()
        kept = max((_begun(self.held, each) for each in self.texts), default=0)
        passed, self.held = self.held[: len(self.held) - kept], self.held[len(self.held) - kept :]
        return passed

    def end(self) -> str:
        """What was held back, and is no stop text after all."""
        rest, self.held = self.held, ""
        return rest


def _begun(text: str, stop: str) -> int:
    """How many characters at the text's end are the beginning of a stop text."""
    return next(
        (size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0
    )


def stream(tokens: Iterable[int], words: TextPieces, stop: Sequence[str] = ()) -> Iterator[str]:
    """The text of tokens as they come; it takes no further token once a stop text is complete."""
    guard = StopText(stop)
    for token in tokens:
        if passed := guard.feed(words.feed(token)):
            yield passed
        if guard.found:
            return
    if last := guard.feed(words.end()):
        yield last
    if not guard.found and (held := guard.end()):
        yield held
