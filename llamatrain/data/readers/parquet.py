"""Reads Parquet with pyarrow, a few rows at a time and only the columns that are needed."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llamatrain.data.column_names import find_duplicate, format_keys, media_flag, quote_name
from llamatrain.data.files import DataFile, Format
from llamatrain.data.readers.compressed import MAX_RATIO, max_unpacked_size, open_seekable
from llamatrain.errors import DataError

MAGIC = b"PAR1"  # at both ends of a file
MAX_ROW_BYTES = 64 << 20
FLAT_BATCH = 256  # rows read at once
NESTED_BATCH = 16  # the same of rows with nested columns


def check(path: Path, name: str) -> None:
    """Check the magic bytes at both ends of a file, and that pyarrow is installed."""
    with path.open("rb") as file:
        head = file.read(len(MAGIC))
        size = file.seek(0, 2)
        file.seek(max(0, size - len(MAGIC)))
        tail = file.read()
    if head != MAGIC or size < 12:
        raise DataError(
            f"{name}: not a Parquet file (it must begin with {MAGIC.decode()}); check its name",
            code="not-parquet",
        )
    if tail != MAGIC:
        raise DataError(f"{name}: the Parquet file is truncated; download it again", code="truncated-file")
    if not find_spec("pyarrow"):
        raise DataError(
            f"{name}: reading Parquet needs pyarrow, which is not installed; run `pip install pyarrow`, "
            "or save the data as JSON lines",
            code="missing-package",
        )


def read_rows(source: DataFile) -> Iterator[tuple[int, bytes]]:
    """Yield the rows as JSON objects, numbered from 1."""
    with open_seekable(source.path, source.name, source.compression) as path:
        check(path, source.name)
        yield from read_table(path, source)


def read_table(path: Path, source: DataFile) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a Parquet file that is not compressed as a whole."""
    import pyarrow
    from pyarrow import parquet

    file_size = path.stat().st_size
    bytes_left = max_unpacked_size(file_size)
    number = 0
    options = {"buffer_size": 1 << 20, "pre_buffer": False}
    try:
        with parquet.ParquetFile(path, **options) as file:
            schema = file.schema_arrow
            check_names(schema.names, source.name)
            columns = source.select_columns(schema.names, source.name)
            media = media_flag(schema.names)
            check_sizes(file, columns, source.name)
            types = {column: schema.field(column).type for column in columns}
        is_nested = any(map(pyarrow.types.is_nested, types.values()))
        strings = [column for column, type_ in types.items() if pyarrow.types.is_string(type_)]
        with parquet.ParquetFile(path, **options, read_dictionary=strings) as file:
            batch_size = NESTED_BATCH if is_nested else FLAT_BATCH
            for batch in file.iter_batches(batch_size, columns=columns, use_threads=False):
                for index in range(batch.num_rows):
                    number += 1
                    values = {column: batch.column(column)[index].as_py() for column in columns}
                    row = to_json(values | media, source.locate(number))
                    bytes_left -= len(row)
                    if bytes_left < 0 or len(row) > MAX_ROW_BYTES:
                        raise too_large(source.locate(number), len(row), file_size)
                    yield number, row
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split())[:160]
        raise DataError(
            f"{source.name}: the Parquet file cannot be read after row {number} ({reason}); download "
            "it again",
            code="damaged-file",
        ) from None
    pyarrow.default_memory_pool().release_unused()
    if not number:
        raise DataError(f"{source.name}: the Parquet file has no rows", code="no-rows")


def check_names(names: list[str], source: str) -> None:
    """Raise DataError if two columns have the same name."""
    if name := find_duplicate(names):
        raise DataError(
            f"{source}: two columns are named {quote_name(name)} (got {format_keys(names)}); rename one",
            code="duplicate-column",
        )


def check_sizes(file: Any, columns: list[str], source: str) -> None:
    """Raise DataError if the metadata announces an implausible decompressed size."""
    for group in range(file.metadata.num_row_groups):
        row_group = file.metadata.row_group(group)
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            size = chunk.total_uncompressed_size
            packed = chunk.total_compressed_size
            if chunk.path_in_schema.split(".")[0] in columns and size > max_unpacked_size(packed):
                raise DataError(
                    f"{source}: {chunk.path_in_schema} decompresses to {size:,} bytes in row group "
                    f"{group + 1}, "
                    f"more than {MAX_RATIO} times its {packed:,}, as real data never does",
                    code="decompression-bomb",
                )


def too_large(location: str, row_bytes: int, file_size: int) -> DataError:
    """Return the error for a row that is too long, or for rows that exceed the plausible size of the file."""
    if row_bytes > MAX_ROW_BYTES:
        return DataError(f"{location}: the row is longer than {MAX_ROW_BYTES >> 20} MiB", code="row-too-long")
    return DataError(
        f"{location}: the rows so far have more than {MAX_RATIO} times the file's {file_size:,} bytes, "
        "as real data never does",
        code="decompression-bomb",
    )


def to_json(row: dict[str, Any], location: str) -> bytes:
    """Encode a row as JSON."""

    def decode(value: Any) -> str:
        if isinstance(value, bytes):
            return value.decode()
        raise TypeError(type(value).__name__)

    try:
        return json.dumps(row, ensure_ascii=False, default=decode).encode()
    except UnicodeError as error:
        reason = " ".join(str(error).split())[:80]
        raise DataError(
            f"{location}: not UTF-8 ({reason}); store text in this column", code="not-utf8"
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{location}: a value of type {error} is not JSON; store text in this column", code="not-json"
        ) from None


PARQUET = Format("parquet", (".parquet",), read_rows, unit="row", magic=MAGIC, check=check)
