"""Text from files: whole, by lines, or in the ancestors' samples that begin after a pattern."""

import mmap
from collections.abc import Iterator

from llamatrain.config.options import flag_of
from llamatrain.config.words import worded
from llamatrain.data.sources import DataFile
from llamatrain.data.suitable import MARK, Utf8, check_text
from llamatrain.data.tokenizer.tokenizer import to_bytes
from llamatrain.errors import DataError
from llamatrain.files.mapped import map_file, unchanged

CHUNK = 1 << 20


def chunks_of(source: DataFile) -> Iterator[bytes]:
    """The whole text, cut anywhere."""
    with source.path.open("rb") as file:
        offset = file.tell() if file.read(len(MARK)) == MARK else file.seek(0)
        encoding = Utf8(source.name)
        while chunk := file.read(CHUNK):
            check_text(chunk, source.name, offset)
            encoding.feed(chunk)
            offset += len(chunk)
            yield chunk


def lines_of(source: DataFile) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers."""
    with source.path.open("rb") as file:
        number = 0
        while line := file.readline():  # which an iterator would hold beside the text
            number += 1
            line = line.removeprefix(MARK if number == 1 else b"").strip()
            if line:
                yield number, line


def boundary(text: bytes | mmap.mmap, at: int) -> int:
    """The next beginning of a UTF-8 character."""
    while at < len(text) and text[at] & 0xC0 == 0x80:
        at += 1
    return at


def samples_after(source: DataFile, pattern: str, include: bool, longest: int | None) -> Iterator[bytes]:
    """What follows each place of the pattern, up to the next one; or on into the next ones, up to a longest length in bytes."""
    mark = to_bytes(pattern)
    text = map_file(source.path, "a text")
    with unchanged([text]):
        encoding, read, at = Utf8(source.name), 0, text.find(mark)
        if at < 0:
            told = f"({flag_of('escape')} reads \\n as the end of a line)"
            raise DataError(f"{source.name}: the sample start {worded(pattern)} is not in it {told}")
        while at >= 0:
            following = text.find(mark, at + len(mark))
            begin = at if include else at + len(mark)
            end = following if following >= 0 else len(text)
            if longest is not None:
                end = boundary(text, min(begin + longest, len(text)))
            sample = text[begin:end]
            check_text(sample, source.name, begin)
            encoding.feed(text[read:end])
            read = max(read, end)
            yield sample
            at = following
