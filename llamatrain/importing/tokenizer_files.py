"""Reads the JSON files that describe a tokenizer in a folder of transformers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamatrain.config.read_limited import read_limited
from llamatrain.errors import FileError

MOST_BYTES = 1 << 28
SPECIAL_KEYS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
MORE_SPECIAL = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A token that is recognised before a text is split into words."""

    text: str
    special: bool


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The contents of a folder's tokenizer files; those that are missing are empty."""

    folder: Path
    tokenizer: Mapping[str, Any]
    config: Mapping[str, Any]
    special: frozenset[str]  # texts that the folder calls special, such as the one that begins a text
    added: Mapping[int, AddedToken] = field(default_factory=dict)

    @property
    def model(self) -> Mapping[str, Any]:
        """The table of tokens and merges in tokenizer.json."""
        return self.tokenizer.get("model", {})


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read a folder's tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    tokenizer, config, old = (read_object(folder / name) for name in names)
    check_kind(isinstance(tokenizer.get("model", {}), dict), folder / names[0], "model")
    added = tokenizer.get("added_tokens", [])
    decoder = config.get("added_tokens_decoder", {})
    check_kind(isinstance(added, list), folder / names[0], "added_tokens")
    check_kind(isinstance(decoder, dict), folder / names[1], "added_tokens_decoder")
    found: dict[int, AddedToken] = {}
    for name, entries in (
        (names[0], [(entry.get("id") if isinstance(entry, dict) else None, entry) for entry in added]),
        (names[1], decoder.items()),
    ):
        for number, entry in entries:
            found[_number(number, folder / name)] = _added_token(entry, folder / name)
    return TokenizerFiles(
        folder=folder,
        tokenizer=tokenizer,
        config=config,
        special=frozenset(_special_texts(old) | _special_texts(config)),
        added=found,
    )


def read_object(path: Path) -> dict[str, Any]:
    """Read a file with a JSON object; a file that is missing is an empty one."""
    if not path.exists():
        return {}
    try:
        found = json.loads(read_limited(path, MOST_BYTES, "a tokenizer's file"))
    except (ValueError, RecursionError):
        raise FileError(f"{path}: not valid JSON; download it again", code="bad-tokenizer") from None
    if not isinstance(found, dict):
        raise FileError(f"{path}: not a JSON object; download it again", code="bad-tokenizer")
    return found


def check_kind(valid: bool, path: Path, key: str) -> None:
    """Raise FileError unless a value of a file is of the kind that it should be."""
    if not valid:
        raise FileError(f"{path}: {key} has a wrong kind; download the file again", code="bad-tokenizer")


def _number(value: Any, path: Path) -> int:
    valid = (isinstance(value, int) and value >= 0) or (
        isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10
    )
    check_kind(valid, path, "the number of an added token")
    return int(value)


def _added_token(entry: Any, path: Path) -> AddedToken:
    valid = isinstance(entry, dict) and isinstance(entry.get("content"), str)
    check_kind(valid, path, "an added token")
    return AddedToken(text=entry["content"], special=entry.get("special") is True)


def _special_texts(config: Mapping[str, Any]) -> set[str]:
    """Return the texts of the special tokens that a file names."""
    entries = [config.get(f"{key}_token") for key in SPECIAL_KEYS]
    for key in MORE_SPECIAL:
        more = config.get(key)
        entries += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    texts = (entry.get("content") if isinstance(entry, dict) else entry for entry in entries)
    return {text for text in texts if isinstance(text, str)}
