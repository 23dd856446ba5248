"""Files to tokens: read as a stream, tokenized by all cores, kept in the cache under content, tokenizer and options."""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from llamatrain.data.cache import Bounds, Store, StoreWriter, stored
from llamatrain.data.chat import agreeing, encode_chat
from llamatrain.data.forms import Chat, Document, Prompt, parse_line
from llamatrain.data.options import DataOptions
from llamatrain.data.samples import chunks_of, samples_after
from llamatrain.data.sources import DataFile, naming
from llamatrain.data.suitable import MARK
from llamatrain.data.templates import CHATML, CHATML_WITH_EOS, ChatTemplate, TemplateError
from llamatrain.errors import DataError
from llamatrain.machine.terminal import bar

VERSION = 3  # of what this file makes of a text: with a new one, old entries of the cache are not found any more
LINES = 256  # lines, or samples, that one task tokenizes
NOTHING = (np.zeros(0, np.int32), np.zeros(0, np.uint8))  # a document that is counted, and skipped
PIECE = 64  # bytes that one token stands for at most, in the bound of an overlapping sample
A = TypeVar("A")
B = TypeVar("B")


class TokenizerLike(Protocol):
    """What is asked of a tokenizer here."""

    bos: int | None
    eos: int | None
    eot: int | None
    add_bos: bool
    add_eos: bool
    chat_template: str | None

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str | bytes, *, special: bool = False) -> np.ndarray: ...

    def encode_large(self, chunks: Iterable[bytes]) -> Iterator[tuple[int, np.ndarray]]: ...

    def decode(self, ids: np.ndarray) -> bytes: ...


class MarkedTokens(NamedTuple):
    tokens: np.ndarray
    marks: np.ndarray  # 1 where trained
    single: bool  # one row at most


class Encoder:
    """A tokenizer with the options that decide what becomes of a document."""

    def __init__(self, tokenizer: TokenizerLike, options: DataOptions, ctx: int) -> None:
        self.tokenizer, self.options, self.ctx = tokenizer, options, ctx
        self.lead = tokenizer.bos if tokenizer.add_bos else None  # what each row begins with

    @cached_property
    def template(self) -> ChatTemplate:
        bos, eos = (token_text(self.tokenizer, token) for token in (self.tokenizer.bos, self.tokenizer.eos))
        return ChatTemplate(self.tokenizer.chat_template or self._fallback(), bos, eos)

    def store(self, sources: list[DataFile]) -> Store:
        """The tokens of some files of one kind."""
        key, bounds = self._key(sources), self._bounds(sources)
        if sources[0].kind == "lines":
            with closing(self.template):
                return stored(key, lambda writer: self._fill_lines(sources, writer), bounds)
        fill = self._fill_samples if self.options.pattern else self._fill_text
        return stored(key, lambda writer: fill(sources, writer), bounds)

    def _bounds(self, sources: list[DataFile]) -> Bounds:
        """A document is a file, or some bytes of one."""
        files, size = len(sources), sum(source.path.stat().st_size for source in sources)
        return Bounds(ids=len(self.tokenizer), files=files, documents=files + size)

    def _key(self, sources: list[DataFile]) -> str:
        options, tokenizer = self.options, self.tokenizer
        facts: list[object] = [VERSION, sources[0].kind, tokenizer.fingerprint, self.lead, tokenizer.eos, tokenizer.add_eos]
        if sources[0].kind == "lines":
            facts += [self.template.source, self.template.constants, options.train_on, options.as_chat]
        elif options.pattern:
            facts += [options.pattern, options.include_sample_start, options.fill_with_next_samples]
            facts += [(self.ctx, options.sample_random_offsets) if options.overlapping_samples else None]
        for source in sources:
            with source.path.open("rb") as file:
                facts.append(hashlib.file_digest(file, "sha256").hexdigest())
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    # ---- text --------------------------------------------------------------

    def _fill_text(self, sources: list[DataFile], writer: StoreWriter) -> None:
        """Each file is one document."""
        with progress(sources) as told:
            for number, source in enumerate(sources):
                for size, tokens in self.tokenizer.encode_large(chunks_of(source)):
                    writer.write(tokens)
                    told.update(size)
                writer.write(self._end(self.tokenizer.add_eos))
                writer.end(number, 1)

    def _fill_samples(self, sources: list[DataFile], writer: StoreWriter) -> None:
        options = self.options
        longest = self.ctx * PIECE if options.overlapping_samples else None
        kept = self.ctx + 1 if options.overlapping_samples and not options.sample_random_offsets else None
        end = self._end(not options.fill_with_next_samples)
        found = (
            (len(text), (number, count, text))
            for number, source in enumerate(sources)
            for count, text in enumerate(samples_after(source, options.pattern, options.include_sample_start, longest), 1)
        )
        for group in in_order(self._texts, grouped(found), sources):
            for number, count, tokens in group:
                writer.write(np.concatenate([tokens, end])[:kept])
                writer.end(number, count, first=0 if len(tokens) else -1, single=True)

    def _texts(self, group: list[tuple[int, int, bytes]]) -> list[tuple[int, int, np.ndarray]]:
        return [(number, count, self.tokenizer.encode(text)) for number, count, text in group]

    def _end(self, wanted: bool) -> np.ndarray:
        return np.array([self.tokenizer.eos] if wanted and self.tokenizer.eos is not None else [], np.int32)

    # ---- lines -------------------------------------------------------------

    def _fill_lines(self, sources: list[DataFile], writer: StoreWriter) -> None:
        numbered = (
            (len(line), (number, sources[number].name, count, text))
            for number, source in enumerate(sources)
            for count, line, text in lines_of(source)
        )
        for group in in_order(self._lines, grouped(numbered), sources):
            for number, count, sample in group:
                candidates = np.flatnonzero(sample.marks[0 if self.lead is not None else 1 :])
                first = int(candidates[0]) + (self.lead is None) if len(candidates) else -1
                writer.write(sample.tokens, sample.marks)
                writer.end(number, count, first, sample.single)

    def _lines(self, group: list[tuple[int, str, int, bytes]]) -> list[tuple[int, int, MarkedTokens]]:
        made = []
        for number, name, count, text in group:
            place = f"{name}, line {count}"
            try:
                made += [(number, count, sample) for sample in self._document(parse_line(text, place))]
            except TemplateError as error:
                raise DataError(f"{place}: {error}") from None
        return made

    def _document(self, document: Document) -> list[MarkedTokens]:
        if isinstance(document, Prompt) and self.options.as_chat:
            document = document.as_chat()
        if isinstance(document, Chat):
            return self._chat(document)
        if isinstance(document, Prompt):
            return [self._prompt(document)]
        tokens = np.concatenate([self.tokenizer.encode(document.text), self._end(bool(document.text))])
        return [MarkedTokens(tokens, np.ones(len(tokens), np.uint8), single=False)]

    def _prompt(self, document: Prompt) -> MarkedTokens:
        prompt = document.prompt + document.joint
        tokens, before = self._encode(prompt + document.answer), self._encode(prompt)
        marks = np.ones(len(tokens) + len(self._end(True)), np.uint8)
        if self.options.train_on == "completion":
            marks[: agreeing(before, tokens)] = 0
        return MarkedTokens(np.concatenate([tokens, self._end(True)]), marks, single=True)

    def _chat(self, document: Chat) -> list[MarkedTokens]:
        if self.options.train_on == "all":
            tokens = self._encode(self.template.render((document.messages, False))[0])
            pairs = [(tokens, np.ones(len(tokens), np.uint8))]
        else:
            pairs = encode_chat(document.messages, self.template, self._encode, self._ended) or [NOTHING]
        return [MarkedTokens(tokens, marks, single=True) for tokens, marks in pairs]

    def _ended(self, turn: np.ndarray) -> int:
        """The length of a turn, less the space that a template puts after the end token, which no model is asked for."""
        ends = np.flatnonzero(np.isin(turn, [token for token in (self.tokenizer.eos, self.tokenizer.eot) if token is not None]))
        after = turn[ends[-1] + 1 :] if len(ends) else turn
        blank = not self.tokenizer.decode(after).replace("\u2581".encode(), b" ").strip()  # a space spelt in bytes is one, too
        return len(turn) - len(after) if len(ends) and blank else len(turn)

    def _fallback(self) -> str:
        """A template for a model without one."""
        mark_is_token = len(self._encode("<|im_end|>")) == 1
        return CHATML if mark_is_token or self.tokenizer.eos is None else CHATML_WITH_EOS

    def _encode(self, text: str) -> np.ndarray:
        """With control tokens read, as a prompt is; less the begin token, which is put before each row anyway."""
        tokens = self.tokenizer.encode(text, special=True)
        return tokens[1:] if self.lead is not None and len(tokens) and tokens[0] == self.lead else tokens


def token_text(tokenizer: TokenizerLike, token: int | None) -> str:
    return "" if token is None else tokenizer.decode(np.array([token], np.int32)).decode("utf-8", "replace")


def lines_of(source: DataFile) -> Iterator[tuple[int, bytes, bytes]]:
    """The lines that are not blank: number, as they stand, and stripped."""
    with source.path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if text := line.removeprefix(MARK if number == 1 else b"").strip():
                yield number, line, text


def grouped(items: Iterable[tuple[int, A]]) -> Iterator[tuple[int, list[A]]]:
    """Lists of items that make a task each, with their sizes: neither too many nor too large."""
    group, size = list[A](), 0
    for bytes_, item in items:
        group.append(item)
        size += bytes_
        if len(group) == LINES or size > 1 << 20:
            yield size, group
            group, size = [], 0
    if group:
        yield size, group


def in_order(work: Callable[[A], B], items: Iterable[tuple[int, A]], sources: list[DataFile]) -> Iterator[B]:
    """Results in the order of the items, made by all cores; no more than a few are held."""
    from llamatrain.machine.units import cores

    waiting = deque[tuple[int, Future[B]]]()
    with progress(sources) as told, ThreadPoolExecutor(threads := cores()) as pool:

        def first() -> B:
            size, future = waiting.popleft()
            result = future.result()
            told.update(size)
            return result

        try:
            for size, item in items:
                waiting.append((size, pool.submit(work, item)))
                if len(waiting) > 2 * threads:
                    yield first()
            while waiting:
                yield first()
        finally:
            for _, future in waiting:
                future.cancel()


def progress(sources: list[DataFile]) -> Any:
    """A bar that counts bytes."""
    total = sum(source.path.stat().st_size for source in sources)
    return bar(f"tokenizing {naming(sources)}", total=total, unit="B", unit_scale=True)
