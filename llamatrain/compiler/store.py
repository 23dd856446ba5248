"""Machine code on disk: a file for each function, sealed, so that what was damaged or exchanged is found out before it is run.

    MAGIC
    sha256    of all that decides the function's code, as a line, and of the rest
    the code

A file is written beside its place and renamed. The seal finds out damage, not malice: against that stands who the file
belongs to. It must be the user, or root, who may keep such a folder for all users; and nobody else may write to it.
"""

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from llamatrain.platform.cache_dir import find_write_problem, is_private
from llamatrain.platform.open_file import read_regular
from llamatrain.platform.temp_files import NEW_PREFIX, delete_at_exit, remove_leftovers, remove_path

MAGIC = b"llamatrain's machine code 1\n"
OTHERS = (
    stat.S_IWGRP | stat.S_IWOTH if os.name == "posix" else 0
)  # rights to write, which change the code that is run
LARGEST = 1 << 26  # bytes of a function's file
ATTEMPTS = 30  # to write a file: others may remove the folder meanwhile, or what is there and not held yet


def name_of(function: str, facts: str) -> str:
    """A file's name: for people to read, and no other function's."""
    return f"{function}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def sealed(facts: str, code: bytes) -> bytes:
    return MAGIC + _seal(facts, code) + code


def _seal(facts: str, code: bytes | memoryview) -> bytes:
    made = hashlib.sha256(facts.encode() + b"\n")
    made.update(code)
    return made.digest()


class ObjectStore:
    """The files of a folder, by name. What cannot be written there goes to the spare one, which is read, too; where there is
    none, it stays in memory, for this run alone."""

    def __init__(self, folder: Path | None, spare: Path | None = None) -> None:
        self.folder, self._spare, self._places = folder, spare, [folder] if folder else list[Path]()
        self.instead = ""  # why files are written to the spare folder
        self.loose: dict[str, bytes] = {}
        self.damaged = set[str]()
        self.trouble = ""  # why nothing is written, or no more
        if folder is None:
            self.trouble = "there is no home"
        elif _foreign(folder):
            self.trouble = f"{folder} belongs to another user"
            self.folder, self._places = None, []
        if spare and is_private(spare.parent):
            self._places.append(spare)

    def take(self, name: str, facts: str) -> memoryview | None:
        """The code, if it is there and whole."""
        found = (
            [self.loose[name]] if name in self.loose else (self._read(place, name) for place in self._places)
        )
        for file in found:
            at = len(MAGIC) + hashlib.sha256().digest_size
            code = memoryview(file or b"")[at:]
            if file is not None and file[:at] == MAGIC + _seal(facts, code):
                return code
            if file is not None:
                self.drop(name)
        return None

    def drop(self, name: str) -> None:
        """What is there under a name is no good."""
        self.loose.pop(name, None)
        self.damaged.add(name)

    def put(self, name: str, file: bytes) -> None:
        """Keep what was sealed."""
        if not self.trouble:
            try:
                self._write(name, file)
                return
            except OSError as error:
                self._turn(f"{self.folder} cannot be written ({error.strerror or error})")
            if self.instead:
                self.put(name, file)
                return
        self.loose[name] = file

    def check(self) -> None:
        """Find out whether anything can be kept, before much is made."""
        if trouble := self.trouble or (find_write_problem(self.folder) if self.folder else ""):
            self._turn(trouble)
        if self.folder and not self.trouble:
            remove_leftovers(self.folder, NEW_PREFIX)

    def _turn(self, trouble: str) -> None:
        """Write to the spare folder from now on, if that can be done, since there is trouble with the other."""
        place, self._spare, self.trouble = self._spare, None, trouble
        if not place:
            return
        with suppress(OSError):
            place.parent.mkdir(mode=0o700, exist_ok=True)
        if is_private(place.parent) and not find_write_problem(place):
            self.folder, self.trouble, self.instead = place, "", trouble
            self._places = list(dict.fromkeys([*self._places, place]))

    def _read(self, folder: Path, name: str) -> bytes | None:
        try:
            file, status = read_regular(folder / name, LARGEST)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            self.drop(name)
            return None
        return file if _is_trusted(status) and not status.st_mode & OTHERS else b""

    def _write(self, name: str, file: bytes) -> None:
        assert self.folder is not None
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                _replace(self.folder / name, file)
                return
            except FileNotFoundError:
                if attempt == ATTEMPTS:
                    raise


def _replace(place: Path, file: bytes) -> None:
    new = place.with_name(f"{NEW_PREFIX}{place.name}-{secrets.token_hex(4)}")
    try:
        new.touch(0o644, exist_ok=False)
        delete_at_exit(new).write_bytes(file)
        if place.is_dir() and not place.is_symlink():
            remove_path(place)
        new.replace(place)
    finally:
        remove_path(new)


def _foreign(folder: Path) -> bool:
    try:
        return not _is_trusted(folder.stat())
    except OSError:  # not there yet, or out of reach
        return False


def _is_trusted(status: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or status.st_uid in (0, os.geteuid())
