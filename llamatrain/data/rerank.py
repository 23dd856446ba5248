"""Asks a model whether a document answers a query, as rerankers of Qwen 3 are asked in llama-server; the answer is yes or no.

The question is the template of the model's file, which llama.cpp calls `rerank`, or Qwen's. As in llama-server, control
tokens that a query or a document spells out are read as such.
"""

import re
from typing import NamedTuple

from llamatrain.data.chat.prompt import TokenizerLike
from llamatrain.errors import UsageError

QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
PLACES = re.compile(r"\{(query|document)\}")


class Verdicts(NamedTuple):
    """The tokens of both answers."""

    yes: int
    no: int


def rerank_template(tokenizer: TokenizerLike) -> str:
    """Return the template of the model, or Qwen's."""
    template = tokenizer.rerank_template or QWEN3
    if {*PLACES.findall(template)} != {"query", "document"}:
        raise UsageError(
            "the model's tokenizer.chat_template.rerank has no place for {query} and {document}; correct the file",
            code="bad-template",
        )
    return template


def fill_template(template: str, query: str, document: str) -> str:
    """Return the question about a query and a document."""
    values = {"query": query, "document": document}
    return PLACES.sub(lambda place: values[place[1]], template)


def find_verdicts(tokenizer: TokenizerLike) -> Verdicts:
    """Return the tokens for yes and no."""
    found = []
    for answer in Verdicts._fields:
        tokens = tokenizer.encode(answer, special=True, start=False)
        if len(tokens) != 1:
            raise UsageError(
                f"the model's vocabulary has no token for {answer!r}, which --objective rerank needs; choose another model",
                code="no-verdict-token",
            )
        found.append(int(tokens[0]))
    return Verdicts(*found)
