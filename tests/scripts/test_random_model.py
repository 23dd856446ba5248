"""`scripts/random_model.py`: sizes that cannot be are refused in a line."""

import runpy
import sys
from pathlib import Path

import pytest

from llamatrain.gguf.reader import open_gguf

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "random_model.py"


def made(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])  # as Python does
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(monkeypatch, tmp_path / "m.gguf", "--shape", "small", "--vocab", 300, "--layer", 1)
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
        made(monkeypatch, tmp_path / "m.gguf", "--shape", "small", *sizes.split())
    told = capsys.readouterr().err
    assert end.value.code == 2 and told.startswith("error: ") and told.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_peer_of_the_bench_needs_nothing_of_ours() -> None:
    """Its Python has transformers and PEFT, and may have no compiler of kernels."""

    def imported(script: str) -> set[str]:
        lines = SCRIPT.with_name(script).read_text().splitlines()
        return {line.split()[1].partition(".")[0] for line in lines if line.startswith(("import ", "from "))}

    ours = {path.stem for path in SCRIPT.parent.glob("*.py")} | {"llamatrain", "tests", "numba"}
    assert imported("peft_step.py") & ours == {"shapes"} and not imported("shapes.py")
