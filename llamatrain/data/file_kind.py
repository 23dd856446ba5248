"""Detects what kind of data a file holds, by its name, its first bytes and its content."""

import csv
import json
import re
from pathlib import Path

from llamatrain.data.files import Format
from llamatrain.data.readers import compressed
from llamatrain.data.readers.compressed import UTF8_MARK, Compression
from llamatrain.data.readers.encoding import RAW_HINT, EncodingCheck, check_no_zero_bytes
from llamatrain.data.readers.formats import BY_SUFFIX
from llamatrain.errors import DataError
from llamatrain.gguf.constants import MAGIC as GGUF_MAGIC

KNOWN = f"{', '.join(BY_SUFFIX)}, and these as {' and '.join(compressed.SUFFIXES)}"
SUPPORTED = f"data must be text, JSON or a table ({KNOWN}, or text with any other suffix)"
# Suffixes of formats that are not read: what they hold, and what to do.
UNSUPPORTED = {
    ".html .htm .xhtml .xml": ("markup, not the text in it", f"save its text, {RAW_HINT}"),
    ".rtf .pdf .ps .eps .doc .docx .odt .epub .ppt .pptx .xls .xlsx .ods": (
        "a document, not the text in it",
        "save it as text",
    ),
    ".bz2 .xz .zip .tar .tgz .7z .rar": ("an archive", "decompress it first"),
    ".arrow .feather .pickle .pkl .npy .npz": (
        "a table of binary data",
        "convert its rows to JSON lines or Parquet",
    ),
}
UNSUPPORTED_SUFFIXES = {
    suffix: entry for suffixes, entry in UNSUPPORTED.items() for suffix in suffixes.split()
}
# The first bytes, in lower case, of unsupported files whose names do not reveal them.
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


def parse_name(name: str) -> tuple[Format | None, Compression | None]:
    """Return the format and the compression that a file's name implies."""
    path = Path(name)
    compression = compressed.SUFFIXES.get(path.suffix.lower())
    inner = path.with_suffix("") if compression else path
    return BY_SUFFIX.get(inner.suffix.lower()), compression


def check_name(path: Path) -> None:
    """Raise DataError if the name's suffix is of an unsupported format."""
    inner = path.with_suffix("") if path.suffix.lower() in compressed.SUFFIXES else path
    if (suffix := inner.suffix.lower()) in UNSUPPORTED_SUFFIXES:
        raise unsupported(str(path), suffix)


def check_head(name: str, head: bytes, raw: bool) -> None:
    """Raise DataError if a file's first bytes are not text; unless `raw`, also if they are no prose."""
    if head.startswith(GGUF_MAGIC):
        raise DataError(
            f"{name}: a GGUF file, not training data; "
            "give a model with --checkpoint-in, or as the first argument of finetune",
            code="model-as-data",
        )
    if compression := next(
        (kind for magic, kind in compressed.MAGIC.items() if head.startswith(magic)), None
    ):
        if parse_name(name)[1]:
            problem = "seems to be compressed twice; decompress it once"
        else:
            problem = f"seems to be compressed; rename it to {Path(name).name}.{compression}"
        raise DataError(f"{name}: {problem}", code="unexpected-compression")
    check_no_zero_bytes(head, name)
    if not raw:
        begin = head.removeprefix(UTF8_MARK).lstrip()[:16].lower()
        for magic, suffix in BEGINNINGS.items():
            if begin.startswith(magic):
                raise unsupported(name, suffix)
    EncodingCheck(name, raw).feed(head)
    if not raw and (problem := find_structure(head)):
        raise DataError(f"{name}: {problem}, {RAW_HINT}", code="not-prose")


def unsupported(name: str, suffix: str) -> DataError:
    """Return the error for an unsupported format."""
    content, hint = UNSUPPORTED_SUFFIXES[suffix]
    return DataError(f"{name}: {content} ({suffix}); {SUPPORTED}: {hint}", code="unsupported-format")


# ---- text that is no prose -------------------------------------------------

LINES = 50  # examined lines
MIN_LINES = 5  # fewer lines prove nothing
MIN_SHARE = 0.8  # of the lines
TIMESTAMP = re.compile(
    r"[\[(<]?(?:\d{4}[-/.]\d\d[-/.]\d\d[T ,_]+\d\d:\d\d|\d\d[-/.]\w{2,3}[-/.]\d{2,4}[ T:]+\d\d:\d\d"
    r"|[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d|\d\d:\d\d:\d\d[.,\] ])"
    r"|\S+ \S+ \S+ \[\d\d/[A-Z][a-z]{2}/\d{4}:"
)
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}


def find_structure(head: bytes) -> str:
    """Describe what a text seems to be (a table, a log, JSON) with a hint; return "" for prose."""
    lines = [line for line in head.decode("utf-8", "replace").splitlines()[: LINES + 1] if line.strip()]
    if len(head) > 2 and not head.endswith(b"\n") and len(lines) > 1:
        del lines[-1]  # it may be cut
    if is_json(lines[:2]):
        return "seems to be JSON lines in a file named as text; rename it to .jsonl"
    if len(lines) < MIN_LINES:
        return ""
    if sum(bool(TIMESTAMP.match(line)) for line in lines) >= MIN_SHARE * len(lines):
        return "seems to be a log (its lines begin with the time); remove it"
    delimiter = next((name for mark, name in DELIMITERS.items() if is_table(lines, mark)), "")
    if delimiter:
        return (
            f"seems to be a table with {delimiter} between its columns; "
            "rename it to .csv or .tsv, with column names in its first line"
        )
    return ""


def is_json(lines: list[str]) -> bool:
    """Return True if each line is a JSON object."""
    try:
        return bool(lines) and all(isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


def is_table(lines: list[str], delimiter: str) -> bool:
    """Return True if all lines have the same number of columns. In prose, a space follows a comma."""
    try:
        rows = list(csv.reader(lines, delimiter=delimiter))
    except csv.Error:
        return False
    widths = {len(row) for row in rows}
    spaced = sum(cell.startswith(" ") for row in rows for cell in row[1:])
    if widths == {2} and delimiter != "\t" and any(sign in line for line in lines for sign in "(){}"):
        return False  # many lines of programs have two parts
    return len(widths) == 1 and (width := widths.pop()) > 1 and spaced < len(rows) * (width - 1) / 5
