"""Thoughts in chats: as templates have them, kept, or left out; and which answers of a chat are trained."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.data.dataset import open_dataset
from llamatrain.data.encode import Encoder
from llamatrain.data.options import DataOptions
from llamatrain.data.records import ChatRecord, parse_record
from llamatrain.errors import DataError
from tests.data.chat.test_encode import LLAMA3, MISTRAL, talk
from tests.data.chat.test_messages import shown
from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.chat_templates import LAYOUTS
from tests.helpers.cli import run
from tests.helpers.llama_cpp import model_with

INSIDE = talk("a?", "<think>\nx\n</think>\n\nA", "b?", "<think>\ny\n</think>\n\nB")
APART = [
    {"role": each["role"], "content": each["content"].rpartition("\n\n")[2]}
    | ({"reasoning_content": each["content"][8]} if each["role"] == "assistant" else {})
    for each in INSIDE
]
FORMS = {
    "inside": INSIDE,
    "reasoning_content": APART,
    **{
        name: [
            {name if key == "reasoning_content" else key: value for key, value in each.items()}
            for each in APART
        ]
        for name in ("reasoning", "thinking")
    },
}


def samples(messages: list[dict[str, Any]], template: str | None = LLAMA3, **options: str) -> list[str]:
    """Each with what is trained between double brackets."""
    tokenizer, document = (
        ByteTokenizer(chat_template=template),
        parse_record(json.dumps({"messages": messages}).encode(), "line 1"),
    )
    encoder = Encoder(tokenizer, DataOptions(**options), ctx=512)
    with encoder.template:
        found = encoder.encode_record(encoder.apply_options(document))
    texts = []
    for sample in found:
        pieces = np.split(np.arange(len(sample.tokens)), np.flatnonzero(np.diff(sample.marks)) + 1)
        words = [
            (tokenizer.decode(sample.tokens[run]).decode(), sample.marks[run[0]])
            for run in pieces
            if len(run)
        ]
        texts.append("".join(f"[[{text}]]" if trained else text for text, trained in words))
    return texts


# ---- thoughts ------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_thoughts_are_trained_as_the_template_has_them(form: str, tmp_path: Path) -> None:
    """Templates that think leave them out of older turns: there each answer is a row."""
    row = {"messages": FORMS[form]}
    trained, said = shown(tmp_path, LAYOUTS["qwen 3"], row, options=("-n", "2"))
    assert (
        trained == ["<think>\nx\n</think>\n\nA<|im_end|>", "<think>\ny\n</think>\n\nB<|im_end|>"]
        and "row of their own" in said[0]
    )
    trained, said = shown(tmp_path, LAYOUTS["r1 distill"], row, options=("-n", "2"))
    assert (
        trained == ["x\n</think>\n\nA<｜end▁of▁sentence｜>", "y\n</think>\n\nB<｜end▁of▁sentence｜>"]
        and "row of their own" in said[0]
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("layout", "trained"),
    [
        ("qwen 3", ["<think>\nx\n</think>\n\nA<|im_end|>", "<think>\ny\n</think>\n\nB<|im_end|>"]),
        ("r1 distill", ["x\n</think>\n\nA<｜end▁of▁sentence｜>", "y\n</think>\n\nB<｜end▁of▁sentence｜>"]),
        ("chatml", ["<think>\nx\n</think>\n\nA<|im_end|>", "<think>\ny\n</think>\n\nB<|im_end|>"]),
        ("llama 3", ["<think>\nx\n</think>\n\nA<|eot_id|>", "<think>\ny\n</think>\n\nB<|eot_id|>"]),
    ],
)
def test_thoughts_that_are_kept_stand_in_older_turns_too(
    form: str, layout: str, trained: list[str], tmp_path: Path
) -> None:
    """So that a chat is one row, whether its template knows thoughts or not."""
    assert shown(tmp_path, LAYOUTS[layout], {"messages": FORMS[form]}, options=("--thinking", "keep")) == (
        trained,
        [],
    )


@pytest.mark.parametrize("form", FORMS)
def test_thoughts_that_are_not_wanted(form: str, tmp_path: Path) -> None:
    row, wanted = {"messages": FORMS[form]}, ("--thinking", "strip")
    assert shown(tmp_path, LAYOUTS["chatml"], row, options=wanted) == (["A<|im_end|>", "B<|im_end|>"], [])
    trained, said = shown(tmp_path, LAYOUTS["r1 distill"], row, options=(*wanted, "-n", "2"))
    closed = "\n</think>\n\n"  # a server takes what follows for the answer
    assert trained == [f"{closed}A<｜end▁of▁sentence｜>", f"{closed}B<｜end▁of▁sentence｜>"]
    assert any("opens reasoning" in line for line in said)


@pytest.mark.parametrize("form", FORMS)
def test_thinking_is_switched_off(form: str, tmp_path: Path) -> None:
    """The prompt of an answer has an empty thought, which is not trained."""
    row, off = {"messages": FORMS[form]}, ("--thinking", "off", "-n", "2")
    trained, said = shown(tmp_path, LAYOUTS["qwen 3"], row, options=off)
    assert trained == ["A<|im_end|>", "B<|im_end|>"] and "row of their own" in said[0]
    for text in samples(FORMS[form], LAYOUTS["qwen 3"].template, thinking="off"):
        assert text.count("assistant\n<think>\n\n</think>\n\n[[") == 1 and "x" not in text


def test_a_template_without_a_switch_cannot_switch_thinking_off(tmp_path: Path) -> None:
    model, data = model_with(LAYOUTS["chatml"].vocabulary(), tmp_path / "m.gguf"), tmp_path / "d.jsonl"
    data.write_text(json.dumps({"messages": INSIDE}))
    done = run("preview", data, "--model", model, "--thinking", "off")
    assert (done.code, done.errors) == (
        2,
        [
            "error: the chat template has no switch for thinking (enable_thinking), so --thinking off has no "
            "effect; leave it out [no-thinking-switch]"
        ],
    )


# As Gemma 4's: the prompt behind the results of a call opens a thought.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|turn>user\n' + m.content + '<turn|>\n<|turn>model\n' }}"
    "{% else %}{% if m.reasoning_content %}{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + c.function.name + '<tool_call|>' }}{% endfor %}"
    "{% for r in m.tool_responses or [] %}{{ '<|tool_response>' + r.name + '<tool_response|>' }}{% endfor %}"
    "{{ m.content + '<turn|>\n' if m.content else '' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'user' %}{{ '<|channel>thought\n' }}{% endif %}"
)


def test_a_call_closes_the_thought_before_it() -> None:
    """The mark of the call begins with the same letters as that of the thought."""
    calls = [
        message
        for name in "ab"
        for message in (
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": {"name": name, "arguments": {}}}],
            },
            {"role": "tool", "content": "1"},
        )
    ]
    messages = [{"role": "user", "content": "q"}, *calls, {"role": "assistant", "content": "A"}]
    text = "".join(samples(messages, CHANNELS))
    assert "<|channel>thought\n[[\n<channel|><|tool_call>call:b<tool_call|>" in text, text


def test_parts_of_an_answer_without_thoughts_are_left_as_they_are() -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    row = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": parts}]}
    document = parse_record(json.dumps(row).encode(), "line 1")
    assert Encoder(ByteTokenizer(), DataOptions(thinking="strip"), 64).apply_options(document) == document


def test_all_of_a_chat_with_its_thoughts() -> None:
    for layout in ("qwen 3", "r1 distill", "chatml"):
        for messages in FORMS.values():
            (text,) = samples(messages, LAYOUTS[layout].template, train_on="all", thinking="keep")
            assert text.count("x\n</think>\n\nA") == text.count("y\n</think>\n\nB") == 1, text
            (text,) = samples(messages, LAYOUTS[layout].template, train_on="all", thinking="strip")
            assert "x" not in text and "y" not in text


def test_thoughts_without_a_place_are_spoken_of(tmp_path: Path) -> None:
    trained, said = shown(tmp_path, LAYOUTS["chatml"], {"messages": APART})
    assert trained == ["A<|im_end|>", "B<|im_end|>"]
    assert len(said) == 1 and "does not render reasoning, which is ignored; use --thinking keep" in said[0]
    assert shown(tmp_path, LAYOUTS["chatml"], {"messages": INSIDE})[1] == []


def test_thoughts_of_prompts_with_answers() -> None:
    document = parse_record(b'{"prompt": "a?", "completion": "<think>x</think>\\n\\nA"}', "line 1")
    assert Encoder(ByteTokenizer(), DataOptions(thinking="strip"), 64).apply_options(document).answer == "A"  # type: ignore[union-attr]
    assert Encoder(ByteTokenizer(), DataOptions(thinking="keep"), 64).apply_options(document) == document


def test_words_that_look_like_what_stands_for_them() -> None:
    messages = talk("Qhxzv1q", "<think>\nQhxzv3q\n</think>\n\nQhxzv", "b?", "<think>\ny\n</think>\n\nQhxzv1q")
    (text,) = samples(messages, None, thinking="keep")
    assert (
        text.count("<think>\nQhxzv3q\n</think>\n\nQhxzv") == 1
        and text.count("<think>\ny\n</think>\n\nQhxzv1q") == 1
    )


# ---- which answers ---------------------------------------------------------------


def test_only_the_last_answer_is_trained(tmp_path: Path) -> None:
    chat = talk("hi", "hello", "and now?", "bye")
    for template in (LLAMA3, MISTRAL):
        (text,) = samples(chat, template, train_on="last")
        assert text.count("[[") == 1 and text.endswith("bye</s>]]") and "hello" in text
    assert shown(tmp_path, LAYOUTS["qwen 3"], {"messages": INSIDE}, options=("--train-on", "last")) == (
        ["<think>\ny\n</think>\n\nB<|im_end|>"],
        [],
    )


@pytest.mark.parametrize("key", ["weight", "train", "training"])
@pytest.mark.parametrize("values", [(0, 1), (False, True), (0.0, 1.0)])
def test_answers_of_weight_0_are_given(key: str, values: tuple[Any, Any]) -> None:
    chat = talk("hi", "no", "and now?", "bye", "so?", "end")
    chat[1][key], chat[3][key], chat[0][key] = values[0], values[1], values[1]
    assert samples(chat) == [
        "[user]\nhi</s>[assistant]\nno</s>[user]\nand now?</s>[assistant]\n[[bye</s>]][user]\nso?</s>[assistant]\n[[end</s>]]"
    ]
    chat[5][key] = values[0]
    assert samples(chat, train_on="last")[0].endswith("[assistant]\n[[bye</s>]]")
    chat[3][key] = values[0]
    assert samples(chat) == [""]


def test_shared_chats_have_weights_too() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b", "train": False},
            {"from": "gpt", "value": "c"},
        ]
    }
    document = parse_record(json.dumps(row).encode(), "line 1")
    assert isinstance(document, ChatRecord) and [
        each.get("untrained", False) for each in document.messages
    ] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"weight": 0.5}, '"weight" must be 0 or 1, or true or false .*0.5'),
        ({"weight": 2}, '"weight" must be 0 or 1.*2'),
        ({"train": "yes"}, '"train" must be 0 or 1.*"yes"'),
        ({"weight": float("nan")}, '"weight" must be 0 or 1.*NaN'),
        ({"weight": [1]}, r'"weight" must be 0 or 1.*\[1\]'),
        ({"weight": 0, "train": True}, '"weight" and "train" contradict'),
    ],
)
def test_weights_that_cannot_be(keys: dict[str, Any], why: str) -> None:
    chat = talk("hi", "hello")
    chat[1] |= keys
    with pytest.raises(DataError, match=f"a.jsonl, line 7: message 2: {why}"):
        parse_record(json.dumps({"messages": chat}).encode(), "a.jsonl, line 7")


def test_weights_and_all_tokens_do_not_go_together(tmp_path: Path) -> None:
    chat = talk("hi", "hello")
    chat[1]["weight"] = 0
    (path := tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: a message has weight 0, .*--train-on all"):
        open_dataset([str(path)], ByteTokenizer(), DataOptions(train_on="all"), 64, 0)


def test_a_template_does_not_see_weights() -> None:
    """Not even one that writes all that a message has."""
    template = (
        "{% for m in messages %}{{ m | tojson }}|{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    chat = talk("hi", "hello", "so?", "end")
    chat[1] |= {"weight": 0, "train": False}
    assert all(
        "untrained" not in text and "weight" not in text for text in samples(chat, template, train_on="last")
    )
