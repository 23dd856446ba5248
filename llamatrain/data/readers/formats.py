"""The table of file formats. A new one takes a module in this folder and a line here."""

from llamatrain.data.files import Format
from llamatrain.data.readers import csv, json_array, jsonl, parquet, text

FORMATS: tuple[Format, ...] = (
    text.TEXT,
    jsonl.JSONL,
    json_array.JSON,
    csv.CSV,
    csv.TSV,
    parquet.PARQUET,
)
BY_SUFFIX = {suffix: format for format in FORMATS for suffix in format.suffixes}
BINARY = tuple(format for format in FORMATS if format.magic)


def binary_format(head: bytes) -> Format | None:
    """Return the binary format whose magic bytes begin a file."""
    return next((format for format in BINARY if head.startswith(format.magic)), None)


def guess_format(first: bytes, following: bytes) -> Format:
    """Guess the format of a text file by its first line that is not blank and the next two lines."""
    guesses = (format for format in FORMATS if format.matches and format.matches(first, following))
    return next(guesses, text.TEXT)
