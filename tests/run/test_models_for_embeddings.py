"""Commands that need a model that predicts text refuse one for embeddings; those that look at a file or convert it do not."""

from pathlib import Path

import numpy as np
import pytest

from llamatrain.gguf.reader import open_gguf
from llamatrain.model.architectures import find_architecture, supported_names, text_model_names
from llamatrain.model.options import ModelOptions
from tests.helpers import architecture_runs as runs
from tests.helpers.architecture_family import Numbers
from tests.helpers.architecture_models import keys, shape_of, weights, written
from tests.helpers.cli import ran, run, text_file
from tests.helpers.embedding_models import EMBEDDERS
from tests.helpers.errors import raises

ARCH = "gemma-embedding"
SHAPE = EMBEDDERS[ARCH]["a"]
COMMANDS = {
    "finetune": "finetune {base} {data} --out {out}",
    "finetune all weights": "finetune {base} {data} --full --out {out}",
    "plan": "plan finetune {base} {data}",
    "from scratch": "from-scratch {text} --arch gemma-embedding --vocab-size bytes --out {out}",
    "generate": "generate {base} --prompt a",
    "evaluate": "evaluate {base} {data}",
    "a teacher": "finetune {other} {data} --full --teacher {base} --out {out}",
    "a comparison of logits": "export-lora {base} --type f16 --check text --out {out}",
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model with the matrices that some files have behind the body."""
    random, width = np.random.default_rng(8), SHAPE.embd
    dense = {
        "dense_2.weight": random.standard_normal((2 * width, width), np.float32),
        "dense_3.weight": random.standard_normal((width, 2 * width), np.float32),
    }
    sizes: Numbers = {"dense_2_feat_in": width, "dense_2_feat_out": 2 * width}
    sizes |= {"dense_3_feat_in": 2 * width, "dense_3_feat_out": width}
    return written(tmp_path / "embedder.gguf", SHAPE, weights(SHAPE) | dense, keys(SHAPE) | sizes)


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_refused(name: str, base: Path, tmp_path: Path) -> None:
    """In one line, and before anything is written."""
    places = {"base": base, "data": runs.data(tmp_path), "text": text_file(tmp_path), "out": tmp_path / "out"}
    places["other"] = runs.base(tmp_path, shape_of("llama", "a"))
    words = [word.format(**places) for word in COMMANDS[name].split()]
    done = run(*words)
    *notes, error = done.err.splitlines()
    assert done.code and all(note.startswith("note: ") for note in notes), done.err
    assert error.startswith("error: ") and error.endswith("[predicts-no-text]")
    assert "(got gemma-embedding, which is for embeddings); use another" in error
    assert not (tmp_path / "out").exists()


def test_it_can_be_looked_at_and_converted(base: Path, tmp_path: Path) -> None:
    """What is behind the body is kept."""
    told = ran("inspect", base).out
    assert ARCH in told and "dense_2.weight" in told and "all of it" not in told
    out = tmp_path / "q.gguf"
    done = ran("export-lora", base, "--type", "f16", "--out", out)
    assert "dense_2.weight and 1 more" in done.out + done.err
    before, after = open_gguf(base), open_gguf(out)
    assert before.tensors.keys() == after.tensors.keys()
    assert after.tensors["blk.0.attn_q.weight"].type.name == "F16"
    assert after.metadata[f"{ARCH}.pooling_type"] == 1 and after.metadata[f"{ARCH}.attention.causal"] is False


def test_no_new_model_is_one() -> None:
    causal = {name for name in supported_names() if find_architecture(name).causal}
    assert ARCH not in causal == {*text_model_names()}
    with raises("predicts-no-text"):
        ModelOptions(arch=ARCH).architecture()
