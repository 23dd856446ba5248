"""A vocabulary of the 256 bytes and a few control tokens, for tests of what is made of tokens."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from llamatrain.data.tokenizer.vocabulary import EndTokens

BOS, EOS, OPEN, CLOSE = 256, 257, 258, 259
CONTROLS = {BOS: b"<s>", EOS: b"</s>", OPEN: b"<|im_start|>", CLOSE: b"<|im_end|>"}
MARKS = re.compile(b"(" + b"|".join(re.escape(text) for text in CONTROLS.values()) + b")")


ENDS = EndTokens(frozenset({EOS, CLOSE}), frozenset({EOS, CLOSE}))


@dataclass
class ByteTokenizer:
    add_bos: bool = True
    add_eos: bool = False
    bos: int | None = BOS
    eos: int | None = EOS
    eot: int | None = CLOSE
    ends: EndTokens = ENDS
    chat_template: str | None = None
    tool_template: str | None = None

    def __len__(self) -> int:
        return 256 + len(CONTROLS)

    @property
    def fingerprint(self) -> str:
        return f"bytes {self}"

    def encode(self, text: str | bytes, *, special: bool = False, start: bool = True) -> np.ndarray:
        data = text.encode() if isinstance(text, str) else text
        if not special:
            return np.frombuffer(data, np.uint8).astype(np.int32)
        numbers = {text: number for number, text in CONTROLS.items()}
        ids = [
            token
            for piece in MARKS.split(data)
            for token in ([numbers[piece]] if piece in numbers else piece)
        ]
        return np.array(ids, np.int32)

    def find_cut(self, raw: bytes, *, special: bool = False) -> int:
        at = len(raw) - max(map(len, CONTROLS.values()))  # no mark that more text completes begins before
        return max(
            0, next((mark.start() for mark in MARKS.finditer(raw) if mark.start() < at < mark.end()), at)
        )

    def encode_large(self, chunks: Iterable[bytes]) -> Iterator[tuple[int, np.ndarray]]:
        return ((len(chunk), self.encode(chunk)) for chunk in chunks)

    def decode(self, ids: np.ndarray) -> bytes:
        return b"".join(CONTROLS.get(int(token)) or bytes([token]) for token in ids)
