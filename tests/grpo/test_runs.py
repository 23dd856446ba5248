"""Runs that learn from rewards: what is resumed, shared by ranks, reported and refused, and rewards that fail."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import llamatrain
from llamatrain.checkpoints.read import read_checkpoint
from tests.helpers.cli import Argument, lines, metrics, ran, run, same_bits, started, steps, timeless, until
from tests.helpers.lora_runs import base
from tests.helpers.mpi_programs import needs_mpi
from tests.helpers.multi_rank import done_by, job
from tests.helpers.small_models import small
from tests.helpers.small_models import weights as small_weights

H = small(ctx=128)
CTX = 64
GIVEN: tuple[Argument, ...] = ("--objective", "grpo", "--ctx", CTX, "--precision", "f32")
SHORT: tuple[Argument, ...] = ("--num-generations", 4, "--batch", 8, "--max-completion-length", 6)
EACH = "def reward(prompt, answer, row):\n    "


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, prompts and rewards."""
    place = tmp_path_factory.mktemp("grpo")
    base(place / "base.gguf", H, arrays=small_weights(H))
    write_rows(place / "prompts.jsonl", [{"prompt": f"say {n}", "n": n} for n in range(12)])
    write_rows(place / "others.jsonl", [{"prompt": f"tell {n}", "n": n} for n in range(5)])
    (place / "reward.py").write_text(EACH + "return len(set(answer)) - 0.1 * row['n']\n")
    return place


def tuned(place: Path, out: Path, *more: Argument) -> Path:
    reward = ("--reward", place / "reward.py")
    ran(
        "finetune", place / "base.gguf", place / "prompts.jsonl", *GIVEN, *SHORT, *reward, *more, "--out", out
    )
    return out


def refused(place: Path, out: Path, *more: Argument, data: str = "prompts.jsonl") -> str:
    done = run("finetune", place / "base.gguf", place / data, *GIVEN, *more, "--out", out)
    (error,) = done.errors
    assert done.code in (1, 2), done.err
    return error


# ---- what is reported ------------------------------------------------------------------


def test_metrics_and_validation(place: Path, tmp_path: Path) -> None:
    out = tuned(
        place, tmp_path / "out", "--iters", 4, "--beta", 0.1, "--num-iterations", 2, "--val", place / "others.jsonl",
        "--eval-every", 2, "--lr", 1e-2,
    )  # fmt: skip
    for line in steps(out):
        assert 0 < line["answer_tokens"] <= 6 and 0 <= line["truncated"] <= 1
        assert line["reward_std"] > 0 and line["kl"] >= 0 and 0 <= line["clipped"] <= 1
    first, second, third, _ = steps(out)
    assert first["reward"] == second["reward"] != third["reward"]  # answers are trained twice
    assert first["kl"] == pytest.approx(0, abs=1e-5) and second["kl"] > 1e-6
    assert first["clipped"] == 0
    scores = [line for line in metrics(out) if "val_loss" in line]
    assert [line["step"] for line in scores] == [0, 2, 4]
    for line in scores:
        assert line["val_reward"] == -line["val_loss"] and line["val_answers"] == 5
    page = (out / "report.html").read_text()
    assert "validation reward" in page and "validation loss" not in page
    assert "reward of answers" in page and "divergence from the base" in page


def test_of_python(place: Path, tmp_path: Path) -> None:
    found = llamatrain.finetune(
        place / "base.gguf", [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}],
        objective="grpo", reward=(str(place / "length.py"),), iters=2, out=tmp_path / "out", ctx=CTX,
        num_generations=2, max_completion_length=3, val_split=0.5,
    ) if (place / "length.py").write_text(EACH + "return len(answer)") else None  # fmt: skip
    assert found and [step for step, _ in found.rewards] == [1, 2] and found.perplexity is None


def test_plan(place: Path) -> None:
    def decoding(*more: Argument) -> str:
        told = ran(
            "plan",
            "finetune",
            place / "base.gguf",
            place / "prompts.jsonl",
            *GIVEN,
            "--reward",
            "true",
            *more,
        )
        (line,) = (line for line in told.out.splitlines() if "decoding" in line)
        return line

    assert decoding("--batch", 8) != decoding("--batch", 64)


# ---- what does not change it --------------------------------------------------------------


@pytest.mark.parametrize("iterations", [1, 2])
def test_resumed_run_has_the_same_bits(place: Path, tmp_path: Path, iterations: int) -> None:
    given: tuple[Argument, ...] = (
        "--num-iterations",
        iterations,
        "--lr",
        1e-2,
        "--grad-acc",
        2,
        "--save-every",
        3,
    )
    whole = tuned(place, tmp_path / "whole", *given, "--iters", 6, "--keep", 9)
    ran("finetune", "--resume", whole / "checkpoint-3.gguf", "--out", tmp_path / "again", "--iters", 6)
    same_bits(whole / "adapter.gguf", tmp_path / "again" / "adapter.gguf")
    assert timeless(whole)[-2:] == timeless(tmp_path / "again")[-2:]
    stored = read_checkpoint(whole / "checkpoint-3.gguf").state.rollouts
    assert (stored is None) == (iterations == 1)


def test_interrupted_run_ends_with_the_same_bits(place: Path, tmp_path: Path) -> None:
    """A signal while answers are generated or trained saves the run as it is."""
    given: tuple[Argument, ...] = ("--num-iterations", 2, "--grad-acc", 4, "--lr", 1e-2, "--iters", 30)
    whole = tuned(place, tmp_path / "whole", *given)
    words = ("finetune", place / "base.gguf", place / "prompts.jsonl", *GIVEN, *SHORT, *given)
    out = tmp_path / "out"
    with started(*words, "--reward", place / "reward.py", "--out", out) as process:
        until(lambda: lines(out) >= 2, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    assert len(steps(out)) < 30
    ran("finetune", "--resume", out)
    same_bits(whole / "adapter.gguf", out / "adapter.gguf")


@needs_mpi
@pytest.mark.parametrize("iterations", [1, 2])
def test_ranks_give_the_same_bits(place: Path, tmp_path: Path, iterations: int) -> None:
    options: dict[str, Any] = {
        "objective": "grpo",
        "reward": [str(place / "reward.py")],
        "ctx": CTX,
        "batch": 2,
        "grad_acc": 4,
        "num_generations": 4,
        "num_iterations": iterations,
        "max_completion_length": 6,
        "iters": 4,
        "precision": "f32",
        "grad_groups": 4,
        "val": str(place / "others.jsonl"),
        "eval_every": 2,
        "lr": 1e-2,
    }
    found = {}
    for ranks in (0, 2, 3):
        task = job(
            "finetune", place / "base.gguf", place / "prompts.jsonl", out=tmp_path / str(ranks), **options
        )
        found[ranks] = done_by(ranks, [task], tmp_path)[0]
    for ranks in (2, 3):
        for name in ("losses", "validations", "rewards"):
            assert found[0][name] == found[ranks][name]
        same_bits(tmp_path / "0" / "adapter.gguf", tmp_path / str(ranks) / "adapter.gguf")


# ---- rewards that fail ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return 1 / (row['n'] - 7)", "line 2: ZeroDivisionError: division by zero"),
        ("return float('nan') if row['n'] == 7 else 1", "it returned nan"),
        ("\n    while row['n'] == 7: pass\n    return 1", "no number for 1 s"),
        ("import os; row['n'] == 7 and os._exit(3); return 1", "exit code 3"),
    ],
    ids=["raises", "nan", "hangs", "dies"],
)
def test_a_failed_reward_ends_the_run_and_saves_it(
    place: Path, tmp_path: Path, body: str, problem: str
) -> None:
    reward, out = tmp_path / "reward.py", tmp_path / "out"
    reward.write_text(EACH + body)
    error = refused(
        place, out, *SHORT, "--reward", reward, "--reward-timeout", 1, "--iters", 6, "--no-shuffle",
    )  # fmt: skip
    assert problem in error and "prompts.jsonl, line 8" in error and "checkpoint-3.gguf" in error
    assert error.endswith("[reward-failed]")
    assert len(steps(out)) == 3
    reward.write_text(EACH + "return len(answer)")
    ran("finetune", "--resume", out)
    assert len(steps(out)) == 6


def test_failures_with_a_reward_are_counted(place: Path, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(EACH + "return 1 / (row['n'] - 3)")
    words = (*GIVEN, *SHORT, "--reward", reward, "--reward-failed", -2, "--iters", 2, "--no-shuffle")
    done = ran("finetune", place / "base.gguf", place / "prompts.jsonl", *words, "--out", tmp_path / "out")
    assert (
        "failed for 4 of 8 answers, which get -2; 4 so far" in done.err
        and "prompts.jsonl, line 4" in done.err
    )
    assert steps(tmp_path / "out")[1]["reward"] == pytest.approx((-1 * 4 - 2 * 4) / 8)


@needs_mpi
def test_a_failed_reward_ends_all_ranks(place: Path, tmp_path: Path) -> None:
    from tests.helpers import mpi_programs

    reward = tmp_path / "reward.py"
    reward.write_text(EACH + "return 1 / (row['n'] - 3)")
    words = (*GIVEN, *SHORT, "--reward", reward, "--iters", 3, "--grad-groups", 2, "--no-shuffle")
    started_at = time.monotonic()
    done = mpi_programs.command(
        2, "finetune", place / "base.gguf", place / "prompts.jsonl", *words, "--out", tmp_path / "out"
    )
    assert done.code and "ZeroDivisionError" in done.err and time.monotonic() - started_at < 60
    assert "checkpoint-1.gguf" in done.err


@needs_mpi
def test_failed_rewards_of_other_ranks_are_told(place: Path, tmp_path: Path) -> None:
    """In a validation each rank scores its own batches, and rank 0 tells of all that failed."""
    from tests.helpers import mpi_programs

    reward = tmp_path / "reward.py"
    reward.write_text(EACH + "return 1 / 0 if prompt.startswith('tell') else 1")
    words = (*GIVEN, *SHORT, "--reward", reward, "--reward-failed", 0, "--iters", 1, "--grad-groups", 2)
    val = ("--val", place / "others.jsonl", "--eval-every", 1, "--batch", 4, "--grad-acc", 2)
    done = mpi_programs.command(
        2, "finetune", place / "base.gguf", place / "prompts.jsonl", *words, *val, "--out", tmp_path / "out"
    )
    assert done.code == 0, done.err
    told = [line for line in done.err.splitlines() if "failed on other ranks" in line]
    assert told and told[0].strip().startswith("warning: "), done.err
    assert "ZeroDivisionError" in done.err


# ---- what is refused ------------------------------------------------------------------------

REFUSED = {
    "no reward": ("", "no-reward"),
    "a missing file": ("--reward {place}/none.py", "no-such-file"),
    "a broken file": ("--reward {place}/broken.py", "reward-failed"),
    "a batch that splits groups": ("--reward true --batch 6 --num-generations 4", "batch-too-small"),
    "one generation": ("--reward true --num-generations 1", "invalid-option"),
    "full with a divergence": ("--reward true --full --beta 0.1", "conflicting-options"),
    "dropout": ("--reward true --lora-dropout 0.1", "conflicting-options"),
    "packing": ("--reward true --pack", "objective-packs-nothing"),
    "a minimizer": ("--reward true --full --optimizer lbfgs", "objective-needs-rate"),
    "no temperature": ("--reward true --temperature 0", "invalid-option"),
    "gamma": ("--reward true --gamma 2", "unused-option"),
    "too many weights": ("--reward true --reward-weights 1,2", "invalid-option"),
    "odd weights": ("--reward true --reward-weights 1;2", "invalid-option"),
    "no time": ("--reward true --reward-timeout 0", "invalid-option"),
    "a failure that is no number": ("--reward true --reward-failed nan", "invalid-option"),
    "an empty command": ("--reward ", "invalid-option"),
    "text options": ("--reward true --train-on all", "unused-option"),
    "retained data": ("--reward true --retain-data {place}/others.jsonl", "unused-option"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, place: Path, tmp_path: Path) -> None:
    """In one line, before anything is written."""
    (place / "broken.py").write_text("def reward(")
    more, code = REFUSED[name]
    words = ["--reward", ""] if name == "an empty command" else more.format(place=place).split()
    assert refused(place, tmp_path / "out", *words).endswith(f"[{code}]")
    assert not (tmp_path / "out").exists()


def test_options_need_the_objective(place: Path, tmp_path: Path) -> None:
    words = ("finetune", place / "base.gguf", place / "prompts.jsonl", "--out", tmp_path / "out")
    for option in (("--reward", "true"), ("--num-generations", 4), ("--reward-failed", 0)):
        (error,) = run(*words, *option).errors
        assert error.endswith("[unused-option]")
    for command in ("evaluate", "preview"):
        more = ("--model", place / "base.gguf") if command == "preview" else ()
        model = () if command == "preview" else (place / "base.gguf",)
        (error,) = run(command, *model, place / "prompts.jsonl", *more, "--objective", "grpo").errors
        assert error.endswith("[unused-option]")


BAD_ROWS = {
    "not JSON": ("{", "not-json"),
    "a list": ("[1]", "not-an-object"),
    "no prompt": ('{"text": "a"}', "unknown-keys"),
    "a number": ('{"prompt": 3}', "wrong-type"),
    "null": ('{"prompt": null}', "unknown-keys"),
    "a long prompt": ('{"prompt": "' + "x " * 200 + '"}', "prompt-too-long"),
    "odd messages": ('{"messages": 3}', None),
    "no messages": ('{"messages": []}', None),
    "not UTF-8": ('{"prompt": "\\ud800"}', "not-utf8"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_prompts(name: str, place: Path, tmp_path: Path) -> None:
    """The message names the line."""
    line, code = BAD_ROWS[name]
    (place / "bad.jsonl").write_text(f'{{"prompt": "a"}}\n{line}\n')
    error = refused(place, tmp_path / "out", "--reward", "true", data="bad.jsonl")
    assert "bad.jsonl, line 2" in error and (code is None or error.endswith(f"[{code}]")), error
    assert not (tmp_path / "out").exists()


def test_no_prompts(place: Path, tmp_path: Path) -> None:
    (place / "empty.jsonl").write_text("")
    (place / "plain.txt").write_text("Once upon a time.")
    for data in ("empty.jsonl", "plain.txt"):
        refused(place, tmp_path / "out", "--reward", "true", data=data)


def test_a_stranger_runs_no_commands(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that someone else wrote may name any command as its reward."""
    mark = tmp_path / "mark"
    command = f"touch {mark}; sed s/.*/1/"
    words = (*GIVEN, *SHORT, "--reward", command, "--iters", 1)
    ran("finetune", place / "base.gguf", place / "prompts.jsonl", *words, "--out", tmp_path / "out")
    mark.unlink()
    monkeypatch.setattr("llamatrain.run.resume.is_own", lambda *_: False)
    named = (place / "base.gguf", place / "prompts.jsonl")
    done = run("finetune", *named, "--resume", tmp_path / "out", "--iters", 2)
    assert "[untrusted-checkpoint]" in done.err and not mark.exists()
    ran("finetune", *named, "--resume", tmp_path / "out", "--iters", 2, "--reward", command)
    assert mark.exists()


DAMAGED: dict[str, Any] = {
    "not JSON": "{",
    "no list": "{}",
    "a string": '["a"]',
    "a missing key": '[{"prompt": [1]}]',
    "nested": "[" * 100_000,
    "too few": '[{"prompt": [1], "tokens": [2], "is_truncated": false, "reward": 1.0, "log_probs": [-1.0]}]',
    "unknown tokens": json.dumps(
        [{"prompt": [1], "tokens": [10**6], "is_truncated": False, "reward": 1.0, "log_probs": [-1.0]}] * 8
    ),
    "long": json.dumps(
        [{"prompt": [1] * 999, "tokens": [2], "is_truncated": False, "reward": 1.0, "log_probs": [-1.0]}] * 8
    ),
    "nan": '[{"prompt": [1], "tokens": [2], "is_truncated": false, "reward": NaN, "log_probs": [-1.0]}]',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_answers_in_a_checkpoint(name: str, place: Path, tmp_path: Path) -> None:
    from llamatrain.checkpoints import checkpoint as module

    out = tuned(place, tmp_path / "out", "--num-iterations", 2, "--iters", 1)
    path = out / "checkpoint-1.gguf"
    stored = read_checkpoint(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            module.json,
            "dumps",
            lambda value, **_: DAMAGED[name] if isinstance(value, list) else _dumps(value),
        )
        module.write_checkpoint(path, stored)
    done = run("finetune", "--resume", path, "--out", tmp_path / "again", "--iters", 2)
    (error,) = done.errors
    assert done.code == 1 and "checkpoint" in error


_dumps = json.dumps


@pytest.mark.parametrize("validating", [False, True])
def test_a_signal_ends_a_run_that_waits_for_a_reward(place: Path, tmp_path: Path, validating: bool) -> None:
    reward, out, mark = tmp_path / "reward.py", tmp_path / "out", tmp_path / "mark"
    name = "tell" if validating else "say"
    reward.write_text(
        EACH
        + f"\n    if {name!r} in prompt:\n        open({str(mark)!r}, 'w')\n        while True: pass\n    return 1"
    )
    words = (*GIVEN, *SHORT, "--reward", reward, "--iters", 3, "--val", place / "others.jsonl")
    words = (*words, "--eval-every", 1 if validating else 0, "--out", out)
    with started("finetune", place / "base.gguf", place / "prompts.jsonl", *words) as process:
        until(mark.exists, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) not in (0, 1)
    assert any(out.glob("checkpoint-*.gguf"))


# ---- weights that are rounded ---------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
def test_answers_are_those_of_the_exported_model(full: bool, place: Path, tmp_path: Path) -> None:
    """With --quant-aware, answers come from the rounded weights, which are those of the file."""
    (tmp_path / "sum.py").write_text(EACH + "return sum(map(ord, answer))\n")
    kind: tuple[Argument, ...] = ("--full",) if full else ("--beta", 0.1, "--num-iterations", 2)
    out = tuned(
        place, tmp_path / "out", "--quant-aware", "q4_0", *kind, "--iters", 3, "--lr", 1e-2, "--reward",
        tmp_path / "sum.py", "--reward-weights", "0,1", "--val", place / "others.jsonl", "--eval-every", 3,
    )  # fmt: skip
    model = out / "model.gguf"
    if not full:
        model = tmp_path / "merged.gguf"
        ran("export-lora", place / "base.gguf", "--lora", out / "adapter.gguf", "--out", model)
    told = ran("generate", model, "--prompts", place / "others.jsonl", "--temp", 0, "-n", 6, "--parallel", 8)
    answers = [json.loads(line)["text"] for line in told.out.splitlines()]
    (score,) = (line for line in metrics(out) if "val_loss" in line and line["step"] == 3)
    assert score["val_reward"] == sum(sum(map(ord, answer)) for answer in answers) / 5
