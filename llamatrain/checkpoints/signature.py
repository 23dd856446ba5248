"""Recognizes the checkpoints that this user wrote, by a signature over their options.

The key is a file in the user's state folder that only the user can read. A run's folder may be moved, renamed
or copied: its checkpoints keep their signature. A checkpoint of another user or machine, or with changed
options, has no valid one.
"""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from llamatrain.platform.files import is_private, read_regular

NAME, FILE = "llamatrain", "checkpoint-key"
LENGTH = 32  # bytes
SIGNATURE = "signature"  # in training.extra


def sign(options: Mapping[str, Any]) -> str | None:
    """Return the signature of a checkpoint's options, or None if no key can be stored."""
    key = _read_key() or _make_key()
    return None if key is None else _signature(key, options)


def is_own(options: Mapping[str, Any], signature: object) -> bool:
    """Return True if this user has signed these options."""
    key = _read_key()
    return (
        key is not None
        and isinstance(signature, str)
        and hmac.compare_digest(_signature(key, options).encode(), signature.encode(errors="replace"))
    )


def _signature(key: bytes, options: Mapping[str, Any]) -> str:
    return hmac.new(key, json.dumps(options, sort_keys=True).encode(), hashlib.sha256).hexdigest()


# ---- the key ---------------------------------------------------------------


def _key_path() -> Path | None:
    try:
        folder = user_state_path(NAME, appauthor=False)
    except RuntimeError:  # no home folder
        return None
    return folder / FILE if folder.is_absolute() else None


def _read_key() -> bytes | None:
    """Read the key, if it belongs to this user and nobody else can read or write it."""
    with suppress(OSError):
        if path := _key_path():
            key, status = read_regular(path, LENGTH)
            return key if is_private(status) and len(key) == LENGTH else None
    return None


def _make_key() -> bytes | None:
    """Create a key; if several processes do so, the first wins. A file that is no key is replaced."""
    with suppress(OSError):
        if path := _key_path():
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
            try:
                with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(secrets.token_bytes(LENGTH))
                _publish_key(new, path)
            finally:
                new.unlink(missing_ok=True)
    return _read_key()


def _publish_key(new: Path, place: Path) -> None:
    """Rename a new key, unless another process was faster."""
    if os.path.lexists(place):
        if not _read_key():
            new.replace(place)
        return
    try:
        place.hardlink_to(new)
    except FileExistsError:
        return
    except OSError:  # the file system has no hard links
        new.replace(place)
