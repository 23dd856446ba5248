"""Text of all sorts, from a seed, to try tokenizers on: prose, code, scripts, emoji, marks, runs, and bytes that are no text."""

import random
from collections.abc import Sequence
from pathlib import Path

CODE = "".join(
    path.read_text() for path in sorted((Path(__file__).parents[2] / "llamatrain" / "compiler").glob("*.py"))
)
PROSE = (
    "The the of and to in a is that it was for on are with as I his they be at one have this word but what"
)
WORDS = PROSE.split()
BLANKS = "\t\n\v\f\r \x1c\x1f\x85\xa0\u1680\u2000\u2028\u202f\u200b\u3000\ufeff"
SIGNS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
SCRIPTS = (
    [(0x4E00, 0x9FFF), (0x3040, 0x30FF), (0xAC00, 0xD7A3), (0x3000, 0x3010), (0xFF01, 0xFF60)],
    [(0x1F300, 0x1FAFF), (0x200D, 0x200E), (0xFE0F, 0xFE10), (0x1F3FB, 0x1F3FF)],
    [(0x20, 0x250)],
    [(0x370, 0x600)],
    [(0x600, 0x1100)],
    [(0x1100, 0x3000)],
    [(0xA000, 0xD800)],
    [(0xE000, 0x10000)],
    [(0x10000, 0x20000)],
    [(0x20000, 0x110000)],
    [(0x660, 0x66A), (0x966, 0x970), (0x30, 0x3A), (0xB2, 0xBA), (0x2160, 0x2188)],
)


class Mixer:
    def __init__(self, seed: int, specials: Sequence[str] = ()) -> None:
        self.random = random.Random(seed)
        self.specials = specials

    def some(self, characters: str, most: int) -> str:
        return "".join(self.random.choices(characters, k=self.random.randrange(1, most)))

    def prose(self) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randrange(1, 60))) + self.random.choice(
            [". ", "\n", ", ", "? "]
        )

    def code(self) -> str:
        at = self.random.randrange(len(CODE) - 300)
        return CODE[at : at + self.random.randrange(300)]

    def script(self) -> str:
        ranges = self.random.choice(SCRIPTS)
        return "".join(
            chr(self.random.randrange(*self.random.choice(ranges)))
            for _ in range(self.random.randrange(1, 40))
        )

    def marks(self) -> str:
        return "".join(
            self.random.choice("aeiou") + chr(self.random.randrange(0x300, 0x36F)) for _ in range(9)
        )

    def run(self) -> str:
        return self.random.choice(
            [" ", " ", "\n", "\t", "\r\n", "=", "a", "A", "0", "!", "▁"]
        ) * self.random.choice([1, 2, 3, 40, 41, 300])

    def small(self) -> str:
        apostrophes = ["'s", "'S", "'t", "'RE", "'ve", "'Ll", "'d", "'x", "'", "don't ", "I'll", " '"]
        return self.random.choice(
            [
                self.some(BLANKS, 12),
                self.some(" \n\t\r", 30),
                self.some(SIGNS, 40),
                self.some("abcXYZ ABC", 40),
                str(self.random.randrange(10 ** self.random.randrange(1, 30))),
                "".join(self.random.choices(apostrophes, k=5)),
                "<0x0A>",
                "\0",
            ]
        )

    def special(self) -> str:
        text = self.random.choice(self.specials) if self.specials else ""
        return (
            text[: self.random.randrange(1, len(text) + 1)] if text and not self.random.randrange(4) else text
        )

    def text(self, size: int) -> str:
        """About so many characters."""
        kinds = (
            [self.prose] * 5
            + [self.code] * 4
            + [self.script] * 8
            + [self.marks, self.run, self.run]
            + [self.small] * 8
        )
        parts = list[str]()
        while size > 0:
            part = self.random.choice(kinds + [self.special] * 5)()
            parts.append(part)
            size -= len(part)
        return "".join(parts)

    def broken(self, size: int) -> bytes:
        """The same with bytes put in that are not UTF-8."""
        raw = bytearray(self.text(size).encode())
        lead = bytes([0xE2, 0x96, 0x81, 0xF0, 0xC3, 0xA9, 0x20, 0x41, 0xED, 0xA0, 0x80, 0xC0, 0xEF, 0xBF])
        for _ in range(len(raw) // 60):
            at = self.random.randrange(len(raw))
            raw[at:at] = bytes(self.random.choices(lead, k=self.random.randrange(1, 6)))
            del raw[self.random.randrange(len(raw))]
        # Beyond what UTF-8 can say llama.cpp stops with an error.
        return bytes(byte if byte < 0xF4 else 0xF3 for byte in raw)
