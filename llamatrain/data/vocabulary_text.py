"""Reads the text of data files to learn a vocabulary from."""

import codecs
import math
from collections.abc import Iterator

from llamatrain.data.chat.server_messages import message_text
from llamatrain.data.files import DataFile
from llamatrain.data.find_files import describe_files
from llamatrain.data.json_values import RecordTooLarge
from llamatrain.data.readers.text import read_chunks
from llamatrain.data.records import ChatRecord, PromptRecord, parse_record
from llamatrain.platform.terminal import progress_bar

UNPACKED_RATIO = 4  # typical text size of a compressed file, in times of its size
ENOUGH_BYTES = 64 * 10**6  # more text hardly changes which pairs are frequent


def read_texts(sources: list[DataFile]) -> Iterator[str]:
    """Yield the texts of all files, or the beginning of each if there are more than ENOUGH_BYTES."""
    sizes = [source.size * (1 if source.is_plain else UNPACKED_RATIO) for source in sources]
    share = min(1.0, ENOUGH_BYTES / max(1, sum(sizes)))
    with progress_bar(
        f"reading {describe_files(sources)}", total=int(sum(sizes) * share), unit="B", unit_scale=True
    ) as bar:
        for source, size in zip(sources, sizes, strict=True):
            bytes_left = size * share if share < 1 else math.inf
            for size_read, text in _read_rows(source) if source.kind == "lines" else _read_text(source):
                yield text
                bar.update(size_read)
                bytes_left -= len(text)
                if bytes_left < 0:
                    break


def _read_text(source: DataFile) -> Iterator[tuple[int, str]]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for chunk in read_chunks(source):
        yield len(chunk), decoder.decode(chunk)
    yield 0, decoder.decode(b"", final=True)


def _read_rows(source: DataFile) -> Iterator[tuple[int, str]]:
    """Yield each text with the bytes of its line, which count once."""
    for number, line in source.rows():
        try:
            document = parse_record(line, source.locate(number), source.columns)
            read = len(line) + 1
        except RecordTooLarge:  # reported when the row is encoded
            continue
        if isinstance(document, ChatRecord):
            for message in document.messages:
                yield read, message_text(message)
                read = 0
        elif isinstance(document, PromptRecord):
            yield read, document.context + document.answer
        else:
            yield read, document.text
