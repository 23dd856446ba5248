"""The bytes of a file as UTF-8, whatever it is packed in and in whichever Unicode it was written: as a stream, never whole."""

import codecs
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from llamatrain.data.file_kind import MARK
from llamatrain.errors import DataError

RATIO, FREE = (
    250,
    64 << 20,
)  # what unpacks to more than so many times its size, and than so many bytes, is no text
WINDOW = 27  # bits of what zstd may look back on: 128 MB
PIECE = 256  # packed bytes that are given at once to what cannot say how many it makes of them: 8 MB at most
WIDE = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
WIDER = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")  # UTF-32
NEEDED = "zstd takes Python 3.14, or a package that is not installed: pip install zstandard"


@contextmanager
def stream_of(path: Path, name: str, packed: Literal["gz", "zst"] | None = None) -> Iterator[BinaryIO]:
    """Without a mark at its begin."""
    with path.open("rb") as file:
        stream: Any = file
        if packed:
            most = max(FREE, RATIO * path.stat().st_size)
            stream = buffered(Decompressed((gunzip if packed == "gz" else unzstd)(file), name, most))
        yield unmarked(stream, name)


def buffered(raw: io.RawIOBase) -> BinaryIO:
    return io.BufferedReader(raw, 1 << 16)


def unmarked(stream: Any, name: str) -> BinaryIO:
    head = stream.peek(4)[:4]
    if head.startswith(MARK):
        stream.read(len(MARK))
    elif head in WIDER:
        raise DataError(f"{name}: looks like UTF-32; save it as UTF-8")
    elif encoding := WIDE.get(head[:2]):
        return buffered(Utf16Stream(stream, name, encoding))
    return stream


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class GeneratedStream(io.RawIOBase):
    """A stream of what another function gives, piece by piece, and nothing at the end."""

    def __init__(self, more: Callable[[], bytes]) -> None:
        self.more, self.rest = more, b""

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        self.rest = self.rest or self.more()
        size = min(len(into), len(self.rest))
        into[:size], self.rest = self.rest[:size], self.rest[size:]
        return size


class Decompressed(GeneratedStream):
    """What a packed file holds, which is no more than it can be."""

    def __init__(self, reader: Readable, name: str, most: int) -> None:
        super().__init__(self._next)
        self.reader, self.name, self.left, self.most = reader, name, most, most

    def _next(self) -> bytes:
        try:
            found = self.reader.read(1 << 16)
        except EOFError:
            raise DataError(
                f"{self.name}: packed data that ends early: it was cut short; fetch or pack it anew"
            ) from None
        except (OSError, ValueError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            told = " ".join(str(error).split())[:120]
            raise DataError(
                f"{self.name}: packed data that is damaged: {told}; fetch or pack it anew"
            ) from None
        self.left -= len(found)
        if self.left < 0:
            raise DataError(
                f"{self.name}: unpacks to more than {self.most:,} bytes, and over {RATIO} times its size, as no data does; "
                "where it is meant, unpack it first"
            )
        return found


class Utf16Stream(GeneratedStream):
    """UTF-16 as UTF-8."""

    def __init__(self, stream: Readable, name: str, encoding: str) -> None:
        super().__init__(self._next)
        self.stream, self.name, self.at = stream, name, 2
        self.stream.read(2)
        self.decoder = codecs.getincrementaldecoder(encoding)("strict")

    def _next(self) -> bytes:
        made = b""
        while not made:
            raw = self.stream.read(1 << 16)
            try:
                made = self.decoder.decode(raw, final=not raw).encode()
            except UnicodeDecodeError as error:
                what = (
                    "it ends in the midst of a character"
                    if not raw
                    else f"near byte {self.at}: {error.reason}"
                )
                raise DataError(
                    f"{self.name}: begins as UTF-16, and is none: {what}; save it as UTF-8"
                ) from None
            self.at += len(raw)
            if not raw:
                break
        return made


# ---- what unpacks -----------------------------------------------------------


def gunzip(file: BinaryIO) -> Readable:
    import gzip

    return gzip.GzipFile(fileobj=file)


def can_unzstd() -> bool:
    return has_own_zstd() or bool(find_spec("zstandard") or find_spec("pyarrow"))


def has_own_zstd() -> bool:
    """As Python 3.14 has."""
    return bool(find_spec("compression") and find_spec("compression.zstd"))


def unzstd(file: BinaryIO) -> Readable:
    """By Python's own, or by the first that is installed."""
    if has_own_zstd():
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]

        return StdlibZstd(zstd, file)
    if find_spec("zstandard"):
        import zstandard

        return ZstandardZstd(zstandard, file)
    import pyarrow

    return PyarrowZstd(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd"))


class StdlibZstd:
    def __init__(self, zstd: Any, file: BinaryIO) -> None:
        limits = {zstd.DecompressionParameter.window_log_max: WINDOW}
        self.file, self.error = zstd.ZstdFile(file, options=limits), zstd.ZstdError

    def read(self, size: int, /) -> bytes:
        try:
            return self.file.read(size)
        except self.error as error:
            raise ValueError(str(error)) from None


class PyarrowZstd:
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def read(self, size: int, /) -> bytes:
        try:
            return self.stream.read(size)
        except OSError as error:
            if "Truncated" in str(error):
                raise EOFError from None
            raise ValueError(str(error)) from None


class ZstandardZstd:
    """Its own streams end without a word where a file is cut short."""

    def __init__(self, zstandard: Any, file: BinaryIO) -> None:
        self.new = zstandard.ZstdDecompressor(max_window_size=1 << WINDOW).decompressobj
        self.error, self.file, self.rest = zstandard.ZstdError, file, b""
        self.frame: Any = None

    def read(self, size: int, /) -> bytes:
        made = b""
        while not made:
            if not (piece := self.rest or self.file.read(PIECE)):
                if self.frame:
                    raise EOFError
                break
            self.frame, self.rest = self.frame or self.new(), b""
            try:
                made = self.frame.decompress(piece)
            except self.error as error:
                raise ValueError(str(error)) from None
            if self.frame.eof:
                self.frame, self.rest = None, self.frame.unused_data
        return made
