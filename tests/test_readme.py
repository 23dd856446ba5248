"""What the README says is so."""

import re
import sys
from pathlib import Path

from llamatrain.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_table_of_options_is_the_one_that_is_declared() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from options import table
    finally:
        sys.path.pop(0)
    assert table() in README, "print it with scripts/options.py"


def test_every_command_is_told_of() -> None:
    assert not [name for name in COMMANDS if f"llamatrain {name}" not in README]


def test_no_command_is_told_of_that_is_not_there() -> None:
    told = set(re.findall(r"^    llamatrain ([a-z-]+)", README, re.MULTILINE))
    assert told - {*COMMANDS} == set()


def test_every_file_that_is_named_is_there() -> None:
    named = re.findall(r"`((?:configs|scripts|llamatrain)/[\w./-]*)`", README)
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]
