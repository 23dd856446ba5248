"""Runs that learn from preferences: margins rise on pairs that were held out, steps do not depend on how batches are cut, and
a run that goes on ends with the bits of one that was never interrupted."""

import json
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamatrain
from llamatrain.engine.program import Program
from llamatrain.gguf.reader import open_gguf
from llamatrain.run.signals import CommandInterrupts
from llamatrain.train.programs import TrainPrograms
from tests.helpers.cli import Argument, Done, metrics, ran, run, same_bits, steps, timeless
from tests.helpers.lora_runs import base
from tests.helpers.preferences import NUMBERS, H, labelled, lines, rows
from tests.helpers.small_models import weights

OBJECTIVES = list(NUMBERS)
SAID: tuple[Argument, ...] = (
    "--ctx",
    96,
    "--lr",
    1e-2,
    "--precision",
    "f32",
    "--schedule",
    "constant",
    "--warmup",
    0,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, pairs, and answers that were judged one by one."""
    place = tmp_path_factory.mktemp("preference")
    base(place / "base.gguf", H, arrays=weights(H))
    lines(place / "pairs.jsonl", rows(40))
    lines(place / "others.jsonl", rows(10, seed=9))
    lines(place / "answers.jsonl", labelled(rows(40)))
    lines(place / "plain.jsonl", [{"prompt": "a", "completion": "b"}])
    (place / "text.txt").write_text("Once upon a time. " * 200)
    return place


def tuned(place: Path, out: Path, objective: str, *more: Argument, data: str = "pairs.jsonl") -> Done:
    return ran(
        "finetune", place / "base.gguf", place / data, "--objective", objective, *SAID, *more, "--out", out
    )


def last(folder: Path) -> dict[str, Any]:
    return [line for line in metrics(folder) if "val_loss" in line][-1]


# ---- what is learned ---------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_margin_rises_on_pairs_that_were_held_out(objective: str, place: Path, tmp_path: Path) -> None:
    out, val = tmp_path / "run", place / "others.jsonl"
    done = tuned(place, out, objective, "--val", val, "--iters", 12, "--eval-every", 12, "--report-every", 12)
    first, *_, end = [line for line in metrics(out) if "val_loss" in line]
    assert end["val_margin"] > first["val_margin"] + (0.02 if objective == "orpo" else 0.5)
    assert end["val_loss"] < first["val_loss"] and end["val_accuracy"] > first["val_accuracy"]
    assert end["val_margin"] == pytest.approx(end["val_reward_chosen"] - end["val_reward_rejected"])
    assert end["val_answers"] == (20 if objective == "kto" else 10)
    for line in steps(out):
        assert "accuracy" in line and ("margin" in line) == (
            {"reward_chosen", "reward_rejected"} <= line.keys()
        )
    assert "margin" in done.err and "perplexity" not in done.err
    if objective in ("dpo", "kto"):  # before the first step nothing moved
        assert steps(out)[0]["margin"] == 0 and first["val_margin"] == 0
        assert steps(out)[0]["loss"] == pytest.approx(np.log(2) if objective == "dpo" else 0.5)
    told = ("--ctx", 96, "--objective", objective, "--lora", out / "adapter.gguf", "--json")
    found = json.loads(ran("evaluate", place / "base.gguf", val, *told).out)
    for name in ("loss", "margin", "accuracy", "answers", "accuracy_error"):
        assert found[name] == pytest.approx(end[f"val_{name}"], rel=1e-4)
    assert "perplexity" not in found


def test_answers_that_were_judged_one_by_one(place: Path, tmp_path: Path) -> None:
    tuned(
        place,
        tmp_path / "run",
        "kto",
        "--val-split",
        0.2,
        "--iters",
        20,
        "--eval-every",
        20,
        data="answers.jsonl",
    )
    assert last(tmp_path / "run")["val_margin"] > 0.5 and last(tmp_path / "run")["val_answers"] == 8


def test_from_python(place: Path, tmp_path: Path) -> None:
    made = llamatrain.finetune(
        place / "base.gguf",
        place / "pairs.jsonl",
        objective="dpo",
        ctx=96,
        iters=2,
        lr=1e-2,
        val_split=0.2,
        out=tmp_path / "run",
    )
    assert [step for step, _ in made.margins] == [0, 2] and made.margins[-1][1] > made.margins[0][1] == 0
    assert made.perplexity is None and made.validations[0][1] == pytest.approx(np.log(2))
    with pytest.raises(llamatrain.UsageError, match="full cannot be used with objective dpo"):
        llamatrain.finetune(place / "base.gguf", place / "pairs.jsonl", objective="dpo", full=True)


@pytest.mark.parametrize("objective", ["orpo", "simpo"])
def test_every_weight(objective: str, place: Path, tmp_path: Path) -> None:
    """Also with gradients that are streamed."""
    for name, clip in (("kept", 1e9), ("streamed", 0)):
        more = ("--full", "--lr", 1e-3, "--iters", 3, "--eval-every", 0, "--save-every", 0, "--clip", clip)
        tuned(place, tmp_path / name, objective, *more)
    kept, streamed = (steps(tmp_path / name) for name in ("kept", "streamed"))
    assert kept[-1]["margin"] > kept[0]["margin"]
    for one, other in zip(kept, streamed, strict=True):
        for name in ("loss", "margin", "accuracy", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6)


# ---- how batches are cut -----------------------------------------------------


@pytest.mark.parametrize("objective", ["orpo", "dpo", "simpo"])
def test_a_step_is_the_same_however_its_pairs_are_cut(objective: str, place: Path, tmp_path: Path) -> None:
    """Into batches, and into rows."""
    for batch, acc in ((8, 1), (2, 4)):
        more = ("--batch", batch, "--grad-acc", acc, "--iters", 3, "--eval-every", 0)
        tuned(place, tmp_path / str(batch), objective, *more)
    one, other = (steps(tmp_path / name) for name in ("8", "2"))
    for mine, theirs in zip(one, other, strict=True):
        for name in ("loss", "margin", "accuracy", "reward_chosen", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=2e-4, abs=1e-5), name


def test_rows_hold_several_pairs(place: Path, tmp_path: Path) -> None:
    for name, packed in (("run", ()), ("plain", ("--no-pack",))):
        tuned(
            place,
            tmp_path / name,
            "dpo",
            *packed,
            "--ctx",
            160,
            "--batch",
            2,
            "--iters",
            2,
            "--eval-every",
            0,
        )
    packed, plain = (steps(tmp_path / name)[-1] for name in ("run", "plain"))
    assert packed["tokens"] > 2 * plain["tokens"] and packed["margin"] > 0


@pytest.mark.parametrize(
    "more",
    [
        ("--lora-dropout", 0.2),
        ("--precision", "bf16"),
        ("--target", "output,attn_q"),
        ("--optimizer", "sgd", "--lr", 0.3),
    ],
)
def test_other_ways_of_a_run(more: tuple[Argument, ...], place: Path, tmp_path: Path) -> None:
    tuned(place, tmp_path / "run", "dpo", "--iters", 8, "--eval-every", 0, *more)
    found = steps(tmp_path / "run")
    assert found[0]["margin"] == pytest.approx(0, abs=1e-6) and found[-1]["margin"] > 0.3


# ---- going on ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "more"), [("dpo", ("--grad-acc", 2)), ("kto", ("--lora-dropout", 0.1)), ("orpo", ())]
)
def test_a_run_that_goes_on_ends_with_the_same_bits(
    objective: str, more: tuple[Argument, ...], place: Path, tmp_path: Path
) -> None:
    many = (*more, "--val", place / "others.jsonl", "--eval-every", 2, "--save-every", 2, "--beta", 0.3)
    tuned(place, tmp_path / "whole", objective, *many, "--iters", 6)
    tuned(place, tmp_path / "parts", objective, *many, "--iters", 3)
    ran("finetune", "--resume", tmp_path / "parts", "--iters", 6)
    whole, parts = (
        [line for line in timeless(tmp_path / name) if line["step"] != 3 or "loss" in line]
        for name in ("whole", "parts")
    )
    assert whole == parts and "val_accuracy" in whole[-1]
    same_bits(tmp_path / "whole" / "adapter.gguf", tmp_path / "parts" / "adapter.gguf")


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_step_left_half_way_is_gone_on_with(
    objective: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rewards are those of all of its batches."""
    many = ("--grad-acc", 3, "--batch", 2, "--iters", 3, "--eval-every", 0)
    tuned(place, tmp_path / "whole", objective, *many)
    calls, gradients = [], TrainPrograms.compute_gradients
    noted, note = threading.Event(), CommandInterrupts._on_signal

    def counted(self: TrainPrograms, *of: Any) -> float:
        calls.append(of)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGTERM)
            assert noted.wait(60)  # for the thread that listens
        return gradients(self, *of)

    def noticed(self: CommandInterrupts, number: int) -> None:
        note(self, number)
        noted.set()

    with monkeypatch.context() as patched:
        patched.setattr(TrainPrograms, "compute_gradients", counted)
        patched.setattr(CommandInterrupts, "_on_signal", noticed)
        said = ("--objective", objective, *SAID, *many, "--out", tmp_path / "parts")
        assert run("finetune", place / "base.gguf", place / "pairs.jsonl", *said).code == 128 + signal.SIGTERM
    assert "rewards" in str(
        open_gguf(tmp_path / "parts" / "checkpoint-LATEST.gguf").metadata["training.partial"]
    )
    ran("finetune", "--resume", tmp_path / "parts")
    assert (
        timeless(tmp_path / "parts") == timeless(tmp_path / "whole") and len(steps(tmp_path / "whole")) == 3
    )
    same_bits(tmp_path / "whole" / "adapter.gguf", tmp_path / "parts" / "adapter.gguf")


def test_the_head_is_for_what_is_compared_alone(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of KTO's four ways through the model each, of the others likewise; ORPO's reaches prompts, too."""
    lengths = dict[str, float]()

    def cut(self: Program, count: int) -> None:
        assert self.dynamic_dim
        lengths[objective] = count / int(self.dynamic_dim)
        original(self, count)

    original = Program.set_dynamic_size
    monkeypatch.setattr(Program, "set_dynamic_size", cut)
    for objective in ("orpo", "dpo", "kto"):
        tuned(place, tmp_path / objective, objective, "--iters", 1, "--eval-every", 0, "--save-every", 0)
    assert lengths["dpo"] < lengths["orpo"] < 1 and lengths["kto"] < 0.5


def test_numbers_stay_as_they_were(place: Path, tmp_path: Path) -> None:
    tuned(place, tmp_path / "run", "simpo", "--iters", 1, "--gamma", 0.3)
    for name, value, has in (("--objective", "orpo", "simpo"), ("--beta", 3, "2.0"), ("--gamma", 0.5, "0.3")):
        same = () if name == "--objective" else ("--objective", "simpo")
        done = run("finetune", "--resume", tmp_path / "run", *same, name, value, "--iters", 2)
        assert done.code == 2 and has in done.err and "[fixed-option]" in done.err
    again = ran("finetune", "--config", tmp_path / "run" / "config.toml", "--out", tmp_path / "again")
    assert again.code == 0 and steps(tmp_path / "again")[0]["loss"] == steps(tmp_path / "run")[0]["loss"]


# ---- what is refused ---------------------------------------------------------

REFUSED = {
    ("--objective", "dpo", "--full"): "[objective-needs-reference]",
    (
        "--objective",
        "orpo",
        "--optimizer",
        "lbfgs",
    ): "[objective-needs-rate]",
    ("--objective", "kto", "--batch", "1"): "[batch-too-small]",
    ("--objective", "kto", "--pack"): "[objective-packs-nothing]",
    (
        "--objective",
        "dpo",
        "--gamma",
        "2",
    ): "--gamma has no effect with --objective dpo; leave it out [unused-option]",
    (
        "--objective",
        "dpo",
        "--train-on",
        "all",
    ): "--train-on has no effect with --objective dpo; leave it out [unused-option]",
    ("--beta", "0.2"): "--beta has no effect without --objective; leave it out [unused-option]",
    ("--objective", "dpo", "--beta", "0"): "[invalid-option]",
    ("--objective", "ppo"): "dpo, kto, orpo or simpo",
}


@pytest.mark.parametrize("said", REFUSED, ids=" ".join)
def test_what_cannot_be(said: tuple[str, ...], place: Path, tmp_path: Path) -> None:
    done = run("finetune", place / "base.gguf", place / "pairs.jsonl", *said, "--out", tmp_path / "run")
    assert done.code == 2 and REFUSED[said] in done.err and "Traceback" not in done.err
    assert not (tmp_path / "run").exists()


OTHERS = [
    (
        "pairs.jsonl",
        "",
        'pairs.jsonl, line 1: the row has preferences ("chosen", "rejected"); use finetune --objective orpo',
    ),
    (
        "text.txt",
        "dpo",
        "text.txt: plain text has nothing to compare; --objective orpo, dpo or simpo needs JSON lines",
    ),
    (
        "plain.jsonl",
        "kto",
        'plain.jsonl, line 1: nothing to compare (got keys "prompt", "completion"); --objective kto needs',
    ),
    ("answers.jsonl", "dpo", 'answers.jsonl, line 1: an answer with a "label", but pairs are compared'),
]


@pytest.mark.parametrize(("data", "objective", "told"), OTHERS)
def test_data_of_another_kind(data: str, objective: str, told: str, place: Path, tmp_path: Path) -> None:
    said = ("--objective", objective) if objective else ()
    done = run("finetune", place / "base.gguf", place / data, *said, "--out", tmp_path / "run")
    assert done.code == 1 and told in done.err and len(done.errors) == 1


def test_a_reference_is_asked_for_an_adapter(place: Path) -> None:
    done = run("evaluate", place / "base.gguf", place / "pairs.jsonl", "--objective", "dpo")
    assert done.code == 2 and "[objective-needs-adapter]" in done.err
    done = run("evaluate", place / "base.gguf", place / "pairs.jsonl", "--objective", "kto", "--batch", 1)
    assert done.code == 2 and "[batch-too-small]" in done.err


def test_a_plan_counts_all_ways_through_the_model(place: Path) -> None:
    """KTO runs four, SimPO one."""
    totals = {}
    for objective in ("simpo", "dpo", "kto"):
        said = (
            "plan",
            "finetune",
            place / "base.gguf",
            place / "pairs.jsonl",
            "--objective",
            objective,
            "--ctx",
            96,
            "--json",
        )
        totals[objective] = json.loads(ran(*said).out)
    assert all(each["total"] > 0 and each["splits"] == 1 for each in totals.values())
    assert totals["dpo"]["interpreter"] > totals["simpo"]["interpreter"]
