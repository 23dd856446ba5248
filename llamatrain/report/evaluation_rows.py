"""The rows of an evaluation's table: each measure of a model, and of its base if both were evaluated.

They are made of the JSON object that `evaluate` prints. It may come from a file, so its values are untrusted.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from llamatrain.report.series import to_number

MEASURES = (
    *("loss", "perplexity", "bits_per_byte", "accuracy"),
    *("recall_at_1", "recall_at_5", "recall_at_10", "mrr_at_10", "ndcg_at_10", "queries", "candidates"),
    *("margin", "reward_chosen", "reward_rejected", "answers", "tokens"),
)
COMPARISON = ("kl_divergence", "agreement")
LISTS = {"choices": ("acc", "acc_norm"), "exact_match": ("exact_match",)}  # measures of each file
SHARES = (  # printed in percent
    *("accuracy", "agreement", "acc", "acc_norm", "exact_match"),
    *("recall_at_1", "recall_at_5", "recall_at_10"),
)
NAMES = {"kl_divergence": "KL(base || model)", "agreement": "same likeliest token"}
MAX_FILES, MAX_NAME = 100, 60  # files that are shown, and characters of a name
LARGEST = 1e300


class Value(NamedTuple):
    """A number with its standard error, which may be missing."""

    number: float
    error: float | None
    is_share: bool

    def format(self, plus_minus: str) -> str:
        """Format the number and its error: a share in percent, and a count with commas."""
        if self.is_share:
            error = "" if self.error is None else f" {plus_minus} {100 * self.error:.2g}"
            return f"{100 * self.number:.2f}{error} %"
        if self.number.is_integer() and self.error is None:
            return f"{self.number:,.0f}"
        return f"{self.number:.6g}" + ("" if self.error is None else f" {plus_minus} {self.error:.2g}")


class Row(NamedTuple):
    """A measure of a model, and of its base."""

    name: str
    base: Value | None
    model: Value | None

    @property
    def change(self) -> str:
        """The difference between model and base, with its sign."""
        if self.base is None or self.model is None or self.name == "tokens":
            return ""
        difference = self.model.number - self.base.number
        return f"{100 * difference:+.2f}" if self.model.is_share else f"{difference:+.4g}"


def read_value(values: Mapping[str, Any], name: str) -> Value | None:
    """Return a number of an evaluation, or None if it has none."""
    number, error = (to_number(values.get(key), LARGEST) for key in (name, f"{name}_error"))
    if number != number:
        return None
    return Value(number, None if error != error else error, name in SHARES)


def evaluation_rows(values: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of an evaluation that have a number."""
    base = values.get("base")
    base = base if isinstance(base, dict) else {}
    for name in MEASURES:
        yield from make_row(name.replace("_", " "), name, base, values)
    for name in COMPARISON:
        yield from make_row(NAMES[name], name, {}, values)
    for kind, names in LISTS.items():
        files, base_files = read_files(values, kind), read_files(base, kind)
        for index, file in enumerate(files):
            title = str(file.get("file"))[:MAX_NAME]
            base_file = base_files[index] if index < len(base_files) else {}
            for name in names:
                yield from make_row(f"{title}: {name.replace('_', ' ')}", name, base_file, file)


def make_row(title: str, name: str, base: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row, if there is a number for it."""
    row = Row(title, read_value(base, name), read_value(model, name))
    if row.base or row.model:
        yield row


def read_files(values: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the results of files of a kind."""
    files = values.get(kind)
    return [file for file in files[:MAX_FILES] if isinstance(file, dict)] if isinstance(files, list) else []


def format_table(values: Mapping[str, Any], encoding: str) -> str:
    """Format an evaluation for the terminal: a line for each measure, in columns if there is a base."""
    plus_minus = "\u00b1" if encoding.startswith("utf") else "+-"
    rows = [*evaluation_rows(values)]
    lines = [
        (row.name, *("" if value is None else value.format(plus_minus) for value in row[1:]), row.change)
        for row in rows
    ]
    if any(row.base for row in rows):
        lines.insert(0, ("", "base", "model", "change"))
    else:
        lines = [(name, model) for name, _, model, _ in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
