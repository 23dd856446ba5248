"""The inner loops of products keep the multipliers of modelled processors busy (scripts/bench/modelled.py)."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from bench.modelled import CASES, F32, INT8, Case, find_loops, find_tool, model_case

LEAST = 0.85
# Classes, processors, kernels. Processors with dot products do not run the int8 products of NEON alone.
CHECKED = [
    ("x86-64-v3", ("znver3",), (F32, INT8)),
    ("x86-64-v3-vnni", ("alderlake",), (F32, INT8)),
    ("armv8", ("apple-m1", "neoverse-v1", "neoverse-n1", "cortex-a72"), (F32,)),
    ("armv8", ("cortex-a72",), (INT8,)),
    ("armv8.2-dotprod", ("apple-m1", "neoverse-v1", "neoverse-n1"), (INT8,)),
    ("armv8.6", ("apple-m1", "neoverse-v1"), (INT8,)),
]
# The last 4 of 16 rows have too few sums with AVX-VNNI; the loop for the others is checked.
SHORT_LOOPS = {("x86-64-v3-vnni", "multiply_int8")}


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
@pytest.mark.parametrize(("name", "processors", "kernels"), CHECKED)
def test_inner_loops_are_near_the_modelled_peak(
    name: str, processors: tuple[str, ...], kernels: tuple[str, ...]
) -> None:
    if not (tool := find_tool()):
        pytest.skip("llvm-mca is not installed (apt-get install llvm-19)")
    (known,) = (case for case in CASES if case.name == name)
    loops = list(model_case(tool, Case(name, known.platform, processors, kernels)))
    assert {loop.kernel for loop in loops} == {kernel.rpartition(":")[2] for kernel in kernels}
    for loop in loops:
        longest = max(other.needed for other in loops if other.kernel == loop.kernel)
        if (name, loop.kernel) not in SHORT_LOOPS or loop.needed == longest:
            assert loop.share >= LEAST, loop


def test_a_loop_is_found_by_its_label() -> None:
    text = "start:\n  mov x0, #1\n.L1:\n" + "  fmla v0.4s, v1.4s, v2.4s // a\n" * 9 + "  b.lt .L1\n  ret\n"
    (lines,) = find_loops(text, "//")
    assert len(lines) == 10 and lines[-1] == "b.lt .L1"
    assert not list(find_loops(text.replace("b.lt .L1", "b.lt .L2"), "//"))


def test_kernels_are_named_as_in_the_inventory() -> None:
    from llamatrain.compiler.inventory import list_compilables

    names = {each.qualified_name.removeprefix("llamatrain.") for each in list_compilables()}
    assert {F32, INT8} <= names
