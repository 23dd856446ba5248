"""Importance matrices: what is written, what llama.cpp's older files hold, and what is refused."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from llamatrain.errors import FileError
from llamatrain.gguf.imatrix import (
    InputSums,
    fit_importances,
    importance_of_rows,
    read_imatrix,
    write_imatrix,
)
from llamatrain.gguf.types import TensorInfo, type_by_name

SUMS = {
    "output.weight": InputSums(np.array([[2.0, 4.0, 6.0]]), np.array([2.0])),
    "blk.0.ffn_up_exps.weight": InputSums(np.array([[3.0, 6.0], [0.0, 0.0]]), np.array([3.0, 0.0])),
}
F32 = type_by_name("F32")


def written(path: Path) -> Path:
    write_imatrix(path, SUMS, ["a.txt", "b.txt"], 5, 128)
    return path


def test_the_file_is_as_llama_cpp_writes_it(tmp_path: Path) -> None:
    file = gguf.GGUFReader(written(tmp_path / "i.gguf"))
    assert {
        name: field.contents() for name, field in file.fields.items() if "." in name and "GGUF" not in name
    } == {
        "general.type": "imatrix",
        "imatrix.datasets": ["a.txt", "b.txt"],
        "imatrix.chunk_count": 5,
        "imatrix.chunk_size": 128,
    }
    found = {tensor.name: (tensor.tensor_type.name, tensor.data.tolist()) for tensor in file.tensors}
    assert found == {
        "blk.0.ffn_up_exps.weight.in_sum2": ("F32", [[3.0, 6.0], [0.0, 0.0]]),
        "blk.0.ffn_up_exps.weight.counts": ("F32", [[3.0], [0.0]]),
        "output.weight.in_sum2": ("F32", [[2.0, 4.0, 6.0]]),
        "output.weight.counts": ("F32", [[2.0]]),
    }


def test_reading_gives_means(tmp_path: Path) -> None:
    found = read_imatrix(written(tmp_path / "i.gguf"))
    assert_array_equal(found["output.weight"], [[1.0, 2.0, 3.0]])
    # an expert that no token chose
    assert_array_equal(found["blk.0.ffn_up_exps.weight"], [[1.0, 2.0], [1.0, 1.0]])


def old_file(path: Path, entries: dict[str, tuple[int, list[float]]]) -> Path:
    """As llama-imatrix wrote it before GGUF: an entry's values are means times its number of calls."""
    raw = struct.pack("<i", len(entries))
    for name, (calls, values) in entries.items():
        raw += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values))
        raw += np.array(values, "<f4").tobytes()
    path.write_bytes(raw + struct.pack("<i", 7) + struct.pack("<i", 5) + b"a.txt")
    return path


def test_older_files(tmp_path: Path) -> None:
    path = old_file(
        tmp_path / "i.dat", {"output.weight": (2, [2.0, 4.0]), "blk.0.x": (1, [1.0, 2.0, 3.0, 4.0])}
    )
    found = read_imatrix(path)
    assert_array_equal(found["output.weight"], [[1.0, 2.0]])
    stack = TensorInfo("blk.0.x", F32, (2, 8, 2))
    assert_array_equal(fit_importances(path, found, [stack])["blk.0.x"], [[1.0, 2.0], [3.0, 4.0]])


def test_rows_of_a_stack_have_the_importances_of_their_matrix() -> None:
    stack, importance = TensorInfo("x", F32, (2, 3, 2)), np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    assert_array_equal(importance_of_rows(importance, stack, 1, 5), [[1, 2], [1, 2], [3, 4], [3, 4]])
    assert_array_equal(importance_of_rows(importance[:1], stack, 1, 5), [1, 2])


def test_other_models_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "i.gguf")
    found = read_imatrix(path)
    with pytest.raises(
        FileError, match=r"output.weight.* has 3 importances, but that weight of the model needs 4"
    ):
        fit_importances(path, found, [TensorInfo("output.weight", F32, (9, 4))])
    with pytest.raises(FileError, match=r"none of its 2 weights, such as .*, is one of the model"):
        fit_importances(path, found, [TensorInfo("blk.0.attn_q.weight", F32, (9, 4))])


def gguf_file(path: Path, tensors: dict[str, np.ndarray], kind: str = "imatrix") -> Path:
    out = gguf.GGUFWriter(path, "llama")
    out.add_type(kind)
    for name, array in tensors.items():
        out.add_tensor(name, array)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


SQUARES, COUNT = np.ones((1, 4), np.float32), np.ones((1, 1), np.float32)


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({}, "the file has no weights"),
        ({"x.in_sum2": SQUARES}, "x.counts.* is missing"),
        (
            {"x.in_sum2": SQUARES, "x.counts": np.ones((2, 1), np.float32)},
            "must be F32, with a count for each",
        ),
        ({"x.in_sum2": SQUARES.astype(np.float16), "x.counts": COUNT}, "must be F32"),
        ({"x.in_sum2": -SQUARES, "x.counts": COUNT}, "no sums of squares"),
        ({"x.in_sum2": SQUARES * np.float32(np.nan), "x.counts": COUNT}, "no sums of squares"),
        ({"x.in_sum2": SQUARES * np.float32(np.inf), "x.counts": COUNT}, "no sums of squares"),
        ({"x.in_sum2": np.ones((1, 1, 4), np.float32)[None], "x.counts": COUNT}, "must be F32"),
    ],
)
def test_damaged_files(tensors: dict[str, np.ndarray], told: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=told):
        read_imatrix(gguf_file(tmp_path / "i.gguf", tensors))


def test_files_of_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(
        FileError, match=r"an importance matrix of llama.cpp is needed \(got a file of kind adapter\)"
    ):
        read_imatrix(gguf_file(tmp_path / "i.gguf", {"x.lora_a": SQUARES}, "adapter"))
    with pytest.raises(FileError, match=r"No such file|does not exist|not found"):
        read_imatrix(tmp_path / "none.gguf")
    with pytest.raises(FileError):
        read_imatrix(tmp_path)


def test_damaged_older_files(tmp_path: Path) -> None:
    whole = old_file(tmp_path / "i.dat", {"output.weight": (2, [2.0, 4.0])}).read_bytes()
    needed = len(whole) - 13
    for length in range(needed):
        (tmp_path / "cut.dat").write_bytes(whole[:length])
        with pytest.raises(FileError, match=r"importance matrix of llama.cpp is needed"):
            read_imatrix(tmp_path / "cut.dat")
    (tmp_path / "cut.dat").write_bytes(whole.replace(struct.pack("<f", 4), b"\1\0\x80\x7f"))
    with pytest.raises(FileError, match="no sums of squares"):  # a signaling NaN
        read_imatrix(tmp_path / "cut.dat")
    for number in (-1, 1 << 30):
        (tmp_path / "cut.dat").write_bytes(struct.pack("<ii", 1, number) + whole[8:])
        with pytest.raises(FileError, match="ends too early"):
            read_imatrix(tmp_path / "cut.dat")
