"""The Triton kernels: by Triton's interpreter, where there is no GPU."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from llamatrain.engine.device import create_device
from tests.helpers.cli import ROOT, environment

pytestmark = pytest.mark.reference
PROGRAM = """
import sys, pytest
code = pytest.main(sys.argv[1:])
from llamatrain.kernels.torch import fast
sys.exit(code or ", ".join(fast.failed) or 0)
"""
OPS = "rms_norm or rope or swiglu or adamw or sum_sqr or (test_a_llama and small)"


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_ops_by_the_interpreter() -> None:
    """Every case of the ops that have Triton kernels, and a whole model with them."""
    words = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        OPS,
        "tests/kernels/test_torch_ops.py",
        "tests/kernels/test_torch_optimizer.py",
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        check=False,
        cwd=ROOT,
        env=environment(TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


def test_torch_does_what_triton_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that fails is not tried again, and the result is that of torch."""
    create_device("torch-cpu")
    import torch

    from llamatrain.kernels.torch import fast
    from llamatrain.kernels.torch.norm import rms_norm

    calls = []

    class Broken:
        @staticmethod
        def rms_norm(*tensors: torch.Tensor, eps: float) -> None:
            calls.append(eps)
            raise RuntimeError("no compiler")

    monkeypatch.setattr(fast, "load_kernels", lambda device: Broken)
    monkeypatch.setattr(fast, "failed", set())
    x, w = torch.randn(3, 8), torch.randn(8)
    wanted = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w
    for _ in range(2):
        out = torch.full_like(x, torch.nan)
        rms_norm(x, w, eps=1e-5, out=(out,))
        torch.testing.assert_close(out, wanted)
    assert calls == [1e-5] and fast.failed == {"rms_norm"}


FLOATS = {"w": "*fp32", "dx": "*fp32", "sums": "*fp32", "table": "*fp32", "losses": "*fp32"}
ROTATED = {"x": "*bf16", "positions": "*i32", "table": "*fp32", "out": "*bf16", "direction": "i32"}
ROTATED |= dict.fromkeys(("heads", "width", "pairs"), "i32")
SIGNATURES = {
    "rms_norm_kernel": (
        {"x": "*fp32", "w": "*fp32", "out": "*bf16", "width": "i32", "eps": "fp32"},
        {"SIZE": 4096},
    ),
    "rms_norm_back_kernel": (
        {"dy": "*fp32", "x": "*fp32", "rows": "i32", "width": "i32", "eps": "fp32"}
        | {name: FLOATS[name] for name in ("w", "dx", "sums")},
        {"SIZE": 4096, "PROGRAMS": 528, "ROUNDS": 8},
    ),
    "rope_pairs_kernel": (ROTATED, {"HEADS": 32, "WIDTH": 128}),
    "rope_halves_kernel": (ROTATED, {"HEADS": 32, "WIDTH": 128}),
    "sum_sqr_kernel": ({"x": "*fp32", "sums": "*fp64", "count": "i32"}, {"SIZE": 8192}),
    "swiglu_kernel": ({"gate": "*bf16", "up": "*bf16", "out": "*bf16", "count": "i32"}, {"SIZE": 1024}),
    "swiglu_back_kernel": (
        {"dy": "*fp32", "count": "i32"} | dict.fromkeys(("gate", "up", "dgate", "dup"), "*bf16"),
        {"SIZE": 1024},
    ),
    "cross_entropy_kernel": (
        {"logits": "*fp32", "targets": "*i32", "weights": "*fp32", "dloss": "*fp32", "losses": "*fp32"}
        | {"grads": "*bf16", "words": "i32"},
        {"SIZE": 4096, "ROUNDS": 8},
    ),
    "adamw_kernel": (
        dict.fromkeys(("w", "m", "v", "g", "schedule", "factor"), "*fp32")
        | {"count": "i32"}
        | dict.fromkeys(("beta1", "rest1", "beta2", "rest2", "eps", "decay"), "fp32"),
        {"SIZE": 1024},
    ),
}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", SIGNATURES)
def test_compiled_for_an_accelerator(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compile a kernel without running it: the interpreter accepts what the compiler does not."""
    from triton import compile as compile_kernel
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from llamatrain.kernels.torch import triton_ops

    if "nvidia" not in backends:
        pytest.skip("Triton does not compile for NVIDIA here")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types, constants = SIGNATURES[name]
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(getattr(triton_ops, name), signature, constants)
    compiled = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "st.global" in compiled.asm["ptx"]
