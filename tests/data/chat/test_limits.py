"""Chats that are much: what is trained of them is the same, what takes too much is skipped by its line, the rest is not."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from llamatrain.data import token_cache
from llamatrain.data.chat import encode as chat
from llamatrain.data.chat import prompt as incremental
from llamatrain.data.chat import template as templates
from llamatrain.data.chat.builtin import CHATML
from llamatrain.data.chat.encode import encode_chat
from llamatrain.data.chat.messages import Message
from llamatrain.data.chat.prompt import IncrementalTokenizer, PromptReader
from llamatrain.data.chat.template import ChatTemplate, RendererProcess, TemplateError
from llamatrain.data.dataset import Dataset, open_dataset
from llamatrain.data.encode import Encoder
from llamatrain.data.json_values import RecordTooLarge
from llamatrain.data.options import DataOptions
from llamatrain.data.records import ChatRecord, parse_record
from llamatrain.data.tokenizer import Tokenizer, load, new_vocab
from llamatrain.errors import DataError
from llamatrain.gguf.reader import Metadata
from llamatrain.platform import terminal
from llamatrain.platform.cache_dir import default_cache_dir
from tests.data.chat.test_encode import HOSTILE, LLAMA3, THINKING, talk
from tests.data.tokenizer.test_tokenizer import scored
from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.tiny_gguf import bytes_vocabulary, llama_metadata, llama_tensors, write_arrays

COUNTED = "{{ messages | length }}" + CHATML  # each prefix differs from its start
SWITCHED = "{{ 'on' if add_generation_prompt else 'off' }}" + CHATML
HANGS = "{% if messages[0].content == 'hang' %}" + HOSTILE["endless"] + "{% endif %}" + LLAMA3
CACHE = default_cache_dir("")  # before each test gets its own
FAIR = {"messages": talk("hi", "hello")}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    load(dict(Metadata(bytes_vocabulary())))  # what is compiled goes where it is kept
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path / "cache"))
    token_cache.cache_folder.cache_clear()
    yield
    token_cache.cache_folder.cache_clear()


def opened(tmp_path: Path, rows: list[object], template: str | None = LLAMA3) -> Dataset:
    file = tmp_path / "c.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return open_dataset([str(file)], ByteTokenizer(chat_template=template), DataOptions(), 64, 0)[0]


# ---- the same as by definition ----------------------------------------------


def by_definition(messages: list[Message], encoder: Encoder) -> list[tuple[list[int], list[int]]]:
    """Each prompt rendered and tokenized whole, or what it has besides the answer before it; each answer by itself, and of that
    what comes up to its first end."""
    samples, prompt, asked = list[tuple[list[int], list[int]]](), b"", b""
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for number, turn in zip(numbers, encoder.template.turns(messages), strict=True):
        prompt = prompt[: turn.shared_bytes] + bytes(turn.rest)
        assert prompt == encoder.template.render(messages[:number], answer_next=True)
        assert turn.is_continuation == (bool(asked) and prompt.startswith(asked))
        whole = encoder.reader.encode_prompt(prompt)
        given = (
            encoder.tokenizer.encode(prompt[len(asked) :], special=True) if turn.is_continuation else whole
        )
        if (
            not turn.is_continuation or [*samples[-1][0], *given] != whole.tolist()
        ):  # or it is read otherwise than its parts
            samples.append(([], []))
            given = whole
        said = encoder.tokenizer.encode(bytes(turn.answer), special=True, start=False)
        said = said if turn.has_end else np.concatenate([said, encoder.reader.end])
        samples[-1][0].extend([*given.tolist(), *said.tolist()])
        stop = next(
            (at for at, token in enumerate(said.tolist(), 1) if token in encoder.reader.ends), len(said)
        )
        samples[-1][1].extend([0] * len(given) + [1] * stop + [0] * (len(said) - stop))
        asked = prompt + bytes(turn.answer) if turn.has_end else b""
    return samples


def tokenizers() -> dict[str, Tokenizer]:
    """One whose marks overlap with each other, one that finds its marks apart, and a byte-level one."""
    marks = ["<|im_start|>", "<|im_end|>", "|><|", "\n\n", "start|>as"]
    learned = Metadata(new_vocab.learn_vocabulary(["some words, and some more words. " * 40], 400))
    return {"overlapping": with_marks(marks), "apart": with_marks(marks[:2]), "byte level": load(learned)}


def with_marks(marks: list[str]) -> Tokenizer:
    told = scored()
    tokens, scores, kinds = (told[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    more = {"tokens": [*tokens, *marks], "scores": np.append(scores, np.zeros(len(marks), np.float32))}
    more["token_type"] = np.append(kinds, np.array([3 + at % 2 for at in range(len(marks))], np.int32))
    return load(told | {f"tokenizer.ggml.{name}": values for name, values in more.items()})


WORDS = [
    "a",
    "ab",
    " ",
    "  ",
    "\n\n",
    "some words",
    "é",
    "日本",
    "|>",
    "<",
    "</think>",
    "<|im_end|>",
    "<user>!",
    "aaaa",
    ".",
    "1234",
]


@pytest.mark.parametrize("name", ["overlapping", "apart", "byte level"])
def test_what_is_kept_of_a_growing_text_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incremental, "LARGE_TEXT", 32)
    monkeypatch.setattr(IncrementalTokenizer.__init__, "__defaults__", (8,))
    monkeypatch.setattr(PromptReader.start_text, "__defaults__", (8,))
    random, tokenizer, samples = np.random.default_rng(4), tokenizers()[name], 0
    for template in (CHATML, LLAMA3, THINKING, COUNTED, SWITCHED):
        tokenizer.chat_template = template
        encoder = Encoder(tokenizer, DataOptions(), 64)
        with encoder.template:
            for _ in range(6):
                contents = [
                    "".join(random.choice(WORDS, random.integers(0, 30)))
                    for _ in range(random.integers(2, 9))
                ]
                made = list(
                    encode_chat(ChatRecord(talk(*contents)), encoder.template, encoder.reader, 0, set())
                )
                assert [(tokens.tolist(), marks.tolist()) for tokens, marks in made] == by_definition(
                    talk(*contents), encoder
                )
                samples += len(made)
    assert samples > 40


def test_a_text_is_tokenized_once_however_many_turns_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, read = Encoder(ByteTokenizer(chat_template=None), DataOptions(), 64), list[int]()
    encode = ByteTokenizer.encode
    monkeypatch.setattr(
        ByteTokenizer, "encode", lambda self, text, **how: read.append(len(text)) or encode(self, text, **how)
    )
    chat = ChatRecord(talk(*["word " * 400] * 60))
    with encoder.template:
        (sample,) = encoder.encode_record(chat)
        assert (
            sample.marks.sum() == 30 * (2000 + 1) and sum(read) < 2.5 * 60 * 2000
        )  # by itself and in the next prompt


# ---- what is trained, and what is skipped ------------------------------------


def test_many_and_long_messages_are_trained(tmp_path: Path) -> None:
    corpus = opened(tmp_path, [{"messages": talk(*["x" * 4000] * 200)}, {"messages": talk(*["ok"] * 1000)}])
    sizes = [int(part.documents["size"].sum()) for part in corpus.shards]
    assert not corpus.too_large and sizes == [200 * 4000 + 1000 * 2 + 600 * (7 + 1) + 600 * (12 + 1)]


def test_a_chat_of_too_many_turns_is_skipped_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.process_time()
    with terminal.show_log():
        corpus = opened(tmp_path, [FAIR, {"messages": talk(*["ab"] * 20_000)}, FAIR])
    assert time.process_time() - began < 5
    assert (len(corpus), corpus.skipped, corpus.too_large) == (2, [], [f"{tmp_path}/c.jsonl:2"])
    assert "c.jsonl, line 2: a chat of 20,000 messages, 10,000 of them answers" in capsys.readouterr().err
    assert opened(
        tmp_path, [FAIR, {"messages": talk(*["ab"] * 20_000)}, FAIR]
    ).too_large  # told again of what is kept


def test_the_first_few_are_named_and_the_others_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat, "MAX_RENDERED_MESSAGES", 10)
    with terminal.show_log():
        corpus = opened(tmp_path, [FAIR, *[{"messages": talk(*"abcdefgh")}] * 9])
    told = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    assert len(corpus.too_large) == 9 and len(told) == 4 and told[-1].endswith("6 more rows were skipped")


def test_samples_of_a_chat_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_LATER_TOKENS", 300)
    encoder = Encoder(ByteTokenizer(chat_template=THINKING), DataOptions(), 64)
    with encoder.template:
        whole = encoder.encode_record(ChatRecord(talk(*["a</think>b"] * 6)))
        assert len(whole) == 3 and "later" not in encoder.notes
        some = encoder.encode_record(ChatRecord(talk(*["a</think>b"] * 20)))
        assert 3 < len(some) < 10 and "later" in encoder.notes
        assert all(np.array_equal(one.tokens, other.tokens) for one, other in zip(whole, some, strict=False))


def test_renderings_that_have_nothing_in_common_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incremental, "MAX_RETOKENIZED", 20_000)
    encoder = Encoder(ByteTokenizer(chat_template=COUNTED), DataOptions(), 64)
    with encoder.template:
        assert len(encoder.encode_record(ChatRecord(talk(*["a" * 100] * 10)))) == 5
        with pytest.raises(RecordTooLarge, match="differ so much"):
            encoder.encode_record(ChatRecord(talk(*["a" * 100] * 30)))


def test_small_chats_are_rendered_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that cannot be is told by its line, after those before it."""
    sent, write = list[int](), RendererProcess._write
    monkeypatch.setattr(
        RendererProcess, "_write", lambda self, text: sent.append(text.count(b"\n") + 1) or write(self, text)
    )
    rows: list[object] = [{"messages": talk(f"hi {number}", "hello" * (number % 7))} for number in range(300)]
    together = opened(tmp_path, rows)
    assert sum(sent) == 300 + 2 and len(sent) < 30
    token_cache.cache_folder.cache_clear()
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path / "another"))
    monkeypatch.setattr(ChatTemplate, "prefetch", lambda self, chats: None)
    apart = opened(tmp_path, rows)
    assert len(sent) > 300
    assert [sample(together, number) for number in range(300)] == [
        sample(apart, number) for number in range(300)
    ]


def test_lines_of_one_number_in_two_files_stay_apart(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(
            "\n".join(json.dumps({"messages": talk("hi", f"{name}{at}")}) for at in range(3))
        )
    names = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    corpus, _ = open_dataset(names, ByteTokenizer(chat_template=LLAMA3), DataOptions(), 64, 0)
    said = [
        bytes(tokens[weights > 0].astype(np.uint8))[:2].decode()
        for tokens, weights, _ in map(corpus.__getitem__, range(6))
    ]
    assert said == ["a0", "a1", "a2", "b0", "b1", "b2"]


def sample(corpus: Dataset, number: int) -> tuple[list[int], list[float]]:
    return corpus[number].tokens.tolist(), corpus[number].weights.tolist()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ('{"messages": 1}', "a number; expected a list"),
        (json.dumps({"messages": talk("no", "x")}), "refuses it"),
    ],
)
def test_the_first_line_that_is_wrong_is_told(wrong: str, told: str, tmp_path: Path) -> None:
    template = "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    last = json.dumps({"messages": talk("no", "y")}) if told != "refuses it" else "{"
    (tmp_path / "c.jsonl").write_text("\n".join([json.dumps(FAIR), wrong, last]))
    with pytest.raises(DataError, match=rf"c\.jsonl, line 2: .*{told}"):
        open_dataset([str(tmp_path / "c.jsonl")], ByteTokenizer(chat_template=template), DataOptions(), 64, 0)


def test_long_renderings_of_small_chats_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, write = list[int](), RendererProcess._write
    monkeypatch.setattr(
        RendererProcess, "_write", lambda self, text: sent.append(text.count(b"\n") + 1) or write(self, text)
    )
    rows: list[object] = [{"messages": talk(f"hi {number}", "x")} for number in range(40)]
    long = "(message['content'] * (100000 if message['role'] == 'assistant' else 1))"
    assert len(opened(tmp_path, rows, CHATML.replace("message['content']", long))) == 40
    assert max(sent) > 10 and sent[-10:] == [1] * 10


# ---- templates that hang ------------------------------------------------------


def test_a_row_that_hangs_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.3)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # with it the answer before is there already
    corpus = opened(tmp_path, [FAIR, {"messages": talk("hang", "x")}, FAIR], HANGS)
    assert (len(corpus), corpus.too_large) == (2, [f"{tmp_path}/c.jsonl:2"])


def test_a_template_that_hangs_too_often_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.2)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(
        DataError,
        match=r"c\.jsonl, line \d+: the chat template was stopped: it takes more than 0.2 s .* also for other chats",
    ):
        opened(tmp_path, [FAIR, *[{"messages": talk("hang", "x")}] * 1000], HANGS)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 8


@pytest.mark.parametrize("name", ["endless", "memory", "one C call"])
def test_a_template_that_never_works_is_told_by_a_small_chat(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.3)
    with pytest.raises(
        DataError, match=r"c\.jsonl, line 1: the chat template was stopped: .*, even for a small chat"
    ):
        opened(tmp_path, [FAIR] * 1000, HOSTILE[name])


def test_a_chat_that_takes_too_much_memory_is_skipped(tmp_path: Path) -> None:
    greedy = "{% if messages[0].content == 'much' %}{{ 'x' * 10 ** 9 }}{% endif %}" + LLAMA3
    corpus = opened(tmp_path, [FAIR, {"messages": talk("much", "x")}, FAIR], greedy)
    assert (len(corpus), corpus.too_large) == (2, [f"{tmp_path}/c.jsonl:2"])
    with ChatTemplate(greedy) as template, pytest.raises(RecordTooLarge, match="too much memory"):
        template.render(talk("much"))


def test_a_conversation_that_is_left_disturbs_no_other() -> None:
    long = talk(*["x" * 10**6] * 4)
    with ChatTemplate(LLAMA3) as template:
        turns = template.turns(long)
        assert len(next(turns).rest) > 10**6
        turns.close()
        assert template.render(talk("hi")).endswith(b"hi</s>")
    with pytest.raises(TemplateError, match="not valid Jinja"), ChatTemplate("{% for %}") as template:
        template.render(talk("hi"))


# ---- lines --------------------------------------------------------------------


@pytest.mark.parametrize("value", ["{}", "[]", "1", '{"a":1}', '["x"]'])
def test_a_line_of_too_many_values_is_skipped_before_it_is_read(value: str) -> None:
    line = f'{{"text": "a", "x": [{",".join([value] * 300_000)}]}}'.encode()
    with pytest.raises(RecordTooLarge, match=r"JSON values in a row .*262,144"):
        parse_record(line, "x")


def test_what_looks_like_values_in_a_text_is_none() -> None:
    text = '{[,"\\' * 100_000
    assert parse_record(json.dumps({"text": text}).encode(), "x").text == text  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "row", ['{"text": "\\ud800"}', '{"\\udc00": 1, "text": "a"}', '{"text": "a", "b": [{"c": "\\ud800"}]}']
)
def test_half_a_pair_is_no_text_wherever_it_stands(row: str) -> None:
    with pytest.raises(DataError, match="not UTF-8"):
        parse_record(row.encode(), "x")


ROWS = {
    "20,000 messages": {"messages": talk(*["word " * 90] * 20_000)},
    "200 messages": {"messages": talk(*["word " * 9_800] * 200)},
    "two messages": {"messages": talk("word " * 990_000, "word " * 990_000)},
    "a prompt": {"prompt": "word " * 990_000, "completion": "word " * 990_000},
    "text": {"text": "word " * 1_980_000},
    "values": {"messages": [{}] * 2_400_000},
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
@pytest.mark.parametrize(
    "name", [name if name == "200 messages" else pytest.param(name, marks=pytest.mark.slow) for name in ROWS]
)
def test_ten_megabytes_in_a_line(name: str, tmp_path: Path) -> None:
    write_arrays(tmp_path / "m.gguf", llama_metadata(), llama_tensors())
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, [FAIR, ROWS[name], FAIR])))
    assert 8 * 10**6 < (tmp_path / "c.jsonl").stat().st_size < 11 * 10**6
    share_kernels(tmp_path / "cache")
    command = [
        sys.executable,
        "-m",
        "llamatrain",
        "preview",
        "c.jsonl",
        "--model",
        "m.gguf",
        "--json",
        "-n",
        "1",
        "--ctx",
        "256",
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as run:
        peak = max(iter(lambda: held_by(run), 0))
        assert run.wait() == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert peak < 300 * 10**6
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10


def share_kernels(folder: Path) -> None:
    """Have a cache of its own use what is compiled, for compilers take memory, too."""
    (folder / "llamatrain").mkdir(parents=True)
    for kept in CACHE.iterdir():
        if kept.name != "tokens":
            (folder / "llamatrain" / kept.name).symlink_to(kept)


def held_by(run: subprocess.Popen[bytes]) -> int:
    """Bytes that a process holds with all it has started; 0 when it has ended."""
    if run.poll() is not None:
        return 0
    time.sleep(0.005)
    return sum(sizes_of(run.pid))


def sizes_of(process: int, parent: bytes = b"") -> Iterator[int]:
    place = Path(f"/proc/{process}")
    with suppress(OSError):
        command = (place / "cmdline").read_bytes()
        if command != parent:  # until it is another program, its memory is its parent's
            yield int((place / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for children in place.glob("task/*/children"):
            for child in children.read_text().split():
                yield from sizes_of(int(child), command)
