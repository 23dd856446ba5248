"""Converts text to tokens and back, with the vocabulary of a GGUF file."""

import codecs
import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from llamatrain.data.tokenizer import vocabulary as vocabularies
from llamatrain.data.tokenizer.special import SpecialTokens
from llamatrain.data.tokenizer.vocabulary import SPACE, UNDEFINED, Vocabulary, parse_byte
from llamatrain.distributed.cores import count_cores
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf.constants import TokenType
from llamatrain.platform.memory import HUGE_PAGE, trim_heap
from llamatrain.platform.terminal import log_line

VERSION = 1  # of the tokenization; part of the fingerprint
MAX_HELD_BYTES = 1 << 17  # bytes held without a place to cut; each takes seventeen times its size in memory
BLOCK_BYTES = 1 << 15  # bytes; a thread takes ninety times as much memory for two blocks


class Tokenizer:
    """Tokenizes text exactly as llama.cpp does.

    Text may be bytes, which need not be UTF-8. `special` parses the texts of control tokens; user-defined
    ones are always parsed. No token is added before or after; `add_bos` and `add_eos` tell what a model
    expects.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llamatrain.data.tokenizer.bpe import create_engine  # imported late: it loads compiled code

        self.vocabulary = vocabulary
        self.bos = vocabulary.bos
        self.eos = vocabulary.eos
        self.eot = vocabulary.eot
        self.add_bos = vocabulary.add_bos
        self.add_eos = vocabulary.add_eos
        self.ends = vocabulary.ends
        self.chat_template = vocabulary.chat_template
        self.tool_template = vocabulary.tool_template
        self.rerank_template = vocabulary.rerank_template
        self._engine = create_engine(vocabulary)
        self._has_warned = False
        self._specials = {control: SpecialTokens(vocabulary, control=control) for control in (False, True)}

    def __len__(self) -> int:
        return len(self.vocabulary.tokens)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that affects tokens: two tokenizers with the same one agree."""
        vocab = self.vocabulary
        strips = vocab.strips_spaces and "each"  # a marker: older versions stripped differently
        facts = (
            VERSION,
            vocab.model,
            vocab.pre,
            vocab.add_space_prefix,
            strips,
            len(vocab.tokens),
            len(vocab.merges),
        )
        digest = hashlib.sha256(repr(facts).encode())
        for texts in (vocab.tokens, vocab.merges):
            digest.update("\0".join(texts).encode("utf-8", "surrogateescape"))
        digest.update(vocab.kinds.tobytes() + vocab.scores.tobytes())
        return digest.hexdigest()

    # ---- to tokens ---------------------------------------------------------

    def encode(self, text: str | bytes, *, special: bool = False, start: bool = True) -> np.ndarray:
        """Return the tokens of a text; without `start`, it follows a cut."""
        return concatenate([*self.encode_pieces(text, special=special, start=start)])

    def encode_pieces(
        self, text: str | bytes, *, special: bool = False, start: bool = True
    ) -> Iterator[np.ndarray]:
        """Yield the tokens of a text, some at a time."""
        for first, raw in self._split_pieces([to_bytes(text)], special):
            yield self._encode_piece(raw, special, start and first)

    def encode_large(
        self, chunks: Iterable[str | bytes], *, special: bool = False, threads: int | None = None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Encode one text that comes in chunks, cut anywhere, with several threads.

        Yield, in order, the number of bytes and their tokens, which are those of the whole text. It is cut
        where that makes no difference: in `gpt2` vocabularies at the end of a word that more text cannot
        change; in others between two characters that are never adjacent in any token; in all, so far from
        the end that no special token can cross the cut. Text without such a place is held until
        one comes, or until MAX_HELD_BYTES: then it is cut anyway, with a note.
        """
        from concurrent.futures import Future, ThreadPoolExecutor

        threads = threads or count_cores()
        pending = deque[tuple[int, Future[np.ndarray]]]()
        with ThreadPoolExecutor(threads) as pool:
            for start, raw in self._split_pieces(map(to_bytes, chunks), special):
                pending.append((len(raw), pool.submit(self._encode_piece, raw, special, start)))
                if len(pending) > 2 * threads:
                    size, future = pending.popleft()
                    yield size, future.result()
            for size, future in pending:
                yield size, future.result()

    def _split_pieces(self, chunks: Iterable[bytes], special: bool) -> Iterator[tuple[bool, bytes]]:
        """Yield pieces that can be encoded separately, and whether each begins the text."""
        parts = list[bytes]()
        size = 0
        start = True
        enough = 2 * BLOCK_BYTES
        for chunk in chunks:
            for at in range(0, len(chunk), BLOCK_BYTES):
                parts.append(chunk[at : at + BLOCK_BYTES])
                size += len(parts[-1])
                if size < enough:
                    continue
                rest = b"".join(parts)
                parts = []
                cut = self.find_cut(rest[:MAX_HELD_BYTES], special=special)
                if not cut and len(rest) >= MAX_HELD_BYTES:
                    cut = self._cut_anywhere(rest, special)
                if cut:
                    yield start, rest[:cut]
                    rest = rest[cut:]
                    start = False
                    enough = 2 * BLOCK_BYTES
                else:
                    enough = min(2 * len(rest), MAX_HELD_BYTES)
                parts = [rest]
                size = len(rest)
        if size > HUGE_PAGE:
            trim_heap()  # free the text that was searched
        if size:
            yield start, b"".join(parts)

    def _cut_anywhere(self, raw: bytes, special: bool) -> int:
        """Return an offset between two characters that no special token crosses, independent of the chunks.

        Note once that tokens may differ there.
        """
        if not self._has_warned:
            self._has_warned = True
            log_line(
                f"note: {len(raw):,} bytes of text have no boundary between words; they are cut "
                "anyway, unlike in llama.cpp"
            )
        at = MAX_HELD_BYTES - self._specials[special].longest - 1
        while at > 1 and raw[at] & 0xC0 == 0x80:
            at -= 1
        return at

    def find_cut(self, raw: bytes, *, special: bool = False) -> int:
        """Return an offset, near the end, where text can be cut whatever follows; 0 if there is none."""
        specials = self._specials[special]
        at = specials.find_last(raw)
        if at > len(raw) // 2:
            return at
        last = specials.partition(raw)[-1]
        if isinstance(last, int):
            return at
        # A special token that only more text completes begins after the searched text.
        seam = self._engine.find_seam(last[: max(0, len(last) - specials.longest)])
        return len(raw) - len(last) + seam if seam else at

    def _encode_piece(self, raw: bytes, special: bool, start: bool) -> np.ndarray:
        parts = []
        for part in self._specials[special].partition(raw):
            if isinstance(part, int):
                parts.append(np.array([part], np.int32))
            else:
                parts.append(self._engine.encode(part, start))
            start = isinstance(part, int)
        return concatenate(parts)

    # ---- to text -----------------------------------------------------------

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        """The bytes of each token."""
        return [
            self._spell(text, kind)
            for text, kind in zip(self.vocabulary.tokens, self.vocabulary.kinds.tolist(), strict=True)
        ]

    @property
    def byte_lengths(self) -> np.ndarray:
        """The number of bytes of each token; 0 for control tokens."""
        sizes = np.array([len(text) for text in self._token_bytes])
        return np.where(np.isin(self.vocabulary.kinds, (TokenType.CONTROL, TokenType.UNKNOWN)), 0, sizes)

    def _spell(self, token: str, kind: int) -> bytes:
        from llamatrain.data.tokenizer.bpe_tables import token_bytes

        if kind == TokenType.BYTE and (byte := parse_byte(token)) is not None:
            return bytes([byte])
        if kind in (TokenType.UNUSED, UNDEFINED, TokenType.BYTE):
            return b""
        if kind == TokenType.NORMAL:
            if self.vocabulary.escapes_spaces:
                token = token.replace(SPACE, " ")
            elif (raw := token_bytes(token)) is not None:
                return raw
        return token.encode("utf-8", "surrogateescape")

    def decode(self, ids: Iterable[int] | np.ndarray, *, special: bool = True) -> bytes:
        """Return the text of tokens; `special` includes control tokens."""
        numbers = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise UsageError(
                f"token {numbers[(numbers < 0) | (numbers >= len(self))][0]} is not in the vocabulary "
                f"of {len(self)} tokens",
                code="no-such-token",
            )
        if not special:
            numbers = numbers[
                ~np.isin(self.vocabulary.kinds[numbers], (TokenType.CONTROL, TokenType.UNKNOWN))
            ]
        return b"".join(map(self._token_bytes.__getitem__, numbers.tolist()))


class StreamDecoder:
    """Decodes tokens one by one; a character is returned once all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False, shown: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.special = special
        self.shown = shown  # `special`: decode all control tokens; `shown`: only these
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the text that a token completes."""
        return self._utf8.decode(self.tokenizer.decode([token], special=self.special or token in self.shown))

    def flush(self) -> str:
        """Return the rest: a character that was never completed."""
        return self._utf8.decode(b"", final=True)


def concatenate(parts: list[np.ndarray]) -> np.ndarray:
    """Join arrays; a single one is not copied, because it may be large."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int32), *parts])


def to_bytes(text: str | bytes) -> bytes:
    """Encode text as UTF-8.

    Lone surrogates are bytes (`surrogateescape`), or else are written as they are.
    """
    if isinstance(text, bytes):
        return text
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def load(metadata: Mapping[str, Any], source: object = "the vocabulary") -> Tokenizer:
    """Load the tokenizer from a file's metadata.

    `source` is the prefix of error messages, such as the path.
    """
    if vocabularies.has_no_text(metadata):
        raise UsageError(
            f"{source}: the vocabulary has no text (tokenizer.ggml.model is none); this model cannot "
            "read text",
            code="vocabulary-without-text",
        )
    try:
        return Tokenizer(vocabularies.read_vocabulary(metadata))
    except FileError as error:
        raise FileError(f"{source}: {error}", code=error.code) from None
