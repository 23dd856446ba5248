"""Commands take remote names in place of paths, and runs remember them."""

import hashlib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import llamatrain
from llamatrain.data.tokenizer.bpe_tables import ALPHABET
from llamatrain.sources import download, names
from tests.helpers.architecture_models import weights as random_arrays
from tests.helpers.architectures import FAMILIES
from tests.helpers.cli import ran, run, same_bits, text
from tests.helpers.file_server import FileServer, Served, serve_files
from tests.helpers.ollama_store import add_model
from tests.helpers.small_models import small, weights, written
from tests.helpers.tokenizer_folders import bpe, write_json
from tests.helpers.transformers_folders import config, state, write_folder

SHORT = ("--iters", 2, "--batch", 2, "--ctx", 16, "--lora-r", 2, "--quiet")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A store with a model, and a server with a text."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(download, "writable_cache_dir", lambda name: tmp_path / name)
    monkeypatch.setattr(names, "_located", {})
    monkeypatch.chdir(tmp_path)
    h = small()
    add_model(tmp_path / "models", {"model": written(Path("base.gguf"), h, weights(h)).read_bytes()})
    with serve_files() as server:
        server.files["/text.txt"] = Served(text(4000).encode(), etag='"1"')
        yield server


def test_a_run_with_names_equals_one_with_paths(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{server.url}/text.txt"
    Path("text.txt").write_text(text(4000))
    ran("finetune", "ollama:tiny", url, *SHORT, "--out", "named")
    ran("finetune", "base.gguf", "text.txt", *SHORT, "--out", "plain")
    same_bits(Path("named/adapter.gguf"), Path("plain/adapter.gguf"))
    stored = tomllib.loads(Path("named/config.toml").read_text())
    assert stored["base"] == "ollama:tiny" and stored["data"] == [url]

    server.files.clear()  # as without a network
    monkeypatch.setattr(names, "_located", {})
    monkeypatch.setattr(download.Download, "update", lambda self: None)
    ran("finetune", "--resume", "named", "--iters", 4, "--quiet")
    ran("finetune", "--resume", "plain", "--iters", 4, "--quiet")
    same_bits(Path("named/adapter.gguf"), Path("plain/adapter.gguf"))


def test_a_config_file_and_options_take_names(server: FileServer) -> None:
    url = f"{server.url}/text.txt"
    Path("run.toml").write_text(f'base = "ollama:tiny"\ndata = ["{url}"]\nteacher = "ollama:tiny:latest"\n')
    server.files["/val.txt"] = Served(text(2000, 2).encode())
    checksum = hashlib.sha256(text(2000, 2).encode()).hexdigest()
    val = f"{server.url}/val.txt#sha256={checksum}"
    ran("finetune", "--config", "run.toml", "--val", val, *SHORT, "--out", "r")
    stored = tomllib.loads(Path("r/config.toml").read_text())
    assert stored["teacher"] == "ollama:tiny:latest" and stored["val"] == [val]


def test_other_commands_take_names(server: FileServer) -> None:
    url = f"{server.url}/text.txt"
    server.files["/adapter.gguf"] = Served(adapter_bytes())
    lora = f"{server.url}/adapter.gguf"
    assert (
        json.loads(ran("evaluate", "ollama:tiny", url, "--lora", lora, "--ctx", 16, "--json").out)["loss"] > 0
    )
    assert ran("preview", url, "--model", "ollama:tiny", "--ctx", 16).out
    ran("export-lora", "ollama:tiny", "--lora", lora, "--out", "merged.gguf")
    ran("merge", "ollama:tiny", "merged.gguf", "--out", "between.gguf")
    ran("generate", "ollama:tiny", "--lora-scaled", lora, "0.5", "--prompt", "x", "-n", 1)
    planned = ran("plan", "finetune", "ollama:tiny", url, "--ctx", 16)
    assert planned.out
    assert llamatrain.evaluate("ollama:tiny", url, ctx=16).loss > 0
    assert llamatrain.load("ollama:tiny").generate("x", n=1)


def adapter_bytes() -> bytes:
    ran("finetune", "base.gguf", text_file(), *SHORT, "--out", "first")
    return Path("first/adapter.gguf").read_bytes()


def text_file() -> Path:
    path = Path("some.txt")
    path.write_text(text(4000))
    return path


def test_plan_says_what_it_downloads(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/base.gguf"] = Served(Path("base.gguf").read_bytes())
    done = ran("plan", "finetune", f"{server.url}/base.gguf", f"{server.url}/text.txt", "--ctx", 16)
    assert f"downloading {server.url}/base.gguf (" in done.err


def test_help_asks_no_server(server: FileServer) -> None:
    ran("finetune", f"{server.url}/base.gguf", "--help")
    assert not server.requests


def test_a_model_comes_first(server: FileServer) -> None:
    done = run("finetune", f"{server.url}/text.txt", "ollama:tiny")
    assert done.code == 2 and "[model-first]" in done.err and not server.requests
    done = run("finetune", "ollama:tiny", f"{server.url}/none.txt", *SHORT)
    assert done.code == 2 and "[no-such-file]" in done.err and len(done.errors) == 1


def test_a_strangers_checkpoint_downloads_nothing(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/base.gguf"] = Served(Path("base.gguf").read_bytes())
    ran("finetune", f"{server.url}/base.gguf", f"{server.url}/text.txt", *SHORT, "--out", "r")
    server.requests.clear()
    monkeypatch.setattr(names, "_located", {})
    monkeypatch.setattr("llamatrain.run.resume.is_own", lambda *_: False)
    done = run("finetune", "--resume", "r", "--iters", 4)
    assert done.code == 2 and "[untrusted-checkpoint]" in done.err and f"{server.url}/base.gguf" in done.err
    assert not server.requests
    ran("finetune", "--resume", "r", "--iters", 4, "--trust", "--quiet")
    assert server.requests


def test_a_base_that_changed_is_refused_on_resume(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/base.gguf"] = Served(Path("base.gguf").read_bytes(), etag='"1"')
    ran("finetune", f"{server.url}/base.gguf", f"{server.url}/text.txt", *SHORT, "--out", "r")
    h = small()
    other = written(Path("other.gguf"), h, weights(h, 2)).read_bytes()
    server.files["/base.gguf"] = Served(other, etag='"2"')
    monkeypatch.setattr(names, "_located", {})
    done = run("finetune", "--resume", "r", "--iters", 4)
    assert done.code == 1 and "[changed-input]" in done.err


def test_a_folder_in_safetensors_is_converted(server: FileServer) -> None:
    shape = replace(next(iter(FAMILIES["qwen3"].shapes.values())), vocab=257)
    folder = write_folder(Path("folder"), config(shape), state(shape, random_arrays(shape)))
    vocab = {letter: number for number, letter in enumerate(ALPHABET)}
    write_json(folder, tokenizer=bpe(vocab, [], {"<|end|>": 256}), tokenizer_config={"eos_token": "<|end|>"})
    ran("import", "folder", "--out", "imported.gguf")
    ran("finetune", "folder", f"{server.url}/text.txt", *SHORT, "--out", "r")
    ran("finetune", "imported.gguf", f"{server.url}/text.txt", *SHORT, "--out", "s")
    same_bits(Path("r/adapter.gguf"), Path("s/adapter.gguf"))


def test_the_command_for_llama_cpp_has_paths(server: FileServer) -> None:
    done = ran("generate", "ollama:tiny", "--prompt", "x", "-n", 1, "-v")
    line = next(line for line in done.err.splitlines() if "in llama.cpp" in line)
    assert "ollama:" not in line and "blobs/sha256-" in line
