"""The expressions that cut text into words, read into tables that the compiled splitter runs.

An expression is a list of alternatives, the first that matches counts. An alternative is a row of items, each a class of
characters with how often it may come (greedy, giving back where the rest needs it), and perhaps a last condition: `$`, the
end, or `(?!...)`, no such character. That is all that the pre-tokenizers of llama.cpp need, with one word of its own:
`[\\p{L}--a-z]`, a class without some characters. `\\p{Lu}` and its kin mean `\\p{L}`, as llama.cpp takes them.
"""

from dataclasses import dataclass

import numpy as np

from llamatrain.data.tokenizer.unicode_classes import CODE_POINTS, KINDS, kinds

MANY = 1 << 30
ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
TIMES = {"?": (0, 1), "*": (0, MANY), "+": (1, MANY)}
SPACE = KINDS.index("Z")


@dataclass(frozen=True)
class Class:
    """Characters by their kinds and by ranges, all others where it is negated, and never those of `without`."""

    kinds: str = ""
    ranges: tuple[tuple[str, str], ...] = ()
    negated: bool = False
    without: tuple[tuple[str, str], ...] = ()

    def mark(self, marks: np.ndarray, bit: int) -> None:
        """Set a bit for every code point in the class, in a table that has none of it."""
        of_kind = np.array([(kind in self.kinds) != self.negated for kind in KINDS], np.uint32) << np.uint32(
            bit
        )
        marks |= of_kind[kinds()]
        for ranges, there in ((self.ranges, not self.negated), (self.without, False)):
            for first, last in ranges:
                part = marks[ord(first) : ord(last) + 1]
                part[:] = part | (1 << bit) if there else part & ~np.uint32(1 << bit)


ANY = Class(negated=True)


@dataclass(frozen=True)
class Alternative:
    items: tuple[tuple[Class, int, int], ...]  # each at least, at most so often
    forbidden: Class | None = None  # what may not follow


class Reader:
    """Goes through an expression from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def ahead(self, what: str) -> bool:
        """Whether this is next; then it is passed."""
        found = self.text.startswith(what, self.at)
        self.at += len(what) * found
        return found

    def take(self) -> str:
        self.at += 1
        return self.text[self.at - 1]

    def until(self, end: str) -> str:
        start, self.at = self.at, self.text.index(end, self.at) + len(end)
        return self.text[start : self.at - len(end)]

    def alternatives(self) -> list[Alternative]:
        found: list[Alternative] = []
        while True:
            items: list[tuple[Class, int, int]] = []
            forbidden = None
            while self.at < len(self.text) and not self.ahead("|"):
                if self.ahead("$"):
                    forbidden = ANY
                elif self.ahead("(?!"):
                    forbidden = self.one()
                    self.at += 1
                else:
                    items.append((self.one(), *self.times()))
            found.append(Alternative(tuple(items), forbidden))
            if self.at == len(self.text):
                return found

    def times(self) -> tuple[int, int]:
        if self.at < len(self.text) and self.text[self.at] in TIMES:
            return TIMES[self.take()]
        if self.ahead("{"):
            least, _, most = self.until("}").partition(",")
            return int(least), int(most or least)
        return 1, 1

    def one(self) -> Class:
        """A character, a class that is named, or one in brackets."""
        if not self.ahead("["):
            kinds, character = self.named()
            return Class(
                kinds,
                ((character, character),) if character else (),
                self.text[self.at - 2 : self.at] == "\\S",
            )
        negated, kinds = self.ahead("^"), ""
        ranges: list[tuple[str, str]] = []
        without: list[tuple[str, str]] = []
        into = ranges
        while not self.ahead("]"):
            if self.ahead("--"):
                into = without
            kind, first = self.named()
            kinds += kind
            if first:
                spans = self.text.startswith("-", self.at) and self.text[self.at + 1] not in "-]"
                last = self.named()[1] if spans and self.ahead("-") else first
                into.append((first, last))
        return Class(kinds, tuple(ranges), negated, tuple(without))

    def named(self) -> tuple[str, str]:
        """The kinds that stand next, or the character."""
        if self.ahead("\\p{"):
            return self.until("}")[0], ""
        if not self.ahead("\\"):
            return "", self.take()
        letter = self.take()
        return ("Z", "") if letter in "sS" else ("", ESCAPED.get(letter, letter))


@dataclass(frozen=True)
class Expression:
    """What the splitter runs: `marks` has for each code point the classes that it is in, a bit for each.

    `program` has for each alternative the number of its items, the bits that may not follow, and for each item its bit,
    at least and at most how often.
    """

    program: np.ndarray
    marks: np.ndarray


def expression(pattern: str) -> Expression:
    alternatives = Reader(pattern).alternatives()
    bits: dict[Class, int] = {}
    program: list[int] = []
    for alternative in alternatives:
        forbidden = 1 << bits.setdefault(alternative.forbidden, len(bits)) if alternative.forbidden else 0
        program += [len(alternative.items), forbidden]
        for one, least, most in alternative.items:
            program += [1 << bits.setdefault(one, len(bits)), least, most]
    if len(bits) > 32:
        raise ValueError(f"{pattern}: {len(bits)} classes, where 32 can be")
    marks = np.zeros(CODE_POINTS, np.uint32)
    for one, bit in bits.items():
        one.mark(marks, bit)
    # llama.cpp's expressions see a vertical tab in place of white space beyond ASCII, even where a class names that space.
    spaces = np.flatnonzero(kinds() == SPACE)
    marks[spaces[spaces > 127]] = marks[ord("\v")]
    return Expression(np.array(program, np.int64), marks)
