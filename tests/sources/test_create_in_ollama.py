"""`--ollama` writes a Modelfile and calls Ollama, which a program of the tests stands for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llamatrain.sources import create_in_ollama as ollama
from llamatrain.sources import names
from tests.helpers.cli import ran, run, text
from tests.helpers.ollama_store import add_model
from tests.helpers.small_models import small, weights, written

SHORT = ("--iters", 2, "--batch", 2, "--ctx", 16, "--quiet")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a base and a text, and no Ollama."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(names, "_located", {})
    Path("bin").mkdir()
    h = small()
    written(Path("base.gguf"), h, weights(h))
    Path("text.txt").write_text(text(4000))


@pytest.fixture
def install() -> Callable[[str], None]:
    def install(script: str) -> None:
        program = Path("bin/ollama")
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return install


def test_a_run_creates_a_model_of_base_and_adapter(install: Callable[[str], None]) -> None:
    install('echo "$@" > called')
    add_model(Path("models"), {"model": Path("base.gguf").read_bytes()})
    ran("finetune", "ollama:tiny", "text.txt", *SHORT, "--lora-r", 2, "--out", "r", "--ollama", "mine:v2")
    assert Path("called").read_text().split() == [
        "create",
        "mine:v2",
        "-f",
        "r/Modelfile",
    ]
    assert Path("r/Modelfile").read_text() == f"FROM tiny\nADAPTER {Path('r/adapter.gguf').absolute()}\n"
    assert "ollama =" not in Path("r/config.toml").read_text()


def test_a_new_model_needs_no_adapter(install: Callable[[str], None]) -> None:
    install("exit 0")
    done = ran("from-scratch", "text.txt", "--size", "tiny", "--vocab-size", "bytes", *SHORT[:-1], "--out", "r",
               "--ollama", "mine")  # fmt: skip
    assert Path("r/Modelfile").read_text() == f"FROM {Path('r/model.gguf').absolute()}\n"
    assert "ollama run mine" in done.err


def test_without_ollama_the_command_is_shown() -> None:
    ran("finetune", "base.gguf", "text.txt", *SHORT, "--lora-r", 2, "--out", "r")
    done = ran("export-lora", "base.gguf", "--lora", "r/adapter.gguf", "--out", "m.gguf", "--ollama", "mine")
    assert "not installed" in done.err and "ollama create mine -f m.gguf.Modelfile" in done.err
    assert Path("m.gguf.Modelfile").read_text() == f"FROM {Path('m.gguf').absolute()}\n"
    ran(
        "export-lora",
        "base.gguf",
        "--lora",
        "r/adapter.gguf",
        "--only-adapter",
        "--out",
        "a.gguf",
        "--ollama",
        "mine",
    )
    lines = [f"FROM {Path('base.gguf').absolute()}", f"ADAPTER {Path('a.gguf').absolute()}"]
    assert Path("a.gguf.Modelfile").read_text().splitlines() == lines


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo progress >&2; echo 'Error: no such model' >&2; exit 1", "Error: no such model"),
        ("exit 3", "exit code 3"),
        ("printf 'a\\rb\\r\\n'; exit 1", "b"),
        ("sleep 9", "did not end"),
    ],
)
def test_failures_of_ollama_are_one_note(
    install: Callable[[str], None], script: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:/usr/bin:/bin")
    monkeypatch.setattr(ollama, "TIMEOUT", 0.5)
    install(script)
    note = ollama.create_in_ollama("mine", Path("Modelfile"), Path("base.gguf"))
    assert f"failed: {says}" in note or says in note
    assert "ollama create mine -f Modelfile" in note and "\n" not in note


@pytest.mark.parametrize("name", ["../x", "a b", "-f", "a:b:c", "x;y", "a\n"])
def test_names_are_checked_first(name: str) -> None:
    done = run("finetune", "base.gguf", "text.txt", f"--ollama={name}", "--out", "r")
    assert done.code == 2 and "[invalid-option]" in done.err and not Path("r").exists()


def test_ollama_takes_one_adapter() -> None:
    done = run("finetune", "base.gguf", "text.txt", "--lora", "a.gguf", "--ollama", "mine")
    assert done.code == 2 and "[unused-option]" in done.err
    done = run("export-lora", "base.gguf", "--lora", "a.gguf", "--peft", "p", "--ollama", "mine")
    assert done.code == 2 and "--out" in done.err
