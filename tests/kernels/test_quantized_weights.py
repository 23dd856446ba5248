"""Frozen weights as they lie in a file: every type in every op that reads them, against the decoded weight."""

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llamatrain.engine.device import create_device
from llamatrain.engine.plan import plan
from llamatrain.engine.program import Program
from llamatrain.errors import GraphError
from llamatrain.gguf.quants import decode, encode
from llamatrain.gguf.quants.kinds import COMPILED
from llamatrain.gguf.types import TYPES, GgmlType, type_by_name
from llamatrain.graph import ops
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.precision import round_products
from llamatrain.graph.tensor import (
    BF16,
    F32,
    F64,
    I32,
    QuantizedType,
    Tensor,
    parameter,
    placeholder,
    quantized,
    state,
)
from llamatrain.io.madvise import release_pages
from llamatrain.model.frozen_weights import copy_as_bf16

TRAINED = [TYPES[number] for number in sorted(COMPILED)]
SHAPES = [
    (33, 256, 2),
    (130, 1280, 1),
    (33, 256, 7),
    (300, 512, 5),
    (70, 1536, 300),
    (520, 768, 64),
]  # out, in, rows of x
TOLERANCE = {"f32": 2e-6, "bf16": 2e-5}
linux = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="what is resident is asked of Linux")


def name(kind: GgmlType) -> str:
    return kind.name


def sane_weight(kind: GgmlType, rows: int, columns: int) -> np.ndarray:
    """Bytes whose numbers are of one size: random codes under scales that are encoded ones."""
    rng = np.random.default_rng(kind.number)
    values = (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)
    if kind.name == "MXFP4":  # an exponent and codes; it cannot be written
        raw = rng.integers(0, 256, (rows, columns // 32, 17), np.uint8)
        raw[..., 0] = rng.integers(118, 122, raw.shape[:2])
        return raw.reshape(rows, -1)
    if not kind.name.startswith("IQ4"):
        return encode(values, kind)
    raw = rng.integers(0, 256, (rows, columns // kind.block_size, kind.block_bytes), np.uint8)
    raw[..., :2] = np.array([1e-3], np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def shifted(raw: np.ndarray) -> np.ndarray:
    """The same bytes at an odd address, not to be written."""
    memory = np.empty(raw.size + 1, np.uint8)[1:]
    memory[:] = raw.ravel()
    memory.flags.writeable = False
    return memory.reshape(raw.shape)


def results(
    outputs: list[Tensor], arrays: dict[Tensor, np.ndarray], kernels: str, threads: int = 1
) -> list[np.ndarray]:
    program = Program.build(outputs, arrays, kernels=kernels, threads=threads)
    program()
    return [program.read(output).copy() for output in outputs]


def close(found: list[np.ndarray], wanted: list[np.ndarray], tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)


Build = Callable[[Tensor, dict[Tensor, np.ndarray]], tuple[Tensor, Tensor, list[Tensor]]]


def check(kind: GgmlType, out: int, width: int, build: Build, precision: str) -> None:
    """A result and the gradients of a loss over the quantised weight, like those over the weight decoded before."""
    raw = sane_weight(kind, out, width)
    decoded = decode(raw, kind)
    found = []
    for weight, array in ((quantized(kind.name), shifted(raw)), (F32, decoded)):
        w = state("w", (out, width), weight)
        arrays: dict[Tensor, np.ndarray] = {w: array}
        seen, loss, wrt = build(w, arrays)
        outputs = [seen, *value_and_gradients(loss, wrt)[1]]
        outputs = round_products(outputs) if precision == "bf16" else outputs
        steps = [step for stretch in Program.build(outputs, arrays).segments for step in stretch.steps]
        assert not any(
            callable(call) for node, calls in steps if node.op.quantized_source is not None for call in calls
        )  # all compiled
        alone, together = (results(outputs, arrays, "cpu", threads) for threads in (1, 2))
        assert all(a.tobytes() == b.tobytes() for a, b in zip(alone, together, strict=True))
        found.append(alone)
        close(alone, results(outputs, arrays, "reference"), 1e-2 if precision == "bf16" else 2e-5)
    as_quantised, as_decoded = found
    close(as_quantised, as_decoded, TOLERANCE[precision])


def linear(rows: int) -> Build:
    def build(w: Tensor, arrays: dict[Tensor, np.ndarray]) -> tuple[Tensor, Tensor, list[Tensor]]:
        rng = np.random.default_rng(rows)
        x, mix = parameter("x", (rows, w.shape[1])), placeholder("mix", (rows, w.shape[0]))
        for leaf in (x, mix):
            arrays[leaf] = rng.standard_normal(leaf.shape).astype(np.float32)
        y = ops.matmul(x, w)
        return y, ops.sum(ops.mul(y, mix)), [x]

    return build


def head(rows: int) -> Build:
    def build(w: Tensor, arrays: dict[Tensor, np.ndarray]) -> tuple[Tensor, Tensor, list[Tensor]]:
        rng = np.random.default_rng(rows)
        x, targets, weights = (
            parameter("x", (rows, w.shape[1])),
            placeholder("t", (rows,), I32),
            placeholder("s", (rows,)),
        )
        arrays[x] = rng.standard_normal(x.shape).astype(np.float32)
        arrays[targets] = rng.integers(0, w.shape[0], rows).astype(np.int32)
        arrays[weights] = rng.random(rows).astype(np.float32)
        loss = ops.linear_cross_entropy(x, w, targets, weights)
        return loss, loss, [x]

    return build


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("kind", TRAINED, ids=name)
def test_products(kind: GgmlType, precision: str) -> None:
    for out, width, rows in SHAPES:
        check(kind, out, width, linear(rows), precision)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("kind", TRAINED, ids=name)
def test_head(kind: GgmlType, precision: str) -> None:
    for out, width, rows in ((33, 256, 7), (300, 512, 65), (4500, 256, 40)):
        check(kind, out, width, head(rows), precision)


@pytest.mark.parametrize("kind", TRAINED, ids=name)
def test_rows(kind: GgmlType) -> None:
    raw = sane_weight(kind, 50, 512)
    w, ids = state("w", (50, 512), quantized(kind.name)), placeholder("ids", (2, 3), I32)
    arrays = {w: shifted(raw), ids: np.array([[3, 49, 3], [0, 50, -1]], np.int32)}
    (found,) = results([ops.get_rows(w, ids)], arrays, "cpu")
    assert np.isnan(found[1, 1:]).all()
    arrays[ids][1, 1:] = 7
    for kernels in ("cpu", "reference"):
        (found,) = results([ops.get_rows(w, ids)], arrays, kernels)
        np.testing.assert_array_equal(found, decode(raw, kind)[arrays[ids]])


def test_types_without_compiled_kernels_are_read_by_the_plain_ones() -> None:
    kind = type_by_name("TQ2_0")
    raw = (
        np.random.default_rng(0)
        .integers(0, 256, (40, 2 * kind.block_bytes), np.uint8)
        .reshape(40, 2, kind.block_bytes)
    )
    raw[..., -2:] = np.array([1e-2], np.float16).view(np.uint8)
    x, w = placeholder("x", (5, 512)), state("w", (40, 512), quantized("TQ2_0"))
    array = np.random.default_rng(1).standard_normal((5, 512)).astype(np.float32)
    (found,) = results([ops.matmul(x, w)], {x: array, w: raw.reshape(40, -1)}, "cpu")
    np.testing.assert_allclose(found, array @ decode(raw.reshape(40, -1), kind).T, rtol=1e-4, atol=1e-5)


def test_what_else_would_read_a_quantised_weight_is_refused() -> None:
    w, x = state("w", (32, 256), quantized("Q4_K")), placeholder("x", (3, 256))
    for make in (
        lambda: ops.transpose(w),
        lambda: ops.reshape(w, shape=(8192,)),
        lambda: ops.view(w, slices=((0, 4, 1), (0, 256, 1))),
        lambda: ops.cast(w, dtype=F32),
        lambda: ops.add(w, w),
        lambda: ops.matmul(w, x),
        lambda: ops.out_prod(x, w),
    ):
        with pytest.raises(
            GraphError, match=r"q4_k weight is not taken .* matmul, matmul_nn, .* read such .got"
        ):
            make()
    with pytest.raises(GraphError, match=r"cannot be trained"):
        value_and_gradients(ops.sum(ops.matmul(x, w)), [w])
    for shape in ((4, 200), (256,), (2, 2, 2, 256)):
        with pytest.raises(
            GraphError, match=r"no matrix or stack of matrices with rows of whole q4_k blocks of 256"
        ):
            state("w", shape, quantized("Q4_K"))
    with pytest.raises(GraphError, match=r"takes no stack of quantized matrices"):
        ops.matmul(x, state("w", (2, 4, 256), quantized("Q4_K")))
    with pytest.raises(GraphError, match=r"read-only; make it a state"):
        parameter("w", (4, 256), quantized("Q4_K"))
    with pytest.raises(GraphError, match=r"no type 'Q4_9'"):
        quantized("Q4_9")
    with pytest.raises(GraphError, match=r"does not fit an array of uint8\[32, 143\]"):
        Program.build([ops.matmul(x, w)], {w: np.zeros((32, 143), np.uint8)})


def test_a_plan_tells_the_base_apart() -> None:
    w, table = state("w", (3000, 4096), quantized("Q4_0")), state("table", (10,))
    x = placeholder("x", (512, 4096))
    made = plan([ops.matmul(x, w), ops.add(table, table)])
    assert isinstance(w.dtype, QuantizedType) and w.nbytes == 3000 * 4096 // 32 * 18
    assert (made.base_bytes, made.role_bytes("state")) == (w.nbytes, table.nbytes)
    assert made.total == made.arena + w.nbytes + x.nbytes + table.nbytes


@pytest.mark.parametrize("op", [ops.matmul, ops.matmul_nn])
def test_scratch_stays_small(op: Callable[..., Tensor]) -> None:
    """Panels of a weight are decoded, never all of it."""
    for out, width in ((2048, 2048), (5632, 2048), (2048, 5632), (11008, 4096)):
        x = placeholder("x", (512, width if op is ops.matmul else out))
        node = op(x, state("w", (out, width), quantized("Q4_K"))).node
        assert node and create_device("cpu", 2).scratch(node) < 11 << 20


def test_float64_reads_them_too() -> None:
    x, w = placeholder("x", (3, 256), F64), state("w", (32, 256), quantized("Q8_0"))
    assert ops.matmul(x, w).dtype is F64


def test_a_scale_that_is_not_finite_is_found() -> None:
    raw = sane_weight(type_by_name("Q4_0"), 40, 256)
    raw[33, 18:20] = np.array([np.nan], np.float16).view(np.uint8)
    x, w = placeholder("x", (3, 256)), state("w", (40, 256), quantized("Q4_0"))
    program = Program.build([ops.matmul(x, w)], {w: raw})
    assert program.find_not_finite() is w
    raw[33, 18:20] = 0
    assert program.find_not_finite() is None


@linux
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_pages_of_the_base_are_handed_back(tmp_path: Path, kernels: str) -> None:
    raws = [np.resize(sane_weight(type_by_name("Q4_0"), 64, 2048), (2000, 1152)) for _ in range(3)]
    path = tmp_path / "base"
    mapped = file_of(raws, path)
    weights = [state(f"w{i}", (2000, 2048), quantized("Q4_0")) for i in range(3)]
    x = placeholder("x", (5, 2048))
    products = [ops.matmul(x, w) for w in weights]
    arrays = dict(zip(weights, mapped.reshape(3, 2000, 1152), strict=True)) | {
        x: np.ones(x.shape, np.float32)
    }
    found = []
    for drop in (False, True):
        program = Program.build(products, arrays, kernels=kernels, drop_base=drop)
        release_pages(mapped)
        program()
        assert (resident(path) < mapped.nbytes / 2) is drop
        assert program.plan.base_bytes == (weights[0].nbytes if drop else mapped.nbytes)
        found.append([program.read(y).copy() for y in products])
    kept, dropped = found
    np.testing.assert_array_equal(kept, dropped)


def file_of(arrays: list[np.ndarray], path: Path) -> np.ndarray:
    """Arrays behind each other in a file, as its bytes, mapped."""
    path.write_bytes(b"".join(array.tobytes() for array in arrays))
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def resident(path: Path) -> int:
    """Bytes of a mapped file that are in this process's memory."""
    parts = Path("/proc/self/smaps").read_text().partition(str(path))[2].split("Rss:")
    return int(parts[1].split()[0]) * 1024


@pytest.mark.parametrize("kind", TRAINED, ids=name)
def test_a_packed_copy_serves_every_product(kind: GgmlType) -> None:
    raw = sane_weight(kind, 70, 512)
    copy = copy_as_bf16(raw, kind, (70, 512), threads=2)
    assert copy.ctypes.data % 64 == 0
    found = []
    for dtype, array in ((quantized(kind.name), raw), (BF16, copy)):
        w, x, dy = (
            state("w", (70, 512), dtype),
            placeholder("x", (9, 512), BF16),
            placeholder("dy", (9, 70), BF16),
        )
        rng = np.random.default_rng(0)
        arrays = {w: array} | {
            each: rng.integers(0x3F00, 0x3F80, each.shape).astype(np.uint16) for each in (x, dy)
        }
        found.append(results([ops.matmul(x, w), ops.matmul_nn(dy, w)], arrays, "cpu"))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@linux
def test_a_packed_copy_leaves_no_pages_of_its_weight(tmp_path: Path) -> None:
    kind, shape = type_by_name("Q4_0"), (8000, 2048)
    raw = np.resize(sane_weight(kind, 64, 2048), (8000, 1152))
    mapped = file_of([raw] * 3, tmp_path / "base")
    assert mapped.max() and resident(tmp_path / "base") >= mapped.nbytes  # all of it was read
    for number, left in ((1, 2), (0, 1), (2, 0)):
        copy = copy_as_bf16(mapped.reshape(3, 8000, 1152)[number], kind, shape)
        assert resident(tmp_path / "base") <= left * raw.nbytes + (4 << 20)  # a huge page at each border
    np.testing.assert_array_equal(copy, decode(raw, kind, bf16=True))
