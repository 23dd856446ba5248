"""Libraries for other platforms than this one: nothing of them runs here, but their headers can be read."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamatrain.compiler import prebuilt
from llamatrain.compiler.cross_link import MACOS_VERSION, PAGE_SIZES, PE_IMPORTS, cross_link, find_zig
from llamatrain.compiler.inventory import list_compilables
from llamatrain.platform.systems import LINUX, MACOS, PLATFORMS, WINDOWS, Platform
from tests.helpers.binary_files import Binary, read_binary
from tests.helpers.cli import ROOT

NAMES = ("silu_flat", "word_keys", "run_table", "pack_tiles")
LIBC = {"exp", "expf", "log", "logf", "memcpy", "memmove", "memset", "sched_yield"}
OF_MACOS = {"bzero", "__bzero", "dyld_stub_binder"}  # for zeros, and what the linker of Zig always asks for
LINKER_SYMBOLS = {"_mh_dylib_header", "__dso_handle", "_dso_handle"}
EMIT = """
import sys
from pathlib import Path
from llamatrain.compiler.emit import emit_object
from llamatrain.compiler.inventory import list_compilables
for each in list_compilables()[:: int(sys.argv[2])]:
    if each.name in {names}:
        Path(sys.argv[1], each.symbol).write_bytes(emit_object(each))
"""
MAGIC = {
    "linux-x86-64": b"\x7fELF",
    "linux-aarch64": b"\x7fELF",
    "macos-arm64": b"\xcf\xfa\xed\xfe\x0c\x00\x00\x01",
    "macos-x86-64": b"\xcf\xfa\xed\xfe\x07\x00\x00\x01",
    "windows-x86-64": b"\x64\x86",
    "windows-arm64": b"\x64\xaa",
}
each_platform = pytest.mark.parametrize("target", PLATFORMS.values(), ids=lambda each: each.name)
needs_zig = pytest.mark.skipif(not find_zig(), reason="Zig is not installed (pip install ziglang)")


def emitted(target: Platform, folder: Path, seed: str = "1", order: int = 1) -> dict[str, bytes]:
    """Compile a few kernels for a platform, backwards if the order is -1, and return their objects by symbol."""
    folder.mkdir()
    environment = {
        **os.environ,
        "LLAMATRAIN_PLATFORM": target.name,
        "LLAMATRAIN_CLASS": target.classes[0],
        "PYTHONHASHSEED": seed,
    }
    words = [sys.executable, "-c", EMIT.format(names=NAMES), str(folder), str(order)]
    subprocess.run(words, env=environment, cwd=ROOT, check=True)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The objects of each platform."""
    place = tmp_path_factory.mktemp("objects")
    return {name: emitted(target, place / name) for name, target in PLATFORMS.items()}


def check_headers(target: Platform, found: Binary) -> None:
    """Check what holds for the libraries of a platform, whatever kernels are in them."""
    assert found.architecture == target.architecture
    assert not found.text_relocations and not found.executable_stack
    if target.system == LINUX:
        assert found.kind == "elf" and found.undefined <= LIBC and not found.libraries
        assert found.alignment == PAGE_SIZES[target.architecture]
    elif target.system == MACOS:
        assert found.kind == "mach-o" and found.undefined <= LIBC | OF_MACOS
        assert found.libraries == {"/usr/lib/libSystem.B.dylib"}
        assert found.minimum_system == MACOS_VERSION
        assert found.signed or target.architecture != "aarch64"
    else:
        assert target.system == WINDOWS and found.kind == "pe" and not found.minimum_system > "6.2"
        assert found.undefined <= {name for names in PE_IMPORTS.values() for name in names}
        assert found.libraries <= {f"{name}.dll" for name in PE_IMPORTS}


@each_platform
def test_objects_are_of_the_platform(target: Platform, objects: dict[str, dict[str, bytes]]) -> None:
    assert len(objects[target.name]) == len(NAMES)
    for code in objects[target.name].values():
        assert code.startswith(MAGIC[target.name])


def test_objects_are_the_same_in_every_process(objects: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    for name in ("macos-arm64", "windows-x86-64"):
        assert emitted(PLATFORMS[name], tmp_path / name, "2", -1) == objects[name]


@needs_zig
@each_platform
def test_a_library_has_its_kernels_and_needs_what_every_system_has(
    target: Platform, objects: dict[str, dict[str, bytes]]
) -> None:
    here = objects[target.name]
    first, second = (cross_link([*here.values()], [*here], target, target.classes[0]) for _ in range(2))
    assert first == second
    found = read_binary(first)
    check_headers(target, found)
    assert found.exported - LINKER_SYMBOLS == here.keys()
    assert b"/tmp" not in first and str(ROOT).encode() not in first


@needs_zig
def test_large_stack_frames_of_windows_are_touched_page_by_page() -> None:
    """The function for that is in the library."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    text = """
    declare void @memset(ptr, i32, i64)
    define void @large() {
        %space = alloca [100000 x i8]
        call void @memset(ptr %space, i32 1, i64 100000)
        ret void
    }"""
    for name in ("windows-x86-64", "windows-arm64"):
        target = PLATFORMS[name]
        machine = llvm.Target.from_triple(target.triple).create_target_machine()
        module = llvm.parse_assembly(text)
        module.triple, module.data_layout = target.triple, str(machine.target_data)
        code = bytes(machine.emit_object(module))
        assert b"__chkstk" in code
        found = read_binary(cross_link([code], ["large"], target, "large"))
        assert found.exported == {"large"} and found.undefined == {"memset"}


@pytest.mark.slow
@needs_zig
@each_platform
def test_every_kernel_of_every_class_is_in_the_library_of_each_platform(
    target: Platform, tmp_path: Path
) -> None:
    words = [sys.executable, "scripts/build_kernels.py", "--platform", target.name, "--folder", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    folder = tmp_path / target.name
    manifest = json.loads((folder / prebuilt.MANIFEST).read_text())
    symbols = {each.symbol for each in list_compilables()}
    assert len(manifest["kernels"]) == len(symbols) and manifest["platform"] == target.name
    assert manifest["libraries"].keys() == {*target.classes}
    for name, digest in manifest["libraries"].items():
        code = (folder / prebuilt.library_filename(name, target.system)).read_bytes()
        assert hashlib.sha256(code).hexdigest() == digest
        found = read_binary(code)
        check_headers(target, found)
        assert found.exported - LINKER_SYMBOLS == symbols
