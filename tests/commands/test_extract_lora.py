"""`llamatrain extract-lora`: adapters that were merged come back, and smaller ranks give the best approximation."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import llamatrain
from llamatrain.adapters import extract, gguf
from llamatrain.adapters.adapter import Adapter
from llamatrain.adapters.read import read_adapter
from llamatrain.gguf import quants, rewrite
from llamatrain.gguf.reader import open_gguf
from llamatrain.model.hyperparameters import Hyperparameters, read_hyperparameters
from tests.helpers import architecture_models
from tests.helpers import architecture_runs as runs
from tests.helpers.adapter_files import adapter, linear
from tests.helpers.cli import Done, ran, run
from tests.helpers.small_models import EMBEDDINGS, OUTPUT, Arrays, small, weights, written

H = small()
Q, UP, NORM = "blk.0.attn_q.weight", "blk.1.ffn_up.weight", "blk.0.attn_norm.weight"
PATHS = ("base.gguf", "tuned.gguf")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tune(names: Sequence[str], rank: int = 4) -> Adapter:
    """A base, and the model that an adapter makes of it."""
    made = adapter(H, names, rank=rank)
    written(Path("base.gguf"), H, weights(H))
    gguf.write_adapter("made.gguf", made)
    ran("export-lora", "base.gguf", "--lora", "made.gguf", "--out", "tuned.gguf", "--overwrite")
    return made


def difference(name: str) -> np.ndarray:
    """Of two files, in float64."""
    one, other = (open_gguf(path).tensors[name] for path in PATHS)
    change = quants.decode(other.raw, other.type).astype(np.float64) - quants.decode(one.raw, one.type)
    return change.reshape(one.shape)


def found(path: str, h: Hyperparameters = H) -> Adapter:
    return read_adapter(Path(path), h)


def failed(done: Done, told: str, code: int = 1) -> None:
    assert done.code == code and len(done.errors) == 1 and told in done.errors[0], done.err
    assert "Traceback" not in done.err and not Path("x.gguf").exists()


# ---- what is extracted -----------------------------------------------------


@pytest.mark.parametrize("panel", [rewrite.PANEL, 700])
@pytest.mark.parametrize("rank", [4, 8])
def test_an_adapter_that_was_merged(rank: int, panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back, also from a file with more ranks than it needs."""
    monkeypatch.setattr(rewrite, "PANEL", panel)
    made = tune(linear(H))
    done = ran("extract-lora", *PATHS, "--lora-r", rank, "--out", "x.gguf")
    assert "x.gguf: an adapter of 14 weights, with 100.00% of the squared norm" in done.err
    assert "warning" not in done.err
    file, back = open_gguf("x.gguf"), found("x.gguf")
    assert file.metadata["adapter.lora.alpha"] == rank and file.metadata["general.architecture"] == "llama"
    assert list(back.pairs) == linear(H)
    for name in back.pairs:
        assert back.pairs[name].rank == rank and back.pairs[name].scale == 1
        assert np.abs(back.delta(name) - made.delta(name)).max() < 1e-5, name


def test_targets_and_ranks() -> None:
    """Of the embeddings, the pair is transposed; norms have one row."""
    made = tune([EMBEDDINGS, OUTPUT, NORM, Q], rank=4)
    words = ("--target", "token_embd,output", "--target", "norms,attn_q", "--lora-rank-of", "attn_q=5")
    done = ran("extract-lora", *PATHS, *words, "--lora-r", 4, "--out", "x.gguf")
    assert "llama.cpp applies no pairs of norms" in done.err
    back = found("x.gguf")
    assert {name: pair.rank for name, pair in back.pairs.items()} == {EMBEDDINGS: 4, OUTPUT: 4, NORM: 1, Q: 5}
    assert back.pairs[EMBEDDINGS].a.shape == (H.vocab, 4)
    for name in back.pairs:
        assert np.abs(back.delta(name) - made.delta(name)).max() < 1e-5, name


@pytest.mark.parametrize("rank", [1, 3, 10, 40, 64])
def test_the_best_approximation(rank: int) -> None:
    """A difference of full rank; numpy's decomposition says how much a rank can hold."""
    base, random = weights(H), np.random.default_rng(3)
    tuned: Arrays = {
        name: array + np.float32(0.1) * random.standard_normal(array.shape, np.float32)
        if name in (Q, UP)
        else array
        for name, array in base.items()
    }
    written(Path("base.gguf"), H, base)
    written(Path("tuned.gguf"), H, tuned)
    done = ran("extract-lora", *PATHS, "--lora-r", rank, "-v", "--out", "x.gguf")
    back, held, total = found("x.gguf"), 0.0, 0.0
    assert list(back.pairs) == [Q, UP]
    for name in back.pairs:
        change = difference(name)
        values = np.linalg.svd(change, compute_uv=False)
        best = np.sqrt(np.sum(values[rank:] ** 2))
        missed = np.linalg.norm(change - back.delta(name))
        assert best - 1e-5 <= missed <= best * (1 + 1e-3) + 1e-5, name
        share = np.sum(values[:rank] ** 2) / np.sum(values**2)
        told = next(line for line in done.err.splitlines() if line.startswith(f"{name}: "))
        assert abs(float(told.split()[1].rstrip("%")) / 100 - share) < 2e-4
        held, total = held + np.sum(values[:rank] ** 2), total + np.sum(values**2)
    summary = next(line for line in done.err.splitlines() if line.startswith("x.gguf: "))
    assert abs(float(summary.split(" with ")[1].split("%")[0]) / 100 - held / total) < 2e-4


def test_a_flat_spectrum() -> None:
    """Singular values that hardly fall are the hardest case of the iteration."""
    random = np.random.default_rng(1)
    left, right = (np.linalg.qr(random.standard_normal((400, 300))).Q for _ in range(2))
    values = np.linspace(1, 0.8, 300)
    matrix = ((left * values) @ right.T).astype(np.float32)
    u, s, v = extract.truncated_svd(matrix, 8, np.random.default_rng(2))
    assert np.abs(u.T @ u - np.eye(8)).max() < 1e-4 and np.abs(v @ v.T - np.eye(8)).max() < 1e-4
    assert 0.98 < np.sum(s.astype(np.float64) ** 2) / np.sum(values[:8] ** 2) <= 1 + 1e-5
    assert np.abs(matrix @ v.T - u * s).max() < 2e-2


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_sizes_whose_squares_are_no_floats(size: float) -> None:
    base = weights(H)
    tuned = dict(base)
    one, other = np.linspace(-1, 1, 64), np.cos(np.arange(64))
    base[Q] = np.zeros((64, 64), np.float32)
    tuned[Q] = (size * np.outer(one, other)).astype(np.float32)
    written(Path("base.gguf"), H, base)
    written(Path("tuned.gguf"), H, tuned)
    ran("extract-lora", *PATHS, "--lora-r", 1, "--out", "x.gguf")
    assert np.allclose(found("x.gguf").delta(Q), tuned[Q], rtol=1e-4, atol=1e-5 * size)


def test_stacks_of_experts() -> None:
    shape = architecture_models.shape_of("qwen3moe", "a")
    made = runs.adapter_of(shape, runs.factors(shape, names=architecture_models.mixtures(shape)))
    base = architecture_models.written(Path("base.gguf"), shape, architecture_models.weights(shape))
    gguf.write_adapter("made.gguf", made)
    ran("export-lora", base, "--lora", "made.gguf", "--out", "tuned.gguf")
    words = ("--target", "experts,router", "--lora-r", runs.RANK)
    ran("extract-lora", *PATHS, *words, "--out", "x.gguf")
    back = found("x.gguf", read_hyperparameters(open_gguf(base)))
    assert back.pairs.keys() == made.pairs.keys()
    assert any(pair.a.ndim == 3 for pair in back.pairs.values())
    for name in back.pairs:
        assert np.abs(back.delta(name) - made.delta(name)).max() < 1e-5, name


def test_quantized_models() -> None:
    """What rounding has changed is a difference too, except where types and bytes are the same."""
    h = small(embd=256, heads=4, head_size=64, ff=512, layers=1)
    base = weights(h)
    tuned = base | {Q: base[Q] + np.outer(np.ones(256), np.linspace(-1, 1, 256)).astype(np.float32)}
    written(Path("base.gguf"), h, base, "Q8_0")
    written(Path("tuned.gguf"), h, tuned, "Q8_0")
    done = ran("extract-lora", *PATHS, "--lora-r", 1, "--out", "x.gguf")
    back = found("x.gguf")
    assert list(back.pairs) == [Q] and "warning" not in done.err
    assert np.abs(back.delta(Q) - difference(Q)).max() < 0.1
    written(Path("tuned.gguf"), h, tuned, "Q4_K")
    done = ran("extract-lora", *PATHS, "--adapter-type", "f16", "--out", "x.gguf", "--overwrite")
    assert len(found("x.gguf").pairs) == 7
    assert open_gguf("x.gguf").tensors[f"{Q}.lora_a"].type.name == "F16"
    assert "warning: token_embd.weight, output.weight differ too, and got no pair" in done.err


def test_tensors_without_a_pair_are_named() -> None:
    base = weights(H)
    names = (EMBEDDINGS, OUTPUT, NORM, UP, Q)
    written(Path("base.gguf"), H, base)
    written(Path("tuned.gguf"), H, base | {name: base[name] + np.float32(0.5) for name in names})
    done = ran("extract-lora", *PATHS, "--target", "attn_q", "--out", "x.gguf")
    assert list(found("x.gguf").pairs) == [Q]
    assert (
        "warning: token_embd.weight, blk.0.attn_norm.weight, blk.1.ffn_up.weight and 1 more differ too, "
        in done.err
    )


def test_from_python() -> None:
    tune([Q, EMBEDDINGS])
    made = llamatrain.extract_lora(*PATHS, lora_r=4, out="x.gguf")
    assert made.path == Path("x.gguf") and made.bytes == Path("x.gguf").stat().st_size
    assert list(made.shares) == [Q] and made.share == pytest.approx(1, abs=1e-6)
    assert made.omitted == (EMBEDDINGS,) and "target says" in made.notes[0] and "--" not in made.notes[0]
    first = Path("x.gguf").read_bytes()
    ran("extract-lora", *PATHS, "--lora-r", 4, "--threads", 2, "--out", "x.gguf", "--overwrite")
    assert Path("x.gguf").read_bytes() == first


# ---- what is refused -------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        ("base.gguf nix.gguf", "nix.gguf: No such file", 2),
        ("base.gguf tuned.gguf --lora-r 0", "--lora-r must be 1 to 65536 (got 0)", 2),
        ("base.gguf tuned.gguf --target attn_x", "--target attn_x: no such weight", 2),
        ("base.gguf tuned.gguf --target blk.9.attn_q", "the model has the blocks 0 to 1", 2),
        ("base.gguf tuned.gguf --lora-rank-of attn_q", "--lora-rank-of must be a weight and a rank", 2),
        ("base.gguf base.gguf", "no weight that could have a pair differs from base.gguf", 1),
        ("base.gguf made.gguf", "made.gguf: a model is needed (got a file of kind adapter)", 1),
        ("made.gguf base.gguf", "made.gguf: a model is needed (got a file of kind adapter)", 1),
        ("base.gguf wide.gguf", "wide.gguf: the shape of 'blk.0.ffn_gate.weight' is [64, 64], but in ", 1),
        ("base.gguf inf.gguf", f"inf.gguf: {Q} or its weights in the base are not finite", 1),
        ("base.gguf cut.gguf", "cut.gguf: ", 1),
    ],
)
def test_what_cannot_be_extracted(words: str, told: str, code: int) -> None:
    tune([Q])
    wide = small(ff=64)
    written(Path("wide.gguf"), wide, weights(wide))
    content, at = bytearray(Path("tuned.gguf").read_bytes()), open_gguf("tuned.gguf").tensors[Q].offset
    Path("cut.gguf").write_bytes(content[:-100])
    content[at : at + 4] = np.float32(np.inf).tobytes()
    Path("inf.gguf").write_bytes(content)
    failed(run("extract-lora", *words.split(), "--out", "x.gguf"), told, code)


def test_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    tune([Q])
    done = run("extract-lora", *PATHS, "--out", "base.gguf", "--overwrite")
    assert done.code == 2 and "would replace the input base.gguf" in done.err
    Path("there.gguf").write_bytes(b"x")
    done = run("extract-lora", *PATHS, "--out", "there.gguf")
    assert done.code == 1 and "there.gguf exists already; add --overwrite" in done.err
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    failed(run("extract-lora", *PATHS, "--out", "x.gguf"), "but only 1 kB are free there")
