"""Chats in the forms that data has them in, and what is said of what becomes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from llamatrain.data.records import ChatRecord, PromptRecord, parse_record
from llamatrain.errors import DataError
from llamatrain.gguf.values import string
from tests.helpers.chat_templates import GEMMA, LAYOUTS, ZEPHYR, Layout
from tests.helpers.cli import TINY, Done, ran, run
from tests.helpers.conversations import CALL, CHATS, TOOL
from tests.helpers.llama_cpp import model_with, served


def chat(**row: Any) -> ChatRecord:
    document = parse_record(json.dumps(row).encode(), "d.jsonl, line 1")
    assert isinstance(document, ChatRecord)
    return document


def refused(**row: Any) -> str:
    with pytest.raises(DataError) as info:
        parse_record(json.dumps(row).encode(), "d.jsonl, line 1")
    assert "\n" not in str(info.value)
    return str(info.value)


HI = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "hello"}
IMAGE = {
    "role": "user",
    "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}],
}


# ---- forms -------------------------------------------------------------------


def test_parts_of_text_are_joined_and_others_are_refused_by_name() -> None:
    parts = [{"type": "text", "text": ""}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}, HELLO]).messages[0]["content"] == parts
    assert 'message 2 has a part of type "blink"' in refused(
        messages=[HI, {"role": "user", "content": [{"type": "blink"}]}]
    )
    assert "message 1 has a part without a type" in refused(messages=[{"role": "user", "content": ["a"]}])


def test_images_are_left_out_and_reported(tmp_path: Path) -> None:
    assert (
        chat(messages=[IMAGE, HELLO]).has_media
        and chat(messages=[IMAGE, HELLO]).messages[0]["content"] == IMAGE["content"][:1]
    )
    assert chat(messages=[HI, HELLO], images=["a.png"]).has_media and not chat(messages=[HI, HELLO]).has_media
    for row in ({"messages": [IMAGE, HELLO]}, {"prompt": "a", "completion": "b", "image": "x.png"}):
        (line,) = (each for each in shown(tmp_path, LAYOUTS["chatml"], row)[1] if "images" in each)
        assert line.endswith(
            "rows have images, audio or video, which cannot be trained on; only their text is used"
        )


def test_parts_that_are_thoughts_or_calls() -> None:
    content = [
        {"type": "reasoning", "text": "I ask."},
        {"type": "text", "value": "Let me see."},
        {"type": "tool_call", "name": "weather", "arguments": {"city": "Oslo"}},
    ]
    made = chat(messages=[HI, {"role": "assistant", "content": content}]).messages[1]
    assert made["reasoning_content"] == "I ask." and made["content"] == [
        {"type": "text", "text": "Let me see."}
    ]
    assert made["tool_calls"] == [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    ]


@pytest.mark.parametrize("key", ["messages", "conversations", "conversation"])
@pytest.mark.parametrize(
    "names",
    [("human", "gpt"), ("user", "bot"), ("Human", "Assistant"), ("user", "model"), ("USER", "chatbot")],
)
@pytest.mark.parametrize(("role", "content"), [("role", "content"), ("from", "value")])
def test_roles_and_keys_by_other_names(key: str, names: tuple[str, str], role: str, content: str) -> None:
    rows = [{role: name, content: text} for name, text in zip(names, ("hi", "hello"), strict=True)]
    assert chat(**{key: rows}).messages == [HI, HELLO]


def test_keys_of_messages_that_begin_with_a_capital() -> None:
    told = chat(Messages=[{"Role": "user", "Content": "hi"}, {"From": "gpt", "Value": "hello"}])
    assert [(each["role"], each["content"]) for each in told.messages] == [
        ("user", "hi"),
        ("assistant", "hello"),
    ]


def test_a_chat_of_unknown_roles_names_them() -> None:
    assert 'no message has the role "assistant" (got "narrator")' in refused(
        messages=[{"role": "narrator", "content": "x"}]
    )
    claude = {"from": "claude", "value": "b"}
    assert 'no message has the role "assistant" (got "claude")' in refused(
        conversations=[{"from": "human", "value": "a"}, claude]
    )
    assert chat(messages=[HI, {"role": " model ", "content": "hello"}]).messages == [HI, HELLO]


@pytest.mark.parametrize(
    ("ask", "answer"),
    [("instruction", "response"), ("input", "output"), ("Prompt", "Completion"), ("QUESTION", "Answer")],
)
def test_prompts_and_answers_by_other_names(ask: str, answer: str) -> None:
    made = parse_record(json.dumps({ask: "a", answer: "b", "id": 7}).encode(), "x")
    assert isinstance(made, PromptRecord) and (made.prompt, made.answer) == ("a", "b")


def test_turns_before_a_prompt() -> None:
    """As LLaMA-Factory's data has them beside Alpaca's instruction."""
    row = {"instruction": "e", "input": "", "output": "f", "history": [["a", "b"], ["c", "d"]]}
    document = parse_record(json.dumps(row).encode(), "d.jsonl, line 1")
    assert isinstance(document, PromptRecord) and document.context == "a\nb\nc\nd\ne\n"
    turns = [(each["role"], each["content"]) for each in document.as_chat().messages]
    assert turns == [*zip(("user", "assistant") * 3, "abcdef", strict=True)]
    for wrong in ("ab", [["a"]], [["a", 1]], {"a": "b"}):
        assert 'line 1: "history" is not a list of pairs of strings' in refused(**{**row, "history": wrong})


def test_prompts_and_answers_that_are_messages() -> None:
    """TRL's form: what stands in the prompt is given, and not trained."""
    made = chat(prompt=[HI, HELLO, HI], completion=[HELLO]).messages
    assert made == [HI, HELLO | {"untrained": True}, HI, HELLO]


def test_system_prompts_beside_prompts(tmp_path: Path) -> None:
    row = {"instruction": "i", "output": "o", "system": "Be brief."}
    assert parse_record(json.dumps(row).encode(), "x").as_chat().messages[0]["content"] == "Be brief."  # type: ignore[union-attr]
    (line,) = shown(tmp_path, LAYOUTS["chatml"], row, options=("--no-as-chat",))[1]
    assert "system prompts are ignored in plain text" in line


def test_no_content_beside_calls_is_empty_content() -> None:
    for message in ({"content": None, "tool_calls": [CALL]}, {"tool_calls": [CALL]}):
        (made,) = chat(messages=[{"role": "assistant", **message}]).messages
        assert made["content"] == "" and made["tool_calls"][0]["function"]["name"] == "weather"
    assert 'message 1 has no "content"' in refused(messages=[{"role": "assistant", "content": None}])
    assert 'bad "tool_calls"' in refused(
        messages=[{"role": "assistant", "content": None, "tool_calls": ["x"]}]
    )


def test_tools_stand_beside_the_messages_as_a_list_or_as_its_json() -> None:
    bare = [{"name": "weather"}]
    for tools in ([TOOL], json.dumps([TOOL])):
        assert chat(messages=[HI, HELLO], tools=tools).tools == [TOOL]
        assert chat(conversations=[{"from": "human", "value": "hi"}], tools=tools).tools == [TOOL]
    made = chat(messages=[HI], tools=bare).tools
    assert made == [
        {"type": "function", "function": {"name": "weather", "description": "", "parameters": {}}}
    ]
    assert chat(messages=[HI], tools="").tools is None and chat(messages=[HI], tools=None).tools is None
    assert '"tools" is a string that is not JSON' in refused(messages=[HI], tools="{")
    assert '"tools" is a number' in refused(messages=[HI], tools=1)


def test_a_system_prompt_may_stand_beside_the_turns() -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    assert chat(conversations=turns, system="be").messages == [{"role": "system", "content": "be"}, HI, HELLO]
    assert chat(messages=[HI, HELLO], system="be").messages[0]["role"] == "system"
    own = [{"role": "developer", "content": "own"}, HI]
    assert [each["content"] for each in chat(messages=own, system="be").messages] == ["own", "hi"]


def test_a_written_call_is_one() -> None:
    turns = [("human", "cold?"), ("function_call", '{"name": "weather", "arguments": {"city": "Oslo"}}')]
    turns += [("observation", "-3"), ("gpt", "yes")]
    made = chat(conversations=[{"from": who, "value": value} for who, value in turns]).messages
    assert [each["role"] for each in made] == ["user", "assistant", "tool", "assistant"]
    assert made[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert made[2]["tool_call_id"] == made[1]["tool_calls"][0]["id"]
    assert chat(conversations=[{"from": "function_call", "value": "weather Oslo"}]).messages == [
        {"role": "assistant", "content": "weather Oslo"}
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": [HI, HELLO], "rejected": [HI, HELLO]},
        {
            "conversations": [{"from": "human", "value": "a"}],
            "chosen": {"from": "gpt"},
            "rejected": {"from": "gpt"},
        },
        {"input": {"messages": [HI]}, "preferred_output": [HELLO], "non_preferred_output": [HELLO]},
        {"prompt": "a", "completion": "b", "label": False},
    ],
)
def test_preferences_are_refused(row: dict[str, Any]) -> None:
    assert "the row has preferences (" in refused(**row) and "d.jsonl, line 1" in refused(**row)


# ---- what is trained, and said -------------------------------------------------


def said(done: Done) -> list[str]:
    """But that kernels are compiled, which is the cache's affair."""
    return [line for line in done.err.splitlines() if not line.startswith("compil")]


def shown(
    place: Path, layout: Layout, *rows: dict[str, Any], options: tuple[str, ...] = ()
) -> tuple[list[str], list[str]]:
    """What is trained, and what is said, by the command, which says it again of what is kept."""
    model, data = model_with(layout.vocabulary(), place / "m.gguf"), place / "d.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    command = (
        "preview",
        data,
        "--model",
        model,
        "--ctx",
        400,
        "--no-shuffle",
        "--no-pack",
        "-n",
        1,
        *options,
    )
    first, again = run(*command), run(*command)
    assert first.code == 0 and said(first) == said(again), first.err
    trained = [
        piece.partition("]]")[0] for piece in first.out.split("[[")[2:]
    ]  # the first is in the words above
    return trained, [line.replace(f"{data}: ", "") for line in said(first)]


PLAIN = {"messages": [HI, HELLO]}
TURNS = {"messages": [HI, HELLO, HI, {"role": "assistant", "content": "again"}]}
SYSTEM = {"messages": [{"role": "system", "content": "be"}, HI, HELLO]}
CALLS = {"tools": [TOOL], "messages": [HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}


def test_a_chat_as_it_should_be_is_not_spoken_of(tmp_path: Path) -> None:
    assert shown(tmp_path, LAYOUTS["chatml"], TURNS) == (["hello<|im_end|>", "again<|im_end|>"], [])


def test_an_end_that_is_there_is_not_doubled(tmp_path: Path) -> None:
    row = {"messages": [HI, {"role": "assistant", "content": "hello</s>"}]}
    assert shown(tmp_path, LAYOUTS["llama 2"], row)[0] == [" hello</s>"]
    assert shown(tmp_path, LAYOUTS["llama 2"], {"prompt": "hi", "completion": " hello</s>"})[0] == [
        " hello</s>"
    ]


def test_prompt_and_answer_are_tokenized_apart(tmp_path: Path) -> None:
    tokenizer = LAYOUTS["llama 2"].tokenizer()
    spanning = tokenizer.vocabulary.index[']"']
    row = {"prompt": "[/INST]", "completion": '"Chillax"'}
    model = model_with(LAYOUTS["llama 2"].vocabulary(), tmp_path / "m.gguf")
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    (line,) = ran(
        "preview", tmp_path / "d.jsonl", "--model", model, "--ctx", 40, "--json", "-n", 1
    ).out.splitlines()
    assert spanning not in json.loads(line)["tokens"] and spanning in tokenizer.encode('[/INST]"Chillax"')


def test_a_system_prompt_that_a_template_refuses_goes_to_the_user(tmp_path: Path) -> None:
    trained, said = shown(tmp_path, LAYOUTS["gemma"], SYSTEM)
    assert (
        trained == ["hello<end_of_turn>"]
        and len(said) == 1
        and said[0].startswith("the chat template has no system prompt")
    )


def test_turns_that_are_written_otherwise_later_become_rows(tmp_path: Path) -> None:
    _, said = shown(tmp_path, LAYOUTS["nemo"], {"messages": SYSTEM["messages"] + TURNS["messages"][:2]})
    assert len(said) == 1 and said[0].startswith("some answers get a row of their own")


def test_turns_that_are_read_otherwise_later_become_rows(tmp_path: Path) -> None:
    """What stands behind a control token has a space more there than as an answer: where that is a call, it has none."""
    trained, said = shown(tmp_path, LAYOUTS["mistral v0.3"], {"messages": [HI, HELLO, HI, HELLO]})
    assert (
        trained == [" hello</s>"]
        and len(said) == 1
        and said[0].startswith("some answers get a row of their own")
    )
    trained, said = shown(tmp_path, LAYOUTS["mistral v0.3"], CHATS["tools"])
    assert trained[0].startswith("[TOOL_CALLS]") and len(trained) == 2 and not said


def test_a_model_without_a_template(tmp_path: Path) -> None:
    trained, said = shown(tmp_path, LAYOUTS["none"], PLAIN)
    assert trained == ["hello</s>"] and said[0].startswith("the model has no chat template; chats use ChatML")
    marks, endless = said[1:]
    assert marks.startswith("warning: marks of the chat template ") and "<|im_start|>, <|im_end|>" in marks
    assert endless.startswith("warning: the chat template ends answers without ") and "</s>" in endless
    template = tmp_path / "t.jinja"
    template.write_text(ZEPHYR.replace("<|", "[").replace("|>", "]"))
    assert shown(tmp_path, LAYOUTS["none"], PLAIN, options=("--chat-template", str(template))) == (
        ["hello</s>"],
        [],
    )


def test_marks_that_are_text_and_answers_without_an_end(tmp_path: Path) -> None:
    (first, second) = shown(tmp_path, Layout(LAYOUTS["chatml"].template, "<s>", "</s>"), PLAIN)[1]
    assert "(got <|im_start|>, <|im_end|>)" in first and "--chat-template FILE" in first
    assert (
        second.startswith("warning: the chat template ends answers without a token")
        and "--chat-template FILE" in second
    )


def test_calls_and_thoughts_that_a_template_has_no_place_for(tmp_path: Path) -> None:
    trained, said = shown(tmp_path, LAYOUTS["chatml"], PLAIN, CALLS)
    assert len(said) == 1 and said[0].startswith("warning: the chat template does not render tool calls")
    trained, said = shown(tmp_path, LAYOUTS["r1 distill"], PLAIN)
    assert trained == ["\n</think>\n\nhello<｜end▁of▁sentence｜>"] and said[0].startswith(
        "the chat template opens reasoning"
    )
    written = {
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": '{"name": "f"}'},
        ]
    }
    assert shown(tmp_path, LAYOUTS["chatml"], written) == (['{"name": "f"}<|im_end|>'], [])
    assert shown(tmp_path, LAYOUTS["qwen 2.5"], written)[0] == [
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
    ]


def test_rendered_chats_and_instructions(tmp_path: Path) -> None:
    text = {"text": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>"}
    (line,) = shown(tmp_path, LAYOUTS["chatml"], text)[1]
    assert (
        line.startswith("warning: texts contain chat marks ")
        and "(got <|im_start|>, <|im_end|>)" in line
        and "--parse-special" in line
    )
    trained, said = shown(tmp_path, LAYOUTS["chatml"], text, options=("--parse-special",))
    assert said == [] and trained[0].endswith("hello<|im_end|>")
    (line,) = shown(tmp_path, LAYOUTS["chatml"], {"instruction": "a", "output": "b"})[1]
    assert line.startswith("prompts with answers use the model's chat template") and "--no-as-chat" in line
    assert (
        shown(tmp_path, LAYOUTS["chatml"], {"instruction": "a", "output": "b"}, options=("--as-chat",))[1]
        == []
    )
    assert shown(
        tmp_path, LAYOUTS["chatml"], {"instruction": "a", "output": "b"}, options=("--no-as-chat",)
    ) == (
        ["b<|im_end|>"],
        [],
    )


def test_arguments_that_are_no_json_name_the_line(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{"}}
    row = {"messages": [HI, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    model, data = model_with(LAYOUTS["qwen 2.5"].vocabulary(), tmp_path / "m.gguf"), tmp_path / "d.jsonl"
    data.write_text(json.dumps(row))
    done = run("preview", data, "--model", model)
    assert (
        done.code == 1
        and "line 1: the chat template refuses it: the arguments of a tool call are not JSON" in done.err
    )


@pytest.mark.llama_cpp
def test_a_new_model_is_served_as_it_was_trained(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("\n".join([json.dumps({"text": "a"}), json.dumps(TURNS)]))
    ran(
        "from-scratch",
        tmp_path / "d.jsonl",
        *TINY,
        "--ctx",
        200,
        "--iters",
        1,
        "--batch",
        1,
        "--out",
        tmp_path / "run",
    )
    done = ran(
        "preview",
        tmp_path / "d.jsonl",
        "--model",
        tmp_path / "run" / "model.gguf",
        "--ctx",
        200,
        "-n",
        2,
        "--no-shuffle",
    )
    assert [line.partition(": ")[2] for line in said(done)] == ["rows have several forms: chats and texts"]
    assert done.out.count("[[hello<|end_of_text|>]]") == 1
    with served(tmp_path / "run" / "model.gguf") as server:
        asked = server.post("apply-template", messages=TURNS["messages"][:3])["prompt"]
    assert asked.replace("hello<|end_of_text|>", "[[hello<|end_of_text|>]]") + "[[again" in done.out
    (tmp_path / "t.jinja").write_text(GEMMA)
    named = ("--chat-template", tmp_path / "t.jinja")
    ran(
        "from-scratch",
        tmp_path / "d.jsonl",
        *TINY,
        "--ctx",
        200,
        "--iters",
        0,
        *named,
        "--out",
        tmp_path / "other",
    )
    with served(tmp_path / "other" / "model.gguf") as server:
        assert "<start_of_turn>" in server.post("apply-template", messages=[HI])["prompt"]


def test_thoughts_are_trained_where_the_template_drops_them(tmp_path: Path) -> None:
    apart = {"role": "assistant", "content": "A", "reasoning_content": "x"}
    inside = {"role": "assistant", "content": "<think>\nx\n</think>\n\nA"}
    for answer in (apart, inside):
        row = {"messages": [HI, answer]}
        assert shown(tmp_path, LAYOUTS["r1 distill"], row) == (["x\n</think>\n\nA<｜end▁of▁sentence｜>"], [])
        assert shown(tmp_path, LAYOUTS["qwen 3"], row)[0] == ["<think>\nx\n</think>\n\nA<|im_end|>"]
    assert shown(tmp_path, LAYOUTS["llama 3"], {"messages": [HI, apart]})[0] == ["A<|eot_id|>"]


@pytest.mark.llama_cpp
def test_chats_with_tools_take_the_template_for_them(tmp_path: Path) -> None:
    """As llama-server takes it, which ignores templates of other names."""
    layout = LAYOUTS["smollm"]
    others = {"tool_use": f"{{{{ tools | tojson }}}}{layout.template}", "rag": "none"}
    vocabulary = layout.vocabulary() | {
        f"tokenizer.chat_template.{name}": string(text) for name, text in others.items()
    }
    row = {"messages": [HI, HELLO], "tools": [TOOL]}
    model, data = model_with(vocabulary, tmp_path / "m.gguf"), tmp_path / "d.jsonl"
    data.write_text("\n".join(map(json.dumps, (row, {"messages": [HI, HELLO]}))))
    done = ran("preview", data, "--model", model, "--ctx", 1000, "--no-shuffle", "--no-pack", "-n", 2)
    with served(model) as server:
        for each in ({"tools": row["tools"]}, {}):
            asked = server.post("apply-template", messages=[HI], **each)["prompt"]
            assert f"{asked}[[hello" in done.out, asked
