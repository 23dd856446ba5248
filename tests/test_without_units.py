"""Kernels for a processor without AVX-512 and AMX: they give what the others give."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamatrain.machine import ahead, units
from llamatrain.machine.declared import declared

FILES = ("test_cpu_elementwise.py", "test_cpu_attention.py", "test_products.py", "test_head.py")
WITHOUT = "amx,avx512bf16,avx512"
PROGRAM = """
import sys
import pytest
from tests import test_without_units
test_without_units.compile_kernels_alone()
sys.exit(pytest.main(sys.argv[1:]))
"""


def compile_kernels_alone() -> None:
    """Leave out what reads vocabularies and files: compiling all there is takes twice as long."""
    ahead.declared = lambda: [each for each in declared() if each.where.startswith("llamatrain.kernels.cpu.")]


@pytest.mark.skipif(units.SWITCH in os.environ, reason="this is the process without them")
def test_the_same_holds_without_units() -> None:
    here = Path(__file__).resolve().parent
    words = [sys.executable, "-c", PROGRAM, "-q", "-x", "-p", "no:cacheprovider", *(str(here / name) for name in FILES)]
    environment = {**os.environ, units.SWITCH: WITHOUT}
    done = subprocess.run(words, env=environment, cwd=here.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
