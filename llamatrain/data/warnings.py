"""Collects notes and warnings on data that becomes something unexpected, once for all of it."""

import re
from collections.abc import Iterator, Mapping

from llamatrain.data.chat.builtin import CHATML_WITH_EOS
from llamatrain.data.chat.encode import MAX_LATER_TOKENS
from llamatrain.data.chat.prompt import PromptReader
from llamatrain.data.chat.template import ChatTemplate
from llamatrain.errors import DataError

TEMPLATE_HINT = "choose another with --chat-template FILE"
NOTES = {
    "fallback": f"the model has no chat template; chats use ChatML, as in llama-server; {TEMPLATE_HINT}",
    "system": "the chat template has no system prompt; it is put before the first user message, as in "
    "llama-server",
    "thoughts": "the chat template opens reasoning before each answer; answers without reasoning close "
    "it, as servers expect",
    "as_chat": "prompts with answers use the model's chat template; use --no-as-chat to train on them "
    "as plain text",
    "mixed": "rows have several forms: {}",
    "apart": "some answers get a row of their own, because the template renders their earlier turns "
    "differently",
}
WARNINGS = {
    "marks": f"marks of the chat template are plain text in the vocabulary (got {{}}); {TEMPLATE_HINT}",
    "endless": f"the chat template ends answers without a token at which llama.cpp stops; {{}} is "
    f"appended; {TEMPLATE_HINT}",
    "system_left": "system prompts are ignored in plain text; use --as-chat to include them",
    "media": "rows have images, audio or video, which cannot be trained on; only their text is used",
    "calls": f"the chat template does not render tool calls, which are ignored; {TEMPLATE_HINT}",
    "unthought": "the chat template does not render reasoning, which is ignored; use --thinking keep "
    "to put it before the answers",
    "later": f"chats with separate rows for their answers are cut after {MAX_LATER_TOKENS:,} tokens; "
    "split them",
    "rendered": "texts contain chat marks that are read as plain text (got {}); use --parse-special to "
    "read them as tokens",
}
MARK = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<(?:start|end)_of_turn>|\[/?INST\]|</?s>|<bos>"
)
TEXT_MARK = re.compile(r"\[/?INST\]|</?s>|<bos>")  # plain text in some models by design


def format_notes(notes: Mapping[str, str], name: str) -> Iterator[str]:
    """Yield the messages of the notes, filled in with their details."""
    for kind, text in NOTES.items():
        if kind in notes:
            yield f"{name}: {text.format(notes[kind])}"
    for kind, text in WARNINGS.items():
        if kind in notes:
            yield f"warning: {name}: {text.format(notes[kind])}"


def find_plain_marks(template: ChatTemplate, reader: PromptReader) -> list[str]:
    """Return the marks of a template that are plain text to the vocabulary, not tokens."""
    if template.source == CHATML_WITH_EOS:  # new models learn these marks
        return []
    try:
        prompt = template.render([{"role": "user", "content": "hi"}], answer_next=True).decode(
            "utf-8", "replace"
        )
    except DataError:
        return []
    return [
        mark
        for mark in find_marks(prompt)
        if not TEXT_MARK.fullmatch(mark) and reader.find_token(mark) is None
    ]


def find_marks(text: str) -> list[str]:
    """Return the distinct chat marks in a text."""
    return list(dict.fromkeys(MARK.findall(text)))
