"""Examines this machine and what llamatrain has stored on it; nothing is compiled.

A check that fails is a problem itself: on a broken machine the other checks still run.
"""

import os
import platform
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from llamatrain import __version__
from llamatrain.commands.doctor.caches import clean_caches, describe_caches
from llamatrain.commands.doctor.cards import describe_cards
from llamatrain.commands.doctor.problems import Fact, Findings, Problem, bytes_fact, make_fact
from llamatrain.errors import LlamatrainError, words_of

OPTIONAL = "llvmlite", "pyarrow", "zstandard"  # packages that are used if installed


class SystemReport(NamedTuple):
    """Facts by section, and the problems that were found."""

    sections: dict[str, list[Fact]]
    findings: list[Problem]


def examine(clean: bool = False) -> SystemReport:
    """Run all checks; with `clean`, first remove what is not needed."""
    sections, findings = dict[str, list[Fact]](), dict[Problem, None]()
    for name, section in (({"cleaned": clean_caches} if clean else {}) | SECTIONS).items():
        try:
            for item in section():
                if isinstance(item, Problem):
                    findings[item] = None
                else:
                    sections.setdefault(name, []).append(item)
        except LlamatrainError as error:  # its message has a remedy
            findings[Problem(str(error), "")] = None
        except Exception as error:
            message = (words_of(error).splitlines() or [type(error).__name__])[0]
            findings[Problem(f"{name} cannot be examined: {message}", "fix the other problems first")] = None
    return SystemReport(sections, [*findings])


# ---- what there is -----------------------------------------------------------


def describe_versions() -> Findings:
    """Yield the versions of llamatrain, Python, the system and the dependencies."""
    from llamatrain.commands.doctor.dependencies import installed_version, list_requirements

    yield make_fact("llamatrain", __version__)
    yield make_fact(
        "python",
        platform.python_version(),
        f"{platform.python_version()} ({sys.executable or 'unknown path'})",
    )
    yield make_fact("system", platform.platform())
    for requirement in list_requirements():
        version = requirement.version
        yield make_fact(requirement.name, version, version or "not installed")
        if version is None and not requirement.extra:
            yield Problem(f"{requirement.name} is not installed", f"pip install {requirement.pip_argument}")
        elif version is not None and not requirement.accepts(version):
            yield Problem(
                f"{requirement.name} must be {requirement.bounds} (got {version})",
                f"pip install {requirement.pip_argument}",
            )
    for name in OPTIONAL:
        version = installed_version(name)
        yield make_fact(name, version, version or "not installed")


def describe_processor() -> Findings:
    """Yield the processor's name, class and units, and the units that it lacks."""
    from llamatrain.platform import cpu

    enabled, off, lacking = sorted(cpu.enabled_units()), sorted(cpu.disabled_units()), list_missing_units()
    yield make_fact("name", processor_name(), processor_name() or platform.machine() or "unknown")
    yield make_fact("class", cpu.processor().name)
    yield make_fact("units", enabled, ", ".join(enabled))
    yield make_fact("lacks", lacking, ", ".join(lacking) or "no unit that llamatrain uses")
    for_bf16 = next((unit for unit in ("amx", "avx512bf16") if unit in enabled), None)
    is_slow = cpu.has_slow_bf16(cpu.enabled_units())
    without = "products in f32, which is faster than avx512bf16" if is_slow else "no unit; as fast as f32"
    yield make_fact("bf16", for_bf16, f"products by {for_bf16}" if for_bf16 else without)
    yield make_fact("int8", cpu.int8_unit(), f"products by {cpu.int8_unit()}")
    if off:
        yield make_fact("switched off", off, f"{', '.join(off)} (by {cpu.DISABLE_VARIABLE})")


def list_missing_units() -> list[str]:
    """Return the units of this architecture that the processor does not have."""
    from llamatrain.platform import cpu
    from llamatrain.platform.cpu_features import AARCH64

    features, is_arm = cpu.cpu_features(), cpu.processor().architecture == AARCH64
    missing = [name for name, (needs, _) in cpu.UNITS.items() if not features.issuperset(needs)]
    if "avx512vnni" in features and "avxvnni" in missing:
        missing.remove("avxvnni")  # it would be used in its place
    return [name for name in missing if (name in cpu.AARCH64_UNITS) == is_arm]


def processor_name() -> str:
    """Return the processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def describe_kernels() -> Findings:
    """Yield where kernels come from, and whether they can be compiled."""
    from llamatrain.compiler import prebuilt
    from llamatrain.compiler.cache import INSTALL_HINT, has_compiler

    library, problem = prebuilt.open_library()
    compiler, error = find_compiler() if has_compiler() else ("", "")
    from llamatrain.compiler.inventory import list_compilables

    needed = list_compilables()
    missing = [function for function in needed if not library(function.symbol)]
    yield make_fact("needed", len(needed), f"{len(needed)} functions")
    yield make_fact("from the package", len(needed) - len(missing))
    if problem:
        yield Problem(problem, "reinstall llamatrain")
    if has_compiler():
        yield from describe_cached(missing)
    yield make_fact("compiler", compiler or None)
    if error:
        yield Problem(f"the installed compiler does not work ({error})", INSTALL_HINT)
    if missing and not compiler:
        yield Problem(
            "there are no compiled kernels for this processor, so numpy does the work, many times slower",
            INSTALL_HINT,
        )


def find_compiler() -> tuple[str, str]:
    """Return the compiler and its version, or an empty text and why it does not work."""
    from llamatrain.compiler.cache import COMPILERS, package_version

    try:
        from llamatrain.compiler import emit  # noqa: F401
    except Exception as error:
        return "", (str(error).splitlines() or [type(error).__name__])[0]
    return ", ".join(f"{name} {package_version(name)}" for name in COMPILERS), ""


def describe_cached(missing: list[Any]) -> Findings:
    """Yield how many of the missing kernels are in the cache.

    The others are compiled when they are first used.
    """
    from llamatrain.compiler.cache import cache_key, describe_code
    from llamatrain.compiler.store import ObjectStore, object_name
    from llamatrain.platform.cache_dir import default_cache_dir

    store, count = ObjectStore(default_cache_dir(cache_key())), 0
    for function in missing:
        facts = describe_code(function)
        count += store.load(object_name(function.qualified_name.replace(":", "."), facts), facts) is not None
    yield make_fact("from the cache", count)
    yield make_fact("not compiled yet", len(missing) - count)
    if store.damaged:
        remedy = "they are made again when needed; llamatrain doctor --clean removes them"
        yield Problem(
            f"{len(store.damaged)} damaged kernels in {store.folder}, such as {min(store.damaged)}", remedy
        )


def describe_threads() -> Findings:
    """Yield the number of threads and what limits it."""
    from llamatrain.distributed.cores import count_cores
    from llamatrain.platform import cpu
    from llamatrain.platform.affinity import usable_cpus

    processors, used = os.cpu_count() or 1, count_cores()
    allowed = len(usable_cpus())
    limits = [f"affinity: {allowed}"] if allowed < processors else []
    limits += [f"control group: {cpu.count_cpus()}"] if cpu.count_cpus() < allowed else []
    yield make_fact("used", used, f"{used}, unless --threads is given")
    yield make_fact("processors", processors)
    yield make_fact("limited by", limits, ", ".join(limits) or "nothing")


def describe_memory() -> Findings:
    """Yield free and total memory and their limits."""
    from llamatrain.platform.memory import CGROUP, address_limit, available_bytes, total_bytes

    yield bytes_fact("free", available_bytes())
    yield bytes_fact("of the machine", total_bytes())
    with suppress(OSError, ValueError):  # no such group, or "max"
        limit = int((CGROUP / "memory.max").read_text())
        yield bytes_fact("limit of the control group", limit)
    if addresses := address_limit():
        yield bytes_fact("limit of the process", addresses, " of addresses (ulimit -v)")


# ---- others ------------------------------------------------------------------


def describe_mpi() -> Findings:
    """Yield whether several processes can be started."""
    from llamatrain.commands.doctor.dependencies import installed_version

    bundled = Path(sys.executable).parent / "mpiexec"
    launcher = shutil.which("mpiexec") or (str(bundled) if bundled.exists() else None) or shutil.which("srun")
    yield make_fact("mpi4py", installed_version("mpi4py") if find_spec("mpi4py") else None)
    yield make_fact("launcher", launcher)
    is_available = bool(find_spec("mpi4py") and launcher)
    yield make_fact(
        "several processes",
        is_available,
        "can be started" if is_available else "no; pip install 'llamatrain[mpi]' brings what it takes",
    )


SECTIONS: dict[str, Callable[[], Findings]] = {
    "versions": describe_versions,
    "processor": describe_processor,
    "kernels": describe_kernels,
    "threads": describe_threads,
    "memory": describe_memory,
    "caches": describe_caches,
    "mpi": describe_mpi,
    "gpu": describe_cards,
}
