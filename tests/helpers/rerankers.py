"""A tiny Qwen 3 that can be asked for yes and no, and the same with the classifier that llama-server needs."""

from pathlib import Path

import numpy as np

from llamatrain.data.rerank import find_verdicts
from llamatrain.data.tokenizer import load
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import string, strings, u32
from llamatrain.gguf.writer import create_gguf
from tests.helpers.cli import ran
from tests.helpers.groups import WORDS, groups, write_groups

TEMPLATE = "Query: {query}\nDocument: {document}\nAnswer: "


def reranker(folder: Path) -> Path:
    """A model whose vocabulary has tokens for yes, no, and the words of the groups."""
    text = folder / "words.txt"
    text.write_text("".join(f"Answer: yes\n{word}\nAnswer: no\n{word} of a {word}\n" for word in WORDS * 20))
    shape = ("--embd", 64, "--head", 4, "--head-kv", 2, "--layer", 2, "--ff", 96, "--ctx", 64)
    words = ("--arch", "qwen3", "--vocab-size", 330, *shape, "--iters", 1, "--batch", 1)
    ran("from-scratch", text, *words, "--out", folder / "base")
    return with_template(folder / "base" / "model.gguf", folder / "m.gguf")


def with_template(base: Path, path: Path, template: str = TEMPLATE, head: np.ndarray | None = None) -> Path:
    """Copy a model, with a template for questions, and a classifier for llama-server."""
    gguf = open_gguf(base)
    metadata = {**gguf.metadata.raw_values, "tokenizer.chat_template.rerank": string(template)}
    if head is not None:
        metadata |= {"qwen3.pooling_type": u32(4), "qwen3.classifier.output_labels": strings(["yes", "no"])}
    infos = list(gguf.tensors.values())
    more = [] if head is None else [TensorInfo("cls.output.weight", type_by_name("F32"), head.shape)]
    with create_gguf(path, metadata, [*infos, *more]) as out:
        for info in infos:
            out.write(info.name, [np.array(info.raw).tobytes()])
        if head is not None:
            out.write("cls.output.weight", [np.ascontiguousarray(head, "<f4").tobytes()])
    return path


def with_head(base: Path, path: Path) -> Path:
    """Copy a model, with the rows for yes and no as its classifier, as llama.cpp's converter does it."""
    gguf = open_gguf(base)
    verdicts = find_verdicts(load(gguf.metadata, base))
    output = gguf.tensors.get("output.weight", gguf.tensors["token_embd.weight"])
    rows = np.array(output.raw).view("<f4").reshape(output.shape)[[*verdicts]]
    return with_template(base, path, head=rows)


def rows_to_rank(path: Path, count: int, seed: int = 0) -> Path:
    """Groups that all have negatives."""
    return write_groups(path, groups(count, (2, 3), seed))
