"""Chooses the chat template of a new model, so that servers prompt it as it was trained."""

from collections.abc import Iterable

from llamatrain.data.chat.builtin import CHATML, CHATML_WITH_EOS
from llamatrain.data.chat.prompt import PromptReader, TokenizerLike
from llamatrain.data.files import DataFile
from llamatrain.data.options import DataOptions
from llamatrain.data.records import ChatRecord, PromptRecord, parse_record
from llamatrain.errors import DataError

KEYS = (b'"messages"', b'"conversations"')


def choose_template(
    sources: Iterable[DataFile], options: DataOptions, tokenizer: TokenizerLike
) -> str | None:
    """Return the template for the data, or None if there are no chats."""
    if options.template or tokenizer.chat_template:
        return options.template or tokenizer.chat_template
    if not any(
        source.kind == "lines" and contains_chats(source, options.as_chat is True) for source in sources
    ):
        return None
    ends = tokenizer.eos is None or PromptReader(tokenizer).find_token("<|im_end|>") is not None
    return CHATML if ends else CHATML_WITH_EOS


def contains_chats(source: DataFile, as_chat: bool) -> bool:
    """Return True if a file has chats, or prompts that are trained as chats."""
    for number, line in source.rows():
        if as_chat or source.columns or any(key in line for key in KEYS):
            try:
                document = parse_record(line, source.locate(number), source.columns)
            except DataError:  # reported when the row is encoded
                continue
            if isinstance(document, ChatRecord) or (as_chat and isinstance(document, PromptRecord)):
                return True
    return False
