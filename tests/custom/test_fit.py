"""Training, evaluation and files of graphs that users build."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.custom import Dataset, EpochResult, FitStep, Graph, evaluate, fit, ops, predict
from llamatrain.distributed.launcher import LaunchInfo
from llamatrain.errors import FileError, LlamatrainError
from llamatrain.graph.tensor import I32
from llamatrain.optim.methods.adamw import AdamW

RANDOM = np.random.default_rng(5)
IMAGES = RANDOM.standard_normal((30, 1, 6, 6)).astype(np.float32)
CLASSES = (IMAGES[:, 0, :3].sum((1, 2)) > IMAGES[:, 0, 3:].sum((1, 2))).astype(np.int64)
DATA = Dataset(IMAGES, CLASSES)


def build_net(batch: int = 8, **how: Any) -> Graph:
    """A convolution, both pools and a dense layer."""
    graph = Graph(batch=batch, **how)
    x = graph.conv_2d("conv", graph.input((1, 6, 6)), 3, 3, padding=1)
    x = ops.pool_2d(ops.relu(x), 2)
    x = ops.pool_2d(x, 2, kind="average", stride=1)
    graph.output = graph.linear("output", ops.flatten(x), 2)
    return graph


def build_line(batch: int = 4) -> Graph:
    """A linear function of three numbers."""
    graph = Graph(batch=batch)
    graph.output = graph.linear("line", graph.input((3,)), 1)
    return graph


def identity(batch: int, *shape: int) -> Graph:
    """An output that is the input, scaled by a weight of one."""
    graph = Graph(batch=batch)
    graph.output = ops.mul(graph.input(shape), graph.weight("one", (1,), 1.0))
    return graph


# ---- training --------------------------------------------------------------


@pytest.mark.reference
@pytest.mark.parametrize("batch", [8, 16])
def test_training_is_torchs(batch: int) -> None:
    """Two epochs, whose last steps are shorter, with micro-batches or without, and clipping."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    functional = torch.nn.functional
    graph = build_net()
    weights = {name: torch.from_numpy(array.copy()).requires_grad_() for name, array in graph.weights.items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for each in weights.values() if each.ndim > 1], "weight_decay": 0.1},
            {"params": [each for each in weights.values() if each.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    wanted = []
    for start in [*range(0, 30, batch)] * 2:
        rows = slice(start, start + batch)
        x = torch.from_numpy(IMAGES[rows])
        x = functional.relu(functional.conv2d(x, weights["conv.weight"], weights["conv.bias"], padding=1))
        x = functional.avg_pool2d(functional.max_pool2d(x, 2), 2, stride=1).flatten(1)
        scores = functional.linear(x, weights["output.weight"], weights["output.bias"])
        loss = functional.cross_entropy(scores, torch.from_numpy(CLASSES[rows]))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), 0.5)
        optimizer.step()
        wanted.append((loss.item(), norm.item()))
    steps: list[FitStep] = []
    fit(graph, DATA, lr=1e-2, epochs=2, batch=batch, shuffle=False, clip=0.5, on_step=steps.append)
    np.testing.assert_allclose([(step.loss, step.grad_norm) for step in steps], wanted, rtol=1e-3)
    assert [step.samples for step in steps] == [*[batch] * (30 // batch), 30 % batch] * 2
    for name, array in graph.weights.items():
        np.testing.assert_allclose(array, weights[name].detach().numpy(), rtol=1e-2, atol=1e-4)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    found = []
    for threads in (1, 2, 3):
        graph = build_net()
        result = fit(graph, DATA, epochs=3, batch=16, validation=0.2, threads=threads)
        found.append((graph.weights, result.epochs[-1].training, result.validation))
    for weights, *scores in found[1:]:
        assert str(scores) == str(list(found[0][1:]))
        assert all(np.array_equal(array, found[0][0][name]) for name, array in weights.items())


@pytest.mark.reference
def test_another_device_trains_alike() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    found = {}
    for device in ("cpu", "torch-cpu"):
        graph = build_net()
        fit(graph, DATA, epochs=3, device=device)
        found[device] = graph.weights
    for name, array in found["cpu"].items():
        np.testing.assert_allclose(found["torch-cpu"][name], array, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamuon", "sgd", AdamW(weight_decay=0.0, beta1=0.5)])
def test_each_optimizer_finds_a_line(optimizer: Any) -> None:
    x = np.random.default_rng(1).standard_normal((64, 3)).astype(np.float32)
    data, graph = Dataset(x, x @ [[1.0], [-2.0], [0.5]] + 3), build_line()
    before = evaluate(graph, data, loss="mse")
    result = fit(graph, data, loss="mse", optimizer=optimizer, lr=0.02, epochs=20)
    assert before.loss > 5 and evaluate(graph, data, loss="mse").loss < 0.2
    assert before.accuracy is None and result.training.accuracy is None


def test_samples_are_shuffled_anew_in_each_epoch() -> None:
    """Each step's loss is a sample's number."""
    data = Dataset(np.arange(5)[:, None])

    def losses(**how: Any) -> list[float]:
        steps: list[FitStep] = []
        fit(identity(1, 1), data, loss="mean", lr=0.0, epochs=3, on_step=steps.append, **how)
        return [step.loss for step in steps]

    shuffled = losses()
    epochs = [shuffled[start : start + 5] for start in (0, 5, 10)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert losses() == shuffled != losses(seed=1)
    assert losses(shuffle=False) == [0, 1, 2, 3, 4] * 3


def test_inputs_with_names_and_whole_numbers() -> None:
    """An embedding and a number, whose output is the loss of each sample."""
    graph = Graph(batch=4)
    ids, aim = graph.input((2,), "ids", I32), graph.input((3,), "aim")
    table = graph.weight("table", (7, 3))
    seen = ops.reshape(ops.get_rows(table, ids), shape=(4, 2, 3))
    first = ops.reshape(ops.view(seen, slices=((0, 4, 1), (0, 1, 1), (0, 3, 1))), shape=(4, 3))
    graph.output = ops.sqr(ops.sub(first, aim))
    ids_given, wanted = RANDOM.integers(0, 7, (40, 2)), RANDOM.standard_normal((7, 3))
    data = Dataset({"ids": ids_given, "aim": wanted[ids_given[:, 0]]})
    fit(graph, data, loss="mean", epochs=60, lr=0.05, optimizer=AdamW(weight_decay=0.0))
    np.testing.assert_allclose(graph.weights["table"], wanted, atol=0.1)


# ---- callbacks -------------------------------------------------------------


def test_callbacks_see_steps_and_epochs_and_can_stop() -> None:
    steps: list[FitStep] = []
    epochs: list[EpochResult] = []

    def third(step: FitStep) -> bool:
        steps.append(step)
        return step.step == 3

    result = fit(build_net(), DATA, epochs=2, on_step=third, on_epoch=epochs.append)
    assert [step.step for step in steps] == [1, 2, 3] and {step.steps for step in steps} == {8}
    assert not result.finished and result.epochs == epochs and epochs[0].training.samples == 24
    assert epochs[0].training.loss == pytest.approx(np.mean([step.loss for step in steps]))
    result = fit(build_net(), DATA, epochs=9, validation=DATA[:5], on_epoch=lambda epoch: epoch.epoch == 2)
    assert len(result.epochs) == 2 and not result.finished
    assert result.validation is not None and result.validation.samples == 5
    assert fit(build_net(), DATA, epochs=2).finished


def test_an_error_of_a_callback_ends_the_training() -> None:
    def fail(step: FitStep) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fit(build_net(), DATA, on_step=fail)


def test_the_rate_may_be_a_function_of_the_step() -> None:
    steps: list[FitStep] = []
    graph = build_net()
    before = {name: array.copy() for name, array in graph.weights.items()}
    fit(graph, DATA, lr=lambda step: 0.1 if step == 3 else 0.0, on_step=steps.append)
    assert [step.lr for step in steps] == [0, 0, 0.1, 0]
    assert steps[0].loss != steps[3].loss
    assert any((array != before[name]).any() for name, array in graph.weights.items())


# ---- scores ----------------------------------------------------------------


def test_scores_are_those_of_numpy() -> None:
    """Batches of 4, 4 and 2: the uncertainty is the standard error of their losses, weighted by samples."""
    scores = RANDOM.standard_normal((10, 5)).astype(np.float32)
    targets = RANDOM.integers(0, 5, 10)
    found = evaluate(identity(4, 5), Dataset(scores, targets))
    losses = np.log(np.exp(scores).sum(1)) - scores[np.arange(10), targets]
    batches = np.array([losses[:4].mean(), losses[4:8].mean(), losses[8:].mean()])
    variance = np.average((batches - losses.mean()) ** 2, weights=[4, 4, 2])
    assert found.loss == pytest.approx(losses.mean(), rel=1e-5)
    assert found.loss_uncertainty == pytest.approx(math.sqrt(variance / 2), rel=1e-4)
    accuracy = np.mean(scores.argmax(1) == targets)
    assert found.accuracy == accuracy and found.samples == 10
    assert found.accuracy_uncertainty == pytest.approx(math.sqrt(accuracy * (1 - accuracy) / 9))
    shares = np.eye(5)[targets] * 0.9 + 0.02
    soft = evaluate(identity(4, 5), Dataset(scores, shares))
    assert soft.loss == pytest.approx(
        np.mean((np.log(np.exp(scores).sum(1))[:, None] - scores) * shares) * 5, rel=1e-5
    )
    assert soft.accuracy == accuracy


def test_other_losses_are_those_of_numpy() -> None:
    x, y = (RANDOM.standard_normal((10, 2, 3)).astype(np.float32) for _ in range(2))
    data, graph = Dataset(x, y), identity(4, 2, 3)
    assert evaluate(graph, data, loss="mse").loss == pytest.approx(np.mean((x - y) ** 2), rel=1e-5)
    assert evaluate(graph, data, loss="mean").loss == pytest.approx(x.mean(), rel=1e-4)
    found, sums = evaluate(graph, data, loss="sum"), [x[:4].sum(), x[4:8].sum(), x[8:].sum()]
    assert found.loss == pytest.approx(x.sum(), rel=1e-4)
    assert found.loss_uncertainty == pytest.approx(3 * np.std(sums) / math.sqrt(2), rel=1e-4)
    assert math.isnan(evaluate(graph, data[:4], loss="mse").loss_uncertainty)
    targets = RANDOM.integers(0, 3, (10, 2))  # a class at each of two positions
    entropies = np.log(np.exp(x).sum(-1)) - np.take_along_axis(x, targets[..., None], -1)[..., 0]
    found = evaluate(graph, Dataset(x, targets))
    assert found.loss == pytest.approx(entropies.mean(), rel=1e-5)
    assert found.accuracy == np.mean(x.argmax(-1) == targets)
    np.testing.assert_array_equal(predict(graph, x), x)


def test_a_score_is_text() -> None:
    score = evaluate(identity(4, 5), Dataset(np.zeros((8, 5)), np.array([0, 1] * 4)))
    assert str(score) == "loss 1.609 ± 0, accuracy 50 ± 2e+01 %"


# ---- files -----------------------------------------------------------------


def test_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    graph = build_net(name="small")
    fit(graph, DATA)
    graph.save(tmp_path / "net.gguf")
    other = build_net(batch=5, seed=1, name="small")
    assert not np.array_equal(predict(other, IMAGES), predict(graph, IMAGES))
    other.load(tmp_path / "net.gguf")
    assert all(np.array_equal(array, graph.weights[name]) for name, array in other.weights.items())
    assert evaluate(other, DATA).accuracy == evaluate(graph, DATA).accuracy


def wider(graph: Graph) -> None:
    graph.weights["output.weight"] = np.zeros((2, 13), np.float32)
    graph.parameters["output.weight"] = Graph(seed=1).weight("output.weight", (2, 13))


def without(graph: Graph) -> None:
    del graph.weights["conv.bias"], graph.parameters["conv.bias"]


def more(graph: Graph) -> None:
    graph.weight("more", (3,))


def infinite(graph: Graph) -> None:
    graph.weights["conv.bias"][1] = np.inf


def renamed(graph: Graph) -> None:
    graph.name = "another"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wider, r"the weight 'output.weight' is \[2, 13\] in the file and \[2, 12\] in the graph"),
        (without, r"the weight 'conv.bias' is missing in the file and \[3\] in the graph"),
        (more, r"the weight 'more' is \[3\] in the file and missing in the graph"),
        (infinite, "the weight conv.bias has NaN or infinity"),
        (renamed, "has the graph 'another', and this one is 'custom'"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(
    tmp_path: Path, change: Callable[[Graph], None], message: str
) -> None:
    graph, file = build_net(seed=3), tmp_path / "net.gguf"
    change(graph)
    graph.save(file)
    mine = build_net()
    before = {name: array.copy() for name, array in mine.weights.items()}
    with pytest.raises(FileError, match=message):
        mine.load(file)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(FileError, match=r"net\.gguf"):
        mine.load(file)
    assert all(np.array_equal(array, before[name]) for name, array in mine.weights.items())


# ---- what is refused -------------------------------------------------------

X = np.zeros((8, 3))
GRAPHS: dict[str, tuple[Callable[[], Any], str]] = {
    "batch": (lambda: Graph(batch=0), "batch must be a whole number of at least 1"),
    "seed": (lambda: Graph(seed=-1), "seed must be a whole number"),
    "two inputs of a name": (lambda: [graph := Graph(), graph.input((3,)), graph.input((3,))], "already"),
    "type of an input": (lambda: Graph().input((3,), dtype=np.float32), "must be f32 or i32"),
    "shape of an input": (lambda: Graph().input((-3,)), "no type and shape"),
    "two weights of a name": (lambda: [graph := build_line(), graph.weight("line.bias", (1,))], "already"),
    "axes of a weight": (lambda: Graph().weight("w", (1,) * 5), "1 to 4 axes"),
    "empty weight": (lambda: Graph().weight("w", (3, 0)), "none of them empty"),
    "name of a weight": (lambda: Graph().weight("w" * 64, (3,)), "more than 63 bytes"),
    "values of a weight": (lambda: Graph().weight("w", (3,), [1, 2]), "a number or an array"),
    "infinite weight": (lambda: Graph().weight("w", (3,), np.nan), "not finite"),
    "no output": (lambda: Graph().output, "has no output"),
    "output without batch": (
        lambda: setattr(Graph(batch=4), "output", ops.sum(build_line().output)),
        "batch of 4",
    ),
    "output of another type": (lambda: setattr(Graph(), "output", 3), "must be an f32 tensor"),
    "images": (lambda: Graph().conv_2d("c", Graph().input((3,)), 2, 3), "needs images"),
}
DATASETS: dict[str, tuple[Callable[[], Any], str]] = {
    "no samples": (lambda: Dataset(X[:0]), "at least 1"),
    "counts": (lambda: Dataset(X, X[:3]), "one number of samples"),
    "no input": (lambda: Dataset({}), "no array"),
    "text": (lambda: Dataset(["a", "b"]), "array of numbers"),
    "ragged": (lambda: Dataset([[1], [2, 3]]), "cannot become an array"),
    "one number": (lambda: Dataset(3.0), "array of numbers"),
    "NaN": (lambda: Dataset([[1.0, np.nan]]), "NaN"),
    "names": (lambda: evaluate(build_line(), Dataset({"x": X}), loss="mean"), "has the inputs 'x'"),
    "shape": (lambda: evaluate(build_line(), Dataset(X[:, :2]), loss="mean"), r"shape \[3\]"),
    "no targets": (lambda: evaluate(build_line(), Dataset(X), loss="mse"), "needs targets"),
    "shape of targets": (lambda: evaluate(build_line(), Dataset(X, X), loss="mse"), r"targets: .*\[1\]"),
    "classes": (lambda: evaluate(build_net(), Dataset(IMAGES, CLASSES + 1)), "from 0 to 1"),
    "negative class": (lambda: evaluate(build_net(), Dataset(IMAGES, CLASSES - 1)), "from 0 to 1"),
    "validation": (lambda: fit(build_net(), DATA, validation=1.0), "leaves some on both sides"),
    "small share": (lambda: fit(build_net(), DATA, validation=0.001), "leaves some on both sides"),
    "other validation": (lambda: fit(build_net(), DATA, validation=Dataset(X, CLASSES[:8])), "shape"),
}
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "loss": (lambda: fit(build_net(), DATA, loss="cross_entropi"), "did you mean cross_entropy"),
    "output of classes": (lambda: fit(one_number(), Dataset(X, X[:, 0])), "batch, ..., classes"),
    "optimizer": (lambda: fit(build_net(), DATA, optimizer="lbfgs"), "must be adamuon, adamw, muon, sgd"),
    "optimizer's type": (lambda: fit(build_net(), DATA, optimizer=3), "must be adamuon, adamw"),  # type: ignore[arg-type]
    "rate": (lambda: fit(build_net(), DATA, lr=-1), "finite number of at least 0"),
    "rate's type": (lambda: fit(build_net(), DATA, lr="high"), "learning rate"),  # type: ignore[arg-type]
    "rate of a step": (lambda: fit(build_net(), DATA, lr=lambda step: math.nan), "nan at step 1"),
    "epochs": (lambda: fit(build_net(), DATA, epochs=0), "epochs must be"),
    "batch": (lambda: fit(build_net(), DATA, batch=12), "multiple of the graph's batch of 8"),
    "clip": (lambda: fit(build_net(), DATA, clip=math.inf), "clip must be"),
    "threads": (lambda: fit(build_net(), DATA, threads=0), "threads must be"),
    "device": (lambda: fit(build_net(), DATA, device="abacus"), "kernels must be"),
    "no weights": (lambda: fit(no_weights(), Dataset(X), loss="mean"), "has no weights"),
    "divergence": (lambda: fit(build_net(), DATA, lr=1e30, epochs=9), "lower learning rate"),
}


def one_number() -> Graph:
    graph = Graph(batch=4)
    graph.output = ops.reshape(graph.linear("line", graph.input((3,)), 1), shape=(4,))
    return graph


def no_weights() -> Graph:
    graph = Graph(batch=4)
    graph.output = ops.sqr(graph.input((3,)))
    return graph


@pytest.mark.parametrize(
    ("call", "message"),
    [pytest.param(*case, id=name) for table in (GRAPHS, DATASETS, CALLS) for name, case in table.items()],
)
def test_what_is_wrong_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(LlamatrainError, match=message) as error:
        call()
    assert error.value.code and "\n" not in str(error.value)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started = LaunchInfo(rank=0, size=2, can_join=True)
    monkeypatch.setattr("llamatrain.distributed.launcher.get_launch_info", lambda: started)
    with pytest.raises(LlamatrainError, match="one process"):
        fit(build_net(), DATA)
