"""GGUF files written: whole or not at all, and read by others."""

import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from llamatrain.errors import FileError
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import string, u32
from llamatrain.gguf.writer import create_gguf
from llamatrain.io.atomic_write import AtomicFile
from tests.helpers.test_data import material
from tests.helpers.tiny_gguf import every_kind, llama_metadata, llama_tensors, write_arrays

INFOS = [TensorInfo("a", type_by_name("F32"), (2, 8)), TensorInfo("b", type_by_name("F16"), (4,))]


def copy(source: Path, target: Path) -> Path:
    base = open_gguf(source)
    with create_gguf(target, base.metadata.raw_values, base.tensors.values()) as out:
        for name, tensor in base.tensors.items():
            out.write(name, tensor.raw)
    return target


@pytest.mark.parametrize(
    "name", ["ancestors/model.gguf", "ancestors/train-checkpoint.gguf", "vocab/ggml-vocab-llama-spm.gguf"]
)
def test_a_file_of_others_is_carried_over_byte_by_byte(tmp_path: Path, name: str) -> None:
    source = material(name)
    copied, original = copy(source, tmp_path / "copy.gguf").read_bytes(), source.read_bytes()
    assert copied[: len(original)] == original and not any(copied[len(original) :])
    assert len(copied) - len(original) < 32  # the last padding, which a file may lack


def test_a_copy_is_the_same(tmp_path: Path) -> None:
    source = write_arrays(
        tmp_path / "a.gguf", {**every_kind(), "general.alignment": u32(64)}, llama_tensors()
    )
    assert copy(source, tmp_path / "b.gguf").read_bytes() == source.read_bytes()


def test_data_may_come_in_chunks_and_strides(tmp_path: Path) -> None:
    array = np.arange(16, dtype=np.float32).reshape(8, 2)
    with create_gguf(tmp_path / "c.gguf", {}, INFOS) as out:
        out.write("a", array.T)
        out.write("b", iter([b"\1\2\3", np.zeros(5, np.uint8)]))
    tensors = open_gguf(tmp_path / "c.gguf").tensors
    np.testing.assert_array_equal(tensors["a"].raw.view("<f4"), array.T)
    assert tensors["b"].raw.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


# ---- whole or not at all ---------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, FileError])
def test_an_error_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    with pytest.raises(error), create_gguf(path, llama_metadata(), INFOS) as out:
        out.write("a", np.zeros((2, 8), np.float32))
        raise error
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([("b", 8)], "b is written where a is next"),
        ([("a", 60)], "a has 64 bytes, and 60 were written"),
        ([("a", 64)], "1 tensors were not written, b is next"),
    ],
)
def test_tensors_come_as_they_were_said(tmp_path: Path, given: list[tuple[str, int]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason), create_gguf(tmp_path / "m.gguf", {}, INFOS) as out:
        for name, size in given:
            out.write(name, [bytes(size)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("infos", "reason"),
    [
        ([INFOS[0]] * 2, "two tensors are called 'a'"),
        ([TensorInfo("n" * 64, type_by_name("F32"), (1,))], "63 bytes"),
    ],
)
def test_names_that_llama_cpp_would_refuse_are_refused(
    tmp_path: Path, infos: list[TensorInfo], reason: str
) -> None:
    with pytest.raises(FileError, match=reason), create_gguf(tmp_path / "m.gguf", {}, infos):
        pass
    assert not list(tmp_path.iterdir())


@contextmanager
def little_room():
    """No file may grow beyond 10 kB: not for longer than needed, for the tests' own output may go to one."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [9_999, 30_000])
def test_a_full_disk_is_said(tmp_path: Path, size: int) -> None:
    """The small file fails at the end, when what is left in the buffer is written."""
    path = tmp_path / "m.gguf"
    info = TensorInfo("a", type_by_name("I8"), (size,))
    told = pytest.raises(FileError, match=rf"^{path}: cannot be written: File too large$")
    with told, little_room(), create_gguf(path, {}, [info]) as out:
        out.write("a", [bytes(5000), bytes(size - 5000)])
    assert not list(tmp_path.iterdir())


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place, reason in (
        ("none/m.gguf", "No such file"),
        ("", "a device or a pipe"),
        ("pipe", "a device or a pipe"),
    ):
        with pytest.raises(FileError, match=reason) as error, create_gguf(tmp_path / place, {}, []):
            pass
        assert str(error.value).startswith(f"{tmp_path / place}: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(FileError, match="Permission denied"), create_gguf(tmp_path / "m.gguf", {}, []):
        pass


@pytest.mark.parametrize("place", ["/dev/stdout", "/dev/nothing", "/dev/shm/../stderr"])
def test_names_of_devices_are_not_replaced(place: str) -> None:
    with pytest.raises(FileError, match="choose another path for the file"), AtomicFile(place):
        raise KeyError  # before it would be


def test_a_link_is_replaced_and_what_it_points_to_is_not(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"mine")
    link = tmp_path / "link"
    for target in ("there", "nowhere", ".", "link"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with AtomicFile(link) as file:
            file.write(b"new")
        assert (
            not link.is_symlink()
            and link.read_bytes() == b"new"
            and (tmp_path / "there").read_bytes() == b"mine"
        )
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_cannot_be_read_again_does_not_take_its_name(tmp_path: Path) -> None:
    place = tmp_path / "m.gguf"
    place.write_bytes(b"before")
    with (
        pytest.raises(
            FileError, match=f"^{place}: not written, because it could not be read back: the header"
        ),
        AtomicFile(place, open_gguf) as file,
    ):
        file.write(b"no GGUF")
    assert place.read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1


# ---- other readers ---------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_gguf_package_reads_what_we_write(tmp_path: Path) -> None:
    from gguf import GGUFReader

    metadata, arrays = (
        {**llama_metadata(), "general.alignment": u32(64), "general.name": string("tiny")},
        llama_tensors(),
    )
    path = write_arrays(tmp_path / "m.gguf", metadata, arrays)
    theirs, ours = GGUFReader(path), open_gguf(path)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(fields) == list(metadata)
    for key, field in fields.items():
        value = ours.metadata[key]
        assert field.contents() == (value.tolist() if isinstance(value, np.ndarray) else value), key
    for tensor, (name, array) in zip(theirs.tensors, arrays.items(), strict=True):
        assert tensor.name == name and tensor.data_offset == ours.tensors[name].offset
        np.testing.assert_array_equal(tensor.data, array)


LLAMA_CPP = """
import json, sys, urllib.request
import xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.n_ctx, parameters.warmup = sys.argv[1], 64, False
parameters.cpuparams.n_threads = 1
server = xllamacpp.Server(parameters)
answer = server.handle_completions({"prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True})
models = json.load(urllib.request.urlopen(server.listening_address + "/v1/models"))
print(json.dumps([answer["usage"], models["data"][0]["meta"]]))
"""


def test_llama_cpp_opens_what_we_write_and_generates(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="xllamacpp, a llama.cpp for Python, is not installed")
    import json

    arrays = llama_tensors()
    path = write_arrays(tmp_path / "m.gguf", llama_metadata(), arrays)
    command = [sys.executable, "-c", LLAMA_CPP, str(path)]
    usage, meta = json.loads(
        subprocess.run(command, check=True, capture_output=True, timeout=60).stdout.splitlines()[-1]
    )
    assert usage["completion_tokens"] == 4
    assert meta["n_vocab"] == 259 and meta["n_params"] == sum(array.size for array in arrays.values())
