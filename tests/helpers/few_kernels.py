"""A library of a few kernels, built once, and a copy of it in the place of what came with the package, for a test to spoil."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llamatrain.compiler import prebuilt
from llamatrain.platform import cpu
from tests.helpers.cli import ROOT, environment

THREADS, GATES, MERGING = (
    "llamatrain.compiler.thread_pool",
    "llamatrain.kernels.cpu.gates",
    "llamatrain.data.tokenizer.bpe_merge",
)
FEW = sorted(
    [
        f"{MERGING}:word_keys",
        f"{GATES}:silu_flat",
        *(f"{THREADS}:{name}" for name in ("open_table", "help_leader", "run_table")),
    ]
)
NAME = cpu.processor().name

BUILD = """
import sys
sys.path.insert(0, "scripts")
import build_kernels
from llamatrain.compiler import prebuilt
every = build_kernels.list_compilables()
build_kernels.list_compilables = lambda: [each for each in every if each.qualified_name in {few}]
prebuilt.FOLDER.mkdir()
sys.argv = ["build_kernels", "--here", "{name}"]
build_kernels.main()
build_kernels.write_manifest(["{name}"])
"""


def made(folder: Path, seed: str) -> Path:
    words = [sys.executable, "-c", BUILD.format(few=FEW, name=NAME)]
    more = {prebuilt.LIBRARIES_VARIABLE: str(folder), "PYTHONHASHSEED": seed}
    subprocess.run(words, env=environment(**more), cwd=ROOT, check=True, capture_output=True)
    return closed(folder)


def closed(folder: Path) -> Path:
    """To others, whatever the mask of whoever runs these tests."""
    for each in (folder, folder.parent, *folder.iterdir()):
        each.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of a few functions, in a folder of which nothing is changed."""
    return made(tmp_path_factory.mktemp("few") / "libraries", "1")


@pytest.fixture
def folder(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which this process takes for what came with the package."""
    place = tmp_path / "package" / "libraries"
    shutil.copytree(few, place)
    monkeypatch.setattr(prebuilt, "FOLDER", closed(place))
    return place


def flipped(path: Path) -> None:
    code = bytearray(path.read_bytes())
    code[len(code) // 2] ^= 4
    path.write_bytes(code)
