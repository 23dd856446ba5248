"""`llamatrain generate --chat`: turns through the template that was trained, from a pipe and on a terminal."""

import builtins
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters.options import AdapterOptions, ControlOptions
from llamatrain.cli import generate as command
from llamatrain.commands.chat import ChatOptions, Conversation, llama_command, quote_word
from llamatrain.commands.generate import LoadOptions, TextModel
from llamatrain.data.chat.builtin import TEMPLATES
from llamatrain.data.tokenizer import load
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import string
from llamatrain.sample.decoder import Decoder, Generation
from llamatrain.sample.options import SamplingOptions
from tests.helpers.cli import TINY, Done, losses, ran, run, same_bits, text_file
from tests.helpers.small_models import loaded, small, weights, written

PLAIN = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
SWITCHED = PLAIN.replace(
    "'a:'", "'a:' if enable_thinking else 'a!'"
)  # a prompt that tells whether thinking is on
FEW = ("-n", 5, "--temp", 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, h, n = tmp_path_factory.mktemp("models"), small(ctx=256), small(vocab=8, ctx=16, layers=1)
    written(folder / "m.gguf", h, weights(h), more={"tokenizer.chat_template": string(PLAIN)})
    written(folder / "bare.gguf", h, weights(h))
    written(folder / "numbers.gguf", n, weights(n))
    return folder


@pytest.fixture(autouse=True)
def here(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)


def piped(monkeypatch: pytest.MonkeyPatch, lines: str, *words: str | float) -> Done:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    return run("generate", "m.gguf", "--chat", *words)


def answered(prompt: str, n: int = 5) -> str:
    """What the model says behind a text, by itself."""
    gguf = open_gguf("m.gguf")
    h, arrays = loaded(gguf)
    tokenizer = load(gguf.metadata)
    tokens = [0, *tokenizer.encode(prompt, start=False).tolist()]
    made = Generation(Decoder(h, arrays, ctx=h.ctx, threads=2), tokens, SamplingOptions(n=n, temp=0.0), {1})
    return tokenizer.decode(np.array(list(made)), special=False).decode("utf-8", "replace")


def test_each_line_is_a_turn_behind_all_before(monkeypatch: pytest.MonkeyPatch) -> None:
    done = piped(monkeypatch, "hi\n\nand you?\n", *FEW, "--system", "be kind")
    one = answered("s:be kind|u:hi|a:")
    two = answered(f"s:be kind|u:hi|a:{one}|u:and you?|a:")
    assert (done.code, done.out) == (0, f"{one}\n{two}\n")


def test_a_turn_computes_what_is_new_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fed, feed = list[int](), Decoder.feed

    def counted(self: Decoder, tokens: Sequence[int]) -> np.ndarray:
        fed.append(len(tokens))
        return feed(self, tokens)

    monkeypatch.setattr(Decoder, "feed", counted)
    done = piped(monkeypatch, "and you?\n" * 8, "-n", 2, "--temp", 0)
    said = "".join(f"u:and you?|a:{answer}|" for answer in done.out.splitlines())
    whole = len(load(open_gguf("m.gguf").metadata).encode(said))
    assert (
        done.code == 0 and whole <= sum(fed) + 2 < 1.3 * whole
    )  # an answer's tokens may be others where it is read again


def test_what_is_to_be_said_is_said_once_in_a_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        piped(monkeypatch, "hi\n" * 3, *FEW, "--ctx", 300).err.count("the model was made for 256 tokens") == 1
    )


def test_the_oldest_turns_go_where_the_talk_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--temp", 0, "-n", 1, "--ctx", 64, "--system", "kind")
    done = piped(monkeypatch, "abcdefgh\n" * 12, *words, "--ctx-shift")
    assert done.code == 0 and len(done.out.splitlines()) == 12 and done.err.count("the oldest turns") == 1
    assert (
        "add --ctx-shift to drop the oldest turns [context-full]"
        in piped(monkeypatch, "abcdefgh\n" * 12, *words).err
    )
    alone = piped(monkeypatch, "abcdefgh" * 12 + "\n", *words, "--ctx-shift")
    assert (
        alone.code == 2
        and "raise --ctx" in alone.err
        and "[context-full]" in alone.err
        and "--ctx-shift" not in alone.err
    )


def test_a_prompt_is_the_first_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        piped(monkeypatch, "", *FEW, "--prompt", "hi").out
        == piped(monkeypatch, "hi", *FEW).out
        == answered("u:hi|a:") + "\n"
    )


def test_another_template(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("t.jinja").write_text(PLAIN.replace(":", "="))
    assert piped(monkeypatch, "hi\n", *FEW, "--chat-template", "t.jinja").out == answered("u=hi|a=") + "\n"


def test_thinking_is_switched_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("t.jinja").write_text(SWITCHED)
    for switch, end in (("--think", "a:"), ("--no-think", "a!")):
        done = piped(monkeypatch, "hi\n", *FEW, "--chat-template", "t.jinja", switch)
        assert (done.code, done.out) == (0, answered(f"u:hi|{end}") + "\n")


@pytest.mark.parametrize("switch", ["--think", "--no-think"])
def test_a_template_without_a_switch(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = piped(monkeypatch, "hi\n", *FEW, switch)
    assert (done.code, done.out, done.err) == (
        2,
        "",
        f"error: the chat template has no switch for thinking (enable_thinking), so {switch} has no effect; "
        "leave it out [no-thinking-switch]\n",
    )


def test_an_empty_template_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("empty.jinja").touch()
    done = piped(monkeypatch, "hi\n", *FEW, "--chat-template", "empty.jinja")
    assert (done.code, done.err) == (
        1,
        "error: empty.jinja: the file is empty; a chat template must be Jinja [empty-file]\n",
    )


def test_a_model_without_a_template_is_asked_in_chatml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\n")))
    done = run("generate", "bare.gguf", "--chat", *FEW)
    assert done.code == 0 and done.err.count("the model has no chat template") == 1
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert done.out == answered(prompt) + "\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("m.gguf", "--system", "x"), "--system has no effect without --chat; leave it out"),
        (("m.gguf", "--no-think"), "--no-think has no effect without --chat; leave it out"),
        (("m.gguf", "--chat", "--prompt", "-"), "--prompt - has no effect with --chat"),
        (
            ("numbers.gguf", "--chat"),
            "numbers.gguf: the model has no text vocabulary, so it cannot chat [no-vocabulary]",
        ),
        (("m.gguf", "--chat", "--prompt", "x" * 300), "raise --ctx, or start a new chat [context-full]"),
    ],
)
def test_what_cannot_be(words: tuple[str, ...], told: str) -> None:
    done = run("generate", *words)
    assert done.code == 2 and len(done.err.splitlines()) == 1 and told in done.err and not done.out


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_signal_ends_an_answer_and_not_the_talk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, turns = Terminal(), iter(["first", KeyboardInterrupt(), "second", EOFError()])

    def typed(_: str) -> str:
        if isinstance(turn := next(turns), BaseException):
            raise turn
        return turn

    said = command.print_text

    def say(text: str) -> None:
        said(text)
        if len(talk.messages) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", typed)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(command, "print_text", say)
    talk = Conversation(
        TextModel(Path("m.gguf"), LoadOptions(), AdapterOptions()),
        ChatOptions(chat=True),
        SamplingOptions(n=5, temp=0.0),
    )
    command.run_chat(talk, "")
    talk.close()
    first = answered("u:first|a:", 1)
    assert [each["content"] for each in talk.messages] == [
        "first",
        first,
        "second",
        answered(f"u:first|a:{first}|u:second|a:"),
    ]


def test_the_same_in_the_words_of_llama_cpp() -> None:
    """Of which llama-cli takes talks alone, and --chat-template with --jinja a template itself, no name of one."""
    done = run("generate", "m.gguf", "-v", *FEW, "--prompt", "a\\n\nb")
    assert "in llama.cpp: llama-completion -m m.gguf -c 256 -n 5 -s -1 --temp 0 " in done.err
    assert done.err.splitlines()[0].endswith(r"-no-cnv -p $'a\\\\n\nb'")
    options = ChatOptions(chat=True, system="be kind", chat_template=Path("gemma"), think=False)
    lora = AdapterOptions((Path("a.gguf"), Path("c.gguf")), ((Path("b.gguf"), 0.5), (Path("d.gguf"), 2.0)))
    sampling = SamplingOptions(ctx_shift=True, keep=7, repeat_penalty=1.5, stop=("|", "x y"))
    line = llama_command(Path("m.gguf"), options, lora, ControlOptions(), sampling, 256, "")
    said = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]
    after = dict(pairwise(said))
    assert (
        said[0] == "llama-cli"
        and after["--chat-template"] == TEMPLATES["gemma"]
        and "--jinja" in said
        and "-cnv" in said
    )
    assert (
        after["--lora"] == "a.gguf,c.gguf"
        and after["--lora-scaled"] == "b.gguf:0.5,d.gguf:2"
        and after["-sys"] == "be kind"
        and after["--reasoning"] == "off"
    )
    assert said[said.index("--context-shift") :][1:3] == ["--keep", "7"] and after["--repeat-last-n"] == "64"
    assert said.count("-r") == 2 and after["-r"] == "x y" and "-p" not in said


def test_one_sees_where_it_began(tmp_path: Path) -> None:
    """A sample before the first step, which changes no bit of the run; a run that goes on does not show it again."""
    text = text_file(tmp_path, 2000)
    words = (
        "--iters",
        4,
        "--batch",
        2,
        "--ctx",
        32,
        "--seed",
        1,
        "--val-split",
        0.2,
        "--eval-every",
        2,
        *TINY,
    )
    said = ("--sample-every", 2, "--sample-prompt", "the ")
    plain = ran("from-scratch", text, *words, "--out", tmp_path / "plain")
    shown = ran("from-scratch", text, *words, *said, "--out", tmp_path / "shown")
    assert "sample at step" not in plain.err
    assert re.findall(r"sample at step (\d+)", shown.err) == ["0", "2", "4"]
    assert shown.err.index("sample at step 0") < shown.err.index("step 1")
    assert losses(tmp_path / "plain") == losses(tmp_path / "shown")
    same_bits(tmp_path / "plain" / "model.gguf", tmp_path / "shown" / "model.gguf")
    more = ran("from-scratch", "--resume", tmp_path / "shown", "--iters", 6)
    assert re.findall(r"sample at step (\d+)", more.err) == ["6"]


@pytest.mark.parametrize(
    "word",
    [b"plain", b"a b", b"\xff\xfe.gguf", b"it's\n\xffab", "\u009bß\n".encode(), b"\\n\x01", b"caf\xe9"],
)
def test_a_word_for_a_shell_is_what_it_was(word: bytes) -> None:
    """Also a path that is not UTF-8, whose bytes Python has as lone surrogates."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    said = quote_word(os.fsdecode(word))
    assert said.isprintable()
    done = subprocess.run(
        [bash, "-c", f"printf %s {said}"], capture_output=True, env={"LC_ALL": "C.UTF-8"}, check=True
    )
    assert done.stdout == word
