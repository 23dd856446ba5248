"""`llamatrain merge`: its methods beside their formulas in float64, what is copied, and what is refused."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import llamatrain
from llamatrain.gguf import quants, rewrite
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import f32, string, strings, u32
from llamatrain.gguf.writer import create_gguf
from tests.helpers.adapter_files import adapter
from tests.helpers.cli import Done, ran, run
from tests.helpers.small_models import Arrays, small, weights, written

H = small()
WIDE = small(embd=256, heads=4, head_size=64, ff=512, layers=1)  # rows that K-quants can hold
Q, NORM = "blk.0.attn_q.weight", "blk.0.attn_norm.weight"
TASKS = ("task-arithmetic", "ties", "dare-linear", "dare-ties")


def tuned(base: Arrays, seed: int, size: float = 0.1) -> Arrays:
    """Weights that differ from those of a base."""
    random = np.random.default_rng(seed)
    return {
        name: array + np.float32(size) * random.standard_normal(array.shape, np.float32)
        for name, array in base.items()
    }


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Arrays]:
    """The weights of a base and of three models made from it, which lie in files."""
    monkeypatch.chdir(tmp_path)
    base = weights(H)
    arrays = [base, *(tuned(base, seed) for seed in (5, 6, 7))]
    for name, each in zip(("base", "a", "b", "c"), arrays, strict=True):
        written(Path(f"{name}.gguf"), H, each)
    return arrays


def read(path: str | Path) -> Arrays:
    return {
        name: quants.decode(tensor.raw, tensor.type).reshape(tensor.shape)
        for name, tensor in open_gguf(path).tensors.items()
    }


def check(path: str, wanted: Arrays) -> None:
    """Values of a file are those wanted, rounded to float32."""
    found = read(path)
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert array.dtype == np.float64
        np.testing.assert_allclose(found[name], array, rtol=2e-7, atol=1e-7, err_msg=name)


def each(function: object, *models: Arrays) -> Arrays:
    """Apply a function to the versions of each tensor in float64."""
    return {
        name: function(*(model[name].astype(np.float64) for model in models))  # type: ignore[operator]
        for name in models[0]
    }


def failed(done: Done, told: str, code: int = 1) -> None:
    assert done.code == code and len(done.errors) == 1 and told in done.errors[0], done.err
    assert "Traceback" not in done.err and not Path("m.gguf").exists()


# ---- the methods -----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ((), (1 / 3, 1 / 3, 1 / 3)),
        (("--weight", 0.3), (1 / 3, 1 / 3, 1 / 3)),
        (("--weight", 1, "--weight", 2, "--weight", -0.5), (0.4, 0.8, -0.2)),
        (("--weight", 1, "--weight", 0, "--weight", 3), (0.25, 0, 0.75)),
        (("--weight", 0.3, "--no-normalize"), (0.3, 0.3, 0.3)),
    ],
)
def test_linear(models: list[Arrays], options: Sequence[object], shares: Sequence[float]) -> None:
    ran("merge", "a.gguf", "b.gguf", "c.gguf", *options, "--out", "m.gguf")  # type: ignore[arg-type]
    check("m.gguf", each(lambda a, b, c: shares[0] * a + shares[1] * b + shares[2] * c, *models[1:]))


def on_the_arc(a: np.ndarray, b: np.ndarray, share: float) -> np.ndarray:
    """Rotate from one vector towards the other in the plane of both, and scale each by the sines."""
    one, two = a.reshape(-1) / np.linalg.norm(a), b.reshape(-1) / np.linalg.norm(b)
    angle = np.arctan2(np.linalg.norm(two - one * (one @ two)), one @ two)
    if abs(np.cos(angle)) > 0.9995:
        return a + share * (b - a)
    return a * np.sin((1 - share) * angle) / np.sin(angle) + b * np.sin(share * angle) / np.sin(angle)


@pytest.mark.parametrize("size", [3.0, 0.1, 0.005, 1e-6])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_slerp(models: list[Arrays], size: float, share: float) -> None:
    """Of vectors far from each other, and of nearly parallel ones."""
    other = tuned(models[1], 9, size)
    written(Path("other.gguf"), H, other)
    ran("merge", "a.gguf", "other.gguf", "--method", "slerp", "--weight", share, "--out", "m.gguf")
    check("m.gguf", each(lambda a, b: on_the_arc(a, b, share), models[1], other))


def test_the_arc_keeps_the_length(models: list[Arrays]) -> None:
    """Of orthogonal vectors, a quarter of the way is at an angle of 22.5 degrees; opposite and zero ones have no arc."""
    first, second = dict(models[1]), dict(models[1])
    first[Q], second[Q] = np.zeros_like(first[Q]), np.zeros_like(first[Q])
    first[Q][0, 0] = second[Q][1, 1] = 2
    first["blk.1.attn_q.weight"] = -second["blk.1.attn_q.weight"]
    first[NORM] = np.zeros_like(first[NORM])
    written(Path("x.gguf"), H, first)
    written(Path("y.gguf"), H, second)
    ran("merge", "x.gguf", "y.gguf", "--method", "slerp", "--weight", 0.25, "--out", "m.gguf")
    found = read("m.gguf")
    assert np.linalg.norm(found[Q]) == pytest.approx(2, abs=1e-6)
    assert found[Q][1, 1] / found[Q][0, 0] == pytest.approx(np.tan(np.pi / 8), abs=1e-6)
    assert np.allclose(found["blk.1.attn_q.weight"], -0.5 * second["blk.1.attn_q.weight"], atol=1e-7)
    assert np.allclose(found[NORM], 0.25 * second[NORM], atol=1e-7)


@pytest.mark.parametrize("normalize", [None, True, False])
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_task_arithmetic(models: list[Arrays], normalize: bool | None, scale: float) -> None:
    flag = {None: (), True: ("--normalize",), False: ("--no-normalize",)}[normalize]
    options = ("--base", "base.gguf", "--weight", 1, "--weight", -0.5, "--weight", 0.25, "--lambda", scale)
    ran(
        *("merge", "a.gguf", "b.gguf", "c.gguf", "--method", "task-arithmetic", *options, *flag),
        *("--out", "m.gguf"),
    )
    divisor = 0.75 if normalize else 1
    check(
        "m.gguf",
        each(lambda o, a, b, c: o + scale * ((a - o) - 0.5 * (b - o) + 0.25 * (c - o)) / divisor, *models),
    )


def largest(difference: np.ndarray, density: float) -> np.ndarray:
    """Zero all but the largest values, by sorting them."""
    order = np.argsort(-np.abs(difference), axis=None)
    kept = np.zeros(difference.size, bool)
    kept[order[: max(1, int(density * difference.size))]] = True
    return difference * kept.reshape(difference.shape)


def elected(differences: list[np.ndarray], shares: Sequence[float], normalize: bool) -> np.ndarray:
    """Merge weight by weight, as the paper describes it in words."""
    stacked = np.stack([share * each for share, each in zip(shares, differences, strict=True)])
    result = np.zeros(stacked[0].size)
    for number, column in enumerate(stacked.reshape(len(shares), -1).T):
        sign = 1 if sum(column) >= 0 else -1
        agreeing = [i for i, value in enumerate(column) if value * sign > 0]
        total = sum(column[i] for i in agreeing)
        result[number] = total / (sum(shares[i] for i in agreeing) if normalize and agreeing else 1)
    return result.reshape(stacked[0].shape)


@pytest.mark.parametrize("panel", [rewrite.PANEL, 700])
@pytest.mark.parametrize("normalize", [True, False])
def test_ties(models: list[Arrays], monkeypatch: pytest.MonkeyPatch, panel: int, normalize: bool) -> None:
    """In panels of several sizes, which must not change the bits."""
    monkeypatch.setattr(rewrite, "PANEL", panel)
    shares, densities = (1.0, -0.5, 2.0), (0.2, 1.0, 0.55)
    numbers = [word for share in shares for word in ("--weight", share)]
    numbers += [word for density in densities for word in ("--density", density)]
    flag = () if normalize else ("--no-normalize",)
    ran(
        *("merge", "a.gguf", "b.gguf", "c.gguf", "--method", "ties", "--base", "base.gguf", *numbers),
        *(*flag, "--lambda", 0.8, "--out", "m.gguf"),
    )

    def formula(origin: np.ndarray, *tuned: np.ndarray) -> np.ndarray:
        parts = [largest(each - origin, density) for each, density in zip(tuned, densities, strict=True)]
        return origin + 0.8 * elected(parts, shares, normalize)

    check("m.gguf", each(formula, *models))


@pytest.mark.parametrize("method", ["dare-linear", "dare-ties"])
def test_dare(models: list[Arrays], method: str) -> None:
    """The values that are kept are found in merges of each model alone, and divided by their share."""
    options = ("--method", method, "--base", "base.gguf", "--density", 0.4, "--seed", 3)
    others = ("--weight", 0, "--weight", 0)
    ran("merge", "a.gguf", "b.gguf", "c.gguf", *options, "--weight", 2, *others, "--out", "first.gguf")
    ran(*("merge", "a.gguf", "b.gguf", "c.gguf", *options, *others, "--weight", 1, "--out", "third.gguf"))
    first, third = (each(np.subtract, read(name), models[0]) for name in ("first.gguf", "third.gguf"))
    for name, array in first.items():
        kept = np.abs(array) > 1e-6
        share = kept.mean()
        assert abs(share - 0.4) < 5 * np.sqrt(0.24 / array.size) + 1e-3, name
        wanted = 2 * (models[1][name].astype(np.float64) - models[0][name]) / 0.4
        np.testing.assert_allclose(array[kept], wanted[kept], atol=2e-6)
        if array.ndim == 2:
            assert 0.1 < (kept & (np.abs(third[name]) > 1e-6)).mean() < 0.22  # drawn for each model by itself
    ran(
        *("merge", "a.gguf", "b.gguf", "c.gguf", *options, "--weight", 2, "--weight", 0, "--weight", 1),
        *("--out", "both.gguf"),
    )
    signs = method == "dare-ties"
    both = each(
        lambda one, two: elected([one, two], (1.0, 1.0), normalize=False) if signs else one + two,
        first,
        third,
    )
    found = each(np.subtract, read("both.gguf"), models[0])
    for name, array in both.items():
        unclear = np.abs(first[name] + third[name]) < 1e-5  # rounding of the files decides
        np.testing.assert_allclose(found[name][~unclear], array[~unclear], atol=3e-6, err_msg=name)


def test_the_seed_alone_chooses_what_is_dropped(
    models: list[Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    def merged(*options: object) -> bytes:
        words = ("merge", "a.gguf", "b.gguf", "--method", "dare-ties", "--base", "base.gguf")
        ran(*words, *options, "--overwrite", "--out", "m.gguf")  # type: ignore[arg-type]
        return Path("m.gguf").read_bytes()

    first = merged("--threads", 1)
    assert merged("--threads", 3) == first != merged("--seed", 1)
    monkeypatch.setattr(rewrite, "PANEL", 300)
    assert merged("--threads", 2) == first


# ---- what is kept ----------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ("--weight", 0.3, "--weight", 0.6),
        ("--method", "slerp", "--weight", 0.3),
        *(("--method", method, "--base", "a.gguf") for method in TASKS),
    ],
)
@pytest.mark.parametrize("kind", ["F32", "Q4_K", "IQ3_S"])
def test_a_model_with_itself_is_itself(
    options: Sequence[object], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a type that cannot be written."""
    monkeypatch.chdir(tmp_path)
    written(Path("a.gguf"), WIDE, weights(WIDE), "F32" if kind == "IQ3_S" else kind)
    if kind == "IQ3_S":
        retype("a.gguf", kind)
    Path("b.gguf").write_bytes(Path("a.gguf").read_bytes())
    done = ran("merge", "a.gguf", "b.gguf", *options, "--out", "m.gguf")  # type: ignore[arg-type]
    assert "0 of 12 tensors merged, 12 copied unchanged" in done.err
    one, two = open_gguf("a.gguf"), open_gguf("m.gguf")
    assert all(np.array_equal(one.tensors[name].raw, two.tensors[name].raw) for name in one.tensors)


def retype(path: str, kind: str) -> None:
    """Give one matrix another type, with zeros as its bytes."""
    from llamatrain.gguf.types import TensorInfo, type_by_name

    whole = open_gguf(path)
    infos = [
        TensorInfo(name, type_by_name(kind) if name == Q else tensor.type, tensor.shape)
        for name, tensor in whole.tensors.items()
    ]
    with create_gguf(path, whole.metadata.raw_values, infos) as out:
        for info in infos:
            out.write(info.name, [bytes(info.nbytes)] if info.name == Q else whole.tensors[info.name].raw)


@pytest.mark.parametrize(
    ("options", "same"),
    [
        (("--weight", 1, "--weight", 0), "a"),
        (("--weight", 0, "--weight", 0.5), "b"),
        (("--method", "slerp", "--weight", 0), "a"),
        (("--method", "slerp", "--weight", 1), "b"),
        *(
            (("--method", method, "--base", "base.gguf", "--weight", 0), "base")
            for method in ("task-arithmetic", "dare-ties")
        ),
        (("--method", "task-arithmetic", "--base", "base.gguf", "--weight", 0, "--weight", 1), "b"),
        (("--method", "ties", "--base", "base.gguf", "--weight", 2, "--weight", 0, "--density", 1), "a"),
    ],
)
def test_a_weight_of_one_alone(models: list[Arrays], options: Sequence[object], same: str) -> None:
    ran("merge", "a.gguf", "b.gguf", *options, "--out", "m.gguf")  # type: ignore[arg-type]
    one, two = read(f"{same}.gguf"), read("m.gguf")
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_types_and_metadata_are_those_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arrays = [weights(WIDE), tuned(weights(WIDE), 5)]
    written(Path("a.gguf"), WIDE, arrays[0], "Q4_K", {"general.name": string("mine"), "own.key": u32(3)})
    written(Path("b.gguf"), WIDE, arrays[1], "F16", {"llama.rope.freq_base": f32(5e5)})
    done = ran("merge", "a.gguf", "b.gguf", "--out", "m.gguf")
    assert (
        "note: b.gguf has other values of llama.rope.freq_base; the new model has those of a.gguf" in done.err
    )
    made, first = open_gguf("m.gguf"), open_gguf("a.gguf")
    assert made.metadata["general.name"] == "mine" and made.metadata["own.key"] == 3
    assert {name: tensor.type for name, tensor in made.tensors.items()} == {
        name: tensor.type for name, tensor in first.tensors.items()
    }
    wanted = each(lambda a, b: (a + b) / 2, read("a.gguf"), read("b.gguf"))
    for name, tensor in made.tensors.items():
        encoded = quants.encode(wanted[name].astype(np.float32), tensor.type)
        assert np.array_equal(tensor.raw.reshape(-1), encoded.reshape(-1)), name
    ran("merge", "a.gguf", "b.gguf", "--type", "q8_0", "--out", "n.gguf")
    assert open_gguf("n.gguf").metadata["general.file_type"] == 7
    assert open_gguf("n.gguf").tensors[Q].type.name == "Q8_0"
    assert open_gguf("n.gguf").tensors[NORM].type.name == "F32"


def test_split_models(models: list[Arrays]) -> None:
    whole = open_gguf("b.gguf")
    halves = (list(whole.tensors.values())[:9], list(whole.tensors.values())[9:])
    for i, tensors in enumerate(halves):
        keys = dict(whole.metadata.raw_values) if i == 0 else {}
        keys |= {"split.no": u32(i), "split.count": u32(2), "split.tensors.count": u32(21)}
        with create_gguf(f"s-0000{i + 1}-of-00002.gguf", keys, tensors) as out:
            for tensor in tensors:
                out.write(tensor.name, tensor.raw)
    ran("merge", "a.gguf", "b.gguf", "--out", "m.gguf")
    ran("merge", "a.gguf", "s-00001-of-00002.gguf", "--out", "n.gguf")
    assert Path("m.gguf").read_bytes() == Path("n.gguf").read_bytes()
    done = run("merge", "s-00002-of-00002.gguf", "a.gguf", "--out", "s-00001-of-00002.gguf", "--overwrite")
    assert done.code == 2 and "would replace the input" in done.err


def test_from_python(models: list[Arrays]) -> None:
    made = llamatrain.merge("a.gguf", "b.gguf", method="slerp", weight=0.5, out="m.gguf")
    ran("merge", "a.gguf", "b.gguf", "--method", "slerp", "--weight", 0.5, "--out", "n.gguf")
    assert made.path.read_bytes() == Path("n.gguf").read_bytes() and made.merged == made.tensors == 21
    with pytest.raises(llamatrain.UsageError, match="base is missing") as error:
        llamatrain.merge("a.gguf", "b.gguf", method="ties", out="m.gguf", overwrite=True)
    assert error.value.code == "missing-option" and "--base" not in str(error.value)


# ---- what is refused -------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("a.gguf", "merges two models or more (got 1)"),
        ("a.gguf b.gguf c.gguf --method slerp", "merges two models (got 3)"),
        ("a.gguf b.gguf --method slerp --weight 1.5", "--weight must be one number from 0 to 1 "),
        ("a.gguf b.gguf --method slerp --weight 1 --weight 0", "(got 1, 0)"),
        ("a.gguf b.gguf c.gguf --weight 1 --weight 2", "for each of the 3 models (got 2 values)"),
        ("a.gguf b.gguf --weight nan", "--weight must be a number (got nan)"),
        ("a.gguf b.gguf --weight 1 --weight -1", "the sum of all --weight is 0"),
        ("a.gguf b.gguf --weight 0 --no-normalize", "every --weight is 0"),
        ("a.gguf b.gguf --method ties", "--base is missing"),
        ("a.gguf b.gguf --base base.gguf", "--base has no effect with --method linear"),
        ("a.gguf b.gguf --density 0.5", "--density has no effect with --method linear"),
        ("a.gguf b.gguf --method ties --base base.gguf --seed 2", "--seed has no effect with --method ties"),
        ("a.gguf b.gguf --method slerp --normalize", "--normalize has no effect with --method slerp"),
        (
            "a.gguf b.gguf --method ties --base base.gguf --density 0",
            "--density must be more than 0, and at most 1 (got 0)",
        ),
        ("a.gguf b.gguf --method ties --base base.gguf --density 1.5", "--density must be "),
        ("a.gguf b.gguf --method median", "--method must be "),
        ("a.gguf nix.gguf", "nix.gguf: No such file"),
        ("a.gguf b.gguf --type q4_k", "fits no matrix of a.gguf"),
    ],
)
def test_usage(models: list[Arrays], words: str, told: str) -> None:
    failed(run("merge", *words.split(), "--out", "m.gguf"), told, 2)


def test_models_that_differ(models: list[Arrays]) -> None:
    """The message says in which file, and which tensor."""
    narrow = small(ff=64)
    written(Path("narrow.gguf"), narrow, weights(narrow))
    failed(
        run("merge", "a.gguf", "narrow.gguf", "--out", "m.gguf"),
        "narrow.gguf: the shape of 'blk.0.ffn_gate.weight' is [64, 64], but in a.gguf it is [96, 64]",
    )
    tied = small(tied=True)
    written(Path("tied.gguf"), tied, weights(tied))
    failed(
        run("merge", "a.gguf", "tied.gguf", "--out", "m.gguf"),
        "tied.gguf: it has no tensor 'output.weight', but a.gguf has one",
    )
    failed(
        run("merge", "tied.gguf", "a.gguf", "--out", "m.gguf"),
        "a.gguf: it has a tensor 'output.weight', but tied.gguf has none",
    )
    written(Path("q.gguf"), H, models[1], more={"general.architecture": string("qwen2")})
    failed(run("merge", "a.gguf", "q.gguf", "--out", "m.gguf"), "q.gguf: its architecture is 'qwen2', but ")
    tokens = open_gguf("a.gguf").metadata["tokenizer.ggml.tokens"]
    for changed, told in (
        (["x", *tokens[1:]], f"(value 0 is 'x', and there {tokens[0]!r})"),
        (tokens[:-1], "(257 values, and there 258)"),
    ):
        written(Path("v.gguf"), H, models[1], more={"tokenizer.ggml.tokens": strings(changed)})
        failed(run("merge", "a.gguf", "v.gguf", "--out", "m.gguf"), told)
    written(Path("v.gguf"), H, models[1], more={"tokenizer.ggml.tokens": u32(3)})
    failed(run("merge", "a.gguf", "v.gguf", "--out", "m.gguf"), "v.gguf: tokenizer.ggml.tokens differs from ")


def test_files_that_are_no_models(models: list[Arrays]) -> None:
    from llamatrain.adapters import gguf

    gguf.write_adapter("lora.gguf", adapter(H, (Q,)))
    failed(run("merge", "a.gguf", "lora.gguf", "--out", "m.gguf"), "lora.gguf: only models can be merged")
    Path("cut.gguf").write_bytes(Path("b.gguf").read_bytes()[:-100])
    failed(run("merge", "a.gguf", "cut.gguf", "--out", "m.gguf"), "cut.gguf: ")
    Path("none.gguf").write_bytes(b"")
    failed(run("merge", "a.gguf", "none.gguf", "--out", "m.gguf"), "none.gguf: the file is empty")
    content, at = bytearray(Path("b.gguf").read_bytes()), open_gguf("b.gguf").tensors[Q].offset
    content[at + 4 * (3 * 64 + 4) : at + 4 * (3 * 64 + 5)] = np.float32(np.inf).tobytes()
    Path("inf.gguf").write_bytes(content)
    failed(
        run("merge", "a.gguf", "inf.gguf", "--out", "m.gguf"),
        f"{Q}, merged: inf at row 3, column 4, cannot be stored as F32",
    )


def test_the_output(models: list[Arrays], monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("merge", "a.gguf", "b.gguf", "--out", "a.gguf", "--overwrite")
    assert done.code == 2 and "--out a.gguf would replace the input a.gguf" in done.err
    done = run("merge", "a.gguf", "b.gguf", "--out", "c.gguf")
    assert done.code == 1 and "c.gguf exists already; add --overwrite" in done.err
    failed(run("merge", "a.gguf", "b.gguf", "--out", "none/m.gguf"), "its folder does not exist", 2)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    failed(run("merge", "a.gguf", "b.gguf", "--out", "m.gguf"), "but only 1 kB are free there")


def test_memory_does_not_grow_with_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded to float64, the matrices at both ends are 41 MB each."""
    import tracemalloc

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rewrite, "PANEL", 1 << 15)
    h = small(vocab=20_000, embd=256, heads=4, head_size=64, ff=64, layers=1)
    base = weights(h)
    for name, array in (("base", base), ("a", tuned(base, 1)), ("b", tuned(base, 2))):
        written(Path(f"{name}.gguf"), h, array, "F16")
    words = ("merge", "a.gguf", "b.gguf", "--method", "ties", "--base", "base.gguf", "--overwrite")
    ran(*words, "--out", "m.gguf")  # imports and compiles
    tracemalloc.start()
    try:
        ran(*words, "--out", "m.gguf")
        assert tracemalloc.get_traced_memory()[1] < 12_000_000
    finally:
        tracemalloc.stop()
