"""Keeps the results of `evaluate --report` in the folder of a run, for its page."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamatrain.config.read_limited import read_limited
from llamatrain.errors import LlamatrainError
from llamatrain.report.evaluation_rows import Row, evaluation_rows
from llamatrain.report.output_file import write_text

EVALUATIONS = "evaluations.jsonl"
MAX_KEPT = 50  # evaluations, the newest ones
MAX_LINE = 1 << 16  # bytes
MAX_TITLE = 200  # characters


@dataclass(frozen=True)
class ShownEvaluation:
    """An evaluation: what was evaluated, and its measures."""

    title: str
    rows: list[Row]


def add_evaluation(folder: Path, title: str, result: dict[str, Any]) -> None:
    """Add a result to those of a run; it replaces an older one with the same title."""
    lines = [line for line in read_objects(folder) if line["title"] != title]
    lines.append({"title": title, "result": result})
    write_text(folder / EVALUATIONS, "".join(f"{json.dumps(line)}\n" for line in lines[-MAX_KEPT:]))


def read_evaluations(folder: Path) -> list[ShownEvaluation]:
    """Return the results in the folder of a run that have a number, the newest ones last."""
    shown = [
        ShownEvaluation(line["title"][:MAX_TITLE], [*evaluation_rows(line["result"])])
        for line in read_objects(folder)
    ]
    return [evaluation for evaluation in shown[-MAX_KEPT:] if evaluation.rows]


def read_objects(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of the file that have a title and a result; others are left out."""
    with suppress(LlamatrainError):
        for line in read_limited(
            folder / EVALUATIONS, 2 * MAX_KEPT * MAX_LINE, "a file of a run"
        ).splitlines():
            with suppress(ValueError, RecursionError):
                value = json.loads(line)
                match value:
                    case {"title": str(), "result": dict()}:
                        yield value
