"""The chat template that a new model is given, for servers to ask it as it was trained."""

from collections.abc import Iterable

from llamatrain.data.chat.builtin import CHATML, CHATML_WITH_EOS
from llamatrain.data.chat.prompt import PromptReader, TokenizerLike
from llamatrain.data.files import DataFile
from llamatrain.data.options import DataOptions
from llamatrain.data.readers.text import rows_of
from llamatrain.data.records import ChatRecord, PromptRecord, parse_line
from llamatrain.errors import DataError

KEYS = (b'"messages"', b'"conversations"')


def template_for(sources: Iterable[DataFile], options: DataOptions, tokenizer: TokenizerLike) -> str | None:
    """None where there are no chats."""
    if options.template or tokenizer.chat_template:
        return options.template or tokenizer.chat_template
    if not any(source.kind == "lines" and holds_chats(source, options.as_chat is True) for source in sources):
        return None
    ends = tokenizer.eos is None or PromptReader(tokenizer).token_of("<|im_end|>") is not None
    return CHATML if ends else CHATML_WITH_EOS


def holds_chats(source: DataFile, as_chat: bool) -> bool:
    for number, line in rows_of(source):
        if as_chat or source.columns or any(key in line for key in KEYS):
            try:
                document = parse_line(line, source.place(number), source.columns)
            except DataError:  # told where it is a row
                continue
            if isinstance(document, ChatRecord) or (as_chat and isinstance(document, PromptRecord)):
                return True
    return False
