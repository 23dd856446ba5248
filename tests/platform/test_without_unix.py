"""Where a system has no fcntl and no resource, as Windows, the package is there all the same."""

import subprocess
import sys
from pathlib import Path

from tests.helpers.cli import environment, text_file

BLOCKED = """
import sys
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
"""
MODULES = (
    BLOCKED
    + """
import importlib, pkgutil
import llamatrain
for each in pkgutil.walk_packages(llamatrain.__path__, "llamatrain."):
    if not {"__main__", "torch"} & {*each.name.split(".")}:  # torch need not be installed
        importlib.import_module(each.name)
"""
)
HELD = (
    BLOCKED
    + """
from pathlib import Path
from llamatrain.errors import FileError
from llamatrain.checkpoints.run_folder import RunFolder
place = Path(sys.argv[1])
with RunFolder.create(place, "finetune") as run:
    try:
        RunFolder(place)
    except FileError as error:
        print(error)
print(sorted(file.name for file in place.iterdir()))
made = RunFolder.create(place / "new", "finetune")
made.undo()
print((place / "new").exists())
"""
)
RUN = (
    BLOCKED
    + """
sys.argv = ["llamatrain", *sys.argv[1:]]
from llamatrain.cli.main import main
main()
"""
)


def said(source: str, *arguments: object) -> str:
    words = [sys.executable, "-c", source, *map(str, arguments)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_is_imported() -> None:
    said(MODULES)


def test_one_run_at_a_time_and_nothing_stays(tmp_path: Path) -> None:
    told, left, made = said(HELD, tmp_path / "run").splitlines()
    assert (
        told
        == f"{tmp_path / 'run'}: another run is using this folder; choose another one, or wait until it ends"
    )
    assert left == "[]" and made == "False"


def test_a_run(tmp_path: Path) -> None:
    shape = (
        "--vocab-size",
        "bytes",
        "--embd",
        32,
        "--head",
        4,
        "--layer",
        1,
        "--ctx",
        32,
        "--iters",
        2,
        "--precision",
        "f32",
    )
    said(RUN, "from-scratch", text_file(tmp_path, 3000), *shape, "--out", tmp_path / "run")
    assert (tmp_path / "run" / "model.gguf").exists()
