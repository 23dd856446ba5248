"""The options that control how files become rows."""

import re
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from llamatrain.config.options import Condition, Option, OptionError, Options
from llamatrain.data.chat.builtin import TEMPLATES, find_template
from llamatrain.data.column_names import parse_mapping
from llamatrain.errors import DataError, MissingError, UsageError

TEMPLATE = Option(
    f"Render chats with the Jinja template in this file, or a built-in one ({', '.join(TEMPLATES)}); "
    "default: the model's own.",
    unit="FILE|NAME",
)


CONTRASTIVE = "contrastive"  # the objective that compares embeddings
RERANK = "rerank"  # the objective that tells whether a document answers a query
GRPO = "grpo"  # the objective that learns from rewards of generated answers; others compare given ones
NO_OBJECTIVE = Condition(lambda values: not values.get("objective"), "with --objective {objective}")
TRAINING = Condition(
    lambda values: values.get("command") not in ("evaluate", "imatrix"),
    "for {command}, which reads each token of the data once",
)


@dataclass(frozen=True)
class DataOptions(Options, panel="Data"):
    """The options of training data."""

    train_on: Annotated[
        Literal["completion", "last", "all"],
        Option(
            "Train on the answers of prompts and chats, only on the last answer of a chat, or on all tokens. "
            "In plain text, all tokens are trained.",
            when=(NO_OBJECTIVE,),
        ),
    ] = "completion"
    thinking: Annotated[
        Literal["auto", "keep", "strip", "off"],
        Option(
            "Reasoning of answers: as the chat template renders it; kept in all turns; removed from all; or "
            "removed, with thinking switched off in the template."
        ),
    ] = "auto"
    columns: Annotated[
        str,
        Option(
            "The column names that the data has for known keys: prompt=question,completion=answer.",
            unit="KEY=NAME,...",
        ),
    ] = ""
    as_: Annotated[
        Literal["text", "rest"] | None,
        Option(
            "text: train on files as they are, whatever they look like; rest: train on the remaining pairs "
            "even if most are unusable."
        ),
    ] = None
    as_chat: Annotated[
        bool | None,
        Option("Render prompts with answers by the model's chat template, like chats; auto: if it has one."),
    ] = None
    skip_bad_rows: Annotated[
        bool,
        Option("Skip rows of unknown form, or that the chat template refuses, and list them."),
    ] = False
    date: Annotated[
        str,
        Option(
            "The date that a chat template sees, such as 2026-11-23; default: the day on which the run "
            "begins.",
            unit="DATE",
        ),
    ] = ""
    chat_template: Annotated[Path | None, TEMPLATE] = None
    parse_special: Annotated[
        bool,
        Option(
            "Read chat marks and other control tokens in text as tokens, for chats that are already "
            "rendered.",
            when=(NO_OBJECTIVE,),
        ),
    ] = False
    pack: Annotated[
        bool | None,
        Option(
            "Pack several short samples into a row, each attending only to itself; auto: unless all "
            "data is plain text.",
            excludes=(("fill_with_next_samples", "both fill rows"),),
        ),
    ] = None
    shuffle: Annotated[bool, Option("Shuffle the samples in each epoch.", when=(TRAINING,))] = True
    val: Annotated[
        tuple[str, ...],
        Option(
            "A file, folder or glob of validation data; may be given several times.",
            unit="DATA",
            excludes=(("val_split", "both choose the validation data"),),
            when=(TRAINING,),
            resumable=True,
        ),
    ] = ()
    retain_data: Annotated[
        tuple[str, ...],
        Option(
            "Data that the model should not forget: its loss is measured at each validation, and chooses nothing; a "
            "file, folder or glob, may be given several times.",
            unit="DATA",
            when=(TRAINING, NO_OBJECTIVE),
            resumable=True,
        ),
    ] = ()
    val_split: Annotated[
        float,
        Option(
            "The share of the data to hold out for validation, such as 0.05.",
            unit="PART",
            least=0,
            below=1,
            example="0.05",
            when=(TRAINING,),
        ),
    ] = 0.0
    sample_start: Annotated[
        str,
        Option(
            "Text samples begin after this pattern; default: where the previous one ended.",
            unit="PATTERN",
            when=(NO_OBJECTIVE,),
        ),
    ] = ""
    include_sample_start: Annotated[
        bool, Option("Include the pattern in the samples.", when=(NO_OBJECTIVE,))
    ] = False
    escape: Annotated[
        bool,
        Option(
            "Interpret the escapes \\n, \\r, \\t, \\', \\\" and \\\\ in the pattern.",
            when=(NO_OBJECTIVE,),
        ),
    ] = False
    overlapping_samples: Annotated[
        bool,
        Option(
            "Let samples overlap the next ones; without a pattern, one begins at every token of a text.",
            when=(TRAINING, NO_OBJECTIVE),
        ),
    ] = False
    fill_with_next_samples: Annotated[
        bool,
        Option(
            "Fill the rows of short samples with the next ones in shuffled order.",
            when=(TRAINING, NO_OBJECTIVE),
        ),
    ] = False
    separate_with_eos: Annotated[
        bool, Option("When filling, put an end token between samples.", when=(TRAINING, NO_OBJECTIVE))
    ] = False
    separate_with_bos: Annotated[
        bool, Option("When filling, put a begin token between samples.", when=(TRAINING, NO_OBJECTIVE))
    ] = True
    sample_random_offsets: Annotated[
        bool, Option("Begin text samples at a random one of their tokens.", when=(TRAINING, NO_OBJECTIVE))
    ] = False
    force_reshuffle: Annotated[
        bool,
        Option(
            "When resuming, begin a new shuffle instead of continuing the old one.",
            when=(TRAINING,),
            resumable=True,
            transient=True,
        ),
    ] = False

    def validate(self) -> None:
        """Raise OptionError if the options contradict each other."""
        try:
            parse_mapping(self.columns)
        except UsageError as error:
            problem = str(error)
            raise OptionError(lambda spelt: f"{spelt('columns')}: {problem}", code=error.code) from None
        if self.date and not is_date(self.date):
            raise OptionError(
                lambda spelt: f"{spelt('date')} must be a day such as 2026-11-23 (got {self.date!r})",
                code="bad-date",
            )
        if self.sample_start and self.overlapping_samples and self.val_split:
            raise OptionError(
                lambda spelt: (
                    f"{spelt('val_split')} cannot separate samples that overlap; "
                    f"give validation data with {spelt('val')}"
                ),
                code="conflicting-options",
            )

    @property
    def raw(self) -> bool:
        """True if all data is read as plain text."""
        return self.as_ == "text"

    @cached_property
    def mapping(self) -> dict[str, str]:
        """The keys of rows, with the column names that the data has for them."""
        return parse_mapping(self.columns)

    @property
    def is_named_template(self) -> bool:
        """True if --chat-template names a built-in template, not a file."""
        path = self.chat_template
        return path is not None and find_template(str(path)) is not None and not path.is_file()

    @cached_property
    def template(self) -> str | None:
        """The source of the --chat-template file, or of the built-in template of that name."""
        if self.chat_template is None or self.is_named_template:
            return find_template(str(self.chat_template))
        try:
            if text := self.chat_template.read_bytes().decode("utf-8"):
                return text
            raise DataError(
                f"{self.chat_template}: the file is empty; a chat template must be Jinja", code="empty-file"
            )
        except OSError as error:
            error_class = MissingError if isinstance(error, FileNotFoundError) else DataError
            problem = f"{self.chat_template}: {error.strerror}; built-in templates are {', '.join(TEMPLATES)}"
            raise error_class(
                f"{problem}; without --chat-template the model's own is used", code="unreadable-template"
            ) from None
        except UnicodeDecodeError:
            raise DataError(
                f"{self.chat_template}: not UTF-8; a chat template must be Jinja text", code="not-utf8"
            ) from None

    def packs(self, plain: bool) -> bool:
        """Return True if rows hold several samples; `plain` means that all data is plain text."""
        return not plain and not self.fill_with_next_samples if self.pack is None else self.pack

    @property
    def pattern(self) -> str:
        """The pattern at which text samples begin."""
        return unescape(self.sample_start) if self.escape else self.sample_start


def is_date(text: str) -> bool:
    """Return True if a text is a date such as 2026-11-23."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def unescape(text: str) -> str:
    """Replace the six escapes that llama.cpp's trainer knew; other backslashes stay."""
    meaning = {"n": "\n", "r": "\r", "t": "\t"}
    return re.sub(r"\\([nrt'\"\\])", lambda found: meaning.get(found[1], found[1]), text)
