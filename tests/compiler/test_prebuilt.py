"""Libraries that came with the package: built whole, and used as they are."""

import hashlib
import json
import shutil
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from llamatrain.compiler import cache as finding
from llamatrain.compiler import loader, prebuilt
from llamatrain.compiler.declare import Compilable
from llamatrain.compiler.store import MAGIC
from llamatrain.platform import cpu
from tests.helpers import few_kernels
from tests.helpers.cli import ROOT, environment
from tests.helpers.few_kernels import FEW, NAME, closed, flipped, made

sys.path.insert(0, str(ROOT / "scripts"))
import build_kernels

few, folder = few_kernels.few, few_kernels.folder  # fixtures
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libraries are linked and loaded on Linux")

OF_LIBC = {"exp", "expf", "log", "logf", "memcpy", "memmove", "memset", "sched_yield"}

USE = """
import hashlib, sys
import numpy as np
from llamatrain.data.tokenizer.bpe_merge import word_keys
from llamatrain.kernels.cpu.gates import silu_flat
from llamatrain.compiler import parallel, prebuilt; from llamatrain.platform import terminal
from llamatrain.compiler.cache import code_cache
from llamatrain.compiler.declare import SharedKernel
from llamatrain.compiler.thread_pool import CallTable
parallel.list_compilables = list  # what is not needed here is not compiled with it
if not {bricks}:
    SharedKernel.instances.clear()  # they are called by none of these, and take their time
x, keys = np.linspace(-20, 20, 1003, dtype=np.float32), np.zeros(2, np.int64)
y = np.zeros_like(x)
with terminal.show_log():
    CallTable([silu_flat.call(x, y, 0, 0, items=1003, block=64)], 2)()
    word_keys(np.frombuffer(b"abcdefgh", np.uint8), np.array([3, 8]), keys)
assert np.allclose(y, x / (1 + np.exp(-x)), atol=1e-5)
print(hashlib.sha256(y.tobytes() + keys.tobytes()).hexdigest())
print("compiler" if sys.modules.get("numba") or sys.modules.get("llvmlite") else "none")
print("shipped" if code_cache.library is not prebuilt.find_nothing else "compiled")
"""


# ---- as they are -----------------------------------------------------------


def used(folder: Path, cache: Path, bricks: bool = False) -> tuple[list[str], str]:
    env = environment(**{prebuilt.LIBRARIES_VARIABLE: str(folder), "LLAMATRAIN_CACHE": str(cache)})
    done = subprocess.run(
        [sys.executable, "-c", USE.format(bricks=bricks)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


def test_what_was_shipped_runs_without_compiler_and_cache_and_gives_the_bits_of_what_is_compiled(
    few: Path, tmp_path: Path
) -> None:
    (bits, compiler, whence), err = used(few, tmp_path / "unused", bricks=True)
    assert (compiler, whence, err) == ("none", "shipped", "") and not (tmp_path / "unused").exists()
    (others, compiler, whence), err = used(tmp_path / "nothing here", tmp_path / "cache")
    assert (compiler, whence) == ("none", "compiled") and err.count(
        "for this machine, once"
    ) == 1  # by others, for this process
    assert bits == others
    (others, compiler, whence), err = used(tmp_path / "nothing here", tmp_path / "cache")
    assert (others, compiler, whence, err) == (bits, "none", "compiled", "")  # as it was kept


def test_building_twice_gives_the_same_bytes(few: Path, tmp_path: Path) -> None:
    again = made(tmp_path / "again", "2")
    assert sorted(path.name for path in few.iterdir()) == sorted([f"{NAME}.so", "manifest.json"])
    for path in few.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_the_manifest_tells_what_is_in_it(few: Path) -> None:
    manifest = json.loads((few / prebuilt.MANIFEST).read_text())
    digest = hashlib.sha256((few / f"{NAME}.so").read_bytes()).hexdigest()
    assert (
        manifest["kernels"] == FEW
        and manifest["libraries"] == {NAME: digest}
        and manifest["sources"] == prebuilt.hash_sources()
    )
    find = loader.load_code((few / f"{NAME}.so").read_bytes())
    assert all(find(each.replace(":", "_").replace(".", "_")) for each in FEW)
    assert not find("llamatrain_of_no_such_name")


# ---- all of them -----------------------------------------------------------


def decorated() -> set[str]:
    """What the sources declare, by their text."""
    found = set[str]()
    for path in sorted(Path(prebuilt.PACKAGE).rglob("*.py")):
        module = ".".join(path.relative_to(prebuilt.PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        lines = path.read_text().splitlines()
        for line, after in pairwise(lines):
            if line in ("@KernelEntry", "@SharedKernel", "@Routine", "@Function"):
                found.add(f"{module}:{after.removeprefix('def ').partition('(')[0]}")
    return found


def test_every_kernel_that_is_declared_is_built() -> None:
    declared = build_kernels.list_compilables()
    assert {each.qualified_name for each in declared} == decorated() and len(declared) >= 65
    assert len({each.symbol for each in declared}) == len(declared)


def test_each_object_is_found_in_the_library_by_its_symbol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way of a build, with a word in place of each kernel: compiling them takes a minute."""
    import llvmlite.binding as llvm

    from llamatrain.compiler import emit

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()

    def word(declared: Compilable) -> bytes:
        return bytes(
            machine.emit_object(llvm.parse_assembly(f"define void @{declared.symbol}() {{ ret void }}"))
        )

    monkeypatch.setattr(emit, "emit_object", word)
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["build_kernels", "--here", NAME])
    build_kernels.main()
    build_kernels.write_manifest([NAME])
    closed(tmp_path)
    monkeypatch.setattr(
        prebuilt, "load_code", lambda code, exported: loader.load_code(code)
    )  # else they are found by name from now on
    find, trouble = prebuilt.open_library()
    assert not trouble and all(find(each.symbol) for each in build_kernels.list_compilables())
    kernels = json.loads((tmp_path / prebuilt.MANIFEST).read_text())["kernels"]
    assert set(kernels) == decorated() and len(kernels) == len(build_kernels.list_compilables())


BUILT = sorted((prebuilt.PACKAGE / "machine" / "libraries").glob("*.so"))


@pytest.mark.parametrize("path", BUILT, ids=lambda path: path.stem)
def test_every_kernel_of_a_class_that_was_built_is_there(path: Path) -> None:
    manifest = json.loads((path.parent / prebuilt.MANIFEST).read_text())
    if manifest["sources"] != prebuilt.hash_sources():
        pytest.skip("these were built of other sources")
    there, needed = symbols(path.read_bytes())
    assert there == {each.symbol for each in build_kernels.list_compilables()} and needed <= OF_LIBC
    assert set(manifest["kernels"]) == decorated() and path.stem in manifest["libraries"]


def test_sources_are_all_that_ends_in_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of any makes what was built stale."""
    shutil.copytree(
        prebuilt.PACKAGE, tmp_path / "llamatrain", ignore=shutil.ignore_patterns("__pycache__", "libraries")
    )
    monkeypatch.setattr(prebuilt, "PACKAGE", tmp_path / "llamatrain")
    before = prebuilt.hash_sources.__wrapped__()
    assert before == prebuilt.hash_sources()
    homes = {each.rpartition(":")[0] for each in decorated()} | {
        "llamatrain.compiler.emit",
        "llamatrain.compiler.vectors",
    }
    for home in sorted(homes):
        path = tmp_path.joinpath(*home.split(".")).with_suffix(".py")
        text = path.read_text()
        path.write_text(text + "# edited\n")
        assert prebuilt.hash_sources.__wrapped__() != before, home
        path.write_text(text)


# ---- what they need from outside -------------------------------------------


def symbols(code: bytes) -> tuple[set[str], set[str]]:
    """Of an ELF file's dynamic symbols: those that it has, and those that it needs."""
    (at,), (size, count) = struct.unpack_from("<Q", code, 0x28), struct.unpack_from("<HH", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, at + number * size) for number in range(count)]
    (names_at, length, link), *_ = [
        (each[4], each[5], each[6]) for each in sections if each[1] == 11
    ]  # SHT_DYNSYM
    text = sections[link][4]
    there, needed = set[str](), set[str]()
    for place in range(names_at + 24, names_at + length, 24):  # the first is none
        name, _, _, section = struct.unpack_from("<IBBH", code, place)
        (needed if section == 0 else there).add(code[text + name : code.index(b"\0", text + name)].decode())
    return there, needed


def test_a_library_needs_a_few_functions_of_libc_and_shows_nothing_but_kernels(few: Path) -> None:
    there, needed = symbols((few / f"{NAME}.so").read_bytes())
    assert there == {each.replace(":", "_").replace(".", "_") for each in FEW}
    assert "sched_yield" in needed and needed <= OF_LIBC


def test_what_was_compiled_on_this_machine_needs_no_more() -> None:
    """All that other tests had compiled."""
    folder = finding.code_cache.store.folder
    bricks = {each.symbol for each in build_kernels.list_compilables()}
    for path in sorted(folder.iterdir()) if folder and folder.exists() else ():
        elf = path.read_bytes()[len(MAGIC) + 32 :]
        if not path.name.startswith(".") and elf[:4] == loader.ELF:
            there, needed = symbols(elf)
            assert len(there) == 1 and needed <= OF_LIBC | bricks, path.name


# ---- the scripts -----------------------------------------------------------


def test_a_class_that_nobody_knows_is_not_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what was built before gone."""
    before = sorted(folder.iterdir())
    monkeypatch.setattr(sys, "argv", ["build_kernels", NAME, "haswell"])
    with pytest.raises(SystemExit, match="2"):
        build_kernels.main()
    assert sorted(folder.iterdir()) == before


def test_a_wheel_is_made_of_what_is_whole_and_of_these_sources(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import build_wheel

    assert not build_wheel.is_built()  # there are other classes
    whole = (folder / f"{NAME}.so").read_bytes()
    for name in cpu.CLASSES:
        (folder / prebuilt.library_filename(name)).write_bytes(whole)
    build_kernels.write_manifest([*cpu.CLASSES])
    assert build_wheel.is_built()
    for damage in (flipped, Path.unlink):
        damage(folder / f"{NAME}.so")
        assert not build_wheel.is_built()
        (folder / f"{NAME}.so").write_bytes(whole)
    manifest = json.loads((folder / prebuilt.MANIFEST).read_text())
    for said in (
        {**manifest, "sources": ""},
        {"sources": prebuilt.hash_sources()},
        [],
        {**manifest, "libraries": []},
    ):
        (folder / prebuilt.MANIFEST).write_text(json.dumps(said))
        assert not build_wheel.is_built(), said
