"""The class of processors that kernels are found and compiled for: what is chosen, and what cannot be."""

import subprocess
import sys
from pathlib import Path

import pytest

from llamatrain.compiler.cache import INSTALL_HINT
from llamatrain.errors import UsageError
from llamatrain.platform import cpu
from llamatrain.platform.cpu_features import AARCH64, V3_FEATURES, X86_64
from tests.helpers.cli import environment

X86_CLASSES, ARM_CLASSES = (
    {name: each for name, each in cpu.CLASSES.items() if each.architecture == architecture}
    for architecture in (X86_64, AARCH64)
)
LARGE = frozenset({*V3_FEATURES, *(name for needs, _ in cpu.UNITS.values() for name in needs)})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An x86 with all there is; what was found out of this one is forgotten before and after."""
    for name in (cpu.DISABLE_VARIABLE, cpu.CLASS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu, "cpu_features", lambda: LARGE)
    monkeypatch.setattr(cpu, "request_amx", lambda: True)
    monkeypatch.setattr(cpu, "read_cpuinfo", lambda: {"vendor_id": "AuthenticAMD"})
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(cpu, "processor", cpu.processor.__wrapped__)
    return monkeypatch


def test_what_a_machine_has_says_its_class(machine: pytest.MonkeyPatch) -> None:
    assert cpu.processor().name == "sapphirerapids"
    machine.setattr(cpu, "request_amx", lambda: False)  # a kernel too old for them
    assert cpu.processor().name == "x86-64-v4-bf16"
    machine.setattr(cpu, "cpu_features", lambda: LARGE - {"avx512bf16"})
    assert cpu.processor().name == "x86-64-v4-vnni"
    machine.setattr(cpu, "cpu_features", lambda: LARGE - {"avx512vnni"})
    assert cpu.processor().name == "x86-64-v4"
    machine.setattr(cpu, "cpu_features", lambda: LARGE - {"avx512vl"})
    assert cpu.processor().name == "x86-64-v3-vnni"
    machine.setattr(cpu, "cpu_features", lambda: LARGE - {"avx512vl", "avxvnni"})
    assert cpu.processor().name == "x86-64-v3"


def test_intel_multiplies_bf16_by_tiles_or_not_at_all(machine: pytest.MonkeyPatch) -> None:
    """Its vectors of bf16 take twice as long as those of float32, since there are tiles."""
    machine.setattr(cpu, "cpu_features", lambda: LARGE | {"avx512fp16"})
    machine.setattr(cpu, "read_cpuinfo", lambda: {"vendor_id": "GenuineIntel"})
    assert cpu.processor().name == "sapphirerapids"
    machine.setattr(cpu, "request_amx", lambda: False)
    assert cpu.processor().name == "x86-64-v4-vnni"
    machine.setenv(cpu.CLASS_VARIABLE, "x86-64-v4-bf16")
    assert "avx512bf16" in cpu.enabled_units()


@pytest.mark.parametrize(
    ("vendor", "features"),
    [("GenuineIntel", LARGE), ("AuthenticAMD", LARGE | {"avx512fp16"}), (None, LARGE | {"avx512fp16"})],
)
def test_other_processors_multiply_bf16_by_vectors(
    vendor: str | None, features: frozenset[str], machine: pytest.MonkeyPatch
) -> None:
    machine.setattr(cpu, "cpu_features", lambda: features)
    machine.setattr(cpu, "read_cpuinfo", lambda: {"vendor_id": vendor} if vendor else {})
    machine.setattr(cpu, "request_amx", lambda: False)
    assert cpu.processor().name == "x86-64-v4-bf16"


@pytest.mark.parametrize(
    ("without", "name"),
    [
        ("amx", "x86-64-v4-bf16"),
        ("avx512bf16", "x86-64-v4-vnni"),
        ("amx, avx512bf16", "x86-64-v4-vnni"),
        ("avx512vnni", "x86-64-v4"),
        ("avx512", "x86-64-v3-vnni"),
        ("avx512bf16,avx512,amx", "x86-64-v3-vnni"),
        ("avx512,avxvnni", "x86-64-v3"),
    ],
)
def test_what_is_switched_off_makes_a_smaller_class(
    without: str, name: str, machine: pytest.MonkeyPatch
) -> None:
    """Never one whose code has what was switched off."""
    machine.setenv(cpu.DISABLE_VARIABLE, without)
    assert cpu.processor().name == name
    assert not cpu.processor().units & {*map(str.strip, without.split(","))}
    assert cpu.enabled_units() == cpu.processor().units  # the library knows of no other


def test_each_class_asks_for_no_more_than_its_units_are(machine: pytest.MonkeyPatch) -> None:
    """And the first that a machine can run has all that it has."""
    for each in X86_CLASSES.values():
        machine.setattr(cpu, "usable_units", lambda here=each.units: here)
        assert cpu.processor() == each
        assert ("+amx" in each.features) == ("amx" in each.units)
        assert ("bf16" in each.features.replace("amx-bf16", "")) == ("avx512bf16" in each.units)
        assert ("+avx512vnni" in each.features) == ("avx512vnni" in each.units)
        assert ("+avxvnni" in each.features) == ("avxvnni" in each.units)
        assert (each.cpu == "x86-64-v4") == ("avx512" in each.units)


def test_a_class_that_is_asked_for_is_it(machine: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    machine.setattr(cpu, "cpu_features", frozenset)
    machine.setattr(cpu, "request_amx", lambda: asked.append(1))
    for name, each in cpu.CLASSES.items():
        machine.setenv(cpu.CLASS_VARIABLE, name)
        assert cpu.processor() == each and cpu.enabled_units() == each.units
        assert bool(asked) == ("amx" in each.units)  # a process that touches them unasked is killed
        asked.clear()
    machine.setenv(cpu.CLASS_VARIABLE, "")
    assert cpu.processor().name not in cpu.CLASSES


@pytest.mark.parametrize("name", ["haswell", "x86-64-v3 ", "../x"])
def test_a_class_that_nobody_knows_is_an_error_of_usage(name: str, machine: pytest.MonkeyPatch) -> None:
    machine.setenv(cpu.CLASS_VARIABLE, name)
    for asked in (cpu.processor, cpu.enabled_units):
        with pytest.raises(
            UsageError,
            match=f"^{cpu.CLASS_VARIABLE}: unknown class {name}; known are sapphirerapids, x86-64-v4-bf16, ",
        ):
            asked()


@pytest.mark.parametrize(("switch", "what"), [(cpu.CLASS_VARIABLE, "class"), (cpu.DISABLE_VARIABLE, "unit")])
def test_the_command_says_so_in_a_line(switch: str, what: str) -> None:
    words = [sys.executable, "-m", "llamatrain", "from-scratch", "--iters", "1", "--out", "/nowhere/run"]
    done = subprocess.run(
        words, env=environment(**{switch: "none"}), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith(
        f"error: {switch}: unknown {what} none; known are "
    )
    assert done.stderr.count("\n") == 1 and not done.stdout


# ---- of AArch64 --------------------------------------------------------------


@pytest.fixture
def arm(machine: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An AArch64 processor with all units."""
    machine.setattr("platform.machine", lambda: "aarch64")
    machine.setattr(cpu, "cpu_features", lambda: frozenset({"asimd", "asimdhp", "asimddp", "i8mm", "bf16"}))
    return machine


@pytest.mark.parametrize(
    ("without", "name", "unit"),
    [
        ("", "armv8.6", "i8mm"),
        ("i8mm", "armv8.2-dotprod", "dotprod"),
        ("bf16", "armv8.2-dotprod", "dotprod"),
        ("dotprod", "armv8", "neon"),
        ("amx,avx512", "armv8.6", "i8mm"),
    ],
)
def test_units_of_aarch64_decide_its_class(
    without: str, name: str, unit: str, arm: pytest.MonkeyPatch
) -> None:
    arm.setenv(cpu.DISABLE_VARIABLE, without)
    assert (cpu.processor().name, cpu.int8_unit(), cpu.vector_width()) == (name, unit, 4)
    assert cpu.processor().architecture == AARCH64 and cpu.has_int8_products()


def test_the_smallest_class_of_aarch64_needs_no_features(arm: pytest.MonkeyPatch) -> None:
    arm.setattr(cpu, "cpu_features", frozenset)
    assert cpu.processor().name == "armv8" and cpu.enabled_units() == frozenset()
    arm.setattr(cpu, "cpu_features", lambda: LARGE - {"asimddp"})
    assert cpu.processor().name == "armv8"


def test_classes_of_aarch64_ask_for_their_units_only() -> None:
    for each in ARM_CLASSES.values():
        assert {name for name in cpu.AARCH64_UNITS if f"+{name}" in each.features} == each.units


def test_a_class_of_aarch64_can_be_requested_on_another_machine(machine: pytest.MonkeyPatch) -> None:
    machine.setenv(cpu.CLASS_VARIABLE, "armv8.2-dotprod")
    assert cpu.processor().units == {"dotprod"} and cpu.vector_width() == 4
    machine.setenv(cpu.CLASS_VARIABLE, "x86-64-v4")
    machine.setattr("platform.machine", lambda: "aarch64")
    assert cpu.vector_width() == 16


# ---- of no class -------------------------------------------------------------


@pytest.mark.parametrize("missing", ["avx2", "fma", "movbe"])
def test_a_machine_of_no_class_is_one_of_its_own(missing: str, machine: pytest.MonkeyPatch) -> None:
    machine.setattr(cpu, "cpu_features", lambda: LARGE - {missing})
    own = cpu.processor()
    assert own.name.startswith("x86_64-") and own.name not in cpu.CLASSES and own.cpu == cpu.HOST
    machine.setattr(cpu, "cpu_features", lambda: LARGE - {missing, "amxtile"})
    assert cpu.processor().name != own.name  # nor is it that of another


def test_another_kind_of_machine_is_of_no_class(machine: pytest.MonkeyPatch) -> None:
    machine.setattr("platform.machine", lambda: "riscv64")
    assert cpu.processor().name.startswith("riscv64-") and not cpu.processor().units
    assert cpu.vector_width() == 4 and not cpu.has_int8_products()


OWN = """
import sys
if {blocked}:
    sys.modules["numba"] = sys.modules["llvmlite"] = None
from llamatrain.platform import cpu
cpu.cpu_features = lambda: frozenset({{"sse2"}})
from llamatrain.data.tokenizer.bpe_merge import word_keys
from llamatrain.compiler.cache import code_cache, compile_function
if not {blocked}:
    assert b"ELF" in compile_function(word_keys)[2]
print(cpu.processor().name, code_cache.is_available())
print("compiler" if sys.modules.get("llvmlite") else "none")
"""


def test_its_name_is_the_same_with_a_compiler_and_without(tmp_path: Path) -> None:
    """A library is found by it; and the compiler makes code for that machine."""
    env = environment(LLAMATRAIN_CACHE=str(tmp_path), LLAMATRAIN_LIBRARIES=str(tmp_path))
    (name, able, other), (same, abler, compiler) = (
        subprocess.run(
            [sys.executable, "-c", OWN.format(blocked=blocked)],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for blocked in (True, False)
    )
    assert name == same not in cpu.CLASSES and (able, other, abler, compiler) == (
        "False",
        "none",
        "True",
        "compiler",
    )


def test_what_would_help_is_said_of_it(machine: pytest.MonkeyPatch) -> None:
    from llamatrain.compiler import cache as finding
    from llamatrain.compiler import prebuilt

    machine.setattr(cpu, "cpu_features", lambda: LARGE - {"avx2"})
    machine.setattr(finding, "processor", cpu.processor)
    machine.setattr(finding, "has_compiler", lambda: False)
    made, said = finding.CodeCache(), list[str]()
    vars(made).update(library=prebuilt.find_nothing, log=said.append)
    assert not made.is_available() and not made.is_available()
    assert said == [
        f"no compiled kernels for {cpu.processor().name}: numpy does their work, many times slower; {INSTALL_HINT}"
    ]
