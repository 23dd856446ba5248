"""Kernels for other classes of processors than the one that this machine takes: they give what the others give."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamatrain.compiler import parallel
from llamatrain.compiler.inventory import list_compilables
from llamatrain.platform import cpu

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
FILES = ("test_cpu_elementwise.py", "test_cpu_attention.py", "test_matmul.py", "test_fused_ce.py")
WITHOUT = "amx,avx512bf16,avx512vnni,avx512,avxvnni"
BF16_CLASS = "x86-64-v4-bf16"
PROGRAM = """
import sys
import pytest
from tests.compiler import test_without_simd
test_without_simd.compile_ahead(sys.argv[1])
sys.exit(pytest.main(sys.argv[2:]))
"""


def compile_ahead(prefix: str) -> None:
    """Compile only what is in these modules before it is needed; compiling all there is takes twice as long."""
    parallel.list_compilables = lambda: [
        each for each in list_compilables() if each.qualified_name.startswith(prefix)
    ]


def run_tests(prefix: str, *words: str, **variables: str) -> None:
    """Run tests of kernels in a process with these variables."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, prefix, "-q", "-x", "-p", "no:cacheprovider", *words],
        env={**os.environ, **variables},
        cwd=KERNELS.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.skipif(cpu.DISABLE_VARIABLE in os.environ, reason="this is the process without them")
def test_the_same_holds_without_units() -> None:
    files = [str(KERNELS / name) for name in FILES]
    run_tests("llamatrain.kernels.cpu.", *files, **{cpu.DISABLE_VARIABLE: WITHOUT})


@pytest.mark.skipif("avx512bf16" not in cpu.cpu_features(), reason="this processor has no vectors of bf16")
@pytest.mark.skipif("avx512bf16" in cpu.enabled_units(), reason="tests of products use them here")
def test_products_in_vectors_of_bf16_where_they_are_slow() -> None:
    products = str(KERNELS / "test_matmul.py")
    run_tests("no module", products, "-k", "test_bf16", **{cpu.CLASS_VARIABLE: BF16_CLASS})
