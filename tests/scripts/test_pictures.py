"""Tests of scripts/pictures.py, which makes the pictures of README."""

import re
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.helpers.cli import ROOT, ran

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import pictures

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(pictures, "PICTURES", tmp_path / "out")
    return tmp_path / "out"


def words(picture: Path) -> str:
    return " ".join(
        "".join(element.itertext()) for element in ET.fromstring(picture.read_text()).iter(f"{SVG}text")
    ).replace("\xa0", " ")


def test_the_memory_map_is_that_of_plan(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pictures

    monkeypatch.chdir(tmp_path)

    def run_here(*words: str | Path, folder: Path) -> None:
        ran(*words)

    monkeypatch.setattr(pictures, "run_llamatrain", run_here)
    pictures.memory(tmp_path)
    there = ROOT / "scripts" / "pictures" / "memory.svg"
    assert (
        "vocabulary 4096" in words(out / "memory.svg")
        and words(there).split()[:9] == words(out / "memory.svg").split()[:9]
    )


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed")
@pytest.mark.skipif(
    not (Path(sys.prefix) / "bin" / "llamatrain").exists(), reason="the command is not installed here"
)
def test_the_demo_s_terminal_is_that_of_a_run(out: Path, tmp_path: Path) -> None:
    from pictures import demo

    demo(tmp_path)
    text = words(out / "demo.svg")
    assert (
        "the built-in sine wave" in text
        and "target" in text
        and re.search(r"1\d\d/1000", text)
        and "planned" in text
    )


def test_what_is_missing_is_said(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pictures import report

    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"^error: chromium was not found; apt-get install chromium$"):
        report(out)
