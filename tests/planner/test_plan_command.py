"""`plan`: what a run will take, before it is begun."""

import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.errors import MemoryPlanError
from llamatrain.gguf.reader import open_gguf
from llamatrain.planner import limits
from llamatrain.platform import terminal
from llamatrain.run import fit_memory, prepare
from tests.helpers.cli import TINY, Argument, environment, finished, ran, run, started, text_file
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small
from tests.run.test_from_scratch_errors import refused

SHAPE = (
    "--embd",
    256,
    "--head",
    8,
    "--layer",
    4,
    "--ff",
    768,
    "--ctx",
    64,
    "--batch",
    8,
    "--vocab-size",
    "bytes",
)


def planned(*arguments: Argument, command: str = "from-scratch") -> dict[str, Any]:
    done = ran("plan", command, *arguments, "--json")
    assert done.out.count("\n") == 1
    return json.loads(done.out)


def total(plan: dict[str, Any]) -> int:
    return plan["total"]


def parts(plan: dict[str, Any]) -> dict[str, int]:
    """The kinds of memory."""
    others = ("total", "parameters", "batch", "splits", "threads", "base_read")
    return {name: value for name, value in plan.items() if isinstance(value, int) and name not in others}


def test_the_parts_make_the_total(tmp_path: Path) -> None:
    plan = planned(text_file(tmp_path), *SHAPE, "--precision", "f32")
    named = parts(plan)
    assert {"weights", "gradients", "moments", "arena", "interpreter"} <= named.keys(), plan
    assert all(value >= 0 for value in named.values())
    assert sum(named.values()) == total(plan)
    weights = 4 * (2 * 259 * 256 + 4 * (4 * 256 * 256 + 3 * 256 * 768 + 2 * 256) + 256)
    assert (
        abs(named["weights"] - weights) < 0.05 * weights
        and abs(named["moments"] - 2 * weights) < 0.1 * weights
    )


def test_what_a_step_reads_of_its_base(tmp_path: Path) -> None:
    """Each quantized matrix of a block forward, and those behind a gradient once more; the output, and rows of tokens."""
    ran("from-scratch", "--iters", 0, *SHAPE[:8], "--out", tmp_path / "new")
    ran("export-lora", tmp_path / "new" / "model.gguf", "--type", "q8_0", "--out", tmp_path / "base.gguf")
    tensors = open_gguf(tmp_path / "base.gguf").tensors
    matrices = sum(
        each.nbytes for name, each in tensors.items() if name.startswith("blk.") and each.nbytes > 9999
    )
    words = (
        tmp_path / "base.gguf",
        text_file(tmp_path),
        "--cache-base",
        "off",
        "--remat",
        "none",
        "--batch",
        1,
        "--ctx",
        8,
    )
    one = planned(*words, command="finetune")["base_read"]
    assert 1.5 * matrices < one < 2 * matrices + sum(each.nbytes for each in tensors.values()) - matrices
    assert planned(*words, "--grad-acc", 3, command="finetune")["base_read"] == 3 * one
    assert planned(text_file(tmp_path), *SHAPE)["base_read"] == 0


def test_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    ran("plan", "from-scratch", "text.txt", *SHAPE)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_plan_larger_than_the_machine(tmp_path: Path) -> None:
    """It is a plan: nothing is taken."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    large = ("--vocab-size", "bytes", "--embd", 65536, "--head", 512, "--layer", 6, "--ctx", 4096)
    plan = planned(text_file(tmp_path, 10_000), *large)
    assert total(plan) > 1e12
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1e6, "kilobytes"


def test_what_recomputation_and_optimizers_take(tmp_path: Path) -> None:
    data, deep = text_file(tmp_path), ("--layer", 8)
    none, block = (planned(data, *SHAPE, *deep, "--remat", how) for how in ("none", "block"))
    assert parts(block)["arena"] < 0.7 * parts(none)["arena"]
    adamw, sgd, lbfgs = (planned(data, *SHAPE, "--optimizer", kind) for kind in ("adamw", "sgd", "lbfgs"))
    assert total(sgd) < total(adamw) < total(lbfgs)
    assert total(planned(data, *SHAPE, "--batch", 16)) > total(planned(data, *SHAPE))


def test_of_a_base_its_pages_count_or_its_copies(tmp_path: Path) -> None:
    model = base(tmp_path / "base.gguf", small(embd=256, heads=4, head_size=64, ff=512, vocab=259), "Q4_0")
    arguments = (model, text_file(tmp_path), "--precision", "bf16", "--ctx", 32)
    off, copied = (planned(*arguments, "--cache-base", how, command="finetune") for how in ("off", "bf16"))
    matrices = [tensor for tensor in open_gguf(model).tensors.values() if len(tensor.shape) == 2]
    assert off["packed_copies"] == 0 and off["base_pages"] == max(tensor.raw.nbytes for tensor in matrices)
    assert (
        copied["packed_copies"] == sum(2 * int(np.prod(tensor.shape)) for tensor in matrices)
        and copied["base_pages"] == 0
    )
    floats = base(tmp_path / "floats.gguf", small(embd=256, heads=4, head_size=64, ff=512, vocab=259))
    plan = planned(floats, *arguments[1:], "--cache-base", "off", command="finetune")
    assert plan["base_pages"] == 4 * 512 * 256


def test_a_vocabulary_to_be_learned_counts_in_full(tmp_path: Path) -> None:
    sizes = (1000, 1000, 31_000)  # the first loads what this process keeps
    _, few, many = (planned(text_file(tmp_path), *SHAPE[:-2], "--vocab-size", size) for size in sizes)
    assert 14e6 < parts(many)["interpreter"] - parts(few)["interpreter"] < 18e6, "its texts and tables, too"
    assert parts(many)["weights"] - parts(few)["weights"] == 4 * 2 * 30_000 * 256


def test_rows_of_several_lengths_have_a_program_each(tmp_path: Path) -> None:
    """Which are what a process grows by, where there is no more to compute."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "some", "completion": "more"}\n' * 9)
    shape = (*SHAPE, "--ctx", 256, "--remat", "none")
    _, packed, apart = (planned(lines, *shape, *how) for how in ((), (), ("--no-pack",)))
    assert apart["interpreter"] > packed["interpreter"] + 3e6


def test_for_people(tmp_path: Path) -> None:
    done = ran("plan", "from-scratch", text_file(tmp_path), *SHAPE)
    said = done.out + done.err
    assert all(word in said for word in ("weights", "gradients", "moments", "total", "MB")), said


def test_the_graph_is_printed(tmp_path: Path) -> None:
    plan = "plan", "from-scratch", text_file(tmp_path), *SHAPE
    text, dot, memory = (ran(*plan, "--graph", kind).out for kind in ("text", "dot", "memory"))
    assert "parameter token_embd.weight: f32[" in text and "= linear_cross_entropy_back(" in text
    assert dot.startswith("digraph {") and '"token_embd.weight" ->' in dot
    weights = planned(*plan[2:])["weights"]
    assert f"{'parameter':12} {weights:>18,} bytes" in memory and "saved\nthe arena is fullest at " in memory


def test_a_limit_that_holds_and_one_that_cannot(tmp_path: Path) -> None:
    data = text_file(tmp_path)
    needed = total(planned(data, *SHAPE, "--remat", "none"))
    ran("plan", "from-scratch", data, *SHAPE, "--memory", f"{needed // 10**6 + 20}MB")
    done = run("plan", "from-scratch", data, *SHAPE, "--memory", "20MB")
    refused(done, 1, "20 ?MB", "--")
    begun = run("from-scratch", data, *SHAPE, "--memory", "20MB", "--out", tmp_path / "run")
    refused(begun, 1, "20 ?MB")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def unused(*args: Any, **named: Any) -> Any:
    raise AssertionError("not to be called")


def test_what_cannot_fit_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of layers take a minute to be planned."""
    monkeypatch.setattr(fit_memory, "make_search", unused)
    for place in (fit_memory, limits):  # other tests may have left much
        monkeypatch.setattr(place, "resident_bytes", lambda: 10**8)
    data, deep = text_file(tmp_path), (*TINY, "--layer", 4096, "--memory", "900MB")
    refused(run("plan", "from-scratch", data, *deep), 1, "weights", "900 ?MB")
    refused(run("from-scratch", data, *deep, "--out", tmp_path / "run"), 1, "weights", "900 ?MB")


@pytest.mark.parametrize("vocabulary", ["bytes", 400])
def test_nothing_is_read_beyond_the_limit(
    vocabulary: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the program holds before a run is planned counts, too."""
    for part in ("make_model", "load_data", "fit_memory"):
        monkeypatch.setattr(prepare, part, unused)
    arguments = ("from-scratch", text_file(tmp_path), *SHAPE, "--vocab-size", vocabulary, "--memory", "10MB")
    for done in (run("plan", *arguments), run(*arguments, "--out", tmp_path / "run")):
        refused(done, 1, "the program alone takes", "10 ?MB")


def test_learning_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter(["one", "two", "three"])
    monkeypatch.setattr(limits, "resident_bytes", lambda: 301 * 10**6)
    with pytest.raises(MemoryPlanError, match="takes 301 MB, but --memory is 300 MB"):
        list(limits.read_within(300 * 10**6, texts))
    assert list(limits.read_within(None, texts)) == ["two", "three"]


def test_a_long_plan_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("plan", "from-scratch", text_file(tmp_path), *TINY, "--layer", 12)
    monkeypatch.setattr(terminal, "SLOW_AFTER", 60)
    assert "planning" not in ran(*words).err
    monkeypatch.setattr(terminal, "SLOW_AFTER", 0)
    assert "planning a run of 12 layers, which takes a while\n" in ran(*words).err


def test_memory_chooses_what_fits(tmp_path: Path) -> None:
    """Less than a run without recomputation takes, more than one with it."""
    data, deep = text_file(tmp_path, 40_000), (*SHAPE, "--layer", 8, "--batch", 32, "--ctx", 256)
    most, least = (total(planned(data, *deep, "--remat", how)) for how in ("none", "block"))
    assert least < 0.8 * most
    limit = (most + least) // 2 // 10**6
    plan = planned(data, *deep, "--memory", f"{limit}MB")
    assert total(plan) <= limit * 10**6


def test_slips_are_one_line(tmp_path: Path) -> None:
    refused(run("plan", "from-scratch", tmp_path / "none.txt"), 2, "none.txt")
    refused(run("plan", "from-scratch", text_file(tmp_path), "--embd", 32, "--head", 5), (1, 2), "32", "5")
    assert run("plan", "something").code == 2


# ---- against what is measured ----------------------------------------------


MEASURING = """
import re
from llamatrain.cli.main import main
try:
    main()
finally:
    print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


def peak(*arguments: Argument) -> int:
    """The most memory that a run had, in bytes. What `wait4` tells may be this process's, which it was split off from."""
    program = [sys.executable, "-c", MEASURING, *map(str, arguments)]
    done = subprocess.run(
        program, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    return int(done.stdout) * 1024


WIDE = (
    *TINY,
    "--embd",
    512,
    "--head",
    8,
    "--head-kv",
    4,
    "--layer",
    8,
    "--ff",
    1376,
    "--ctx",
    256,
    "--batch",
    8,
)
MEASURED: dict[str, tuple[Argument, ...]] = {
    "tiny": (*TINY, "--ctx", 64),
    "small": (*SHAPE, "--precision", "f32"),
    "small in bf16": (*SHAPE, "--precision", "bf16"),
    "wide": (*WIDE, "--remat", "none"),
    "wide in bf16": (*WIDE, "--remat", "none", "--precision", "bf16"),
    "wide, recomputed": (*WIDE, "--remat", "block"),
    "wide, accumulated": (*WIDE, "--grad-acc", 2, "--batch", 4),
    "a learned vocabulary": (*SHAPE[:-2], "--vocab-size", 400, "--precision", "f32"),
    "plain attention": (*SHAPE, "--no-flash", "--precision", "f32"),
    "lbfgs": (*SHAPE, "--optimizer", "lbfgs", "--precision", "f32"),
    "validated and sampled": (
        *SHAPE,
        "--val-split",
        0.1,
        "--eval-every",
        1,
        "--sample-every",
        1,
        "--precision",
        "f32",
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read as Linux tells it")
def test_a_text_of_one_letter_takes_what_is_planned(tmp_path: Path) -> None:
    """It has no place between words to cut it at, and is cut all the same: it took seventeen times its size once."""
    text = tmp_path / "letters.txt"
    text.write_bytes(b"a" * 20_000_000 + os.urandom(8).hex().encode())  # which no cache has
    arguments = (text, *TINY, "--ctx", 64, "--batch", 2, "--iters", 1, "--threads", 2)
    with started("plan", "from-scratch", *arguments, "--json") as process:
        plan = total(json.loads(finished(process).out))
    measured = peak("from-scratch", *arguments, "--out", tmp_path / "run")
    assert measured < 1.1 * plan, f"{plan / 1e6:.1f} MB planned, {measured / 1e6:.1f} MB measured"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read as Linux tells it")
@pytest.mark.parametrize("name", MEASURED)
def test_the_plan_is_what_is_measured(name: str, tmp_path: Path) -> None:
    """Each in a process of its own: the interpreter is a part of the plan. L-BFGS takes its memory when there is a history."""
    arguments = (text_file(tmp_path, 100_000), *MEASURED[name], "--iters", 9 if name == "lbfgs" else 3)
    with started("plan", "from-scratch", *arguments, "--json") as process:
        plan = total(json.loads(finished(process).out))
    measured = peak("from-scratch", *arguments, "--out", tmp_path / "run")
    assert plan == pytest.approx(measured, rel=0.05), (
        f"{plan / 1e6:.1f} MB planned, {measured / 1e6:.1f} MB measured"
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read as Linux tells it")
@pytest.mark.parametrize(
    "options",
    [
        ("--cache-base", "off"),
        ("--cache-base", "bf16"),
        ("--precision", "f32"),
        ("--remat", "block"),
        ("--full", "--remat", "block"),  # its embedding has more rows than a step has tokens
        ("--cache-base", "off", "--sample-every", "1", "--sample-prompt", "some"),
    ],
)
@pytest.mark.parametrize("kind", ["Q4_0", "F32", "F16"])
def test_the_plan_of_an_adapter_is_what_is_measured(
    options: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    model = base(
        tmp_path / "base.gguf", small(embd=512, heads=8, head_size=64, ff=1536, layers=8, vocab=8192), kind
    )
    given = () if "f32" in options else ("--precision", "bf16")
    arguments = (
        model,
        text_file(tmp_path, 100_000),
        "--ctx",
        256,
        "--batch",
        2,
        "--iters",
        3,
        *options,
        *given,
    )
    with started("plan", "finetune", *arguments, "--json") as process:
        plan = total(json.loads(finished(process).out))
    measured = peak("finetune", *arguments, "--out", tmp_path / "run")
    assert plan == pytest.approx(measured, rel=0.05), (
        f"{plan / 1e6:.1f} MB planned, {measured / 1e6:.1f} MB measured"
    )


def lines_of_words(path: Path, kind: str) -> Path:
    """Write 500 chats, or prompts with two answers, of a few dozen words."""
    at = random.Random(1)

    def words(count: int) -> str:
        return " ".join(
            "".join(at.choices("abcdefghijklmnopqrstuvwxyz", k=at.randint(2, 9))) for _ in range(count)
        )

    with path.open("w") as out:
        for _ in range(500):
            prompt, answer, other = (words(at.randint(2, 18)) for _ in range(3))
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            row = (
                {"messages": turns}
                if kind == "chats"
                else {"prompt": prompt, "chosen": answer, "rejected": other}
            )
            out.write(json.dumps(row) + "\n")
    return path


COMPARED: dict[str, tuple[Argument, ...]] = {
    "chats": ("--ctx", 256, "--batch", 2, "--pack"),
    "dpo": ("--ctx", 256, "--batch", 2, "--objective", "dpo"),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read as Linux tells it")
@pytest.mark.parametrize("name", COMPARED)
def test_the_plan_of_chats_and_preferences_is_what_is_measured(name: str, tmp_path: Path) -> None:
    model = base(
        tmp_path / "base.gguf",
        small(embd=512, heads=8, head_size=64, ff=1536, layers=8, vocab=8192, ctx=2048),
        "Q4_0",
    )
    data = lines_of_words(tmp_path / "lines.jsonl", name)
    arguments = (model, data, "--precision", "bf16", "--iters", 12, *COMPARED[name])
    with started("plan", "finetune", *arguments, "--json") as process:
        plan = total(json.loads(finished(process).out))
    measured = peak("finetune", *arguments, "--out", tmp_path / "run")
    assert measured <= plan <= 1.05 * measured, (
        f"{plan / 1e6:.1f} MB planned, {measured / 1e6:.1f} MB measured"
    )
