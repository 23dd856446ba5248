"""The chats of current model families: where answers begin and end, and how their reasoning is written and kept."""

import json
from typing import Any

import numpy as np
import pytest

from llamatrain.data.chat.jinja_template import JinjaTemplate
from llamatrain.data.encode import Encoder
from llamatrain.data.options import DataOptions
from llamatrain.data.records import parse_record
from tests.helpers.served_conversations import CONVERSATIONS
from tests.helpers.template_corpus import OWN, layout_of

SOURCES = {path.stem: path.read_text() for path in sorted(OWN.glob("*.jinja"))}
IM, HY, TURN = "<|im_start|>", "<｜hy_Assistant｜>", "<turn|>"
# The trained answers to "2+2?", "3+3?", whose reasoning is "I add." and "Again."
ANSWERS = {
    "apertus": ["4<|assistant_end|>", "6<|assistant_end|>"],
    "command-a": [
        f"<|START_THINKING|>{thought}<|END_THINKING|><|START_RESPONSE|>{text}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
        for thought, text in (("I add.", "4"), ("Again.", "6"))
    ],
    "ernie45": ["4<|end_of_sentence|>", "6<|end_of_sentence|>"],
    "exaone4": ["I add.\n</think>\n\n4[|endofturn|]", "Again.\n</think>\n\n6[|endofturn|]"],
    "gemma4": ["4<turn|>", "6<turn|>"],
    "glm4": ["4</s>", "6</s>"],
    "glm45": ["\n<think>I add.</think>\n4</s>", "\n<think>Again.</think>\n6</s>"],
    "hunyuan": [
        "<think>\nI add.\n</think>\n\n4<｜hy_place▁holder▁no▁2｜>",
        "<think>\nAgain.\n</think>\n\n6<｜hy_place▁holder▁no▁2｜>",
    ],
    "lfm2": ["<think>I add.</think>4<|im_end|>", "<think>Again.</think>6<|im_end|>"],
    "mistral3": ["[THINK]I add.[/THINK]4</s>", "[THINK]Again.[/THINK]6</s>"],
    "qwen35": ["I add.\n</think>\n\n4<|im_end|>", "Again.\n</think>\n\n6<|im_end|>"],
    "seed-oss": [
        "<seed:think>I add.</seed:think>\n4<seed:eos>",
        "<seed:think>Again.</seed:think>\n6<seed:eos>",
    ],
}
# What `--thinking keep` changes in them.
KEPT = {
    "apertus": [
        "<think>\nI add.\n</think>\n\n4<|assistant_end|>",
        "<think>\nAgain.\n</think>\n\n6<|assistant_end|>",
    ],
    "ernie45": [
        "<think>\nI add.\n</think>\n\n4<|end_of_sentence|>",
        "<think>\nAgain.\n</think>\n\n6<|end_of_sentence|>",
    ],
    "gemma4": [
        "<|channel>thought\nI add.\n<channel|>4<turn|>",
        "<|channel>thought\nAgain.\n<channel|>6<turn|>",
    ],
    "glm4": ["<think>\nI add.\n</think>\n\n4</s>", "<think>\nAgain.\n</think>\n\n6</s>"],
}
# The prompt of the second answer, with the first one as the template writes old answers, and as it is kept.
OLD = {
    "exaone4": (
        "[|assistant|]\n<think>\n\n</think>\n\n4[|endofturn|]",
        "[|assistant|]\n<think>\nI add.\n</think>\n\n4[|endofturn|]",
    ),
    "gemma4": (f"<|turn>model\n4{TURN}", f"<|turn>model\n<|channel>thought\nI add.\n<channel|>4{TURN}"),
    "glm45": ("<|assistant|>\n<think></think>\n4", "<|assistant|>\n<think>I add.</think>\n4"),
    "hunyuan": (f"{HY}4", f"{HY}<think>\nI add.\n</think>\n\n4"),
    "lfm2": (f"{IM}assistant\n<think>I add.</think>4", f"{IM}assistant\n<think>I add.</think>4"),
    "mistral3": ("[/INST][THINK]I add.[/THINK]4", "[/INST][THINK]I add.[/THINK]4"),
    "qwen35": (f"{IM}assistant\n4<|im_end|>", f"{IM}assistant\n<think>\nI add.\n</think>\n\n4<|im_end|>"),
    "seed-oss": (
        "assistant\n<seed:think>I add.</seed:think>\n4",
        "assistant\n<seed:think>I add.</seed:think>\n4",
    ),
}


def trained(name: str, case: str = "thoughts beside", **options: Any) -> list[tuple[str, str]]:
    """Return the text before each answer, and the answer."""
    tokenizer = layout_of(SOURCES[name]).tokenizer()
    encoder = Encoder(tokenizer, DataOptions(**options), 512)
    record = encoder.apply_options(parse_record(json.dumps(CONVERSATIONS[case]).encode(), "x"))
    answers = list[tuple[str, str]]()
    with encoder.template:
        for sample in encoder.encode_record(record):
            borders = np.flatnonzero(np.diff(sample.marks, prepend=0, append=0)).tolist()
            for begin, end in zip(borders[::2], borders[1::2], strict=True):
                parts = (sample.tokens[:begin], sample.tokens[begin:end])
                before, answer = (tokenizer.decode(part).decode() for part in parts)
                answers.append((before, answer))
    return answers


@pytest.mark.parametrize("name", SOURCES)
def test_answers_are_trained_with_their_reasoning_and_end(name: str) -> None:
    assert [answer for _, answer in trained(name)] == ANSWERS[name]
    kept = [answer for _, answer in trained(name, thinking="keep")]
    assert kept == KEPT.get(name, ANSWERS[name])


@pytest.mark.parametrize("name", OLD)
def test_old_answers_are_as_the_template_writes_them_or_kept(name: str) -> None:
    for options, expected in zip(({}, {"thinking": "keep"}), OLD[name], strict=True):
        assert expected in trained(name, **options)[1][0]


@pytest.mark.parametrize("name", SOURCES)
def test_answers_without_reasoning_close_what_the_prompt_opens(name: str) -> None:
    opened = {"exaone4": "\n</think>\n\n", "qwen35": "\n</think>\n\n", "glm45": "\n<think></think>\n"}
    answers = trained(name, "two turns")
    assert len(answers) == 2
    for (before, answer), word in zip(answers, ("hello", "bye"), strict=True):
        assert answer.partition(word)[0] in (opened.get(name, ""), "<|START_RESPONSE|>")
        assert word not in before


@pytest.mark.parametrize("name", sorted({*SOURCES} - {"ernie45"}))
def test_calls_are_answers_and_their_results_are_not(name: str) -> None:
    (_, call), (before, answer) = trained(name, "a call")
    assert "get_weather" in call and "Oslo" in call and "-3" not in call
    assert "-3" in before and "Yes." in answer and "Oslo" not in answer


@pytest.mark.parametrize("name", ["command-a", "exaone4", "gemma4", "glm45", "hunyuan", "qwen35"])
def test_answers_behind_a_prompt_that_switches_thinking_off(name: str) -> None:
    """The prompt has ended an empty thought, and the answer is what the template writes after it."""
    for before, answer in trained(name, "signs of HTML", thinking="off"):
        opening = {"command-a": "<|START_RESPONSE|>", "glm45": "\n"}.get(name, "")
        assert answer.startswith((f"{opening}<i>yes", f"{opening}&lt;")), (before, answer)


@pytest.mark.parametrize(
    ("name", "on", "off"),
    [
        ("exaone4", "<think>\n", "<think>\n\n</think>\n\n"),
        ("gemma4", "<|turn>model\n", "<|turn>model\n<|channel>thought\n<channel|>"),
        ("glm45", "<|assistant|>", "<|assistant|>\n<think></think>"),
        ("hunyuan", HY, f"{HY}<think>\n\n</think>\n"),
        ("qwen35", "<think>\n", "<think>\n\n</think>\n\n"),
    ],
)
def test_prompts_think_unless_that_is_switched_off(name: str, on: str, off: str) -> None:
    template = JinjaTemplate(SOURCES[name], {"bos_token": "", "eos_token": ""}, [])
    question = [{"role": "user", "content": "hi"}]
    assert template.render(question, None, True).endswith(on)
    assert template.render(question, None, True, enable_thinking=False).endswith(off)


def test_servers_look_for_thoughts_of_gemma4() -> None:
    """Even if the template renders none."""
    template = JinjaTemplate(SOURCES["gemma4"], {"bos_token": "", "eos_token": ""}, [])
    assert template.server_extracts_reasoning and not template.renders_reasoning
