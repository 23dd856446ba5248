"""What `llamatrain doctor` tells of a machine, whole or broken, and what it cleans; it compiles nothing, and leaves no trace."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import llamatrain
from llamatrain.commands.doctor import cards, dependencies, system
from llamatrain.commands.doctor.dependencies import Requirement
from llamatrain.commands.doctor.problems import Fact, Problem, make_fact
from llamatrain.compiler import prebuilt
from llamatrain.compiler.cache import cache_key, code_cache, describe_code
from llamatrain.compiler.inventory import kernel_modules, list_compilables
from llamatrain.compiler.store import object_name, seal
from llamatrain.data import token_cache
from llamatrain.platform import cache_dir, cache_prune, cpu
from llamatrain.platform.cpu import UNITS
from llamatrain.platform.temp_files import NEW_PREFIX
from tests.helpers.cli import Done, environment, run
from tests.platform.test_cache_prune import BOUNDS, fill, kernels, never, open_or_build

V4 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
MAKES_KERNELS = re.compile(r"^@(Entry|Brick|Routine|Function)\b", re.MULTILINE)
SECTIONS = ["versions", "processor", "kernels", "threads", "memory", "caches", "mpi", "gpu"]


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading PyTorch takes seconds; the tests of cards have stand-ins for it."""
    monkeypatch.setattr(cards, "find_spec", lambda name: None)
    monkeypatch.setattr(cards, "NVIDIA_DRIVER", Path("/nowhere"))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(cache_dir.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    token_cache.cache_folder.cache_clear()
    yield tmp_path / "cache" / cache_dir.NAME
    token_cache.cache_folder.cache_clear()


def told(*words: str) -> tuple[int, dict[str, Any]]:
    done = run("doctor", "--json", *words)
    assert done.err == ""
    return done.code, json.loads(done.out)


def entry_of_cache(root: Path, content: bytes | None = None) -> Path:
    """What was compiled before; here it is nothing that could run, and doctor runs none."""
    each = list_compilables()[0]
    name = object_name(each.qualified_name.replace(":", "."), describe_code(each))
    place = root / cache_key() / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(seal(describe_code(each), b"code") if content is None else content)
    return place


def test_a_whole_machine(root: Path) -> None:
    before = code_cache.compiled
    status, found = told()
    assert status == 0 and found["findings"] == [] and list(found) == [*SECTIONS, "findings"]
    assert (
        found["versions"]["llamatrain"] == llamatrain.__version__
        and found["versions"]["numpy"]
        and found["versions"]["gguf"]
    )
    assert (
        found["threads"]["used"] >= 1
        and found["memory"]["free"] > 0
        and found["caches"]["folder"] == str(root)
    )
    assert found["kernels"]["needed"] == len(list_compilables()) > 60
    assert found["gpu"] == {"cards": None, "used": None}
    assert code_cache.compiled == before and not any(root.iterdir())


def test_plain_lines_are_the_same_facts(root: Path) -> None:
    done = run("doctor")
    rows = [line.split("\t") for line in done.out.splitlines()]
    assert done.code == 0 and done.err == "" and {len(row) for row in rows} == {3}
    assert list(dict.fromkeys(row[0] for row in rows)) == SECTIONS
    assert ["gpu", "used", "none: all work is done by the processor"] in rows


def test_on_a_terminal_there_is_a_table(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamatrain.cli.doctor import draw

    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "")
    drawn = run_of(lambda: draw(system.examine()))
    assert "nothing is broken" in drawn and "threads" in drawn and "\t" not in drawn


def run_of(work: Any) -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(out := io.StringIO()):
        work()
    return out.getvalue()


# ---- broken machines ---------------------------------------------------------


def alone(folder: Path, *words: str, **settings: str | None) -> Done:
    """In a process of its own, whose environment is changed."""
    given = {name: value for name, value in {**environment(), **settings}.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-m", "llamatrain", "doctor", *words],
        cwd=folder,
        env=given,
        capture_output=True,
        text=True,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def finding(done: Done) -> list[str]:
    assert done.code == 1 and done.err == "" and "Traceback" not in done.out, done.err
    return [line.split("\t")[2] for line in done.out.splitlines() if line.startswith("findings\t")]


def test_a_cache_that_cannot_be_written(root: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    done = run("doctor")
    assert finding(done) == [
        f"{root} cannot be written (Not a directory); set LLAMATRAIN_CACHE to another folder"
    ]
    assert "gpu\tused" in done.out


@pytest.mark.skipif(sys.platform == "win32", reason="homes are found otherwise")
def test_no_home(tmp_path: Path) -> None:
    script = "import pwd; pwd.getpwuid = lambda *_: (_ for _ in ()).throw(KeyError()); from llamatrain.__main__ import main; main()"
    given = {
        name: value
        for name, value in environment().items()
        if name not in ("HOME", cache_dir.CACHE_VARIABLE, "XDG_CACHE_HOME")
    }
    words = [sys.executable, "-c", script, "doctor"]
    done = subprocess.run(words, cwd=tmp_path, env=given, capture_output=True, text=True, check=False)
    expected = "there is no home folder for the cache; set LLAMATRAIN_CACHE to a folder"
    assert finding(Done(done.returncode, done.stdout, done.stderr)) == [expected]


def test_neither_proc_nor_groups(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_text

    def told_nowhere(path: Path, *how: Any, **more: Any) -> str:
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, *how, **more)

    monkeypatch.setattr(Path, "read_text", told_nowhere)
    status, found = told()
    assert status == 0 and found["memory"]["free"] is None
    assert "memory\tfree\tunknown\n" in run("doctor").out


def test_a_damaged_kernel_and_how_it_goes(root: Path) -> None:
    whole = entry_of_cache(root)
    status, found = told()
    assert status == 0 and found["kernels"]["from_the_cache"] == (
        prebuilt.open_library()[0] is prebuilt.find_nothing
    )
    whole.write_bytes(whole.read_bytes()[:-1] + b"x")
    if found["kernels"]["from_the_package"]:
        pytest.skip("kernels came with the package: those of the cache are not looked at")
    (said,) = finding(run("doctor"))
    assert said.startswith(f"1 damaged kernels in {whole.parent}, such as {whole.name}; ")
    status, found = told("--clean")
    assert status == 0 and found["cleaned"]["damaged_kernels"] == {
        "files": 1,
        "bytes": len(seal("", b"code")),
    }
    assert not whole.exists()


@pytest.mark.parametrize("kind", ["empty", "folder", "device", "garbage", "huge"])
def test_anything_in_a_kernel_s_place(root: Path, kind: str) -> None:
    if code_cache.library is not prebuilt.find_nothing:
        pytest.skip("kernels came with the package")
    place = entry_of_cache(root, os.urandom(999) if kind == "garbage" else b"")
    if kind in ("folder", "device"):
        place.unlink()
        place.mkdir() if kind == "folder" else place.symlink_to("/dev/zero")
    elif kind == "huge":
        os.truncate(place, 1 << 40)
    assert len(finding(run("doctor"))) == 1
    assert told("--clean")[0] == 0 and not os.path.lexists(place)


def test_a_variable_that_means_nothing(tmp_path: Path) -> None:
    done = alone(tmp_path, LLAMATRAIN_WITHOUT="avx1024")
    assert finding(done) == [f"LLAMATRAIN_WITHOUT: unknown unit avx1024; known are {', '.join(UNITS)}"]
    assert "memory\tfree" in done.out and "versions\tnumpy" in done.out


def test_without_compiler_or_kernels(root: Path, tmp_path: Path) -> None:
    stand_ins = tmp_path / "broken"
    for name in ("numba", "llvmlite"):
        (stand_ins / name).mkdir(parents=True)
        (stand_ins / name / "__init__.py").write_text("raise ImportError('it is for\\nanother Python')\n")
    path = os.pathsep.join([str(stand_ins), environment()["PYTHONPATH"]])
    done = alone(
        tmp_path,
        PYTHONPATH=path,
        **{
            prebuilt.LIBRARIES_VARIABLE: str(tmp_path / "none"),
            cache_dir.CACHE_VARIABLE: str(tmp_path / "cache"),
        },
    )
    one, other = finding(done)
    assert one.startswith(
        "the installed compiler does not work (it is for); pip install 'llamatrain[compile]'"
    )
    assert other.startswith(
        "there are no compiled kernels for this processor, so numpy does the work, many times slower; pip install"
    )


def test_whatever_fails_is_told_and_the_rest_too(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> Iterator[Fact]:
        yield make_fact("before", 1)
        raise RuntimeError("the sky\nfell")

    monkeypatch.setitem(system.SECTIONS, "threads", failing)
    found = system.examine()
    assert found.sections["threads"] == [make_fact("before", 1)] and "gpu" in found.sections
    assert found.findings == [Problem("threads cannot be examined: the sky", "fix the other problems first")]


def test_a_dependency_that_is_missing_or_too_old(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"numpy": "1.26.4", "gguf": None, "numba": "0.69.0", "typer": "0.29.2"}
    real = dependencies.installed_version
    monkeypatch.setattr(
        dependencies, "installed_version", lambda name: there[name] if name in there else real(name)
    )
    said = finding(run("doctor"))
    assert (
        "gguf is not installed; pip install 'gguf>=0.19'" in said
        and "numpy must be >=2.0 (got 1.26.4); pip install 'numpy>=2.0'" in said
    )
    assert (
        "numba must be >=0.66,<0.69 (got 0.69.0); pip install 'llamatrain[compile]'" in said
        and len(said) == 3
    )


def test_requirements_are_those_of_the_package() -> None:
    found = {each.name: each for each in dependencies.list_requirements()}
    assert (
        {"numpy", "gguf", "typer", "numba", "mpi4py", "torch"} <= found.keys()
        and "pytest" not in found
        and "ruff" not in found
    )
    assert found["typer"].bounds == ">=0.28,<0.30" and found["numba"].extra == "compile"


@pytest.mark.parametrize(
    ("bounds", "fitting", "others"),
    [
        (">=0.28,<0.30", ("0.28", "0.28.0", "0.29.9"), ("0.27.9", "0.30", "0.30.1")),
        (">=4", ("4.0", "10.1", "5rc1"), ("3.9",)),
        (">=2.0", ("2", "2.0.0rc1", "3"), ("1.26", "1")),
        ("", ("1", "what"), ()),
    ],
)
def test_versions_are_numbers(bounds: str, fitting: tuple[str, ...], others: tuple[str, ...]) -> None:
    requirement = Requirement("it", bounds, "")
    assert all(requirement.accepts(each) for each in fitting) and not any(
        requirement.accepts(each) for each in others
    )


ABSENT = """
import importlib.metadata as metadata, sys
from importlib.machinery import PathFinder

absent = {absent!r}
find, version = PathFinder.find_spec, metadata.version

def find_others(name, *where):
    return None if name.partition(".")[0] in absent else find(name, *where)

def version_of_others(name):
    if name in absent:
        raise metadata.PackageNotFoundError(name)
    return version(name)

PathFinder.find_spec, metadata.version = find_others, version_of_others
from llamatrain.__main__ import main
main()
"""


OPTIONAL = ["mpi4py", "numba", "llvmlite", "pyarrow", "zstandard", "torch"]


@pytest.mark.parametrize("absent", [*([each] for each in OPTIONAL), OPTIONAL], ids="-".join)
def test_optional_packages_need_not_be_there(root: Path, tmp_path: Path, absent: list[str]) -> None:
    words = [sys.executable, "-c", ABSENT.format(absent=absent), "doctor", "--json"]
    given = environment(**{cache_dir.CACHE_VARIABLE: str(tmp_path / "cache")})
    done = subprocess.run(words, cwd=tmp_path, env=given, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    shipped_here = prebuilt.open_library()[0] is not prebuilt.find_nothing
    without_kernels = {"numba", "llvmlite"} & {*absent} and not shipped_here
    assert ["no compiled kernels" in each["what"] for each in found["findings"]] == (
        [True] if without_kernels else []
    ), done.stderr
    assert done.returncode == bool(without_kernels) and found["kernels"]["needed"] == len(list_compilables())
    assert found["mpi"]["several_processes"] is False or "mpi4py" not in absent
    assert all(found["versions"][name] is None for name in absent)


def test_kernels_are_declared_where_they_are_looked_for() -> None:
    declaring = {*kernel_modules()}
    for source in sorted(prebuilt.PACKAGE.rglob("*.py")):
        name = ".".join(source.relative_to(prebuilt.PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        if name not in declaring:
            assert not MAKES_KERNELS.search(source.read_text()), (
                f"{name} declares kernels that doctor does not know"
            )


# ---- graphics cards ----------------------------------------------------------


def answering(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let this program answer in place of PyTorch's process."""
    monkeypatch.setattr(cards, "find_spec", lambda name: name)
    monkeypatch.setattr(cards, "COMMAND", [sys.executable, "-c", program])


def test_cards_and_how_to_use_them(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [["cuda", "A card", 80 * 10**9], ["cuda", "Another", 24 * 10**9]]
    answering(monkeypatch, f"print('a greeting'); print({json.dumps(json.dumps(found))})")
    status, report = told()
    first, second = report["gpu"]["cards"]
    assert status == 0 and first == {"device": "cuda", "name": "A card", "nbytes": 80 * 10**9}
    assert second["name"] == "Another" and report["gpu"]["used"] == "cuda"
    lines = run("doctor").out.splitlines()
    assert "gpu\tcards\tA card with 80 GB (cuda), Another with 24 GB (cuda)" in lines
    assert "gpu\tused\tthe first, with --device cuda or auto" in lines


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import time; time.sleep(99)", "it has not answered for 1 seconds"),
        ("import signal, os; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9"),
        ("raise ImportError('libcudart.so.13: no such file')", "ImportError: libcudart.so.13: no such file"),
        ("print('[[1]]')", "exit code 0"),
        ("print('{}') or print('3')", "exit code 0"),
        ("pass", "exit code 0"),
    ],
)
def test_a_broken_torch_is_told(
    root: Path, monkeypatch: pytest.MonkeyPatch, program: str, problem: str
) -> None:
    answering(monkeypatch, program)
    monkeypatch.setattr(cards, "TIMEOUT", 1.0 if "sleep" in program else 60.0)
    done = run("doctor")
    remedy = "reinstall it, or check the card's driver"
    assert finding(done) == [f"the installed PyTorch does not work ({problem}); {remedy}"]
    assert "gpu\tused\tnone: all work is done by the processor\n" in done.out


def test_a_python_that_cannot_be_started(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, "")
    monkeypatch.setattr(cards, "COMMAND", [str(root / "none")])
    (said,) = finding(run("doctor"))
    assert said.startswith("the installed PyTorch does not work (No such file")


def test_an_nvidia_card_that_is_not_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "NVIDIA_DRIVER", root.parent)
    root.mkdir(parents=True)
    done = run("doctor")
    assert done.code == 0 and "the processor; pip install 'llamatrain[torch]' installs PyTorch" in done.out
    answering(monkeypatch, "print('[]')")
    done = run("doctor")
    assert done.code == 0 and "the processor; PyTorch does not find the NVIDIA card" in done.out
    assert "gpu\tcards\tnone\n" in done.out


@pytest.mark.reference
def test_torch_lists_its_cards() -> None:
    torch = pytest.importorskip("torch")
    found = [card for card in cards.find_cards() if card.device == "cuda"]
    assert len(found) == torch.cuda.device_count() and all(card.nbytes > 1 << 20 for card in found)


# ---- cleaning ----------------------------------------------------------------


def test_clean_takes_what_is_old_and_leaves_what_is_used(root: Path, tmp_path: Path) -> None:
    other, own = kernels(root, "0123456789abcdef", 0), kernels(root, cache_key(), 0)
    open_or_build("unread", fill, BOUNDS)
    reading = open_or_build("read", fill, BOUNDS)
    (root / "speeds").mkdir()
    (root / "models").mkdir()
    (root / "models" / "a.gguf").write_bytes(bytes(55))
    (root / "tokens" / f"{NEW_PREFIX}left").mkdir()
    (tmp_path / ".llamatrain-passing-left").write_bytes(bytes(77))
    status, found = told()
    assert status == 0 and found["caches"]["tokens"]["folders"] == 2 and found["caches"]["speeds"] == 0
    assert found["caches"]["imported_models"] == {"files": 1, "bytes": 55}
    assert found["caches"]["left_by_dead_processes"]["files"] == 1
    assert found["caches"]["left_there_by_dead_processes"] == {"files": 1, "bytes": 77}
    status, found = told("--clean")
    assert status == 0 and found["cleaned"]["old_kernels"] == {"folders": 1, "bytes": 100}
    assert found["cleaned"]["imported_models"] == {"files": 1, "bytes": 55}
    assert found["cleaned"]["tokens"]["folders"] == 1 and found["cleaned"]["tokens"]["bytes"] > 400
    assert found["cleaned"]["left_among_temporary_files"] == {"files": 1, "bytes": 77}
    assert not other.exists() and own.exists() and not (root / "tokens" / "unread").exists()
    assert (
        sorted(path.name for path in (root / "tokens").iterdir()) == ["read"] and (root / "speeds").exists()
    )
    assert (
        open_or_build("read", never, BOUNDS).tokens.read(0, 2).tolist()
        == reading.tokens.read(0, 2).tolist()
        == [0, 1]
    )


def test_clean_leaves_kernels_that_are_being_compiled(root: Path) -> None:
    from llamatrain.platform.locks import lock

    other = kernels(root, "0123456789abcdef", 2 * cache_prune.MAX_AGE)
    with lock(other):
        assert told("--clean")[1]["cleaned"]["old_kernels"]["folders"] == 0 and other.exists()
    assert told("--clean")[1]["cleaned"]["old_kernels"]["folders"] == 1 and not other.exists()


def test_old_is_when_it_was_last_used(root: Path) -> None:
    kernels(root, "0123456789abcdef", 5)
    assert abs(cache_prune.list_kernels(root)[0].last_used - time.time()) < 60


@pytest.mark.parametrize("words", [("more",), ("--cleen",)])
def test_words_that_are_none_of_its_own(words: tuple[str, ...]) -> None:
    done = run("doctor", *words)
    assert done.code == 2 and len(done.errors) == 1 and not done.out


@pytest.mark.parametrize(
    ("features", "name", "missing"),
    [
        ({"avx2"}, "x86-64-v3", ["avx512", "avx512vnni", "avx512bf16", "amx", "avxvnni"]),
        ({"avx2", "avxvnni"}, "x86-64-v3", ["avx512", "avx512vnni", "avx512bf16", "amx"]),
        ({*V4, "avx512vnni"}, "x86-64-v4-vnni", ["avx512bf16", "amx"]),
        ({"asimd", "asimddp"}, "armv8.2-dotprod", ["i8mm", "bf16"]),
    ],
)
def test_the_units_that_a_processor_lacks_are_told(
    features: set[str], name: str, missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset(features))
    monkeypatch.setattr(cpu, "processor", lambda: cpu.CLASSES[name])
    facts = {fact.name: fact for fact in system.describe_processor() if isinstance(fact, Fact)}
    assert facts["lacks"].value == missing
    assert facts["bf16"].text == "no unit; as fast as f32"


def test_vectors_of_bf16_that_are_slow_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cpu, "cpu_features", lambda: frozenset({*V4, "avx512vnni", "avx512bf16", "avx512fp16"})
    )
    monkeypatch.setattr(cpu, "read_cpuinfo", lambda: {"vendor_id": "GenuineIntel"})
    monkeypatch.setattr(cpu, "processor", lambda: cpu.CLASSES["x86-64-v4-vnni"])
    facts = {fact.name: fact for fact in system.describe_processor() if isinstance(fact, Fact)}
    assert facts["bf16"].text == "products in f32, which is faster than avx512bf16"
