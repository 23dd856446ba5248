"""Values of a kind that cannot be, wherever a command reads one: it works, or ends in one line, and soon."""

import random
from pathlib import Path

import pytest

from llamatrain.data.tokenizer import load
from llamatrain.data.tokenizer.vocabulary import MAX_CHARACTERS, parse_byte
from llamatrain.errors import FileError
from llamatrain.gguf.constants import TokenType
from llamatrain.gguf.reader import Metadata, open_gguf
from llamatrain.gguf.values import (
    ARRAY,
    Kind,
    Value,
    boolean,
    f32,
    number,
    numbers,
    string,
    strings,
    u32,
    u64,
)
from llamatrain.gguf.writer import encode_head
from tests.helpers.cli import Argument, run
from tests.helpers.timeout import in_time
from tests.helpers.tiny_gguf import bytes_vocabulary, llama_metadata, llama_tensors, write_arrays

SECONDS = 10  # of the processor, that nothing may take
NESTED = Value(
    Kind.ARRAY,
    ARRAY.pack(Kind.ARRAY, 2) + bytes(strings(["a"]).raw) + bytes(numbers(Kind.UINT32, [1, 2]).raw),
)
VALUES = [
    NESTED,
    numbers(Kind.UINT32, [1, 2, 3]),
    numbers(Kind.FLOAT32, [float("nan")]),
    numbers(Kind.BOOL, []),
    strings([]),
]
VALUES += [
    strings(["a", "a"]),
    boolean(True),
    u32(0),
    u32(2**32 - 1),
    u64(2**63),
    number(Kind.INT64, -(2**63)),
    f32(float("nan")),
]
VALUES += [
    number(Kind.FLOAT64, -1e308),
    string(""),
    string("\x1b[2J\u202e\r"),
    string("x" * 1_000_000),
    string("\udcff"),
]
BESIDE = [
    "general.type",
    "general.name",
    "general.alignment",
    "split.count",
    "training.type",
    "tokenizer.chat_template",
]
BESIDE += [
    f"tokenizer.ggml.{name}"
    for name in ("pre", "merges", "add_bos_token", "add_space_prefix", "eot_token_id")
]
BESIDE += [
    f"llama.{name}"
    for name in ("rope.scaling.type", "rope.freq_base", "rope.dimension_count", "expert_count")
]
SMALL: tuple[Argument, ...] = (
    "--ctx",
    16,
    "--batch",
    2,
    "--iters",
    1,
    "--threads",
    1,
    "--overwrite",
    "--out",
    "run",
)
COMMANDS: dict[str, tuple[Argument, ...]] = {
    "inspect": ("inspect", "FILE"),
    "for programs": ("inspect", "FILE", "--json"),
    "plan": ("plan", "finetune", "FILE", "text.txt"),
    "preview": ("preview", "text.txt", "--model", "FILE"),
    "evaluate": ("evaluate", "FILE", "text.txt", "--ctx", 16),
    "generate": ("generate", "FILE", "-n", 1, "--ctx", 8),
    "export-lora": ("export-lora", "FILE", "--lora", "FILE", "--out", "out.gguf"),
    "merge": ("merge", "FILE", "sound.gguf", "--out", "out.gguf", "--overwrite"),
    "extract-lora": ("extract-lora", "FILE", "sound.gguf", "--out", "out.gguf", "--overwrite"),
    "control-vector": ("control-vector", "FILE", "text.txt", "text.txt", "--out", "out.gguf", "--overwrite"),
    "a control vector": ("generate", "sound.gguf", "--control-vector", "FILE", "-n", 1, "--ctx", 8),
    "merge others": ("merge", "sound.gguf", "FILE", "--out", "out.gguf", "--overwrite"),
    "an adapter": ("generate", "sound.gguf", "--lora", "FILE", "-n", 1, "--ctx", 8),
    "finetune": ("finetune", "FILE", "text.txt", *SMALL),
    "from-scratch": ("from-scratch", "text.txt", "--checkpoint-in", "FILE", *SMALL),
    "a vocabulary": (
        "from-scratch",
        "text.txt",
        "--vocab-from",
        "FILE",
        "--embd",
        32,
        "--head",
        2,
        "--layer",
        1,
        *SMALL,
    ),
    "resume": ("finetune", "--resume", "FILE", "--out", "run"),
}


def told(what: object, *words: Argument) -> bool:
    """Whether it worked; else it said why in one line that a terminal can show."""
    with in_time(SECONDS):
        done = run(*words)
    assert (done.out if words[0] == "inspect" else "").replace("\n", "").isprintable(), (what, done.out)
    if done.code == 0:
        return True
    assert done.code in (1, 2) and len(done.errors) == 1 and len(done.errors[0]) < 400, (
        what,
        done.err[-2000:],
    )
    assert done.errors[0].isprintable() and done.err.splitlines()[-1] == done.errors[0], (
        what,
        done.err[-2000:],
    )
    return False


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("count", [12, pytest.param(1500, marks=pytest.mark.slow)])
def test_values_of_any_kind(name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat. " * 20)
    metadata, arrays, dice = llama_metadata(), llama_tensors(), random.Random(f"{name} {count}")
    write_arrays(Path("sound.gguf"), metadata, arrays)
    for _ in range(count):
        key, value = dice.choice([*metadata, *BESIDE]), dice.choice(VALUES)
        path = write_arrays(tmp_path / "f.gguf", {k: v for k, v in metadata.items() if k != key}, arrays)
        path = with_value(path, key, value)
        told(
            (key, value.kind, bytes(value.raw)[:40]),
            *(path if word == "FILE" else word for word in COMMANDS[name]),
        )


def with_value(path: Path, key: str, value: Value) -> Path:
    """The file with a key that no writer of ours would write, put in by hand: it is the last of the values."""
    gguf, raw = open_gguf(path), path.read_bytes()
    infos = list(gguf.tensors.values())
    start = len(encode_head(gguf.metadata.raw_values, infos, 32))
    made = encode_head({**gguf.metadata.raw_values, key: value}, infos, 32)
    path.write_bytes(made + bytes(-len(made) % 32) + raw[-(-start // 32) * 32 :])
    return path


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    "key", ["general.type", "general.architecture", "tokenizer.ggml.model", "training.type"]
)
def test_an_array_where_a_word_is_looked_for(
    name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numpy's are equal to no word, and not unequal to it either."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat. " * 20)
    write_arrays(Path("sound.gguf"), llama_metadata(), llama_tensors())
    write_arrays(Path("f.gguf"), {**llama_metadata(), key: numbers(Kind.UINT32, [1, 2, 3])}, llama_tensors())
    worked = told(key, *("f.gguf" if word == "FILE" else word for word in COMMANDS[name]))
    assert (
        not worked or key != "general.type" or name in ("inspect", "for programs", "preview", "a vocabulary")
    )


# ---- tokens ----------------------------------------------------------------

BROKEN = [
    "<0xZZ>",
    "<0x",
    "<0x>",
    "<0x+1>",
    "<0x 1>",
    "<0x1 >",
    "<0x１２>",
    "<0x٣٤>",
    "<0x_1>",
    "<0x1_>",
    "<0x-1>",
    "<0X41>",
    "<0x041>",
]


def test_a_byte_token_has_two_digits() -> None:
    assert [parse_byte(text) for text in BROKEN] == [None] * len(BROKEN)
    assert [parse_byte(text) for text in ("<0x0A>", "<0xff>", "<0x00>")] == [10, 255, 0]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_byte_token_stands_for_nothing(text: str) -> None:
    tokens = [*open_tokens(), text]
    kinds = numbers(Kind.INT32, [2, 3, 3] + [6] * 257)
    made = {
        "tokens": strings(tokens),
        "token_type": kinds,
        "scores": numbers(Kind.FLOAT32, [0.0] * len(tokens)),
    }
    tokenizer = load(
        Metadata({**bytes_vocabulary(), **{f"tokenizer.ggml.{name}": value for name, value in made.items()}})
    )
    assert tokenizer.vocabulary.kinds[-1] == TokenType.BYTE
    assert tokenizer.decode([259, 3 + 65]) == b"A" and tokenizer.byte_lengths[259] == 0


def open_tokens() -> list[str]:
    tokens: list[str] = Metadata(bytes_vocabulary())["tokenizer.ggml.tokens"]
    return tokens


@pytest.mark.parametrize(
    ("length", "taken"), [(MAX_CHARACTERS, True), (MAX_CHARACTERS + 1, False), (10**6, False)]
)
def test_a_token_has_an_end(length: int, taken: bool) -> None:
    """All ways to cut one in two are looked at: of a million characters that takes minutes."""
    tokens = strings([*open_tokens(), "a" * length])
    vocabulary = {**bytes_vocabulary(), "tokenizer.ggml.tokens": tokens}
    vocabulary = {
        key: value for key, value in vocabulary.items() if not key.endswith((".scores", ".token_type"))
    }
    with in_time(SECONDS):
        if taken:
            assert len(load(Metadata(vocabulary))) == 260
        else:
            with pytest.raises(
                FileError, match=f"token 259 has {length} characters; the limit is {MAX_CHARACTERS}"
            ):
                load(Metadata(vocabulary))


@pytest.mark.parametrize("value", [string("1"), f32(1.0), boolean(True), numbers(Kind.UINT32, [1])])
def test_a_tokens_number_is_a_whole_number(value: Value) -> None:
    with pytest.raises(
        FileError, match=r"tokenizer\.ggml\.eos_token_id is (a|an|true).*; expected a whole number"
    ):
        load(Metadata({**bytes_vocabulary(), "tokenizer.ggml.eos_token_id": value}))
