"""Models in Ollama's store are found by name, and a hostile store cannot mislead."""

import os
from pathlib import Path
from typing import Any

import pytest

from llamatrain.config.remote_names import Use, remote_name
from llamatrain.errors import LlamatrainError
from llamatrain.sources import names, ollama
from llamatrain.sources.ollama_name import OllamaName
from tests.helpers.cli import ran, run
from tests.helpers.ollama_store import LAYER, add_blob, add_manifest, add_model
from tests.helpers.tiny_gguf import llama_metadata, llama_tensors, write_arrays


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(names, "_located", {})
    return tmp_path / "models"


@pytest.fixture
def model(tmp_path: Path) -> bytes:
    return write_arrays(tmp_path / "model.gguf", llama_metadata(), llama_tensors()).read_bytes()


def failure(name: str, use: Use = "model") -> LlamatrainError:
    with pytest.raises(LlamatrainError) as caught:
        names.locate(name, use)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("text", "manifest"),
    [
        ("tiny", "registry.ollama.ai/library/tiny/latest"),
        ("llama3.2:1b", "registry.ollama.ai/library/llama3.2/1b"),
        ("me/tiny:q8", "registry.ollama.ai/me/tiny/q8"),
        ("hf.co/me/Tiny-GGUF:Q4_K_M", "hf.co/me/Tiny-GGUF/Q4_K_M"),
        ("localhost:5000/me/tiny", "localhost:5000/me/tiny/latest"),
    ],
)
def test_names_have_the_defaults_of_ollama(text: str, manifest: str) -> None:
    assert OllamaName.parse(text).manifest == Path(manifest)
    assert OllamaName.parse(str(OllamaName.parse(text)).removeprefix("ollama:")) == OllamaName.parse(text)


@pytest.mark.parametrize(
    "text", ["", "..", "a/../b", "../../x", "a:b:c", "a:", "a/b/c/d", "a b", "a:../x", "/etc/passwd", "a\n"]
)
def test_names_that_would_leave_the_store_are_refused(text: str) -> None:
    with pytest.raises(LlamatrainError) as caught:
        OllamaName.parse(text)
    assert caught.value.code == "invalid-name"


def test_a_model_is_inspected_and_its_texts_are_shown(store: Path, model: bytes) -> None:
    add_model(store, {"model": model, "template": b"{{ .Prompt }}", "params": b'{"temperature": 0.3}'})
    shown = ran("inspect", "ollama:tiny").out
    assert "llama" in shown and "{{ .Prompt }}" in shown and '"temperature": 0.3' in shown
    assert '"kind": "model"' in ran("inspect", "ollama:tiny", "--json").out


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ollama:tiny").write_text("a text")
    assert remote_name("ollama:tiny") is None and names.locate("ollama:tiny") == Path("ollama:tiny")
    for path in (r"C:\models\x.gguf", "c:/x.gguf", "data:x", "x.gguf", "a/hf:b"):
        assert remote_name(path) is None
    assert remote_name(f"hf:{'a' * 300}/b") == f"hf:{'a' * 300}/b"  # too long for a path
    assert remote_name(Path("https://host/x")) == remote_name("https://host/x") == "https://host/x"


def test_a_model_that_is_missing_is_told_with_the_nearest_name(store: Path, model: bytes) -> None:
    add_model(store, {"model": model})
    error = failure("ollama:tinny")
    assert error.code == "no-such-model" and "did you mean ollama:tiny:latest?" in str(error)
    assert failure("ollama:tiny", "adapter").code == "no-such-layer"
    assert failure("ollama:tiny", "data").code == "not-data"
    done = run("generate", "ollama:tiny:8b", "--prompt", "x")
    assert done.code == 2 and "[no-such-model]" in done.err


def test_an_adapter_is_found_beside_its_base(store: Path, model: bytes) -> None:
    add_model(store, {"model": model, "adapter": b"adapter"})
    assert names.locate("ollama:tiny", "adapter").read_bytes() == b"adapter"
    assert names.locate("ollama:tiny").read_bytes() == model


@pytest.mark.parametrize(
    ("layers", "code"),
    [
        ("none", "damaged-manifest"),
        (["text"], "damaged-manifest"),
        (
            [{"mediaType": LAYER + "model", "digest": "sha256:../../../etc/passwd", "size": 3}],
            "damaged-manifest",
        ),
        (
            [{"mediaType": LAYER + "model", "digest": f"sha256-{'0' * 64}/../x", "size": 3}],
            "damaged-manifest",
        ),
        ([{"mediaType": LAYER + "model", "digest": f"sha256:{'0' * 64}", "size": -1}], "damaged-manifest"),
        ([{"mediaType": LAYER + "model", "digest": f"sha256:{'0' * 64}", "size": True}], "damaged-manifest"),
        ([{"mediaType": LAYER + "model", "digest": f"sha256:{'0' * 64}", "size": 3}], "missing-blob"),
        ([], "no-such-layer"),
    ],
)
def test_damaged_manifests_are_refused(store: Path, layers: Any, code: str) -> None:
    add_manifest(store, layers)
    assert failure("ollama:tiny").code == code


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"not JSON", "damaged-manifest"),
        (b"[" * 200_000, "damaged-manifest"),
        (b"\xff\xfe", "damaged-manifest"),
        (b"[]", "damaged-manifest"),
        (b" " * (5 << 20), "file-too-large"),
    ],
)
def test_files_that_are_no_manifests_are_refused(store: Path, content: bytes, code: str) -> None:
    add_manifest(store, []).write_bytes(content)
    assert failure("ollama:tiny").code == code


def test_a_tag_that_is_a_folder_or_a_pipe_is_refused(store: Path) -> None:
    path = add_manifest(store, [])
    path.unlink()
    os.mkfifo(path)
    assert failure("ollama:tiny").code == "not-a-file"
    path.unlink()
    path.mkdir()
    assert failure("ollama:tiny").code == "not-a-file"


def test_links_that_lead_out_of_the_store_are_refused(store: Path, model: bytes, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    path = add_model(store, {"model": model})
    blob = next((store / "blobs").iterdir())
    blob.unlink()
    blob.symlink_to(secret)
    assert failure("ollama:tiny").code == "link-outside"
    path.unlink()
    path.symlink_to(secret)
    error = failure("ollama:tiny")
    assert error.code == "link-outside"


def test_a_folder_of_blobs_may_be_a_link(store: Path, model: bytes, tmp_path: Path) -> None:
    add_model(store, {"model": model})
    (store / "blobs").rename(tmp_path / "disk")
    (store / "blobs").symlink_to(tmp_path / "disk")
    assert names.locate("ollama:tiny").read_bytes() == model


def test_a_blob_of_another_size_or_checksum_is_refused(store: Path, model: bytes) -> None:
    add_model(store, {"model": model})
    blob = next((store / "blobs").iterdir())
    blob.write_bytes(model + b"x")
    assert failure("ollama:tiny").code == "wrong-size"
    blob.write_bytes(model[:-1] + bytes([model[-1] ^ 1]))
    assert failure("ollama:tiny").code == "wrong-checksum"
    blob.write_bytes(model)
    assert names.locate("ollama:tiny") == blob


def test_a_checksum_is_computed_once(store: Path, model: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    add_manifest(
        store, [{"mediaType": LAYER + "model", "digest": add_blob(store, model), "size": len(model)}]
    )
    first = ollama.find_layer("ollama:tiny", "model")
    monkeypatch.setattr("llamatrain.sources.checksums.compute_sha256", lambda path, name: "0" * 64)
    assert ollama.find_layer("ollama:tiny", "model") == first
    os.utime(first, (1, 1))
    assert failure("ollama:tiny").code == "wrong-checksum"


def test_a_store_that_may_not_be_read_is_named(
    store: Path, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(store, {"model": model})
    stat = Path.stat

    def deny(path: Path, **settings: Any) -> os.stat_result:
        if "blobs" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **settings)

    monkeypatch.setattr(Path, "stat", deny)
    error = failure("ollama:tiny")
    assert error.code == "folder-error" and f"{store}: " in str(error)
