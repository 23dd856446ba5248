"""The text in some files, to learn a vocabulary from."""

import codecs
from collections.abc import Iterator

from llamatrain.data.encode import lines_of
from llamatrain.data.forms import Chat, Prompt, TooMuch, parse_line
from llamatrain.data.samples import chunks_of
from llamatrain.data.sources import DataFile

ENOUGH = 64 * 10**6  # bytes: more text hardly changes which pairs are frequent


def texts_of(sources: list[DataFile]) -> Iterator[str]:
    """All of it, or the beginning of each file where that is enough."""
    sizes = [source.path.stat().st_size for source in sources]
    share = min(1.0, ENOUGH / max(1, sum(sizes)))
    for source, size in zip(sources, sizes, strict=True):
        left = size * share
        for text in _lines(source) if source.kind == "lines" else _chunks(source):
            yield text
            left -= len(text)
            if left < 0:
                break


def _chunks(source: DataFile) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for chunk in chunks_of(source):
        yield decoder.decode(chunk)
    yield decoder.decode(b"", final=True)


def _lines(source: DataFile) -> Iterator[str]:
    for number, line in lines_of(source):
        try:
            document = parse_line(line, f"{source.name}, line {number}")
        except TooMuch:  # told where it is skipped as a row
            continue
        if isinstance(document, Chat):
            yield from (message["content"] for message in document.messages if isinstance(message.get("content"), str))
        elif isinstance(document, Prompt):
            yield document.prompt + document.joint + document.answer
        else:
            yield document.text
