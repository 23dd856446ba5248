"""GGUF files read: what was written comes back, and the time and memory that it takes."""

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from llamatrain.errors import FileError
from llamatrain.gguf import parser
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import TYPES, TensorInfo, type_by_name
from llamatrain.gguf.values import Kind, Value, numbers, string, strings, u32
from llamatrain.gguf.writer import create_gguf
from tests.helpers.test_data import material
from tests.helpers.tiny_gguf import every_kind, llama_metadata, llama_tensors, write_arrays


def test_types_are_those_of_the_gguf_package() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    assert {(kind.name, kind.number, (kind.block_size, kind.block_bytes)) for kind in TYPES.values()} == {
        (kind.name, int(kind), sizes) for kind, sizes in GGML_QUANT_SIZES.items()
    }
    assert type_by_name("Q4_K").row_bytes(512) == 288
    with pytest.raises(ValueError, match="300 elements"):
        type_by_name("Q4_K").row_bytes(300)


# ---- values ----------------------------------------------------------------


def test_each_kind_of_value_comes_back(tmp_path: Path) -> None:
    written = every_kind()
    metadata = open_gguf(write_arrays(tmp_path / "kinds.gguf", written, {})).metadata
    assert {key: (value.kind, bytes(value.raw)) for key, value in metadata.raw_values.items()} == {
        key: (value.kind, value.raw) for key, value in written.items()
    }
    assert (
        metadata["a.INT64"] == -(2**63) and metadata["a.UINT64"] == 2**64 - 1 and metadata["a.INT8"] == -128
    )
    assert metadata["a.float32"] == float(np.float32(0.1)) and metadata["a.float64"] == 0.1
    assert metadata["a.true"] is True and metadata["a.empty"] == ""
    assert metadata["a.text"].encode("utf-8", "surrogateescape") == "snö \U0001f600 \x00 ".encode() + b"\xff"
    np.testing.assert_array_equal(metadata["b.floats"], np.array([0.5, np.nan, np.inf], np.float32))
    assert metadata["b.bools"].dtype == bool and metadata["b.bools"].tolist() == [True, False, True]
    assert metadata["b.none"].size == 0
    assert metadata["b.words"] == ["", "word", "ü", "\udc80", "x" * 300]
    words, halves = metadata["b.nested"]
    assert words == ["a", "", "bc"] and halves.tolist() == [1, -2]


def test_a_value_of_another_kind_is_named(tmp_path: Path) -> None:
    gguf = open_gguf(
        write_arrays(tmp_path / "a.gguf", {"n": string("three"), "flag": Value(Kind.BOOL, b"\x01")}, {})
    )
    assert gguf.get_value("n", str) == "three" and gguf.get_value("m", int, 3) == 3
    with pytest.raises(FileError, match=r"a\.gguf: n must be of type int .got STRING"):
        gguf.get_value("n", int)
    with pytest.raises(FileError, match=r"flag must be of type int .got BOOL"):
        gguf.get_value("flag", int)
    with pytest.raises(FileError, match="the key m is missing"):
        gguf.get_value("m", int)


@pytest.mark.parametrize("seed", range(12))
def test_strings_are_passed_alike_in_leaps_and_in_steps(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros in the texts and empty texts look like lengths; long texts do not."""
    monkeypatch.setattr(parser, "MIN_LEAP", 8)
    monkeypatch.setattr(parser, "LEAP_BYTES", 1 << 10)
    rng = random.Random(seed)
    odd = ["", "\0" * 7, "\0" * 8, "\1" + "\0" * 7, "a" * 255, "b" * 256, "c" * 70000, "\0" * 300]
    share = rng.choice([0, 0.01, 0.3, 1])
    words = [
        rng.choice(odd[: rng.choice([4, 8])]) if rng.random() < share else "w" * rng.randrange(1, 20)
        for _ in range(900)
    ]
    metadata = open_gguf(
        write_arrays(tmp_path / "s.gguf", {"words": strings(words), "last": u32(seed)}, {})
    ).metadata
    assert metadata["last"] == seed and metadata["words"] == words


# ---- tensors ---------------------------------------------------------------


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    arrays = llama_tensors()
    gguf = open_gguf(write_arrays(tmp_path / "m.gguf", llama_metadata(), arrays))
    assert list(gguf.tensors) == list(arrays) and gguf.kind == "model"
    for name, array in arrays.items():
        tensor = gguf.tensors[name]
        assert tensor.shape == array.shape and tensor.offset % 32 == 0 and not tensor.raw.flags.owndata
        np.testing.assert_array_equal(tensor.raw.view("<f4"), array)


def test_rows_of_blocks_have_their_bytes_as_last_axis(tmp_path: Path) -> None:
    info = TensorInfo("w", type_by_name("Q4_K"), (2, 3, 512))
    assert info.elements == 3072 and info.nbytes == 6 * 288
    with create_gguf(tmp_path / "q.gguf", {}, [info]) as out:
        out.write("w", (bytes([i]) * 288 for i in range(6)))
    raw = open_gguf(tmp_path / "q.gguf").tensors["w"].raw
    assert raw.shape == (2, 3, 288) and (raw[1, 2] == 5).all()


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_alignment_is_the_files_own(tmp_path: Path, alignment: int) -> None:
    arrays = {"a": np.arange(3, dtype=np.float32), "b": np.arange(5, dtype=np.float32)}
    path = write_arrays(tmp_path / "a.gguf", {"general.alignment": u32(alignment)}, arrays)
    tensors = open_gguf(path).tensors
    assert all(tensor.offset % alignment == 0 for tensor in tensors.values())
    np.testing.assert_array_equal(tensors["b"].raw.view("<f4"), arrays["b"])


def test_version_2_is_read(tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "v2.gguf", llama_metadata(), llama_tensors())
    path.write_bytes(b"GGUF\2" + path.read_bytes()[5:])
    assert open_gguf(path).get_value("llama.block_count", int) == 1


# ---- what is no GGUF file --------------------------------------------------


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for name, reason in (
        ("", "folder"),
        ("pipe", "device or pipe"),
        ("empty", "empty"),
        ("none", "No such file"),
    ):
        with pytest.raises(FileError, match=reason):
            open_gguf(tmp_path / name)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"algg\1\0\0\0", "begins with b'algg'"),
        (b"GG", "begins with b'GG'"),
        (b"GGUF\0\0\0\3", "big-endian"),
        (b"GGUF\1\0\0\0", "version 1 is not supported; versions 2 and 3"),
        (b"GGUF\0\0\0\0", "version 0"),
        (b"GGUF\3\0", "4 bytes should follow, but the file has only 2 more"),
        (
            struct.pack("<4sIQQ", b"GGUF", 3, 2**63, 0),
            "24 bytes is too small for 9223372036854775808 tensors",
        ),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**63), "9223372036854775808 items"),
    ],
)
def test_a_head_that_cannot_be_read_is_said(tmp_path: Path, head: bytes, reason: str) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(head)
    with pytest.raises(FileError, match=reason) as error:
        open_gguf(path)
    assert str(error.value).startswith(f"{path}: the header, at byte ")


# ---- split models ----------------------------------------------------------


def write_split(folder: Path, count: int = 3) -> list[Path]:
    arrays = llama_tensors()
    names = list(arrays)
    paths = [folder / f"m-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    for i, path in enumerate(paths):
        head = {"split.no": u32(i), "split.count": u32(count), "split.tensors.count": u32(len(names))}
        write_arrays(
            path,
            {**(llama_metadata() if i == 0 else {}), **head},
            {name: arrays[name] for name in names[i::count]},
        )
    return paths


def test_a_split_model_opens_by_any_part(tmp_path: Path) -> None:
    arrays = llama_tensors()
    for path in write_split(tmp_path):
        gguf = open_gguf(path)
        assert gguf.metadata.keys() == llama_metadata().keys() and gguf.kind == "model"
        assert gguf.tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(gguf.tensors[name].raw.view("<f4"), array)


def test_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    first, second, third = write_split(tmp_path)
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(FileError, match=f"part 2 of 3 of the split model is missing: .*{second.name}"):
        open_gguf(first)
    second.write_bytes(third.read_bytes())
    with pytest.raises(FileError, match=f"{second.name}: split.no and split.count must identify part 2 of 3"):
        open_gguf(first)
    write_arrays(
        second, {"split.no": u32(1), "split.count": u32(3)}, {"output.weight": np.zeros(2, np.float32)}
    )
    with pytest.raises(
        FileError, match=r"m-00003-of-00003\.gguf: another part also has the tensor 'output\.weight'"
    ):
        open_gguf(first)
    second.write_bytes(kept)
    with pytest.raises(FileError, match="must be named"):
        open_gguf(first.rename(tmp_path / "renamed.gguf"))


def test_parts_that_lack_a_tensor_are_found(tmp_path: Path) -> None:
    first, second, _ = write_split(tmp_path)
    write_arrays(second, {"split.no": u32(1), "split.count": u32(3)}, {})
    with pytest.raises(FileError, match="have 8 tensors in total, but 12 are expected"):
        open_gguf(first)


# ---- kinds -----------------------------------------------------------------


def test_kinds(tmp_path: Path) -> None:
    some = {"w": np.zeros(4, np.float32)}
    llama = {"general.architecture": string("llama")}
    for kind, metadata, arrays in (
        ("model", llama, some),
        ("adapter", {**llama, "general.type": string("adapter")}, some),
        ("checkpoint", {**llama, "training.type": string("train_model")}, some),
        ("vocabulary", {**llama, "tokenizer.ggml.model": string("gpt2")}, {}),
        ("other", {**llama, "general.type": string("mmproj")}, some),
        ("other", llama, {}),
        ("other", {}, some),
    ):
        assert open_gguf(write_arrays(tmp_path / "k.gguf", metadata, arrays)).kind == kind


# ---- time and memory -------------------------------------------------------


def test_a_large_vocabulary_opens_fast_and_small() -> None:
    path = material("vocab/ggml-vocab-llama-bpe.gguf")
    times = []
    for _ in range(5):
        start = time.process_time()
        assert open_gguf(path).get_value("llama.embedding_length", int) == 4096
        times.append(time.process_time() - start)
    assert min(times) < 0.05
    tracemalloc.start()
    gguf = open_gguf(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.2 * path.stat().st_size  # one copy: what is written to the file later changes nothing
    assert (
        len(gguf.metadata["tokenizer.ggml.tokens"]) == 128256
        and len(gguf.metadata["tokenizer.ggml.merges"]) == 280147
    )


def test_numbers_of_an_array_are_copied_once(tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "n.gguf", {"n": numbers(Kind.FLOAT32, np.zeros(1 << 20))}, {})
    metadata = open_gguf(path).metadata
    tracemalloc.start()
    array = metadata["n"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert array.size == 1 << 20 and peak < 2**19
