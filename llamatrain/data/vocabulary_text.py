"""Reads the text of data files to learn a vocabulary from."""

import codecs
import math
from collections.abc import Iterator

from llamatrain.data.chat.server_messages import words_of
from llamatrain.data.files import DataFile
from llamatrain.data.find_files import naming
from llamatrain.data.json_values import RecordTooLarge
from llamatrain.data.readers.text import chunks_of, rows_of
from llamatrain.data.records import ChatRecord, PromptRecord, parse_line
from llamatrain.platform.terminal import progress_bar

PACKED = 4  # times its size, a packed file holds of text, as a rule
ENOUGH = 64 * 10**6  # bytes: more text hardly changes which pairs are frequent


def texts_of(sources: list[DataFile]) -> Iterator[str]:
    """Yield the texts of all files, or the beginning of each if there are more than ENOUGH bytes."""
    sizes = [source.size * (1 if source.is_plain else PACKED) for source in sources]
    share = min(1.0, ENOUGH / max(1, sum(sizes)))
    with progress_bar(
        f"reading {naming(sources)}", total=int(sum(sizes) * share), unit="B", unit_scale=True
    ) as told:
        for source, size in zip(sources, sizes, strict=True):
            left = size * share if share < 1 else math.inf
            for read, text in _lines(source) if source.kind == "lines" else _chunks(source):
                yield text
                told.update(read)
                left -= len(text)
                if left < 0:
                    break


def _chunks(source: DataFile) -> Iterator[tuple[int, str]]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for chunk in chunks_of(source):
        yield len(chunk), decoder.decode(chunk)
    yield 0, decoder.decode(b"", final=True)


def _lines(source: DataFile) -> Iterator[tuple[int, str]]:
    """Yield each text with the bytes of its line, which count once."""
    for number, line in rows_of(source):
        try:
            document, read = parse_line(line, source.place(number), source.columns), len(line) + 1
        except RecordTooLarge:  # told where it is skipped as a row
            continue
        if isinstance(document, ChatRecord):
            for message in document.messages:
                yield read, words_of(message)
                read = 0
        elif isinstance(document, PromptRecord):
            yield read, document.before + document.answer
        else:
            yield read, document.text
