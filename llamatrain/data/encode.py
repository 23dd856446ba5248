"""Files to tokens: read as a stream, tokenized by all cores, kept in the cache under content, tokenizer and options."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple, Protocol

import numpy as np

from llamatrain.data.cache import Bounds, Store, StoreWriter, stored
from llamatrain.data.chat import encode_chat, prefixes_of
from llamatrain.data.forms import Chat, Document, Message, Prompt, TooMuch, parse_line
from llamatrain.data.growing import LARGE, SMALL, Growing
from llamatrain.data.options import DataOptions
from llamatrain.data.ordered import grouped, in_order, progress
from llamatrain.data.samples import chunks_of, lines_of, samples_after
from llamatrain.data.sources import DataFile, naming
from llamatrain.data.templates import AHEAD, CHATML, CHATML_WITH_EOS, ChatTemplate, Conversation, Prefix, TemplateError
from llamatrain.errors import DataError
from llamatrain.machine.memory import give_back
from llamatrain.machine.terminal import say

VERSION = 3  # of what this file makes of a text: with a new one, old entries of the cache are not found any more
MANY = 2 << 20  # tokens that a task may make, besides two for each byte, before it leaves the rest to the one who takes them
TOLD = 3  # rows that were too much, of which it is told why
NOTHING = (np.zeros(0, np.int32), np.zeros(0, np.uint8))  # a document that is counted, and skipped
TOO_MUCH = -2  # in place of the first trained token of a row that is skipped for its size
SPACE = "\u2581".encode()
BLOCK = 1 << 12  # tokens that are looked at at once for an end, or for whether they are space
PIECE = 64  # bytes that one token stands for at most, in the bound of an overlapping sample


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

    def encode(self, text: str | bytes, *, special: bool = False, start: bool = True) -> np.ndarray: ...

    def cut(self, raw: bytes, *, special: bool = False) -> int: ...

    def encode_large(self, chunks: Iterable[bytes]) -> Iterator[tuple[int, np.ndarray]]: ...

    def decode(self, ids: np.ndarray) -> bytes: ...


class MarkedTokens(NamedTuple):
    tokens: np.ndarray
    marks: np.ndarray  # 1 where trained
    single: bool  # one row at most


class JsonLine(NamedTuple):
    file: int  # its number
    name: str
    number: int
    text: bytes

    @property
    def place(self) -> str:
        return f"{self.name}, line {self.number}"


Made = tuple[JsonLine, MarkedTokens | TooMuch]  # what becomes of a line: a sample, or nothing, and why


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
            (len(text) + 1, JsonLine(number, sources[number].name, count, text))
            for number, source in enumerate(sources)
            for count, text in lines_of(source)
        )
        skipped = list[str]()
        for made, left in in_order(self._lines, grouped(numbered), sources):
            skipped += self._write(chain(made, (pair for row in left for pair in self._row(row))), writer)
            made.clear()  # before the next is waited for
        for told in skipped[:TOLD]:
            say(told)
        if len(skipped) > TOLD:
            say(f"{naming(sources)}: {len(skipped) - TOLD} more lines were too much and skipped")

    def _write(self, made: Iterable[Made], writer: StoreWriter) -> list[str]:
        """Why rows are skipped."""
        skipped = list[str]()
        for line, sample in made:
            if isinstance(sample, TooMuch):
                skipped.append(f"{line.place}: {sample}; skipped")
                writer.end(line.file, line.number, TOO_MUCH, single=True)
                continue
            targets = sample.marks[self.lead is None :]
            first = int(targets.argmax()) if len(targets) else 0  # of several the first
            first = first + (self.lead is None) if targets[first : first + 1].any() else -1
            writer.write(sample.tokens, sample.marks)
            writer.end(line.file, line.number, first, sample.single)
        return skipped

    def _lines(self, group: list[JsonLine]) -> tuple[list[Made], list[JsonLine]]:
        """What becomes of some lines, and those that are left because there are too many tokens to be held already."""
        made, room = list[Made](), MANY + 2 * sum(len(line.text) for line in group)
        documents = dict[int, Document]()
        for at, line in enumerate(group):
            if room < 0:
                return made, group[at:]
            documents = documents if line.number in documents else self._ahead(group[at:])
            new = self._row(line, documents.pop(line.number, None))
            room -= sum(len(sample.tokens) for _, sample in new if isinstance(sample, MarkedTokens))
            made += new
        return made, []

    def _ahead(self, lines: list[JsonLine]) -> dict[int, Document]:
        """What the next lines hold, by their numbers, as far as they are short and right; their chats are being rendered."""
        documents = dict[int, Document]()

        def chats() -> Iterator[Conversation]:
            sizes = accumulate(len(line.text) for line in lines)
            with suppress(DataError):  # which is told in its turn
                for line in (line for line, size in zip(lines, sizes, strict=True) if size <= AHEAD):
                    documents[line.number] = document = self._taken(parse_line(line.text, line.place))
                    if isinstance(document, Chat):
                        yield document.messages, self._prefixes(document.messages)

        self.template.ahead(chats())
        return documents

    def _row(self, line: JsonLine, document: Document | None = None) -> list[Made]:
        try:
            document = document or self._taken(parse_line(line.text, line.place))
            if len(line.text) > LARGE:
                give_back()  # it took several times its size
            return [(line, sample) for sample in self._document(document, len(line.text))]
        except TooMuch as error:
            return [(line, error)]
        except TemplateError as error:
            raise DataError(f"{line.place}: {error}") from None

    def _taken(self, document: Document) -> Document:
        return document.as_chat() if isinstance(document, Prompt) and self.options.as_chat else document

    def _prefixes(self, messages: list[Message]) -> list[Prefix]:
        return [(len(messages), False)] if self.options.train_on == "all" else prefixes_of(messages)

    def _document(self, document: Document, size: int = 0) -> list[MarkedTokens]:
        if isinstance(document, Chat):
            return self._chat(document, size)
        if isinstance(document, Prompt):
            return [self._prompt(document, size)]
        text = Growing(self._plain, self.tokenizer.cut, size, LARGE)
        text.change(0, document.text.encode())
        text.append(self._end(bool(document.text)))
        return [MarkedTokens(text.tokens, np.ones(len(text.tokens), np.uint8), single=False)]

    def _prompt(self, document: Prompt, size: int) -> MarkedTokens:
        text, prompt = self._growing(size, LARGE), (document.prompt + document.joint).encode()
        text.change(0, prompt)
        begin = text.change(len(prompt), document.answer.encode()).agreeing(text.tokens)
        text.append(self._end(True))
        marks = np.ones(len(text.tokens), np.uint8)
        if self.options.train_on == "completion":
            marks[:begin] = 0
        return MarkedTokens(text.tokens, marks, single=True)

    def _chat(self, document: Chat, size: int) -> list[MarkedTokens]:
        if self.options.train_on == "all":
            text = self._growing(size)
            text.change(0, self.template.render(document.messages))
            pairs = [(text.tokens, np.ones(len(text.tokens), np.uint8))]
        else:
            made = encode_chat(document.messages, self.template, self._growing(size), self._ended, size)
            pairs = list(made) or [NOTHING]
        return [MarkedTokens(tokens, marks, single=True) for tokens, marks in pairs]

    def _growing(self, size: int, small: int = SMALL) -> Growing:
        return Growing(self._encode, lambda raw: self.tokenizer.cut(raw, special=True), size, small)

    def _ended(self, turn: np.ndarray) -> int:
        """The length of a turn, less the space that a template puts after the end token, which no model is asked for."""
        known = [token for token in (self.tokenizer.eos, self.tokenizer.eot) if token is not None]
        for at in range(len(turn), 0, -BLOCK):
            begin = max(0, at - BLOCK)
            if len(ends := np.flatnonzero(np.isin(turn[begin:at], known))):
                end = begin + int(ends[-1]) + 1
                return end if self._blank(turn[end:]) else len(turn)
        return len(turn)

    def _blank(self, tokens: np.ndarray) -> bool:
        """Whether there is nothing but space."""
        text = b""
        for at in range(0, len(tokens), BLOCK):
            text += self.tokenizer.decode(tokens[at : at + BLOCK])
            text = text.replace(SPACE, b" ").lstrip()  # a space spelt in bytes is one, too, be it cut here
            if text and not SPACE.startswith(text):
                return False
        return not text

    def _fallback(self) -> str:
        """A template for a model without one."""
        mark_is_token = len(self._encode("<|im_end|>")) == 1
        return CHATML if mark_is_token or self.tokenizer.eos is None else CHATML_WITH_EOS

    def _plain(self, text: bytes, start: bool) -> np.ndarray:
        return self.tokenizer.encode(text, start=start)

    def _encode(self, text: str | bytes, start: bool = True) -> np.ndarray:
        """With control tokens read, as a prompt is; less the begin token, which is put before each row anyway."""
        tokens = self.tokenizer.encode(text, special=True, start=start)
        return tokens[1:] if start and self.lead is not None and len(tokens) and tokens[0] == self.lead else tokens


def token_text(tokenizer: TokenizerLike, token: int | None) -> str:
    return "" if token is None else tokenizer.decode(np.array([token], np.int32)).decode("utf-8", "replace")
