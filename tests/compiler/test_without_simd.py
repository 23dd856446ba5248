"""Kernels for a processor without AVX-512 and AMX: they give what the others give."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamatrain.compiler import parallel
from llamatrain.compiler.inventory import list_compilables
from llamatrain.platform import cpu

FILES = ("test_cpu_elementwise.py", "test_cpu_attention.py", "test_matmul.py", "test_fused_ce.py")
WITHOUT = "amx,avx512bf16,avx512vnni,avx512,avxvnni"
PROGRAM = """
import sys
import pytest
from tests.compiler import test_without_simd
test_without_simd.compile_kernels_alone()
sys.exit(pytest.main(sys.argv[1:]))
"""


def compile_kernels_alone() -> None:
    """Leave out what reads vocabularies and files: compiling all there is takes twice as long."""
    parallel.list_compilables = lambda: [
        each for each in list_compilables() if each.qualified_name.startswith("llamatrain.kernels.cpu.")
    ]


@pytest.mark.skipif(cpu.DISABLE_VARIABLE in os.environ, reason="this is the process without them")
def test_the_same_holds_without_units() -> None:
    kernels = Path(__file__).resolve().parents[1] / "kernels"
    words = [
        sys.executable,
        "-c",
        PROGRAM,
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *(str(kernels / name) for name in FILES),
    ]
    environment = {**os.environ, cpu.DISABLE_VARIABLE: WITHOUT}
    done = subprocess.run(
        words, env=environment, cwd=kernels.parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
