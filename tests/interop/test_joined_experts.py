"""Files with one stack for gates and values of experts: beside the same models with two, llama.cpp and PEFT."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.adapters import gguf, peft
from llamatrain.adapters.adapter import Adapter
from llamatrain.adapters.read import read_adapter
from llamatrain.gguf.reader import open_gguf
from llamatrain.model.architectures import find_architecture
from llamatrain.model.experts import JOINED
from tests.helpers import architecture_runs as runs
from tests.helpers import architecture_torch as theirs
from tests.helpers import parameter_adapters as parameters
from tests.helpers.architecture_models import SHAPES, mixtures, prompt, shape_of, weights, wide, written
from tests.helpers.architectures import FAMILIES
from tests.helpers.cli import ran, run
from tests.helpers.llama_cpp import served
from tests.helpers.small_models import Arrays, loaded
from tests.interop.test_architecture_adapters import both, last, whole
from tests.interop.test_architectures_llama_cpp import letters, log_softmax, said

IDS = prompt()
JOINABLE = [
    arch
    for arch, shapes in SHAPES.items()
    if JOINED in find_architecture(shapes["a"].file_arch).weights and hasattr(shapes["a"], "experts")
]


def pair_of_shapes(arch: str, at: Any = shape_of) -> tuple[Any, Any]:
    """Return a shape whose experts have two stacks, and one whose experts have one."""
    shape: Any = at(arch, "a")
    return replace(shape, joined_stacks=False), replace(shape, joined_stacks=True)


def join(arrays: Arrays) -> Arrays:
    """Return weights with one stack for gates and values."""
    found = {}
    for name, array in arrays.items():
        if "ffn_gate_exps" in name:
            values = arrays[name.replace("gate", "up")]
            found[name.replace("gate", "gate_up")] = np.concatenate([array, values], axis=1)
        elif "ffn_up_exps" not in name:
            found[name] = array
    return found


def strong(shape: Any) -> Adapter:
    """Return an adapter of all experts and routers."""
    return runs.adapter_of(shape, runs.factors(shape, names=mixtures(shape))).scale_by(1.5)


@pytest.mark.parametrize("arch", JOINABLE)
def test_beside_two_stacks(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare logits, the gradients of all weights, and those of an adapter whose factor A both stacks share."""
    split, joined = pair_of_shapes(arch)
    arrays = weights(split, last=1.0)
    monkeypatch.setattr(runs, "weights", lambda shape, last: join(arrays) if shape.joined_stacks else arrays)
    folders = [tmp_path / name for name in ("split", "joined")]
    for folder in folders:
        folder.mkdir()
    logits = [whole(runs.base(folder, shape)) for folder, shape in zip(folders, (split, joined), strict=True)]
    assert np.array_equal(*logits)
    grads = [
        runs.full_gradients(folder, shape) for folder, shape in zip(folders, (split, joined), strict=True)
    ]
    for name, grad in join(grads[0]).items():
        assert np.abs(grads[1][name] - grad).max() <= 1e-5 * np.abs(grad).max(), name
    pairs = parameters.share_factors(runs.factors(split, names=mixtures(split)))
    first = {
        name: (pairs[name.replace("gate_up", "gate")][0], b)
        for name, b in join({name: b for name, (_, b) in pairs.items()}).items()
    }
    before = runs.lora_gradients(folders[0], split, made=pairs)
    after = runs.lora_gradients(folders[1], joined, made=first)
    for name, b in join({name: b for name, (_, b) in before.items()}).items():
        names = [name.replace("gate_up", part) for part in ("gate", "up")] if "gate_up" in name else [name]
        a = np.sum([before[each][0] for each in names], axis=0)
        for found, expected in zip(after[name], (a, b), strict=True):
            assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max(), name


@pytest.mark.llama_cpp
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("arch", JOINABLE)
def test_adapters_in_llama_cpp(arch: str, kind: str, tmp_path: Path) -> None:
    """Compare an adapter beside a base, and merged into it."""
    _, shape = pair_of_shapes(arch, wide)
    path = tmp_path / "a.gguf"
    gguf.write_adapter(path, strong(shape))
    base = model = written(tmp_path / "base.gguf", shape, weights(shape))
    if kind != "f32":
        model = tmp_path / "quantized.gguf"
        ran("export-lora", base, "--type", kind, "--out", model)
        assert open_gguf(model).tensors[JOINED.format(1)].type.name == kind.upper()
    with served(model, adapter=path) as server:
        follow, expected = letters(server, IDS)
    with served(model) as server:
        _, plain = letters(server, IDS, 1)
    made = read_adapter(path, loaded(open_gguf(model))[0])
    off, change = np.abs(said(both(model, [made])[0], IDS, follow) - expected), np.abs(plain[0] - expected[0])
    near = 0.1 if kind != "f32" else 5e-3 if FAMILIES[arch].half_float_gelu else 1e-4
    assert off.mean() <= near * change.mean() and change.max() > 1
    ran("export-lora", base, "--lora", path, "--type", kind, "--out", tmp_path / "merged.gguf")
    found = last(tmp_path / "merged.gguf")
    with served(tmp_path / "merged.gguf") as server:
        _, told = letters(server, IDS, 1)
    assert np.abs(found - last(base, made)).mean() <= near * change.mean()
    assert np.abs(told[0] - log_softmax(found)).mean() <= 0.05 * change.mean()


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", JOINABLE)
def test_peft(arch: str, tmp_path: Path) -> None:
    """PEFT has the same parameter, whose pair is read and written as it is."""
    library, (_, shape) = pytest.importorskip("peft"), pair_of_shapes(arch)
    base = written(tmp_path / "base.gguf", shape, weights(shape))
    h, _ = loaded(open_gguf(base))
    made = strong(shape)
    peft.write_peft(tmp_path / "p", made, "", h)
    held = library.PeftModel.from_pretrained(theirs.model(shape, weights(shape)), os.fspath(tmp_path / "p"))
    expected = theirs.logits(held, IDS)
    assert np.abs(whole(base, made) - expected).max() < 1e-3 < 0.3 < np.abs(whole(base) - expected).max()
    held.save_pretrained(os.fspath(tmp_path / "again"))
    for folder in ("p", "again"):
        back = read_adapter(tmp_path / folder, h)
        assert back.pairs.keys() == made.pairs.keys()
        for name in made.pairs:
            np.testing.assert_allclose(back.delta(name), made.delta(name), atol=1e-5)


def test_adapters_of_the_other_kind(tmp_path: Path) -> None:
    """One line says that a base has no such stacks."""
    split, joined = pair_of_shapes("qwen35moe")
    gguf.write_adapter(tmp_path / "a.gguf", strong(split))
    base = written(tmp_path / "base.gguf", joined, weights(joined))
    done = run("export-lora", base, "--lora", tmp_path / "a.gguf", "--out", tmp_path / "out.gguf")
    assert done.code == 1 and "ffn_gate_exps.weight" in done.err and "\n" not in done.err.strip()
