"""What a file without a telling name holds, and how chats end for vocabularies that do not know the fallback's mark."""

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from llamatrain.data.encode import Encoder
from llamatrain.data.find_files import find_sources
from llamatrain.data.options import DataOptions
from llamatrain.data.records import ChatRecord
from llamatrain.data.tokenizer.vocabulary import EndTokens
from tests.helpers.byte_tokenizer import CLOSE, EOS, ByteTokenizer

LINE = json.dumps({"text": "some words"}) + "\n"


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.ndjson", LINE, "lines"),
        ("train", LINE, "lines"),
        ("train", "\ufeff\n  \n" + LINE, "lines"),
        ("train", '{"text": broken\n' + LINE, "lines"),  # refused later, by its line
        ("train", "{ a set of words }\n", "text"),
        ("a.txt", "{ a set of words }\n", "text"),
    ],
)
def test_what_a_file_is(name: str, content: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    assert [source.kind for source in find_sources([str(path)])] == [kind]


def test_a_pipe_is_read_once_and_kept(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(LINE,))
    writer.start()
    (source,) = find_sources([str(pipe)])
    writer.join()
    assert (source.name, source.kind, source.path.read_text()) == (str(pipe), "lines", LINE)


PLAIN_ENDS = EndTokens(frozenset({EOS}), frozenset({EOS}))


@dataclass
class Plain(ByteTokenizer):
    """To this vocabulary the fallback's end mark is text."""

    eot: int | None = None
    ends: EndTokens = PLAIN_ENDS

    def encode(self, text: str | bytes, *, special: bool = False, start: bool = True) -> np.ndarray:
        ids = super().encode(text, special=special)
        pieces = [np.frombuffer(b"<|im_end|>", np.uint8) if token == CLOSE else [token] for token in ids]
        return np.array([token for piece in pieces for token in piece], np.int32)


def test_every_answer_ends_with_a_token_that_a_model_can_stop_at() -> None:
    turns = ("hi", "hello", "and now?", "bye")
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)
    ]
    tokenizer = Plain()
    encoder = Encoder(tokenizer, DataOptions(), ctx=512)
    with encoder.template:
        samples = encoder.encode_record(ChatRecord(messages))
    assert [tokenizer.decode(sample.tokens[sample.marks == 1]) for sample in samples] == [
        b"hello</s>",
        b"bye</s>",
    ]
    assert all(sample.tokens[-1] == EOS and (sample.tokens == EOS).sum() == 1 for sample in samples)
