"""Checkpoints forged by a writer of our own, checksum and all: going on from one works, or ends in one line, and soon."""

import json
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import TINY, Argument, Done, ran, run, text_file
from tests.helpers.timeout import in_time

SECONDS = 5  # of the processor, that no refusal may take
LONGEST = 400
CHECKSUM = "training.checksum"
NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = 4, 5, 6, 7, 8, 9, 10, 11, 12


@dataclass
class File:
    """A GGUF file as far as it must be known to be forged: keys with type and bytes of their values, and all behind them."""

    keys: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    tensors: dict[str, tuple[bytes, int, int]] = field(
        default_factory=dict
    )  # shape and type, offset, and where that is
    infos: bytes = b""
    data: bytes = b""

    @classmethod
    def read(cls, path: Path) -> "File":
        file, made = path.read_bytes(), cls()
        magic, version, tensors, keys = struct.unpack_from("<4sIQQ", file)
        assert (magic, version) == (b"GGUF", 3)
        at = 24

        def text() -> bytes:
            nonlocal at
            (length,) = struct.unpack_from("<Q", file, at)
            at += 8 + length
            return file[at - length : at]

        def value(kind: int) -> bytes:
            nonlocal at
            start = at
            if kind == STRING:
                text()
            elif kind == ARRAY:
                inner, count = struct.unpack_from("<IQ", file, at)
                at += 12
                for _ in range(count):
                    value(inner)
            else:
                at += struct.calcsize(NUMBERS[kind])
            return file[start:at]

        for _ in range(keys):
            name = text().decode()
            (kind,) = struct.unpack_from("<I", file, at)
            at += 4
            made.keys[name] = (kind, value(kind))
        start = at
        for _ in range(tensors):
            name = text().decode()
            (dimensions,) = struct.unpack_from("<I", file, at)
            size = 4 + 8 * dimensions + 4
            (offset,) = struct.unpack_from("<Q", file, at + size)
            made.tensors[name] = (file[at : at + size], offset, at + size - start)
            at += size + 8
        made.infos, made.data = file[start:at], file[-(-at // 32) * 32 :]
        return made

    def write(self, path: Path) -> Path:
        out = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), len(self.keys)))
        at = None
        for name, (kind, value) in self.keys.items():
            raw = name.encode()
            out += struct.pack("<Q", len(raw)) + raw + struct.pack("<I", kind)
            if name == CHECKSUM:
                at, value = len(out), bytes(4)
            out += value
        out += self.infos
        out += bytes(-len(out) % 32) + self.data
        if at is not None:
            out[at : at + 4] = struct.pack("<I", zlib.crc32(out))
        path.write_bytes(out)
        return path

    def text(self, key: str) -> str:
        kind, value = self.keys[key]
        assert kind == STRING
        return value[8:].decode()

    def but(self, **keys: tuple[int, bytes] | None) -> "File":
        """With other keys, called with __ for their dots; None takes one away."""
        changed = {name.replace("__", "."): value for name, value in keys.items()}
        found = {name: value for name, value in {**self.keys, **changed}.items() if value is not None}
        return File(found, self.tensors, self.infos, self.data)

    def filled(self, name: str, byte: bytes) -> "File":
        """With four bytes over and over in the place of a tensor."""
        shape, offset, _ = self.tensors[name]
        count = 1
        for size in struct.unpack_from(f"<{struct.unpack_from('<I', shape)[0]}Q", shape, 4):
            count *= size
        wide = 2 if struct.unpack_from("<I", shape, len(shape) - 4)[0] == 28 else 1  # float64
        data = self.data[:offset] + byte * count * wide + self.data[offset + 4 * count * wide :]
        return File(self.keys, self.tensors, self.infos, data)


def string(value: str) -> tuple[int, bytes]:
    raw = value.encode("utf-8", "surrogateescape")
    return STRING, struct.pack("<Q", len(raw)) + raw


def number(kind: int, value: float) -> tuple[int, bytes]:
    return kind, struct.pack(NUMBERS[kind], value)


def told(done: Done, what: object) -> bool:
    """Whether it worked; else it said why in one short line."""
    assert "Traceback" not in done.err, (what, done.err[-2000:])
    if done.code == 0:
        return True
    assert done.code in (1, 2), (what, done.code, done.err[-400:])
    assert len(done.errors) == 1, (what, done.err[-2000:])
    assert len(done.errors[0]) < LONGEST, (what, len(done.errors[0]))
    assert max(map(len, done.err.splitlines())) < 2 * LONGEST, (
        what,
        max(done.err.splitlines(), key=len)[:300],
    )
    return False


WAYS: dict[str, tuple[Argument, ...]] = {
    "adamw": ("--val-split", 0.2),
    "sgd": ("--optimizer", "sgd", "--past", 2, "--max-no-improvement", 50),
    "lbfgs": ("--optimizer", "lbfgs"),
    "accumulated": ("--grad-acc", 3),
}


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, File]:
    """One checkpoint of each way, after two steps of four."""
    place = tmp_path_factory.mktemp("sound")
    data, made = text_file(place, 2000), {}
    for name, more in WAYS.items():
        small = (*TINY, "--layer", 1, "--ctx", 16, "--batch", 2, "--iters", 4, "--save-every", 2, "--seed", 1)
        ran("from-scratch", data, *small, *more, "--out", place / name)
        made[name] = File.read(place / name / "checkpoint-2.gguf")
    return made


def gone_on(file: File, place: Path, *more: Argument, command: str = "from-scratch") -> Done:
    path = file.write(place / "crafted.gguf")
    shutil.rmtree(place / "run", ignore_errors=True)
    with in_time(SECONDS):
        return run(command, "--resume", path, "--out", place / "run", *more)


def with_options(file: File, change: Callable[[dict[str, Any]], object]) -> File:
    options = json.loads(file.text("training.options"))
    change(options)
    return file.but(training__options=string(json.dumps(options)))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_forged_without_a_change_is_gone_on_with(
    way: str, sound: dict[str, File], tmp_path: Path
) -> None:
    assert told(gone_on(sound[way], tmp_path), way)


TEXTS = {
    "nothing": "",
    "no object": "[1, 2]",
    "no number": "NaN",
    "null": "null",
    "a mark in front": "\ufeff{}",
    "an end too early": '{"train": {',
    "lists in lists": "[" * 100_000 + "]" * 100_000,
    "objects in objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "digits": '{"a": ' + "9" * 100_000 + "}",
    "an unknown key of much": json.dumps({"k" * 100_000: 1}),
    "many keys": json.dumps({str(i): None for i in range(50_000)}),
}


@pytest.mark.parametrize("key", ["training.options", "training.extra", "training.partial"])
@pytest.mark.parametrize("words", TEXTS)
def test_a_text_that_is_no_such_thing(words: str, key: str, sound: dict[str, File], tmp_path: Path) -> None:
    told(gone_on(sound["accumulated"].but(**{key: string(TEXTS[words])}), tmp_path), (words, key))


@pytest.mark.parametrize(
    ("group", "key"),
    [
        ("train", "lr"),
        ("train", "optimizer"),
        ("data", "val"),
        ("model", "ctx"),
        ("run", "threads"),
        ("run", "max_time"),
    ],
)
def test_an_option_that_is_a_list_of_lists_of_lists(
    group: str, key: str, sound: dict[str, File], tmp_path: Path
) -> None:
    file = sound["adamw"]
    text = file.text("training.options")
    options = json.loads(text)
    mark = json.dumps({key: options[group][key]})[1:-1]
    nested = f'"{key}": ' + "[" * 900 + '"x"' + "]" * 900
    assert text.count(mark) == 1
    done = gone_on(file.but(training__options=string(text.replace(mark, nested))), tmp_path)
    assert not told(done, (group, key))


@pytest.mark.parametrize("key", ["files", "val"])
def test_a_device_that_never_ends_is_not_read(key: str, sound: dict[str, File], tmp_path: Path) -> None:
    def change(options: dict[str, Any]) -> None:
        (options if key == "files" else options["data"])[key] = ["/dev/zero"]

    assert not told(gone_on(with_options(sound["accumulated"], change), tmp_path), key)


@pytest.mark.parametrize("count", ["batch", "grad_acc", "lbfgs_history", "past", "warmup", "decay_steps"])
def test_what_is_much_too_large_is_told_or_taken_at_once(
    count: str, sound: dict[str, File], tmp_path: Path
) -> None:
    for value in (2**31 - 1, 2**31, 2**63, 10**300):
        options = json.loads(sound["lbfgs"].text("training.options"))
        options["train"][count] = value
        changed = sound["lbfgs"].but(training__options=string(json.dumps(options)))
        told(gone_on(changed, tmp_path), (count, value))


def test_no_data_is_told_of_the_file_that_names_none(sound: dict[str, File], tmp_path: Path) -> None:
    done = gone_on(with_options(sound["adamw"], lambda options: options.update(files=[])), tmp_path)
    assert not told(done, "files") and "crafted.gguf" in done.errors[0] and done.code == 1


STRANGE = (b"\xff\xff\xff\xff", b"\0\0\x80\x7f", bytes(4), b"\xff\xff\x7f\x7f")  # nan, inf, 0, the largest
KINDS = (0, 1, 2, 3, U32, I32, F32, BOOL, U64, I64, F64)


def mutated(file: File, dice: random.Random) -> tuple[File, object]:
    """With a key of another kind or value, or with numbers that are none in a tensor."""
    if dice.random() < 0.15:
        name, byte = dice.choice([*file.tensors]), dice.choice(STRANGE)
        return file.filled(name, byte), (name, byte)
    name = dice.choice([name for name in file.keys if name != CHECKSUM and not name.startswith("tokenizer")])
    kind, value = file.keys[name]
    if kind in NUMBERS and dice.random() < 0.6:
        made: tuple[int, bytes] | None = (kind, bytes(dice.choice([0, 1, 127, 255]) for _ in value))
        if kind == BOOL:
            made = (kind, bytes([value[0] ^ 1]))
    elif dice.random() < 0.2:
        made = None
    elif dice.random() < 0.3:
        made = string(dice.choice(["", "x", "sgd", "lbfgs", "finetune_lora", "x" * 9999, "\x1b[2J", "é"]))
    else:
        kind = dice.choice(KINDS)
        made = (
            kind,
            dice.choice([b"\0", b"\1"] if kind == BOOL else [b"\0", b"\x7f", b"\xff"])
            * struct.calcsize(NUMBERS[kind]),
        )
    return file.but(**{name: made}), (name, made and made[:64])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [25, pytest.param(1500, marks=pytest.mark.slow)])
def test_keys_and_numbers_that_cannot_be(
    way: str, count: int, sound: dict[str, File], tmp_path: Path
) -> None:
    dice = random.Random(f"{way} {count}")
    for _ in range(count):
        file, what = mutated(sound[way], dice)
        if dice.random() < 0.3:
            file, more = mutated(file, dice)
            what = (what, more)
        told(gone_on(file, tmp_path), what)


@pytest.mark.parametrize("byte", STRANGE, ids=["nan", "inf", "0", "largest"])
@pytest.mark.parametrize("name", ["current_gradients", "memory_s", "memory_y", "memory_ys"])
def test_a_history_that_cannot_be(name: str, byte: bytes, sound: dict[str, File], tmp_path: Path) -> None:
    """Of L-BFGS, which divides by what it remembers."""
    told(gone_on(sound["lbfgs"].filled(f"optimizer.lbfgs.{name}", byte), tmp_path), (name, byte))


OTHERS: list[tuple[Argument, ...]] = [
    ("generate", "FILE", "--prompt", "a", "-n", 2),
    ("evaluate", "FILE", "text.txt"),
    ("inspect", "FILE"),
    ("preview", "text.txt", "--model", "FILE"),
]


@pytest.mark.parametrize("words", OTHERS, ids=lambda words: words[0])
def test_other_commands_take_a_forged_checkpoint_or_say_why_not(
    words: tuple[Argument, ...], sound: dict[str, File], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path, 500)
    dice = random.Random(1)
    for _ in range(15):
        file, what = mutated(sound[dice.choice([*WAYS])], dice)
        path = file.write(tmp_path / "crafted.gguf")
        with in_time(SECONDS):
            told(run(*(path if word == "FILE" else word for word in words)), (words[0], what))
