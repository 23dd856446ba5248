"""Muon: matrices of blocks by orthogonalised momentum, all else by AdamW; against plain numpy, and as runs have it."""

import json
from pathlib import Path

import numpy as np
import pytest

from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.engine.program import Program
from llamatrain.graph.node_roles import find_roles
from llamatrain.graph.tensor import F64, Tensor, collect_leaves, parameter, placeholder, state
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.optim.methods.muon import Muon, newton_schulz
from llamatrain.optim.update_graph import differentiate, hold_gradients, schedule_input, update_step
from tests.helpers.cli import TINY, Argument, losses, ran, run, same_bits, steps, text_file
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small

SHAPES = [(24, 24), (16, 40), (40, 16), (7, 130), (1, 9)]
A, B, C = 3.4445, -4.7750, 2.0315


def orthogonalised(x: np.ndarray) -> np.ndarray:
    """As Jordan et al. write it, in the precision of x."""
    turned = x.shape[0] > x.shape[1]
    x = (x.T if turned else x) / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = A * x + (B * a + C * a @ a) @ x
    return x.T if turned else x


def random(*shape: int, seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def made(outputs: list[Tensor], arrays: dict[Tensor, np.ndarray], kernels: str = "cpu") -> Program:
    program = Program.build(outputs, arrays, kernels=kernels)
    program()
    return program


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])
def test_the_graph_is_the_formula(shape: tuple[int, ...], size: float) -> None:
    x64 = random(*shape, dtype=np.float64) * size
    leaf = state("x", shape, F64)
    expected = orthogonalised(x64)
    found = newton_schulz(leaf)
    np.testing.assert_allclose(
        made([found], {leaf: x64}, "reference").read(found), expected, rtol=1e-9, atol=1e-12
    )
    for half, within in ((False, 2e-5), (True, 0.06)):
        leaf = state("x", shape)
        found = newton_schulz(leaf, half)
        result = made([found], {leaf: x64.astype(np.float32)}).read(found)
        np.testing.assert_allclose(result, expected, atol=within, rtol=0)


def test_what_comes_out_is_nearly_orthogonal() -> None:
    leaf = state("x", (48, 96))
    found = newton_schulz(leaf, bf16=True)
    values = np.linalg.svd(made([found], {leaf: random(48, 96)}).read(found), compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.25
    nothing = made([found], {leaf: np.zeros((48, 96), np.float32)}).read(found)
    assert not nothing.any(), "of nothing nothing comes, and no NaN"


@pytest.mark.parametrize(("shape", "half"), [((16, 40), False), ((40, 16), False), ((40, 16), True)])
def test_steps_against_numpy(shape: tuple[int, int], half: bool) -> None:
    rule = Muon(weight_decay=0.1, bf16=half)
    weight, grad = parameter("blk.0.ffn_up.weight", shape), state("g", shape)
    schedule, factor = schedule_input(rule), placeholder("factor", ())
    outputs = list(rule.update(weight, grad, schedule, factor))
    (moment,) = (leaf for leaf in collect_leaves(outputs) if leaf.name == "blk.0.ffn_up.weight.m")
    w, m, g = random(*shape), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    program = Program.build(outputs, {weight: w, moment: m, grad: g})
    w64, m64 = w.astype(np.float64), m.astype(np.float64)
    for number, rate in enumerate((0.02, 0.01, 0.03)):
        g = random(*shape, seed=number)
        program.write(grad, g)
        program.write(schedule, rule.schedule(number + 1, rate))
        program.write(factor, 0.5)
        program()
        m64 = 0.95 * m64 + 0.5 * g
        change = orthogonalised(0.5 * g + 0.95 * m64)
        w64 = w64 * (1 - rate * 0.1) - rate * 0.2 * np.sqrt(40) * change
        np.testing.assert_allclose(program.read(moment), m64, atol=1e-6)
        np.testing.assert_allclose(program.read(weight), w64, atol=5e-3 if half else 1e-5)


def test_all_else_is_adamw_s() -> None:
    rule, plain = Muon(beta2=0.9), AdamW(beta2=0.9)
    for name, shape in (
        ("token_embd.weight", (30, 8)),
        ("output.weight", (30, 8)),
        ("blk.0.attn_norm.weight", (8,)),
    ):
        weight, grad, factor = parameter(name, shape), state("g", shape), placeholder("factor", ())
        schedule = schedule_input(rule)
        own, theirs = (each.update(weight, grad, schedule, factor)[0].node for each in (rule, plain))
        assert own and theirs and own.op is theirs.op and own.attrs == theirs.attrs
        assert [leaf.name for leaf in rule.states_for(weight)] == [f"{name}.m", f"{name}.v"]
    lengths = rule.state_lengths(
        {"token_embd.weight": (30, 8), "blk.0.ffn_up.weight": (16, 8), "blk.0.attn_norm.weight": (8,)}
    )
    assert lengths == {"first_moments": 240 + 128 + 8, "second_moments": 240 + 8}


def test_it_is_the_optimizer_s_part_of_a_profile() -> None:
    rule, weight = Muon(), parameter("blk.0.ffn_up.weight", (16, 8))
    from llamatrain.graph import ops as O

    kept = hold_gradients(differentiate(O.sum(O.sqr(weight)), [weight]))
    _, _, outputs = update_step(kept, rule, clip=1.0)
    assert set(find_roles(outputs).values()) == {"optimizer"}


# ---- runs ------------------------------------------------------------------

WAYS: dict[str, tuple[Argument, ...]] = {
    "arena": (),
    "streamed": ("--clip", 0),
    "flat": ("--grad-acc", 2, "--batch", 1),
    "bf16": ("--precision", "bf16"),
    "reference": ("--kernels", "reference"),
    "factors": ("--lora-r", 4),
}


@pytest.mark.parametrize("way", WAYS)
def test_some_steps_and_then_the_rest(way: str, tmp_path: Path) -> None:
    given = ("--optimizer", "muon", "--ctx", 16, "--batch", 2, "--warmup", 1, "--decay-steps", 5, *WAYS[way])
    task = ("from-scratch", text_file(tmp_path), *TINY, "--layer", 1, *given)
    ran(*task, "--iters", 6, "--out", tmp_path / "whole")
    ran(*task, "--iters", 3, "--out", tmp_path / "parts")
    ran("from-scratch", "--resume", tmp_path / "parts", "--iters", 6)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    same_bits(tmp_path / "whole" / "model.gguf", tmp_path / "parts" / "model.gguf")
    kept = read_checkpoint(tmp_path / "parts" / "checkpoint-6.gguf")
    trained = sum(kept.weights[name].size for name in kept.order)
    blocks = sum(
        kept.weights[name].size
        for name in kept.order
        if name.startswith("blk.") and kept.weights[name].ndim == 2
    )
    assert kept.vectors["optimizer.muon.first_moments"].size == trained
    assert kept.vectors["optimizer.muon.second_moments"].size == trained - blocks > 0


def test_accumulated_and_at_once_are_one_step(tmp_path: Path) -> None:
    task = (
        "from-scratch",
        text_file(tmp_path),
        *TINY,
        "--layer",
        1,
        "--ctx",
        16,
        "--optimizer",
        "muon",
        "--iters",
        2,
    )
    ran(*task, "--batch", 4, "--out", tmp_path / "one")
    ran(*task, "--batch", 2, "--grad-acc", 2, "--out", tmp_path / "two")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_the_plan_counts_one_moment_of_matrices(tmp_path: Path) -> None:
    task = ("plan", "from-scratch", text_file(tmp_path), *TINY, "--ctx", 16, "--json", "--optimizer")
    muon, adamw = (json.loads(ran(*task, name).out) for name in ("muon", "adamw"))
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 64) * 4
    assert adamw["moments"] == 2 * adamw["weights"] and muon["moments"] == adamw["moments"] - matrices


def test_adapters_are_refused(tmp_path: Path) -> None:
    model, data = base(tmp_path / "base.gguf", small(layers=1)), text_file(tmp_path)
    done = run("finetune", model, data, "--optimizer", "muon", "--iters", 1, "--out", tmp_path / "a")
    assert done.code == 2 and len(done.errors) == 1
    assert "[needs-full-model]" in done.errors[0]
    ran(
        "finetune",
        model,
        data,
        "--optimizer",
        "muon",
        "--full",
        "--iters",
        1,
        "--ctx",
        16,
        "--out",
        tmp_path / "b",
    )
    assert len(steps(tmp_path / "b")) == 1


# ---- a schedule for it -----------------------------------------------------


def test_wsd_goes_on_with_more_steps(tmp_path: Path) -> None:
    """From before its rate fell: the bits of a run that had been so long from its beginning."""
    task = (
        "from-scratch",
        text_file(tmp_path),
        *TINY,
        "--layer",
        1,
        "--ctx",
        16,
        "--batch",
        2,
        "--schedule",
        "wsd",
    )
    rate = ("--warmup", 2, "--decay-steps", 3, "--save-every", 5, "--keep", 9)
    ran(*task, *rate, "--iters", 14, "--out", tmp_path / "whole")
    ran(*task, *rate, "--iters", 8, "--out", tmp_path / "short")
    assert losses(tmp_path / "short")[:6] == losses(tmp_path / "whole")[:6]
    told = ran(
        "from-scratch",
        "--resume",
        tmp_path / "short" / "checkpoint-5.gguf",
        "--iters",
        14,
        "--out",
        tmp_path / "long",
    )
    assert "rate falls in the last 3 of 14 steps" in told.err and "already falling" not in told.err
    assert losses(tmp_path / "long") == losses(tmp_path / "whole")
    same_bits(tmp_path / "long" / "model.gguf", tmp_path / "whole" / "model.gguf")
    late = ran("from-scratch", "--resume", tmp_path / "short", "--iters", 14, "--decay-steps", 4)
    assert (
        "rate falls in the last 4 of 14 steps; it was already falling since step 6, and rises again"
        in late.err
    )
    rates = [line["lr"] for line in steps(tmp_path / "short")]
    assert rates[8] == rates[9] == 1e-3 > rates[10] > rates[13] == 1e-4
