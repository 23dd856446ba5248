"""What a base has that its model has no use for: kept, named, or refused where the result would be another."""

from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters import gguf
from llamatrain.errors import FileError
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import Value, f32, u32
from llamatrain.model.hyperparameters import read_hyperparameters
from tests.helpers.adapter_files import adapter, linear
from tests.helpers.cli import ran
from tests.helpers.small_models import Arrays, small, weights, written

H = small()
EXTRA: Arrays = {
    "mm.projector.weight": np.ones((4, 8), np.float32),
    "blk.0.attn_rot_embd.weight": np.ones(8, np.float32),
}
KEYS: dict[str, Value] = {"llama.made_up": u32(7), "others.key": f32(1.5)}


def base(folder: Path, extra: Arrays = EXTRA) -> Path:
    return written(folder / "base.gguf", H, weights(H) | extra, more=KEYS)


def test_it_is_named(tmp_path: Path) -> None:
    shown = " ".join(ran("inspect", base(tmp_path)).out.split())
    assert "not used here keys llama.made_up tensors mm.projector.weight, blk.0.attn_rot_embd.weight" in shown
    assert "not used here" not in ran("inspect", written(tmp_path / "plain.gguf", H, weights(H))).out


def test_it_is_kept_by_a_merge(tmp_path: Path) -> None:
    gguf.write_adapter(tmp_path / "a.gguf", adapter(H, linear(H)))
    done = ran("export-lora", base(tmp_path), "--lora", tmp_path / "a.gguf", "--out", tmp_path / "m.gguf")
    assert (
        "note: mm.projector.weight and 1 more: no part of the model as it is known here; kept as they are"
        in done.err
    )
    found = open_gguf(tmp_path / "m.gguf")
    for name, array in EXTRA.items():
        np.testing.assert_array_equal(found.tensors[name].raw.view(np.float32).reshape(array.shape), array)
    assert {key: found.metadata[key] for key in KEYS} == {"llama.made_up": 7, "others.key": 1.5}


def test_full_training_says_what_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("to be or not to be " * 20)
    words = ("--full", "--iters", 1, "--ctx", 16, "--batch", 1, "--out", tmp_path / "run")
    done = ran("finetune", base(tmp_path), tmp_path / "t.txt", *words)
    assert (
        "mm.projector.weight and 1 more: no part of the model as it is known here; left out of model.gguf"
        in done.err
    )
    assert open_gguf(tmp_path / "run" / "model.gguf").metadata["llama.made_up"] == 7


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q_norm.weight",
        "blk.1.ffn_gate_inp.weight",
        "blk.2.attn_q.weight",
        "output.bias",
        "token_embd_norm.weight",
    ],
)
def test_what_would_be_part_of_it_is_refused(name: str, tmp_path: Path) -> None:
    path = base(tmp_path, {name: np.ones(64, np.float32)})
    with pytest.raises(FileError, match=f"base.gguf: '{name}' is not a weight of a llama$"):
        read_hyperparameters(open_gguf(path))
    assert f"all of it '{name}' is not a weight of a llama" in " ".join(ran("inspect", path).out.split())
