"""What is to be said of data that becomes something else than its owner may think, once for all of it."""

import re
from collections.abc import Iterator, Mapping

from llamatrain.data.chat.builtin import CHATML_WITH_EOS
from llamatrain.data.chat.encode import TOKENS
from llamatrain.data.chat.prompt import PromptReader
from llamatrain.data.chat.template import ChatTemplate
from llamatrain.errors import DataError

OTHER = "--chat-template FILE names another"
SPOKEN = {
    "fallback": f"the model has no chat template: chats are put into ChatML's, as llama-server does; {OTHER}",
    "system": "the chat template takes no system prompt: it stands before the first words of the user, as llama-server puts it",
    "thoughts": "the chat template opens a thought before each answer: answers without one close it, as a server needs it",
    "as_chat": "prompts with answers go through the model's chat template; --no-as-chat trains on them as plain text",
    "mixed": "rows are of several forms: {}",
    "apart": "an answer becomes a row of its own where a server gives the turns before it otherwise than they were",
}
WARNED = {
    "marks": f"the vocabulary knows marks of the chat template ({{}}) as plain text only; {OTHER}",
    "endless": f"the chat template ends answers in no token at which llama.cpp stops: {{}} is put behind them; {OTHER}",
    "system_left": "system prompts beside prompts are left out of plain text; --as-chat has a place for them",
    "media": "rows have images, audio or video, which cannot be trained on; only their text is",
    "calls": f"the chat template has no place for calls of tools, which are left out; {OTHER}",
    "unthought": "the chat template has no place for thoughts, which are left out; --thinking keep puts them before the answers",
    "later": f"chats whose answers are rows of their own end where these come to {TOKENS:,} tokens; split them",
    "rendered": "texts hold marks of chats ({}) that are read letter by letter; --parse-special reads them as tokens",
}
MARK = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<(?:start|end)_of_turn>|\[/?INST\]|</?s>|<bos>"
)
DESIGNED = re.compile(r"\[/?INST\]|</?s>|<bos>")  # text for some models from their beginning


def lines(notes: Mapping[str, str], name: str) -> Iterator[str]:
    """Of notes with what each tells besides."""
    for kind, line in SPOKEN.items():
        if kind in notes:
            yield f"{name}: {line.format(notes[kind])}"
    for kind, line in WARNED.items():
        if kind in notes:
            yield f"warning: {name}: {line.format(notes[kind])}"


def plain_marks(template: ChatTemplate, reader: PromptReader) -> list[str]:
    """Marks that are no tokens, though they are meant to be."""
    if template.source == CHATML_WITH_EOS:  # of models from scratch, which learn them
        return []
    try:
        prompt = template.render([{"role": "user", "content": "hi"}], answer_next=True).decode(
            "utf-8", "replace"
        )
    except DataError:
        return []
    return [
        mark for mark in marks_in(prompt) if not DESIGNED.fullmatch(mark) and reader.token_of(mark) is None
    ]


def marks_in(text: str) -> list[str]:
    """Each once."""
    return list(dict.fromkeys(MARK.findall(text)))
