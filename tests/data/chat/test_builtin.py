"""Layouts of chats that are known by name: written as llama.cpp writes them, and trained to their own ends."""

from pathlib import Path

import pytest

from llamatrain.data.chat.builtin import ALIASES, TEMPLATES
from llamatrain.data.chat.template import ChatTemplate
from llamatrain.data.encode import Encoder
from llamatrain.data.options import DataOptions
from llamatrain.data.records import ChatRecord
from llamatrain.data.tokenizer import load
from llamatrain.errors import DataError
from llamatrain.gguf.reader import Metadata, open_gguf
from tests.helpers.cli import ran
from tests.helpers.llama_cpp_vocabulary import builtin_layouts, laid_out
from tests.helpers.model_vocabularies import FAMILIES

TALK = [("system", "S."), ("user", " ask "), ("assistant", "said"), ("user", "more"), ("assistant", "end")]
WRITTEN = {
    "chatml": "<|im_start|>system\nS.<|im_end|>\n<|im_start|>user\n ask <|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<B><start_of_turn>user\nS.\n\nask<end_of_turn>\n<start_of_turn>model\n",
    "granite": "<|start_of_role|>system<|end_of_role|>S.<|end_of_text|>\n<|start_of_role|>user<|end_of_role|> ask "
    "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "llama3": "<B><|start_header_id|>system<|end_header_id|>\n\nS.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nask"
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral-v7-tekken": "<B>[SYSTEM_PROMPT]S.[/SYSTEM_PROMPT][INST] ask [/INST]",
    "olmo2": "<B><|system|>\nS.\n<|user|>\n ask \n<|assistant|>\n",
    "phi3": "<|system|>\nS.<|end|>\n<|user|>\n ask <|end|>\n<|assistant|>\n",
    "phi4": "<|im_start|>system<|im_sep|>S.<|im_end|><|im_start|>user<|im_sep|> ask <|im_end|><|im_start|>assistant<|im_sep|>",
    "phi4-mini": "<|system|>S.<|end|><|user|> ask <|end|><|assistant|>",
}
OF = {
    "chatml": ("qwen 3", "<|im_end|>"),
    "gemma": ("gemma 3", "<end_of_turn>"),
    "granite": ("granite 3", "<|end_of_text|>"),
    "llama3": ("llama 3", "<|eot_id|>"),
    "mistral-v7-tekken": ("mistral", "</s>"),
    "olmo2": ("olmo 2", "<|endoftext|>"),
    "phi3": ("phi 3", "<|end|>"),
    "phi4": ("phi 4", "<|im_end|>"),
    "phi4-mini": ("phi 4 mini", "<|end|>"),
}


def messages(count: int) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in TALK[:count]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_layout_is_written_so(name: str) -> None:
    with ChatTemplate(TEMPLATES[name], "<B>", "<E>") as template:
        assert template.render(messages(2), answer_next=True).decode() == WRITTEN[name]


def test_all_that_is_said_before_a_question_stands_in_it() -> None:
    told = [*({"role": "system", "content": each} for each in (" A. \n", "B."))]
    with ChatTemplate(TEMPLATES["gemma"], "", "") as template:
        found = template.render([*told, {"role": "user", "content": "ask"}], answer_next=True).decode()
    assert found == "<start_of_turn>user\nA.B.\n\nask<end_of_turn>\n<start_of_turn>model\n"


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", TEMPLATES)
def test_each_layout_is_as_llama_cpp_writes_it(name: str) -> None:
    if name not in builtin_layouts():
        pytest.skip(f"llama.cpp has no layout {name}")
    with ChatTemplate(TEMPLATES[name], "", "</s>") as template:
        for count in (2, 4, 5):
            answer_next = count % 2 == 0
            expected = laid_out(name, TALK[:count], answer_next)
            assert template.render(messages(count), answer_next=answer_next).decode() == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_trained_to_the_end_that_the_family_has(name: str) -> None:
    family, end = OF[name]
    tokenizer = load(Metadata(FAMILIES[family].vocabulary()))
    encoder = Encoder(tokenizer, DataOptions(chat_template=Path(name)), 64)
    with encoder.template:
        parts = list(encoder.encode_record(ChatRecord(messages(5), None)))
    spoken = [tokenizer.decode(tokens[marks > 0]).decode() for tokens, marks, _ in parts]
    assert "".join(spoken).replace(" ", "") == f"said{end}end{end}"
    assert tokenizer.vocabulary.index[end] in tokenizer.ends.turn


def test_a_new_model_keeps_the_layout_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 4
    )
    small = (
        "--embd",
        32,
        "--head",
        2,
        "--layer",
        1,
        "--ff",
        32,
        "--ctx",
        64,
        "--vocab-size",
        258,
        "--iters",
        1,
    )
    ran("from-scratch", "c.jsonl", "--chat-template", "gemma", "--out", "run", *small)
    assert open_gguf(Path("run/model.gguf")).metadata["tokenizer.chat_template"] == TEMPLATES["gemma"]


def test_a_file_of_that_name_comes_first_and_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gemma").mkdir()  # as models' folders are called
    assert DataOptions(chat_template=Path("gemma")).template == TEMPLATES["gemma"]
    Path("gemma").rmdir()
    Path("gemma").write_text("{{ messages[0].content }}")
    assert DataOptions(chat_template=Path("gemma")).template == "{{ messages[0].content }}"
    with pytest.raises(DataError, match=r"gemma4: No such file or directory; .*chatml, gemma, granite"):
        _ = DataOptions(chat_template=Path("gemma4")).template


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("mistral", "mistral-v7-tekken"),
        ("qwen3", "chatml"),
        ("llama3.1", "llama3"),
        ("Llama3.2", "llama3"),
        ("smollm3", "chatml"),
        ("gemma3", "gemma"),
    ],
)
def test_models_name_the_layout_that_they_have(alias: str, name: str) -> None:
    options = DataOptions(chat_template=Path(alias))
    assert options.template == TEMPLATES[name] and options.is_named_template


def test_of_a_layout_that_is_not_known_it_is_said_what_would_do() -> None:
    assert {*ALIASES.values()} <= {*TEMPLATES} and not {*ALIASES} & {*TEMPLATES}
    with pytest.raises(
        DataError,
        match=r"deepseek: No such .*chatml.*without --chat-template",
    ):
        _ = DataOptions(chat_template=Path("deepseek")).template


def test_a_chat_is_read_whole_where_marks_take_white_space_along() -> None:
    """As Phi-3's do: an answer begins with a space as its questions do, and all turns are one row."""
    tokenizer = load(Metadata(FAMILIES["phi 3"].vocabulary()))
    encoder = Encoder(tokenizer, DataOptions(chat_template=Path("phi3")), 64)
    with encoder.template:
        ((tokens, marks, _),) = encoder.encode_record(ChatRecord(messages(5), None))
        whole = encoder.template.render(messages(5))
    expected = tokenizer.encode(whole, special=True)
    assert tokens.tolist() == expected.tolist()
    assert tokenizer.decode(tokens[marks > 0]).decode() == " said<|end|> end<|end|>"
