"""`llamatrain control-vector` and `generate --control-vector`: how vectors are made, what they change, what is refused."""

from pathlib import Path

import numpy as np
import pytest

import llamatrain
from llamatrain.adapters.control_vector import (
    add_directions,
    load_control_vectors,
    read_control_vector,
    write_control_vector,
)
from llamatrain.adapters.load_adapted import load_with_adapters
from llamatrain.adapters.options import AdapterOptions, ControlOptions
from llamatrain.commands.divergence import log_softmax
from llamatrain.commands.logit_diff import compute_logits
from llamatrain.engine.device import create_device
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import string
from llamatrain.gguf.writer import create_gguf
from llamatrain.train.directions import TextLoss
from tests.helpers import architecture_models
from tests.helpers.cli import TINY, Done, ran, run
from tests.helpers.small_models import Arrays, small, tokens, weights, written

H = small(layers=4)
TEXTS = (["hello world", "abc", "some words\\nhere"], ["good bye", "xyz", "other"])
FILES = ("m.gguf", "pos.txt", "neg.txt")
IDS = tokens(20)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and two files of texts."""
    monkeypatch.chdir(tmp_path)
    written(Path("m.gguf"), H, weights(H))
    for name, texts in zip(("pos.txt", "neg.txt"), TEXTS, strict=True):
        Path(name).write_text("\n".join(texts) + "\n")


def directions(path: str = "v.gguf") -> np.ndarray:
    """Those of all blocks but the first, in their order."""
    found = read_control_vector(Path(path), H)
    assert list(found) == list(range(1, H.layers))
    return np.stack([*found.values()])


def logits(model: str, *vectors: tuple[str, float], first: int = 1, last: int | None = None) -> np.ndarray:
    """Of some tokens, with control vectors."""
    gguf = open_gguf(model)
    h, leaves, arrays = load_with_adapters(gguf, AdapterOptions(), 1)
    options = ControlOptions(
        control_vector_scaled=tuple((Path(path), scale) for path, scale in vectors),
        control_vector_first=first,
        control_vector_last=last,
    )
    leaves, arrays = add_directions(leaves, arrays, load_control_vectors(options, h))
    return compute_logits(gguf, h, leaves, arrays, IDS, 1)


def failed(done: Done, told: str, code: int = 1) -> None:
    assert done.code == code and len(done.errors) == 1 and told in done.errors[0], done.err
    assert "Traceback" not in done.err and not Path("v.gguf").exists()


# ---- how vectors are made --------------------------------------------------


def hidden(text: str, place: str) -> np.ndarray:
    """The output of each block in plain torch: at the last token, or the mean over all."""
    pytest.importorskip("torch")
    import torch

    from tests.helpers import plain_llama

    ids = np.array([0, *(2 + byte for byte in text.replace("\\n", "\n").encode())])
    row = {"tokens": ids, "positions": np.arange(len(ids)), "starts": np.zeros(len(ids), np.int64)}
    outputs: list[torch.Tensor] = []
    plain_llama.logits(
        plain_llama.weights_of(weights(H)), plain_llama.Numbers(H.heads, H.kv_heads), [row], outputs
    )
    found = np.stack([output[0].detach().numpy() for output in outputs]).astype(np.float64)
    return found[:, -1] if place == "last" else found.mean(axis=1)


@pytest.mark.reference
@pytest.mark.parametrize("place", ["last", "all"])
def test_methods(place: str) -> None:
    rows = np.stack([hidden(one, place) - hidden(other, place) for one, other in zip(*TEXTS, strict=True)])[
        :, 1:
    ]
    ran("control-vector", *FILES, "--tokens", place, "--out", "v.gguf")
    np.testing.assert_allclose(directions(), rows.mean(axis=0), rtol=1e-3, atol=2e-4)
    ran("control-vector", *FILES, "--tokens", place, "--method", "pca", "--out", "p.gguf")
    for found, each in zip(directions("p.gguf"), rows.swapaxes(0, 1), strict=True):
        values, vectors = np.linalg.eigh(each.T @ each)
        main = vectors[:, -1]
        assert values[-1] > 1.2 * values[-2]  # else it would be unclear
        wanted = main * np.mean(each @ main)
        assert wanted @ each.mean(axis=0) > 0
        np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=2e-3)


def test_the_file_is_as_llama_cpp_writes_it() -> None:
    done = ran("control-vector", *FILES, "--out", "v.gguf")
    assert "v.gguf: a control vector of 3 blocks, from 3 pairs" in done.err
    file = open_gguf("v.gguf")
    assert dict(file.metadata) == {
        "general.architecture": "controlvector",
        "controlvector.model_hint": "llama",
        "controlvector.layer_count": 3,
    }
    assert file.metadata.raw_values["controlvector.layer_count"].kind.name == "INT32"
    assert [(name, each.type.name, each.shape) for name, each in file.tensors.items()] == [
        (f"direction.{layer}", "F32", (64,)) for layer in (1, 2, 3)
    ]
    assert "control vector" in ran("inspect", "v.gguf").out


@pytest.mark.parametrize("family", ["qwen35", "lfm2", "gemma3", "qwen3moe", "granitehybrid"])
def test_other_architectures(family: str) -> None:
    """Texts of other lengths must not change what a padded one gives, also with states; the effect is seen."""
    shape = architecture_models.shape_of(family, "a")
    architecture_models.written(Path("m.gguf"), shape, architecture_models.weights(shape))
    Path("pos.txt").write_text("ab\n")
    Path("neg.txt").write_text("xyz\n")
    ran("control-vector", *FILES, "--out", "one.gguf")
    Path("pos.txt").write_text("ab\nlonger text than the other\n")
    Path("neg.txt").write_text("xyz\nlonger text than the other\n")
    ran("control-vector", *FILES, "--out", "both.gguf")
    one, both = (open_gguf(f"{name}.gguf").tensors for name in ("one", "both"))
    assert len(one) == shape.layers - 1
    for name, tensor in one.items():
        np.testing.assert_allclose(
            both[name].raw.view("<f4") * 2, tensor.raw.view("<f4"), rtol=1e-3, atol=1e-4, err_msg=name
        )
    assert np.abs(logits("m.gguf", ("one.gguf", 3)) - logits("m.gguf")).max() > 0.01


# ---- what they change ------------------------------------------------------


def with_biases(change: Arrays) -> str:
    """A model whose feed-forward parts add vectors, which is the same as control vectors in a llama."""
    arrays = weights(H)
    h = small(layers=4, optional_weights=frozenset({"blk.{}.ffn_down.bias"}))
    zeros = {f"blk.{layer}.ffn_down.bias": np.zeros(H.embd, np.float32) for layer in range(H.layers)}
    written(Path("biased.gguf"), h, arrays | zeros | change)
    return "biased.gguf"


def test_a_direction_is_added_to_the_output_of_its_block() -> None:
    random = np.random.default_rng(5)
    made = {layer: random.standard_normal(H.embd, np.float32) for layer in (1, 3)}
    write_control_vector(Path("v.gguf"), made, H)
    biases = {f"blk.{layer}.ffn_down.bias": np.float32(-1.5) * each for layer, each in made.items()}
    wanted, found = logits(with_biases(biases)), logits("m.gguf", ("v.gguf", -1.5))
    assert np.abs(found - wanted).max() < 1e-3 < 1 < np.abs(found - logits("m.gguf")).max()
    only = {name: each for name, each in biases.items() if name.startswith("blk.3.")}
    assert np.abs(logits("m.gguf", ("v.gguf", -1.5), first=2) - logits(with_biases(only))).max() < 1e-3
    only = {name: each for name, each in biases.items() if name.startswith("blk.1.")}
    assert np.abs(logits("m.gguf", ("v.gguf", -1.5), last=2) - logits(with_biases(only))).max() < 1e-3
    twice = logits("m.gguf", ("v.gguf", -1.0), ("v.gguf", -0.5))
    assert np.abs(twice - wanted).max() < 1e-3
    assert np.array_equal(logits("m.gguf", ("v.gguf", 0)), logits("m.gguf"))


@pytest.mark.parametrize("method", ["mean", "pca", "trained"])
def test_a_trained_model_is_led(method: str) -> None:
    """Of two habits that a model has learned, the vector makes one likelier, and its opposite the other."""
    chosen = np.random.default_rng(1).choice(["ab", "xy"], 400)
    Path("text.txt").write_text("".join(f"{6 * pair}.\n" for pair in chosen))
    rows = ("--iters", 120, "--batch", 8, "--ctx", 32, "--lr", 5e-3, "--seed", 1)
    ran("from-scratch", "text.txt", *TINY, *rows, "--out", "run")
    Path("pos.txt").write_text("abab\nab\nababab\n")
    Path("neg.txt").write_text("xyxy\nxy\nxyxyxy\n")
    ran("control-vector", "run/model.gguf", *FILES[1:], "--method", method, "--out", "v.gguf")
    gguf = open_gguf("run/model.gguf")

    def share_of_a(scale: float) -> float:
        h, leaves, arrays = load_with_adapters(gguf, AdapterOptions(), 1)
        vector = load_control_vectors(ControlOptions(control_vector_scaled=((Path("v.gguf"), scale),)), h)
        leaves, arrays = add_directions(leaves, arrays, vector)
        found = log_softmax(compute_logits(gguf, h, leaves, arrays, [0, 2 + ord("."), 2 + ord("\n")], 1))[-1]
        a, x = np.exp(found[[2 + ord("a"), 2 + ord("x")]])
        return float(a / (a + x))

    less, plain, more = (share_of_a(scale) for scale in (-1, 0, 1))
    assert less + 0.1 < plain < more - 0.1, (less, plain, more)


def loss_of(text: str, *vectors: tuple[str, float]) -> float:
    """The negative log-likelihood of a text, from the logits of `generate`."""
    gguf, ids = open_gguf("m.gguf"), [0, *(2 + byte for byte in text.encode())]
    h, leaves, arrays = load_with_adapters(gguf, AdapterOptions(), 1)
    options = ControlOptions(control_vector_scaled=tuple((Path(path), scale) for path, scale in vectors))
    leaves, arrays = add_directions(leaves, arrays, load_control_vectors(options, h))
    found = log_softmax(compute_logits(gguf, h, leaves, arrays, ids, 1))
    return -float(sum(found[place, token] for place, token in enumerate(ids[1:])))


def test_the_loss_of_a_text_and_its_gradient() -> None:
    """The loss beside the logits of `generate`, also in a padded row, and the gradient beside differences of it."""
    h, leaves, arrays = load_with_adapters(open_gguf("m.gguf"), AdapterOptions(), 1)
    loss = TextLoss(h, leaves, arrays, 20, create_device("cpu", 1))
    ids, random = [0, *(2 + byte for byte in b"abcdef")], np.random.default_rng(3)
    made = random.standard_normal((H.layers - 1, H.embd)).astype(np.float32)
    write_control_vector(Path("v.gguf"), dict(enumerate(made, 1)), H)
    value, gradient = loss.compute(ids, made)
    assert value == pytest.approx(loss_of("abcdef", ("v.gguf", 1)), rel=1e-4)
    assert loss.compute(ids, 0 * made)[0] == pytest.approx(loss_of("abcdef"), rel=1e-4)
    for layer in range(H.layers - 1):
        way = np.zeros_like(made)
        way[layer] = random.standard_normal(H.embd)
        more, less = (loss.compute(ids, made + size * way)[0] for size in (1e-2, -1e-2))
        assert np.vdot(gradient, way) == pytest.approx((more - less) / 2e-2, rel=2e-2, abs=2e-2)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_training_tells_the_sides_apart(kind: str) -> None:
    """The positive texts become likelier beside the negative ones, and the loss is what the command says."""
    written(Path("m.gguf"), H, weights(H), kind)
    Path("pos.txt").write_text("hello\nabc\n")
    Path("neg.txt").write_text("good\nxyz\n")
    options = ("--method", "trained", "--iters", 6, "--out", "v.gguf")
    done = ran("control-vector", *FILES, *options)
    pairs = (("hello", "good"), ("abc", "xyz"))
    gains = [
        (loss_of(other, ("v.gguf", 1)) - loss_of(one, ("v.gguf", 1))) - (loss_of(other) - loss_of(one))
        for one, other in pairs
    ]
    assert min(gains) > 1
    told = float(done.err.partition("before the last step")[0].split()[-1])
    assert "the loss of a pair was 0.693 at first, " in done.err and told < 0.5
    assert np.mean(np.logaddexp(0, -np.array(gains))) < told
    first = Path("v.gguf").read_bytes()
    ran("control-vector", *FILES, *options, "--overwrite", "--threads", 2)
    assert Path("v.gguf").read_bytes() == first


def test_from_python_and_in_chats() -> None:
    made = llamatrain.control_vector(*FILES, out="v.gguf", method="pca")
    assert made.pairs == 3 and list(made.lengths) == [1, 2, 3] and min(made.lengths.values()) > 0
    words = ("generate", "m.gguf", "--prompt", "ab", "-n", 8, "--temp", 0, "-v")
    done = ran(*words, "--control-vector", "v.gguf", "--control-vector-scaled", "v.gguf", 2)
    same = ran(*words, "--control-vector-scaled", "v.gguf", 3, "--control-vector-first", 2)
    assert "--control-vector v.gguf --control-vector-scaled v.gguf:2 " in done.err
    assert "--control-vector-scaled v.gguf:3 --control-vector-layer-range 2 0 " in same.err
    model = llamatrain.load("m.gguf", control_vector="v.gguf", control_vector_scaled=[("v.gguf", 2)])
    assert model.generate("ab", n=8, temp=0) == done.out.removesuffix("\n") != same.out
    assert llamatrain.load("m.gguf").generate("ab", n=8, temp=0) != done.out


# ---- what is refused -------------------------------------------------------


def vector_file(path: str, shapes: dict[str, tuple[int, ...]], kind: str = "F32", **keys: str) -> None:
    """A file with zeros as its tensors."""
    infos = [TensorInfo(name, type_by_name(kind), shape) for name, shape in shapes.items()]
    metadata = {"general.architecture": string(keys.get("architecture", "controlvector"))}
    with create_gguf(path, metadata, infos) as out:
        for info in infos:
            out.write(info.name, [bytes(info.nbytes)])


@pytest.mark.parametrize(
    ("shapes", "kind", "told"),
    [
        ({"direction.0": (64,)}, "F32", "'direction.0' is not a direction for a model of 4 blocks"),
        ({"direction.4": (64,)}, "F32", "the names are direction.1 to direction.3 [unknown-tensor]"),
        ({"direction.x": (64,)}, "F32", "'direction.x' is not a direction"),
        ({"direction.01": (64,)}, "F32", "'direction.01' is not a direction"),
        ({"direction.1": (32,)}, "F32", "direction.1 must be F32 with 64 numbers, as wide as the model"),
        ({"direction.1": (2, 64)}, "F32", "(got F32 [2, 64])"),
        ({"direction.1": (64,)}, "F16", "(got F16 [64])"),
        ({}, "F32", "no control vector has a direction for the blocks 1 to 3"),
    ],
)
def test_broken_files(shapes: dict[str, tuple[int, ...]], kind: str, told: str) -> None:
    vector_file("w.gguf", shapes, kind)
    code = 2 if told.startswith("no control vector") else 1
    failed(run("generate", "m.gguf", "--prompt", "a", "--control-vector", "w.gguf"), told, code)


def test_files_that_are_no_vectors() -> None:
    words = ("generate", "m.gguf", "--prompt", "a", "--control-vector")
    failed(run(*words, "m.gguf"), "m.gguf: a control vector is needed (got a file of kind model)")
    failed(run(*words, "nix.gguf"), "nix.gguf: No such file", 2)
    failed(run(*words, "pos.txt"), "pos.txt")
    write_control_vector(Path("w.gguf"), {1: np.full(64, np.nan, np.float32)}, H)
    failed(run(*words, "w.gguf"), "w.gguf: direction.1 is not finite")
    write_control_vector(Path("w.gguf"), {1: np.ones(64, np.float32)}, H)
    failed(run(*words, "w.gguf", "--control-vector-first", 2), "blocks 2 to 3; change --control-vector-", 2)
    failed(run(*words, "w.gguf", "--control-vector-last", 0), "--control-vector-last must be ", 2)
    failed(run("generate", "w.gguf", "--prompt", "a"), "w.gguf: a control vector, not a model")


@pytest.mark.parametrize(
    ("positive", "negative", "told"),
    [
        (b"a\nb\n", b"c\n", "neg.txt: there must be as many lines as in pos.txt"),
        (b"", b"c\n", "pos.txt: the file has no text"),
        (b"\n\n", b"\n", "pos.txt: the file has no text"),
        (b"\xff\xfe", b"c\n", "pos.txt: byte 0 is not UTF-8"),
        (b"a\n", b"x" * 80, "neg.txt: a text must fit the model's context of 64 tokens (got 81)"),
        (b"same\n", b"same\n", "the texts of each pair give the same"),
    ],
)
def test_broken_texts(positive: bytes, negative: bytes, told: str) -> None:
    Path("pos.txt").write_bytes(positive)
    Path("neg.txt").write_bytes(negative)
    failed(run("control-vector", *FILES, "--out", "v.gguf"), told)


def test_options_without_an_effect() -> None:
    words = ("control-vector", *FILES, "--out", "v.gguf")
    failed(run(*words, "--iters", 3), "--iters has no effect with --method mean", 2)
    failed(run(*words, "--method", "pca", "--lr", 0.1), "--lr has no effect with --method pca", 2)
    failed(run(*words, "--method", "trained", "--tokens", "all"), "--tokens has no effect with --method", 2)
    failed(run(*words, "--method", "trained", "--lr", 0), "--lr must be more than 0, and at most 1", 2)


def test_other_refusals() -> None:
    failed(run("control-vector", "m.gguf", "pos.txt", "nix.txt", "--out", "v.gguf"), "nix.txt: No such", 2)
    failed(
        run("control-vector", "m.gguf", "pos.txt", ".", "--out", "v.gguf"), "must be a file (got a folder)"
    )
    done = run("control-vector", *FILES, "--out", "pos.txt", "--overwrite")
    assert done.code == 2 and "would replace the input pos.txt" in done.err
    one = small(layers=1)
    written(Path("m.gguf"), one, weights(one))
    failed(run("control-vector", *FILES, "--out", "v.gguf"), "the model has one block only")
    shape = architecture_models.shape_of("gemma3n", "a")
    architecture_models.written(Path("m.gguf"), shape, architecture_models.weights(shape))
    failed(run("control-vector", *FILES, "--out", "v.gguf"), "control vectors do not work with a gemma3n", 2)
