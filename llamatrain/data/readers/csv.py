"""Reads CSV and TSV as rows with names, each with the line on which it begins.

A quoted field may contain newlines.
"""

import csv
import json
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

from llamatrain.data.column_names import find_duplicate, format_keys, media_flag, quote_name
from llamatrain.data.files import DataFile, Format
from llamatrain.errors import DataError

MAX_ROW_BYTES = 16 << 20  # also the most characters of a field
LABELS = {"true": True, "false": False}  # in a column of labels
OTHER_DELIMITERS = ";\t|"  # used if the header has none of the usual ones
QUOTING = 'a quote inside a field is written twice ("")'


class Lines:
    """Yields decoded lines to the csv module, and keeps the line number for error messages."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.stream = stream
        self.name = name
        self.number = 0
        self.row_line = 1  # on which the current row begins
        self.row_bytes = 0  # of the current row
        self.pushed_back = ""  # the header, read before the csv module asks for it

    def __iter__(self) -> "Lines":
        return self

    def __next__(self) -> str:
        if self.pushed_back:
            line = self.pushed_back
            self.pushed_back = ""
            return line
        if not (raw := self.stream.readline(MAX_ROW_BYTES + 1)):
            raise StopIteration
        self.number += 1
        self.row_bytes += len(raw)
        if self.row_bytes > MAX_ROW_BYTES:
            problem = (
                f"the row is longer than {MAX_ROW_BYTES >> 20} MiB; a quote may be missing in it or before it"
            )
            raise self.error(problem, self.row_line, "row-too-long")
        if b"\0" in raw:
            raise self.error("a zero byte; a table must be text", self.number, "zero-byte")
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            problem = (
                f"not UTF-8 (got 0x{raw[error.start]:02X} at byte {error.start + 1}); "
                "convert the file, for example with `iconv -f LATIN1 -t UTF-8`"
            )
            raise self.error(problem, self.number, "not-utf8") from None

    def error(self, problem: str, line: int, code: str) -> DataError:
        """Return a DataError that names the file and a line."""
        return DataError(f"{self.name}, line {line}: {problem}", code=code)


def read_rows(source: DataFile, delimiter: str) -> Iterator[tuple[int, bytes]]:
    """Yield the rows after the header as JSON objects of the columns that are read."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with source.open() as stream:
        lines = Lines(stream, source.name)
        if not (header := next(lines, "")):
            raise DataError(f"{source.name}: the file is empty", code="empty-file")
        lines.pushed_back = header
        rows = parse(lines, detect_delimiter(header, delimiter))
        _, names = next(rows, (1, list[str]()))
        names = check_names([name.strip() for name in names], source.name)
        columns = {names.index(name): name for name in source.select_columns(names, source.locate(1))}
        label = source.columns.get("label", "kto_tag" if "kto_tag" in names else "label")
        media = media_flag(names)
        number = 0
        for number, fields in rows:
            if len(fields) != len(names):
                hint = f"; {QUOTING}, and a field that contains a comma is quoted" if delimiter == "," else ""
                problem = f"{len(fields):,} fields, but line 1 has {len(names):,} column names{hint}"
                raise lines.error(problem, number, "wrong-field-count")
            if fields[0].startswith("\ufeff"):
                problem = "a byte order mark inside the file, as if files were concatenated; remove it"
                raise lines.error(problem, number, "stray-byte-order-mark")
            row: dict[str, str | bool] = {name: fields[index] for index, name in columns.items()} | media
            if label in row:
                row[label] = LABELS.get(str(row[label]).strip().lower(), row[label])
            yield number, json.dumps(row, ensure_ascii=False).encode()
    if not number:
        raise DataError(f"{source.name}: no rows after the header in line 1", code="no-rows")


def detect_delimiter(header: str, usual: str) -> str:
    """Return the delimiter of a header line. Spreadsheets of some countries write semicolons."""
    if usual in header:
        return usual
    return next((delimiter for delimiter in OTHER_DELIMITERS if delimiter in header), usual)


def parse(lines: Lines, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not blank, with the lines on which they begin."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        try:
            fields = next(reader, None)
        except csv.Error as error:
            problem = explain(str(error), lines.row_line, lines.number)
            raise lines.error(problem, lines.row_line, "bad-table-row") from None
        if fields is None:
            return
        if fields:
            yield lines.row_line, fields
        lines.row_line = lines.number + 1
        lines.row_bytes = 0


def explain(error: str, begin: int, end: int) -> str:
    """Explain an error of the csv module."""
    if "unexpected end of data" in error:
        return f"a quote in this row is never closed; {QUOTING}"
    if "expected after" in error:
        extent = f" (the row continues to line {end})" if end > begin else ""
        return f"text follows the closing quote of a field{extent}; {QUOTING}"
    if "larger than field limit" in error:
        return f"a field is longer than {MAX_ROW_BYTES >> 20} MiB; a quote may be missing in it"
    if "new-line character" in error:
        return "a carriage return without a newline; end lines with \\n, and quote fields that contain \\r"
    return f"not a row of a table: {error}"


def check_names(names: list[str], source: str) -> list[str]:
    """Return the column names; raise DataError if one is empty or repeated."""
    if not any(names):
        raise DataError(
            f"{source}, line 1: no column names; the first line of a table must name its columns",
            code="no-column-names",
        )
    if "" in names:
        raise DataError(
            f"{source}, line 1: column {names.index('') + 1} of {len(names)} has no name; "
            "name it (pandas: index=False)",
            code="no-column-names",
        )
    if name := find_duplicate(names):
        raise DataError(
            f"{source}, line 1: two columns are named {quote_name(name)} (got {format_keys(names)}); "
            "rename one",
            code="duplicate-column",
        )
    return names


CSV = Format("csv", (".csv",), partial(read_rows, delimiter=","))
TSV = Format("tsv", (".tsv",), partial(read_rows, delimiter="\t"))
