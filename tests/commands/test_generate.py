"""`llamatrain generate`: text alone on standard output, as it comes; and how it fails."""

import io
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from llamatrain.adapters.options import AdapterOptions
from llamatrain.cli import generate as command
from llamatrain.cli.main import app
from llamatrain.commands.generate import LoadOptions, TextModel
from llamatrain.data.tokenizer import load as load_tokenizer
from llamatrain.errors import LlamatrainError, UsageError
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import boolean, f32, string, strings, u32
from llamatrain.sample.decoder import Decoder, Generation
from llamatrain.sample.options import SamplingOptions
from tests.helpers.small_models import loaded, small, weights, written

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, h, n = tmp_path_factory.mktemp("models"), small(), small(vocab=8, ctx=16, layers=1)
    written(folder / "m.gguf", h, weights(h))
    written(folder / "half.gguf", h, weights(h), "BF16")
    written(folder / "numbers.gguf", n, weights(n))
    return folder


@pytest.fixture
def run(models: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(models)

    def run(*arguments: str, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(app, ["generate", *arguments], input=stdin)

    return run


def printed(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout_bytes.decode()


def notes(result: Result) -> list[str]:
    """What it says to people, but that kernels are compiled: whether they are is the cache's affair."""
    return [line for line in result.stderr.splitlines() if not line.startswith("compil")]


def failed(result: Result) -> str:
    assert isinstance(result.exception, LlamatrainError), result.output
    assert not result.stdout and "\n" not in str(result.exception)
    return str(result.exception)


def expected(path: str, prompt: list[int], **sampling: float) -> str:
    gguf = open_gguf(path)
    h, arrays = loaded(gguf)
    tokenizer = load_tokenizer(gguf.metadata)
    made = Generation(Decoder(h, arrays, ctx=h.ctx, threads=2), prompt, SamplingOptions(**sampling), {1})  # type: ignore[arg-type]
    return tokenizer.decode(list(made), special=False).decode("utf-8", "replace")


def ids(text: str) -> list[int]:
    return load_tokenizer(open_gguf("m.gguf").metadata).encode(text).tolist()


# ---- what comes out --------------------------------------------------------


def test_the_generated_text_alone(run: Run) -> None:
    greedy = run("m.gguf", "--prompt", "Once", "--temp", "0", "-n", "30")
    assert printed(greedy) == expected("m.gguf", [0, *ids("Once")], temp=0, n=30) and not notes(greedy)
    drawn = ("m.gguf", "--prompt", "Once", "--temp", "1.5", "--seed", "7", "--top-k", "0", "-n", "30")
    assert (
        printed(run(*drawn))
        == expected("m.gguf", [0, *ids("Once")], temp=1.5, seed=7, top_k=0, n=30)
        == printed(run(*drawn))
    )


def test_without_a_seed_each_text_is_another(run: Run) -> None:
    assert len({printed(run("m.gguf", "--temp", "2", "-n", "30")) for _ in range(3)}) > 1


def test_the_prompt_from_elsewhere(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("zwölf\nOnce\n\n")
    wanted = printed(run("m.gguf", "--prompt", "zwölf\nOnce\n", "--temp", "0"))
    assert printed(run("m.gguf", "--file", str(tmp_path / "p.txt"), "--temp", "0")) == wanted
    assert printed(run("m.gguf", "--prompt", "-", "--temp", "0", stdin="zwölf\nOnce\n\n".encode())) == wanted
    printed(run("m.gguf", "--prompt", "-", "--temp", "0", stdin=b"\xff\xfe no text"))


def test_a_prompt_begins_with_the_token_that_begins_texts(run: Run) -> None:
    plain = printed(run("m.gguf", "--prompt", "ab", "--temp", "0"))
    assert (
        printed(run("m.gguf", "--prompt", "<|begin_of_text|>ab", "--temp", "0")) == plain
    )  # read as that token, and not put twice
    h = small()
    written(Path("bare.gguf"), h, weights(h), more={"tokenizer.ggml.add_bos_token": boolean(False)})
    assert printed(run("bare.gguf", "--prompt", "<|begin_of_text|>ab", "--temp", "0")) == plain
    assert printed(run("bare.gguf", "--prompt", "ab", "--temp", "0")) != plain
    assert printed(run("bare.gguf", "--temp", "0")) == printed(
        run("m.gguf", "--temp", "0")
    )  # of nothing it takes that token


def test_it_stops_before_a_stop_text(run: Run) -> None:
    whole = printed(run("m.gguf", "--temp", "0", "--prompt", "x"))
    stop = whole[20:23]
    assert (
        len(stop) == 3
        and printed(run("m.gguf", "--temp", "0", "--prompt", "x", "--stop", stop))
        == whole[: whole.index(stop)]
    )


def test_it_ends_where_the_model_ends_the_text(run: Run) -> None:
    whole = printed(run("m.gguf", "--temp", "0", "--prompt", "x"))
    place, sign = next(
        (i, sign) for i, sign in enumerate(whole) if i > 2 and "!" <= sign <= "~" and sign not in whole[:i]
    )
    for name in ("eos", "eot"):
        end = {f"tokenizer.ggml.{name}_token_id": u32(ids(sign)[0])}
        written(Path("ends.gguf"), small(), weights(small()), more=end)
        assert printed(run("ends.gguf", "--temp", "0", "--prompt", "x")) == whole[:place]


def test_a_full_context_is_told(run: Run) -> None:
    result = run("m.gguf", "--prompt", "abc", "--ctx", "10", "--temp", "0")
    (note,) = notes(result)
    assert note.startswith("note: the context of 10 tokens is full; ")
    assert "--ctx," in note and "--ctx-shift" in note
    assert printed(result) == expected("m.gguf", [0, *ids("abc")], temp=0, n=6)
    assert not notes(run("m.gguf", "--prompt", "abc", "--ctx", "10", "--temp", "0", "-n", "6"))
    assert "made for 64 tokens" in run("m.gguf", "--prompt", "abc", "--ctx", "70", "-n", "1").stderr


def test_tokens_without_text(run: Run) -> None:
    first = printed(run("numbers.gguf", "--prompt", "0 3 5", "--temp", "0", "-n", "10")).split(" ")
    assert len(first) == 10 and set(first) <= set("01234567")
    more = printed(
        run("numbers.gguf", "--prompt", f"0 3 5 {' '.join(first[:4])}", "--temp", "0", "-n", "6")
    ).split(" ")
    assert first == first[:4] + more


def test_weights_of_another_type(run: Run) -> None:
    assert printed(run("half.gguf", "--prompt", "ab", "--temp", "0")) == expected(
        "half.gguf", [0, *ids("ab")], temp=0
    )


class Raw(io.RawIOBase):
    """What reaches the system, in the pieces in which it does."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.pieces.append(bytes(data))
        return len(data)


def test_text_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = Raw()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(raw), "ascii"))
    for text in ("a", "\x1b[0mä"):
        command.print_text(text)
    assert raw.pieces == [b"a", "\x1b[0mä".encode()]


def test_on_a_terminal_nothing_moves_the_cursor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    command.print_text("a\x1b[2J\x07\r\nä\t")
    assert capsys.readouterr().out == "a\\x1b[2J\\x07\\r\nä\t"


# ---- how it fails ----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("m.gguf", "--ctx", "0"), "--ctx must be 1 to 1048576 (got 0)"),
        (("m.gguf", "--threads", "0"), "--threads must be 1 to 1024 (got 0)"),
        (("m.gguf", "--top-p", "2"), "--top-p must be 0 to 1 (got 2)"),
        (("m.gguf", "--prompt", "a", "--file", "b"), "exclude each other"),
        (("m.gguf", "--prompt", "a" * 64), "the prompt must fit the context of 64 tokens (got 65)"),
        (("numbers.gguf",), "a prompt of token numbers"),
        (("numbers.gguf", "--prompt", "1 -2"), "a prompt of token numbers"),
        (("numbers.gguf", "--prompt", "1 ²"), "a prompt of token numbers"),
        (("numbers.gguf", "--prompt", "1 8"), "token ids must be below 8 (got 8)"),
        (("numbers.gguf", "--prompt", "9" * 5000), "a prompt of token numbers"),
        (("none.gguf",), "none.gguf: No such file"),
    ],
)
def test_what_cannot_be_meant(arguments: tuple[str, ...], told: str, run: Run) -> None:
    assert told in failed(run(*arguments))


@pytest.mark.parametrize(
    ("model", "words", "count"),
    [("m.gguf", b"a few words\n", 600_001), ("numbers.gguf", b"0 3 5 7\n", 200_000)],
)
def test_a_prompt_that_is_too_long_is_counted_and_not_held(
    model: str, words: bytes, count: int, run: Run
) -> None:
    opened, prompt = TextModel(Path(model), LoadOptions(), AdapterOptions()), words * 50_000
    tracemalloc.start()
    with pytest.raises(UsageError, match=rf"the prompt must fit the context of \d+ tokens \(got {count}\)"):
        opened.continue_text(prompt, SamplingOptions())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3e6


def test_models_that_cannot_generate(run: Run) -> None:
    h, arrays = small(), weights(small())
    end = {"tokenizer.ggml.tokens": strings([f"t{i}" for i in range(257)])}
    written(Path("few.gguf"), h, arrays, more=end)
    assert "few.gguf: the vocabulary has 257 tokens, but token_embd.weight has 258 rows" in failed(
        run("few.gguf")
    )
    written(Path("nan.gguf"), h, arrays, more={"llama.rope.scaling.attn_factor": f32(1e38)})
    assert "finite" in failed(run("nan.gguf", "--prompt", "ab"))
    written(Path("wide.gguf"), h, arrays, more={"llama.context_length": u32(1 << 24)})
    assert len(printed(run("wide.gguf", "--prompt", "ab", "-n", "2"))) > 0  # the context stays small
    mute = {
        "tokenizer.ggml.add_bos_token": boolean(False),
        "tokenizer.ggml.bos_token_id": u32(999),
        "tokenizer.ggml.pre": string("glm4"),
    }
    written(Path("mute.gguf"), h, arrays, more=mute)
    assert "needs a prompt" in failed(run("mute.gguf"))
    printed(run("mute.gguf", "--prompt", "ab", "-n", "1"))


def test_what_does_not_fit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamatrain.model.load.available_bytes", lambda: 1000)
    assert "bytes of memory, but 1,000 are available" in failed(run("m.gguf"))


# ---- as a process ----------------------------------------------------------

GENERATE = "import sys; sys.argv[0] = 'llamatrain'; from llamatrain.cli.main import main; main()"


def started(*arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", GENERATE, "generate", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(command.__file__).parents[2])},
    )


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose context takes a while to fill."""
    h = small(ctx=1 << 20, layers=1)
    return str(written(tmp_path_factory.mktemp("endless") / "m.gguf", h, weights(h)))


LONG = ("--prompt", "ab", "--ctx", "100000", "--seed", "1", "--temp", "2")


@pytest.mark.skipif(os.name == "nt", reason="signals are others there")
def test_text_streams_until_an_interrupt(endless: str) -> None:
    process = started(endless, *LONG)
    assert process.stdout and process.stderr
    assert len(process.stdout.read(50)) == 50
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=20)
    assert process.returncode == 130 and b"Traceback" not in told and b"error" not in told


@pytest.mark.skipif(os.name == "nt", reason="pipes break otherwise there")
def test_a_reader_that_leaves(endless: str) -> None:
    process = started(endless, *LONG)
    assert process.stdout and process.stderr
    process.stdout.read(10)
    process.stdout.close()
    with process:
        told = process.stderr.read()
    assert process.returncode == 1
    assert b"Traceback" not in told and b"error" not in told


def test_beyond_the_context(run: Run) -> None:
    words = ("m.gguf", "--prompt", "abc", "--ctx", "24", "--temp", "0")
    full = run(*words)
    assert len(printed(full)) and len(notes(full)) == 1
    assert notes(full)[0].startswith("note: the context of 24 tokens is full; ")
    assert "--ctx," in notes(full)[0] and "--ctx-shift" in notes(full)[0]
    longer = run(*words, "--ctx-shift", "-n", "60")
    assert notes(longer) == [] and printed(longer).startswith(printed(full)[:8])
    kept = printed(run(*words, "--ctx-shift", "-n", "60", "--keep", "-1"))
    assert kept == printed(run(*words, "--ctx-shift", "-n", "60", "--keep", "4")) != printed(longer)
    assert "--keep has no effect without --ctx-shift" in failed(run(*words, "--keep", "3"))
