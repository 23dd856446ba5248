"""Whole runs of every architecture: models trained in full and from scratch open in llama.cpp, rows may be packed, runs go on."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from llamatrain.gguf.reader import open_gguf
from llamatrain.model.architectures import find_architecture
from llamatrain.sample.decoder import Decoder
from tests.helpers import architecture_runs as runs
from tests.helpers.architecture_family import Shape
from tests.helpers.architecture_models import (
    BASIC,
    SHAPES,
    adaptable,
    full_key,
    keys,
    prompt,
    rows,
    shape_of,
    trainable,
)
from tests.helpers.architectures import FAMILIES
from tests.helpers.cli import Argument, losses, ran, same_bits, text, text_file, timeless
from tests.helpers.cli import rows as shown
from tests.helpers.llama_cpp import served
from tests.helpers.small_models import loaded
from tests.interop.test_architectures_llama_cpp import letters, likeliest, said

IDS = prompt()
NEW = [arch for arch in SHAPES if shape_of(arch, "a").file_arch == arch]  # of which new models can be made


def near(arch: str) -> float:
    """llama.cpp's gelu is a table of half floats."""
    return 5e-3 if FAMILIES[arch].half_float_gelu else 2e-3


def opens(model: Path, arch: str) -> None:
    """In llama.cpp, where it says what it says here."""
    h, arrays = loaded(open_gguf(model))
    with served(model) as server:
        follow, expected = letters(server, IDS)
    found = said(Decoder(h, arrays, ctx=64), IDS, follow)
    assert np.abs(found - expected).max() <= near(arch) and likeliest(found) == follow


class Trained(NamedTuple):
    """A model that a run has made, and for a fine-tuned one its base."""

    arch: str
    model: Path
    base: Path | None = None


@pytest.fixture(scope="module", params=SHAPES)
def full_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train all weights of a base."""
    folder = tmp_path_factory.mktemp(request.param)
    base = runs.base(folder, shape_of(request.param, "a"))
    given = ("--full", "--lr", 1e-2, "--iters", 5, "--precision", "f32", *runs.PLAIN)
    ran("finetune", base, runs.data(folder), *given, "--out", folder / "run")
    return Trained(request.param, folder / "run" / "model.gguf", base)


def test_full_training_keeps_keys_and_names(full_run: Trained) -> None:
    """The file has the base's keys and names, and another model."""
    assert full_run.base is not None
    shape = shape_of(full_run.arch, "a")
    before, after = open_gguf(full_run.base), open_gguf(full_run.model)
    assert after.tensors.keys() == before.tensors.keys()
    for key, value in keys(shape).items():
        held = after.metadata[full_key(shape, key)]
        held = held.tolist() if isinstance(held, np.ndarray) else held
        assert held == value if isinstance(value, str) else held == pytest.approx(value), key
    changed = [
        name
        for name in before.tensors
        if before.tensors[name].raw.tobytes() != after.tensors[name].raw.tobytes()
    ]
    assert set(changed) == {*trainable(shape)}


@pytest.mark.llama_cpp
def test_full_training_opens_in_llama_cpp(full_run: Trained) -> None:
    opens(full_run.model, full_run.arch)


@pytest.fixture(scope="module", params=NEW)
def new_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train a new model."""
    arch, folder = request.param, tmp_path_factory.mktemp(request.param)
    kv_heads = 2 if FAMILIES[arch].groups_heads else 4
    sizes = (
        "--vocab-size",
        "bytes",
        "--embd",
        48,
        "--head",
        4,
        "--head-kv",
        kv_heads,
        "--layer",
        4,
        "--ff",
        64,
    )
    filled = find_architecture(arch).heads_fill_width or FAMILIES[arch].fills_width
    own = () if filled else ("--head-size", 16)
    given = ("--ctx", 48, "--batch", 2, "--lr", 3e-3, "--iters", 30, "--seed", 3, "--precision", "f32")
    ran("from-scratch", text_file(folder), "--arch", arch, *sizes, *own, *given, "--out", folder / "run")
    return Trained(arch, folder / "run" / "model.gguf")


def test_from_scratch_learns(new_model: Trained) -> None:
    by_step = losses(new_model.model.parent)
    assert by_step[-1] < by_step[0] - 0.3
    assert open_gguf(new_model.model).get_value("general.architecture", str) == new_model.arch


@pytest.mark.llama_cpp
def test_from_scratch_opens_in_llama_cpp(new_model: Trained) -> None:
    with served(new_model.model) as server:
        theirs = server.post("completion", prompt="The ", n_predict=12, temperature=0.0)["content"]
    ours = ran("generate", new_model.model, "--prompt", "The ", "-n", 12, "--temp", 0).out
    assert theirs and ours.rstrip("\n").removeprefix("The ").rstrip("\ufffd") == theirs.rstrip("\ufffd")


# ---- before a run -----------------------------------------------------------


@pytest.mark.parametrize("arch", SHAPES)
def test_plans_and_what_is_told_of_a_base(arch: str, tmp_path: Path) -> None:
    shape = shape_of(arch, "b")
    base, data = runs.base(tmp_path, shape), runs.data(tmp_path)
    axes = {name: size for name, (_, size) in rows(shape).items()}
    every = sum(math.prod(size) for size in axes.values())
    factors = sum(runs.RANK * sum(axes[name]) for name in adaptable(shape))
    for trained, more in ((every, ("--full",)), (factors, ("--lora-r", runs.RANK))):
        plan = json.loads(ran("plan", "finetune", base, data, *runs.PLAIN, *more, "--json").out)
        assert plan["parameters"] == every and plan["moments"] == pytest.approx(8 * trained, rel=0.05)
    told, more = ran("inspect", base).out, FAMILIES[arch].tensors(shape)
    assert (
        f" {shape.file_arch} " in told
        and all(key in told for key in keys(shape))
        and f"{every + len(shape.long + shape.short) + sum(map(np.size, more.values())):,}" in told
    )


# ---- packed rows ------------------------------------------------------------


def short_pairs(folder: Path) -> Path:
    """Longer than windows, and several to a row."""
    path = folder / "short.jsonl"
    lines = ({"prompt": text(3 + n, 2 * n), "completion": text(13 - n, 2 * n + 1)} for n in range(4))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("flash", ["--flash", "--no-flash"])
@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=[] if arch in BASIC else pytest.mark.slow) for arch in SHAPES]
)
def test_packed_rows_are_separate_rows(arch: str, flash: str, tmp_path: Path) -> None:
    shape = shape_of(arch, "b")
    data, base = short_pairs(tmp_path), runs.base(tmp_path, shape)
    packed, apart = (
        ("--ctx", 96, "--seed", 3, "--batch", each, pack) for each, pack in ((1, "--pack"), (4, "--no-pack"))
    )
    together = shown(1, data, "--model", base, *packed)[0]
    assert len(np.unique(together["starts"][together["weights"] > 0])) == 4
    found = [
        gradients(tmp_path / str(number), shape, base, data, *given, flash)
        for number, given in enumerate((packed, apart))
    ]
    for name, one in found[0].items():
        other = found[1][name]
        assert np.abs(one - other).max() <= 1e-4 * np.abs(other).max(), name


def gradients(out: Path, shape: Shape, base: Path, data: Path, *given: Argument) -> dict[str, np.ndarray]:
    ran("finetune", base, data, "--full", *runs.PLAIN[:4], *runs.SGD, "--lr", runs.HUGE, *given, "--out", out)
    return runs.changes(base, out / "model.gguf", shape)


# ---- going on ---------------------------------------------------------------


GO_ON = [
    ("gemma3", "full"),
    ("phi3", "lora"),
    ("qwen2", "full"),
    ("smollm3", "lora"),
    ("qwen35", "full"),
    ("qwen35", "lora"),
    ("lfm2", "full"),
    ("gemma4", "full"),
    ("gemma4", "lora"),
    ("granitehybrid", "full"),
]


@pytest.mark.parametrize(
    ("arch", "way"),
    [
        pytest.param(arch, way, marks=[] if (arch, way) in GO_ON else pytest.mark.slow)
        for arch in SHAPES
        for way in ("full", "lora")
    ],
)
def test_going_on_has_the_same_bits(arch: str, way: str, tmp_path: Path) -> None:
    shape = shape_of(arch, "a")
    full = ("--full",) if way == "full" else ()
    given = (
        "finetune",
        runs.base(tmp_path, shape),
        text_file(tmp_path),
        *full,
        "--ctx",
        40,
        "--batch",
        2,
        "--lr",
        1e-3,
    )
    iters = ("--decay-steps", 8, "--warmup", 2, "--save-every", 3, "--seed", 3)
    ran(*given, *iters, "--iters", 9, "--out", tmp_path / "whole")
    ran(*given, *iters, "--iters", 5, "--out", tmp_path / "parts")
    ran("finetune", "--resume", tmp_path / "parts", "--iters", 9)
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "parts")
    made = "model.gguf" if full else "adapter.gguf"
    same_bits(tmp_path / "whole" / made, tmp_path / "parts" / made)


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(arch, marks=[] if arch in ("gemma3", "gemma4", "qwen35", "lfm2") else pytest.mark.slow)
        for arch in NEW
    ],
)
def test_from_scratch_goes_on_with_the_same_bits(arch: str, tmp_path: Path) -> None:
    """With fewer blocks than the period of those with attention in some hybrids."""
    sizes = (
        "--vocab-size",
        "bytes",
        "--embd",
        32,
        "--head",
        4,
        "--layer",
        2,
        "--ff",
        64,
        "--ctx",
        32,
        "--batch",
        2,
    )
    given = (
        "from-scratch",
        text_file(tmp_path),
        "--arch",
        arch,
        *sizes,
        "--decay-steps",
        8,
        "--warmup",
        2,
        "--save-every",
        3,
    )
    ran(*given, "--iters", 8, "--out", tmp_path / "whole")
    ran(*given, "--iters", 4, "--out", tmp_path / "parts")
    ran("from-scratch", "--resume", tmp_path / "parts", "--iters", 8)
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "parts")
    same_bits(tmp_path / "whole" / "model.gguf", tmp_path / "parts" / "model.gguf")
