"""Distillation: a model learns a teacher's distributions beside the data, exactly; against torch, and as runs have it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.engine.program import Program
from llamatrain.gguf.reader import open_gguf
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.tensor import I32, parameter, placeholder, state
from llamatrain.model.distill import distillation_loss
from tests.helpers.cli import Argument, losses, metrics, ran, run, same_bits, text_file
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small

WORDS, WIDTH, ROWS = 11, 6, 9


def arrays(dtype: type) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    made = {"x": (ROWS, WIDTH), "w": (WORDS, WIDTH), "taught": (ROWS, WORDS + 2)}
    found = {name: random.standard_normal(shape).astype(dtype) for name, shape in made.items()}
    weights = random.random(ROWS).astype(dtype)
    weights[4] = 0
    return {**found, "weights": weights, "targets": random.integers(0, WORDS, ROWS).astype(np.int32)}


def graphed(share: float, dtype: Any) -> tuple[list[Any], dict[Any, np.ndarray]]:
    """Loss and gradients of x and w; the teacher has two tokens more than the model, which count for nothing."""
    from llamatrain.graph import ops as O

    given = arrays(dtype.numpy)
    x, w = (parameter(name, given[name].shape, dtype) for name in ("x", "w"))
    taught, weights = state("taught", given["taught"].shape, dtype), placeholder("weights", (ROWS,), dtype)
    targets = placeholder("targets", (ROWS,), I32)
    loss = distillation_loss(O.matmul(x, w), taught, targets, weights, share)
    value, grads = value_and_gradients(loss, [x, w])
    return [value, *grads], {leaf: given[leaf.name] for leaf in (x, w, taught, weights, targets)}


def by_hand(share: float, dtype: type = np.float64) -> float:
    given = arrays(dtype)

    def log_soft_max(z: np.ndarray) -> np.ndarray:
        return z - np.log(np.sum(np.exp(z), -1, keepdims=True))

    found, wanted = log_soft_max(given["x"] @ given["w"].T), np.exp(log_soft_max(given["taught"][:, :WORDS]))
    own = found[np.arange(ROWS), given["targets"]]
    return float(-np.sum(given["weights"] * ((1 - share) * own + share * np.sum(wanted * found, -1))))


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_the_loss_is_the_mix(share: float, kernels: str) -> None:
    from llamatrain.graph.tensor import F32, F64

    dtype = F64 if kernels == "reference" else F32
    outputs, leaves = graphed(share, dtype)
    program = Program.build(outputs, leaves, kernels=kernels)
    program()
    assert float(program.read(outputs[0])) == pytest.approx(
        by_hand(share), rel=1e-10 if kernels == "reference" else 1e-5
    )


def test_gradients_against_differences() -> None:
    from llamatrain.graph.tensor import F64

    outputs, leaves = graphed(0.3, F64)
    values = {leaf: array.copy() for leaf, array in leaves.items()}
    program = Program.build(outputs, values, kernels="reference")
    program()
    grads = [program.read(each).copy() for each in outputs[1:]]
    for grad, leaf in zip(grads, list(leaves)[:2], strict=True):
        found = np.zeros_like(grad)
        for place in np.ndindex(grad.shape):
            for sign in (1, -1):
                moved = leaves[leaf].copy()
                moved[place] += sign * 1e-6
                program.write(leaf, moved)
                program()
                found[place] += sign * float(program.read(outputs[0])) / 2e-6
        program.write(leaf, leaves[leaf])
        np.testing.assert_allclose(grad, found, atol=1e-8)


def test_torch_has_the_same_loss_and_gradients() -> None:
    torch = pytest.importorskip("torch")
    from llamatrain.graph.tensor import F32

    outputs, leaves = graphed(0.5, F32)
    program = Program.build(outputs, leaves)
    program()
    given = {name: torch.tensor(array) for name, array in arrays(np.float32).items()}
    x, w = given["x"].requires_grad_(), given["w"].requires_grad_()
    logits = x @ w.T
    own = torch.nn.functional.cross_entropy(logits, given["targets"].long(), reduction="none")
    soft = torch.nn.functional.cross_entropy(
        logits, torch.softmax(given["taught"][:, :WORDS], -1), reduction="none"
    )
    loss = (given["weights"] * (0.5 * own + 0.5 * soft)).sum()
    loss.backward()
    assert float(program.read(outputs[0])) == pytest.approx(loss.item(), rel=1e-5)
    for ours, theirs in zip(outputs[1:], (x.grad, w.grad), strict=True):
        np.testing.assert_allclose(program.read(ours), theirs.numpy(), atol=1e-5)


# ---- runs ------------------------------------------------------------------

SMALL = ("--embd", 32, "--head", 4, "--layer", 1, "--ff", 64, "--ctx", 16, "--batch", 2, "--precision", "f32")


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return base(tmp_path / "teacher.gguf", small(layers=1))


def test_a_new_model_takes_its_vocabulary(teacher: Path, tmp_path: Path) -> None:
    """Its validation is of the data alone; all of a teacher's weight is all of the loss."""
    task = ("from-scratch", text_file(tmp_path), *SMALL, "--iters", 3, "--val-split", 0.1, "--eval-every", 1)
    ran(*task, "--teacher", teacher, "--out", tmp_path / "taught")
    tokens = [
        open_gguf(path).metadata["tokenizer.ggml.tokens"]
        for path in (teacher, tmp_path / "taught" / "model.gguf")
    ]
    assert tokens[0] == tokens[1]
    ran(*task, "--vocab-from", teacher, "--out", tmp_path / "alone")
    ran(*task, "--teacher", teacher, "--teacher-weight", 0, "--out", tmp_path / "nothing")
    assert losses(tmp_path / "taught")[0] != pytest.approx(losses(tmp_path / "alone")[0], rel=1e-4)
    assert losses(tmp_path / "nothing") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    told = [
        [line["val_loss"] for line in metrics(tmp_path / name) if "val_loss" in line]
        for name in ("nothing", "alone")
    ]
    assert told[0] == pytest.approx(told[1], rel=1e-5)


def test_a_model_is_its_own_best_pupil(teacher: Path, tmp_path: Path) -> None:
    """Taught by itself alone an adapter has nothing to learn: its gradients are nothing."""
    task = (
        "finetune",
        teacher,
        text_file(tmp_path),
        "--ctx",
        16,
        "--batch",
        2,
        "--lora-r",
        2,
        "--lora-alpha",
        2,
        "--iters",
        2,
        "--lr",
        1e-4,  # Adam makes whole steps of rounding errors, too
        "--precision",
        "f32",
    )
    ran(*task, "--teacher", teacher, "--teacher-weight", 1, "--eval-every", 0, "--out", tmp_path / "a")
    assert all(line["grad_norm"] < 1e-5 for line in metrics(tmp_path / "a"))


WAYS: dict[str, tuple[Argument, ...]] = {
    "kept": (),
    "streamed": ("--clip", 0),
    "accumulated": ("--grad-acc", 2),
    "bf16": ("--precision", "bf16"),
    "plain": ("--no-flash",),
    "quantised": (),
}


@pytest.mark.parametrize("way", WAYS)
def test_some_steps_and_then_the_rest(way: str, teacher: Path, tmp_path: Path) -> None:
    if way == "quantised":
        teacher = base(tmp_path / "q.gguf", small(layers=1), "Q8_0")
    task = (
        "from-scratch",
        text_file(tmp_path),
        *SMALL,
        "--warmup",
        1,
        "--decay-steps",
        3,
        "--teacher",
        teacher,
        *WAYS[way],
    )
    ran(*task, "--iters", 4, "--out", tmp_path / "whole")
    ran(*task, "--iters", 2, "--out", tmp_path / "parts")
    ran("from-scratch", "--resume", tmp_path / "parts", "--iters", 4)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    same_bits(tmp_path / "whole" / "model.gguf", tmp_path / "parts" / "model.gguf")


def test_its_memory_is_planned(teacher: Path, tmp_path: Path) -> None:
    task = (
        "plan",
        "from-scratch",
        text_file(tmp_path),
        *SMALL,
        "--vocab-from",
        teacher,
        "--threads",
        2,
        "--json",
    )
    alone, taught = (json.loads(ran(*task, *more).out) for more in ((), ("--teacher", teacher)))
    size = sum(4 * int(np.prod(tensor.shape)) for tensor in open_gguf(teacher).tensors.values())
    assert taught["packed_copies"] - alone["packed_copies"] == size
    assert taught["arena"] > alone["arena"]


def test_what_cannot_be_is_one_line(teacher: Path, tmp_path: Path) -> None:
    text = text_file(tmp_path)
    ran("from-scratch", text, *SMALL, "--vocab-size", 300, "--iters", 1, "--out", tmp_path / "other")
    other, task = (
        tmp_path / "other" / "model.gguf",
        ("from-scratch", text, *SMALL, "--iters", 1, "--out", tmp_path / "run"),
    )
    for given, told in (
        (
            ("--teacher", teacher, "--vocab-from", other),
            f"{teacher}: a teacher must have the vocabulary of the model",
        ),
        (("--teacher", tmp_path / "nothing.gguf"), "No such file"),
        (("--teacher", text), "a GGUF file is needed"),
        (("--teacher", teacher, "--vocab-size", 300), "--vocab-size has no effect with --teacher"),
        (("--teacher-weight", 0.4), "[unused-option]"),
        (("--teacher", teacher, "--teacher-weight", 1.5), "--teacher-weight"),
    ):
        done = run(*task, *given)
        assert done.code in (1, 2) and len(done.errors) == 1 and told in done.errors[0], done.err
    done = run("from-scratch", "--teacher", teacher, "--out", tmp_path / "run")
    assert done.code == 2 and "--teacher has no effect on the built-in sine wave" in done.errors[0]
    done = run(
        "finetune", other, text, "--teacher", teacher, "--ctx", 16, "--iters", 1, "--out", tmp_path / "tuned"
    )
    assert done.code in (1, 2) and "[teacher-vocabulary]" in done.errors[0]


def test_another_teacher_is_no_teacher_of_the_run(teacher: Path, tmp_path: Path) -> None:
    ran(
        "from-scratch",
        text_file(tmp_path),
        *SMALL,
        "--teacher",
        teacher,
        "--iters",
        1,
        "--out",
        tmp_path / "run",
    )
    assert read_checkpoint(tmp_path / "run" / "checkpoint-1.gguf").extra["teacher"]
    base(teacher, small(layers=2))
    done = run("from-scratch", "--resume", tmp_path / "run", "--iters", 2)
    assert done.code == 1 and f"{teacher}: " in done.errors[0] and "[changed-input]" in done.errors[0]
    teacher.unlink()
    done = run("from-scratch", "--resume", tmp_path / "run", "--iters", 2)
    assert done.code == 2 and str(teacher) in done.errors[0]
