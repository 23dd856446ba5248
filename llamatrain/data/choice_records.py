"""Parses questions with several choices, by the keys that their data sets have on Hugging Face.

A question becomes pairs of a context and a continuation, as EleutherAI's lm-evaluation-harness makes them for the
tasks hellaswag, winogrande, arc_easy and arc_challenge, so that scores can be compared.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamatrain.data.column_names import format_keys
from llamatrain.data.records import parse_object
from llamatrain.errors import DataError

KNOWN = (
    '{"ctx_a", "ctx_b", "activity_label", "endings", "label"} of HellaSwag, {"sentence", "option1", "option2", '
    '"answer"} of Winogrande, {"question", "choices": {"text", "label"}, "answerKey"} of ARC, and {"question" or '
    '"context", "choices", "answer"}'
)
MAX_CHOICES = 1000


@dataclass(frozen=True)
class Choice:
    """A choice: the context, and the continuation whose probability is its score."""

    context: str
    continuation: str
    size: int  # characters of the choice, by which `acc_norm` divides


@dataclass(frozen=True)
class Question:
    """A question with its choices and the index of the right one."""

    choices: tuple[Choice, ...]
    answer: int


@dataclass(frozen=True)
class Row:
    """A row of a data set, whose values are read with checks."""

    values: Mapping[str, Any]
    location: str

    def text(self, key: str) -> str:
        """Return a text."""
        return self.check(key, self.values.get(key), str, "a string")

    def texts(self, key: str, values: Any) -> list[str]:
        """Return a list of texts, such as choices."""
        if not isinstance(values, list) or not 2 <= len(values) <= MAX_CHOICES:
            raise self.error(f"{json.dumps(key)} must be a list of 2 to {MAX_CHOICES:,} strings", key)
        return [self.check(key, value, str, "a list of strings") for value in values]

    def check(self, key: str, value: Any, kind: type, name: str) -> Any:
        """Return a value; raise if it is of another kind."""
        if not isinstance(value, kind):
            raise self.error(f"{json.dumps(key)} must be {name}", key)
        return value

    def index(self, key: str, value: Any, count: int, first: int = 0) -> int:
        """Return the index of the right choice, given as a number or as a text with one; the first has `first`."""
        if isinstance(value, str) and value.isdecimal() and len(value) < 5:
            value = int(value)
        if type(value) is not int or not first <= value < first + count:
            raise self.error(
                f"{json.dumps(key)} must be the number of the right choice, {first} to {first + count - 1}",
                key,
            )
        return value - first

    def error(self, problem: str, key: str) -> DataError:
        """Return the error of a value."""
        shown = json.dumps(self.values.get(key), ensure_ascii=False)[:60]
        return DataError(f"{self.location}: {problem} (got {shown})", code="bad-question")


# ---- the data sets ----------------------------------------------------------


def read_hellaswag(row: Row) -> Question:
    """Read a question of HellaSwag. Marks of WikiHow are removed, and the second half begins with a capital."""
    if "ctx_a" in row.values or "ctx_b" in row.values:
        context = f"{row.text('ctx_a')} {row.text('ctx_b').capitalize()}"
    else:
        context = row.text("ctx")
    context = clean_wikihow(f"{row.text('activity_label')}: {context}")
    endings = [clean_wikihow(ending) for ending in row.texts("endings", row.values["endings"])]
    answer = row.index("label", row.values.get("label"), len(endings))
    return ask(context, endings, answer)


def clean_wikihow(text: str) -> str:
    """Remove the marks of WikiHow in brackets, and one of two spaces."""
    lines = text.strip().replace(" [title]", ". ").split("\n")
    return "\n".join(map(remove_brackets, lines)).replace("  ", " ")


def remove_brackets(line: str) -> str:
    """Remove each part of a line from a bracket to the first one that closes."""
    kept, start = list[str](), 0
    while (opening := line.find("[", start)) >= 0 and (closing := line.find("]", opening)) >= 0:
        kept.append(line[start:opening])
        start = closing + 1
    return "".join([*kept, line[start:]])


def read_winogrande(row: Row) -> Question:
    """Read a question of Winogrande: each option in place of the gap, and then the same rest of the sentence."""
    before, gap, after = row.text("sentence").partition("_")
    if not gap:
        raise row.error('"sentence" must have a gap, which is written as _', "sentence")
    options = [row.text(key) for key in ("option1", "option2")]
    choices = [Choice(before + option, f" {after.strip()}", len(before + option)) for option in options]
    return Question(tuple(choices), row.index("answer", row.values.get("answer"), 2, first=1))


def read_arc(row: Row) -> Question:
    """Read a question of ARC."""
    choices = row.check("choices", row.values["choices"], dict, "an object with text and label")
    texts, labels = (row.texts("choices", choices.get(key)) for key in ("text", "label"))
    key = row.values.get("answerKey")
    if len(labels) != len(texts) or key not in labels:
        raise row.error('"answerKey" must be one of the labels, of which each choice has one', "answerKey")
    return ask(f"Question: {row.text('question')}\nAnswer:", texts, labels.index(key))


def read_plain(row: Row) -> Question:
    """Read a question with a list of choices; the answer is an index or the text of a choice."""
    choices = row.texts("choices", row.values["choices"])
    answer = row.values.get("answer")
    if isinstance(answer, str) and answer in choices:
        index = choices.index(answer)
    else:
        index = row.index("answer", answer, len(choices))
    if row.values.get("context") is not None:
        return ask(row.text("context"), choices, index)
    return ask(f"Question: {row.text('question')}\nAnswer:", choices, index)


def ask(context: str, choices: Sequence[str], answer: int) -> Question:
    """Return a question whose choices follow the context after a space."""
    return Question(tuple(Choice(context, f" {choice}", len(choice)) for choice in choices), answer)


@dataclass(frozen=True)
class ChoiceFormat:
    """The form of a data set's rows."""

    name: str
    keys: tuple[str, ...]  # by which it is recognized
    read: Callable[[Row], Question]
    has_norm: bool = True  # False: only `acc` is usual, since all continuations are equal


FORMATS = (
    ChoiceFormat("hellaswag", ("endings", "activity_label"), read_hellaswag),
    ChoiceFormat("winogrande", ("sentence", "option1", "option2"), read_winogrande, has_norm=False),
    ChoiceFormat("arc", ("question", "choices", "answerKey"), read_arc),
    ChoiceFormat("choices", ("choices", "answer", "context"), read_plain),
    ChoiceFormat("choices", ("choices", "answer", "question"), read_plain),
)


KEYS = frozenset(key for known in FORMATS for key in known.keys) | {"ctx", "ctx_a", "ctx_b", "label"}


def parse_question(line: bytes, location: str) -> tuple[ChoiceFormat, Question]:
    """Parse a JSON line into a question, and return its format; raise DataError if it has none."""
    values = parse_object(line, location)
    found = next((known for known in FORMATS if {*known.keys} <= values.keys()), None)
    if found is None:
        raise DataError(
            f"{location}: no known keys of a question with choices (got {format_keys(list(values))}); known "
            f"are {KNOWN}",
            code="unknown-keys",
        )
    return found, found.read(Row(values, location))
