"""What is said names what was given, cuts it where it is long, and is said even where nobody listens."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

import llamatrain
from llamatrain.config.messages import shorten_line
from tests.helpers.adapter_files import adapter
from tests.helpers.cli import PROGRAM, TINY, Argument, environment, ran, run, text_file
from tests.helpers.emulator import SLOWNESS
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small

SMALL: tuple[Argument, ...] = (*TINY, "--ctx", 16, "--batch", 2, "--seed", 1, "--out", "run", "--overwrite")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path, 2000).rename("text.txt")
    return tmp_path


# ---- the option that was given ---------------------------------------------

CASES = [
    ({"epochs": 2**31 - 1}, "epochs "),
    ({"stop_delta": 0.5}, "stop_delta has no effect without stop_window; leave it out"),
    ({"optimizer": "sgd", "beta2": 0.5}, "beta2 has no effect with optimizer sgd; leave it out"),
    ({"loss": "squared-error"}, "loss squared-error "),
]


@pytest.mark.parametrize(
    ("options", "says"), CASES, ids=lambda each: " ".join(each) if isinstance(each, dict) else None
)
def test_an_option_has_the_name_that_it_was_given_by(options: dict[str, float | str], says: str) -> None:
    spelt = {
        word: word.replace("_", "-")
        for word in ("epochs", "stop_delta", "stop_window", "optimizer", "beta2", "loss")
    }

    def named(how: str) -> str:
        return " ".join(
            how + spelt[word.strip(";:")] + word[len(word.strip(";:")) :]
            if word.strip(";:") in spelt
            else word
            for word in says.split(" ")
        )

    flags = [word for name, value in options.items() for word in (f"--{spelt[name]}", value)]
    done = run("from-scratch", "text.txt", *SMALL, *flags)
    assert done.code == 2 and done.errors[0].startswith(f"error: {named('--')}"), done.err
    Path("c.toml").write_text("".join(f"{spelt[name]} = {value!r}\n" for name, value in options.items()))
    done = run("from-scratch", "text.txt", *SMALL, "--config", "c.toml")
    assert done.code == 2 and done.errors[0].startswith(f"error: c.toml: {named('')}"), done.err
    with pytest.raises(llamatrain.UsageError) as caught:
        llamatrain.from_scratch(
            "text.txt", vocab_size="bytes", embd=32, head=4, layer=1, ctx=16, out="run", **options
        )
    assert str(caught.value).startswith(says)


def test_what_is_turned_off_in_a_file_is_told_as_there() -> None:
    Path("c.toml").write_text("shuffle = false\n")
    done = run("from-scratch", "--config", "c.toml")
    assert done.code == 2 and done.errors[0].startswith("error: c.toml: shuffle = false has no effect"), (
        done.err
    )


# ---- long values -----------------------------------------------------------


def test_a_long_word_is_cut_in_its_place() -> None:
    assert shorten_line("a b c") == "a b c"
    line = shorten_line(f"{'x' * 5000}: no such thing; {'y' * 5000} would do")
    assert (
        "x ... x" in line
        and ": no such thing; y" in line
        and line.endswith("y would do")
        and len(line) <= 640
    )


@pytest.mark.parametrize(
    "words",
    [
        ("finetune", "base.gguf", "text.txt", "--target", "LONG"),
        ("finetune", "base.gguf", "text.txt", "--rank", "LONG=4"),
        ("from-scratch", "text.txt", "--sample-start", "LONG"),
        ("finetune", "--resume", "run", "--seed", 7),
    ],
    ids=lambda words: words[-2],
)
def test_a_long_value_is_cut(words: tuple[Argument, ...], here: Path) -> None:
    base(here / "base.gguf", small(), "Q8_0")
    done = run(*(word.replace("LONG", "x" * 5000) if isinstance(word, str) else word for word in words))
    assert done.code in (1, 2) and len(done.errors[0]) < 300, done.err[:700]


# ---- white space -----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [(b"", "the file is empty"), (b" \n\t" * 50_000, "the file contains only white space [empty-file]")],
)
def test_white_space_is_not_nothing(text: bytes, says: str) -> None:
    Path("blank.txt").write_bytes(text)
    done = run("from-scratch", "blank.txt", *SMALL)
    assert done.code == 1 and f"/blank.txt: {says}" in done.errors[0]


def test_text_behind_much_white_space_is_text() -> None:
    Path("late.txt").write_bytes(b"\n" * 70_000 + Path("text.txt").read_bytes())
    assert not ran("from-scratch", "late.txt", *SMALL, "--iters", 0).errors


# ---- nobody listens --------------------------------------------------------


def left_after(lines: int, *words: Argument) -> int:
    """The exit code of a command whose reader leaves after so many lines of either stream."""
    out, err = subprocess.PIPE, subprocess.STDOUT
    buffered = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen([*PROGRAM, *map(str, words)], env=buffered, stdout=out, stderr=err) as process:
        assert process.stdout
        for _ in range(lines):
            process.stdout.readline()
        process.stdout.close()
        return process.wait(60 * SLOWNESS)


@pytest.mark.parametrize("lines", [0, 2])
def test_a_run_goes_on_where_nobody_reads_it(lines: int) -> None:
    told = (
        "--iters",
        6,
        "--report-every",
        1,
        "--sample-every",
        2,
        "--val-split",
        0.2,
        "--eval-every",
        2,
        "--save-every",
        2,
    )
    assert left_after(lines, "from-scratch", "text.txt", *SMALL, *told) == 0
    assert (
        Path("run/model.gguf").exists()
        and Path("run/checkpoint-6.gguf").exists()
        and Path("run/loss.svg").exists()
    )


def test_an_export_is_done_where_nobody_reads_what_it_compares(here: Path) -> None:
    from llamatrain.adapters import gguf

    base(here / "base.gguf", small(), "Q8_0")
    gguf.write_adapter(here / "a.gguf", adapter(small(), ["blk.0.attn_v.weight"]))
    assert (
        left_after(0, "export-lora", "base.gguf", "--lora", "a.gguf", "--out", "m.gguf", "--check", "ab") == 0
    )
    assert Path("m.gguf").exists()
    assert left_after(0, "inspect", "m.gguf") == 1  # which is there to be read


# ---- clocks ----------------------------------------------------------------


@pytest.mark.parametrize("step", [0.0, -1.0], ids=["stands still", "goes backwards"])
def test_a_clock_that_does_not_go(step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e6]

    def clock() -> float:
        now[0] += step
        return now[0]

    with monkeypatch.context() as patched:
        for name in ("perf_counter", "time") if step else ("perf_counter", "monotonic", "time"):
            patched.setattr(time, name, clock)
        ran(
            "from-scratch",
            "text.txt",
            *SMALL,
            "--iters",
            3,
            "--grad-acc",
            2,
            "--save-every",
            1,
            "--report-every",
            1,
        )
    assert ran("inspect", "run/checkpoint-3.gguf")


def test_names_cannot_steer_a_terminal() -> None:
    name = "a\x1b[2J\r\u202eb.txt"
    Path(name).write_bytes(Path("text.txt").read_bytes())
    done = ran("from-scratch", name, *SMALL, "--iters", 1)
    assert done.err.replace("\n", "").isprintable(), repr(done.err)
    ran("from-scratch", "--config", "run/config.toml", "--out", "again")
    with pytest.raises(llamatrain.LlamatrainError) as caught:
        llamatrain.evaluate(name, name)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("place", ["a\0b", "\ud800", "x" * 5000, "a\x1b[2J"])
def test_places_that_cannot_be_are_told_in_python(place: str) -> None:
    with pytest.raises(llamatrain.LlamatrainError) as caught:
        llamatrain.evaluate("text.txt", place)
    with pytest.raises(llamatrain.LlamatrainError) as other:
        llamatrain.load(place)
    with pytest.raises(llamatrain.LlamatrainError):
        llamatrain.load("text.txt", lora=place)
    assert str(other.value).isprintable() and len(str(other.value)) < 400 and str(caught.value).isprintable()


def test_a_sample_starts_with_any_bytes() -> None:
    Path("bytes.txt").write_bytes(b"a\xffb the cat sat on the mat " * 50)
    done = run("from-scratch", "bytes.txt", *SMALL, "--iters", 0, "--sample-start", "\udcff")
    assert done.code == 0 or (done.code == 1 and len(done.errors) == 1), done.err
    done = run("from-scratch", "text.txt", *SMALL, "--iters", 0, "--sample-start", "\udcff")
    assert done.code == 1 and "the sample start" in done.errors[0] and done.errors[0].isprintable(), done.err


def test_a_bars_title_cannot_either() -> None:
    code = (
        "import io, sys; sys.stderr = type('T', (io.StringIO,), {'isatty': lambda self: True})()\n"
        "from llamatrain.platform import terminal\n"
        "terminal.BAR_DELAY = 0\n"
        "with terminal.show_log(), terminal.progress_bar('a\\x1b[2Jb', total=2) as told:\n    told.draw()\n"
        "print(ascii(sys.stderr.getvalue()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert "\\x1b[2J" not in done.stdout.replace("\\\\x1b", "") and "a\\\\x1b[2Jb" in done.stdout, done.stdout
