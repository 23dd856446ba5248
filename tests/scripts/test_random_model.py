"""Tests of scripts/random_model.py: models, and invalid sizes that are refused with one line."""

import runpy
import sys
from pathlib import Path

import pytest

from llamatrain.gguf.reader import open_gguf

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "random_model.py"


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])  # as Python does
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(monkeypatch, tmp_path / "m.gguf", "--shape", "small", "--vocab", 300, "--layer", 1)
    assert open_gguf(tmp_path / "m.gguf").tensors["token_embd.weight"].shape == (300, 256)


@pytest.mark.parametrize(
    "sizes",
    [
        "--head 0",
        "--head 3",
        "--head-kv 3",
        "--embd 96 --head 32",
        "--ff 100",
        "--ff 0",
        "--vocab 5",
        "--vocab 99999999999",
        "--layer -1",
        "--layer 99999",
        "--seed -1",
        "--type q4_k --embd 64",
        "--vocab-from none.gguf",
    ],
)
def test_what_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sizes: str
) -> None:
    with pytest.raises(SystemExit) as end:
        run_script(monkeypatch, tmp_path / "m.gguf", "--shape", "small", *sizes.split())
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_peer_of_the_bench_needs_nothing_of_ours() -> None:
    """Check the imports: its Python has transformers and PEFT, and may lack our dependencies."""

    def imports(script: str) -> set[str]:
        lines = (SCRIPT.parent / "bench" / script).read_text().splitlines()
        return {line.split()[1] for line in lines if line.startswith(("import ", "from "))}

    unavailable = ("llamatrain", "tests", "numba", "numpy")
    modules = imports("peers/peft_step.py") | imports("peers/peft_chats.py") | imports("synthetic_chats.py")
    assert {name for name in modules if name.startswith("bench")} == {"bench.shapes", "bench.synthetic_chats"}
    assert not [name for name in modules if name.startswith(unavailable)]
    assert not imports("shapes.py") and not imports("__init__.py") and not imports("peers/__init__.py")
