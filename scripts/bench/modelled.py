"""Compares the inner loops of products with what LLVM's models of processors allow, for machines that are not at hand.

A loop's share is the time for which its multiplications occupy the multipliers, divided by the time of the whole
loop as llvm-mca simulates it. A model leaves out caches and memory.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("llvm-mca", *(f"llvm-mca-{version}" for version in range(25, 15, -1)))
OLDEST = 16  # older versions lack models
F32, INT8 = "kernels.cpu.tiles:multiply_tiles", "kernels.cpu.int8_tiles:multiply_int8"
MULTIPLICATIONS = re.compile(
    r"^(?:\{vex\}\s+)?(?:fmla|bfdot|vfmadd\w*|vdpbf16ps|sdot|usdot|sudot|smull2?|smlal2?|vpmaddubsw|vpmaddwd|vpdpbusd)\s"
)
FEWEST = 8  # multiplications of an inner loop
ROUNDS = 100
EMIT = """
import sys
from llamatrain.compiler import emit, target
from llamatrain.compiler.inventory import list_compilables
target.Codegen.emit_object = lambda self, module: self._tm.emit_assembly(module).encode()
(wanted,) = (each for each in list_compilables() if each.qualified_name == f"llamatrain.{sys.argv[1]}")
sys.stdout.write(emit.emit_object(wanted).decode())
"""


@dataclass(frozen=True)
class Case:
    """A class of processors, LLVM's names of some of them, and the kernels that are fast there."""

    name: str
    platform: str
    processors: tuple[str, ...]
    kernels: tuple[str, ...] = (F32, INT8)


CASES = (
    Case("x86-64-v3", "linux-x86-64", ("znver3", "haswell")),
    Case("x86-64-v3-vnni", "linux-x86-64", ("alderlake",)),
    Case("x86-64-v4", "linux-x86-64", ("skylake-avx512", "znver4"), (F32,)),
    Case("x86-64-v4-bf16", "linux-x86-64", ("znver4", "sapphirerapids")),
    Case("armv8", "linux-aarch64", ("apple-m1", "neoverse-v1", "neoverse-n1", "cortex-a72")),
    Case("armv8.2-dotprod", "linux-aarch64", ("apple-m1", "neoverse-v1", "neoverse-n1"), (INT8,)),
    Case("armv8.6", "linux-aarch64", ("apple-m1", "neoverse-v1"), (INT8,)),
)


@dataclass(frozen=True)
class Loop:
    """An inner loop on a processor: its instructions, and cycles for one iteration."""

    case: str
    kernel: str
    processor: str
    instructions: int
    cycles: float
    needed: float  # by the multiplications alone

    @property
    def share(self) -> float:
        """The share of the time in which the multipliers are busy."""
        return self.needed / self.cycles


def find_tool() -> str | None:
    """Return the path of a recent llvm-mca, or None."""
    for name in TOOLS:
        if path := shutil.which(name):
            said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            version = re.search(r"version (\d+)", said)
            if version and int(version[1]) >= OLDEST:
                return path
    return None


def emit_assembly(case: Case, kernel: str) -> str:
    """Compile a kernel for a class to assembly, in a process of its own: the class is chosen at the import."""
    chosen = {"LLAMATRAIN_CLASS": case.name, "LLAMATRAIN_PLATFORM": case.platform, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", EMIT, kernel]
    return subprocess.run(
        words, env={**os.environ, **chosen}, capture_output=True, text=True, check=True
    ).stdout


def find_loops(assembly: str, comment: str) -> Iterator[list[str]]:
    """Yield the instructions of each innermost loop with many multiplications."""
    label, lines = "", list[str]()
    for line in assembly.splitlines():
        code = line.split(comment)[0].strip()
        if found := re.match(r"^([.\w$]+):", code):
            label, lines = found[1], []
        elif code and not code.startswith("."):
            lines.append(code)
            if label and re.search(rf"\s{re.escape(label)}$", code):
                if sum(map(is_multiplication, lines)) >= FEWEST:
                    yield list(lines)
                label = ""


def is_multiplication(line: str) -> bool:
    """Return True if an instruction multiplies numbers of a product."""
    return bool(MULTIPLICATIONS.match(line))


def simulate(tool: str, lines: list[str], case: Case, processor: str) -> tuple[float, float]:
    """Return the cycles of one of many repetitions of some instructions, and the least that the units allow."""
    arm = case.platform.endswith("aarch64")
    target = ["-mtriple=aarch64", "-mattr=+i8mm,+dotprod"] if arm else ["-mtriple=x86_64", "-mattr=+avxvnni"]
    words = [tool, f"-mcpu={processor}", *target, f"-iterations={ROUNDS}"]
    text = "\n".join(lines)
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=True).stdout
    cycles, least = (
        re.search(rf"{name}:\s+([\d.]+)", done) for name in ("Total Cycles", "Block RThroughput")
    )
    assert cycles and least, done
    return int(cycles[1]) / ROUNDS, float(least[1])


def model_case(tool: str, case: Case) -> Iterator[Loop]:
    """Yield the loops of a class's kernels on its processors."""
    comment = "//" if case.platform.endswith("aarch64") else "#"
    for kernel in case.kernels:
        for lines in find_loops(emit_assembly(case, kernel), comment):
            multiplications = list(filter(is_multiplication, lines))
            for processor in case.processors:
                cycles, _ = simulate(tool, lines, case, processor)
                _, needed = simulate(tool, multiplications, case, processor)
                yield Loop(case.name, kernel.rpartition(":")[2], processor, len(lines), cycles, needed)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the classes that are compared."""
    command.add_argument("classes", nargs="*", metavar="CLASS", help=f"default: {[c.name for c in CASES]}")


def bench_modelled(args: argparse.Namespace) -> int:
    """Print the loops."""
    tool = find_tool()
    if not tool:
        print(f"error: no llvm-mca of version {OLDEST} or newer is installed", file=sys.stderr)
        return 1
    print(f"{'class':18} {'kernel':16} {'processor':16} {'instructions':>12} {'cycles':>8} {'share':>6}")
    for case in CASES:
        if not args.classes or case.name in args.classes:
            for loop in model_case(tool, case):
                numbers = f"{loop.instructions:12} {loop.cycles:8.1f} {loop.share:6.0%}"
                print(f"{loop.case:18} {loop.kernel:16} {loop.processor:16} {numbers}", flush=True)
    return 0
