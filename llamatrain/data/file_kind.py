"""What can be training data: text, JSON and tables. Other things are told by name, by how they begin, by their bytes."""

import codecs
import csv
import json
import re
from pathlib import Path
from typing import Literal

import numpy as np

from llamatrain.errors import DataError
from llamatrain.gguf.constants import MAGIC

# ---- what text looks like --------------------------------------------------------

LINES = 50  # that are looked at
FEW = 5  # lines that say nothing yet
MOST = 0.8  # of the lines
STAMP = re.compile(
    r"[\[(<]?(?:\d{4}[-/.]\d\d[-/.]\d\d[T ,_]+\d\d:\d\d|\d\d[-/.]\w{2,3}[-/.]\d{2,4}[ T:]+\d\d:\d\d"
    r"|[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d|\d\d:\d\d:\d\d[.,\] ])"
    r"|\S+ \S+ \S+ \[\d\d/[A-Z][a-z]{2}/\d{4}:"
)
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}


def looks_like(head: bytes) -> str:
    """In words, with what would do; nothing where it may well be prose."""
    lines = [line for line in head.decode("utf-8", "replace").splitlines()[: LINES + 1] if line.strip()]
    if len(head) > 2 and not head.endswith(b"\n") and len(lines) > 1:
        del lines[-1]  # which may be cut
    if is_json(lines[:2]):
        return "JSON lines by the look of it, in a file called text; call it .jsonl"
    if len(lines) < FEW:
        return ""
    if sum(bool(STAMP.match(line)) for line in lines) >= MOST * len(lines):
        return "a log by the look of it, whose lines begin with the time; leave it out"
    if found := next((name for mark, name in DELIMITERS.items() if is_table(lines, mark)), ""):
        return f"a table by the look of it, with {found} between its columns; call it .csv or .tsv, with names in its first line"
    return ""


def is_json(lines: list[str]) -> bool:
    try:
        return bool(lines) and all(isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


def is_table(lines: list[str], mark: str) -> bool:
    """Whether each line has as many columns as any other; in prose a comma is followed by a space."""
    try:
        rows = list(csv.reader(lines, delimiter=mark))
    except csv.Error:
        return False
    widths = {len(row) for row in rows}
    spaced = sum(cell.startswith(" ") for row in rows for cell in row[1:])
    if widths == {2} and mark != "\t" and any(sign in line for line in lines for sign in "(){}"):
        return False  # of two parts are many lines of programs
    return len(widths) == 1 and (width := widths.pop()) > 1 and spaced < len(rows) * (width - 1) / 5


# ---- kinds of files --------------------------------------------------------------

Form = Literal[
    "text", "lines", "json", "csv", "tsv", "parquet"
]  # how a file is read; of all but text each row is an object
FORMS: dict[str, Form] = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
PACKED: dict[str, Literal["gz", "zst"]] = {".gz": "gz", ".zst": "zst"}
KNOWN = f"{', '.join(FORMS)}, and these as {' and '.join(PACKED)}"
TAKEN = f"what is taken is text, JSON and tables ({KNOWN}, or text by any other name)"
AS_IT_IS = "or --as text trains on it as it stands"
REFUSED = {
    ".html .htm .xhtml .xml": ("markup, not the text in it", f"save its text, {AS_IT_IS}"),
    ".rtf .pdf .ps .eps .doc .docx .odt .epub .ppt .pptx .xls .xlsx .ods": (
        "a document, not the text in it",
        "save it as text",
    ),
    ".bz2 .xz .zip .tar .tgz .7z .rar": ("packed", "unpack it first"),
    ".arrow .feather .pickle .pkl .npy .npz": (
        "a table of binary data",
        "make JSON lines or Parquet of its rows",
    ),
}
BY_NAME = {suffix: how for suffixes, how in REFUSED.items() for suffix in suffixes.split()}
# How a file begins whose name does not say what it is; in small letters.
BEGINNINGS = {
    b"<!doctype html": ".html",
    b"<html": ".html",
    b"<?xml": ".xml",
    b"{\\rtf": ".rtf",
    b"%pdf-": ".pdf",
    b"%!ps": ".ps",
    b"pk\x03\x04": ".zip",
    b"bzh": ".bz2",
    b"\xfd7zxz": ".xz",
    b"arrow1": ".arrow",
}
MARKS: dict[bytes, Literal["gz", "zst"]] = {
    b"\x1f\x8b": "gz",
    b"\x28\xb5\x2f\xfd": "zst",
}  # of what is packed
MARK = b"\xef\xbb\xbf"  # a byte order mark in front of UTF-8 is no text
# A text may have some bytes that are no UTF-8, which become tokens as they do in llama.cpp; it is in another encoding
# where they are more than STRAY and, up to any place, more than a SHARE of all bytes beyond ASCII.
STRAY = 8
SHARE = 0.01


def named(name: str) -> tuple[Form | None, Literal["gz", "zst"] | None]:
    """The form that a file's name tells, and what it is packed in."""
    path = Path(name)
    packed = PACKED.get(path.suffix.lower())
    return FORMS.get((path.with_suffix("") if packed else path).suffix.lower()), packed


def check_name(path: Path) -> None:
    inner = path.with_suffix("") if path.suffix.lower() in PACKED else path
    if (suffix := inner.suffix.lower()) in BY_NAME:
        raise DataError(refusal(str(path), suffix))


def check_head(name: str, head: bytes, raw: bool) -> None:
    """The beginning of a text; `raw`: it is not asked what it looks like."""
    if head.startswith(MAGIC):
        raise DataError(
            f"{name}: a GGUF file, and no data; a model to go on from is named by --checkpoint-in, or first in finetune"
        )
    if packed := next((kind for mark, kind in MARKS.items() if head.startswith(mark)), ""):
        if named(name)[1]:
            raise DataError(f"{name}: packed twice, by the look of it; unpack it once")
        raise DataError(f"{name}: packed, by the look of it; call it {Path(name).name}.{packed}")
    check_text(head, name)
    if not raw:
        begin = head.removeprefix(MARK).lstrip()[:16].lower()
        if found := next((like for mark, like in BEGINNINGS.items() if begin.startswith(mark)), None):
            raise DataError(refusal(name, found))
    Utf8(name, raw).feed(head)
    if not raw and (seen := looks_like(head)):
        raise DataError(f"{name}: {seen}, {AS_IT_IS}")


def refusal(name: str, suffix: str) -> str:
    what, instead = BY_NAME[suffix]
    return f"{name}: {what} ({suffix}); {TAKEN}: {instead}"


def check_text(block: bytes, name: str, offset: int = 0) -> None:
    """Text holds no zero bytes: with them it is UTF-16, a model, a picture."""
    if (zero := block.find(b"\0")) < 0:
        return
    raise DataError(
        f"{name}: binary data, a zero byte at offset {offset + zero}; text is UTF-8 without any, or UTF-16 with its mark in front"
    )


class Utf8:
    """Reads along in a text that comes in chunks, cut anywhere, and refuses it once it is clearly in another encoding."""

    def __init__(self, name: str, raw: bool = False) -> None:
        self.name, self.raw = name, raw  # whether it is let through, whatever it is
        self.bad = self.beyond = 0  # what is no UTF-8, and all bytes beyond ASCII
        self.first = ""  # the first bad one, and where
        self._at, self._line, self._rest = 0, 1, b""

    def feed(self, chunk: bytes) -> None:
        data = self._rest + chunk
        used = len(data) if data.isascii() else self._read(data)
        if not self.raw and self.bad > STRAY and self.bad > SHARE * self.beyond:
            raise DataError(
                f"{self.name}: no UTF-8 text, nor nearly: {self.bad} of the first {self.beyond} bytes beyond ASCII are none, "
                f"the first {self.first}; convert it, as with `iconv -f LATIN1 -t UTF-8` if that is what it is, {AS_IT_IS}"
            )
        self._at += used
        self._line += data.count(b"\n", 0, used)
        self._rest = data[used:]

    def _read(self, data: bytes) -> int:
        """How many bytes could be read: a character at the end that lacks some has to wait."""
        try:
            _, used = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError as error:
            text, used = codecs.utf_8_decode(data, "replace", False)
            self.bad += text.count("\ufffd") - data.count("\ufffd".encode(), 0, used)
            line = self._line + data.count(b"\n", 0, error.start)
            self.first = (
                self.first or f"0x{data[error.start]:02X} at byte {self._at + error.start}, in line {line}"
            )
        self.beyond += int(np.count_nonzero(np.frombuffer(data, np.uint8, used) & 0x80))
        return used
