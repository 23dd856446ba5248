"""The training itself is arrays only: it knows no option, no path, no terminal, and nobody's name for them."""

import ast
import re
from pathlib import Path

import pytest

import llamatrain

TRAIN = sorted((Path(llamatrain.__file__).parent / "train").rglob("*.py"))
STRANGE = (
    "pathlib",
    "os",
    "sys",
    "rich",
    "typer",
    "click",
    "tomllib",
    "json",
    "llamatrain.config",
    "llamatrain.cli",
)
TOLD = "llamatrain.report.records"  # records of what happened; whoever shows them is handed in


def modules(source: str) -> set[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def strange(name: str) -> bool:
    told_of = name.startswith("llamatrain.report") and name != TOLD
    return (
        told_of
        or name.endswith(".options")
        or any(name == each or name.startswith(f"{each}.") for each in STRANGE)
    )


@pytest.mark.parametrize("file", TRAIN, ids=lambda file: file.stem)
def test_it_imports_nothing_of_the_kind(file: Path) -> None:
    source = file.read_text()
    assert not [name for name in modules(source) if strange(name)]
    assert not re.search(r"--[a-z]", source), "no flag is named"


def test_what_is_strange_is_seen() -> None:
    assert strange("os.path") and strange("llamatrain.data.options") and strange("llamatrain.report.report")
    assert not strange("llamatrain.report.records") and not strange("llamatrain.optim.schedule")
