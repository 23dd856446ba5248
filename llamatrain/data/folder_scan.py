"""A folder of data: all that is known in it, or, where files are named for it, what trains apart from what does not."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from llamatrain.data.file_kind import KNOWN, Form, named
from llamatrain.errors import DataError

WORDS = {
    "train": "train training",
    "validation": "validation valid val dev",
    "test": "test testing eval evaluation",
}
SPLITS = {word: split for split, words in WORDS.items() for word in words.split()}
NAME = re.compile(rf"({'|'.join(sorted(SPLITS, key=len, reverse=True))})(?![a-z])")
FACTS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # about data, and none
ABOUT = re.compile(r"(readme|licen[cs]e|changelog|contributing)\b", re.IGNORECASE)
OLDER = (".txt", ".md", ".jsonl", ".ndjson")  # beside which others are not looked at


@dataclass(frozen=True)
class ScannedFolder:
    path: Path
    train: list[Path]
    held: dict[str, list[Path]] = field(default_factory=dict)  # by what it is for
    others: list[Path] = field(default_factory=list)  # which are no data, or not meant

    @property
    def offered(self) -> str:
        """What validates where nothing else is named."""
        return "validation" if "validation" in self.held else "test"

    @property
    def judged(self) -> str:
        """What a model that was trained is judged by."""
        return "test" if "test" in self.held else "validation"


def looked_into(path: Path) -> ScannedFolder:
    files = files_in(path)
    rows = [file for file in files if form_of(file) not in (None, "text") and file.name not in FACTS]
    splits = {file: split_of(file.relative_to(path)) for file in rows}
    held: dict[str, list[Path]] = {}
    for file, split in splits.items():
        if split not in (None, "train"):
            held.setdefault(str(split), []).append(file)
    if not held:
        return without_splits(path, files, rows)
    train = [file for file in rows if splits[file] == "train"] or [
        file for file in rows if splits[file] is None
    ]
    taken = {*train, *(file for some in held.values() for file in some)}
    return ScannedFolder(path, train, held, [file for file in files if file not in taken])


def without_splits(path: Path, files: list[Path], rows: list[Path]) -> ScannedFolder:
    texts = [file for file in files if form_of(file) == "text"]
    if rows and all(ABOUT.match(file.name) for file in texts):
        texts = []
    known = [*texts, *rows]
    train = sorted([file for file in known if file.suffix.lower() in OLDER] or known)
    if not train:
        raise DataError(
            f"{path}: no usable file in this folder; it holds {counted(files) or 'nothing'}, and known are {KNOWN}"
        )
    first = {"text" if form_of(file) == "text" else "rows": file for file in reversed(train)}
    if len(first) > 1:
        what = "JSON lines" if form_of(first["rows"]) == "lines" else "rows"
        raise DataError(
            f"{path}: mixes text ({first['text']}) and {what} ({first['rows']}); name the ones meant"
        )
    return ScannedFolder(path, train, {}, [file for file in files if file not in train])


def form_of(file: Path) -> Form | None:
    return named(file.name)[0]


def split_of(file: Path) -> str | None:
    """By the name of the file, or of the folder that it lies in: train-00000-of-00002.parquet, test.csv, validation/a.jsonl."""
    if found := NAME.match(file.name.lower()):
        return SPLITS[found[1]]
    return next((SPLITS[part.lower()] for part in reversed(file.parts[:-1]) if part.lower() in SPLITS), None)


def files_in(folder: Path) -> list[Path]:
    return [
        path for path in sorted(folder.rglob("*")) if path.is_file() and not hidden(path.relative_to(folder))
    ]


def hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def counted(files: Iterable[Path]) -> str:
    """`3 .png, 1 .csv`."""
    endings = Counter(path.suffix or path.name for path in files)
    return ", ".join(f"{count} {ending}" for ending, count in endings.most_common(4))
