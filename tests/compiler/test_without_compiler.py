"""Where there is no compiler: numpy does the work where no library came with the package, and gives what kernels give."""

import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest

from llamatrain.compiler import cache as finding
from llamatrain.compiler import prebuilt
from llamatrain.compiler.cache import INSTALL_HINT
from llamatrain.gguf import quants
from llamatrain.gguf.reader import open_gguf
from llamatrain.platform import cpu
from tests.helpers.cli import (
    TINY,
    Argument,
    Done,
    environment,
    losses,
    ran,
    run,
    same_bits,
    tensors,
    text_file,
)
from tests.helpers.lora_runs import WIDE, base

SAID = f"no compiled kernels for {cpu.processor().name}: numpy does their work, many times slower; {INSTALL_HINT}\n"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

# Of one process, which imports all once, a child for each command.
COMMANDS = """
import json, os, sys
import importlib, pkgutil
import llamatrain
for each in pkgutil.walk_packages(llamatrain.__path__, "llamatrain."):
    if not {"__main__", "compiler", "llvm", "mpi", "torch"} & {*each.name.split(".")}:
        importlib.import_module(each.name)
from llamatrain.cli.main import main
for at, words in enumerate(json.load(sys.stdin)):
    if not (child := os.fork()):
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{at}.{name}", os.O_WRONLY | os.O_CREAT), number)
        sys.argv = ["llamatrain", *words]
        try:
            main()
        finally:
            sys.stdout.flush()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

# What Python imports before all else: neither it nor a process that it starts has a compiler.
SITE = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
"""

ROWS = ("--ctx", 32, "--batch", 2, "--precision", "f32", "--threads", 1)
WIDER = ("--ctx", 64, "--batch", 8, "--precision", "f32", "--threads", 1)
WAY = (*ROWS, "--iters", 2, "--lr", 1e-2, "--out")
SMALL = ("--embd", 32, "--head", 4, "--layer", 1, "--ff", 32)
NAMED: dict[str, tuple[Argument, ...]] = {
    "from scratch": ("from-scratch", "../text.txt", *TINY[:-2], *WAY, "bytes"),
    "in bf16": ("from-scratch", "../text.txt", *TINY[:-2], *WAY, "halves", "--precision", "bf16"),
    "a vocabulary": ("from-scratch", "../text.txt", "--vocab-size", 270, *SMALL, *WAY, "learned"),
    "finetune": ("finetune", "../base.gguf", "../text.txt", *WAY, "tuned"),
    "chats": ("finetune", "../base.gguf", "../chats.jsonl", *WAY, "chatted"),
    "rows": ("preview", "../text.txt", "--model", "learned/model.gguf", "--json", "-n", 3, "--ctx", 40),
    "rows of chats": ("preview", "../chats.jsonl", "--model", "../base.gguf", "--json", "-n", 3, "--ctx", 64),
    "evaluate": ("evaluate", "../base.gguf", "../text.txt", "--json", *WIDER),
    "beside": ("evaluate", "../base.gguf", "../text.txt", "--json", *WIDER, "--lora", "tuned/adapter.gguf"),
    "generate": ("generate", "bytes/model.gguf", "--prompt", "the ", "-n", 12, "--temp", 0, "--threads", 1),
    "export": (
        "export-lora",
        "../base.gguf",
        "--lora",
        "tuned/adapter.gguf",
        "--type",
        "q8_0",
        "--out",
        "m.gguf",
    ),
    "export to a K type": (
        "export-lora",
        "../base.gguf",
        "--lora",
        "tuned/adapter.gguf",
        "--type",
        "q4_k",
        "--out",
        "k.gguf",
    ),
    "export of a K type": (
        "export-lora",
        "../base.gguf",
        "--lora",
        "tuned/adapter.gguf",
        "--out",
        "kept.gguf",
    ),
    "inspect": ("inspect", "../base.gguf"),
    "help": ("finetune", "--help"),
    "no command": (),
    "plan": ("plan", "finetune", "../base.gguf", "../text.txt", *ROWS),
    "plain": ("from-scratch", "../text.txt", *TINY[:-2], *WAY, "plain", "--kernels", "reference"),
}
LOOKING = ("rows", "rows of chats", "inspect", "help", "no command", "plan")
WORKING = [name for name in NAMED if name not in ("export to a K type", "export of a K type", *LOOKING)]
Results = dict[str, Done]


def compilerless(folder: Path, **more: str) -> dict[str, str]:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    made = environment(
        **{
            prebuilt.LIBRARIES_VARIABLE: str(folder / "nothing here"),
            "LLAMATRAIN_CACHE": str(folder / "cache"),
            **more,
        }
    )
    return made | {"PYTHONPATH": os.pathsep.join([str(folder / "site"), made["PYTHONPATH"]])}


def all_ended(folder: Path, **more: str) -> Results:
    """What became of each command where there is no compiler."""
    words = json.dumps([list(map(str, each)) for each in NAMED.values()])
    env = compilerless(folder, COLUMNS="100", **more)
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        cwd=folder,
        env=env,
        input=words,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    codes = map(int, done.stdout.split())
    read = (
        (code, (folder / f"{at}.out").read_text(), (folder / f"{at}.err").read_text())
        for at, code in enumerate(codes)
    )
    return {name: Done(*each) for name, each in zip(NAMED, read, strict=True)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("without")
    text_file(place, 1500)
    chats = [
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "no " * n}]
        for n in range(1, 9)
    ]
    (place / "chats.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in chats))
    base(place / "base.gguf", WIDE, "Q4_K", template=TEMPLATE)
    return place


@pytest.fixture(scope="module")
def numpy_s(place: Path) -> tuple[Path, Results]:
    folder = place / "numpy"
    folder.mkdir()
    return folder, all_ended(folder)


@pytest.fixture(scope="module")
def kernels(place: Path) -> tuple[Path, Results]:
    """As this process does it."""
    folder, before = place / "kernels", Path.cwd()
    folder.mkdir()
    os.chdir(folder)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "100")
            return folder, {name: run(*words) for name, words in NAMED.items()}
    finally:
        os.chdir(before)


def test_it_is_said_once_for_each_command_that_works_without_them(numpy_s: tuple[Path, Results]) -> None:
    for name, done in numpy_s[1].items():
        assert "Traceback" not in done.err and done.code == int(
            name in ("export to a K type", "export of a K type")
        ), done.err
        assert done.err.count("no compiled kernels") == done.err.count(SAID) <= 1, (name, done.err)
        assert SAID in done.err or name not in WORKING, name
    for name in ("inspect", "help", "no command"):
        assert not numpy_s[1][name].err


@pytest.mark.parametrize("out", ["bytes", "halves", "learned", "tuned", "chatted"])
def test_losses_are_those_of_kernels(
    out: str, numpy_s: tuple[Path, Results], kernels: tuple[Path, Results]
) -> None:
    found, expected = losses(numpy_s[0] / out), losses(kernels[0] / out)
    assert len(found) == 2 and found == pytest.approx(
        expected, abs=1e-2 if out == "halves" else 1e-4
    )  # bfloat16 has 8 bits
    assert found[0] != found[1]


def test_vocabularies_and_tokens_are_the_same(
    numpy_s: tuple[Path, Results], kernels: tuple[Path, Results]
) -> None:
    learned = [
        open_gguf(folder / "learned" / "model.gguf").metadata.raw_values
        for folder in (numpy_s[0], kernels[0])
    ]
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        assert bytes(learned[0][key].raw) == bytes(learned[1][key].raw)
    for name in ("rows", "rows of chats"):
        assert numpy_s[1][name].out == kernels[1][name].out != ""


def test_evaluations_and_texts_are_the_same(
    numpy_s: tuple[Path, Results], kernels: tuple[Path, Results]
) -> None:
    for name in ("evaluate", "beside"):
        found, expected = (json.loads(results[name].out) for results in (numpy_s[1], kernels[1]))
        assert found["tokens"] == expected["tokens"] and found["loss"] == pytest.approx(
            expected["loss"], abs=1e-4
        )
    assert numpy_s[1]["beside"].out != numpy_s[1]["evaluate"].out
    assert numpy_s[1]["generate"].out == kernels[1]["generate"].out != ""
    assert numpy_s[1]["inspect"].out == kernels[1]["inspect"].out != ""
    assert numpy_s[1]["help"].out == kernels[1]["help"].out and "Usage" in numpy_s[1]["no command"].out


def test_a_simple_type_is_written_with_the_same_codes(
    numpy_s: tuple[Path, Results], kernels: tuple[Path, Results]
) -> None:
    found, expected = (open_gguf(folder / "m.gguf").tensors for folder in (numpy_s[0], kernels[0]))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.type == expected[name].type
        one, other = (quants.decode(each.raw, each.type) for each in (tensor, expected[name]))
        step = (
            np.abs(other).max() / 127 if tensor.type.name == "Q8_0" else 0
        )  # where sums of another order are rounded
        assert np.abs(one - other).max() <= 1.01 * step and (one != other).mean() < 0.01, name


@pytest.mark.parametrize("name", ["export to a K type", "export of a K type"])
def test_a_type_that_is_searched_for_is_refused_in_one_line(
    name: str, numpy_s: tuple[Path, Results], kernels: tuple[Path, Results]
) -> None:
    assert numpy_s[1][name].errors == [
        f"error: only compiled kernels can write Q4_K; {INSTALL_HINT} [no-compiler]"
    ]
    out = NAMED[name][-1]
    assert (
        kernels[1][name].code == 0
        and (kernels[0] / str(out)).exists()
        and not (numpy_s[0] / str(out)).exists()
    )
    assert not [path for path in numpy_s[0].iterdir() if path.name.startswith(".")]


def test_what_was_asked_of_numpy_is_the_same_everywhere(
    numpy_s: tuple[Path, Results], kernels: tuple[Path, Results]
) -> None:
    same_bits(numpy_s[0] / "plain" / "model.gguf", kernels[0] / "plain" / "model.gguf")
    same_bits(numpy_s[0] / "plain" / "model.gguf", numpy_s[0] / "bytes" / "model.gguf")
    kernel_made, plain = (tensors(kernels[0] / out / "model.gguf") for out in ("bytes", "plain"))
    assert any((kernel_made[name] != plain[name]).any() for name in plain)


def test_a_plan_is_of_what_would_run(numpy_s: tuple[Path, Results], kernels: tuple[Path, Results]) -> None:
    assert numpy_s[1]["plan"].out and kernels[1]["plan"].out


def test_a_run_that_kernels_began_goes_on_without_them(kernels: tuple[Path, Results], tmp_path: Path) -> None:
    words = (
        "from-scratch",
        "--resume",
        kernels[0] / "bytes" / "checkpoint-2.gguf",
        "--iters",
        3,
        "--out",
        tmp_path / "run",
    )
    program = [sys.executable, "-m", "llamatrain", *map(str, words)]
    done = subprocess.run(program, env=compilerless(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr.count(SAID) == 1, done.stderr
    ran(*words[:-1], tmp_path / "kernels")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "kernels"), abs=1e-4)


# ---- with what came with the package ----------------------------------------


BUILT = pytest.mark.skipif(
    prebuilt.open_library()[0] is prebuilt.find_nothing, reason="scripts/build_kernels.py was not run"
)


@BUILT
def test_a_compiler_that_is_there_is_not_imported_where_there_are_libraries(
    place: Path, tmp_path: Path
) -> None:
    script = """
import sys
from llamatrain.__main__ import main
try:
    main()
finally:
    print(*sorted({"numba", "llvmlite"} & {*sys.modules}), "and no other")
"""
    words = [
        sys.executable,
        "-c",
        script,
        "finetune",
        place / "base.gguf",
        place / "text.txt",
        *map(str, WAY),
        tmp_path / "run",
    ]
    env = environment(LLAMATRAIN_CACHE=str(tmp_path / "cache"))
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "and no other\n" and len(losses(tmp_path / "run")) == 2


@BUILT
def test_with_libraries_all_is_as_with_a_compiler_and_nothing_is_said(
    place: Path, kernels: tuple[Path, Results]
) -> None:
    folder = place / "shipped"
    folder.mkdir()
    for name, done in all_ended(folder, **{prebuilt.LIBRARIES_VARIABLE: str(prebuilt.FOLDER)}).items():
        assert done.code == 0 and "compile" not in done.err and "numpy" not in done.err, (name, done.err)
    for out in ("bytes", "halves", "learned", "plain"):
        same_bits(folder / out / "model.gguf", kernels[0] / out / "model.gguf")
    for file in ("tuned/adapter.gguf", "chatted/adapter.gguf", "m.gguf", "k.gguf", "kept.gguf"):
        assert (folder / file).read_bytes() == (kernels[0] / file).read_bytes(), file
    for out in ("bytes", "tuned"):  # a checkpoint's name for itself is its own
        one, other = (open_gguf(each / out / "checkpoint-2.gguf").tensors for each in (folder, kernels[0]))
        assert one.keys() == other.keys() and all(
            tensor.raw.tobytes() == other[name].raw.tobytes() for name, tensor in one.items()
        )
    assert not list((folder / "cache").rglob("*-????????????????"))  # nothing was compiled


# ---- a compiler that does not work ------------------------------------------


def test_a_folder_of_its_name_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one fatal that nobody knows the version of."""
    assert finding.has_compiler.__wrapped__()
    before = finding.cache_key.__wrapped__()

    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", unknown)
    assert finding.cache_key.__wrapped__() != before
    monkeypatch.setattr(finding, "find_spec", lambda name: ModuleSpec(name, None, is_package=True))
    assert not finding.has_compiler.__wrapped__()


def test_a_compiler_that_does_not_work_is_named(place: Path, tmp_path: Path) -> None:
    why = "Numba needs NumPy 2.9 or less"
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text(f"raise ImportError({why!r})\n")
    env = environment(
        **{prebuilt.LIBRARIES_VARIABLE: str(tmp_path), "LLAMATRAIN_CACHE": str(tmp_path / "cache")}
    )
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    words = [
        sys.executable,
        "-m",
        "llamatrain",
        "evaluate",
        str(place / "base.gguf"),
        str(place / "text.txt"),
    ]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1]
        == f"error: the installed compiler does not work ({why}); {INSTALL_HINT} [broken-compiler]"
    )
    assert "Traceback" not in done.stderr
