"""Lines made of pieces: what a terminal is too narrow for is left out, the least important first."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

GAP = "  "


class Segment(NamedTuple):
    label: str
    value: str
    rank: int  # those of low rank are left out first
    style: str = ""

    @property
    def width(self) -> int:
        return len(self.label) + bool(self.label) + len(self.value)


def fitted(pieces: Sequence[Segment], width: int | None) -> list[Segment]:
    """As many of the pieces as fit, in their order; one at least."""
    kept = list(pieces)
    while width is not None and len(kept) > 1 and width_of(kept) > width:
        kept.remove(min(kept, key=lambda piece: piece.rank))
    return kept


def width_of(pieces: Sequence[Segment]) -> int:
    return sum(piece.width for piece in pieces) + len(GAP) * (len(pieces) - 1)


def assembled(pieces: Sequence[Segment]) -> Text:
    text = Text(no_wrap=True)
    for n, piece in enumerate(pieces):
        text.append(GAP if n else "")
        text.append(f"{piece.label} " if piece.label else "", "bright_black")
        text.append(piece.value, piece.style)
    return text
