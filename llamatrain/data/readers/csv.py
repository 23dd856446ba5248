"""CSV and TSV as rows with names, each the line at which it begins; a field between quotes may hold newlines."""

import csv
import json
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from llamatrain.data.column_names import media_in, quoted_name, repeated, told, wanted
from llamatrain.errors import DataError

LONGEST = 16 << 20  # bytes of a line, characters of a field
DELIMITERS = {"csv": ",", "tsv": "\t"}
TRUTH = {"true": True, "false": False}  # of answers, in a column of its own
OTHERS = ";\t|"  # which stand for commas where there is none in the names
DOUBLED = 'a quote within a field is written twice ("")'


class Lines:
    """Lines of text, which csv asks for; what it asks for in vain is told by its place."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.stream, self.name, self.number = stream, name, 0
        self.begin, self.taken = 1, 0  # of the row that is being read: its line, its bytes
        self.first = ""  # the line that was looked at before

    def __iter__(self) -> "Lines":
        return self

    def __next__(self) -> str:
        if self.first:
            line, self.first = self.first, ""
            return line
        if not (raw := self.stream.readline(LONGEST + 1)):
            raise StopIteration
        self.number += 1
        self.taken += len(raw)
        if self.taken > LONGEST:
            raise self.error(
                f"a row of more than {LONGEST >> 20} MiB; a quote may be missing in it or before", self.begin
            )
        if b"\0" in raw:
            raise self.error("a zero byte; a table is text", self.number)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            what = f"0x{raw[error.start]:02X} at byte {error.start + 1}"
            raise self.error(
                f"no UTF-8 text ({what}); convert it, as with `iconv -f LATIN1 -t UTF-8`", self.number
            ) from None

    def error(self, what: str, line: int) -> DataError:
        return DataError(f"{self.name}, line {line}: {what}")


def rows_of(
    stream: BinaryIO, form: str, name: str, columns: Mapping[str, str]
) -> Iterator[tuple[int, bytes]]:
    """The rows below the names, as JSON objects of what is wanted of them."""
    csv.field_size_limit(LONGEST)
    lines = Lines(stream, name)
    if not (first := next(lines, "")):
        raise DataError(f"{name}: the file is empty")
    lines.first = first
    rows = read(lines, delimiter_of(first, DELIMITERS[form]))
    _, names = next(rows, (1, list[str]()))
    names = [each.strip() for each in names]
    places = {names.index(each): each for each in wanted(checked(names, name), columns, f"{name}, line 1")}
    number, label, media = (
        0,
        columns.get("label", "kto_tag" if "kto_tag" in names else "label"),
        media_in(names),
    )
    for number, fields in rows:
        if len(fields) != len(names):
            more = (
                f"; {DOUBLED}, and a field with a comma in it stands between quotes" if form == "csv" else ""
            )
            raise lines.error(
                f"{len(fields):,} fields, where the names in line 1 are {len(names):,}{more}", number
            )
        if fields[0].startswith("\ufeff"):
            raise lines.error(
                "a byte order mark in the midst, as where files were put together; remove it", number
            )
        row: dict[str, str | bool] = {each: fields[place] for place, each in places.items()} | media
        if label in row:
            row[label] = TRUTH.get(str(row[label]).strip().lower(), row[label])
        yield number, json.dumps(row, ensure_ascii=False).encode()
    if not number:
        raise DataError(f"{name}: there is no row below the names in line 1")


def delimiter_of(line: str, usual: str) -> str:
    """Spreadsheets of some countries write others."""
    return usual if usual in line else next((each for each in OTHERS if each in line), usual)


def read(lines: Lines, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Rows that are not blank, with the lines at which they begin."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise lines.error(unread(str(error), lines.begin, lines.number), lines.begin) from None
        if fields is None:
            return
        if fields:
            yield lines.begin, fields
        lines.begin, lines.taken = lines.number + 1, 0


def unread(error: str, begin: int, end: int) -> str:
    if "unexpected end of data" in error:
        return f"a quote opens in this row that is never closed; {DOUBLED}"
    if "expected after" in error:
        across = f" (the row goes on to line {end})" if end > begin else ""
        return f"a letter stands behind the quote that closes a field{across}; {DOUBLED}"
    if "larger than field limit" in error:
        return f"a field is longer than {LONGEST >> 20} MiB; a quote may be missing in it"
    if "new-line character" in error:
        return "a carriage return stands alone in it; lines end with \\n, and fields that hold others stand between quotes"
    return f"no row of a table: {error}"


def checked(names: list[str], name: str) -> list[str]:
    """Each has its own."""
    if not any(names):
        raise DataError(f"{name}, line 1: no names of columns; the first line of a table names them")
    if "" in names:
        raise DataError(
            f"{name}, line 1: column {names.index('') + 1} of {len(names)} has no name; give it one (pandas: index=False)"
        )
    if twice := repeated(names):
        raise DataError(
            f"{name}, line 1: two columns are named {quoted_name(twice)}; there are {told(names)}"
        )
    return names
