"""Norms whose weight has a row for each head are vectors: not decayed, not orthogonalized, not quantized."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters.gguf import parse_adapter
from llamatrain.gguf.reader import open_gguf
from llamatrain.graph.tensor import F32, parameter
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.optim.methods.muon import Muon
from tests.helpers import architecture_runs as runs
from tests.helpers.architecture_models import shape_of
from tests.helpers.cli import Argument, ran, tensors

NORM, MATRIX = "blk.0.attn_q_norm.weight", "blk.0.attn_q.weight"


def test_they_are_vectors_to_optimizers() -> None:
    norm, matrix = (parameter(name, (4, 10), F32) for name in (NORM, MATRIX))
    for rule in (AdamW(), Muon()):
        assert rule.decay_for(norm) == 0 < rule.decay_for(matrix)
    assert replace(AdamW(), decay_min_ndim=1).decay_for(norm) > 0
    assert Muon.has_state("v", NORM, (4, 10)) and not Muon.has_state("v", MATRIX, (4, 10))


@pytest.mark.parametrize("arch", ["command-r", "stablelm"])
def test_quantizing_keeps_them(arch: str, tmp_path: Path) -> None:
    shape = replace(shape_of(arch, "b"), heads=2, kv_heads=1, head_size=32, embd=64, ff=64)
    ran("export-lora", runs.base(tmp_path, shape), "--type", "q8_0", "--out", tmp_path / "q.gguf")
    types = {name: open_gguf(tmp_path / "q.gguf").tensors[name].type.name for name in (NORM, MATRIX)}
    assert types == {NORM: "F32", MATRIX: "Q8_0"}


@pytest.mark.parametrize("arch", ["command-r", "stablelm"])
def test_they_may_have_an_adapter(arch: str, tmp_path: Path) -> None:
    """If it is asked for; what it adds is in the merged model."""
    shape = shape_of(arch, "b")
    base, data = runs.base(tmp_path, shape), runs.data(tmp_path)
    given = ("--target", "norms", "--lora-r", 2, "--lr", 1e-2, "--iters", 3, *runs.PLAIN)
    ran("finetune", base, data, *given, "--out", tmp_path / "run")
    pair = parse_adapter(open_gguf(tmp_path / "run" / "adapter.gguf")).pairs[NORM]
    change = pair.scale * pair.b @ pair.a
    assert change.shape == (shape.heads, shape.head_size) and np.abs(change).max() > 1e-4
    ran("export-lora", base, "--lora", tmp_path / "run" / "adapter.gguf", "--out", tmp_path / "m.gguf")
    before, after = (tensors(path)[NORM] for path in (base, tmp_path / "m.gguf"))
    np.testing.assert_allclose(after, before + change, atol=1e-6)
    ways: tuple[tuple[Argument, ...], ...] = (
        (base, "--lora", tmp_path / "run" / "adapter.gguf"),
        (tmp_path / "m.gguf",),
        (base,),
    )
    together, merged, without = (
        json.loads(ran("evaluate", model, data, *more, "--json").out)["loss"] for model, *more in ways
    )
    assert together == pytest.approx(merged, abs=1e-5) != pytest.approx(without, abs=1e-3)
