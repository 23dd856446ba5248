"""The inner loops of products keep the multipliers of modelled processors busy (scripts/bench/modelled.py)."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from bench.modelled import CASES, F32, INT8, Case, find_loops, find_tool, model_case

LEAST = 0.85
# The processors that have these units, and the kernels that are fast there. Others with dot products (as Apple's)
# do not run the products of NEON alone.
CHECKED = {
    "x86-64-v3": (("znver3",), (F32, INT8)),
    "x86-64-v3-vnni": (("alderlake",), (F32, INT8)),
    "armv8": (("cortex-a72",), (F32, INT8)),
    "armv8.2-dotprod": (("apple-m1", "neoverse-v1", "neoverse-n1"), (INT8,)),
    "armv8.6": (("apple-m1", "neoverse-v1"), (INT8,)),
}


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
@pytest.mark.parametrize("case", [case for case in CASES if case.name in CHECKED], ids=lambda case: case.name)
def test_inner_loops_are_near_the_modelled_peak(case: Case) -> None:
    if not (tool := find_tool()):
        pytest.skip("llvm-mca is not installed (apt-get install llvm-19)")
    processors, kernels = CHECKED[case.name]
    loops = list(model_case(tool, Case(case.name, case.platform, processors, kernels)))
    assert {loop.kernel for loop in loops} == {kernel.rpartition(":")[2] for kernel in kernels}
    for kernel, processor in {(loop.kernel, loop.processor) for loop in loops}:
        same = [loop for loop in loops if (loop.kernel, loop.processor) == (kernel, processor)]
        longest = max(same, key=lambda loop: loop.needed)  # others compute what is left of 16 rows
        assert longest.share >= LEAST, longest


def test_a_loop_is_found_by_its_label() -> None:
    text = "start:\n  mov x0, #1\n.L1:\n" + "  fmla v0.4s, v1.4s, v2.4s // a\n" * 9 + "  b.lt .L1\n  ret\n"
    (lines,) = find_loops(text, "//")
    assert len(lines) == 10 and lines[-1] == "b.lt .L1"
    assert not list(find_loops(text.replace("b.lt .L1", "b.lt .L2"), "//"))


def test_kernels_are_named_as_in_the_inventory() -> None:
    from llamatrain.compiler.inventory import list_compilables

    names = {each.qualified_name.removeprefix("llamatrain.") for each in list_compilables()}
    assert {F32, INT8} <= names
