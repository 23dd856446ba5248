"""Machine code on disk: what was damaged or exchanged is never given back, and what cannot be kept is there all the same."""

import errno
import os
import random
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from llamatrain.compiler import cache as code
from llamatrain.compiler import prebuilt, store
from llamatrain.compiler.declare import Function, Int
from llamatrain.compiler.store import ObjectStore, seal
from llamatrain.platform import cache_dir, temp_files

CODE = bytes(range(256)) * 40
FILE = seal("facts", CODE)


@pytest.fixture
def shelf(tmp_path: Path) -> ObjectStore:
    made = ObjectStore(tmp_path / "kernels")
    made.save("name", FILE)
    return made


def is_given_back(folder: Path, name: str = "name", facts: str = "facts") -> bool:
    code = ObjectStore(folder).load(name, facts)
    assert code is None or bytes(code) == CODE
    return code is not None


def test_what_was_kept_is_found_by_all_that_decides_it(shelf: ObjectStore) -> None:
    assert shelf.folder and is_given_back(shelf.folder)
    assert not is_given_back(shelf.folder, facts="other facts") and not is_given_back(
        shelf.folder, name="other"
    )
    assert not shelf.in_memory and [path.name for path in shelf.folder.iterdir()] == ["name"]


def test_no_damage_goes_unseen(shelf: ObjectStore) -> None:
    assert shelf.folder
    chance, place = random.Random(18), shelf.folder / "name"
    for _ in range(300):
        at = chance.randrange(len(FILE))
        damages: list[Any] = [
            FILE[:at],
            FILE[at:],
            FILE + b"\0",
            FILE[:at] + bytes([FILE[at] ^ 1 << chance.randrange(8)]) + FILE[at + 1 :],
            FILE[:at] + chance.randbytes(8) + FILE[at + 8 :],
            b"\0" * len(FILE),
            chance.randbytes(at),
        ]
        place.write_bytes(found := chance.choice(damages))
        assert is_given_back(shelf.folder) == (found == FILE)
    shelf.save("name", FILE)
    assert is_given_back(shelf.folder)


def test_a_function_s_file_is_no_other_s(shelf: ObjectStore) -> None:
    assert shelf.folder
    shelf.save("other", seal("other facts", CODE))
    one, other = shelf.folder / "name", shelf.folder / "other"
    one.rename(shelf.folder / "third")
    other.rename(one)
    (shelf.folder / "third").rename(other)
    assert not is_given_back(shelf.folder) and not is_given_back(shelf.folder, "other", "other facts")


@pytest.mark.parametrize("mode", [0o666, 0o622, 0o664, 0o646])
@pytest.mark.skipif(os.name != "posix", reason="rights are of Unix")
def test_code_that_others_may_change_is_not_run(mode: int, shelf: ObjectStore) -> None:
    assert shelf.folder
    (shelf.folder / "name").chmod(mode)
    found = ObjectStore(shelf.folder)
    assert found.load("name", "facts") is None and found.damaged == {"name"}
    found.save("name", FILE)
    assert is_given_back(shelf.folder) and (shelf.folder / "name").stat().st_mode & 0o022 == 0


@pytest.mark.parametrize(
    "kind", ["empty", "folder", "pipe", "link to a device", "link to a file", "loop", "nowhere", "huge"]
)
def test_what_is_no_file_is_neither_waited_for_nor_followed(
    shelf: ObjectStore, kind: str, tmp_path: Path
) -> None:
    assert shelf.folder
    place, outside = shelf.folder / "name", tmp_path / "outside"
    outside.write_bytes(b"of somebody else")
    place.unlink()
    if kind == "folder":
        (place / "in it").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind in ("empty", "huge"):
        place.touch()
        os.truncate(place, 1 << 40 if kind == "huge" else 0)
    else:
        goals = {
            "link to a device": "/dev/zero",
            "link to a file": outside,
            "loop": place,
            "nowhere": tmp_path / "no" / "thing",
        }
        place.symlink_to(goals[kind])
    fresh = ObjectStore(shelf.folder)
    assert fresh.load("name", "facts") is None and (fresh.damaged == {"name"}) == (kind != "nowhere")
    fresh.save("name", FILE)
    assert (
        is_given_back(shelf.folder) and not place.is_symlink() and outside.read_bytes() == b"of somebody else"
    )


def test_a_folder_that_is_gone_is_made_again(shelf: ObjectStore) -> None:
    assert shelf.folder
    temp_files.remove_path(shelf.folder)
    assert shelf.load("name", "facts") is None
    shelf.save("name", FILE)
    assert is_given_back(shelf.folder) and not shelf.problem


def test_a_file_in_place_of_the_folder_costs_the_keeping_alone(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("no folder")
    shelf = ObjectStore(tmp_path / "kernels")
    assert shelf.load("name", "facts") is None and not shelf.damaged
    shelf.save("name", FILE)
    assert shelf.problem and bytes(shelf.load("name", "facts") or b"") == CODE


def test_a_full_disk_leaves_no_half_file(shelf: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shelf.folder
    monkeypatch.setattr(Path, "write_bytes", no_room)
    shelf.save("more", FILE)
    shelf.save("yet more", FILE)
    assert shelf.problem == f"{shelf.folder} cannot be written (No space left on device)" and set(
        shelf.in_memory
    ) == {
        "more",
        "yet more",
    }
    assert [path.name for path in shelf.folder.iterdir()] == ["name"]


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_belongs_to_another_user_is_not_run(shelf: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may keep a folder for all; what another user put there may be anything."""
    assert shelf.folder
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    stranger = ObjectStore(shelf.folder)
    if mine:
        assert stranger.problem == f"{shelf.folder} belongs to another user"
        assert stranger.load("name", "facts") is None
    else:
        assert not stranger.problem and is_given_back(shelf.folder)
        os.chown(shelf.folder / "name", 12345, 12345)
        assert not is_given_back(shelf.folder)
        os.chown(shelf.folder, 12345, 12345)
        assert ObjectStore(shelf.folder).problem == f"{shelf.folder} belongs to another user"


def test_others_may_read_and_not_write(shelf: ObjectStore) -> None:
    assert shelf.folder and not stat.S_IMODE((shelf.folder / "name").stat().st_mode) & 0o022


def test_many_write_at_once_and_all_read_whole_files(shelf: ObjectStore) -> None:
    assert shelf.folder
    failed = list[str]()

    def work() -> None:
        mine = ObjectStore(shelf.folder)
        for _ in range(40):
            mine.save("name", FILE)
            code = mine.load("name", "facts")
            if code is None or bytes(code) != CODE or mine.problem:
                failed.append(mine.problem or "damaged")
            mine.check_writable()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed and [path.name for path in shelf.folder.iterdir()] == ["name"]


KILLED = """
import os, sys
from pathlib import Path
from llamatrain.platform import temp_files
folder = Path(sys.argv[1])
for path in (folder / ".new-x", temp_files.create_temp_folder() / "file", temp_files.create_temp_file()):
    path.write_text("half")
    temp_files.delete_at_exit(path)
print("written", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_run_left_is_removed_by_the_next_and_not_before(
    shelf: ObjectStore, tmp_path: Path
) -> None:
    assert shelf.folder
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    words = [sys.executable, "-c", KILLED, str(shelf.folder)]
    sweeping = "from llamatrain.platform import temp_files; temp_files.create_temp_folder()"
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout and other.stdout.readline()
            shelf.check_writable()
            subprocess.run([sys.executable, "-c", sweeping], env=environment, check=True)
            assert (shelf.folder / ".new-x").exists() and len(list((tmp_path / "temporary").iterdir())) == 2
        finally:
            other.kill()
    shelf.check_writable()
    subprocess.run([sys.executable, "-c", sweeping], env=environment, check=True)
    assert [path.name for path in shelf.folder.iterdir()] == ["name"] and not [
        *(tmp_path / "temporary").iterdir()
    ]


# ---- what the compiler makes of it -----------------------------------------


@Function
def one(number: int) -> Int:
    return number + 1


@Function
def two(number: int) -> Int:
    return number + 2


def compiler(folder: Path) -> tuple[code.CodeCache, list[str]]:
    made, said = code.CodeCache(), list[str]()
    vars(made).update(store=ObjectStore(folder), library=prebuilt.find_nothing, log=said.append)
    return made, said


def compiled(made: code.CodeCache) -> int:
    """How many had to be, so that all are there and do what they should."""
    before = made.compiled
    for number, function in enumerate((one, two), 1):
        fresh = Function(function.body)
        vars(fresh)["address"] = made.get_address(function)
        assert fresh(4) == 4 + number
    return made.compiled - before


def test_what_was_compiled_is_found_and_what_was_damaged_heals(tmp_path: Path) -> None:
    made, said = compiler(tmp_path)
    assert compiled(made) == 2 and said == [f"compiling kernels for this machine, once (kept in {tmp_path})"]
    again, said = compiler(tmp_path)
    assert compiled(again) == 0 and not said
    (first, _) = sorted(tmp_path.iterdir())
    first.write_bytes(first.read_bytes()[:-1])
    healing, said = compiler(tmp_path)
    assert compiled(healing) == 1 and said == [f"compiling kernels again that were damaged in {tmp_path}"]
    last, said = compiler(tmp_path)
    assert compiled(last) == 0 and not said


def test_what_is_whole_and_of_no_use_is_made_again(tmp_path: Path) -> None:
    made, _ = compiler(tmp_path)
    facts = code.describe_code(one)
    made.store.save(
        store.object_name(f"{one.body.__module__}.one", facts),
        seal(facts, b"\x7fELF" + bytes(12) + b"\3" + bytes(99)),
    )
    assert compiled(made) == 2 and compiled(compiler(tmp_path)[0]) == 0


@pytest.mark.parametrize("when", ["from the start", "in the middle"])
def test_a_full_disk_is_said_once_and_nothing_is_compiled_twice(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, said = compiler(tmp_path)
    if when == "from the start":
        monkeypatch.setattr(cache_dir.tempfile, "TemporaryFile", no_room)
    monkeypatch.setattr(Path, "write_bytes", no_room)
    assert compiled(made) == 2 and compiled(made) == 0
    why = f"{tmp_path} cannot be written (No space left on device); LLAMATRAIN_CACHE names another folder"
    assert [line for line in said if "No space" in line] == [
        f"{'compiling kernels' if when == 'from the start' else 'kernels are kept'} for this run alone: {why}"
    ]


def test_where_nothing_can_be_written_all_that_is_there_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(compiler(tmp_path)[0])
    monkeypatch.setattr(cache_dir.tempfile, "TemporaryFile", no_room)
    for name in ("touch", "write_bytes", "mkdir", "replace", "unlink"):
        monkeypatch.setattr(Path, name, no_room)
    whole, said = compiler(tmp_path)
    assert compiled(whole) == 0 and not said
    monkeypatch.undo()
    next(tmp_path.iterdir()).unlink()
    monkeypatch.setattr(cache_dir.tempfile, "TemporaryFile", no_room)
    part, said = compiler(tmp_path)
    assert (
        compiled(part) == 1
        and len(said) == 1
        and said[0].startswith("compiling kernels for this run alone: ")
    )
    assert len([*tmp_path.iterdir()]) == 1
