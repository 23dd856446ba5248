"""Models for embeddings beside transformers and llama.cpp."""

from pathlib import Path

import numpy as np
import pytest

from llamatrain.kernels.reference import KERNELS, gates
from tests.helpers.architecture_models import weights, written
from tests.helpers.embedding_models import CASES, EMBEDDERS, IDS, model, run, told
from tests.helpers.llama_cpp import served
from tests.interop.test_architectures_llama_cpp import in_half_floats
from tests.model.test_embedding_models import TRUTH, agrees


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("arch", "name"), CASES)
def test_the_golden_values_are_those_of_transformers(arch: str, name: str) -> None:
    pytest.importorskip("transformers")
    found, truth = told(EMBEDDERS[arch][name]), TRUTH[f"{arch}-{name}"]
    assert found["hidden"] == pytest.approx(truth["hidden"], abs=1e-5)
    agrees(found["gradients"], truth["gradients"])


@pytest.mark.llama_cpp
@pytest.mark.parametrize(("arch", "name"), CASES)
def test_embeddings_of_llama_cpp(
    arch: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each token, and of a whole text; llama.cpp's gelu is a table of half floats, which is used here too."""
    shape = EMBEDDERS[arch][name]
    path = written(tmp_path / "model.gguf", shape, weights(shape))
    rounded = in_half_floats(KERNELS["gelu"])
    monkeypatch.setattr(gates, "gelu", rounded)
    monkeypatch.setitem(KERNELS, "gelu", rounded)
    hidden = run(*model(tmp_path, shape), [IDS], kernels="reference")[0]
    for pooling, expected in (("none", hidden), ("mean", hidden.mean(0, keepdims=True))):
        with served(path, pooling=pooling) as server:
            (answer,) = server.post("embedding", content=IDS, embd_normalize=-1)
        off = np.abs(np.array(answer["embedding"]) - expected)
        assert off.max() <= 2e-3 and off.mean() <= 5e-5, pooling
