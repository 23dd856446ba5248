"""Every answer is trained behind the prompt that llama-server makes of the messages before it."""

import json
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest

from llamatrain.data.chat.template import TemplateError
from llamatrain.data.encode import Encoder
from llamatrain.data.options import DataOptions
from llamatrain.data.records import parse_record
from llamatrain.data.tokenizer import Tokenizer
from tests.helpers.chat_templates import LAYOUTS
from tests.helpers.conversations import CHATS, answers_in
from tests.helpers.llama_cpp import Served, model_with, served

FAMILIES = ("gemma 3", "granite", "olmo 2", "phi 3", "phi 4", "phi 4 mini")
WITHOUT_CALLS = (
    "llama 3",
    "chatml",
    "zephyr",
    "smollm",
    "none",
    *FAMILIES,
)  # templates that have no place for them
Answer = tuple[str, str, list[int]]  # what stands before it in its row, itself, its tokens


def trained(encoder: Encoder, row: dict[str, Any]) -> list[Answer]:
    tokenizer, answers = encoder.tokenizer, list[Answer]()
    for tokens, marks, _ in encoder.encode_record(parse_record(json.dumps(row).encode(), "x")):
        assert tokenizer.bos not in tokens[:1] or not tokenizer.add_bos  # the row has one already
        borders = np.flatnonzero(np.diff(marks, prepend=0, append=0)).tolist()
        for begin, end in zip(borders[::2], borders[1::2], strict=True):
            before, said = (tokenizer.decode(each).decode() for each in (tokens[:begin], tokens[begin:end]))
            answers.append((before, said, tokens[begin:end].tolist()))
    return answers


def prompt(server: Served, row: dict[str, Any], turn: int) -> str | None:
    """What the server makes of the messages before a turn; None where it refuses."""
    tools = {"tools": row["tools"]} if "tools" in row else {}
    try:
        return str(server.post("apply-template", messages=row["messages"][:turn], **tools)["prompt"])
    except HTTPError:
        return None


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_answer_stands_behind_the_servers_prompt(name: str, tmp_path: Path) -> None:
    tokenizer = LAYOUTS[name].tokenizer()
    encoder = Encoder(tokenizer, DataOptions(), 64)
    with served(model_with(LAYOUTS[name].vocabulary(), tmp_path / "m.gguf")) as server, encoder.template:
        for case, row in CHATS.items():
            turns = [
                turn
                for turn in answers_in(row)
                if name not in WITHOUT_CALLS or "tool_calls" not in row["messages"][turn]
            ]
            prompts = [prompt(server, row, turn) for turn in turns]
            if None in prompts:
                with pytest.raises(TemplateError):
                    trained(encoder, row)
                continue
            answers = trained(encoder, row)
            assert [before for before, _, _ in answers] == [
                spaced(tokenizer, text) for text in prompts if text
            ], case
            for turn, (before, said, tokens) in zip(turns, answers, strict=True):
                assert tokens[-1] in tokenizer.ends.all and not {*tokens[:-1]} & tokenizer.ends.all
                assert words_of(row["messages"][turn], before) in said, case
                others = [
                    words_of(each, "") for each in row["messages"][:turn] if each["role"] != "assistant"
                ]
                assert not any(words in said for words in others if len(words) > 3)


def spaced(tokenizer: Tokenizer, text: str) -> str:
    """As decoding gives it: with the space that some vocabularies put before a text, and behind control tokens."""
    return tokenizer.decode(tokenizer.encode(text, special=True)).decode()


def words_of(message: dict[str, Any], before: str) -> str:
    content = message["content"]
    if not content:
        return "Oslo"
    words = "\n".join(part["text"] for part in content) if isinstance(content, list) else content.strip()
    return words.removeprefix("<think>\n") if before.endswith("<think>\n") else words
