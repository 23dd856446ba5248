"""Streams the bytes of a file as UTF-8, whatever its compression and Unicode encoding."""

import codecs
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from llamatrain.errors import DataError
from llamatrain.platform.temp_files import create_temp_file, remove_path

Compression = Literal["gz", "zst"]
SUFFIXES: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
MAGIC: dict[bytes, Compression] = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst"}
# A file that decompresses to more than MAX_RATIO times its size and to more than FREE_BYTES is no real data.
MAX_RATIO = 250
FREE_BYTES = 64 << 20
ZSTD_WINDOW_BITS = 27  # how far zstd may look back: 128 MB
ZSTD_PIECE = 256  # compressed bytes per call to a decoder that cannot limit its output: 8 MB at most
COPY_CHUNK = 1 << 20  # bytes
UTF8_MARK = b"\xef\xbb\xbf"  # a byte order mark before UTF-8 is not part of the text
UTF16_MARKS = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
UTF32_MARKS = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
ZSTD_HINT = "run `pip install zstandard`, use Python 3.14, or decompress the file first"


def max_unpacked_size(size: int) -> int:
    """Return the number of bytes that a compressed file of this size may hold."""
    return max(FREE_BYTES, MAX_RATIO * size)


@contextmanager
def open_text_stream(path: Path, name: str, compression: Compression | None = None) -> Iterator[BinaryIO]:
    """Open a file as a stream of UTF-8 without a byte order mark."""
    with path.open("rb") as file:
        stream: Any = file
        if compression:
            decoder = open_gzip(file) if compression == "gz" else open_zstd(file)
            stream = buffer(DecompressedStream(decoder, name, max_unpacked_size(path.stat().st_size)))
        yield decode_unicode(stream, name)


@contextmanager
def open_seekable(
    path: Path, name: str, compression: Compression | None, is_text: bool = False
) -> Iterator[Path]:
    """Provide a seekable file: the file itself, or a decompressed UTF-8 copy of it."""
    with path.open("rb") as file:
        is_utf16 = is_text and file.read(2) in UTF16_MARKS
    if not compression and not is_utf16:
        yield path
        return
    copy = create_temp_file()
    try:
        with copy.open("wb") as file, open_text_stream(path, name, compression) as stream:
            while chunk := stream.read(COPY_CHUNK):
                file.write(chunk)
        yield copy
    finally:
        remove_path(copy)


def buffer(raw: io.RawIOBase) -> BinaryIO:
    """Buffer a raw stream."""
    return io.BufferedReader(raw, 1 << 16)


def decode_unicode(stream: Any, name: str) -> BinaryIO:
    """Skip a byte order mark, and decode UTF-16."""
    head = stream.peek(4)[:4]
    if head.startswith(UTF8_MARK):
        stream.read(len(UTF8_MARK))
    elif head in UTF32_MARKS:
        raise DataError(f"{name}: the text is UTF-32; save it as UTF-8", code="not-utf8")
    elif encoding := UTF16_MARKS.get(head[:2]):
        return buffer(Utf16Stream(stream, name, encoding))
    return stream


class Readable(Protocol):
    """An object with `read`, like a binary file."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; none at the end."""
        ...


class GeneratedStream(io.RawIOBase):
    """A stream of the pieces that a function returns, up to an empty one."""

    def __init__(self, next_piece: Callable[[], bytes]) -> None:
        self.next_piece = next_piece
        self.rest = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, target: Any) -> int:
        """Copy the next bytes into a buffer; return their number."""
        self.rest = self.rest or self.next_piece()
        size = min(len(target), len(self.rest))
        target[:size] = self.rest[:size]
        self.rest = self.rest[size:]
        return size


class DecompressedStream(GeneratedStream):
    """The content of a compressed file, limited to a plausible size."""

    def __init__(self, decoder: Readable, name: str, max_bytes: int) -> None:
        super().__init__(self._next)
        self.decoder = decoder
        self.name = name
        self.max_bytes = max_bytes
        self.bytes_left = max_bytes

    def _next(self) -> bytes:
        try:
            piece = self.decoder.read(1 << 16)
        except EOFError:
            raise DataError(
                f"{self.name}: the compressed data is truncated; download or compress it again",
                code="truncated-file",
            ) from None
        except (OSError, ValueError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            reason = " ".join(str(error).split())[:120]
            raise DataError(
                f"{self.name}: the compressed data is damaged ({reason}); download or compress it again",
                code="damaged-file",
            ) from None
        self.bytes_left -= len(piece)
        if self.bytes_left < 0:
            raise DataError(
                f"{self.name}: decompresses to more than {self.max_bytes:,} bytes, over {MAX_RATIO} "
                "times its size, "
                "as real data never does; if that is intended, decompress it first",
                code="decompression-bomb",
            )
        return piece


class Utf16Stream(GeneratedStream):
    """A UTF-16 stream converted to UTF-8."""

    def __init__(self, stream: Readable, name: str, encoding: str) -> None:
        super().__init__(self._next)
        self.stream = stream
        self.name = name
        self.offset = 2  # the byte order mark
        self.stream.read(2)
        self.decoder = codecs.getincrementaldecoder(encoding)("strict")

    def _next(self) -> bytes:
        piece = b""
        while not piece:
            raw = self.stream.read(1 << 16)
            try:
                piece = self.decoder.decode(raw, final=not raw).encode()
            except UnicodeDecodeError as error:
                problem = f"near byte {self.offset}: {error.reason}" if raw else "it ends within a character"
                raise DataError(
                    f"{self.name}: begins as UTF-16 but is invalid ({problem}); save it as UTF-8",
                    code="not-utf8",
                ) from None
            self.offset += len(raw)
            if not raw:
                break
        return piece


# ---- decoders --------------------------------------------------------------


def open_gzip(file: BinaryIO) -> Readable:
    """Open a gzip stream."""
    import gzip

    return gzip.GzipFile(fileobj=file)


def can_read_zstd() -> bool:
    """Return True if a zstd decoder is installed."""
    return has_stdlib_zstd() or bool(find_spec("zstandard") or find_spec("pyarrow"))


def has_stdlib_zstd() -> bool:
    """Return True if Python itself can read zstd (3.14 and newer)."""
    return bool(find_spec("compression") and find_spec("compression.zstd"))


def open_zstd(file: BinaryIO) -> Readable:
    """Open a zstd stream with Python's own decoder, or the first one that is installed."""
    if has_stdlib_zstd():
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]

        return StdlibZstd(zstd, file)
    if find_spec("zstandard"):
        import zstandard

        return ZstandardZstd(zstandard, file)
    import pyarrow

    return PyarrowZstd(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd"))


class StdlibZstd:
    """Reads zstd with Python's own module."""

    def __init__(self, zstd: Any, file: BinaryIO) -> None:
        limits = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_BITS}
        self.file = zstd.ZstdFile(file, options=limits)
        self.error = zstd.ZstdError

    def read(self, size: int, /) -> bytes:
        """Return the next decompressed bytes."""
        try:
            return self.file.read(size)
        except self.error as error:
            raise ValueError(str(error)) from None


class PyarrowZstd:
    """Reads zstd with pyarrow."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def read(self, size: int, /) -> bytes:
        """Return the next decompressed bytes."""
        try:
            return self.stream.read(size)
        except OSError as error:
            if "Truncated" in str(error):
                raise EOFError from None
            raise ValueError(str(error)) from None


class ZstandardZstd:
    """Reads zstd with the package zstandard, frame by frame.

    The package's own streams end silently where a file is truncated.
    """

    def __init__(self, zstandard: Any, file: BinaryIO) -> None:
        self.new_frame = zstandard.ZstdDecompressor(max_window_size=1 << ZSTD_WINDOW_BITS).decompressobj
        self.error = zstandard.ZstdError
        self.file = file
        self.rest = b""
        self.frame: Any = None

    def read(self, size: int, /) -> bytes:
        """Return the next decompressed bytes."""
        output = b""
        while not output:
            piece = self.rest or self.file.read(ZSTD_PIECE)
            if not piece:
                if self.frame:
                    raise EOFError
                break
            self.frame = self.frame or self.new_frame()
            self.rest = b""
            try:
                output = self.frame.decompress(piece)
            except self.error as error:
                raise ValueError(str(error)) from None
            if self.frame.eof:
                self.rest = self.frame.unused_data
                self.frame = None
        return output
