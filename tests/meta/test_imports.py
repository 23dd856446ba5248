"""Imports point down: a package imports itself and packages of lower layers only."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "llamatrain"
LAYERS = (
    ("__init__", "errors"),
    ("extensions",),
    ("config", "platform"),
    ("distributed", "io"),
    ("sources",),
    ("compiler",),
    ("gguf",),  # compiled code decodes quantized weights
    ("data", "graph", "rewards"),
    ("kernels", "model", "optim"),
    ("adapters", "contrastive", "engine", "grpo", "importing", "merging", "preference"),
    ("report", "sample"),
    ("custom", "train"),
    ("checkpoints", "planner"),
    ("run",),
    ("commands",),
    ("legacy",),
    ("ui",),
    ("api", "cli"),
    ("__main__",),
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def place(module: str) -> str:
    """The folder or file under the package's root that a module is in: llamatrain.graph.ops -> graph."""
    return module.split(".")[1] if "." in module else "__init__"


def imported(source: str, module: str, is_package: bool) -> set[str]:
    """Every module of the package that a source imports, at its head or late inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[
                    : None if is_package and node.level == 1 else -node.level + is_package
                ]
                base = ".".join([*parents, *filter(None, [base])])
            # `from llamatrain import graph` names a folder; `from llamatrain import __version__` does not
            under_root = base == "llamatrain"
            found.update(
                f"{base}.{alias.name}" if under_root and alias.name in RANKS else base for alias in node.names
            )
    return {name for name in found if name == "llamatrain" or name.startswith("llamatrain.")}


def offences(source: str, module: str, is_package: bool = False) -> list[str]:
    here = place(module)
    targets = {place(name) for name in imported(source, module, is_package)} - {here}
    targets -= {"api"} if here == "__init__" else set()  # the door that it opens
    return [f"{module} imports {there}" for there in sorted(targets) if RANKS[there] >= RANKS[here]]


def test_imports_point_down() -> None:
    found: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["llamatrain", *path.relative_to(PACKAGE).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        assert place(module) in RANKS, f"{module} has no rank"
        found += offences(path.read_text(), module, is_package)
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import llamatrain.engine.plan",
        "from llamatrain.engine import plan",
        "from llamatrain import engine",
        "from ..engine import plan",
        "from .. import engine",
        "def late():\n    from llamatrain.engine.plan import layout",
    ],
)
def test_an_import_that_points_up_is_found(source: str) -> None:
    assert offences(source, "llamatrain.graph.ops") == ["llamatrain.graph.ops imports engine"]
    assert not offences(source, "llamatrain.train.loop")
    assert not offences(source, "llamatrain.engine.program")


def test_folders_of_one_rank_stay_apart() -> None:
    assert offences("from llamatrain.optim import schedule", "llamatrain.model.transformer")
    assert offences("from ..optim import schedule", "llamatrain.model", is_package=True)
    assert not offences("from . import data", "llamatrain.model", is_package=True)
    assert not offences("from llamatrain.errors import UsageError", "llamatrain.platform.cpu")


def test_only_the_package_itself_opens_the_door() -> None:
    assert not offences("from llamatrain.api import load", "llamatrain", is_package=True)
    assert offences("from llamatrain.run.train import train", "llamatrain", is_package=True)
    assert offences("from llamatrain.api import load", "llamatrain.cli.main")
    assert offences("from llamatrain.cli.main import main", "llamatrain.api")
