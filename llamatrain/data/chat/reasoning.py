"""Rows without the thoughts of their answers, where these are not wanted."""

from dataclasses import replace

from llamatrain.data.chat.messages import THOUGHTS, Message
from llamatrain.data.chat.server_messages import words_of
from llamatrain.data.records import ChatRecord, Document, PromptRecord

END = "</think>"


def unthought(document: Document) -> Document:
    if isinstance(document, ChatRecord):
        return replace(document, messages=[said(message) for message in document.messages])
    return (
        replace(document, answer=said_of(document.answer)) if isinstance(document, PromptRecord) else document
    )


def said(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key != THOUGHTS[0]}
    return {**kept, "content": said_of(words_of(message))}


def said_of(text: str) -> str:
    """An answer behind its thoughts."""
    return text.rpartition(END)[2].lstrip("\n") if END in text else text
