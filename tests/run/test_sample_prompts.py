"""Samples of several prompts during a run."""

import json
import re
from pathlib import Path

import pytest

import llamatrain
from tests.helpers.cli import Argument, ran, run

TINY: tuple[Argument, ...] = ("--vocab-size", "bytes", "--embd", 32, "--head", 4, "--layer", 1, "--ff", 64)
SHAPE: tuple[Argument, ...] = (*TINY, "--ctx", 96, "--batch", 2, "--seed", 3, "--precision", "f32")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)


def samples(name: str) -> dict[int, list[str]]:
    """Those of each step."""
    found: dict[int, list[str]] = {}
    for line in map(json.loads, Path(name, "samples.jsonl").read_text().splitlines()):
        found.setdefault(line["step"], []).append(line["text"])
    return found


def trained(name: str, *words: Argument) -> dict[int, list[str]]:
    ran("from-scratch", "t.txt", *SHAPE, "--iters", 4, "--sample-every", 2, *words, "--out", name)
    return samples(name)


def test_each_step_has_a_text_for_each_prompt() -> None:
    prompts = ("the ", "lazy dog", "fox")
    words = [word for prompt in prompts for word in ("--sample-prompt", prompt)]
    found = trained("several", *words)
    assert list(found) == [0, 2, 4]
    for texts in found.values():
        assert [text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True)] == [True] * 3
    again = trained("again", *words)
    assert again == found != {}
    fewer = trained("fewer", "--sample-prompt", "x", *words[2:])
    # a text does not depend on the others
    assert [texts[1:] for texts in fewer.values()] == [texts[1:] for texts in found.values()]
    assert fewer[4][0][0] == "x"


def test_one_prompt_may_be_given_as_a_text() -> None:
    """As older runs stored it, and in Python."""
    given = trained("one", "--sample-prompt", "the ")
    config = Path("one/config.toml").read_text()
    old = re.sub(r'sample-prompt = \[\s*"the ",?\s*\]', 'sample-prompt = "the "', config)
    assert old != config
    Path("old.toml").write_text(old)
    ran("from-scratch", "--config", "old.toml", "--out", "old")
    assert samples("old") == given
    size = {
        "vocab_size": "bytes",
        "embd": 32,
        "head": 4,
        "layer": 1,
        "ff": 64,
        "ctx": 96,
        "batch": 2,
        "seed": 3,
    }
    llamatrain.from_scratch(
        "t.txt", iters=4, sample_every=2, sample_prompt="the ", precision="f32", out="python", **size
    )  # type: ignore[arg-type]
    assert samples("python") == given


def test_the_plan_counts_their_caches() -> None:
    words = ("plan", "from-scratch", "t.txt", *SHAPE, "--sample-every", 2, "--json")
    sizes = [
        json.loads(ran(*words, *more).out)
        for more in ((), ("--sample-prompt", "a"), ("--sample-prompt", "a", "--sample-prompt", "b"))
    ]
    none, one, two = (each["decoding"] for each in sizes)
    assert none == pytest.approx(one, rel=0.01) and two > one


def test_prompts_of_no_use() -> None:
    long = "x" * 96
    words = ("from-scratch", "t.txt", *SHAPE, "--iters", 1, "--sample-every", 1, "--out", "run")
    done = run(*words, "--sample-prompt", "a", "--sample-prompt", long)
    assert done.code == 2 and "--sample-prompt must have fewer tokens than the context, 96" in done.errors[0]
    assert len(done.errors) == 1 and not Path("run").exists()
    done = run(*words[:-4], "--out", "run", "--sample-prompt", "a", "--sample-prompt", "b")
    assert done.code == 2 and "--sample-prompt" in done.errors[0]
