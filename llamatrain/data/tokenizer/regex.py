r"""Parses the expressions that split text into words into tables for the compiled splitter.

An expression is a list of alternatives; the first that matches wins. An alternative is a sequence of items,
each a class of characters with repeat counts (greedy, with backtracking), and perhaps a last condition: `$`,
the end, or `(?!...)`, no such character. That is all that the pre-tokenizers of llama.cpp need, with one
extension: `[\\p{L}--a-z]`, a class without some characters. `\\p{Lu}` and similar classes mean `\\p{L}`, as
in llama.cpp.
"""

from dataclasses import dataclass

import numpy as np

from llamatrain.data.tokenizer.unicode_classes import CODE_POINTS, KINDS, kinds

UNLIMITED = 1 << 30
ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
REPEATS = {"?": (0, 1), "*": (0, UNLIMITED), "+": (1, UNLIMITED)}
SPACE = KINDS.index("Z")


@dataclass(frozen=True)
class Class:
    """A class of characters by kinds and ranges, perhaps negated, and never those in `excluded`."""

    kinds: str = ""
    ranges: tuple[tuple[str, str], ...] = ()
    negated: bool = False
    excluded: tuple[tuple[str, str], ...] = ()

    def mark(self, marks: np.ndarray, bit: int) -> None:
        """Set a bit for every code point of the class in a table where it is not set."""
        of_kind = np.array([(kind in self.kinds) != self.negated for kind in KINDS], np.uint32) << np.uint32(
            bit
        )
        marks |= of_kind[kinds()]
        for ranges, is_member in ((self.ranges, not self.negated), (self.excluded, False)):
            for first, last in ranges:
                part = marks[ord(first) : ord(last) + 1]
                part[:] = part | (1 << bit) if is_member else part & ~np.uint32(1 << bit)


ANY = Class(negated=True)


@dataclass(frozen=True)
class Alternative:
    """A sequence of classes with repeat counts."""

    items: tuple[tuple[Class, int, int], ...]  # each with its least and greatest count
    forbidden: Class | None = None  # must not follow


class PatternParser:
    """Parses an expression from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def accept(self, text: str) -> bool:
        """Skip a text if it is next; return whether it was."""
        matches = self.text.startswith(text, self.at)
        self.at += len(text) * matches
        return matches

    def take(self) -> str:
        """Return the next character and skip it."""
        self.at += 1
        return self.text[self.at - 1]

    def take_until(self, end: str) -> str:
        """Return the text before an end mark and skip both."""
        start = self.at
        self.at = self.text.index(end, self.at) + len(end)
        return self.text[start : self.at - len(end)]

    def parse_alternatives(self) -> list[Alternative]:
        """Parse the whole expression."""
        alternatives: list[Alternative] = []
        while True:
            items: list[tuple[Class, int, int]] = []
            forbidden = None
            while self.at < len(self.text) and not self.accept("|"):
                if self.accept("$"):
                    forbidden = ANY
                elif self.accept("(?!"):
                    forbidden = self.parse_class()
                    self.at += 1
                else:
                    items.append((self.parse_class(), *self.parse_repeat()))
            alternatives.append(Alternative(tuple(items), forbidden))
            if self.at == len(self.text):
                return alternatives

    def parse_repeat(self) -> tuple[int, int]:
        """Parse repeat counts; 1 and 1 if there are none."""
        if self.at < len(self.text) and self.text[self.at] in REPEATS:
            return REPEATS[self.take()]
        if self.accept("{"):
            minimum, _, maximum = self.take_until("}").partition(",")
            return int(minimum), int(maximum or minimum)
        return 1, 1

    def parse_class(self) -> Class:
        """Parse a character, a named class, or a class in brackets."""
        if not self.accept("["):
            kinds, character = self.parse_item()
            return Class(
                kinds,
                ((character, character),) if character else (),
                self.text[self.at - 2 : self.at] == "\\S",
            )
        negated = self.accept("^")
        kinds = ""
        ranges: list[tuple[str, str]] = []
        without: list[tuple[str, str]] = []
        into = ranges
        while not self.accept("]"):
            if self.accept("--"):
                into = without
            kind, first = self.parse_item()
            kinds += kind
            if first:
                spans = self.text.startswith("-", self.at) and self.text[self.at + 1] not in "-]"
                last = self.parse_item()[1] if spans and self.accept("-") else first
                into.append((first, last))
        return Class(kinds, tuple(ranges), negated, tuple(without))

    def parse_item(self) -> tuple[str, str]:
        """Parse the next kinds of characters, or the next character."""
        if self.accept("\\p{"):
            return self.take_until("}")[0], ""
        if not self.accept("\\"):
            return "", self.take()
        letter = self.take()
        return ("Z", "") if letter in "sS" else ("", ESCAPES.get(letter, letter))


@dataclass(frozen=True)
class Expression:
    """A compiled expression: `marks` has for each code point a bit per class.

    `program` has for each alternative the number of its items and the bits that must not follow, and for each
    item its bit and its least and greatest repeat count.
    """

    program: np.ndarray
    marks: np.ndarray


@dataclass(frozen=True)
class DigitGroups:
    """Cuts runs of digits into groups of three, counted from the end; the first group may be shorter."""

    digits: str  # a class of characters
    after: bool  # cut after each group, or else before each group of three


GROUPS = -1  # begins the program of digit groups


def compile_groups(groups: DigitGroups) -> Expression:
    """Compile digit groups: marks tell what a digit is, and the program where to cut."""
    marks = np.zeros(CODE_POINTS, np.uint32)
    PatternParser(groups.digits).parse_class().mark(marks, 0)
    return Expression(np.array([GROUPS, groups.after], np.int64), marks)


def compile_pattern(pattern: str | DigitGroups) -> Expression:
    """Compile an expression."""
    if isinstance(pattern, DigitGroups):
        return compile_groups(pattern)
    alternatives = PatternParser(pattern).parse_alternatives()
    bits: dict[Class, int] = {}
    program: list[int] = []
    for alternative in alternatives:
        forbidden = 1 << bits.setdefault(alternative.forbidden, len(bits)) if alternative.forbidden else 0
        program += [len(alternative.items), forbidden]
        for class_, minimum, maximum in alternative.items:
            program += [1 << bits.setdefault(class_, len(bits)), minimum, maximum]
    if len(bits) > 32:
        raise ValueError(f"{pattern}: {len(bits)} classes; at maximum 32 are supported")
    marks = np.zeros(CODE_POINTS, np.uint32)
    for class_, bit in bits.items():
        class_.mark(marks, bit)
    # llama.cpp treats white space beyond ASCII as a vertical tab, even if a class names that space.
    spaces = np.flatnonzero(kinds() == SPACE)
    marks[spaces[spaces > 127]] = marks[ord("\v")]
    return Expression(np.array(program, np.int64), marks)
