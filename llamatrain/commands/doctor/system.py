"""What is known of this machine and of what llamatrain has on it, and what of it is broken; nothing is compiled.

Whatever fails on the way is a finding itself: on a broken machine all else is told.
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
from llamatrain.commands.doctor.caches import caches, cleaned
from llamatrain.commands.doctor.problems import Fact, Problem, Told, fact, of_bytes
from llamatrain.errors import LlamatrainError, words_of

MORE = "llvmlite", "pyarrow", "zstandard"  # that are used where they are there


class SystemReport(NamedTuple):
    sections: dict[str, list[Fact]]
    findings: list[Problem]


def examined(clean: bool = False) -> SystemReport:
    sections, findings = dict[str, list[Fact]](), dict[Problem, None]()
    for name, look in (({"cleaned": cleaned} if clean else {}) | SECTIONS).items():
        try:
            for each in look():
                if isinstance(each, Problem):
                    findings[each] = None
                else:
                    sections.setdefault(name, []).append(each)
        except LlamatrainError as error:  # it says what would do
            findings[Problem(str(error), "")] = None
        except Exception as error:
            words = (words_of(error).splitlines() or [type(error).__name__])[0]
            findings[Problem(f"{name} cannot be told: {words}", "mend what else is found first")] = None
    return SystemReport(sections, [*findings])


# ---- what there is -----------------------------------------------------------


def versions() -> Told:
    from llamatrain.commands.doctor.dependencies import requirements, version_of

    yield fact("llamatrain", __version__)
    yield fact(
        "python",
        platform.python_version(),
        f"{platform.python_version()} ({sys.executable or 'unknown place'})",
    )
    yield fact("system", platform.platform())
    for each in requirements():
        version = each.version
        yield fact(each.name, version, version or "not installed")
        if version is None and not each.extra:
            yield Problem(f"{each.name} is not installed", f"pip install {each.whole}")
        elif version is not None and not each.suits(version):
            yield Problem(f"{each.name} {version} is not {each.bounds}", f"pip install {each.whole}")
    for name in MORE:
        version = version_of(name)
        yield fact(name, version, version or "not installed")


def processor() -> Told:
    from llamatrain.platform import cpu

    yield fact("name", named(), named() or platform.machine() or "not told here")
    yield fact("class", cpu.processor().name)
    yield fact(
        "units",
        sorted(cpu.enabled_units()),
        ", ".join(sorted(cpu.enabled_units())) or f"none of {', '.join(cpu.UNITS)}",
    )
    if off := sorted(cpu.disabled_units()):
        yield fact("switched off", off, f"{', '.join(off)} (by {cpu.DISABLE_VARIABLE})")


def named() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def kernels() -> Told:
    from llamatrain.compiler import prebuilt
    from llamatrain.compiler.cache import INSTALL_HINT, has_compiler

    library, trouble = prebuilt.open_library()
    compiler, error = compiler_of() if has_compiler() else ("", "")
    from llamatrain.compiler.inventory import list_compilables

    wanted = list_compilables()
    missing = [each for each in wanted if not library(each.symbol)]
    yield fact("needed", len(wanted), f"{len(wanted)} functions")
    yield fact("from the package", len(wanted) - len(missing))
    if trouble:
        yield Problem(trouble, "install llamatrain anew")
    if has_compiler():
        yield from kept(missing)
    yield fact("compiler", compiler or None)
    if error:
        yield Problem(f"the compiler that is installed does not work ({error})", f"{INSTALL_HINT} that does")
    if missing and not compiler:
        yield Problem(
            "no compiled kernels for this processor: numpy does their work, many times slower", INSTALL_HINT
        )


def compiler_of() -> tuple[str, str]:
    """What it is, or why it is none."""
    from llamatrain.compiler.cache import COMPILERS, package_version

    try:
        from llamatrain.compiler import emit  # noqa: F401
    except Exception as error:
        return "", (str(error).splitlines() or [type(error).__name__])[0]
    return ", ".join(f"{name} {package_version(name)}" for name in COMPILERS), ""


def kept(missing: list[Any]) -> Told:
    """Those that were compiled before; the others are compiled when they are first used."""
    from llamatrain.compiler.cache import cache_key, describe_code
    from llamatrain.compiler.store import ObjectStore, object_name
    from llamatrain.platform.cache_dir import default_cache_dir

    shelf, there = ObjectStore(default_cache_dir(cache_key())), 0
    for each in missing:
        facts = describe_code(each)
        there += shelf.load(object_name(each.qualified_name.replace(":", "."), facts), facts) is not None
    yield fact("from the cache", there)
    yield fact("not compiled yet", len(missing) - there)
    if shelf.damaged:
        cure = "each is made again when it is needed; llamatrain doctor --clean removes them"
        yield Problem(
            f"{len(shelf.damaged)} damaged kernels in {shelf.folder}, such as {min(shelf.damaged)}", cure
        )


def threads() -> Told:
    from llamatrain.distributed.cores import count_cores
    from llamatrain.platform import cpu

    here, used = os.cpu_count() or 1, count_cores()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else here
    limits = [f"affinity: {allowed}"] if allowed < here else []
    limits += [f"control group: {cpu.count_cpus()}"] if cpu.count_cpus() < allowed else []
    yield fact("used", used, f"{used}, unless --threads says otherwise")
    yield fact("processors", here)
    yield fact("limited by", limits, ", ".join(limits) or "nothing")


def memory() -> Told:
    from llamatrain.platform.memory import CGROUP, available_bytes

    yield of_bytes("free", available_bytes())
    yield of_bytes("of the machine", total())
    with suppress(OSError, ValueError):  # no such group, or "max"
        limit = int((CGROUP / "memory.max").read_text())
        yield of_bytes("limit of the control group", limit)
    with suppress(ImportError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            yield of_bytes("limit of the process", limit, " of addresses (ulimit -v)")


def total() -> int | None:
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


# ---- others ------------------------------------------------------------------


def mpi() -> Told:
    from llamatrain.commands.doctor.dependencies import version_of

    own = Path(sys.executable).parent / "mpiexec"
    launcher = shutil.which("mpiexec") or (str(own) if own.exists() else None) or shutil.which("srun")
    yield fact("mpi4py", version_of("mpi4py") if find_spec("mpi4py") else None)
    yield fact("launcher", launcher)
    able = bool(find_spec("mpi4py") and launcher)
    yield fact(
        "several processes",
        able,
        "can be started" if able else "no; pip install 'llamatrain[mpi]' brings what it takes",
    )


def gpu() -> Told:
    yield fact("used", False, "none is used yet: all work is the processor's")


SECTIONS: dict[str, Callable[[], Told]] = {
    "versions": versions,
    "processor": processor,
    "kernels": kernels,
    "threads": threads,
    "memory": memory,
    "caches": caches,
    "mpi": mpi,
    "gpu": gpu,
}
