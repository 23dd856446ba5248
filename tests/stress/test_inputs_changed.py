"""Files that are written to, cut short, replaced or removed while a command reads them: told in a line, and nothing is lost."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.errors import FileError
from llamatrain.gguf import reader
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import Kind
from llamatrain.gguf.values import number as number_of
from llamatrain.gguf.writer import create_gguf
from tests.helpers.cli import TINY, Argument, Done, environment, ran, run, same_bits, text_file
from tests.helpers.lora_runs import WIDE, base, pairs, random_adapter
from tests.helpers.small_models import small, weights, written

pytestmark = pytest.mark.skipif(
    os.name != "posix", reason="elsewhere no file can be changed while it is mapped"
)

ITERS = ("--iters", 4, "--ctx", 16, "--batch", 2, "--sample-every", 0, "--threads", 2, "--precision", "f32")
EACH = ("--save-every", 1)
STEP = "llamatrain.report.report Report.on_step"  # called when a step is done
# The command, with something done before the n-th call of a function.
HOOKED = """
import importlib, os
from pathlib import Path
from llamatrain.cli.main import main
module, names, number = os.environ["PLACE"].split()
owner, calls = importlib.import_module(module), 0
*outer, name = names.split(".")
for each in outer:
    owner = getattr(owner, each)
real = getattr(owner, name)
def hooked(*arguments, **named):
    global calls
    calls += 1
    if calls == int(number):
        exec(os.environ["DEED"])
    return real(*arguments, **named)
setattr(owner, name, hooked)
main()
"""


def disturbed(place: str, number: int, deed: str, *arguments: Argument) -> Done:
    """In a process of its own: a signal may end it."""
    return apart("-c", HOOKED, *arguments, PLACE=f"{place} {number}", DEED=deed)


def apart(*words: Argument, **more: str) -> Done:
    """Python, in a process of its own."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, env=environment(**more), capture_output=True, text=True, timeout=60, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def meanwhile(monkeypatch: pytest.MonkeyPatch, place: str, number: int, deed: Callable[[], object]) -> None:
    """The same in this process, where nothing is cut short."""
    module, names = place.split()
    *outer, name = names.split(".")
    owner, calls = importlib.import_module(module), 0
    for each in outer:
        owner = getattr(owner, each)
    real = getattr(owner, name)

    def hooked(*arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls == number:
            deed()
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, hooked)


def cut(path: Path, size: int) -> str:
    return f"os.truncate({str(path)!r}, {size})"


def larger(path: Path) -> Callable[[], object]:
    """As `cp` writes over a file."""
    return lambda: path.write_bytes(b"\xff" * (path.stat().st_size + 100_000))


def told(done: Done, path: Path, *words: str) -> None:
    """One line names the file and what happened; the command failed."""
    assert done.code == 1, done.err
    assert "Traceback" not in done.err and len(done.errors) == 1, done.err
    assert str(path) in done.errors[0]
    for each in words:
        assert each in done.errors[0], done.errors[0]


def no_temporary(folder: Path) -> None:
    assert not [file for file in folder.rglob("*") if file.name.endswith(".tmp")]


def sound(folder: Path, result: str) -> None:
    """What a run left can be read."""
    assert open_gguf(folder / result).tensors
    there = [*folder.glob("checkpoint-*.gguf")]
    assert there
    for path in there:
        read_checkpoint(path)
    no_temporary(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


@pytest.fixture(scope="module")
def text(folder: Path) -> Path:
    return text_file(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """All in float32; with factors for its rotations, which every save writes again."""
    h = small()
    rope = type(h.rope)(h.head_size, factors=np.full(h.head_size // 2, 2.0, np.float32))
    return written(folder / "model.gguf", small(rope=rope), weights(small()))


@pytest.fixture(scope="module")
def quantised(folder: Path) -> Path:
    return base(folder / "quantised.gguf", WIDE, "Q4_0")


@pytest.fixture(scope="module")
def adapter(folder: Path, quantised: Path, text: Path) -> Path:
    """Of an undisturbed run."""
    ran("finetune", quantised, text, "--out", folder / "undisturbed", "--cache-base", "off", *ITERS)
    return folder / "undisturbed" / "adapter.gguf"


@pytest.fixture
def copy(tmp_path: Path, quantised: Path) -> Path:
    path = tmp_path / "b.gguf"
    path.write_bytes(quantised.read_bytes())
    return path


def same_adapter(one: Path, other: Path) -> None:
    left, right = pairs(one), pairs(other)
    assert left.keys() == right.keys()
    assert all(
        a.tobytes() == b.tobytes() for name in left for a, b in zip(left[name], right[name], strict=True)
    )


# ---- what is read once -----------------------------------------------------


def test_values_outlive_their_file(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model.read_bytes())
    gguf = open_gguf(path)
    before = {key: bytes(value.raw) for key, value in gguf.metadata.raw_values.items()}
    larger(path)()
    assert {key: bytes(value.raw) for key, value in gguf.metadata.raw_values.items()} == before


def test_a_head_that_changes_while_it_is_read(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model.read_bytes())
    meanwhile(monkeypatch, "llamatrain.gguf.reader read_tensor_infos", 1, larger(path))
    with pytest.raises(
        FileError, match=r"m\.gguf: was written to while it was being read; repeat the command"
    ):
        open_gguf(path)


def test_a_head_whose_end_is_cut_off(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model.read_bytes())
    monkeypatch.setattr("llamatrain.gguf.parser.CHUNK_BYTES", 64)
    meanwhile(monkeypatch, "llamatrain.gguf.reader read_metadata", 1, lambda: os.truncate(path, 1000))
    with pytest.raises(FileError, match=r"m\.gguf: was truncated from \d+ to 1000 bytes"):
        open_gguf(path)


def test_a_head_is_bounded(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamatrain.gguf.parser.MAX_HEAD_BYTES", 1 << 10)
    with pytest.raises(FileError, match="the head is longer than 1024 bytes"):
        reader.open_gguf(model)


@pytest.mark.parametrize("how", ["checkpoint-in", "full", "vocab-from"])
def test_a_run_of_every_weight_needs_its_file_no_more(
    how: str, tmp_path: Path, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(model.read_bytes())
    begun: dict[str, tuple[Argument, ...]] = {
        "checkpoint-in": ("from-scratch", text, "--checkpoint-in", source),
        "full": ("finetune", source, text, "--full"),
        "vocab-from": ("from-scratch", text, "--vocab-from", source, *TINY[2:-2]),
    }
    ran(*begun[how], *ITERS, "--out", tmp_path / "calm")
    meanwhile(monkeypatch, STEP, 2, larger(source))
    done = ran(*begun[how], *ITERS, *EACH, "--out", tmp_path / "out")
    assert (
        done.err.count(f"warning: {source} was written to; training continues with its former content\n") == 1
    ), done.err
    sound(tmp_path / "out", "model.gguf")
    same_bits(tmp_path / "out" / "model.gguf", tmp_path / "calm" / "model.gguf")
    calm, out = (open_gguf(tmp_path / name / "model.gguf").metadata for name in ("calm", "out"))
    assert {key: value.raw for key, value in calm.raw_values.items()} == {
        key: value.raw for key, value in out.raw_values.items()
    }


def test_weights_cut_off_before_they_are_loaded(tmp_path: Path, model: Path, text: Path) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(model.read_bytes())
    words = ("from-scratch", text, "--checkpoint-in", source, *ITERS, "--out", tmp_path / "o")
    done = disturbed("llamatrain.model.load load_weights", 1, cut(source, 100_000), *words)
    told(done, source, "was truncated", "repeat the command")
    assert not (tmp_path / "o").exists()


# ---- a base that steps read ------------------------------------------------


def gone_on(tmp_path: Path, quantised: Path, adapter: Path, done: Done, *words: str) -> None:
    """The run was saved as it stood, and goes on once the file is what it was, as if nothing had happened."""
    source, out = tmp_path / "b.gguf", tmp_path / "out"
    told(done, source, *words, "continue with --resume from step 2", str(out / "checkpoint-2.gguf"))
    sound(out, "adapter.gguf")
    source.write_bytes(quantised.read_bytes())
    ran("finetune", "--resume", out)
    same_adapter(out / "adapter.gguf", adapter)


@pytest.mark.parametrize("left", [0, 0.5])
def test_a_base_cut_short(
    left: float, tmp_path: Path, copy: Path, quantised: Path, text: Path, adapter: Path
) -> None:
    deed = cut(copy, int(left * copy.stat().st_size))
    arguments = ("finetune", copy, text, "--out", tmp_path / "out", "--cache-base", "off", *ITERS)
    gone_on(tmp_path, quantised, adapter, disturbed(STEP, 2, deed, *arguments), "was truncated from")


def not_numbers(path: Path, where: slice | None = None) -> None:
    """In place, in the middle of its last tensor or at some bytes."""
    size = path.stat().st_size
    where = where or slice(size // 2, size // 2 + 40_000)
    with path.open("r+b") as file:
        file.seek(where.start)
        file.write(b"\xff" * (where.stop - where.start))


WAYS: dict[str, tuple[Argument, ...]] = {
    "usual": (),
    "larger": (),
    "not kept": ("--clip", 0),
    "accumulated": ("--grad-acc", 2),
    "searched": ("--optimizer", "lbfgs"),
}


@pytest.mark.parametrize("how", WAYS)
def test_a_base_written_to(
    how: str,
    tmp_path: Path,
    copy: Path,
    quantised: Path,
    text: Path,
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In place, and by a larger file; whatever becomes of gradients."""
    arguments = (text, "--cache-base", "off", *ITERS, *WAYS[how])
    if WAYS[how]:
        ran("finetune", quantised, *arguments, "--out", tmp_path / "calm")
        adapter = tmp_path / "calm" / "adapter.gguf"
    deed = larger(copy) if how == "larger" else lambda: not_numbers(copy)
    with monkeypatch.context() as patched:
        meanwhile(patched, STEP, 2, deed)
        done = run("finetune", copy, *arguments, "--out", tmp_path / "out")
    gone_on(tmp_path, quantised, adapter, done, "was written to while it was being read")


def test_a_base_written_to_before_a_validation(
    tmp_path: Path, copy: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, "llamatrain.report.report Report.show_activity", 2, lambda: not_numbers(copy))
    options = ("--val-split", 0.2, "--eval-every", 2, "--out", tmp_path / "out", "--cache-base", "off")
    done = run("finetune", copy, text, *ITERS, *options)
    told(done, copy, "was written to", "from step 2")
    assert read_checkpoint(tmp_path / "out" / "checkpoint-2.gguf").state.validation_due


def test_a_base_that_was_touched(
    tmp_path: Path, copy: Path, text: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, STEP, 2, lambda: os.utime(copy))
    meanwhile(monkeypatch, STEP, 3, lambda: os.utime(copy, (1, 1)))
    done = ran("finetune", copy, text, "--out", tmp_path / "out", "--cache-base", "off", *ITERS, *EACH)
    assert done.err.count("was written to, but its content looks the same: training continues") == 1
    same_adapter(tmp_path / "out" / "adapter.gguf", adapter)


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_base_that_is_another_file(
    how: str,
    tmp_path: Path,
    copy: Path,
    text: Path,
    adapter: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = tmp_path / "other"
    other.write_bytes(model.read_bytes())
    meanwhile(monkeypatch, STEP, 2, lambda: other.replace(copy) if how == "replaced" else copy.unlink())
    done = ran("finetune", copy, text, "--out", tmp_path / "out", "--cache-base", "off", *ITERS, *EACH)
    happened = "was replaced" if how == "replaced" else "was deleted"
    line = f"warning: {copy} {happened}; training continues with its former content, which --resume will need"
    assert done.err.count(line) == 1, done.err
    sound(tmp_path / "out", "adapter.gguf")
    same_adapter(tmp_path / "out" / "adapter.gguf", adapter)


def test_a_base_that_was_copied(
    tmp_path: Path, copy: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, STEP, 2, larger(copy))
    done = ran(
        "finetune",
        copy,
        text,
        *ITERS[:-2],
        "--precision",
        "bf16",
        "--cache-base",
        "bf16",
        "--out",
        tmp_path / "out",
    )
    assert (
        done.err.count(
            f"{copy} was written to; training continues with its former content, which --resume will need"
        )
        == 1
    )
    sound(tmp_path / "out", "adapter.gguf")


def test_numbers_that_are_none_are_the_bases_fault(
    tmp_path: Path, copy: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was written to between the places that are looked at."""
    tensor = open_gguf(copy).tensors["blk.0.ffn_down.weight"]
    first = tensor.offset + 256 // 18 * 18 + 18  # whole blocks: their scales become NaN
    meanwhile(monkeypatch, STEP, 2, lambda: not_numbers(copy, slice(first, first + 18 * 50)))
    done = run("finetune", copy, text, "--out", tmp_path / "out", "--cache-base", "off", *ITERS, *EACH)
    told(
        done,
        copy,
        "step 3: the loss is nan",
        "was written to during the run, which may be the reason",
        "checkpoint-2.gguf",
    )
    assert "learning rate" not in done.err
    sound(tmp_path / "out", "adapter.gguf")


def test_an_adapter_that_is_mixed_in(
    tmp_path: Path, quantised: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = random_adapter(tmp_path / "mixed.gguf", WIDE, ["blk.0.attn_q.weight"])
    arguments = ("finetune", quantised, text, "--lora", mixed, "--cache-base", "off", *ITERS)
    ran(*arguments, "--out", tmp_path / "calm")
    meanwhile(monkeypatch, STEP, 2, larger(mixed))
    done = ran(*arguments, "--out", tmp_path / "out")
    assert done.err.count(f"warning: {mixed} was written to") == 1, done.err
    same_adapter(tmp_path / "out" / "adapter.gguf", tmp_path / "calm" / "adapter.gguf")


def test_a_part_of_a_split_base_cut_short(tmp_path: Path, quantised: Path, text: Path) -> None:
    gguf = open_gguf(quantised)
    names, parts = list(gguf.tensors), [tmp_path / f"b-0000{n}-of-00002.gguf" for n in (1, 2)]
    for number, some in enumerate((names[:3], names[3:])):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(names)}
        kinds = {"split.tensors.count": Kind.INT32}
        keys = {key: number_of(kinds.get(key, Kind.UINT16), value) for key, value in split.items()}
        metadata = gguf.metadata.raw_values | keys if number == 0 else keys
        with create_gguf(parts[number], metadata, [gguf.tensors[name] for name in some]) as out:
            for name in some:
                out.write(name, gguf.tensors[name].raw)
    words = ("finetune", parts[0], text, "--out", tmp_path / "out", "--cache-base", "off", *ITERS)
    told(
        disturbed(STEP, 2, cut(parts[1], 10_000), *words),
        parts[1],
        "was truncated",
        "continue with --resume from step 2",
    )
    sound(tmp_path / "out", "adapter.gguf")


def test_a_folder_of_peft_cut_short_while_it_is_read(tmp_path: Path, quantised: Path, text: Path) -> None:
    ran(
        "finetune",
        quantised,
        text,
        *ITERS[2:],
        "--iters",
        1,
        "--peft",
        tmp_path / "peft",
        "--out",
        tmp_path / "first",
    )
    weights_of = tmp_path / "peft" / "adapter_model.safetensors"
    words = ("export-lora", quantised, "--lora", tmp_path / "peft", "--out", tmp_path / "merged.gguf")
    told(
        disturbed("llamatrain.adapters.peft read_factor", 2, cut(weights_of, 3000), *words),
        weights_of,
        "was truncated",
    )
    assert not (tmp_path / "merged.gguf").exists()
    no_temporary(tmp_path)


# ---- the other commands ----------------------------------------------------


def test_export(tmp_path: Path, copy: Path, adapter: Path) -> None:
    for number, left in ((2, 0.5), (8, 0)):  # a tensor that is merged, one that is copied
        deed = cut(copy, int(left * copy.stat().st_size))
        arguments = ("export-lora", copy, "--lora", adapter, "--out", tmp_path / "merged.gguf")
        done = disturbed("llamatrain.gguf.writer Writer.write", number, deed, *arguments)
        told(done, copy, "was truncated", "repeat the command")
        assert sorted(file.name for file in tmp_path.iterdir()) == ["b.gguf"]
        os.truncate(copy, 1)
        copy.write_bytes((adapter.parent.parent / "quantised.gguf").read_bytes())


def test_evaluate(tmp_path: Path, copy: Path, text: Path) -> None:
    deed = cut(copy, copy.stat().st_size // 2)
    done = disturbed(
        "llamatrain.train.programs EvalPrograms.eval_loss",
        3,
        deed,
        "evaluate",
        copy,
        text,
        "--ctx",
        32,
        "--threads",
        2,
    )
    told(done, copy, "was truncated", "repeat the command")
    assert not done.out


def test_generate(tmp_path: Path, copy: Path) -> None:
    deed = cut(copy, copy.stat().st_size // 2)
    words = ("generate", copy, "--prompt", "some words", "-n", 20, "--temp", 0, "--threads", 2)
    told(disturbed("llamatrain.sample.decoder Decoder.feed", 5, deed, *words), copy, "was truncated")


def test_a_checkpoint_cut_short_while_it_is_gone_on_with(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    ran("from-scratch", text, *TINY, "--iters", 2, "--ctx", 16, "--sample-every", 0, "--out", out)
    path = out / "checkpoint-2.gguf"
    deed = cut(path, path.stat().st_size // 2)
    done = disturbed(
        "llamatrain.run.build load_weights", 1, deed, "from-scratch", "--resume", path, "--iters", 4
    )
    told(done, path, "was truncated")
    no_temporary(out)


def test_an_adapter_of_a_checkpoint_cut_short(tmp_path: Path, adapter: Path) -> None:
    path = tmp_path / "checkpoint.gguf"
    path.write_bytes((adapter.parent / "checkpoint-4.gguf").read_bytes())
    deed, words = cut(path, 20_000), ("--only-write-lora", "--out", tmp_path / "out")
    done = disturbed("llamatrain.run.write_only check_weights", 1, deed, "finetune", "--resume", path, *words)
    told(done, path, "was truncated")
    assert not (tmp_path / "out").exists()


def test_text_cut_short(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("a sample of some words.\n" * 4000)
    place, deed = "llamatrain.data.readers.text check_no_zero_bytes", cut(path, 5000)
    words = ("preview", path, "--model", model, "--sample-start", "a sample", "-n", 1)
    done = disturbed(place, 20, deed, *words)
    told(done, path, "was truncated")
