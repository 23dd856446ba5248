"""AdaMuon against plain numpy, and as runs use it."""

import json
from pathlib import Path

import numpy as np
import pytest

from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.engine.program import Program
from llamatrain.graph.ops import opt_adapt
from llamatrain.graph.tensor import collect_leaves, parameter, placeholder, state
from llamatrain.optim.methods.adamuon import AdaMuon
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.optim.methods.muon import is_block_matrix
from llamatrain.optim.optimizer import count_dimensions, slice_key
from llamatrain.optim.update_graph import schedule_input
from tests.helpers.cli import TINY, Argument, losses, ran, run, same_bits, text_file
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small
from tests.optim.test_muon import orthogonalised, random

NAME = "blk.0.ffn_up.weight"
SHAPES = [(16, 40), (40, 16), (24, 24)]
WAYS: dict[str, tuple[Argument, ...]] = {
    "at once": (),
    "accumulated": ("--grad-acc", 2),
    "streamed": ("--clip", 0),
    "one thread": ("--threads", 1),
    "bf16": ("--precision", "bf16"),
    "reference": ("--kernels", "reference"),
    "tied": ("--tie-embeddings", "--embd-std", 0.02),
    "divided": ("--grad-groups", 2, "--batch", 2),
}


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("size", [1, 15, 16, 1000])
def test_division_by_the_root_of_the_moving_average(kernels: str, size: int) -> None:
    x, v = random(size), np.square(random(size, seed=1))
    x[0] = v[0] = 0
    leaves = state("v", (size,)), state("x", (size,))
    outputs = opt_adapt(*leaves, beta=0.9, eps=1e-6)
    program = Program.build(
        list(outputs), dict(zip(leaves, (v.copy(), x.copy()), strict=True)), kernels=kernels
    )
    program()
    average = 0.9 * v.astype(np.float64) + 0.1 * np.square(x.astype(np.float64))
    np.testing.assert_allclose(program.read(outputs[0]), average, rtol=1e-5)
    np.testing.assert_allclose(program.read(outputs[1]), x / (np.sqrt(average) + 1e-6), rtol=1e-5)
    assert program.read(outputs[1])[0] == 0, "zero divided by zero is no NaN"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_are_those_of_numpy(shape: tuple[int, int]) -> None:
    rule = AdaMuon(weight_decay=0.1)
    weight, grad = parameter(NAME, shape), state("g", shape)
    schedule, factor = schedule_input(rule), placeholder("factor", ())
    outputs = list(rule.update(weight, grad, schedule, factor))
    leaves = {leaf.name: leaf for leaf in collect_leaves(outputs)}
    w, m, v = random(*shape).astype(np.float64), np.zeros(shape), np.zeros(shape)
    start = {weight: w, leaves[f"{NAME}.m"]: m, leaves[f"{NAME}.v"]: v, grad: m}
    program = Program.build(outputs, {leaf: array.astype(np.float32) for leaf, array in start.items()})
    for number, rate in enumerate((0.02, 0.01, 0.03)):
        g = random(*shape, seed=number)
        program.write(grad, g)
        program.write(schedule, rule.schedule(number + 1, rate))
        program.write(factor, 0.5)
        program()
        m = 0.9 * m + 0.5 * g
        change = orthogonalised(0.5 * g + 0.9 * m)
        v = 0.95 * v + 0.05 * np.square(change)
        change /= np.sqrt(v) + 1e-6
        change *= 0.2 / np.sqrt(np.mean(np.square(change)))
        w = w * (1 - rate * 0.1) - rate * change
        np.testing.assert_allclose(program.read(leaves[f"{NAME}.v"]), v, atol=1e-6)
        np.testing.assert_allclose(program.read(weight), w, atol=2e-5)


def test_other_weights_do_not_decay_and_the_output_moves_three_times_as_fast() -> None:
    rule = AdaMuon(weight_decay=0.5)
    for name, ratio in (("token_embd.weight", 1), ("output.weight", 3), ("blk.0.attn_norm.weight", 1)):
        shape = (8,) if "norm" in name else (30, 8)
        w, g = random(*shape), random(*shape, seed=1)
        found = []
        for method, rate in ((rule, 0.01), (AdamW(weight_decay=0.0, beta2=0.95), 0.01 * ratio)):
            weight, grad, factor = parameter(name, shape), state("g", shape), placeholder("factor", ())
            schedule = schedule_input(method)
            outputs = list(method.update(weight, grad, schedule, factor))
            moments = {leaf: np.zeros(shape, np.float32) for leaf in method.states_for(weight)}
            program = Program.build(outputs, {weight: w.copy(), grad: g, **moments})
            program.write(schedule, method.schedule(1, rate))
            program.write(factor, 1.0)
            program()
            found.append(program.read(weight))
        np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


def test_a_slice_belongs_to_its_weight() -> None:
    """The names of divided weights have a suffix."""
    shape, rates = (30, 8), []
    for name in ("output.weight", slice_key("output.weight", 64)):
        rule, weight, grad = AdaMuon(), parameter(name, shape), state("g", shape)
        schedule, factor = schedule_input(rule), placeholder("factor", ())
        (outputs,) = rule.update(weight, grad, schedule, factor)
        assert outputs.node
        rates.append([source.node.op.name for source in outputs.node.sources if source.node])
    assert rates[0] == rates[1] and "mul" in rates[0]
    taps = slice_key("blk.0.shortconv.conv.weight", 0)
    assert not is_block_matrix(taps, (8, 3)) and is_block_matrix(slice_key(NAME, 16), (8, 3))
    assert count_dimensions(slice_key("blk.0.attn_q_norm.weight", 0), (4, 10)) == 1


# ---- runs ------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_has_the_bits_of_one_at_once(way: str, tmp_path: Path) -> None:
    given = (
        "--optimizer",
        "adamuon",
        "--ctx",
        16,
        "--batch",
        2,
        "--warmup",
        1,
        "--decay-steps",
        5,
        *WAYS[way],
    )
    task = ("from-scratch", text_file(tmp_path), *TINY, "--layer", 1, "--lr", 0.01, *given)
    ran(*task, "--iters", 6, "--out", tmp_path / "whole")
    ran(*task, "--iters", 3, "--out", tmp_path / "parts")
    ran("from-scratch", "--resume", tmp_path / "parts", "--iters", 6)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    same_bits(tmp_path / "whole" / "model.gguf", tmp_path / "parts" / "model.gguf")
    stored = read_checkpoint(tmp_path / "parts" / "checkpoint-6.gguf")
    trained = sum(stored.weights[name].size for name in stored.order)
    assert stored.vectors["optimizer.adamuon.first_moments"].size == trained
    assert stored.vectors["optimizer.adamuon.second_moments"].size == trained


def test_the_plan_counts_two_moments(tmp_path: Path) -> None:
    task = ("plan", "from-scratch", text_file(tmp_path), *TINY, "--ctx", 16, "--json", "--optimizer")
    plan = json.loads(ran(*task, "adamuon").out)
    assert plan["moments"] == 2 * plan["weights"]


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    model, data = base(tmp_path / "base.gguf", small(layers=1)), text_file(tmp_path)
    done = run("finetune", model, data, "--optimizer", "adamuon", "--iters", 1, "--out", tmp_path / "a")
    assert done.code == 2 and len(done.errors) == 1
    assert "[needs-full-model]" in done.errors[0]


def test_the_deviation_of_new_embeddings(tmp_path: Path) -> None:
    task = ("from-scratch", text_file(tmp_path), *TINY, "--ctx", 16, "--iters", 0)
    ran(*task, "--embd-std", 0.02, "--out", tmp_path / "small")
    ran(*task, "--out", tmp_path / "default")
    narrow, default = (
        read_checkpoint(tmp_path / name / "checkpoint-0.gguf").weights for name in ("small", "default")
    )
    assert np.std(narrow["token_embd.weight"]) == pytest.approx(0.02, rel=0.05)
    for name, array in default.items():
        if name != "token_embd.weight":
            np.testing.assert_array_equal(array, narrow[name])
    wrong = run(*task, "--embd-std", 0, "--out", tmp_path / "none")
    assert wrong.code == 2 and "--embd-std" in wrong.errors[0]
