"""What a file says about itself: name, size, licence, origin and settings of sampling, as llama.cpp's converter writes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from llamatrain.gguf.reader import open_gguf
from tests.helpers.architecture_models import weights
from tests.helpers.architectures import FAMILIES
from tests.helpers.llama_cpp_converter import convert_without_tokenizer, needs_converter
from tests.helpers.transformers_folders import config, state, write_folder
from tests.importing.test_architectures import import_to

CARD = """---
license: [apache-2.0, mit]
license_name: mine
license_link: https://example.org/LICENSE
base_model: ACME/small-model-7B-v1
datasets:
- ACME/words
- https://huggingface.co/ACME/more-words
language:
- en
- no
pipeline_tag: text-generation
tags:
- chat
---
# A model
"""
SETTINGS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "repetition_penalty": 1.05}


def described(folder: Path) -> dict[str, Any]:
    """Import a folder, and return the keys `general.*`."""
    gguf = import_to(folder.with_suffix(".mine.gguf"), folder)
    return {key: value for key, value in gguf.metadata.items() if key.startswith("general.")}


def make_folder(place: Path, arch: str = "llama", card: str = CARD, settings: Any = SETTINGS) -> Path:
    """Write a small model with a README and settings."""
    shape = FAMILIES[arch].shapes["a"]
    folder = write_folder(place, config(shape), state(shape, weights(shape)))
    (folder / "README.md").write_text(card, encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_what_a_folder_says(tmp_path: Path) -> None:
    found = described(make_folder(tmp_path / "tiny-chat-v2"))
    count = sum(array.size for array in weights(FAMILIES["llama"].shapes["a"]).values())
    assert found["general.name"] == "Tiny Chat v2"
    assert (found["general.basename"], found["general.finetune"]) == ("tiny", "chat")
    assert found["general.size_label"] == f"{count / 1000:.0f}K"
    assert found["general.license"] == "apache-2.0,mit"
    assert found["general.base_model.0.repo_url"] == "https://huggingface.co/ACME/small-model-7B-v1"
    assert list(found["general.languages"]) == ["en", "no"]
    assert list(found["general.tags"]) == ["chat", "text-generation"]
    assert found["general.sampling.temp"] == pytest.approx(0.6)
    assert found["general.sampling.penalty_repeat"] == pytest.approx(1.05)
    assert found["general.sampling.top_k"] == 20
    assert "general.sampling.min_p" not in found


@needs_converter
@pytest.mark.reference
@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_the_converter_says_the_same(arch: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = make_folder(tmp_path / "tiny-chat-v2", arch)
    assert not convert_without_tokenizer([folder], "f32")
    metadata = open_gguf(folder.with_suffix(".gguf")).metadata
    assert described(folder) == {key: value for key, value in metadata.items() if key.startswith("general.")}


# ---- hostile files ------------------------------------------------------------------

BOMB = "\n".join(
    ["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)), "base_model: *a39"]
)
NOTED = {
    "references": BOMB,
    "no YAML": "a: [b",
    "deep": "a: " + "[" * 60_000,
    "deep by dashes": "- " * 30_000,
    "long": "a: " + "b" * (1 << 16),
    "no characters": "a: \0",
}
IGNORED = {
    "numbers for keys": "1: 2",
    "a list": "- a",
    "objects": "license: {a: b}\nbase_model: [{name: {a: b}}]\ntags: {a: b}",
    "lists of lists": "license: [[a]]\nbase_model: [[a]]\nlanguage: [[a]]",
    "half a character": 'license: "\\ud800"',
    "a list for a name": "name: [a]\nversion: [a]",
    "a list with numbers": "tags: [1, {a: b}]",
    "empty": "license:\nbase_model: []\ntags:",
}


@pytest.mark.parametrize("kind", [*NOTED, *IGNORED])
def test_hostile_front_matter(kind: str, tmp_path: Path) -> None:
    front = (NOTED | IGNORED)[kind]
    found = described(make_folder(tmp_path / "model", card=f"---\n{front}\n---\n"))
    assert found["general.name"] == "Model"
    assert not {"general.license", "general.tags"} & found.keys()


@pytest.mark.parametrize("kind", NOTED)
def test_front_matter_that_is_left_out_is_noted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr("llamatrain.importing.description.log_line", notes.append)
    described(make_folder(tmp_path / "model", card=f"---\n{NOTED[kind]}\n---\n"))
    assert len(notes) == 1 and "README.md" in notes[0] and "\n" not in notes[0]


@pytest.mark.parametrize(
    "value", ["a", True, [1], {"a": 1}, 1e300, -1e300, float("nan"), float("inf"), 1 << 31, 10**400]
)
def test_hostile_settings(value: Any, tmp_path: Path) -> None:
    found = described(make_folder(tmp_path / "model", settings=dict.fromkeys(SETTINGS, value)))
    assert not [key for key in found if "sampling" in key]


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"[" * 100_000, b"\xff"])
def test_settings_that_are_no_json(raw: bytes, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "generation_config.json").write_bytes(raw)
    assert "general.sampling.temp" not in described(folder)


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    for name in ("README.md", "generation_config.json"):
        (folder / name).unlink()
        (folder / name).mkdir()
    assert described(folder)["general.name"] == "Model"
