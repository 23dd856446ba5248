"""Splits an answer into reasoning and content, as llama-server does (`reasoning_content` and `content`)."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

MARKS = (  # the marks that open and close the reasoning
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
)


class AnswerPiece(NamedTuple):
    """A piece of an answer: reasoning (`thought`) or content."""

    text: str
    thought: bool


def find_marks(source: str) -> tuple[str, str] | None:
    """Return the reasoning marks that a chat template contains, or None."""
    return next((marks for marks in MARKS if marks[0] in source or marks[1] in source), None)


def split_thoughts(pieces: Iterable[str], prompt: str, marks: tuple[str, str]) -> Iterator[AnswerPiece]:
    """Split a streaming answer into reasoning and content; the prompt may have opened or closed the reasoning.

    White space around reasoning and before content is dropped.
    """
    begin, end = marks
    thinking = prompt.rstrip().endswith(begin)
    # text held back; before the first mark; drop white space
    buffer = ""
    looking = not thinking and not prompt.rstrip().endswith(end)
    strip = True
    for piece in pieces:
        buffer += piece
        if looking:
            text = buffer.lstrip()
            if begin.startswith(text[: len(begin)]) and len(text) < len(begin):
                continue  # it may still become a mark
            thinking, looking = text.startswith(begin), False
            buffer = text[len(begin) :] if thinking else buffer
            strip = thinking
        if thinking and end in buffer:
            thought, _, buffer = buffer.partition(end)
            if stripped := (thought.lstrip() if strip else thought).rstrip():
                yield AnswerPiece(stripped, thought=True)
            thinking, strip = False, True
        if strip:
            buffer = buffer.lstrip()
        keep = partial_mark(buffer, end) if thinking else 0
        ready, buffer = buffer[: len(buffer) - keep], buffer[len(buffer) - keep :]
        if ready:
            yield AnswerPiece(ready, thinking)
            strip = False
    if buffer:
        yield AnswerPiece(buffer, thinking)


def partial_mark(text: str, mark: str) -> int:
    """Count the characters at the end of a text that may begin a mark, with the white space before them."""
    size = next(
        (size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0
    )
    bare = text[: len(text) - size]
    return size + len(bare) - len(bare.rstrip())
