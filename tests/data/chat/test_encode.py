"""Chats: what of them is trained, and templates that mean harm."""

import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llamatrain.data.chat import template as templates
from llamatrain.data.chat.messages import Message
from llamatrain.data.chat.template import ChatTemplate, TemplateError
from llamatrain.data.dataset import open_dataset
from llamatrain.data.encode import Encoder
from llamatrain.data.json_values import RecordTooLarge
from llamatrain.data.options import DataOptions
from llamatrain.data.records import ChatRecord
from llamatrain.errors import DataError
from tests.helpers.byte_tokenizer import ByteTokenizer

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '[' + message['role'] + ']\n' + message['content'] | trim + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
THINKING = (  # an answer keeps its thoughts only while it is the last
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def talk(*contents: str) -> list[Message]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


def trained(messages: list[Message], template: str | None, **options: str) -> list[list[str]]:
    """The runs of trained tokens of each sample, as text."""
    tokenizer = ByteTokenizer(chat_template=template)
    encoder = Encoder(tokenizer, DataOptions(**options), ctx=512)
    with encoder.template:
        samples = encoder.encode_record(ChatRecord(messages))
    runs = []
    for sample in samples:
        pieces = np.split(np.arange(len(sample.tokens)), np.flatnonzero(np.diff(sample.marks)) + 1)
        runs.append(
            [
                tokenizer.decode(sample.tokens[run]).decode()
                for run in pieces
                if len(run) and sample.marks[run[0]]
            ]
        )
    return runs


def test_every_answer_is_trained_with_its_end_and_nothing_else() -> None:
    chat = talk("hi", "hello", "and now?", "bye")
    assert trained(chat, LLAMA3) == [["hello</s>", "bye</s>"]]
    assert trained(chat, MISTRAL) == [[" hello</s>", " bye</s>"]]
    assert trained(chat, None) == [["hello<|im_end|>", "bye<|im_end|>"]]


def test_what_follows_the_last_answer_is_not_trained() -> None:
    assert trained([{"role": "system", "content": "s"}, *talk("hi", "hello", "well?")], LLAMA3) == [
        ["hello</s>"]
    ]


def test_an_answer_that_is_part_of_its_question() -> None:
    assert trained(talk("say hello", "say hello"), LLAMA3) == [["say hello</s>"]]


def test_a_chat_that_the_assistant_opens() -> None:
    assert trained(talk("", "welcome", "hi", "so?")[1:], LLAMA3) == [["welcome</s>", "so?</s>"]]
    picky = "{% if not messages %}{{ raise_exception('nothing') }}{% endif %}" + LLAMA3
    assert trained(talk("", "welcome", "hi", "so?")[1:], picky) == [["welcome</s>", "so?</s>"]]


def test_a_turn_that_is_written_otherwise_later_is_a_sample_of_its_own() -> None:
    runs = trained(talk("a?", "<think>x</think>A", "b?", "<think>y</think>B"), THINKING)
    assert runs == [["<think>x</think>A<|im_end|>"], ["<think>y</think>B<|im_end|>"]]


def test_all_of_a_chat_can_be_trained() -> None:
    assert trained(talk("hi", "hello"), LLAMA3, train_on="all") == [["[user]\nhi</s>[assistant]\nhello</s>"]]


def test_without_an_answer_nothing_is_trained() -> None:
    assert trained(talk("hi"), LLAMA3) == [[]]


def test_the_begin_token_is_not_doubled() -> None:
    encoder = Encoder(ByteTokenizer(chat_template=LLAMA3), DataOptions(), ctx=512)
    with encoder.template:
        (sample,) = encoder.encode_record(ChatRecord(talk("hi", "hello")))
    assert encoder.bos == 256 and 256 not in sample.tokens


# ---- what templates can do -------------------------------------------------


def render(source: str, messages: list[Message] | None = None) -> str:
    with ChatTemplate(source, "<s>", "</s>") as template:
        return template.render(messages or talk("hi")).decode()


def test_templates_are_rendered_as_hugging_face_does() -> None:
    assert (
        render("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n")
        == "hi\n"
    )
    assert render("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert (
        render(
            "{% generation %}{{ messages[0].content }}{% endgeneration %}{% for i in [1, 2] %}{% break %}{% endfor %}"
        )
        == "hi"
    )
    assert render("{{ tools is defined }}{{ bos_token }}{{ eos_token }}") == "False<s></s>"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What children take of the processor shows that they are stopped; how long it is until they have it does not."""
    monkeypatch.setattr(templates, "MAX_SECONDS", 1)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 8


HOSTILE = {
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    + "{% endfor %}" * 3,
    "one C call": "{{ 3 ** (10 ** 9 + (messages | length)) }}",
    "memory": "{{ messages[0].content * 10 ** 10 }}",
    "less memory": "{{ (messages[0].content * 2 * 10 ** 8) | length }}",
    "folded": "{{ 'a' * 10 ** 10 }}",
    "folded and long": "{{ 3 ** (10 ** 9) }}",  # stopped by the alarm, 1 s after the time for renderings
    "memory in steps": "{% set ns = namespace(a='x' * 1000) %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "much output": "{% for i in range(200) %}{{ 'x' * 10 ** 6 }}{% endfor %}",
    "range": "{{ range(10 ** 9) | list }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['sys'].exit() }}",
    "include": "{% include '/etc/passwd' %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "no template": "{% for %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(name: str, short: None) -> None:
    with pytest.raises(TemplateError) as info:
        render(HOSTILE[name])
    assert "\n" not in str(info.value) and str(info.value).startswith("the chat template")


def test_a_stopped_child_is_replaced(short: None) -> None:
    source = (
        "{% if messages[0].content == 'hang' %}" + HOSTILE["endless"] + "{% endif %}{{ messages[0].content }}"
    )
    with ChatTemplate(source) as template:
        assert template.render(talk("hi")) == b"hi"
        first = template._process
        with pytest.raises(RecordTooLarge, match=r"more than 0\.5 s"):
            template.render(talk("hang"))
        assert first is not None and first.process.returncode is not None
        assert template.render(talk("well")) == b"well"


def test_a_child_serves_many_renderings() -> None:
    with ChatTemplate(LLAMA3) as template:
        template.render(talk("hi"))
        child = template._process
        for _ in range(200):
            template.render(talk("hi", "é" * 1000), answer_next=True)
        assert template._process is child


def test_a_refusal_names_file_and_line(tmp_path: Path) -> None:
    good, bad = ({"messages": messages} for messages in (talk("a", "b"), [*talk("a"), *talk("b", "c")]))
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join(map(json.dumps, (good, bad, good))))
    with pytest.raises(
        DataError, match=r"chat\.jsonl, line 2: the chat template refuses it: roles must alternate"
    ):
        open_dataset([str(file)], ByteTokenizer(chat_template=MISTRAL), DataOptions(), 64, 0)
