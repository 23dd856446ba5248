"""Vectors that a file has as a matrix with one row, as some converters write them, are those of a file with vectors."""

from pathlib import Path

import numpy as np
import pytest

from llamatrain.gguf.reader import open_gguf
from llamatrain.sample.decoder import Decoder
from tests.helpers.architecture_family import CTX
from tests.helpers.architecture_models import prompt, weights, written
from tests.helpers.architectures import FAMILIES
from tests.helpers.small_models import loaded

MATRICES = ("ffn_gate_inp_shexp.weight", "exp_probs_b.bias")
SHAPES = {arch: family.shapes["a"] for arch, family in FAMILIES.items()}
ARCHITECTURES = [
    arch for arch, shape in SHAPES.items() if any(name.endswith(MATRICES) for name in weights(shape))
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_matrix_with_one_row_is_a_vector(arch: str, tmp_path: Path) -> None:
    arrays = weights(SHAPES[arch])
    rows = {name: array[None] if name.endswith(MATRICES) else array for name, array in arrays.items()}
    plain, other = (
        open_gguf(written(tmp_path / name, SHAPES[arch], each))
        for name, each in (("plain.gguf", arrays), ("rows.gguf", rows))
    )
    changed = [name for name in rows if other.tensors[name].shape != plain.tensors[name].shape]
    assert changed and all(other.tensors[name].shape[0] == 1 for name in changed)
    for name, array in loaded(other)[1].items():
        np.testing.assert_array_equal(array, arrays[name])
    logits = [Decoder(*loaded(gguf), ctx=CTX).feed(prompt()).copy() for gguf in (plain, other)]
    np.testing.assert_array_equal(*logits)
