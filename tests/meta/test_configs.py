"""The recipes in configs/: each opens with what it is for, and with commands that run."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest

from llamatrain.config.messages import shorten
from tests.helpers.cli import ROOT, metrics, ran, steps, tensors, text, text_file
from tests.helpers.lora_runs import base
from tests.helpers.preferences import rows as compared
from tests.helpers.small_models import small

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
RECIPES = {"bytes", "chats", "experts", "lbfgs", "low-memory", "preference", "sine", "small", "stories"}
LARGE = ("--batch", 1, "--grad-acc", 1, "--ctx", 32, "--layer", 1)  # of what takes minutes as it stands
GUIDE = (ROOT / "docs" / "GUIDE.md").read_text()


def commands(config: Path) -> list[list[str]]:
    """The command lines in a config's opening comment."""
    told = [line.lstrip("# ").rstrip() for line in head(config).splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in told if line.startswith("llamatrain ")]


def head(config: Path) -> str:
    found = re.match(r"(#.*\n)+", config.read_text())
    assert found, f"{config.name} opens with no comment"
    return found[0]


def material(folder: Path, word: str) -> str:
    """What stands for a word of the command in capitals."""
    if word == "BASE.gguf":
        return str(
            base(folder / word, small(embd=256, heads=4, head_size=64, ff=256, layers=2, ctx=1024), "Q4_0")
        )
    if word.startswith("TEXT"):
        return str(text_file(folder, 60_000))
    if word not in ("CHATS.jsonl", "PAIRS.jsonl"):
        return word
    chats = [chat(number) for number in range(60)]
    made = chats if word == "CHATS.jsonl" else compared(200)
    (folder / word).write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(folder / word)


def chat(seed: int) -> dict[str, object]:
    asked, told = text(40, seed), text(80, seed + 1000)
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]}


def test_the_guide_names_all_recipes() -> None:
    assert {path.stem for path in CONFIGS} == RECIPES
    assert not [path.name for path in CONFIGS if f"configs/{path.name}" not in GUIDE]


@pytest.mark.parametrize("config", [pytest.param(path, id=path.stem) for path in CONFIGS])
def test_each_opens_with_a_command_that_runs(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With data and a base of the test's in place of those that it names, and few steps."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    words = next(words for words in commands(config) if words[0] in ("from-scratch", "finetune"))
    assert f"configs/{config.name}" in words, words
    words = [material(tmp_path, word) for word in words]
    keys = tomllib.loads(config.read_text())
    assert keys, "a config states what differs"
    ran("plan", *words)
    few = LARGE if keys.get("embd", 0) > 256 else ()
    ran(*words, *few, "--iters", 2, "--out", "run")
    assert len(steps(tmp_path / "run")) == 2 and all(
        np.isfinite(line["loss"]) for line in steps(tmp_path / "run")
    )
    result = "adapter.gguf" if words[0] == "finetune" else "model.gguf"
    assert all(np.isfinite(array).all() for array in tensors(tmp_path / "run" / result).values())
    assert "val-split" not in keys or any("val_loss" in line for line in metrics(tmp_path / "run"))


@pytest.mark.parametrize("config", [pytest.param(path, id=path.stem) for path in CONFIGS])
def test_each_says_what_it_is_for_and_what_to_expect(config: Path) -> None:
    first = head(config).splitlines()[0].removeprefix("# ")
    assert first[0].isupper() and first[-1] in ".,:;abcdefghijklmnopqrstuvwxyz" and len(first) > 30, shorten(
        first
    )
    assert re.search(r"\b(second|minute|hour)s?\b", head(config)), "how long it takes"
    told = {word for command in commands(config) for word in command if word.startswith("configs/")}
    assert told == {f"configs/{config.name}"}
