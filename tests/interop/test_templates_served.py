"""Each answer of some fifty conversations stands behind the tokens that llama-server makes of the same prompt.

The templates are ours of current families, and those of other projects (`template_corpus.py`): TRL's, and those in the folder that
LLAMATRAIN_TEMPLATES names.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest

from llamatrain.data.chat.jinja_template import JinjaTemplate
from llamatrain.data.chat.template import ChatTemplate
from llamatrain.data.encode import Encoder
from llamatrain.data.options import DataOptions
from llamatrain.data.records import ChatRecord, parse_record
from llamatrain.errors import DataError
from tests.helpers.chat_templates import Layout
from tests.helpers.cli import ran
from tests.helpers.llama_cpp import Served, model_with, served
from tests.helpers.served_conversations import CONVERSATIONS, answers_in
from tests.helpers.template_corpus import layout_of, templates

FOUND = templates()
NONE = pytest.param(
    "",
    id="none",
    marks=pytest.mark.skip(reason="no chat templates: install trl, or set LLAMATRAIN_TEMPLATES"),
)
CORPUS = pytest.mark.parametrize("name", [*FOUND] or [NONE])
# Templates that read the clock to the second, or take another form of conversation than chats have.
OTHERS = {"vllm-tool_chat_template_hunyuan_a13b", "google-translategemma-4b-it"}
Answer = tuple[list[int], list[int]]  # the tokens before it, and its own


def trained(encoder: Encoder, row: dict[str, Any]) -> list[Answer]:
    answers = list[Answer]()
    for tokens, marks, _ in encoder.encode_record(
        encoder.apply_options(parse_record(json.dumps(row).encode(), "x"))
    ):
        borders = np.flatnonzero(np.diff(marks, prepend=0, append=0)).tolist()
        pairs = zip(borders[::2], borders[1::2], strict=True)
        answers += [(tokens[:begin].tolist(), tokens[begin:end].tolist()) for begin, end in pairs]
    return answers


def prompt(server: Served, row: dict[str, Any], turn: int, **switches: bool) -> str | None:
    """Ask for the prompt of an answer; None where the server refuses, or goes on with an answer."""
    before = row["messages"][:turn]
    if before and before[-1]["role"] == "assistant":
        return None
    more = {"tools": row["tools"]} if "tools" in row else {}
    try:
        asked = server.post("apply-template", messages=before, chat_template_kwargs=switches, **more)
        return str(asked["prompt"])
    except HTTPError:
        return None


def source_of(name: str) -> str:
    if name in OTHERS:
        pytest.skip("its prompts differ from moment to moment, or are no chats")
    return FOUND[name].read_text()


@pytest.mark.llama_cpp
@CORPUS
def test_prompts_have_the_servers_tokens(name: str, tmp_path: Path) -> None:
    compare_prompts(layout_of(source_of(name)), tmp_path, DataOptions())


def compare_prompts(layout: Layout, folder: Path, options: DataOptions, **switches: bool) -> None:
    """Compare what stands before each answer with the server's tokens; without reasoning if the options strip it."""
    compared, tokenizer = 0, layout.tokenizer()
    encoder = Encoder(tokenizer, options, 64)
    with serving(layout, folder) as server, encoder.template:
        for case, row in CONVERSATIONS.items():
            turns, asked = answers_in(row), without_reasoning(row) if switches else row
            prompts = {turn: prompt(server, asked, turn, **switches) for turn in turns}
            try:
                answers = trained(encoder, row)
            except DataError:
                assert None in prompts.values(), f"{case}: refused, and the server takes it"
                continue
            if len(answers) < len(turns):  # calls that the template has no place for
                turns = [turn for turn in turns if "tool_calls" not in row["messages"][turn]]
            for turn, (before, _) in zip(turns, answers, strict=True):
                if (text := prompts[turn]) is not None:
                    lead = [tokenizer.bos] if tokenizer.add_bos else []
                    assert [*lead, *before] == server.tokenize(text, special=True, ends=True), (
                        case,
                        turn,
                        text,
                    )
                    compared += 1
    assert compared > 40


def without_reasoning(row: dict[str, Any]) -> dict[str, Any]:
    messages = [
        {key: value for key, value in message.items() if key != "reasoning_content"}
        for message in row["messages"]
    ]
    for message in messages:
        if message["role"] == "assistant" and "</think>" in (message["content"] or ""):
            message["content"] = message["content"].rpartition("</think>")[2].lstrip("\n")
    return {**row, "messages": messages}


@contextmanager
def serving(layout: Layout, folder: Path) -> Iterator[Served]:
    with ExitStack() as opened:
        try:
            server = opened.enter_context(served(model_with(layout.vocabulary(), folder / "m.gguf")))
        except RuntimeError:
            pytest.skip("llama-server refuses this template")
        yield server


# ---- thoughts ----------------------------------------------------------------------

SWITCHED = [name for name, path in FOUND.items() if "enable_thinking" in path.read_text()]


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", SWITCHED or [NONE])
def test_thinking_is_switched_as_on_the_server(name: str, tmp_path: Path) -> None:
    layout = layout_of(source_of(name))
    template = JinjaTemplate(layout.template or "", {"bos_token": layout.bos, "eos_token": layout.eos}, [])
    question: list[Any] = [{"role": "user", "content": "hi"}]
    with serving(layout, tmp_path) as server:
        for switch in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            asked = server.post("apply-template", messages=question, chat_template_kwargs=switch)["prompt"]
            prompt = template.render(question, None, True, **switch)
            assert prompt.removeprefix(layout.bos) == asked.removeprefix(layout.bos), switch


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", SWITCHED or [NONE])
def test_chats_are_asked_as_on_the_server(name: str, tmp_path: Path) -> None:
    layout, compared = layout_of(source_of(name)), 0
    with serving(layout, tmp_path) as server:
        for think in (True, False):
            with ChatTemplate(layout.template or "", layout.bos, layout.eos, think=think) as template:
                template.check_switch("--think")
                for case, row in CONVERSATIONS.items():
                    chat = parse_record(json.dumps(row).encode(), "x")
                    assert isinstance(chat, ChatRecord)
                    for turn in answers_in(row):
                        if turn and (text := prompt(server, row, turn, enable_thinking=think)) is not None:
                            asked = template.render(chat.messages[:turn], True, chat.tools).decode()
                            assert asked.removeprefix(layout.bos) == text.removeprefix(layout.bos), (
                                case,
                                turn,
                            )
                            compared += 1
    assert compared > 160


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", SWITCHED or [NONE])
def test_answers_without_thinking_stand_behind_the_servers_prompt(name: str, tmp_path: Path) -> None:
    options = DataOptions(thinking="off")
    compare_prompts(layout_of(source_of(name)), tmp_path, options, enable_thinking=False)


ASKED, SAID = "Name it.", "Zebra quick."
THINKING = [name for name, path in FOUND.items() if "think" in path.read_text().lower()]
UNREAD = {"llama-cpp-rwkv-world"}  # the server finds no end of a thought without words


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", THINKING or [NONE])
def test_plain_answers_are_served_as_content(name: str, tmp_path: Path) -> None:
    """A model that learned one plain answer gives it as `content`, whether its template opens a thought or not."""
    layout, data = layout_of(source_of(name)), tmp_path / "c.jsonl"
    if name in UNREAD:
        pytest.skip("llama-server finds no end of an empty thought in it")
    row = {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}]}
    data.write_text(f"{json.dumps(row)}\n" * 4)
    vocabulary = model_with(layout.vocabulary(), tmp_path / "v.gguf")
    encoder = Encoder(layout.tokenizer(), DataOptions(), 64)
    with encoder.template:
        (before, said), *_ = trained(encoder, row)
    ctx, steps = (
        len(before) + len(said) + 2,
        ["--batch", 1, "--iters", 100, "--lr", 0.02, "--no-pack", "--threads", 1],
    )
    size = ["--embd", 32, "--head", 2, "--layer", 1, "--ff", 64, "--ctx", ctx]
    ran(
        "from-scratch",
        data,
        "--vocab-from",
        vocabulary,
        *size,
        *steps,
        "--eval-every",
        0,
        "--out",
        tmp_path / "run",
    )
    with served(tmp_path / "run" / "model.gguf", ctx=ctx + 64) as server:
        try:
            asked = server.post(
                "v1/chat/completions", messages=row["messages"][:1], temperature=0, max_tokens=len(said) + 8
            )
        except HTTPError as error:
            pytest.skip(f"llama-server cannot read answers of this template ({error.code})")
    content = asked["choices"][0]["message"]["content"].strip()
    assert (
        content.removesuffix(layout.eos) == SAID
    )  # for some templates the server leaves the end of an answer in its content
