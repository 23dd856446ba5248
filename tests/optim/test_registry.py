"""An optimizer is one file: two are written here, put beside the others, and everything else takes them as they are."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llamatrain.checkpoints.checkpoint import write_checkpoint
from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.engine.program import Program
from llamatrain.errors import FileError
from llamatrain.graph import ops as O
from llamatrain.graph.tensor import collect_leaves, parameter
from llamatrain.optim import methods, registry
from llamatrain.optim.optimizer import ElementwiseRule
from llamatrain.optim.update_graph import differentiate, streamed_update
from tests.helpers.cli import TINY, Done, environment, losses, same_bits, text_file
from tests.helpers.emulator import SLOWNESS
from tests.helpers.tiny_checkpoint import tiny_checkpoint

ADAGRAD = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from llamatrain.graph.ops import acc, add, cpy, div, fill, mul, sqr, sqrt
from llamatrain.optim.optimizer import ElementwiseRule


@dataclass(frozen=True, kw_only=True)
class Adagrad(ElementwiseRule):
    checkpoint_name = "sums"
    states: ClassVar = {"s": "sums_of_squares", "g": "last_gradient"}
    nonnegative = ("sums_of_squares",)
    eps: float = 1e-8

    def schedule(self, step, rate):
        return np.array([-rate], np.float32)

    def update(self, weight, grad, schedule, factor):
        (sums, last), whole, grad = self.states_for(weight), tuple((0, size, 1) for size in weight.shape), mul(grad, factor)
        sums = acc(sums, sqr(grad), slices=whole, into=True)
        move = div(grad, add(sqrt(sums), fill(shape=(), value=self.eps)))
        return acc(weight, mul(move, schedule), slices=whole, into=True), cpy(last, grad, into=True)


OPTIMIZER = Adagrad
"""

HALVING = """
import math
from dataclasses import dataclass

import numpy as np

from llamatrain.optim.optimizer import Minimizer


@dataclass(frozen=True, kw_only=True)
class Halving(Minimizer):
    checkpoint_name = "halving"
    vector_count = 3

    def create_minimizer(self, x):
        return Halved(x)

    @classmethod
    def required_shapes(cls, kept, size):
        return {"point": (size,), "gradient": (size,)} if kept else {}

    @classmethod
    def state_problem(cls, kept):
        return "its length is no length" if kept and not kept["length"] > 0 else None


class Halved:
    def __init__(self, x):
        self.x, self.gradient, self.loss, self.evaluations, self.length = x.copy(), np.zeros_like(x), math.nan, 0, 1.0

    def begin(self, evaluate):
        self.loss, gradient = evaluate(self.x)
        self.gradient[:] = gradient

    def step(self, evaluate):
        while self.length > 1e-6:
            loss, gradient = evaluate(self.x - np.float32(self.length) * self.gradient)
            self.evaluations += 1
            if loss < self.loss:
                self.x -= np.float32(self.length) * self.gradient
                self.loss, self.gradient[:], self.length = loss, gradient, 0.9 * self.length
                return None
            self.length /= 2
        return "stuck: as short as a step may be"

    def state_values(self):
        if math.isnan(self.loss):
            return {}
        numbers = {"loss": self.loss, "length": self.length, "evaluations": self.evaluations}
        return {"point": self.x, "gradient": self.gradient, **numbers}

    def restore(self, kept):
        if kept:
            self.x[:], self.gradient[:] = kept["point"], kept["gradient"]
            self.loss, self.length, self.evaluations = kept["loss"], kept["length"], kept["evaluations"]


OPTIMIZER = Halving
"""

WITH_MORE = """
import json, sys
from llamatrain.optim import methods
methods.__path__.append(sys.argv[1])
from tests.helpers.cli import run
print(json.dumps([vars(run(*words)) for words in json.load(sys.stdin)]))
"""


@pytest.fixture
def more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of two more optimizers, which are known to this test, too."""
    folder = tmp_path / "methods"
    folder.mkdir()
    for name, source in (("toy_adagrad", ADAGRAD), ("toy_halving", HALVING)):
        (folder / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, f"{methods.__name__}.{name}", raising=False)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(folder)])
    return folder


def done(folder: Path, *commands: tuple[object, ...]) -> list[Done]:
    """What these commands come to, in one process that has those optimizers from its beginning."""
    words = json.dumps([list(map(str, command)) for command in commands])
    child = [sys.executable, "-c", WITH_MORE, str(folder)]
    found = subprocess.run(
        child,
        input=words,
        text=True,
        env=environment(),
        capture_output=True,
        check=False,
        timeout=120 * SLOWNESS,
    )
    assert found.returncode == 0, found.stderr
    return [Done(**each) for each in json.loads(found.stdout)]


@pytest.mark.parametrize(
    ("name", "given", "idle", "moments"),
    [
        ("toy_adagrad", ("--schedule", "constant", "--warmup", 0, "--clip", 0), "--beta1", 2),
        ("toy_halving", (), "--lr", 3),
    ],
)
def test_a_run_of_one_more(more: Path, name: str, given: tuple[object, ...], idle: str, moments: int) -> None:
    place = more.parent
    task = (
        "from-scratch",
        text_file(place),
        *TINY,
        "--ctx",
        32,
        "--batch",
        2,
        "--threads",
        1,
        "--optimizer",
        name,
    )
    plan, refused, unknown, whole, cut, resumed = done(
        more,
        ("plan", *task, *given, "--json"),
        (*task, *given, idle, 0.5),
        (*task[:-1], "nothing"),
        (*task, *given, "--iters", 4, "--out", place / "whole"),
        (*task, *given, "--iters", 2, "--out", place / "cut"),
        ("from-scratch", "--resume", place / "cut", "--iters", 4),
    )
    assert all(each.code == 0 for each in (plan, whole, cut, resumed)), (
        plan.err,
        whole.err,
        cut.err,
        resumed.err,
    )
    planned = json.loads(plan.out)
    assert planned["moments"] == moments * planned["weights"]
    assert (
        refused.code == 2
        and f"{idle} has no effect with --optimizer {name}; leave it out [unused-option]" in refused.err
    )
    assert unknown.code == 2 and name in unknown.err
    assert losses(place / "whole")[-1] < losses(place / "whole")[0]
    assert losses(place / "whole") == losses(place / "cut")
    same_bits(place / "whole" / "model.gguf", place / "cut" / "model.gguf")
    kept = read_checkpoint(place / "cut" / "checkpoint-LATEST.gguf")
    assert kept.optimizer == registry.get_optimizer(name).checkpoint_name and kept.optimizer_values


def test_a_step_of_one_more(more: Path) -> None:
    weight, rule = (
        parameter("w", (2, 3)),
        registry.get_optimizer("toy_adagrad").from_options({"eps": 0.5, "beta1": 0.5}),
    )
    assert isinstance(rule, ElementwiseRule)
    inputs, outputs = streamed_update(differentiate(O.sum(O.sqr(weight)), [weight]), rule)
    start = np.arange(6, dtype=np.float32).reshape(2, 3)
    last = next(leaf for leaf in collect_leaves(outputs) if leaf.name == "w.g")
    program = Program.build(outputs, {weight: start.copy()}, kernels="reference")
    expected, sums = start.copy(), np.zeros_like(start)
    for rate in (0.5, 0.25):
        program.write(inputs.schedule, -rate)
        program()
        gradient = 2 * expected
        sums += np.square(gradient)
        expected -= rate * gradient / (np.sqrt(sums) + 0.5)
        np.testing.assert_allclose(program.read(last), gradient, rtol=1e-6)
        np.testing.assert_allclose(program.read(weight), expected, rtol=1e-6)


KEPT = {"sums": ("sums_of_squares", "last_gradient"), "halving": ("point", "gradient"), "nothing": ()}


@pytest.mark.parametrize(
    ("kind", "name", "change", "reason"),
    [
        ("sums", "sums_of_squares", -1, "optimizer.sums.sums_of_squares has values below 0"),
        ("sums", "last_gradient", None, "tensor optimizer.sums.last_gradient is missing"),
        ("halving", "point", None, "tensor optimizer.halving.point is missing"),
        ("halving", "length", 0, "its length is no length"),
        ("nothing", "", 0, "must be one of .*adam, .*sums, halving .got 'nothing'"),
    ],
)
def test_a_checkpoint_of_one_more(
    more: Path, tmp_path: Path, kind: str, name: str, change: int | None, reason: str
) -> None:
    checkpoint, key = tiny_checkpoint(), f"optimizer.{kind}.{name}"
    ones = np.ones_like(next(iter(checkpoint.vectors.values())))
    checkpoint.optimizer, checkpoint.vectors = kind, {f"optimizer.{kind}.{each}": ones for each in KEPT[kind]}
    checkpoint.numbers = {"optimizer.halving.length": 0.5} if kind == "halving" else {}
    if kind != "nothing":
        write_checkpoint(tmp_path / "sound.gguf", checkpoint)
        assert (
            read_checkpoint(tmp_path / "sound.gguf").optimizer_values.keys()
            == checkpoint.optimizer_values.keys()
        )
    spoilt: dict = checkpoint.vectors if name in KEPT[kind] else checkpoint.numbers
    if change is None:
        del spoilt[key]
    elif name:
        spoilt[key] = spoilt[key] * change
    write_checkpoint(tmp_path / "c.gguf", checkpoint)
    with pytest.raises(FileError, match=reason):
        read_checkpoint(tmp_path / "c.gguf")


RATE = (
    "lr",
    "lr_min",
    "warmup",
    "schedule",
    "decay_steps",
    "restart_growth",
    "lora_plus_ratio",
    "clip",
    "epochs",
)
STEPS = {*RATE, "weight_decay", "decay_min_ndim", "beta1"}


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("adamw", STEPS | {"beta2", "eps"}),
        ("adamuon", STEPS | {"beta2", "eps"}),
        ("sgd", STEPS),
        ("lbfgs", {"line_search", "lbfgs_history", "lbfgs_refresh"}),
    ],
)
def test_what_is_taken_by_others_only_does_nothing(name: str, taken: set[str]) -> None:
    every = STEPS | {"beta2", "eps", "line_search", "lbfgs_history", "lbfgs_refresh"}
    assert set(registry.get_optimizer(name).used_options()) == taken
    assert every - taken <= set(registry.unused_options(name)) and not taken & set(
        registry.unused_options(name)
    )


def test_names_are_known_before_any_is_loaded() -> None:
    """Help must not wait for numpy."""
    asked = "import sys; from llamatrain.optim.registry import optimizer_names; print(*optimizer_names(), 'numpy' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=True, env=environment()
    )
    *names, loaded = found.stdout.split()
    assert {"adamw", "lbfgs", "sgd"} <= set(names) and loaded == "False"
