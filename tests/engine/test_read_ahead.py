"""Weights of a mapped file are requested once before each read, and not those of experts without choices."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from llamatrain.engine import read_ahead
from llamatrain.engine.device import create_device
from llamatrain.engine.plan import plan
from llamatrain.engine.program import Program
from llamatrain.engine.read_ahead import find_weight, order_reads
from llamatrain.graph import ops
from llamatrain.graph.tensor import F32, I32, Node, Tensor, placeholder, quantized, state
from llamatrain.io import madvise
from llamatrain.run import fit_memory
from tests.helpers import architecture_runs as runs
from tests.helpers.architecture_models import shape_of
from tests.helpers.cli import ran, same_bits
from tests.kernels.test_quantized_weights import sane_weight

Q8_0 = quantized("Q8_0")
WIDTH, EXPERTS = 512, 6


def model() -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
    """Two products, a mixture whose choices depend on them, and two more products."""
    x = placeholder("x", (4, WIDTH))
    weights = [state(f"w{index}", (WIDTH, WIDTH), Q8_0) for index in range(4)]
    stack, router = state("stack", (EXPERTS, WIDTH, WIDTH), Q8_0), state("router", (EXPERTS, WIDTH), F32)
    y = ops.matmul(ops.matmul(x, weights[0]), weights[1])
    order, _, ends = ops.sort_choices(ops.top_k(ops.matmul(y, router), k=1), experts=EXPERTS)
    y = ops.sum_choices(ops.expert_matmul(y, stack, order, ends), order)
    y = ops.matmul(ops.matmul(y, weights[2]), weights[3])
    return [y, ends], x, router, [*weights, stack]


def readers(nodes: list[Node]) -> list[Node]:
    return [node for node in nodes if find_weight(node)]


@pytest.mark.parametrize("most", [0, 300_000, 1 << 30])
def test_each_weight_is_requested_once_and_in_time(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", most)
    nodes = plan(model()[0]).nodes
    order, known = (
        order_reads(nodes),
        nodes.index(next(node for node in nodes if node.op is ops.sort_choices)),
    )
    requested = [other for reader in readers(nodes) for other in order[reader]]
    assert requested == readers(nodes)
    for reader in readers(nodes):
        for other in order[reader]:
            assert nodes.index(other) >= nodes.index(reader)
            assert other.op is not ops.expert_matmul or nodes.index(reader) > known
        ahead = [find_weight(other).nbytes for other in order[reader] if other is not reader]
        assert sum(ahead) <= most
    if most == 1 << 30:
        assert [len(order[reader]) for reader in readers(nodes)] == [3, 0, 0, 3, 0, 0]


def test_rows_of_an_embedding_are_not_read_ahead() -> None:
    table, w = state("table", (100, WIDTH), Q8_0), state("w", (WIDTH, WIDTH), Q8_0)
    y = ops.matmul(ops.get_rows(table, placeholder("ids", (3,), I32)), w)
    assert [find_weight(node) for node in readers(plan([y]).nodes)] == [w]


def test_experts_without_choices_are_not_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the pages with a program that reads nothing ahead, and its results."""
    random, (outputs, x, router, weights) = np.random.default_rng(0), model()
    arrays = {w: sane_weight(Q8_0.kind, w.size // WIDTH, WIDTH).reshape(*w.shape[:-1], -1) for w in weights}
    (tmp_path / "weights").write_bytes(b"".join(array.tobytes() for array in arrays.values()))
    with (tmp_path / "weights").open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    memory, start = dict[Tensor, np.ndarray](), dict[Tensor, int]()
    for w, array in arrays.items():
        start[w] = sum(each.nbytes for each in memory.values())
        memory[w] = mapped[start[w] : start[w] + array.nbytes].reshape(array.shape)
    memory |= {leaf: random.standard_normal(leaf.shape).astype(np.float32) for leaf in (x, router)}
    ranges = list[tuple[int, int]]()
    monkeypatch.setattr(
        madvise, "request_pages_of_file", lambda _, first, size: ranges.append((first, first + size))
    )
    found = []
    for reads_ahead in (False, True):
        assert not ranges
        device = create_device("cpu", 1, True, reads_ahead)
        program = Program(plan(outputs, scratch=device.scratch), memory, device)
        program()
        found.append([program.read(output).copy() for output in outputs])
    assert all(one.tobytes() == other.tobytes() for one, other in zip(*found, strict=True))
    used = np.diff(found[0][1], prepend=0) > 0
    assert 0 < used.sum() < EXPERTS
    requested = np.zeros(mapped.size, bool)
    for first, end in ranges:
        assert first % mmap.PAGESIZE == 0
        requested[first:end] = True
    stack = weights[-1]
    each = memory[stack][0].nbytes
    for expert in range(EXPERTS):
        middle = start[stack] + expert * each + mmap.PAGESIZE
        assert requested[middle : middle + each - 2 * mmap.PAGESIZE].all() == used[expert]
    assert requested[: start[stack]].all()


def test_a_run_that_reads_ahead_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, counts = shape_of("qwen3moe", "a"), {}
    base, data = runs.base(tmp_path, shape), runs.data(tmp_path)
    for reads_ahead in (False, True):
        asked = list[int]()
        monkeypatch.setattr(fit_memory, "is_larger_than_memory", lambda *_, answer=reads_ahead: answer)
        monkeypatch.setattr(madvise, "request_pages_of_file", lambda *what, to=asked: to.append(what[-1]))
        ran(
            "finetune",
            base,
            data,
            *runs.PLAIN,
            "--cache-base",
            "off",
            "--iters",
            2,
            "--out",
            tmp_path / f"{reads_ahead}",
        )
        counts[reads_ahead] = len(asked)
    same_bits(tmp_path / "False" / "adapter.gguf", tmp_path / "True" / "adapter.gguf")
    assert counts[False] == 0 < counts[True]
