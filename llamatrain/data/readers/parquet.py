"""Parquet as rows with names, some at a time and only the columns that are wanted; pyarrow reads it."""

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llamatrain.data.column_names import media_in, quoted_name, repeated, told, wanted
from llamatrain.data.readers.compressed import FREE, RATIO
from llamatrain.errors import DataError

ENDS = b"PAR1"
LONGEST = 64 << 20  # bytes of a row
FLAT, NESTED = 256, 16  # rows at once
WITHOUT = "takes pyarrow, which is not installed: pip install pyarrow; or save it as JSON lines"


def check(path: Path, name: str) -> None:
    """What can be seen without reading it."""
    with path.open("rb") as file:
        head, size = file.read(len(ENDS)), file.seek(0, 2)
        file.seek(max(0, size - len(ENDS)))
        if head != ENDS or size < 12:
            raise DataError(f"{name}: no Parquet file: it does not begin with {ENDS.decode()}")
        if file.read() != ENDS:
            raise DataError(f"{name}: a Parquet file that ends early: it was cut short; fetch it anew")
    if not find_spec("pyarrow"):
        raise DataError(f"{name}: Parquet {WITHOUT}")


def rows_of(path: Path, name: str, columns: Mapping[str, str]) -> Iterator[tuple[int, bytes]]:
    import pyarrow
    from pyarrow import parquet

    left, number = max(FREE, RATIO * path.stat().st_size), 0
    try:
        with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            names = file.schema_arrow.names
            check_names(names, name)
            some, media = wanted(names, columns, name), media_in(names)
            check_sizes(file, some, name)
            nested = any(pyarrow.types.is_nested(file.schema_arrow.field(each).type) for each in some)
            texts = [each for each in some if pyarrow.types.is_string(file.schema_arrow.field(each).type)]
        with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False, read_dictionary=texts) as file:
            for batch in file.iter_batches(NESTED if nested else FLAT, columns=some, use_threads=False):
                for at in range(batch.num_rows):
                    number += 1
                    row = as_json(
                        {each: batch.column(each)[at].as_py() for each in some} | media,
                        f"{name}, row {number}",
                    )
                    left -= len(row)
                    if left < 0 or len(row) > LONGEST:
                        raise DataError(f"{name}, row {number}: {much(len(row), path.stat().st_size)}")
                    yield number, row
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        why = " ".join(str(error).split())[:160]
        raise DataError(
            f"{name}: a Parquet file that cannot be read, behind row {number}: {why}; fetch it anew"
        ) from None
    pyarrow.default_memory_pool().release_unused()
    if not number:
        raise DataError(f"{name}: there is no row in it")


def check_names(names: list[str], name: str) -> None:
    if twice := repeated(names):
        raise DataError(f"{name}: two columns are named {quoted_name(twice)}; there are {told(names)}")


def check_sizes(file: Any, some: list[str], name: str) -> None:
    """As far as it says itself what it unpacks to."""
    for group in range(file.metadata.num_row_groups):
        part = file.metadata.row_group(group)
        for at in range(part.num_columns):
            column = part.column(at)
            size, packed = column.total_uncompressed_size, column.total_compressed_size
            if column.path_in_schema.split(".")[0] in some and size > max(FREE, RATIO * packed):
                raise DataError(
                    f"{name}: {column.path_in_schema} unpacks to {size:,} bytes in row group {group + 1}, over {RATIO} times "
                    f"its {packed:,}, as no data does"
                )


def much(row: int, size: int) -> str:
    if row > LONGEST:
        return f"is longer than {LONGEST >> 20} MiB"
    return f"the rows so far have more than {RATIO} times the file's {size:,} bytes, as no data does"


def as_json(row: dict[str, Any], place: str) -> bytes:
    def other(value: Any) -> str:
        if isinstance(value, bytes):
            return value.decode()
        raise TypeError(type(value).__name__)

    try:
        return json.dumps(row, ensure_ascii=False, default=other).encode()
    except UnicodeError as error:
        raise DataError(f"{place}: no UTF-8 text: {' '.join(str(error).split())[:80]}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{place}: holds what is no JSON ({error}); text is expected") from None
