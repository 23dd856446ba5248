"""Decoding with Triton: the bits of `gguf.quants`, by Triton's interpreter where there is no accelerator."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llamatrain.gguf import quants
from llamatrain.gguf.types import TYPES, GgmlType, type_by_name

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from llamatrain.kernels.torch import dequantize as D  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORKS = DEVICE == "cuda" or INTERPRETED
runs = pytest.mark.skipif(not WORKS, reason="Triton works in a process of its own here")
any_scales = pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning"
)
NAMES = ("Q4_K", "Q6_K", "Q5_K", "Q4_0", "Q8_0", "Q3_K", "Q2_K", "Q5_0", "Q4_1", "Q5_1", "IQ4_NL", "IQ4_XS")
KINDS = [type_by_name(name) for name in NAMES]
SHAPES = [(1, 1), (35, 4)]  # rows, blocks of a row; the last are several programs for each type


def name(kind: GgmlType) -> str:
    return kind.name


def weights(kind: GgmlType, rows: int, columns: int) -> np.ndarray:
    values = np.random.default_rng(kind.number).standard_normal((rows, columns)) * 0.02
    return quants.encode(values.astype(np.float32), kind)


def random_bytes(kind: GgmlType, rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(kind.number)
    return rng.integers(0, 256, (rows, kind.row_bytes(columns)), np.uint8)


def round_to(dtype: torch.dtype, raw: np.ndarray, kind: GgmlType) -> torch.Tensor:
    """Decode with `gguf.quants`. Triton's interpreter drops the last bits for bfloat16."""
    values = torch.from_numpy(quants.decode(raw, kind))
    if dtype != torch.bfloat16 or not INTERPRETED:
        return values.to(dtype)
    return (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare bits, except those of NaN."""
    found, word = found.cpu().contiguous(), {2: torch.int16, 4: torch.int32}[wanted.itemsize]
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    same = (found.view(word) == wanted.view(word)) | found.isnan() & wanted.isnan()
    assert same.all()


def check(raw: np.ndarray, kind: GgmlType, columns: int, dtype: torch.dtype) -> None:
    from llamatrain.kernels.torch import triton_decode

    out = torch.full((len(raw), columns), 123.0, dtype=dtype, device=DEVICE)
    packed = torch.from_numpy(raw).to(DEVICE)
    assert triton_decode.can_decode(kind, packed, out)
    triton_decode.decode(packed, kind, out)
    assert_same_bits(out, round_to(dtype, raw, kind))


@pytest.fixture
def no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(D, "not_in_triton", set())


@pytest.mark.skipif(WORKS, reason="the tests below run here")
def test_in_the_interpreter() -> None:
    """Run this file where Triton's interpreter is switched on, which has to happen before Triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    process = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_compiled_for_an_accelerator(kind: GgmlType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compile a kernel without running it: the interpreter accepts what the compiler does not.

    Results are written 16 bytes at a time, without an exchange between threads.
    """
    from triton import compile as compile_kernel
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from llamatrain.kernels.torch import triton_decode

    if "nvidia" not in backends:
        pytest.skip("Triton does not compile for NVIDIA here")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    decoder = triton_decode.DECODERS[kind.name]
    numbers = dict.fromkeys(("raw_pitch", "out_pitch", "total", "per_row"), "i32")
    constants = {"APART": False, "TILE": decoder.tile}
    types = {"raw": "*u8", "out": "*bf16", **numbers, **dict.fromkeys(constants, "constexpr")}
    aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1)}
    source = ASTSource(decoder.kernel, types, constants, aligned)
    compiled = compile_kernel(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": triton_decode.WARPS}
    )
    code = compiled.asm["ptx"]
    assert 0 < code.count("st.global.v4.b32") == code.count("st.global") and "st.shared" not in code


@pytest.mark.skipif(INTERPRETED, reason="the interpreter decodes everything with Triton")
def test_cpu_does_without_triton() -> None:
    code = """if True:
        import json, sys, torch
        from llamatrain.gguf.types import type_by_name
        from llamatrain.kernels.torch.dequantize import dequantize
        dequantize(torch.zeros((2, 144), dtype=torch.uint8), type_by_name("Q4_K"), torch.ones(2, 256))
        print(json.dumps([name for name in sys.modules if name.split(".")[0] == "triton"]))
    """
    process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert json.loads(process.stdout) == []


@runs
def test_types() -> None:
    from llamatrain.kernels.torch import triton_decode

    assert sorted(triton_decode.DECODERS) == sorted(NAMES)


@runs
@any_scales
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_bits(kind: GgmlType, dtype: torch.dtype) -> None:
    """Decode encoded weights and any bytes, whose scales may be infinite, not a number or very small."""
    for rows, blocks in SHAPES:
        columns = blocks * kind.block_size
        check(weights(kind, rows, columns), kind, columns, dtype)
        check(random_bytes(kind, rows, columns), kind, columns, dtype)


@runs
@any_scales
@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_every_byte_at_every_place(kind: GgmlType) -> None:
    """Decode blocks of one byte, each with another byte at one place."""
    base = np.repeat(np.arange(256, dtype=np.uint8), kind.block_bytes)[:, None]
    raw = np.broadcast_to(base, (len(base), kind.block_bytes)).copy()
    raw[np.arange(len(raw)), np.tile(np.arange(kind.block_bytes), 256)] ^= 0x5A
    check(raw[::101].copy(), kind, kind.block_size, torch.float32)


@runs
@pytest.mark.usefixtures("no_failures")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_rows_that_are_apart(kind: GgmlType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read every second row of the weights, and write a part of each row of the result."""
    monkeypatch.setattr(D, "_decode_rows", None)  # which torch would call
    for rows, blocks in SHAPES:
        columns = blocks * kind.block_size
        raw = weights(kind, 2 * rows, columns)
        out = torch.full((rows, columns + 16), 5.0, dtype=dtype, device=DEVICE)
        D.dequantize(torch.from_numpy(raw).to(DEVICE)[::2], kind, out[:, 8:-8])
        assert_same_bits(out[:, 8:-8], round_to(dtype, raw[::2], kind))
        assert (out[:, :8] == 5).all() and (out[:, -8:] == 5).all()


@runs
@pytest.mark.usefixtures("no_failures")
def test_what_torch_decodes() -> None:
    """Leave other types, odd addresses and double precision to torch, without a message."""
    for kind in (kind for kind in TYPES.values() if D.can_decode(kind)):
        raw = random_bytes(kind, 3, kind.block_size)
        out = torch.full((3, kind.block_size), 123.0, dtype=torch.float64, device=DEVICE)
        D.dequantize(torch.from_numpy(raw).to(DEVICE), kind, out)
        assert not (out == 123).all()
    kind = type_by_name("Q4_K")
    raw = weights(kind, 3, 256)
    moved = torch.zeros(raw.size + 1, dtype=torch.uint8, device=DEVICE)[1:].view(raw.shape)
    moved.copy_(torch.from_numpy(raw))
    assert_same_bits(
        D.dequantize(moved, kind, torch.ones((3, 256), device=DEVICE)), round_to(torch.float32, raw, kind)
    )
    assert not D.not_in_triton


@runs
@pytest.mark.usefixtures("no_failures")
def test_kernel_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say once for each type that torch decodes it, and do not try again."""
    from llamatrain.kernels.torch import triton_decode

    lines, calls = list[str](), list[str]()

    def fail(raw: torch.Tensor, kind: GgmlType, out: torch.Tensor) -> None:
        calls.append(kind.name)
        raise RuntimeError("no C compiler\nand more")

    monkeypatch.setattr(D, "log_line", lines.append)
    monkeypatch.setattr(triton_decode, "decode", fail)
    kinds = [type_by_name("Q4_K"), type_by_name("Q6_K")]
    for kind in kinds * 2:
        raw = weights(kind, 3, 256)
        out = D.dequantize(torch.from_numpy(raw).to(DEVICE), kind, torch.ones((3, 256), device=DEVICE))
        assert_same_bits(out, round_to(torch.float32, raw, kind))
    assert calls == ["Q4_K", "Q6_K"]
    assert [("Q4_K" in line, "Q6_K" in line) for line in lines] == [(True, False), (False, True)]
    assert all("no C compiler" in line and "more" not in line.replace("more slowly", "") for line in lines)
