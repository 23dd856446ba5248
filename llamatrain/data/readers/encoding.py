"""Checks that text is UTF-8, chunk by chunk."""

import codecs

import numpy as np

from llamatrain.errors import DataError

# A few bytes that are not UTF-8 become tokens, as they do in llama.cpp. A text is in another encoding if they
# are more than MAX_BAD_BYTES and, up to any position, more than MAX_BAD_SHARE of all bytes beyond ASCII.
MAX_BAD_BYTES = 8
MAX_BAD_SHARE = 0.01
RAW_HINT = "or use --as text to train on it as it is"


def check_no_zero_bytes(block: bytes, name: str, offset: int = 0) -> None:
    """Raise DataError if text contains a zero byte, as UTF-16, models and pictures do."""
    zero = block.find(b"\0")
    if zero >= 0:
        raise DataError(
            f"{name}: binary data (a zero byte at offset {offset + zero}); "
            "text must be UTF-8 without zero bytes, or UTF-16 with a byte order mark",
            code="zero-byte",
        )


class EncodingCheck:
    """Checks a text in chunks, cut anywhere, and raises once it is clearly in another encoding."""

    def __init__(self, name: str, raw: bool = False) -> None:
        self.name = name
        self.raw = raw  # count bad bytes, but never raise
        self.bad = 0  # bytes that are not UTF-8
        self.beyond_ascii = 0
        self.first_bad = ""  # the first bad byte and its position
        self._offset = 0
        self._line = 1
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        """Check the next chunk."""
        data = self._rest + chunk
        used = len(data) if data.isascii() else self._decode(data)
        if not self.raw and self.bad > MAX_BAD_BYTES and self.bad > MAX_BAD_SHARE * self.beyond_ascii:
            raise DataError(
                f"{self.name}: not UTF-8 ({self.bad} of the first {self.beyond_ascii} bytes beyond ASCII are "
                f"invalid, the first {self.first_bad}); convert it, for example with "
                f"`iconv -f LATIN1 -t UTF-8`, {RAW_HINT}",
                code="not-utf8",
            )
        self._offset += used
        self._line += data.count(b"\n", 0, used)
        self._rest = data[used:]

    def _decode(self, data: bytes) -> int:
        """Return how many bytes were decoded; an incomplete character at the end waits for more."""
        try:
            _, used = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError as error:
            text, used = codecs.utf_8_decode(data, "replace", False)
            self.bad += text.count("\ufffd") - data.count("\ufffd".encode(), 0, used)
            if not self.first_bad:
                line = self._line + data.count(b"\n", 0, error.start)
                self.first_bad = (
                    f"0x{data[error.start]:02X} at byte {self._offset + error.start}, in line {line}"
                )
        self.beyond_ascii += int(np.count_nonzero(np.frombuffer(data, np.uint8, used) & 0x80))
        return used
