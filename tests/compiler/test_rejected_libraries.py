"""Libraries that are damaged, of other sources, or where others can write: passed over in one line, whatever it is."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamatrain.compiler import cache as finding
from llamatrain.compiler import loader, prebuilt
from llamatrain.compiler.cache import CodeCache
from llamatrain.compiler.declare import Function
from llamatrain.compiler.store import ObjectStore
from tests.helpers import few_kernels
from tests.helpers.cli import ROOT, environment
from tests.helpers.few_kernels import FEW, GATES, NAME, flipped

sys.path.insert(0, str(ROOT / "scripts"))
import build_kernels

few, folder = few_kernels.few, few_kernels.folder  # fixtures
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libraries are linked and loaded on Linux")


# ---- as they should not be -------------------------------------------------


@Function
def three(number: int) -> int:
    return number + 3


def looked(cache: Path, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, list[str]]:
    """Whether a process that begins now uses the library, and what it says; either way it does its work."""
    monkeypatch.setattr(finding, "has_compiler", lambda: compiles)
    code, said = CodeCache(), list[str]()
    vars(code).update(store=ObjectStore(cache), log=said.append)
    fresh = Function(three.body)
    vars(fresh)["address"] = code.get_address(three)
    assert fresh(4) == 7
    kernel = next(each for each in build_kernels.list_compilables() if each.qualified_name == FEW[0])
    assert code.library is prebuilt.find_nothing or code.library(kernel.symbol)
    return code.library is not prebuilt.find_nothing, said


def passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """In one line, with a compiler and without."""
    cache = folder.parent.parent / "cache"
    is_used, said = looked(cache, True, monkeypatch)
    assert (
        not is_used and len(said) <= 2 and all(line.startswith("compiling kernels") for line in said[1:])
    ), said
    why = said[0].removesuffix("; kernels are compiled")
    is_used, without = looked(cache, False, monkeypatch)
    assert not is_used and without == [
        f"{why}: numpy does their work, many times slower; {finding.INSTALL_HINT}"
    ]
    assert "\n" not in why and "Traceback" not in why
    return why


def test_one_that_is_as_it_was_built_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for compiles in (True, False):
        is_used, said = looked(folder.parent.parent / "cache", compiles, monkeypatch)
        assert is_used and not any(map(is_about_libraries, said))


def is_about_libraries(line: str) -> bool:
    return "came with" in line or "cannot be" in line or "damaged" in line


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
def test_a_damaged_manifest_is_passed_over(
    damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DAMAGES[damage](folder / prebuilt.MANIFEST)
    if damage == "a bit":  # wherever it is
        (folder / prebuilt.MANIFEST).write_text(
            (folder / prebuilt.MANIFEST).read_text(errors="replace").replace(": ", "; ")
        )
    assert str(folder) in (why := passed_over(folder, monkeypatch)) or "/dev/zero" in why


def test_without_a_manifest_there_is_nothing_and_nothing_to_say(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / prebuilt.MANIFEST).unlink()
    is_used, said = looked(folder.parent.parent / "cache", False, monkeypatch)
    assert not is_used and said == [
        f"no compiled kernels for {NAME}: numpy does their work, many times slower; {finding.INSTALL_HINT}"
    ]


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
def test_a_manifest_of_another_kind_is_passed_over(
    text: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / prebuilt.MANIFEST).write_text(text)
    assert passed_over(folder, monkeypatch) == f"{folder / prebuilt.MANIFEST} is damaged"


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
def test_what_the_manifest_says_must_be_so(
    key: str, value: Any, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = json.loads((folder / prebuilt.MANIFEST).read_text())
    (folder / prebuilt.MANIFEST).write_text(json.dumps({**manifest, key: value}))
    cache = folder.parent.parent / "cache"
    if "no compiled" in why:
        is_used, said = looked(cache, False, monkeypatch)
        assert not is_used and said == [
            f"{why}: numpy does their work, many times slower; {finding.INSTALL_HINT}"
        ]
    else:
        assert passed_over(folder, monkeypatch).endswith(why)


# ---- where others can write ------------------------------------------------

PLACES = {
    "the library": lambda folder: folder / f"{NAME}.so",
    "the manifest": lambda folder: folder / prebuilt.MANIFEST,
    "the folder": lambda folder: folder,
    "the folder above": lambda folder: folder.parent,
}


@pytest.mark.parametrize("place", PLACES)
def test_where_everybody_can_write_nothing_is_loaded(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = PLACES[place](folder)
    path.chmod(0o757)
    assert passed_over(folder, monkeypatch).endswith(f"others can write to {path}")


@pytest.mark.parametrize("place", ["the library", "the manifest", "the folder"])
def test_a_link_into_such_a_folder_does_not_help(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, elsewhere = PLACES[place](folder), folder.parent.parent / "open" / "below"
    elsewhere.mkdir(parents=True)
    path.rename(elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)
    elsewhere.chmod(0o757)
    assert passed_over(folder, monkeypatch).endswith(f"others can write to {elsewhere}")


@pytest.mark.parametrize(
    ("group", "members", "fine"),
    [
        ("me", [], True),
        ("me", ["me"], True),
        ("me", ["me", "you"], False),
        ("users", [], False),
        (None, [], False),
    ],
)
@pytest.mark.parametrize("place", ["the library", "the folder"])
def test_the_user_s_own_group_may_write_and_no_other(
    place: str,
    group: str | None,
    members: list[str],
    fine: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    find, why = prebuilt.open_library()
    assert find is prebuilt.find_nothing and why.endswith("belongs to another user")


def test_what_is_read_is_what_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the file has become meanwhile."""
    monkeypatch.setattr(
        prebuilt,
        "load_code",
        lambda code, exported: ((folder / f"{NAME}.so").unlink(), loader.load_code(code, exported))[1],
    )
    find, why = prebuilt.open_library()
    assert find(FEW[0].replace(":", "_").replace(".", "_")) and not why


@pytest.mark.parametrize("missing", ["memfd_create", "/proc"])
def test_without_files_in_memory_it_is_loaded_from_another(
    missing: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> int:
        raise OSError(38, "Function not implemented")

    if missing == "/proc":
        refused = lambda *_: os.open("/dev/null", os.O_RDWR)
    monkeypatch.setattr(os, "memfd_create", refused)
    monkeypatch.setattr("tempfile.tempdir", str(folder.parent))
    find, why = prebuilt.open_library()
    assert find(FEW[0].replace(":", "_").replace(".", "_")) and not why
    assert [path.name for path in folder.parent.iterdir()] == ["libraries"]


def test_a_kernel_that_no_library_has_is_never_called(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is missed in words, where calling it would end the process."""
    script = """
import numpy as np
from llamatrain.kernels.cpu.gates import silu_back_flat
from llamatrain.compiler.cache import CompilerError
from llamatrain.compiler.thread_pool import CallTable
x = np.ones(8, np.float32)
try:
    CallTable([silu_back_flat.call(x, x, x, 0, 0, items=8, block=8)], 1)()
except CompilerError as error:
    print(error)
"""
    env = environment(**{prebuilt.LIBRARIES_VARIABLE: str(folder)})
    words = [sys.executable, "-c", "import sys; sys.modules['numba'] = None" + script]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"no library contains the kernel {GATES}:silu_back_flat; {finding.INSTALL_HINT}\n"
