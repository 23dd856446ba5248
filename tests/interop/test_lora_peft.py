"""What `finetune --peft` writes, in PEFT itself."""

import os
from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters.gguf import parse_adapter
from llamatrain.gguf.reader import open_gguf
from tests.adapters.test_peft import H, our_logits, their_logits, theirs
from tests.helpers.adapter_files import merged
from tests.helpers.cli import Argument, ran, text_file
from tests.helpers.small_models import tokens, weights, written

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    "more", [(), ("--rslora", "--rank", "attn_k=3", "--target", "attn_k", "--target", "token_embd")]
)
def test_logits(tmp_path: Path, more: tuple[Argument, ...]) -> None:
    library = pytest.importorskip("peft")
    model, data = written(tmp_path / "base.gguf", H, weights(H)), text_file(tmp_path)
    given: tuple[Argument, ...] = ("--ctx", 32, "--iters", 20, "--lr", 1e-2, "--lora-alpha", 16, *more)
    ran("finetune", model, data, *given, "--peft", tmp_path / "theirs", "--out", tmp_path / "run")
    found = library.PeftModel.from_pretrained(theirs(H), os.fspath(tmp_path / "theirs"))
    ids = tokens(40)
    expected, plain = their_logits(found, ids), our_logits(weights(H), ids)
    ours = our_logits(merged(weights(H), [parse_adapter(open_gguf(tmp_path / "run" / "adapter.gguf"))]), ids)
    assert np.abs(ours - expected).max() < 1e-3 < 0.5 < np.abs(plain - expected).max()
