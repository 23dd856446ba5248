"""Mixtures of experts, by definition and by each device: ties, NaN, groups, the order of choices, and products."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from llamatrain.engine.device import create_device
from llamatrain.engine.program import Program
from llamatrain.graph import ops
from llamatrain.graph.int8 import use_int8_products
from llamatrain.graph.precision import round_products
from llamatrain.graph.tensor import BF16, F32, I32, Tensor, placeholder, quantized, state
from llamatrain.kernels.cpu import expert_products
from llamatrain.kernels.reference.registry import to_bf16
from llamatrain.platform.cpu import has_int8_products
from tests.kernels.test_quantized_weights import sane_weight

ROOT = Path(__file__).parents[2]
QUANTIZED = ("Q4_K", "Q6_K", "Q8_0", "MXFP4")
DTYPES = {"F32": F32, "BF16": BF16} | {name: quantized(name) for name in QUANTIZED}

DEVICES = [
    "reference",
    "cpu",
    pytest.param(
        "torch-cpu", marks=pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
    ),
]


def run(outputs: list[Tensor], arrays: dict[Tensor, np.ndarray], kernels: str) -> list[np.ndarray]:
    device = create_device(kernels)
    memory = {leaf: device.upload(array.copy()) for leaf, array in arrays.items()}
    program = Program.build(outputs, memory, kernels=kernels)
    program()
    return [program.read(output).copy() for output in outputs]


def best(scores: np.ndarray, kernels: str, **how: int) -> list[list[int]]:
    x = placeholder("scores", scores.shape)
    return run([ops.top_k(x, **how)], {x: scores.astype(np.float32)}, kernels)[0].tolist()


@pytest.mark.parametrize("kernels", DEVICES)
def test_of_equal_scores_the_first_is_chosen(kernels: str) -> None:
    scores = np.array([[1, 3, 3, 0, 3], [0, 0, 0, 0, 0], [-np.inf, 2, -np.inf, 2, 5]])
    assert best(scores, kernels, k=3) == [[1, 2, 4], [0, 1, 2], [4, 1, 3]]


@pytest.mark.parametrize("kernels", DEVICES)
def test_nan_is_chosen_last(kernels: str) -> None:
    scores = np.array([[np.nan, 1, np.nan, -5], [np.nan] * 4])
    assert best(scores, kernels, k=3) == [[1, 3, 0], [0, 1, 2]]


@pytest.mark.parametrize("kernels", DEVICES)
def test_groups_are_chosen_by_their_two_largest_scores(kernels: str) -> None:
    scores = np.array([[9, 0, 0, 5, 5, 0, 6, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
    assert best(scores, kernels, k=4, groups=3, groups_used=2) == [[0, 3, 4, 1], [0, 1, 2, 3]]
    assert best(scores, kernels, k=2, groups=3, groups_used=1) == [[3, 4], [0, 1]]


@pytest.mark.parametrize("kernels", DEVICES)
def test_random_scores(kernels: str) -> None:
    scores = np.random.default_rng(0).standard_normal((50, 64)).round(1)
    wanted = [sorted(range(64), key=lambda column: (-row[column], column))[:8] for row in scores]
    assert best(scores, kernels, k=8) == wanted


@pytest.mark.parametrize("kernels", DEVICES)
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_choices_are_sorted_by_expert_and_stay_in_order(kernels: str, rows: int) -> None:
    ids = placeholder("ids", (rows, 3), I32)
    array = np.random.default_rng(rows).integers(0, 9, (rows, 3)).astype(np.int32)
    array[array == 4] = 5  # nobody chooses expert 4
    order, expert, ends = run([*ops.sort_choices(ids, experts=9)], {ids: array}, kernels)
    flat = array.ravel().tolist()
    assert order.ravel().tolist() == sorted(range(3 * rows), key=lambda choice: (flat[choice], choice))
    assert expert.ravel().tolist() == sorted(flat)
    assert ends.tolist() == [sum(each <= expert for each in flat) for expert in range(9)]


# ---- products ----------------------------------------------------------------------------------

ROWS, EXPERTS, USED = 90, 9, 3


def uneven_choices() -> np.ndarray:
    """Of nine experts one gets no choice, some one, three or four, and one more than are packed at a time."""
    counts = {0: 80, 1: 1, 2: 3, 3: 4, 5: 33, 6: 60, 7: 88, 8: 1}
    flat = np.repeat([*counts], [*counts.values()])
    return np.random.default_rng(5).permutation(flat).reshape(ROWS, USED).astype(np.int32)


def products(
    kind: str, out: int, width: int, choices: np.ndarray
) -> tuple[list[Tensor], dict[Tensor, np.ndarray]]:
    """Products with a stack of weights, of rows and of choices, and the sums over choices of both."""
    random = np.random.default_rng(1)
    rows, used = choices.shape
    ids, w = placeholder("ids", choices.shape, I32), state("w", (EXPERTS, out, width), DTYPES[kind])
    x, y = placeholder("x", (rows, width)), placeholder("y", (rows, out))
    many = placeholder("many", (rows, used, width))
    arrays: dict[Tensor, np.ndarray] = {ids: choices}
    for leaf in (x, y, many):
        arrays[leaf] = random.standard_normal(leaf.shape).astype(np.float32)
    values = random.standard_normal(w.shape).astype(np.float32)
    if kind in ("F32", "BF16"):
        arrays[w] = to_bf16(values) if kind == "BF16" else values
    else:
        arrays[w] = sane_weight(DTYPES[kind].kind, EXPERTS * out, width).reshape(EXPERTS, out, -1)
    order, _, ends = ops.sort_choices(ids, experts=EXPERTS)
    forward, inner = ops.expert_matmul(x, w, order, ends), ops.expert_matmul(many, w, order, ends)
    back = ops.expert_matmul_nn(y, w, order, ends)
    sums = [ops.expert_out_prod(y, x, order, ends), ops.expert_out_prod(inner, many, order, ends)]
    return [forward, inner, back, ops.expert_matmul_nn(inner, w, order, ends), *sums], arrays


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("kind", [*DTYPES])
@pytest.mark.parametrize(("out", "width"), [(256, 256), (300, 1280)])
def test_products_are_those_of_the_definition(kind: str, out: int, width: int, precision: str) -> None:
    outputs, arrays = products(kind, out, width, uneven_choices())
    outputs = round_products(outputs) if precision == "bf16" else outputs
    wanted = run(outputs, arrays, "reference")
    exact = precision == "f32" and kind != "BF16"
    found = {}
    for threads in (1, 2, 5):
        program = Program.build(outputs, arrays, threads=threads)
        program()
        found[threads] = [program.read(output).copy() for output in outputs]
    for one, two, five, true in zip(*found.values(), wanted, strict=True):
        assert one.tobytes() == two.tobytes() == five.tobytes()
        assert np.linalg.norm(one - true) <= (2e-5 if exact else 1e-2) * np.linalg.norm(true)
    assert not found[1][4][4].any() and found[1][4][5].any()  # nobody chose expert 4


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_all_rows_to_one_expert(rows: int) -> None:
    outputs, arrays = products("Q4_K", 256, 256, np.full((rows, 1), 7, np.int32))
    for found, wanted in zip(run(outputs, arrays, "cpu"), run(outputs, arrays, "reference"), strict=True):
        assert np.linalg.norm(found - wanted) <= 2e-5 * np.linalg.norm(wanted)


@pytest.mark.parametrize("most", [1, 100_000])
@pytest.mark.parametrize("kind", ["F32", "Q4_K"])
def test_choices_that_are_too_large_are_packed_in_groups(
    kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_products, "MAX_PACKED_BYTES", most)
    outputs, arrays = products(kind, 300, 1280, uneven_choices())
    wanted = run(outputs[:4], arrays, "reference")
    found = []
    for threads in (1, 3):
        program = Program.build(outputs[:4], arrays, threads=threads)
        program()
        found.append([program.read(output).copy() for output in outputs[:4]])
    for one, three, true in zip(*found, wanted, strict=True):
        assert one.tobytes() == three.tobytes()
        assert np.linalg.norm(one - true) <= 2e-5 * np.linalg.norm(true)


@pytest.mark.skipif(not has_int8_products(), reason="this processor multiplies no 8-bit integers")
@pytest.mark.parametrize("kind", [*DTYPES])
@pytest.mark.parametrize(("out", "width"), [(256, 256), (300, 1280)])
def test_products_in_8_bits_have_the_bits_of_the_definition(kind: str, out: int, width: int) -> None:
    outputs, arrays = products(kind, out, width, uneven_choices())
    (w,) = (leaf for leaf in arrays if leaf.name == "w")
    outputs = use_int8_products(outputs[:4], {w: (w, w)})
    assert {output.node.op.name for output in outputs} == {"expert_matmul_int8", "expert_matmul_nn_int8"}
    exact = run(outputs, arrays, "reference")
    for threads in (1, 3):
        program = Program.build(outputs, arrays, threads=threads)
        program()
        for output, wanted in zip(outputs, exact, strict=True):
            assert program.read(output).tobytes() == wanted.tobytes()


UNTOUCHED = """
import ctypes, mmap
import numpy as np
from llamatrain.engine.program import Program
from tests.kernels import test_experts as t

choices = np.array([[0, 2], [2, 3], [0, 3], [0, 3]], np.int32)
outputs, arrays = t.products("Q4_K", 256, 4096, choices)
(w,) = (leaf for leaf in arrays if leaf.name == "w")
memory = mmap.mmap(-1, arrays[w].nbytes)
held = np.frombuffer(memory, np.uint8).reshape(arrays[w].shape)
held[...] = arrays[w]
each = held[0].nbytes
assert each % mmap.PAGESIZE == 0
libc = ctypes.CDLL(None)
for expert in (1, 4, 5, 6, 7, 8):
    assert libc.mprotect(ctypes.c_void_p(held.ctypes.data + expert * each), ctypes.c_size_t(each), 0) == 0
for threads in (1, 2):
    program = Program.build(outputs, arrays | {w: held}, threads=threads)
    program()
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect is a function of Unix")
def test_weights_of_experts_without_choices_are_not_read() -> None:
    """A read of theirs would end the process."""
    done = subprocess.run(
        [sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("experts", [3, 12])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_choice_does_not_depend_on_the_others(experts: int, kind: str) -> None:
    """Its result has the same bits whichever experts the other rows choose: many the same one, or all others."""
    rows, width, random = 9, 64, np.random.default_rng(5)
    x = random.standard_normal((rows, width)).astype(np.float32)
    weight = random.standard_normal((experts, 40, width)).astype(np.float32)
    if kind != "F32":
        weight = sane_weight(DTYPES[kind].kind, experts * 40, width).reshape(experts, 40, -1)
    results = []
    for others in (0, 1, 2):
        ids = (
            np.full((rows, 1), others, np.int32)
            if others
            else np.arange(rows, dtype=np.int32)[:, None] % experts
        )
        ids[0] = 1
        leaf, chosen = placeholder("x", x.shape), placeholder("ids", ids.shape, I32)
        order, _, ends = ops.sort_choices(chosen, experts=experts)
        dtype = DTYPES[kind]
        w = state("w", (experts, 40, width), dtype)
        y = ops.sum_choices(ops.expert_matmul(leaf, w, order, ends), order)
        (found,) = run([y], {leaf: x, chosen: ids, w: weight}, "cpu")
        results.append(found[0].tobytes())
    assert len({*results}) == 1
