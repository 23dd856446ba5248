"""The command, the Python API and the cache."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import llamatrain
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.safetensors import write_safetensors
from llamatrain.gguf.values import Value
from llamatrain.importing import tokenizer
from llamatrain.importing.cache import cached_import
from llamatrain.importing.mxfp4 import MXFP4, join_blocks
from tests.helpers.architecture_models import weights
from tests.helpers.architectures import FAMILIES
from tests.helpers.errors import raises
from tests.helpers.tiny_gguf import llama_metadata
from tests.helpers.transformers_folders import config, state, write_folder

SHAPE = FAMILIES["llama"].shapes["a"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose tokenizer is one of bytes."""

    def read(folder: Path, arch: str, size: int) -> Mapping[str, Value]:
        return {key: value for key, value in llama_metadata().items() if key.startswith("tokenizer.")}

    monkeypatch.setattr(tokenizer, "tokenizer_metadata", read)
    return write_folder(tmp_path / "folder", config(SHAPE), state(SHAPE, weights(SHAPE)))


@pytest.mark.parametrize(("kind", "expected"), [("auto", "F16"), ("bf16", "BF16"), ("f32", "F32")])
def test_types(folder: Path, tmp_path: Path, kind: str, expected: str) -> None:
    done = llamatrain.import_model(folder, out=tmp_path / "out.gguf", type=kind)  # type: ignore[arg-type]
    gguf = open_gguf(done.path)
    assert (done.tensors, done.architecture) == (len(gguf.tensors), "llama")
    assert gguf.tensors["blk.0.attn_q.weight"].type.name == expected
    assert gguf.tensors["blk.0.attn_norm.weight"].type.name == "F32"
    assert "tokenizer.ggml.tokens" in gguf.metadata
    assert gguf.metadata["general.name"] == "Folder"


def test_the_file_lies_beside_the_folder_and_is_not_replaced(folder: Path) -> None:
    assert llamatrain.import_model(folder).path == folder.with_name("folder.gguf")
    with raises("output-exists"):
        llamatrain.import_model(folder)
    llamatrain.import_model(folder, overwrite=True)


def test_a_failure_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    tensors = state(SHAPE, weights(SHAPE))
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.inf
    write_safetensors(folder / "model.safetensors", tensors)
    before = {*tmp_path.iterdir()}
    with pytest.raises(llamatrain.LlamatrainError):
        llamatrain.import_model(folder, out=tmp_path / "out.gguf", type="q8_0")
    assert {*tmp_path.iterdir()} == before


def test_the_cache_has_one_file_until_the_folder_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path / "cache"))
    first = cached_import(folder)
    written = first.stat().st_ino
    assert cached_import(folder) == first
    assert first.stat().st_ino == written
    (folder / "config.json").write_text(json.dumps(config(SHAPE) | {"rms_norm_eps": 1e-3}))
    second = cached_import(folder)
    assert second != first
    assert open_gguf(second).metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-3)


def test_blocks_of_mxfp4() -> None:
    from llamatrain.gguf.quants import decode

    random = np.random.default_rng(1)
    packed = random.integers(0, 256, (3, 2, 16), np.uint8)
    scales = random.integers(120, 130, (3, 2), np.uint8)
    steps = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(3, 2, 32)  # as transformers unpacks them
    expected = steps[codes] * np.exp2(scales.astype(float) - 127)[..., None]
    found = decode(join_blocks(packed, scales).reshape(3, -1), MXFP4)
    np.testing.assert_array_equal(found, expected.reshape(3, 64))
