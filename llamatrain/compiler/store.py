"""Object files on disk, one for each function, sealed so that damage is detected before they are run.

    MAGIC
    sha256    of the function's description (one line) and of the code
    the code

A file is written under a temporary name and renamed. The seal detects damage, not malice: against that, a
file must belong to the user, or to root, who may share a folder with all users, and nobody else may be able
to write to it.
"""

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from llamatrain.platform.cache_dir import find_write_problem, is_private_folder
from llamatrain.platform.files import read_regular
from llamatrain.platform.temp_files import NEW_PREFIX, delete_at_exit, remove_leftovers, remove_path

MAGIC = b"llamatrain's machine code 1\n"
WRITABLE_BY_OTHERS = (
    stat.S_IWGRP | stat.S_IWOTH if os.name == "posix" else 0
)  # write permissions of others, who could change the code
MAX_BYTES = 1 << 26  # bytes of a function's file
ATTEMPTS = 30  # attempts to write a file: others may remove the folder or the unlocked file meanwhile


def object_name(function: str, facts: str) -> str:
    """Return a filename that shows the function and is unique for its description."""
    return f"{function}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def seal(facts: str, code: bytes) -> bytes:
    """Return the contents of an object file."""
    return MAGIC + _digest(facts, code) + code


def _digest(facts: str, code: bytes | memoryview) -> bytes:
    made = hashlib.sha256(facts.encode() + b"\n")
    made.update(code)
    return made.digest()


class ObjectStore:
    """The object files of a folder, by name.

    If the folder is read-only, files go to the fallback folder, which is also read; without one, they stay in
    memory for this run.
    """

    def __init__(self, folder: Path | None, spare: Path | None = None) -> None:
        self.folder, self._spare, self._folders = folder, spare, [folder] if folder else list[Path]()
        self.fallback_reason = ""  # why files are written to the fallback folder
        self.in_memory: dict[str, bytes] = {}
        self.damaged = set[str]()
        self.problem = ""  # why nothing is written
        if folder is None:
            self.problem = "there is no home"
        elif _is_foreign(folder):
            self.problem = f"{folder} belongs to another user"
            self.folder, self._folders = None, []
        if spare and is_private_folder(spare.parent):
            self._folders.append(spare)

    def load(self, name: str, facts: str) -> memoryview | None:
        """Return the code, if it exists and its seal is valid."""
        candidates = (
            [self.in_memory[name]]
            if name in self.in_memory
            else (self._read(folder, name) for folder in self._folders)
        )
        for file in candidates:
            start = len(MAGIC) + hashlib.sha256().digest_size
            code = memoryview(file or b"")[start:]
            if file is not None and file[:start] == MAGIC + _digest(facts, code):
                return code
            if file is not None:
                self.discard(name)
        return None

    def discard(self, name: str) -> None:
        """Mark the file of a name as damaged."""
        self.in_memory.pop(name, None)
        self.damaged.add(name)

    def save(self, name: str, file: bytes) -> None:
        """Save a sealed file."""
        if not self.problem:
            try:
                self._write(name, file)
                return
            except OSError as error:
                self._use_fallback(f"{self.folder} cannot be written ({error.strerror or error})")
            if self.fallback_reason:
                self.save(name, file)
                return
        self.in_memory[name] = file

    def check_writable(self) -> None:
        """Find out whether files can be saved, before much is compiled."""
        if problem := self.problem or (find_write_problem(self.folder) if self.folder else ""):
            self._use_fallback(problem)
        if self.folder and not self.problem:
            remove_leftovers(self.folder, NEW_PREFIX)

    def _use_fallback(self, problem: str) -> None:
        """Write to the fallback folder from now on, if possible."""
        folder, self._spare, self.problem = self._spare, None, problem
        if not folder:
            return
        with suppress(OSError):
            folder.parent.mkdir(mode=0o700, exist_ok=True)
        if is_private_folder(folder.parent) and not find_write_problem(folder):
            self.folder, self.problem, self.fallback_reason = folder, "", problem
            self._folders = list(dict.fromkeys([*self._folders, folder]))

    def _read(self, folder: Path, name: str) -> bytes | None:
        try:
            file, status = read_regular(folder / name, MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            self.discard(name)
            return None
        return file if _is_trusted(status) and not status.st_mode & WRITABLE_BY_OTHERS else b""

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


def _replace(target: Path, file: bytes) -> None:
    new = target.with_name(f"{NEW_PREFIX}{target.name}-{secrets.token_hex(4)}")
    try:
        new.touch(0o644, exist_ok=False)
        delete_at_exit(new).write_bytes(file)
        if target.is_dir() and not target.is_symlink():
            remove_path(target)
        new.replace(target)
    finally:
        remove_path(new)


def _is_foreign(folder: Path) -> bool:
    try:
        return not _is_trusted(folder.stat())
    except OSError:  # it does not exist, or is not accessible
        return False


def _is_trusted(status: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or status.st_uid in (0, os.geteuid())
