"""A little of each kind of harm that `scripts/torture.py` does: nothing is lost, nothing hangs, and failures have words."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("kills", "disks", "inputs", "caches", "folders", "large", "live", "mutants")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first kind prepares is there for the others."""
    return tmp_path_factory.mktemp("torture")


def torture(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    program = [sys.executable, str(ROOT / "scripts" / "torture.py"), "--keep", str(place), *words]
    return subprocess.run(program, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize("kind", KINDS)
def test_a_little_of_each_kind_does_no_harm(kind: str, place: Path) -> None:
    done = torture(place, "--short", "--only", kind)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.splitlines()[-1].endswith("held")
