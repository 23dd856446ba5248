"""Functions fit on a screen, and modules do not import each other in circles."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "llamatrain"
N = TypeVar("N", bound=ast.AST)
LONGEST_FUNCTION = 80  # lines


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]):
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def nodes_of(kind: type[N]) -> Iterator[tuple[str, N]]:
    for path, text in sources():
        yield from ((path, node) for node in ast.walk(ast.parse(text)) if isinstance(node, kind))


def test_functions_fit_on_a_screen() -> None:
    functions = nodes_of(ast.FunctionDef)
    assert not [
        f"{path}: {node.name}"
        for path, node in functions
        if (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
    ]


def test_no_line_asks_not_to_be_formatted() -> None:
    assert not [path for path, text in sources() if "fmt: skip" in text or "fmt: off" in text]


def test_nothing_depends_on_an_assertion() -> None:
    """With `python -O` assertions are not there: what they ask must have no effect, so none of them names or makes a value."""
    effects = (ast.NamedExpr, ast.Yield, ast.Await)
    assertions = nodes_of(ast.Assert)
    assert not [
        f"{path}:{node.lineno}"
        for path, node in assertions
        if any(isinstance(each, effects) for each in ast.walk(node))
    ]


# ---- imports go round nowhere -----------------------------------------------


def modules() -> dict[str, ast.Module]:
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ["llamatrain", *path.relative_to(PACKAGE).with_suffix("").parts]
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return names


def imports_of(tree: ast.AST, known: dict[str, ast.Module]) -> set[str]:
    """The modules of the package that are loaded with this one, or later by one of its functions; not those for types only."""
    found = set[str]()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in inner}
        found |= imports_of(node, known)
    return found & known.keys()


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, if there are any."""
    state = dict[str, int]()
    path = list[str]()

    def walk(name: str) -> list[str]:
        if state.get(name) == 1:
            return [*path[path.index(name) :], name]
        if name in state:
            return []
        state[name] = 1
        path.append(name)
        for other in sorted(edges[name]):
            if found := walk(other):
                return found
        path.pop()
        state[name] = 2
        return []

    return next((found for name in sorted(edges) if (found := walk(name))), [])


def test_no_module_is_imported_by_what_it_imports() -> None:
    known = modules()
    assert not circle({name: imports_of(tree, known) - {name} for name, tree in known.items()})


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "a"]
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})
