"""The example learns its digits with both nets, saves them, and reads MNIST's files."""

from pathlib import Path

import numpy as np
import pytest

from llamatrain.custom import evaluate, fit
from scripts import digits
from tests.helpers.idx_files import idx_bytes


@pytest.mark.parametrize(("net", "count", "epochs"), [("dense", 3000, 4), ("conv", 1500, 4)])
def test_a_net_learns(net: str, count: int, epochs: int) -> None:
    graph, unseen = digits.NETS[net](), digits.draw_digits(500, 7)
    before = evaluate(graph, unseen)
    assert before.accuracy is not None and before.accuracy < 0.3
    result = fit(graph, digits.draw_digits(count, 0), epochs=epochs, lr=2e-3)
    after = evaluate(graph, unseen)
    assert after.accuracy is not None and after.accuracy > 0.9
    assert after.loss < 0.4 < before.loss and result.training.loss < result.epochs[0].training.loss


def test_the_script_saves_what_it_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digits, "DRAWN", (1000, 200))
    digits.main(["dense", "--epochs", "2", "--out", str(tmp_path / "digits.gguf")])
    shown = capsys.readouterr()
    assert shown.err.startswith("epoch 1: loss ") and "epoch 2: " in shown.err and "validation: " in shown.err
    loaded = digits.build_dense()
    loaded.load(tmp_path / "digits.gguf")
    assert f"{evaluate(loaded, digits.draw_digits(200, 1))} on 200 other digits" in shown.out


def test_the_script_reads_mnist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part, count in (("train", 150), ("t10k", 60)):
        drawn = digits.draw_digits(count, 3)
        pixels = np.clip(255 * drawn.inputs["input"], 0, 255).astype(np.uint8)
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(pixels))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(drawn.targets.astype(np.uint8)))
    digits.main(["conv", "--data", str(tmp_path), "--epochs", "1", "--out", str(tmp_path / "digits.gguf")])
    assert "on 60 other digits" in capsys.readouterr().out
    assert digits.read_mnist(tmp_path, "train").inputs["input"].max() <= 1
