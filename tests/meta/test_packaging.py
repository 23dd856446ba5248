"""What is handed to others: an sdist and a wheel from a clean tree, with types; dependencies, changes, and install lines."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

import pytest

import llamatrain
from tests.helpers.cli import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LOWEST = ROOT / "scripts" / "lowest.txt"
PAGE = ("ui/page.html", "ui/page.js", "ui/style.css", "ui/icon.svg")
DIRT = (
    "llamatrain/__pycache__/x.cpython-311.pyc",
    "llamatrain/compiler/libraries/x86-64-v4.so",
    "tests/__pycache__/x.pyc",
    "tests/.hypothesis/examples/0",
    ".mypy_cache/3.11/x.json",
    "runs/from-scratch-1/model.gguf",
    "dist/old.whl",
)
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def tree(folder: Path) -> Path:
    """The project's files, as a clone has them."""
    for name in ("llamatrain", "scripts", "tests", "configs"):
        left = shutil.ignore_patterns("__pycache__", "libraries", "*.pyc", "*.egg-info", ".hypothesis")
        shutil.copytree(ROOT / name, folder / name, ignore=left)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    return folder


def built(kind: str, source: Path, folder: Path) -> Path:
    if find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)]
    done = subprocess.run(words, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tree that somebody has worked in."""
    source = tree(tmp_path_factory.mktemp("source") / "clone")
    for name in DIRT:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"\0")
    return built("sdist", source, source.parent / "made")


@pytest.fixture(scope="module")
def unpacked(sdist: Path) -> Path:
    with tarfile.open(sdist) as files:
        files.extractall(sdist.parent, filter="data")
    return sdist.parent / sdist.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(unpacked: Path) -> Path:
    """Of the sdist, as an installer makes it that finds no wheel."""
    return built("wheel", unpacked, unpacked.parent / "wheel")


def below(folder: Path, *names: str) -> set[str]:
    kept = (path for name in names for path in (folder / name).rglob("*") if path.is_file())
    found = (path.relative_to(folder).as_posix() for path in kept)
    return {
        name
        for name in found
        if not re.search(r"__pycache__|/libraries/|\.pyc$|\.egg-info|\.hypothesis", name)
    }


def test_an_sdist_has_all_that_builds_and_tests_it_and_nothing_else(unpacked: Path) -> None:
    there = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    there = {name for name in there if ".egg-info/" not in name}
    whole = below(ROOT, "llamatrain", "scripts", "tests", "configs")
    heads = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in"}
    assert there == whole | heads | {"PKG-INFO", "setup.cfg"}


def test_a_wheel_has_the_package_and_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names, told = (
            set(files.namelist()),
            files.read(f"llamatrain-{llamatrain.__version__}.dist-info/METADATA").decode(),
        )
        licence = files.read(f"llamatrain-{llamatrain.__version__}.dist-info/licenses/LICENSE").decode()
    own = {name for name in names if ".dist-info/" not in name}
    assert own == {name for name in below(ROOT, "llamatrain") if name.endswith((".py", "py.typed", *PAGE))}
    assert "llamatrain/py.typed" in own and licence == (ROOT / "LICENSE").read_text()
    head = Parser().parsestr(told)
    assert (
        head["Name"] == "llamatrain"
        and head["Version"] == llamatrain.__version__
        and head["License-Expression"] == "MIT"
    )
    assert head["Requires-Python"] == ">=3.11" and not head.get_all("Project-URL") and not head["Home-page"]


def test_a_wheel_runs_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "site")
    script = "import llamatrain, llamatrain.__main__ as m, sys; print(llamatrain.__file__); sys.argv[1:] = ['--version']; m.main()"
    given = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=given, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        str(tmp_path / "site" / "llamatrain" / "__init__.py"),
        f"llamatrain {llamatrain.__version__}",
    ]


# ---- types -------------------------------------------------------------------

USER = """import llamatrain

run = llamatrain.from_scratch("text.txt", size="tiny", iters=1)
best: float = min(run.losses)
print(run.folder / "model.gguf", run.nothing_of_this_name)
"""


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")
def test_a_user_s_mypy_knows_the_types(tmp_path: Path) -> None:
    """The package as one that is installed, whose types count by its mark alone."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(tmp_path / "venv")], check=True
    )
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    places = [str(ROOT), *(place for place in sys.path if place.endswith("site-packages"))]
    (site / "all.pth").write_text("\n".join(places))
    (tmp_path / "user.py").write_text(USER)
    words = [
        "--strict",
        "--python-executable",
        str(tmp_path / "venv" / "bin" / "python"),
        "--cache-dir",
        os.devnull,
        "user.py",
    ]
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words],
        cwd=tmp_path,
        env=given,
        capture_output=True,
        text=True,
        check=False,
    )
    (error, count) = done.stdout.splitlines()
    assert error == 'user.py:5: error: "Run" has no attribute "nothing_of_this_name"  [attr-defined]'
    assert count.startswith("Found 1 error in 1 file"), done.stdout


# ---- dependencies ------------------------------------------------------------


def bounds() -> dict[str, str]:
    """The least of each dependency that there is, by name."""
    extras = PROJECT["project"]["optional-dependencies"]
    every = [
        *PROJECT["project"]["dependencies"],
        *(each for name in ("compile", "mpi", "test") for each in extras[name]),
    ]
    every += PROJECT["build-system"]["requires"]
    found = [re.match(r"([\w-]+)>=([\d.]+)", each) for each in every]
    assert all(found), every
    return {match[1]: match[2] for match in found if match}


def numbers(version: str) -> tuple[int, ...]:
    found = [int(each) for each in version.split(".")]
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def test_the_least_of_each_dependency_is_the_one_that_is_tried() -> None:
    lines = [line for line in LOWEST.read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    assert {name: numbers(version) for name, version in pinned.items()} == {
        name: numbers(least) for name, least in bounds().items()
    }


def test_pythons_that_are_named_are_allowed() -> None:
    named = [
        each.rpartition(" ")[2]
        for each in PROJECT["project"]["classifiers"]
        if re.search(r":: 3\.\d+$", each)
    ]
    assert PROJECT["project"]["requires-python"] == f">={named[0]}" and "urls" not in PROJECT["project"]


def test_tests_that_the_script_names_are_there() -> None:
    script = (ROOT / "scripts" / "lowest").read_text()
    words = re.search(r"set -- (api/.*?)\n    for", script, re.DOTALL)
    assert words
    names = words[1].replace("\\\n", " ").split()
    assert len(names) > 20 and not [name for name in names if not (ROOT / "tests" / f"{name}.py").exists()]


# ---- words -------------------------------------------------------------------


def test_the_changelog_begins_with_unreleased_changes() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]" and len(set(headings)) == len(headings)


def test_documented_scripts_and_extras_exist() -> None:
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    lines = re.findall(
        r"(?:^|`)(pip install [^`\n#]+|scripts/\w+(?=[ `\n])|python scripts/[\w.]+)", text, re.MULTILINE
    )
    assert len(lines) >= 12
    for line in lines:
        for extra in re.findall(r"\[([\w,]+)\]", line):
            assert set(extra.split(",")) <= PROJECT["project"]["optional-dependencies"].keys(), line
        for script in re.findall(r"scripts/[\w.]+", line):
            assert (ROOT / script).exists() and (
                script.endswith(".py") or os.access(ROOT / script, os.X_OK)
            ), line


@pytest.mark.slow
def test_what_readme_installs_runs(unpacked: Path, tmp_path: Path) -> None:
    """From a clone, into a new environment; the wave is short."""
    assert 'pip install ".[compile]"' in README
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    command = str(tmp_path / "venv" / "bin" / "llamatrain")
    given = {"HOME": str(tmp_path), "PATH": f"{tmp_path}/venv/bin:/usr/bin:/bin"}
    done = subprocess.run(
        ["pip", "install", "--quiet", ".[compile]"], cwd=unpacked, env={**os.environ, **given}, check=False
    )
    if done.returncode:
        pytest.skip("no network")
    for words in (["doctor"], ["from-scratch", "--iters", "5"]):
        done = subprocess.run([command, *words], cwd=tmp_path, env=given, check=False)
        assert done.returncode == 0
