"""Turns files into tokens: reads them as a stream, tokenizes on all cores, and caches the result."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from llamatrain.data.chat.builtin import CHATML, CHATML_WITH_EOS
from llamatrain.data.chat.encode import (
    NEITHER,
    NOTHING,
    MarkedTokens,
    encode_chat,
    encode_prompt,
    last_answer,
)
from llamatrain.data.chat.messages import UNTRAINED
from llamatrain.data.chat.prompt import LARGE, IncrementalTokenizer, PromptReader, TokenizerLike
from llamatrain.data.chat.template import AHEAD, WANTED, Asked, ChatTemplate, TemplateError, TemplateStopped
from llamatrain.data.files import DataFile
from llamatrain.data.find_files import describe_files
from llamatrain.data.json_values import RecordTooLarge
from llamatrain.data.options import DataOptions
from llamatrain.data.parallel_map import grouped, in_order, progress
from llamatrain.data.preference_records import Compare, PreferencePair, check_lines, judged_in
from llamatrain.data.readers.text import read_chunks, read_samples
from llamatrain.data.records import ChatRecord, Document, PromptRecord, TextRecord, parse_line, unthought
from llamatrain.data.token_cache import StoreLimits, TokenStore, TokenStoreWriter, stored
from llamatrain.data.warnings import lines, marks_in, plain_marks
from llamatrain.errors import DataError
from llamatrain.platform.memory import trim_heap
from llamatrain.platform.terminal import log_line

VERSION = (
    3  # of what this file makes of a text: with a new one, old entries of the cache are not found any more
)
LINES = 4  # the same of JSON lines
MANY = (
    2 << 20
)  # tokens that a task may make, besides two for each byte, before it leaves the rest to the one who takes them
FORM_NAMES = {TextRecord: "texts", PromptRecord: "prompts with answers", ChatRecord: "chats"}
SHOWN = 3  # rows that were skipped, of which it is said why
TOO_MUCH = -2  # in place of the first trained token of a row that is skipped for its size
REFUSED = -3  # the same of one that is of no known form, or that the chat template refuses
HOPELESS = 1000  # rows that are refused, before any is taken, are enough
READS_DATE = ("strftime_now", "date_string", "datetime")
PIECE = 64  # bytes that one token stands for at most, in the bound of an overlapping sample


Place = tuple[int, int]  # the index of a file, and a line number


class JsonLine(NamedTuple):
    """A row of a file: its JSON and its position."""

    file: int  # its index
    number: int
    text: bytes
    place: str

    @property
    def key(self) -> Place:
        """The file index and line number."""
        return self.file, self.number


Made = tuple[JsonLine, MarkedTokens | DataError]  # what becomes of a line: a sample, or nothing, and why


class Encoder:
    """Turns documents into tokens with one tokenizer and one set of options."""

    def __init__(
        self, tokenizer: TokenizerLike, options: DataOptions, ctx: int, compare: Compare | None = None
    ) -> None:
        self.tokenizer, self.options, self.ctx, self.compare = tokenizer, options, ctx, compare
        self.reader = PromptReader(tokenizer)
        self.lead = self.reader.lead
        self.want = WANTED["completion" if compare else options.train_on]  # of a chat's template
        self.notes = dict[str, str]()  # what is to be said of the lines, with what it tells besides
        self.said, self.forms = set[str](), set[str]()
        self.date = options.date or date.today().isoformat()  # which some templates read
        own = options.template or tokenizer.chat_template
        self.as_chat = (
            options.as_chat if options.as_chat is not None else own is not None
        )  # prompts with answers

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template: of the options, of the model, or ChatML."""
        return self._template(self.options.template or self.tokenizer.chat_template or CHATML)

    @cached_property
    def tool_template(self) -> ChatTemplate | None:
        """The template of chats with tools, if the model has a separate one."""
        source = None if self.options.template else self.tokenizer.tool_template
        return self._template(source) if source and source != self.template.source else None

    def _template(self, source: str) -> ChatTemplate:
        bos, eos = map(self.reader.text_of, (self.tokenizer.bos, self.tokenizer.eos))
        keeps = self.options.thinking == "keep"
        return ChatTemplate(source, bos, eos, self.reader.ends.values(), keeps=keeps, day=self.date)

    def _template_of(self, chat: ChatRecord) -> ChatTemplate:
        return self.tool_template or self.template if chat.tools else self.template

    def _close(self) -> None:
        for template in filter(None, (self.template, self.tool_template)):
            template.close()

    def store(self, sources: list[DataFile]) -> TokenStore:
        """Return the tokens of some files of one kind, from the cache if they are there."""
        if self.compare:
            check_lines(sources, self.compare)
        identity, bounds = self._identity(sources), self._bounds(sources)
        key = self._key(sources[0].kind, identity)
        if sources[0].kind == "lines":
            with ExitStack() as opened:
                opened.callback(self._close)
                store = stored(key, lambda writer: self._fill_lines(sources, writer), bounds)
            known = self.said | (
                {"as_chat"} if self.options.as_chat else set()
            )  # what was asked for is not said
            for line in lines(
                {kind: told for kind, told in store.notes.items() if kind not in known},
                describe_files(sources),
            ):
                log_line(line)
            self.said |= store.notes.keys()
            store.identity = identity
            return store
        fill = self._fill_samples if self.options.pattern else self._fill_text
        return stored(key, lambda writer: fill(sources, writer), bounds)

    def _bounds(self, sources: list[DataFile]) -> StoreLimits:
        """Return the largest numbers that a cache entry may hold.

        A document is a file or some bytes of one.
        """
        files, size = len(sources), sum(source.max_size for source in sources)
        return StoreLimits(ids=len(self.tokenizer), files=files, documents=files + size)

    def _identity(self, sources: list[DataFile]) -> str:
        """Return the hash by which checkpoints recognize the data."""
        options, tokenizer, kind = self.options, self.tokenizer, sources[0].kind
        facts: list[object] = [
            VERSION,
            kind,
            tokenizer.fingerprint,
            self.lead,
            tokenizer.eos,
            tokenizer.add_eos,
        ]
        if kind == "lines":
            plain = (
                tokenizer.eos is not None and self.reader.token_of("<|im_end|>") is None
            )  # its mark was another then
            source = CHATML_WITH_EOS if plain and self.template.source is CHATML else self.template.source
            constants = {**self.template.constants, "tools": None, "documents": None}
            facts += [source, constants, self.compare or options.train_on, self.as_chat]
            facts += [["tools", self.tool_template.source]] if self.tool_template else []
            facts += [["date", self.date]] if self._reads_date() else []
            facts += [["skip bad rows"]] if options.skip_bad_rows else []
            facts += [["thinking", options.thinking]] if options.thinking != "auto" else []
            facts += [["columns", sorted(options.mapping.items())]] if options.columns else []
        elif options.pattern:
            facts += [options.pattern, options.include_sample_start, options.fill_with_next_samples]
            facts += [(self.ctx, options.sample_random_offsets) if options.overlapping_samples else None]
        facts += [
            [at, each.format.name, each.compression]
            for at, each in enumerate(sources)
            if not each.is_identified_by_content
        ]
        for each in sources:
            with each.path.open("rb") as file:
                facts.append(hashlib.file_digest(file, "sha256").hexdigest())
        return hashed(facts)

    def _reads_date(self) -> bool:
        sources = [template.source for template in (self.template, self.tool_template) if template]
        return any(word in source for source in sources for word in READS_DATE)

    def _key(self, kind: str, identity: str) -> str:
        """Return the hash by which the cache finds the tokens."""
        if kind == "text":
            return identity
        known = (self.tokenizer.chat_template is None, sorted(self.reader.ends), self.options.parse_special)
        return hashed([LINES, identity, self.template.source, known])

    # ---- text --------------------------------------------------------------

    def _fill_text(self, sources: list[DataFile], writer: TokenStoreWriter) -> None:
        """Encode text files; each is one document."""
        with progress(sources) as told:
            for number, source in enumerate(sources):
                for size, tokens in self.tokenizer.encode_large(read_chunks(source)):
                    writer.write(tokens)
                    told.update(size)
                writer.write(self._end(self.tokenizer.add_eos))
                writer.end(number, 1)

    def _fill_samples(self, sources: list[DataFile], writer: TokenStoreWriter) -> None:
        """Encode text samples that begin at a pattern."""
        options = self.options
        longest = self.ctx * PIECE if options.overlapping_samples else None
        kept = self.ctx + 1 if options.overlapping_samples and not options.sample_random_offsets else None
        end = self._end(not options.fill_with_next_samples)
        found = (
            (len(text), (number, count, text))
            for number, source in enumerate(sources)
            for count, text in enumerate(
                read_samples(source, options.pattern, options.include_sample_start, longest), 1
            )
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

    def _fill_lines(self, sources: list[DataFile], writer: TokenStoreWriter) -> None:
        """Encode rows, and report those that were skipped."""
        numbered = (
            (len(text) + 1, JsonLine(number, count, text, source.locate(count)))
            for number, source in enumerate(sources)
            for count, text in source.rows()
        )
        skipped, refused = SkipReasons(), RefusedRows()
        self.notes, self.forms, self.template.notes = {}, set(), set()
        for made, left in in_order(self._lines, grouped(numbered), sources):
            self._write(
                chain(made, (pair for row in left for pair in self._row(row))), writer, skipped, refused
            )
            made.clear()  # before the next is waited for
            if not self.options.skip_bad_rows and refused.count == refused.seen >= HOPELESS:
                break
        if refused.count and not self.options.skip_bad_rows:
            raise DataError(refused.told())
        writer.note(self._noted())
        for line in skipped.first:
            log_line(line)
        if skipped.count > SHOWN:
            log_line(f"{describe_files(sources)}: {skipped.count - SHOWN:,} more rows were skipped, too")

    def _noted(self) -> dict[str, str]:
        """Collect the notes on these rows, with those that hold for all chats."""
        noted = self.template.notes | (self.tool_template.notes if self.tool_template else set())
        notes = self.notes | dict.fromkeys(noted, "")
        if len(self.forms) > 1:
            notes["mixed"] = " and ".join(sorted(self.forms))
        if notes.pop("chats", None) is None:
            return notes
        if not (self.options.template or self.tokenizer.chat_template):
            notes["fallback"] = ""
        if marks := plain_marks(self.template, self.reader):
            notes["marks"] = ", ".join(marks[:3])
        if "endless" in notes:
            notes["endless"] = (
                "".join(self.reader.text_of(int(token)) for token in self.reader.end) or "nothing"
            )
        return notes

    def _write(
        self, made: Iterable[Made], writer: TokenStoreWriter, skipped: "SkipReasons", refused: "RefusedRows"
    ) -> None:
        """Write encoded rows, and record why others are skipped."""
        for line, sample in made:
            refused.seen += 1
            if isinstance(sample, DataError):
                much = isinstance(sample, RecordTooLarge)
                skipped.add(f"{f'{line.place}: {sample}' if much else sample}; skipped")
                if not much:
                    refused.add(line, sample)
                writer.end(line.file, line.number, TOO_MUCH if much else REFUSED, single=True)
                continue
            targets = sample.marks[self.lead is None :]
            first = int(targets.argmax()) if len(targets) else 0  # of several the first
            first = first + (self.lead is None) if targets[first : first + 1].any() else -1
            writer.write(sample.tokens, sample.marks)
            writer.end(line.file, line.number, first, sample.single)

    def _lines(self, group: list[JsonLine]) -> tuple[list[Made], list[JsonLine]]:
        """Encode a group of lines; return the samples and the lines left over.

        Lines are left over when their samples would hold too many tokens in memory at once.
        """
        made, room = list[Made](), MANY + 2 * sum(len(line.text) for line in group)
        documents = dict[Place, Document | PreferencePair | DataError]()
        for at, line in enumerate(group):
            if room < 0:
                return made, group[at:]
            documents = documents if line.key in documents else self._ahead(group[at:])
            new = self._row(line, documents.pop(line.key, None))
            room -= sum(len(sample.tokens) for _, sample in new if isinstance(sample, MarkedTokens))
            made += new
        return made, []

    def _ahead(self, lines: list[JsonLine]) -> dict[Place, Document | PreferencePair | DataError]:
        """Parse the next short lines, keyed by position, and have their chats rendered in one request."""
        documents = dict[Place, Document | PreferencePair | DataError]()

        def asked() -> Iterator[Asked]:
            sizes = accumulate(len(line.text) for line in lines)
            for line in (line for line, size in zip(lines, sizes, strict=True) if size <= AHEAD):
                try:
                    documents[line.key] = document = self._taken(self._parsed(line))
                    all_of_it = document.both if isinstance(document, PreferencePair) else (document,)
                    chats = [
                        chat
                        for chat in all_of_it
                        if isinstance(chat, ChatRecord) and self._template_of(chat) is self.template
                    ]
                except DataError as error:  # which is told in its turn
                    documents[line.key] = error.with_traceback(None)
                    continue
                yield from ((chat.messages, chat.tools, self.want) for chat in chats)

        self.template.ahead(asked())
        return documents

    def _row(
        self, line: JsonLine, document: Document | PreferencePair | DataError | None = None
    ) -> list[Made]:
        """Encode one line into samples, or into the error that skips it."""
        try:
            document = document or self._taken(self._parsed(line))
            if isinstance(document, DataError):
                raise document
            if len(line.text) > LARGE:
                trim_heap()  # it took several times its size
            return [(line, sample) for sample in self._document(document, len(line.text))]
        except RecordTooLarge as error:
            return [(line, error), *([(line, NEITHER)] if self.compare else [])]
        except TemplateStopped as error:
            raise DataError(f"{line.place}: {error}") from None
        except TemplateError as error:
            return [(line, DataError(f"{line.place}: {error}")), *([(line, NEITHER)] if self.compare else [])]
        except DataError as error:
            return [(line, error), *([(line, NEITHER)] if self.compare else [])]

    def _parsed(self, line: JsonLine) -> Document | PreferencePair:
        columns = self.options.mapping
        if self.compare:
            return judged_in(line.text, line.place, self.compare, columns)
        return parse_line(line.text, line.place, columns)

    def _taken(self, document: Document | PreferencePair) -> Document | PreferencePair:
        return (
            document.changed(self._as_asked)
            if isinstance(document, PreferencePair)
            else self._as_asked(document)
        )

    def _as_asked(self, document: Document) -> Document:
        self.forms.add(FORM_NAMES[type(document)])
        if not isinstance(document, TextRecord) and document.media:
            self.notes["media"] = ""
        if isinstance(document, PromptRecord) and self.as_chat:
            document = document.as_chat()
            self.notes["as_chat"] = ""
        return unthought(document) if self.options.thinking == "strip" else document

    def _document(self, document: Document | PreferencePair, size: int = 0) -> list[MarkedTokens]:
        if isinstance(document, PreferencePair):
            return [last_answer(self._document(each, size)) if each else NEITHER for each in document.both]
        if isinstance(document, ChatRecord):
            return self._chat(document, size)
        if isinstance(document, PromptRecord):
            return [self._prompt(document, size)]
        tokens = self._text(document.text, size)
        return [MarkedTokens(tokens, np.ones(len(tokens), np.uint8), single=False)]

    def _text(self, words: str, size: int) -> np.ndarray:
        read = self.options.parse_special
        text = (
            self.reader.growing(size, LARGE)
            if read
            else IncrementalTokenizer(self._plain, self.tokenizer.cut, size, LARGE)
        )
        text.change(0, words.encode())
        if not read and "rendered" not in self.notes:
            marks = [mark for mark in marks_in(words) if self.reader.token_of(mark) is not None]
            self.notes |= {"rendered": ", ".join(marks[:3])} if marks else {}
        if text.tokens[-1:].tolist() not in [[end] for end in self.reader.ends]:
            text.append(self._end(bool(words)))
        return text.tokens

    def _prompt(self, document: PromptRecord, size: int) -> MarkedTokens:
        if document.system:
            self.notes["system_left"] = ""
        tokens, marks = encode_prompt(document, self.reader, size)
        if self.options.train_on == "all" and not self.compare:
            marks[:] = 1
        return MarkedTokens(tokens, marks, single=True)

    def _chat(self, document: ChatRecord, size: int) -> list[MarkedTokens]:
        if self.options.train_on == "all" and not self.compare:
            if any(UNTRAINED in message for message in document.messages):
                raise TemplateError(
                    "a message has weight 0, and --train-on all trains every token; leave one of them out"
                )
            text = self.reader.growing(size)
            text.change(0, self._template_of(document).render(document.messages, tools=document.tools))
            pairs = [(text.tokens, np.ones(text.count, np.uint8))]
        else:
            noted = set[str]()
            template = self._template_of(document)
            pairs = list(encode_chat(document, template, self.reader, size, noted, self.want)) or [NOTHING]
            if self.compare and "later" in noted:
                raise RecordTooLarge("what is compared stands behind more tokens than can be")
            self.notes |= dict.fromkeys(noted, "")
        self.notes["chats"] = ""
        return [MarkedTokens(tokens, marks, single=True) for tokens, marks in pairs]

    def _plain(self, text: bytes, start: bool) -> np.ndarray:
        return self.tokenizer.encode(text, start=start)


@dataclass
class SkipReasons:
    """The first few reasons why rows were skipped, and how many were."""

    first: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, reason: str) -> None:
        """Count a skipped row."""
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(reason)


@dataclass
class RefusedRows:
    """The first unusable row with its error, the places of the next few, and how many there are."""

    error: str = ""
    places: list[str] = field(default_factory=list)
    count: int = 0
    seen: int = 0  # of all rows

    def add(self, line: JsonLine, error: DataError) -> None:
        """Count a row that cannot be used."""
        self.count += 1
        if self.count == 1:
            self.error = str(error)
        elif len(self.places) < SHOWN:
            self.places.append(line.place)

    def told(self) -> str:
        """Return a message that names the unusable rows.

        It suggests --skip-bad-rows unless that would leave no row.
        """
        if self.count == self.seen:
            return self.error
        if self.count == 1:
            return f"{self.error}; --skip-bad-rows leaves such a row out"
        rows = f"{self.count - 1:,} other rows" if self.count > 2 else "another row"
        more = f" and {self.count - 1 - SHOWN:,} more" if self.count - 1 > SHOWN else ""
        return f"{self.error}; nor can {rows} be used ({', '.join(self.places)}{more}); --skip-bad-rows leaves them out"


def hashed(facts: list[object]) -> str:
    """Return a hash of JSON values."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
