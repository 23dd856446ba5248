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

from llamatrain.config.options import format_flag
from llamatrain.data.chat.builtin import CHATML, CHATML_WITH_EOS
from llamatrain.data.chat.encode import (
    EMPTY_SAMPLE,
    NO_TOKENS,
    MarkedTokens,
    encode_chat,
    encode_prompt,
    keep_last_answer,
)
from llamatrain.data.chat.messages import UNTRAINED
from llamatrain.data.chat.prompt import LARGE_TEXT, IncrementalTokenizer, PromptReader, TokenizerLike
from llamatrain.data.chat.template import (
    PREFETCH_BYTES,
    RENDER_MODES,
    ChatRequest,
    ChatTemplate,
    TemplateError,
    TemplateStopped,
)
from llamatrain.data.contrastive_records import TextGroup, check_has_groups, parse_group
from llamatrain.data.files import DataFile
from llamatrain.data.find_files import describe_files
from llamatrain.data.json_values import RecordTooLarge
from llamatrain.data.options import DataOptions
from llamatrain.data.parallel_map import encoding_bar, group_items, map_in_order
from llamatrain.data.preference_records import (
    ComparedKind,
    PreferencePair,
    check_has_rows,
    is_preference,
    parse_preference,
)
from llamatrain.data.readers.text import read_chunks, read_samples
from llamatrain.data.records import (
    ChatRecord,
    PromptRecord,
    Record,
    TextRecord,
    parse_record,
    strip_reasoning,
)
from llamatrain.data.rerank import Verdicts, fill_template, find_verdicts, rerank_template
from llamatrain.data.token_cache import StoreLimits, TokenStore, TokenStoreWriter, open_or_build
from llamatrain.data.warnings import find_marks, find_plain_marks, format_notes
from llamatrain.errors import DataError
from llamatrain.platform.memory import trim_heap
from llamatrain.platform.terminal import log_line

VERSION = 3  # of the encoding; a new version ignores older cache entries
LINES_VERSION = 5  # the same for rows
MAX_GROUP_TOKENS = 2 << 20  # of a task, in addition to two per byte; the consumer encodes the rest
FORM_NAMES = {TextRecord: "texts", PromptRecord: "prompts with answers", ChatRecord: "chats"}
MAX_REASONS = 3  # skipped rows whose reason is printed
TOO_LARGE = -2  # replaces the first trained token of a row that is too large
REFUSED = -3  # the same for a row of unknown form, or that the chat template refuses
HOPELESS_ROWS = 1000  # give up after so many rows if all are refused
READS_DATE = ("strftime_now", "date_string", "datetime")
MAX_TOKEN_BYTES = 64  # assumed most bytes of a token, to bound overlapping samples

Place = tuple[int, int]  # the index of a file, and a line number


class JsonLine(NamedTuple):
    """A row of a file: its JSON and its position."""

    file: int  # its index
    number: int
    text: bytes
    location: str

    @property
    def key(self) -> Place:
        """The file index and line number."""
        return self.file, self.number


Encoded = tuple[JsonLine, MarkedTokens | DataError]  # a line with its sample, or with the error that skips it
Parsed = Record | PreferencePair | TextGroup | DataError


class Encoder:
    """Turns documents into tokens with one tokenizer and one set of options."""

    def __init__(
        self, tokenizer: TokenizerLike, options: DataOptions, ctx: int, compare: ComparedKind | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.ctx = ctx
        self.compare = compare
        self.reader = PromptReader(tokenizer)
        # llama-server puts no begin token before the questions of a reranker
        self.bos = None if compare == "judged texts" else self.reader.bos
        self.render_mode = RENDER_MODES["completion" if compare else options.train_on]  # of chats
        self.notes = dict[str, str]()  # remarks on the rows, with details
        self.reported = set[str]()  # notes that were printed
        self.forms = set[str]()  # of the rows
        self.date = options.date or date.today().isoformat()  # some templates read it
        self.as_chat = options.as_chat  # True to render prompts with answers as chats
        if self.as_chat is None:
            self.as_chat = (options.template or tokenizer.chat_template) is not None

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template: of the options, of the model, or ChatML."""
        return self._build_template(self.options.template or self.tokenizer.chat_template or CHATML)

    @cached_property
    def tool_template(self) -> ChatTemplate | None:
        """The template of chats with tools, if the model has a separate one."""
        source = None if self.options.template else self.tokenizer.tool_template
        return self._build_template(source) if source and source != self.template.source else None

    def _build_template(self, source: str) -> ChatTemplate:
        return ChatTemplate(
            source,
            bos=self.reader.token_text(self.tokenizer.bos),
            eos=self.reader.token_text(self.tokenizer.eos),
            ends=self.reader.ends.values(),
            keep_reasoning=self.options.thinking == "keep",
            day=self.date,
            think=False if self.options.thinking == "off" else None,
        )

    def choose_template(self, chat: ChatRecord) -> ChatTemplate:
        """Return the template that renders a chat."""
        if chat.tools and self.tool_template:
            return self.tool_template
        return self.template

    def close(self) -> None:
        """Stop the child processes of the templates."""
        for template in filter(None, (self.template, self.tool_template)):
            template.close()

    def encode_files(self, sources: list[DataFile]) -> TokenStore:
        """Return the tokens of some files of one kind, from the cache if they are there."""
        if is_preference(self.compare):
            check_has_rows(sources, self.compare)
        elif self.compare:
            check_has_groups(sources)
        identity = self._compute_identity(sources)
        limits = self._limits(sources)
        key = self._cache_key(sources[0].kind, identity)
        if sources[0].kind == "text":
            fill = self._encode_samples if self.options.pattern else self._encode_text_files
            return open_or_build(key, lambda writer: fill(sources, writer), limits)
        with ExitStack() as cleanup:
            cleanup.callback(self.close)
            store = open_or_build(key, lambda writer: self._encode_rows(sources, writer), limits)
        store.identity = identity
        self._report(store.notes, describe_files(sources))
        return store

    def _report(self, notes: dict[str, str], name: str) -> None:
        """Print the notes that were not printed before, and none on what the user requested."""
        reported = self.reported | ({"as_chat"} if self.options.as_chat else set())
        new = {kind: detail for kind, detail in notes.items() if kind not in reported}
        for line in format_notes(new, name):
            log_line(line)
        self.reported |= notes.keys()

    def _limits(self, sources: list[DataFile]) -> StoreLimits:
        """Return the largest numbers that a cache entry may hold.

        A document is a file or some bytes of one.
        """
        size = sum(source.max_size for source in sources)
        return StoreLimits(ids=len(self.tokenizer), files=len(sources), documents=len(sources) + size)

    def _compute_identity(self, sources: list[DataFile]) -> str:
        """Return the hash by which checkpoints recognize the data."""
        options = self.options
        tokenizer = self.tokenizer
        kind = sources[0].kind
        facts: list[object] = [VERSION, kind, tokenizer.fingerprint, self.bos, tokenizer.eos]
        facts.append(tokenizer.add_eos)
        if kind == "lines":
            source = self.template.source
            # Older versions used another end mark if ChatML's was plain text.
            if (
                source is CHATML
                and tokenizer.eos is not None
                and self.reader.find_token("<|im_end|>") is None
            ):
                source = CHATML_WITH_EOS
            constants = {**self.template.constants, "tools": None, "documents": None}
            facts += [source, constants, self.compare or options.train_on, self.as_chat]
            facts += [["tools", self.tool_template.source]] if self.tool_template else []
            facts += [["judge", rerank_template(tokenizer)]] if self.compare == "judged texts" else []
            facts += [["date", self.date]] if self._reads_date() else []
            facts += [["skip bad rows"]] if options.skip_bad_rows else []
            facts += [["thinking", options.thinking]] if options.thinking != "auto" else []
            facts += [["columns", sorted(options.mapping.items())]] if options.columns else []
        elif options.pattern:
            facts += [options.pattern, options.include_sample_start, options.fill_with_next_samples]
            facts += [(self.ctx, options.sample_random_offsets) if options.overlapping_samples else None]
        facts += [
            [index, file.format.name, file.compression]
            for index, file in enumerate(sources)
            if not file.is_identified_by_content
        ]
        for data_file in sources:
            with data_file.path.open("rb") as file:
                facts.append(hashlib.file_digest(file, "sha256").hexdigest())
        return hash_facts(facts)

    def _reads_date(self) -> bool:
        sources = [template.source for template in (self.template, self.tool_template) if template]
        return any(word in source for source in sources for word in READS_DATE)

    def _cache_key(self, kind: str, identity: str) -> str:
        """Return the hash by which the cache finds the tokens."""
        if kind == "text":
            return identity
        facts = (self.tokenizer.chat_template is None, sorted(self.reader.ends), self.options.parse_special)
        return hash_facts([LINES_VERSION, identity, self.template.source, facts])

    # ---- text --------------------------------------------------------------

    def _encode_text_files(self, sources: list[DataFile], writer: TokenStoreWriter) -> None:
        """Encode text files; each is one document."""
        with encoding_bar(sources) as bar:
            for index, source in enumerate(sources):
                for size, tokens in self.tokenizer.encode_large(read_chunks(source)):
                    writer.write(tokens)
                    bar.update(size)
                writer.write(self._end_token(self.tokenizer.add_eos))
                writer.end_document(index, 1)

    def _encode_samples(self, sources: list[DataFile], writer: TokenStoreWriter) -> None:
        """Encode text samples that begin at a pattern."""
        options = self.options
        max_bytes = self.ctx * MAX_TOKEN_BYTES if options.overlapping_samples else None
        max_tokens = (
            self.ctx + 1 if options.overlapping_samples and not options.sample_random_offsets else None
        )
        end = self._end_token(not options.fill_with_next_samples)
        samples = (
            (len(text), (index, number, text))
            for index, source in enumerate(sources)
            for number, text in enumerate(
                read_samples(source, options.pattern, options.include_sample_start, max_bytes), 1
            )
        )
        for group in map_in_order(self._encode_texts, group_items(samples), sources):
            for index, number, tokens in group:
                writer.write(np.concatenate([tokens, end])[:max_tokens])
                writer.end_document(index, number, first=0 if len(tokens) else -1, single=True)

    def _encode_texts(self, group: list[tuple[int, int, bytes]]) -> list[tuple[int, int, np.ndarray]]:
        return [(index, number, self.tokenizer.encode(text)) for index, number, text in group]

    def _end_token(self, wanted: bool) -> np.ndarray:
        return np.array([self.tokenizer.eos] if wanted and self.tokenizer.eos is not None else [], np.int32)

    # ---- lines -------------------------------------------------------------

    def _encode_rows(self, sources: list[DataFile], writer: TokenStoreWriter) -> None:
        """Encode rows, and report those that were skipped."""
        lines = (
            (len(text) + 1, JsonLine(index, number, text, source.locate(number)))
            for index, source in enumerate(sources)
            for number, text in source.rows()
        )
        skipped = SkipReasons()
        refused = RefusedRows()
        self.notes = {}
        self.forms = set()
        self.template.notes = set()
        self.template.check_switch(f"{format_flag('thinking')} off")
        for results, left_over in map_in_order(self._encode_group, group_items(lines), sources):
            rest = chain.from_iterable(map(self._encode_line, left_over))
            self._write_samples(chain(results, rest), writer, skipped, refused)
            results.clear()  # free memory before waiting for the next
            if not self.options.skip_bad_rows and refused.count == refused.total >= HOPELESS_ROWS:
                break
        if refused.count and not self.options.skip_bad_rows:
            raise DataError(refused.message(), code=refused.code)
        writer.write_notes(self._collect_notes())
        for line in skipped.reasons:
            log_line(line)
        if skipped.count > MAX_REASONS:
            count = skipped.count - MAX_REASONS
            log_line(f"{describe_files(sources)}: {count:,} more rows were skipped")

    def _collect_notes(self) -> dict[str, str]:
        """Collect the notes on these rows, with those that hold for all chats."""
        template_notes = self.template.notes | (self.tool_template.notes if self.tool_template else set())
        notes = self.notes | dict.fromkeys(template_notes, "")
        if len(self.forms) > 1:
            notes["mixed"] = " and ".join(sorted(self.forms))
        if notes.pop("chats", None) is None:
            return notes
        if not (self.options.template or self.tokenizer.chat_template):
            notes["fallback"] = ""
        if marks := find_plain_marks(self.template, self.reader):
            notes["marks"] = ", ".join(marks[:3])
        if "endless" in notes:
            end = "".join(self.reader.token_text(int(token)) for token in self.reader.end)
            notes["endless"] = end or "nothing"
        return notes

    def _write_samples(
        self,
        results: Iterable[Encoded],
        writer: TokenStoreWriter,
        skipped: "SkipReasons",
        refused: "RefusedRows",
    ) -> None:
        """Write encoded rows, and record why others are skipped."""
        for line, sample in results:
            refused.total += 1
            if isinstance(sample, DataError):
                if isinstance(sample, RecordTooLarge):
                    skipped.add(f"{line.location}: {sample}; skipped")
                    writer.end_document(line.file, line.number, TOO_LARGE, single=True)
                else:
                    skipped.add(f"{sample}; skipped")
                    refused.add(line, sample)
                    writer.end_document(line.file, line.number, REFUSED, single=True)
                continue
            targets = sample.marks[self.bos is None :]
            first = int(targets.argmax()) if len(targets) else 0  # the first of several
            first = first + (self.bos is None) if targets[first : first + 1].any() else -1
            writer.write(sample.tokens, sample.marks)
            writer.end_document(line.file, line.number, first, sample.single)

    def _encode_group(self, group: list[JsonLine]) -> tuple[list[Encoded], list[JsonLine]]:
        """Encode a group of lines; return the samples and the lines left over.

        Lines are left over when their samples would hold too many tokens in memory at once.
        """
        results = list[Encoded]()
        tokens_left = MAX_GROUP_TOKENS + 2 * sum(len(line.text) for line in group)
        parsed = dict[Place, Parsed]()
        for index, line in enumerate(group):
            if tokens_left < 0:
                return results, group[index:]
            if line.key not in parsed:
                parsed = self._prefetch_renders(group[index:])
            samples = self._encode_line(line, parsed.pop(line.key, None))
            tokens_left -= sum(
                len(sample.tokens) for _, sample in samples if isinstance(sample, MarkedTokens)
            )
            results += samples
        return results, []

    def _prefetch_renders(self, lines: list[JsonLine]) -> dict[Place, Parsed]:
        """Parse the next short lines, keyed by position, and have their chats rendered in one request."""
        parsed = dict[Place, Parsed]()

        def requests() -> Iterator[ChatRequest]:
            sizes = accumulate(len(line.text) for line in lines)
            for line in (line for line, size in zip(lines, sizes, strict=True) if size <= PREFETCH_BYTES):
                try:
                    record = self._parse(line)
                except DataError as error:  # reported when the line is encoded
                    parsed[line.key] = error.with_traceback(None)
                    continue
                parsed[line.key] = record
                if isinstance(record, TextGroup):
                    continue
                for chat in record.both if isinstance(record, PreferencePair) else (record,):
                    if isinstance(chat, ChatRecord) and self.choose_template(chat) is self.template:
                        yield chat.messages, chat.tools, self.render_mode

        self.template.prefetch(requests())
        return parsed

    def _encode_line(self, line: JsonLine, parsed: Parsed | None = None) -> list[Encoded]:
        """Encode one line into samples, or into the error that skips it."""
        try:
            record = parsed or self._parse(line)
            if isinstance(record, DataError):
                raise record
            if len(line.text) > LARGE_TEXT:
                trim_heap()  # parsing took several times its size
            return [(line, sample) for sample in self.encode_record(record, len(line.text))]
        except RecordTooLarge as error:
            reason: DataError = error
        except TemplateStopped as error:
            raise DataError(f"{line.location}: {error}", code=error.code) from None
        except TemplateError as error:
            reason = DataError(f"{line.location}: {error}", code=error.code)
        except DataError as error:
            reason = error
        is_compared = self.compare not in (None, "judged texts")
        return [(line, reason), (line, EMPTY_SAMPLE)] if is_compared else [(line, reason)]

    def _parse(self, line: JsonLine) -> Record | PreferencePair | TextGroup:
        """Parse a line, and convert it as the options request."""
        if is_preference(self.compare):
            pair = parse_preference(line.text, line.location, self.compare, self.options.mapping)
            return pair.map(self.apply_options)
        if self.compare:
            return parse_group(line.text, line.location, self.options.mapping)
        return self.apply_options(parse_record(line.text, line.location, self.options.mapping))

    def apply_options(self, record: Record) -> Record:
        """Convert a record as the options request: prompts to chats, without reasoning."""
        self.forms.add(FORM_NAMES[type(record)])
        if not isinstance(record, TextRecord) and record.has_media:
            self.notes["media"] = ""
        if isinstance(record, PromptRecord) and self.as_chat:
            record = record.as_chat()
            self.notes["as_chat"] = ""
        return strip_reasoning(record) if self.options.thinking in ("strip", "off") else record

    def encode_record(self, record: Record | PreferencePair | TextGroup, size: int = 0) -> list[MarkedTokens]:
        """Encode a record that has `size` bytes in the file into samples."""
        if isinstance(record, TextGroup) and self.compare == "judged texts":
            others = [self.encode_judged(record.query, text, answers=False) for text in record.negatives]
            return [self.encode_judged(record.query, record.positive, answers=True), *others]
        if isinstance(record, TextGroup):
            return [self.encode_whole(text) for text in record.texts]
        if isinstance(record, PreferencePair):
            return [
                keep_last_answer(self.encode_record(side, size)) if side else EMPTY_SAMPLE
                for side in record.both
            ]
        if isinstance(record, ChatRecord):
            return self._encode_chat(record, size)
        if isinstance(record, PromptRecord):
            return [self._encode_prompt(record, size)]
        tokens = self._encode_text(record.text, size)
        return [MarkedTokens(tokens, np.ones(len(tokens), np.uint8), single=False)]

    def encode_whole(self, text: str) -> MarkedTokens:
        """Encode a text whose embedding is wanted as llama-server does."""
        content = text.encode()
        tokenizer = self.reader.start_text(len(content), LARGE_TEXT)
        tokenizer.replace_end(0, content)
        tokens = np.concatenate([tokenizer.tokens, self._end_token(self.tokenizer.add_eos)])
        return MarkedTokens(tokens, np.ones(len(tokens), np.uint8), single=True)

    def encode_judged(self, query: str, document: str, *, answers: bool) -> MarkedTokens:
        """Encode the question whether a document answers a query, followed by yes or no."""
        question = self.reader.encode_prompt(fill_template(rerank_template(self.tokenizer), query, document))
        tokens = np.append(question, self.verdicts.yes if answers else self.verdicts.no).astype(np.int32)
        marks = np.zeros(len(tokens), np.uint8)
        marks[-1] = 1
        return MarkedTokens(tokens, marks, single=True)

    @cached_property
    def verdicts(self) -> Verdicts:
        """The tokens for yes and no."""
        return find_verdicts(self.tokenizer)

    def _encode_text(self, text: str, size: int) -> np.ndarray:
        parse_special = self.options.parse_special
        if parse_special:
            tokenizer = self.reader.start_text(size, LARGE_TEXT)
        else:
            tokenizer = IncrementalTokenizer(self._encode_plain, self.tokenizer.find_cut, size, LARGE_TEXT)
        tokenizer.replace_end(0, text.encode())
        if not parse_special and "rendered" not in self.notes:
            marks = [mark for mark in find_marks(text) if self.reader.find_token(mark) is not None]
            if marks:
                self.notes["rendered"] = ", ".join(marks[:3])
        if not self.reader.has_end(tokenizer.tokens):
            tokenizer.append(self._end_token(bool(text)))
        return tokenizer.tokens

    def _encode_prompt(self, record: PromptRecord, size: int) -> MarkedTokens:
        if record.system:
            self.notes["system_left"] = ""
        tokens, marks = encode_prompt(record, self.reader, size)
        if self.options.train_on == "all" and not self.compare:
            marks[:] = 1
        return MarkedTokens(tokens, marks, single=True)

    def _encode_chat(self, chat: ChatRecord, size: int) -> list[MarkedTokens]:
        template = self.choose_template(chat)
        if self.options.train_on == "all" and not self.compare:
            if any(UNTRAINED in message for message in chat.messages):
                raise TemplateError(
                    "a message has weight 0, but --train-on all trains every token; remove one of the two",
                    code="untrained-message",
                )
            text = self.reader.start_text(size)
            text.replace_end(0, template.render(chat.messages, tools=chat.tools))
            self.notes["chats"] = ""
            return [MarkedTokens(text.tokens, np.ones(text.count, np.uint8), single=True)]
        notes = set[str]()
        pairs = list(encode_chat(chat, template, self.reader, size, notes, self.render_mode)) or [NO_TOKENS]
        if self.compare and "later" in notes:
            raise RecordTooLarge(
                "the compared answer comes after too many tokens; shorten the chat", code="row-too-large"
            )
        self.notes |= dict.fromkeys(["chats", *notes], "")
        return [MarkedTokens(tokens, marks, single=True) for tokens, marks in pairs]

    def _encode_plain(self, text: bytes, start: bool) -> np.ndarray:
        return self.tokenizer.encode(text, start=start)


@dataclass
class SkipReasons:
    """The first few reasons why rows were skipped, and how many were."""

    reasons: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, reason: str) -> None:
        """Count a skipped row."""
        self.count += 1
        if len(self.reasons) < MAX_REASONS:
            self.reasons.append(reason)


@dataclass
class RefusedRows:
    """The first unusable row with its error, the places of the next few, and how many there are."""

    error: str = ""
    code: str = ""
    locations: list[str] = field(default_factory=list)
    count: int = 0
    total: int = 0  # of all rows

    def add(self, line: JsonLine, error: DataError) -> None:
        """Count a row that cannot be used."""
        self.count += 1
        if self.count == 1:
            self.error = str(error)
            self.code = error.code
        elif len(self.locations) < MAX_REASONS:
            self.locations.append(line.location)

    def message(self) -> str:
        """Return a message that names the unusable rows.

        It suggests --skip-bad-rows unless that would leave no row.
        """
        if self.count == self.total:
            return self.error
        if self.count == 1:
            return f"{self.error}; use --skip-bad-rows to skip such a row"
        others = f"{self.count - 1:,} other rows" if self.count > 2 else "another row"
        more = f" and {self.count - 1 - MAX_REASONS:,} more" if self.count - 1 > MAX_REASONS else ""
        locations = ", ".join(self.locations)
        return f"{self.error}; also {others} ({locations}{more}); use --skip-bad-rows to skip them"


def hash_facts(facts: list[object]) -> str:
    """Return a hash of JSON values."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
