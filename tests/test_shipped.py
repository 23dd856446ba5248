"""Libraries that came with the package: used as they are, or passed over in one line, whatever is wrong with them."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamatrain.machine import code as finding
from llamatrain.machine import library, shipped, units
from llamatrain.machine.code import Code
from llamatrain.machine.entry import Compilable, Function
from llamatrain.machine.kept import MAGIC, Shelf
from tests.runs import ROOT, environment

sys.path.insert(0, str(ROOT / "scripts"))
import build_kernels

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libraries are linked and loaded on Linux")

THREADS, GATES, MERGING = "llamatrain.machine.threads", "llamatrain.kernels.cpu.gates", "llamatrain.data.tokenizer.merging"
FEW = [f"{MERGING}:word_keys", f"{GATES}:silu_flat", *(f"{THREADS}:{name}" for name in ("begin", "follow", "lead"))]
NAME = units.processor().name
OF_LIBC = {"exp", "expf", "log", "logf", "memcpy", "memmove", "memset", "sched_yield"}

BUILD = """
import sys
sys.path.insert(0, "scripts")
import build_kernels
from llamatrain.machine import shipped
every = build_kernels.declared()
build_kernels.declared = lambda: [each for each in every if each.where in {few}]
shipped.FOLDER.mkdir()
sys.argv = ["build_kernels", "--here", "{name}"]
build_kernels.main()
build_kernels.write_manifest(["{name}"])
"""

USE = """
import hashlib, sys
import numpy as np
from llamatrain.data.tokenizer.merging import word_keys
from llamatrain.kernels.cpu.gates import silu_flat
from llamatrain.machine import shipped, terminal
from llamatrain.machine.code import code
from llamatrain.machine.entry import Brick
from llamatrain.machine.threads import Table
if not {bricks}:
    Brick.made.clear()  # they are called by none of these, and take their time
x, keys = np.linspace(-20, 20, 1003, dtype=np.float32), np.zeros(2, np.int64)
y = np.zeros_like(x)
with terminal.shown():
    Table([silu_flat.call(x, y, 0, 0, items=1003, block=64)], 2)()
    word_keys(np.frombuffer(b"abcdefgh", np.uint8), np.array([3, 8]), keys)
assert np.allclose(y, x / (1 + np.exp(-x)), atol=1e-5)
print(hashlib.sha256(y.tobytes() + keys.tobytes()).hexdigest())
print("compiler" if sys.modules.get("numba") or sys.modules.get("llvmlite") else "none")
print("shipped" if code.library is not shipped.nothing else "compiled")
"""


def made(folder: Path, seed: str) -> Path:
    words = [sys.executable, "-c", BUILD.format(few=FEW, name=NAME)]
    more = {shipped.SWITCH: str(folder), "PYTHONHASHSEED": seed}
    subprocess.run(words, env=environment(**more), cwd=ROOT, check=True, capture_output=True)
    return closed(folder)


def closed(folder: Path) -> Path:
    """To others, whatever the mask of whoever runs these tests."""
    for each in (folder, folder.parent, *folder.iterdir()):
        each.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of a few functions, in a folder of which nothing is changed."""
    return made(tmp_path_factory.mktemp("few") / "libraries", "1")


@pytest.fixture
def folder(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which this process takes for what came with the package."""
    place = tmp_path / "package" / "libraries"
    shutil.copytree(few, place)
    monkeypatch.setattr(shipped, "FOLDER", closed(place))
    return place


# ---- as they are -----------------------------------------------------------


def used(folder: Path, cache: Path, bricks: bool = False) -> tuple[list[str], str]:
    env = environment(**{shipped.SWITCH: str(folder), "LLAMATRAIN_CACHE": str(cache)})
    done = subprocess.run([sys.executable, "-c", USE.format(bricks=bricks)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


def test_what_was_shipped_runs_without_compiler_and_cache_and_gives_the_bits_of_what_is_compiled(
    few: Path, tmp_path: Path
) -> None:
    (bits, compiler, whence), err = used(few, tmp_path / "unused", bricks=True)
    assert (compiler, whence, err) == ("none", "shipped", "") and not (tmp_path / "unused").exists()
    (others, compiler, whence), err = used(tmp_path / "nothing here", tmp_path / "cache")
    assert (compiler, whence) == ("compiler", "compiled") and err.count("compiling kernels") == 1
    assert bits == others
    (others, compiler, whence), err = used(tmp_path / "nothing here", tmp_path / "cache")
    assert (others, compiler, whence, err) == (bits, "none", "compiled", "")  # as it was kept


def test_building_twice_gives_the_same_bytes(few: Path, tmp_path: Path) -> None:
    again = made(tmp_path / "again", "2")
    assert sorted(path.name for path in few.iterdir()) == sorted([f"{NAME}.so", "manifest.json"])
    for path in few.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_the_manifest_tells_what_is_in_it(few: Path) -> None:
    manifest = json.loads((few / shipped.MANIFEST).read_text())
    digest = hashlib.sha256((few / f"{NAME}.so").read_bytes()).hexdigest()
    assert manifest["kernels"] == FEW and manifest["libraries"] == {NAME: digest} and manifest["sources"] == shipped.sources()
    find = library.loaded((few / f"{NAME}.so").read_bytes())
    assert all(find(each.replace(":", "_").replace(".", "_")) for each in FEW)
    assert not find("llamatrain_of_no_such_name")


# ---- all of them -----------------------------------------------------------


def decorated() -> set[str]:
    """What the sources declare, by their text."""
    found = set[str]()
    for path in sorted(Path(shipped.PACKAGE).rglob("*.py")):
        module = ".".join(path.relative_to(shipped.PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        lines = path.read_text().splitlines()
        for line, after in pairwise(lines):
            if line in ("@Entry", "@Brick", "@Routine", "@Function"):
                found.add(f"{module}:{after.removeprefix('def ').partition('(')[0]}")
    return found


def test_every_kernel_that_is_declared_is_built() -> None:
    declared = build_kernels.declared()
    assert {each.where for each in declared} == decorated() and len(declared) >= 65
    assert len({each.symbol for each in declared}) == len(declared)


def test_each_object_is_found_in_the_library_by_its_symbol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way of a build, with a word in place of each kernel: compiling them takes a minute."""
    import llvmlite.binding as llvm

    from llamatrain.machine.compiler import emit

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()

    def word(declared: Compilable) -> bytes:
        return bytes(machine.emit_object(llvm.parse_assembly(f"define void @{declared.symbol}() {{ ret void }}")))

    monkeypatch.setattr(emit, "object_of", word)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["build_kernels", "--here", NAME])
    build_kernels.main()
    build_kernels.write_manifest([NAME])
    closed(tmp_path)
    find, trouble = shipped.library()
    assert not trouble and all(find(each.symbol) for each in build_kernels.declared())
    kernels = json.loads((tmp_path / shipped.MANIFEST).read_text())["kernels"]
    assert set(kernels) == decorated() and len(kernels) == len(build_kernels.declared())


BUILT = sorted((shipped.PACKAGE / "machine" / "libraries").glob("*.so"))


@pytest.mark.parametrize("path", BUILT, ids=lambda path: path.stem)
def test_every_kernel_of_a_class_that_was_built_is_there(path: Path) -> None:
    manifest = json.loads((path.parent / shipped.MANIFEST).read_text())
    if manifest["sources"] != shipped.sources():
        pytest.skip("these were built of other sources")
    there, needed = symbols(path.read_bytes())
    assert there == {each.symbol for each in build_kernels.declared()} and needed <= OF_LIBC
    assert set(manifest["kernels"]) == decorated() and path.stem in manifest["libraries"]


# ---- what they need from outside -------------------------------------------


def symbols(code: bytes) -> tuple[set[str], set[str]]:
    """Of an ELF file's dynamic symbols: those that it has, and those that it needs."""
    (at,), (size, count) = struct.unpack_from("<Q", code, 0x28), struct.unpack_from("<HH", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, at + number * size) for number in range(count)]
    (names_at, length, link), *_ = [(each[4], each[5], each[6]) for each in sections if each[1] == 11]  # SHT_DYNSYM
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
    folder = finding.code.shelf.folder
    bricks = {each.symbol for each in build_kernels.declared()}
    for path in sorted(folder.iterdir()) if folder and folder.exists() else ():
        elf = path.read_bytes()[len(MAGIC) + 32 :]
        if not path.name.startswith(".") and elf[:4] == library.ELF:
            there, needed = symbols(elf)
            assert len(there) == 1 and needed <= OF_LIBC | bricks, path.name


# ---- as they should not be -------------------------------------------------


@Function
def three(number: int) -> int:
    return number + 3


def looked(cache: Path, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, list[str]]:
    """Whether a process that begins now uses the library, and what it says; either way it does its work."""
    monkeypatch.setattr(finding, "compiles", lambda: compiles)
    code, said = Code(), list[str]()
    vars(code).update(shelf=Shelf(cache), say=said.append)
    fresh = Function(three.body)
    vars(fresh)["address"] = code.address(three)
    assert fresh(4) == 7
    kernel = next(each for each in build_kernels.declared() if each.where == FEW[0])
    assert code.library is shipped.nothing or code.library(kernel.symbol)
    return code.library is not shipped.nothing, said


def passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """In one line, with a compiler and without."""
    cache = folder.parent.parent / "cache"
    is_used, said = looked(cache, True, monkeypatch)
    assert not is_used and len(said) <= 2 and all(line.startswith("compiling kernels") for line in said[1:]), said
    why = said[0].removesuffix("; kernels are compiled")
    is_used, without = looked(cache, False, monkeypatch)
    assert not is_used and without == [f"{why}: numpy does their work, many times slower; {finding.HELP}"]
    assert "\n" not in why and "Traceback" not in why
    return why


def test_one_that_is_as_it_was_built_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for compiles in (True, False):
        is_used, said = looked(folder.parent.parent / "cache", compiles, monkeypatch)
        assert is_used and not any(map(is_about_libraries, said))


def is_about_libraries(line: str) -> bool:
    return "came with" in line or "cannot be" in line or "damaged" in line


def flipped(path: Path) -> None:
    code = bytearray(path.read_bytes())
    code[len(code) // 2] ^= 4
    path.write_bytes(code)


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: (path.unlink(), make(path))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": flipped,
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: os.truncate(path, 0),
    "larger than any": lambda path: os.truncate(path, 1 << 40),
    "another library": lambda path: path.write_bytes(Path(np._core._multiarray_umath.__file__).read_bytes()),
    "not there": Path.unlink,
    "a folder": instead(Path.mkdir),
    "a pipe": instead(os.mkfifo),
    "without end": instead(lambda path: path.symlink_to("/dev/zero")),
    "a ring": instead(lambda path: path.symlink_to(path.name)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_passed_over(damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DAMAGES[damage](folder / f"{NAME}.so")
    assert str(folder) in (why := passed_over(folder, monkeypatch)) or "/dev/zero" in why


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name not in ("not there", "longer")])
def test_a_damaged_manifest_is_passed_over(damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DAMAGES[damage](folder / shipped.MANIFEST)
    if damage == "a bit":  # wherever it is
        (folder / shipped.MANIFEST).write_text((folder / shipped.MANIFEST).read_text(errors="replace").replace(": ", "; "))
    assert str(folder) in (why := passed_over(folder, monkeypatch)) or "/dev/zero" in why


def test_without_a_manifest_there_is_nothing_and_nothing_to_say(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / shipped.MANIFEST).unlink()
    is_used, said = looked(folder.parent.parent / "cache", False, monkeypatch)
    assert not is_used and said == [f"no compiled kernels for {NAME}: numpy does their work, many times slower; {finding.HELP}"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "3",
        "null",
        '"text"',
        "{}",
        '{"sources": 1}',
        '{"sources": 1, "libraries": []}',
        '{"libraries": {}}',
        "[" * 99_999,
    ],
)
def test_a_manifest_of_another_kind_is_passed_over(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / shipped.MANIFEST).write_text(text)
    assert passed_over(folder, monkeypatch) == f"{folder / shipped.MANIFEST} is damaged"


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("sources", "0" * 64, "the kernels that came with the package are of other sources than these"),
        ("sources", None, "the kernels that came with the package are of other sources than these"),
        ("libraries", {NAME: 3}, f"{NAME}.so is not what came with the package"),
        ("libraries", {NAME: "0" * 64}, f"{NAME}.so is not what came with the package"),
        ("libraries", {NAME: []}, f"{NAME}.so is not what came with the package"),
        ("libraries", {"another class": "0" * 64}, f"no compiled kernels for {NAME}"),
    ],
)
def test_what_the_manifest_says_must_be_so(key: str, value: Any, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = json.loads((folder / shipped.MANIFEST).read_text())
    (folder / shipped.MANIFEST).write_text(json.dumps({**manifest, key: value}))
    cache = folder.parent.parent / "cache"
    if "no compiled" in why:
        is_used, said = looked(cache, False, monkeypatch)
        assert not is_used and said == [f"{why}: numpy does their work, many times slower; {finding.HELP}"]
    else:
        assert passed_over(folder, monkeypatch).endswith(why)


def test_sources_are_all_that_ends_in_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of any makes what was built stale."""
    shutil.copytree(shipped.PACKAGE, tmp_path / "llamatrain", ignore=shutil.ignore_patterns("__pycache__", "libraries"))
    monkeypatch.setattr(shipped, "PACKAGE", tmp_path / "llamatrain")
    before = shipped.sources.__wrapped__()
    assert before == shipped.sources()
    homes = {each.rpartition(":")[0] for each in decorated()} | {"llamatrain.machine.compiler.emit", "llamatrain.machine.simd"}
    for home in sorted(homes):
        path = tmp_path.joinpath(*home.split(".")).with_suffix(".py")
        text = path.read_text()
        path.write_text(text + "# edited\n")
        assert shipped.sources.__wrapped__() != before, home
        path.write_text(text)


# ---- where others can write ------------------------------------------------

PLACES = {
    "the library": lambda folder: folder / f"{NAME}.so",
    "the manifest": lambda folder: folder / shipped.MANIFEST,
    "the folder": lambda folder: folder,
    "the folder above": lambda folder: folder.parent,
}


@pytest.mark.parametrize("place", PLACES)
def test_where_everybody_can_write_nothing_is_loaded(place: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = PLACES[place](folder)
    path.chmod(0o757)
    assert passed_over(folder, monkeypatch).endswith(f"others can write to {path}")


@pytest.mark.parametrize("place", ["the library", "the manifest", "the folder"])
def test_a_link_into_such_a_folder_does_not_help(place: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, elsewhere = PLACES[place](folder), folder.parent.parent / "open" / "below"
    elsewhere.mkdir(parents=True)
    path.rename(elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)
    elsewhere.chmod(0o757)
    assert passed_over(folder, monkeypatch).endswith(f"others can write to {elsewhere}")


@pytest.mark.parametrize(
    ("group", "members", "fine"),
    [("me", [], True), ("me", ["me"], True), ("me", ["me", "you"], False), ("users", [], False), (None, [], False)],
)
@pytest.mark.parametrize("place", ["the library", "the folder"])
def test_the_user_s_own_group_may_write_and_no_other(
    place: str, group: str | None, members: list[str], fine: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, mine = PLACES[place](folder), os.getgid() or 12345
    if not os.getgid():
        os.chown(path, -1, mine)  # root's own group is as good as root
    path.chmod(0o775)

    def named(number: int) -> SimpleNamespace:
        if group is None:
            raise KeyError(number)
        return SimpleNamespace(gr_name=group, gr_mem=members)

    monkeypatch.setattr("grp.getgrgid", named)
    monkeypatch.setattr("pwd.getpwuid", lambda number: SimpleNamespace(pw_name="me", pw_gid=mine))
    if fine:
        assert looked(folder.parent.parent / "cache", False, monkeypatch) == (True, [])
    else:
        assert passed_over(folder, monkeypatch).endswith(f"others can write to {path}")


def test_what_belongs_to_another_user_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        mine = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    else:
        os.chown(folder / f"{NAME}.so", 12345, -1)
    find, why = shipped.library()
    assert find is shipped.nothing and why.endswith("belongs to another user")


def test_what_is_read_is_what_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the file has become meanwhile."""
    monkeypatch.setattr(shipped, "loaded", lambda code, shown: ((folder / f"{NAME}.so").unlink(), library.loaded(code, shown))[1])
    find, why = shipped.library()
    assert find(FEW[0].replace(":", "_").replace(".", "_")) and not why


@pytest.mark.parametrize("missing", ["memfd_create", "/proc"])
def test_without_files_in_memory_it_is_loaded_from_another(missing: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> int:
        raise OSError(38, "Function not implemented")

    if missing == "/proc":
        refused = lambda *_: os.open("/dev/null", os.O_RDWR)
    monkeypatch.setattr(os, "memfd_create", refused)
    monkeypatch.setattr("tempfile.tempdir", str(folder.parent))
    find, why = shipped.library()
    assert find(FEW[0].replace(":", "_").replace(".", "_")) and not why
    assert [path.name for path in folder.parent.iterdir()] == ["libraries"]


def test_a_kernel_that_no_library_has_is_never_called(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is missed in words, where calling it would end the process."""
    script = """
import numpy as np
from llamatrain.kernels.cpu.gates import silu_back_flat
from llamatrain.machine.code import CompilerError
from llamatrain.machine.threads import Table
x = np.ones(8, np.float32)
try:
    Table([silu_back_flat.call(x, x, x, 0, 0, items=8, block=8)], 1)()
except CompilerError as error:
    print(error)
"""
    env = environment(**{shipped.SWITCH: str(folder)})
    words = [sys.executable, "-c", "import sys; sys.modules['numba'] = None" + script]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{GATES}:silu_back_flat is in no library that is there; {finding.HELP}\n"


# ---- the scripts -----------------------------------------------------------


def test_a_class_that_nobody_knows_is_not_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what was built before gone."""
    before = sorted(folder.iterdir())
    monkeypatch.setattr(sys, "argv", ["build_kernels", NAME, "haswell"])
    with pytest.raises(SystemExit, match="2"):
        build_kernels.main()
    assert sorted(folder.iterdir()) == before


def test_a_wheel_is_made_of_what_is_whole_and_of_these_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import build_wheel

    assert not build_wheel.is_built()  # there are other classes
    whole = (folder / f"{NAME}.so").read_bytes()
    for name in units.CLASSES:
        (folder / shipped.file_of(name)).write_bytes(whole)
    build_kernels.write_manifest([*units.CLASSES])
    assert build_wheel.is_built()
    for damage in (flipped, Path.unlink):
        damage(folder / f"{NAME}.so")
        assert not build_wheel.is_built()
        (folder / f"{NAME}.so").write_bytes(whole)
    manifest = json.loads((folder / shipped.MANIFEST).read_text())
    for said in ({**manifest, "sources": ""}, {"sources": shipped.sources()}, [], {**manifest, "libraries": []}):
        (folder / shipped.MANIFEST).write_text(json.dumps(said))
        assert not build_wheel.is_built(), said
