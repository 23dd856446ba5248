"""Reads text files in chunks, or as samples that begin at a pattern."""

import mmap
from collections.abc import Iterator
from pathlib import Path

from llamatrain.config.messages import quote
from llamatrain.config.options import format_flag
from llamatrain.data.files import DataFile, Format
from llamatrain.data.readers.compressed import open_seekable
from llamatrain.data.readers.encoding import EncodingCheck, check_no_zero_bytes
from llamatrain.data.tokenizer.tokenizer import to_bytes
from llamatrain.errors import DataError
from llamatrain.io.mapped_file import map_file, verify_unchanged

CHUNK = 1 << 20  # bytes
TEXT = Format("text", (".txt", ".md"))


def read_chunks(source: DataFile) -> Iterator[bytes]:
    """Yield the whole text in chunks, cut anywhere."""
    with source.open() as file:
        offset = 0
        encoding = EncodingCheck(source.name, source.raw)
        while chunk := file.read(CHUNK):
            check_no_zero_bytes(chunk, source.name, offset)
            encoding.feed(chunk)
            offset += len(chunk)
            yield chunk


def next_character(text: bytes | mmap.mmap, offset: int) -> int:
    """Return the next offset at which a UTF-8 character begins."""
    while offset < len(text) and text[offset] & 0xC0 == 0x80:
        offset += 1
    return offset


def read_samples(source: DataFile, pattern: str, include: bool, max_bytes: int | None) -> Iterator[bytes]:
    """Yield the text after each match of a pattern, up to the next match.

    With `max_bytes`, a sample runs on beyond the next match, up to that many bytes.
    """
    with open_seekable(source.path, source.name, source.compression, is_text=True) as path:
        yield from cut_samples(path, source, to_bytes(pattern), include, max_bytes)


def cut_samples(
    path: Path, source: DataFile, pattern: bytes, include: bool, max_bytes: int | None
) -> Iterator[bytes]:
    """Yield the samples of a UTF-8 file."""
    text = map_file(path, "a text")
    with verify_unchanged([text]):
        encoding = EncodingCheck(source.name, source.raw)
        checked = 0
        match = text.find(pattern)
        if match < 0:
            raise DataError(
                f"{source.name}: the sample start {quote(pattern.decode('utf-8', 'replace'))} does "
                "not occur "
                f"in it; check the pattern ({format_flag('escape')} reads \\n as the end of a line)",
                code="pattern-not-found",
            )
        while match >= 0:
            next_match = text.find(pattern, match + len(pattern))
            begin = match if include else match + len(pattern)
            end = next_match if next_match >= 0 else len(text)
            if max_bytes is not None:
                end = next_character(text, min(begin + max_bytes, len(text)))
            sample = text[begin:end]
            check_no_zero_bytes(sample, source.name, begin)
            encoding.feed(text[checked:end])
            checked = max(checked, end)
            yield sample
            match = next_match
