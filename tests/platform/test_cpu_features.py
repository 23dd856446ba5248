"""Processor features as Linux, macOS and Windows report them."""

import ctypes
import sys
from types import SimpleNamespace

import pytest

from llamatrain.platform import cpu_features as features
from llamatrain.platform.cpu_features import AARCH64, X86_64


@pytest.mark.parametrize(
    ("machine", "name"),
    [("x86_64", X86_64), ("AMD64", X86_64), ("aarch64", AARCH64), ("arm64", AARCH64), ("riscv64", "riscv64")],
)
def test_architecture_has_one_name_on_all_systems(
    machine: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(sys, "platform", "linux")
    assert features.architecture() == name


@pytest.mark.parametrize(
    ("compiler", "name"), [("[MSC v.1944 64 bit (AMD64)]", X86_64), ("[MSC v.1944 64 bit (ARM64)]", AARCH64)]
)
def test_windows_is_asked_for_the_interpreter(
    compiler: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python for x86-64 runs on AArch64, too, where the machine is ARM64."""
    monkeypatch.setattr("platform.machine", lambda: "ARM64")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "version", f"3.13.1 {compiler}")
    assert features.architecture() == name


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Linux with a /proc/cpuinfo that has fields of both architectures."""
    fields = {"processor": "0", "flags": "avx512_bf16 i8mm", "Features": "fp asimd bf16"}
    monkeypatch.setattr(features, "read_cpuinfo", lambda: fields)
    monkeypatch.setattr(sys, "platform", "linux")
    return monkeypatch


def test_linux_reads_the_field_of_its_architecture(linux: pytest.MonkeyPatch) -> None:
    linux.setattr("platform.machine", lambda: "x86_64")
    assert features.read_features() == {"avx512bf16", "i8mm"}
    linux.setattr("platform.machine", lambda: "riscv64")
    assert features.read_features() == frozenset()


def test_the_auxiliary_vector_comes_before_proc(linux: pytest.MonkeyPatch) -> None:
    """An emulator shows the /proc/cpuinfo of another processor."""
    linux.setattr("platform.machine", lambda: "aarch64")
    linux.setattr(features, "_read_auxiliary_vector", lambda: frozenset({"asimd", "asimddp"}))
    assert features.read_features() == {"asimd", "asimddp"}
    linux.setattr(features, "_read_auxiliary_vector", frozenset)
    assert features.read_features() == {"fp", "asimd", "bf16"}


def test_bits_of_the_auxiliary_vector_have_names() -> None:
    assert features.decode_hwcaps(0, 0) == frozenset()
    assert features.decode_hwcaps(1 << 1 | 1 << 20, 0) == {"asimd", "asimddp"}
    assert features.decode_hwcaps(1 << 13, 1 << 13 | 1 << 14) == {"i8mm", "bf16"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has an auxiliary vector")
def test_the_auxiliary_vector_can_be_read() -> None:
    assert isinstance(features._read_auxiliary_vector(), frozenset)


def system_with(values: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace sysctlbyname by a table."""

    def sysctlbyname(name: bytes, value: object, size: object, *_: object) -> int:
        if (found := values.get(name.decode())) is None:
            return -1
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int32))[0] = found  # type: ignore[arg-type]
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(sysctlbyname=sysctlbyname))
    monkeypatch.setattr(sys, "platform", "darwin")


def test_macos_names_the_units_of_apple_silicon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    system_with({"hw.optional.arm.FEAT_DotProd": 1, "hw.optional.arm.FEAT_I8MM": 0}, monkeypatch)
    assert features.read_features() == {"asimd", "asimddp"}
    more = dict.fromkeys(features.DARWIN_ARM.values(), 1)
    system_with(more, monkeypatch)
    assert features.read_features() == {"asimd", *features.DARWIN_ARM}


def test_macos_on_x86_is_a_v3_and_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    every = dict.fromkeys(features.DARWIN_X86.values(), 1) | {"hw.optional.avx512f": 1}
    system_with(every, monkeypatch)
    assert features.read_features() == {*features.V3_FEATURES}
    system_with({"hw.optional.fma": 1}, monkeypatch)
    assert features.read_features() == {"fma"}


@pytest.mark.parametrize(
    ("version", "numbers", "found"),
    [
        ("(AMD64)", {40, 41}, {*features.V3_FEATURES, *features.V4_FEATURES}),
        ("(AMD64)", {40}, {*features.V3_FEATURES}),
        ("(AMD64)", {41, 43}, set()),
        ("(ARM64)", {43}, {"asimd", "asimddp"}),
        ("(ARM64)", {43, 66, 67, 68}, {"asimd", *features.WINDOWS_ARM}),
    ],
)
def test_windows_is_asked_by_number(
    version: str, numbers: set[int], found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = SimpleNamespace(IsProcessorFeaturePresent=lambda number: number in numbers)
    monkeypatch.setattr(ctypes, "WinDLL", lambda name: kernel, raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "version", version)
    assert features.read_features() == found
