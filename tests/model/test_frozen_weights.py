"""Which frozen weights are used as they lie in the file."""

from pathlib import Path

import numpy as np
import pytest

from llamatrain.gguf.reader import open_gguf
from llamatrain.model.frozen_weights import load_frozen
from llamatrain.model.hyperparameters import read_hyperparameters
from tests.helpers.architecture_models import weights, wide, written
from tests.helpers.cli import ran


@pytest.mark.parametrize(
    ("arch", "mapped", "decoded"),
    [
        ("gemma4", "per_layer_token_embd.weight", "blk.0.layer_output_scale.weight"),
        ("qwen35", "blk.0.ssm_out.weight", "blk.0.ssm_conv1d.weight"),
    ],
)
def test_only_small_weights_are_decoded(arch: str, mapped: str, decoded: str, tmp_path: Path) -> None:
    """A table of embeddings for each block is most of a small Gemma 4."""
    shape = wide(arch)
    base = written(tmp_path / "base.gguf", shape, weights(shape))
    ran("export-lora", base, "--type", "q4_0", "--out", tmp_path / "q4_0.gguf")
    gguf = open_gguf(tmp_path / "q4_0.gguf")
    leaves, arrays = load_frozen(gguf, read_hyperparameters(gguf))
    assert np.may_share_memory(arrays[mapped], gguf.tensors[mapped].raw)
    assert leaves[mapped].dtype.name == "q4_0"
    assert arrays[decoded].dtype == np.float32
    assert not np.may_share_memory(arrays[decoded], gguf.tensors[decoded].raw)
