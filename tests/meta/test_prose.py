"""Docstrings and names read as plain English."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("llamatrain", "scripts")
WEAK_STARTS = frozenset(
    """what of whether where those as by with how which from who whoever whatever that it they these this each all so
    for to in on at about without when whose there""".split()  # noqa: SIM905
)
IDIOMS = re.compile(
    r"\b(told|said of|gone on|goes on with|go on with|beside|befall\w*|whoever|so many|so much as|the like|made again|that which|"
    r"be it|nothing but|no more than that|wants? to be|(is|are) of a)\b",
    re.IGNORECASE,
)
WEAK_NAMES = frozenset(
    """told said made found kept given led begun gone held seen met dealt parted foretold foreseen heeded owed laid
    bent taken asked answered resolved fitted judged weighed filled settled shown beside apart aside elsewhere around
    ahead otherwise instead behind outs odds together alone""".split()  # noqa: SIM905
)
# names in docstrings that belong to other modules
EXTERNAL_NAMES = frozenset("lora lora_scaled only_adapter peft logf gpt2 sum_sqr readme choices".split())  # noqa: SIM905
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def find_problems(source: str) -> Iterator[str]:
    """Yield what is wrong with the docstrings and names of a module."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Definition | ast.Module):
            continue
        name = "" if isinstance(node, ast.Module) else node.name
        if name.strip("_").lower() in WEAK_NAMES:
            yield f"{name}: the name is a participle or a preposition"
        if not (text := ast.get_docstring(node)):
            continue
        first = re.split(r"\W+", text.strip(), maxsplit=1)[0].lower()
        if first in WEAK_STARTS:
            yield f"{name}: the docstring does not begin with a verb or a noun ({first!r})"
        if idiom := IDIOMS.search(text):
            yield f"{name}: the docstring has an unusual idiom ({idiom[0]!r})"


def test_docstrings_and_names_are_plain() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    problems = [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in paths
        for problem in find_problems(path.read_text())
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "source",
    [
        '"""What fits."""',
        "def told():\n    pass",
        'def f():\n    """Return the files beside it."""',
        'class Found:\n    """Found."""',
    ],
)
def test_a_problem_is_found(source: str) -> None:
    assert list(find_problems(source))


def test_plain_prose_passes() -> None:
    source = '"""Read files."""\ndef read(path):\n    """Return the bytes of a file."""'
    assert not list(find_problems(source))


# ---- parameters that docstrings name ---------------------------------------


def find_unknown_names(source: str) -> Iterator[str]:
    """Yield identifiers in backticks in docstrings of functions that do not occur elsewhere in the module."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    texts = [(node.name, ast.get_docstring(node, clean=False) or "") for node in functions]
    rest = source
    for _, text in texts:
        rest = rest.replace(text, "") if text else rest
    known = set(re.findall(r"\w+", rest))
    for name, text in texts:
        for word in re.findall(r"`([A-Za-z_]\w*)`", text):
            if word not in known | EXTERNAL_NAMES:
                yield f"{name}: the docstring names `{word}`, which does not occur in the module"


def test_docstrings_name_what_exists() -> None:
    problems = [
        f"{path.relative_to(ROOT)}: {problem}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for problem in find_unknown_names(path.read_text())
    ]
    assert not problems, "\n".join(problems)


def test_an_unknown_name_is_found() -> None:
    source = 'def read(path):\n    """Return the bytes of a file.\n\n    `folder` is where it is.\n    """'
    assert list(find_unknown_names(source))
    assert not list(find_unknown_names(source.replace("`folder`", "`path`")))
