"""Formats values and names for messages."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

LONGEST = 40  # characters of a value that are said again
ALIKE = 0.66
PATH, LINE = 300, 600  # of a word, and of all of them
WORD = re.compile(rf"\S{{{PATH + 1},}}")


def quote(value: Any, inside: int = 0) -> str:
    """Return a value for a message, shortened if it is long or deeply nested."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        if inside > 1 or not value:
            return "a list"
        return " ".join(quote(item, inside + 1) for item in value[:3]) + (" ..." if len(value) > 3 else "")
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):  # Python writes no number of thousands of digits
        return str(value) if abs(value) < 10**LONGEST else f"a number of more than {LONGEST} digits"
    if isinstance(value, str):
        return repr(value[:LONGEST]) + ("..." if len(value) > LONGEST else "")
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def shorten(text: str, limit: int = 2 * LONGEST) -> str:
    """Cut out the middle of a text that is too long to be read."""
    gap, end = " ... ", limit // 3
    return text if len(text) <= limit else text[: limit - end - len(gap)] + gap + text[len(text) - end :]


def shorten_line(line: str) -> str:
    """Shorten the words of a line that are longer than a path may be, and then the line."""
    return shorten(WORD.sub(lambda word: shorten(word[0], PATH), line), LINE)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the hint "did you mean ...?" if a known name is similar; hyphens do not count."""
    bare = {option.lstrip("-").lower(): option for option in known}
    close = get_close_matches(name[:LONGEST].lstrip("-").lower(), bare, 1, ALIKE)
    return f"; did you mean {bare[close[0]]}?" if close else ""
