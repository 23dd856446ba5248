"""idx files, and damaged ones."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from llamatrain.custom import read_idx
from llamatrain.errors import FileError
from tests.helpers.idx_files import idx_bytes

IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(8, "u1"), (9, "i1"), (11, "i2"), (12, "i4"), (13, "f4"), (14, "f8")]
)
def test_each_type(tmp_path: Path, kind: int, dtype: str) -> None:
    array = (IMAGES.astype(np.float64) * 3 - 20).astype(dtype)
    (tmp_path / "x").write_bytes(idx_bytes(array, kind))
    found = read_idx(tmp_path / "x")
    assert found.dtype == np.dtype(dtype) and found.flags.writeable
    np.testing.assert_array_equal(found, array)


WHOLE = idx_bytes(IMAGES)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "empty-file"),
        (b"\0\0", "not-idx"),
        (WHOLE[:12], "wrong-size"),
        (WHOLE[:-1], "wrong-size"),
        (WHOLE + b"\0", "wrong-size"),
        (b"\0\0\x08\x03" + b"\xff" * 12 + WHOLE[16:], "wrong-size"),
        (b"\0\0\x08\x03" + bytes(12) + WHOLE[16:], "wrong-size"),
        (b"\0\0\x07" + WHOLE[3:], "not-idx"),
        (b"\0\0\x08\x00" + WHOLE[4:], "not-idx"),
        (b"\0\0\x08\xff" + WHOLE[4:], "not-idx"),
        (b"PK\3\4" + WHOLE, "not-idx"),
        (gzip.compress(WHOLE), "not-idx"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, data: bytes, code: str) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(FileError) as error:
        read_idx(tmp_path / "x")
    assert error.value.code == code and str(tmp_path / "x") in str(error.value)
    assert (data[:2] != b"\x1f\x8b") or "gzip -d" in str(error.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileError, match=path.name):
            read_idx(path)
