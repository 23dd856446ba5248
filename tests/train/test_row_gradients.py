"""A gradient of few rows is used up as the whole one would be: the same bits, in a fraction of its memory."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamatrain.engine.plan import plan
from llamatrain.engine.program import Program
from llamatrain.graph import ops as O
from llamatrain.graph.tensor import F64, I32, parameter, placeholder
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.optim.methods.sgd import SGD
from llamatrain.optim.optimizer import ElementwiseRule
from llamatrain.optim.update_graph import differentiate, hold_gradients, streamed_update, update_step
from tests.helpers.cli import TINY, losses, ran, same_bits, text_file
from tests.helpers.random_models import TINY as SMALL
from tests.helpers.random_models import llama
from tests.kernels.test_cpu_elementwise import normal, run

WORDS, TWICE = 50, [3, 7, 3, 0, 49, 7, 3]  # most never come, some come again
SHAPES = [
    (WORDS, 37, TWICE),
    (5000, 64, [*range(0, 5000, 41), 41, 4999]),
    (9, 8200, [8, 8]),
    (3, 1, [1]),
    (4, 5, []),
]
ADAMW = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decay": 0.1}


def rows_of(words: int, width: int, ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The gradients of rows taken, their numbers, and these as rows."""
    dy, taken = normal(len(ids), width), np.array(ids, np.int32)
    rows, places = run("opt_rows", [dy.shape], [dy, taken], rows=words, more=[((words,), np.int32)])
    return dy, taken, rows, places


# ---- kernels ----------------------------------------------------------------


@pytest.mark.parametrize(("words", "width", "ids"), SHAPES)
def test_rows_are_those_of_the_whole(words: int, width: int, ids: list[int]) -> None:
    dy, taken, rows, places = rows_of(words, width, ids)
    whole = run("get_rows_back", [(words, width)], [dy, taken], rows=words)[0]
    assert [word for word in range(words) if places[word] >= 0] == sorted(set(ids))
    assert {word: places[word] for word in ids} == {word: ids.index(word) for word in ids}
    assert np.array_equal(whole[places >= 0].view(np.int32), rows[places[places >= 0]].view(np.int32))
    assert not rows[[place for place, word in enumerate(ids) if ids.index(word) < place]].any()


def test_rows_lie_where_the_gradients_lay() -> None:
    dy, taken = normal(2, 3, 20), np.array([[4, 1, 4], [4, 2, 1]], np.int32)
    apart, over = (
        run("opt_rows", [dy.shape], [dy, taken], how, rows=5, more=[((5,), np.int32)]) for how in ({}, {0: 0})
    )
    assert all(one.tobytes() == two.tobytes() for one, two in zip(apart, over, strict=True))


def test_a_number_that_no_row_has_writes_nothing() -> None:
    dy, taken = normal(4, 20), np.array([9, 2, -1, 2], np.int32)
    rows, places = run("opt_rows", [dy.shape], [dy, taken], rows=9, more=[((9,), np.int32)])
    assert places.tolist() == [-1, -1, 1, -1, -1, -1, -1, -1, -1]
    assert np.array_equal(rows[1], dy[1] + dy[3]) and not rows[[0, 2, 3]].any()


@pytest.mark.parametrize(("words", "width", "ids"), SHAPES)
def test_optimizers_give_the_bits_of_the_whole(words: int, width: int, ids: list[int]) -> None:
    dy, taken, rows, places = rows_of(words, width, ids)
    whole = run("get_rows_back", [(words, width)], [dy, taken], rows=words)[0]
    w, m, v, factor = (
        normal(words, width),
        normal(words, width),
        normal(words, width) ** 2,
        np.full((), 0.3, np.float32),
    )
    schedule = np.array([1e-2, 0.1, 0.01], np.float32)
    for op, states, numbers in (
        ("opt_step_adamw", [m, v], ADAMW),
        ("opt_step_sgd", [m], {"momentum": 0.9, "decay": 0.1}),
    ):
        own = [w, *states]
        over = {place: place for place in range(len(own))}
        dense = run(op, [each.shape for each in own], [*own, whole, schedule, factor], over, **numbers)
        few = run(op, [each.shape for each in own], [*own, rows, schedule, factor, places], over, **numbers)
        assert all(one.tobytes() == two.tobytes() for one, two in zip(dense, few, strict=True)), op
        assert not np.array_equal(dense[0], w)
    squares = run("sum_sqr", [()], [whole])[0], run("opt_sum_sqr", [()], [rows, places])[0]
    assert squares[0].tobytes() == squares[1].tobytes()
    np.testing.assert_allclose(squares[0], np.square(whole, dtype=np.float64).sum(), rtol=1e-6)


# ---- steps ------------------------------------------------------------------

STEPS = [TWICE, [7, 7, 7, 7, 7, 7, 7], [1, 2, 3, 4, 5, 6, 8], [49, 0, 0, 3, 1, 3, 3], TWICE[::-1]]
NEVER = sorted({*range(WORDS)} - {word for ids in STEPS for word in ids})


def first_values() -> list[np.ndarray]:
    return [
        np.random.default_rng(5).standard_normal(shape).astype(np.float32) for shape in ((WORDS, 20), (6, 20))
    ]


def steps(
    rule: ElementwiseRule, rate: float, clip: float, how: str, kernels: str = "cpu"
) -> tuple[dict[str, np.ndarray], list[float]]:
    """Of a loss of rows of an embedding, times a matrix: weights and moments after some steps, and the norms."""
    w, a, ids = parameter("w", (WORDS, 20)), parameter("a", (6, 20)), placeholder("ids", (len(TWICE),), I32)
    made = differentiate(O.sum_sqr(O.matmul(O.get_rows(w, ids), a)), [w, a])
    arrays = dict(zip((w, a), first_values(), strict=True))
    if how == "streamed":
        told, outputs = streamed_update(made, rule)
        programs = [Program.build(outputs, arrays, kernels=kernels, threads=2)]
    else:
        kept = hold_gradients(made, dense=how == "whole")
        told, norm, outputs = update_step(kept, rule, clip)
        first = Program.build([kept.loss, *kept.first], arrays, kernels=kernels, threads=2)
        grads = {leaf: first.get_view(grad) for leaf, grad in zip(kept.memory, kept.first, strict=True)}
        programs = [first, Program.build(outputs, arrays | grads, kernels=kernels, threads=2)]
    norms = []
    for step, taken in enumerate(STEPS, 1):
        programs[0].write(ids, taken)
        programs[-1].write(told.schedule, rule.schedule(step, rate))
        for program in programs:
            program()
        norms += [] if how == "streamed" else [float(programs[-1].read(norm))]
    kinds = tuple(rule.states)
    states = {leaf.name: leaf for leaf in programs[-1].plan.leaves("state") if leaf.name.endswith(kinds)}
    return {name: programs[-1].read(leaf).copy() for name, leaf in {**states, "w": w, "a": a}.items()}, norms


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("rule", "rate"),
    [(AdamW(weight_decay=0.3), 0.03), (SGD(momentum=0.8, weight_decay=0.2), 1e-4)],
    ids=["adamw", "sgd"],
)
def test_steps_give_the_bits_of_whole_gradients(rule: ElementwiseRule, rate: float, kernels: str) -> None:
    for clip in (0.0, 1.5):
        whole, norms = steps(rule, rate, clip, "whole", kernels)
        ways = [
            steps(rule, rate, clip, how, kernels) for how in ("few", "streamed") if not clip or how == "few"
        ]
        assert min(norms) > 1.5 and norms == ways[0][1]
        for found, _ in ways:
            assert found.keys() == whole.keys() and len(whole) == 2 + 2 * len(rule.states)
            assert all(whole[name].tobytes() == found[name].tobytes() for name in whole)


def test_rows_without_gradient_decay_and_have_no_moments() -> None:
    found, _ = steps(AdamW(weight_decay=0.3), 0.03, 0.0, "few")
    np.testing.assert_allclose(
        found["w"][NEVER], first_values()[0][NEVER] * (1 - 0.03 * 0.3) ** len(STEPS), rtol=1e-5
    )
    assert not found["w.m"][NEVER].any() and found["w.m"][TWICE].all()


@pytest.mark.reference
def test_steps_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    found, norms = steps(AdamW(weight_decay=0.3), 0.03, 1.5, "few")
    w, a = (torch.nn.Parameter(torch.from_numpy(each)) for each in first_values())
    adamw, theirs = torch.optim.AdamW([w, a], lr=0.03, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.3), []
    for ids in STEPS:
        adamw.zero_grad()
        (w[torch.tensor(ids)] @ a.T).square().sum().backward()
        theirs.append(float(torch.nn.utils.clip_grad_norm_([w, a], 1.5)))
        adamw.step()
    np.testing.assert_allclose(norms, theirs, rtol=1e-5)
    for mine, other in ((found["w"], w), (found["a"], a)):
        np.testing.assert_allclose(mine, other.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_rows_by_differences() -> None:
    """In float64, of each element of the embedding."""
    w, taken = parameter("w", (20, 3), F64), placeholder("ids", (2, 4), I32)
    arrays = {
        w: np.random.default_rng(1).standard_normal(w.shape),
        taken: np.array([[5, 6, 5, 5], [19, 0, 6, 5]], np.int32),
    }
    made = differentiate(O.sum_sqr(O.get_rows(w, taken)), [w])
    (rows, places), loss = made.sparse[w], made.loss
    program, value = (
        Program.build(outputs, arrays, kernels="reference") for outputs in ([rows, places], [loss])
    )
    program()
    found, at = program.read(rows).reshape(-1, 3), program.read(places)
    for word, column in np.ndindex(20, 3):
        ends = []
        for move in (1e-6, -2e-6, 1e-6):
            arrays[w][word, column] += move
            value()
            ends.append(float(value.read(loss)))
        wanted = found[at[word], column] if at[word] >= 0 else 0.0
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(wanted, abs=1e-6)


# ---- which gradients --------------------------------------------------------


def test_what_is_kept_as_rows() -> None:
    """An embedding with more rows than a step has tokens; tied to the output or added up it is whole."""
    many = replace(SMALL, vocab=300, ctx=8)  # 64 tokens
    model = llama(many)
    made = differentiate(model.loss, model.trained)
    rows = {w.name: [part.shape for part in grad] for w, grad in made.sparse.items() if len(grad) > 1}
    assert rows == {"token_embd.weight": [(8, 8, 32), (300,)]}
    assert {len(block) for block in hold_gradients(made).blocks.values()} == {1}
    assert not hold_gradients(made, dense=False).more
    few = llama(replace(many, vocab=66))  # with their places, rows of so many would take more
    assert all(len(grad) == 1 for grad in differentiate(few.loss, few.trained).sparse.values())
    tied, ids, targets = (
        parameter("w", (90, 4)),
        placeholder("ids", (5,), I32),
        placeholder("targets", (5,), I32),
    )
    loss = O.linear_cross_entropy(O.get_rows(tied, ids), tied, targets, placeholder("weights", (5,)))
    assert len(differentiate(loss, [tied]).sparse[tied]) == 1
    twice = O.add(O.get_rows(tied, ids), O.get_rows(tied, ids))
    assert len(differentiate(O.sum_sqr(twice), [tied]).sparse[tied]) == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_an_embeddings_gradient_takes_no_memory_of_its_own(streamed: bool) -> None:
    """Of two models that differ in rows of the embedding alone, the arenas differ by their places."""
    arenas = []
    for words in (1000, 20000):
        w, a, taken = parameter("w", (words, 64)), parameter("a", (6, 64)), placeholder("ids", (40,), I32)
        made = differentiate(O.sum_sqr(O.matmul(O.get_rows(w, taken), a)), [w, a])
        kept = hold_gradients(made, dense=False)
        outputs = streamed_update(made, AdamW())[1] if streamed else [kept.loss, *kept.first]
        arenas.append(plan(outputs).arena)
    assert arenas[1] - arenas[0] <= 4 * 19000 + 64


# ---- runs -------------------------------------------------------------------

FEW = (
    *TINY,
    "--ctx",
    16,
    "--batch",
    3,
    "--seed",
    5,
    "--schedule",
    "constant",
    "--warmup",
    0,
)  # 48 tokens a step, of 258
WAYS = {"kept": ("--clip", 0.5), "streamed": ("--clip", 0), "sgd": ("--optimizer", "sgd", "--lr", 0.1)}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_gives_the_bits_of_whole_gradients(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that goes on with a checkpoint of a run with whole gradients, too."""
    command, few, other = (
        ("from-scratch", text_file(tmp_path), *FEW, *WAYS[way]),
        tmp_path / "few",
        tmp_path / "other",
    )
    ran(*command, "--iters", 6, "--out", few)
    with monkeypatch.context() as patched:
        patched.setattr("llamatrain.optim.update_graph.sparse_rows", lambda grad: (grad,))
        ran(*command, "--iters", 3, "--out", other)
    ran("from-scratch", "--resume", other, "--iters", 6)
    assert losses(few) == losses(other) and len(losses(few)) == 6
    same_bits(few / "model.gguf", other / "model.gguf")
    same_bits(few / "checkpoint-6.gguf", other / "checkpoint-6.gguf")


def test_a_plan_counts_the_rows(tmp_path: Path) -> None:
    """Of what accumulation keeps whole, an embedding's gradient of few rows is as much less as it has rows without one."""
    data, gradients = text_file(tmp_path), []
    for more in (("--batch", 3), ("--batch", 3, "--grad-acc", 2), ("--batch", 3, "--clip", 0)):
        plan = json.loads(ran("plan", "from-scratch", data, *FEW, *more, "--json").out)
        gradients.append(plan["gradients"])
    words, width, tokens = 258, 32, 48
    assert gradients[1] - gradients[0] == 4 * (words * width - tokens * width - words)
    assert gradients[2] == 0
