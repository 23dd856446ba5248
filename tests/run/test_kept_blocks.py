"""Blocks that predict several tokens: they are not trained, and stay in the file."""

from pathlib import Path

import numpy as np
import pytest

from llamatrain.gguf.reader import open_gguf
from tests.helpers.architecture_models import keys, shape_of, weights, written
from tests.helpers.architecture_runs import data
from tests.helpers.cli import ran, run, tensors

EXTRA = {  # as llama.cpp's converter names them
    "blk.4.nextn.eh_proj.weight": np.linspace(-1, 1, 48 * 96).astype(np.float32).reshape(48, 96),
    "blk.4.nextn.enorm.weight": np.ones(48, np.float32),
    "blk.4.attn_norm.weight": np.full(48, 1.5, np.float32),
}


def base(folder: Path, count: int = 5, extra: int = 1) -> Path:
    """Write a model of four blocks, and one behind them."""
    shape = shape_of("qwen35", "a")
    metadata = keys(shape) | {"block_count": count, "nextn_predict_layers": extra}
    return written(folder / "base.gguf", shape, weights(shape) | EXTRA, metadata)


def check_kept(path: Path) -> None:
    """Compare the kept tensors and the number of blocks with the base's."""
    found, values = tensors(path), open_gguf(path).metadata
    for name, array in EXTRA.items():
        assert np.array_equal(found[name], array), name
    assert values["qwen35.block_count"] == 5 and values["qwen35.nextn_predict_layers"] == 1


def test_full_training_keeps_them(tmp_path: Path) -> None:
    given = ("--full", "--ctx", 32, "--batch", 2, "--lr", 1e-3)
    done = ran("finetune", base(tmp_path), data(tmp_path), *given, "--iters", 2, "--out", tmp_path / "run")
    assert "left out" not in done.err
    check_kept(tmp_path / "run" / "model.gguf")
    ran("finetune", "--resume", tmp_path / "run", "--iters", 4)
    check_kept(tmp_path / "run" / "model.gguf")


def test_a_merge_keeps_them(tmp_path: Path) -> None:
    model = base(tmp_path)
    ran("finetune", model, data(tmp_path), "--ctx", 32, "--iters", 2, "--out", tmp_path / "run")
    ran("export-lora", model, "--lora", tmp_path / "run" / "adapter.gguf", "--out", tmp_path / "merged.gguf")
    check_kept(tmp_path / "merged.gguf")


@pytest.mark.parametrize("arch", ["glm4moe", "bailingmoe2"])
def test_training_of_experts_keeps_them(arch: str, tmp_path: Path) -> None:
    """Train a model of three blocks, with one behind them."""
    shape = shape_of(arch, "a")
    extra = {name.replace("blk.4", "blk.3"): array for name, array in EXTRA.items()}
    metadata = keys(shape) | {"block_count": 4, "nextn_predict_layers": 1}
    model = written(tmp_path / "base.gguf", shape, weights(shape) | extra, metadata)
    given = ("--full", "--ctx", 32, "--batch", 2, "--lr", 1e-3, "--iters", 2)
    ran("finetune", model, data(tmp_path), *given, "--out", tmp_path / "run")
    trained = tmp_path / "run" / "model.gguf"
    found, values = tensors(trained), open_gguf(trained).metadata
    assert all(np.array_equal(found[name], array) for name, array in extra.items())
    assert values[f"{arch}.block_count"] == 4 and values[f"{arch}.nextn_predict_layers"] == 1


def test_a_damaged_count_is_refused(tmp_path: Path) -> None:
    refused = run("inspect", base(tmp_path, count=4, extra=4))
    assert "nextn_predict_layers must be less than the 4 blocks (got 4)" in " ".join(
        (refused.out + refused.err).split()
    )


def test_a_list_of_recurrent_blocks_must_be_periodic(tmp_path: Path) -> None:
    shape = shape_of("qwen35", "a")
    for marks, code in (([True, False, True, False], 0), ([True, True, False, False], 1)):
        metadata = keys(shape) | {"attention.recurrent_layers": marks}
        model = written(tmp_path / "model.gguf", shape, weights(shape), metadata)
        done = run("plan", "finetune", model, data(tmp_path))
        assert done.code == code and ("other patterns are not supported" in done.err) == (code > 0)
