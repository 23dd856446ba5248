"""What a text looks like that is hardly meant to be learned as prose: a table, a log, JSON under another name."""

import csv
import json
import re

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
