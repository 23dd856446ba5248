"""The result in llama.cpp itself, and the checkpoints of its old training programs in ours."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llamatrain.gguf.reader import open_gguf
from tests.helpers.cli import TINY, ran, rows, run, steps, tensors, text_file
from tests.helpers.llama_cpp import Served, served
from tests.helpers.test_data import material


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained long enough that its choices are clear."""
    place = tmp_path_factory.mktemp("model")
    more = ("--head-kv", 2, "--ctx", 64, "--batch", 4, "--iters", 250, "--lr", 1e-2, "--seed", 2)
    ran("from-scratch", text_file(place, 1000), *TINY, *more, "--out", place / "run")
    return place / "run" / "model.gguf"


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a vocabulary learned from the text, and tied embeddings."""
    place = tmp_path_factory.mktemp("learned")
    shape = ("--embd", 48, "--head", 4, "--layer", 2, "--ff", 96, "--tie-embeddings", "--vocab-size", 400)
    more = ("--ctx", 64, "--batch", 4, "--iters", 150, "--lr", 1e-2, "--precision", "f32")
    ran("from-scratch", text_file(place, 4000), *shape, *more, "--out", place / "run")
    return place / "run" / "model.gguf"


@pytest.fixture(params=["model", "learned"])
def either(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture
def server(either: Path) -> Iterator[Served]:
    with served(either) as server:
        yield server


@pytest.mark.llama_cpp
def test_the_same_tokens(server: Served, either: Path) -> None:
    from llamatrain.data.tokenizer import load

    text = (either.parent.parent / "text.txt").read_text()[:500] + " Ünïcödé \U0001f600\n"
    ours = load(open_gguf(either).metadata).encode(text)
    assert ours.tolist() == server.tokenize(text, special=False)


@pytest.mark.llama_cpp
def test_the_same_greedy_text(server: Served, either: Path) -> None:
    prompt = (either.parent.parent / "text.txt").read_text()[:12]
    ours = ran("generate", either, "--prompt", prompt, "-n", 40, "--temp", 0)
    theirs = server.post(
        "completion", prompt=prompt, n_predict=40, temperature=0, cache_prompt=False, repeat_penalty=1.0
    )
    assert len(theirs["content"]) > 20
    assert ours.out.removeprefix(prompt).rstrip("\n") == theirs["content"].rstrip("\n")


@pytest.mark.llama_cpp
@pytest.mark.reference
@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_logits(seed: int, either: Path) -> None:
    """Plain torch stands for our own, whose losses are the same (test_training_torch.py)."""
    from tests.helpers.plain_llama import Numbers, logits, weights_of

    llama_cpp = pytest.importorskip("llama_cpp")
    found = open_gguf(either)
    heads = [found.get_value(f"llama.attention.head_count{kv}", int) for kv in ("", "_kv")]
    (row,) = rows(1, either.parent.parent / "text.txt", "--model", either, "--ctx", 48, "--seed", seed)
    theirs = llama_cpp.Llama(
        str(either), n_ctx=64, logits_all=True, type_k=0, type_v=0, n_threads=1, verbose=False
    )
    theirs.eval(row["tokens"].tolist())
    scores = np.array(theirs.scores[: len(row["tokens"])])
    theirs.close()
    ours = logits(weights_of(tensors(either)), Numbers(*heads), [row])[0].detach().numpy()
    assert np.abs(ours - scores).max() <= 2e-3 * max(1.0, np.abs(scores).max())


# ---- the ancestors' checkpoints --------------------------------------------


def moments(path: Path, which: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By name; the file has them in the order in which the ancestor's graph meets the weights."""
    layers = sum(name.endswith("attn_q.weight") for name in weights)
    order = ["output", "output_norm"]
    for layer in reversed(range(layers)):
        order += [
            f"blk.{layer}.{name}" for name in ("ffn_down", "ffn_gate", "ffn_norm", "attn_output", "attn_norm")
        ]
    order.append("token_embd")
    for layer in range(layers):
        order += [f"blk.{layer}.{name}" for name in ("attn_v", "attn_k", "attn_q", "ffn_up")]
    flat, found = tensors(path)[f"optimizer.adam.{which}_moments"], {}
    for name in order:
        array = weights[f"{name}.weight"]
        found[f"{name}.weight"], flat = flat[: array.size].reshape(array.shape), flat[array.size :]
    assert not flat.size
    return found


ANCESTOR, GOES_ON = "ancestors/train-checkpoint.gguf", ("--ctx", 32, "--batch", 2, "--seed", 1)


def test_an_ancestor_s_checkpoint_goes_on(tmp_path: Path) -> None:
    checkpoint, data = material(ANCESTOR), text_file(tmp_path)
    command = ("from-scratch", data, "--checkpoint-in", checkpoint, *GOES_ON, "--iters", 30)
    done = ran(*command, "--out", tmp_path / "run")
    told = steps(tmp_path / "run")
    assert [line["step"] for line in told] == list(range(21, 31))
    assert told[0]["tokens"] == open_gguf(checkpoint).get_value("training.token_count", int) + 2 * 32
    assert "shuffle" in done.err, "it starts anew, and it is said"


@pytest.mark.reference
def test_an_ancestor_s_moments_are_taken(tmp_path: Path) -> None:
    """The same losses as torch's AdamW that begins with those moments at that step."""
    import torch

    from tests.helpers.plain_llama import Numbers, Trainer, weights_of

    checkpoint, data = material(ANCESTOR), text_file(tmp_path)
    found = open_gguf(checkpoint)
    rate = ("--schedule", "constant", "--warmup", 0, "--lr", 1e-3, "--precision", "f32")
    ran(
        "from-scratch",
        data,
        "--checkpoint-in",
        checkpoint,
        *GOES_ON,
        *rate,
        "--iters",
        30,
        "--out",
        tmp_path / "run",
    )
    arrays = {
        name: array
        for name, array in tensors(checkpoint).items()
        if not name.startswith(("optimizer", "training"))
    }
    first, second = (moments(checkpoint, which, arrays) for which in ("first", "second"))
    trainer = Trainer(weights_of(arrays), 1.0)
    for name, weight in trainer.w.items():
        state = {
            "step": torch.tensor(20.0),
            "exp_avg": torch.tensor(first[name]),
            "exp_avg_sq": torch.tensor(second[name]),
        }
        trainer.optimizer.state[weight] = state
    eps = found.get_value("llama.attention.layer_norm_rms_epsilon", float)
    numbers = Numbers(heads := found.get_value("llama.attention.head_count", int), heads, eps)
    shown = rows(20, data, "--model", material("ancestors/model.gguf"), *GOES_ON)
    for number, line in enumerate(steps(tmp_path / "run")):
        loss, _ = trainer.step(numbers, shown[2 * number : 2 * number + 2], 1e-3)
        assert line["loss"] == pytest.approx(loss, abs=1e-4), line["step"]


def test_an_ancestor_s_adapter_is_no_model(tmp_path: Path) -> None:
    from tests.run.test_from_scratch_errors import refused

    checkpoint = material("ancestors/lora-checkpoint.gguf")
    done = run("from-scratch", text_file(tmp_path), "--checkpoint-in", checkpoint, "--out", tmp_path / "run")
    refused(done, (1, 2), "lora|finetune|adapter")
