"""A run on several ranks is the run that it would be on one: the same bits, files and figures, whoever goes on with it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.architecture_models import shape_of, weights, written
from tests.helpers.cli import losses, metrics, pairs_file, run, steps, tensors, text_file
from tests.helpers.lora_runs import WIDE, base
from tests.helpers.mpi_programs import command, needs_mpi
from tests.helpers.multi_rank import Job, done_by, job
from tests.helpers.preferences import labelled, lines, rows
from tests.helpers.small_models import small

pytestmark = needs_mpi
TINY = dict[str, Any](
    vocab_size="bytes", embd=32, head=4, layer=1, ff=64, ctx=32, precision="f32", sample_every=0
)
STEPS = 5
RUN = dict[str, Any](iters=STEPS, save_every=1, keep=9, threads=1, grad_groups=8)
VALIDATED = dict[str, Any](val_split=0.2, eval_every=2)
LORA = dict[str, Any](lora_r=4, lora_dropout=0.2, precision="f32", sample_every=0, **RUN)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
MIXTURE = shape_of("qwen3moe", "a")
OF_RANKS = {"ranks", "seconds_exposed", "slowest"}


@dataclass(frozen=True)
class Material:
    text: Path
    chats: Path
    prompts: Path
    pairs: Path
    answers: Path
    base: Path
    quantised: Path
    mixture: Path


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    folder = tmp_path_factory.mktemp("material")
    talk = [
        {"role": role, "content": "so it goes"[: 3 + size]}
        for size, role in enumerate(("user", "assistant") * 2)
    ]
    chats = [{"messages": talk[: 2 + 2 * (number % 2)]} for number in range(60)]
    return Material(
        text=text_file(folder, 4096),
        chats=lines(folder / "chats.jsonl", chats),
        prompts=pairs_file(folder, 80),
        pairs=lines(folder / "judged.jsonl", rows(30)),
        answers=lines(folder / "answers.jsonl", labelled(rows(30))),
        base=base(folder / "base.gguf", small(ctx=128, layers=1), template=TEMPLATE),
        quantised=base(folder / "q4_k.gguf", WIDE, "Q4_K"),
        mixture=written(folder / "mixture.gguf", MIXTURE, weights(MIXTURE, last=1.0)),
    )


CASES: dict[str, Callable[[Material], Job]] = {
    "accumulated": lambda it: job(
        "from_scratch", it.text, batch=4, grad_acc=3, clip=0.5, **VALIDATED, **TINY, **RUN
    ),
    "odd": lambda it: job("from_scratch", it.text, batch=3, grad_acc=5, **TINY, **RUN),
    "bf16": lambda it: job("from_scratch", it.text, batch=8, **TINY | {"precision": "bf16"}, **RUN),
    "chats": lambda it: job(
        "finetune", it.base, it.chats, full=True, ctx=96, batch=8, precision="f32", **VALIDATED, **RUN
    ),
    "lora": lambda it: job("finetune", it.quantised, it.prompts, ctx=64, batch=8, **VALIDATED, **LORA),
    "experts": lambda it: job(
        "finetune",
        it.mixture,
        it.prompts,
        ctx=48,
        batch=8,
        target=["experts", "router"],
        **LORA | {"lora_dropout": 0.0},
    ),
    "pairs": lambda it: job(
        "finetune", it.base, it.pairs, objective="dpo", batch=4, grad_acc=2, **VALIDATED, **LORA
    ),
    "answers": lambda it: job(
        "finetune", it.base, it.answers, objective="kto", batch=4, grad_acc=8, **VALIDATED, **LORA
    ),
    "muon": lambda it: job("from_scratch", it.text, batch=8, optimizer="muon", **TINY, **RUN),
    "adamuon": lambda it: job("from_scratch", it.text, batch=8, optimizer="adamuon", **TINY, **RUN),
    "muon, few weights": lambda it: job(
        "from_scratch", it.text, batch=8, optimizer="muon", tie_embeddings=True, **TINY, **RUN
    ),
    "sgd": lambda it: job("from_scratch", it.text, batch=8, optimizer="sgd", lr=0.1, **TINY, **RUN),
    "lbfgs": lambda it: job("from_scratch", it.text, batch=8, optimizer="lbfgs", **TINY, **RUN),
    "lora by lbfgs": lambda it: job(
        "finetune", it.base, it.prompts, ctx=64, batch=8, optimizer="lbfgs", **LORA
    ),
}
RESUMED = ("accumulated", "lora", "pairs", "muon", "adamuon", "lbfgs")
STARTS = (4, 3, 2, 1, 0)  # ranks; 0: one process that no launcher has started


@dataclass(frozen=True)
class Done:
    folder: Path
    given: dict[int, dict[str, Any]]  # by ranks and job

    def run(self, job: str, ranks: int) -> Path:
        return self.folder / f"{job}-{ranks}"


def cases_on(ranks: int) -> list[str]:
    """Four see all of them, three those that lie unevenly, too."""
    return list(
        CASES if ranks in (4, 0) else (*RESUMED, "odd", "answers", "lora by lbfgs") if ranks == 3 else RESUMED
    )


def gone_on(case: str) -> str:
    return f"{case} gone on"


def whole(case: str) -> str:
    return f"{case} undivided"


def undivided(one: Job, out: Path) -> Job:
    what, files, options = one
    return what, files, options | {"grad_groups": 1, "out": str(out)}


def jobs_of(it: Material, ranks: int, place: Callable[[str, int], Path]) -> dict[str, Job]:
    """Every case; of some a step more of the run that more ranks have begun, one after the other; and figures."""
    jobs = dict[str, Job]()
    for case in cases_on(ranks):
        what, files, options = CASES[case](it)
        jobs[case] = what, files, options | {"out": str(place(case, ranks))}
    for case in RESUMED if ranks < 4 else ():
        before = place(case if ranks == 3 else gone_on(case), ranks + 1)
        resume, out = before / f"checkpoint-{4 - ranks}.gguf", place(gone_on(case), ranks)
        jobs[gone_on(case)] = job(CASES[case](it)[0], resume=resume, out=out)
    if not ranks:
        jobs |= {whole(case): undivided(made(it), place(whole(case), 0)) for case, made in CASES.items()}
    if ranks == 2:
        what, files, options = CASES["accumulated"](it)
        jobs["half"] = what, files, options | {"wire": "bf16", "out": str(place("half", 2))}
    jobs["evaluated"] = job("evaluate", it.base, it.text, ctx=48, batch=4, threads=1)
    jobs["compared"] = job("evaluate", it.base, it.pairs, objective="simpo", batch=4, threads=1)
    return jobs


@pytest.fixture(scope="module")
def done(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Done:
    made = Done(tmp_path_factory.mktemp("runs"), {})
    for ranks in STARTS:
        jobs = jobs_of(material, ranks, made.run)
        made.given[ranks] = dict(zip(jobs, done_by(ranks, list(jobs.values()), made.folder), strict=True))
    return made


def same_run(one: Path, other: Path) -> None:
    """Weights, losses, norms and what was validated, bit for bit."""
    assert told(one) == told(other)
    (left,), (right,) = (
        [path for name in ("model", "adapter") if (path := each / f"{name}.gguf").exists()]
        for each in (one, other)
    )
    made, expected = tensors(left), tensors(right)
    assert made.keys() == expected.keys()
    assert not [name for name in made if made[name].tobytes() != expected[name].tobytes()]


def told(folder: Path) -> list[dict[str, Any]]:
    """What no two runs share, and what there is of ranks alone, is left out."""
    lines = (
        {key: value for key, value in line.items() if "second" not in key and key not in OF_RANKS}
        for line in metrics(folder)
    )
    return [line for line in lines if "loss" in line or "val_loss" in line]


@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for ranks in STARTS[:-1] for case in cases_on(ranks)]
)
def test_a_run_is_the_same_on_any_number_of_ranks(ranks: int, case: str, done: Done) -> None:
    assert isinstance(done.given[ranks][case], dict), done.given[ranks][case]
    same_run(done.run(case, ranks), done.run(case, 0))
    assert len(losses(done.run(case, 0))) == len(set(losses(done.run(case, 0)))) == STEPS, "it learns"


@pytest.mark.parametrize("case", RESUMED)
@pytest.mark.parametrize("ranks", STARTS[1:])
def test_any_number_of_ranks_goes_on_with_it(ranks: int, case: str, done: Done) -> None:
    assert isinstance(done.given[ranks][gone_on(case)], dict), done.given[ranks][gone_on(case)]
    same_run(done.run(gone_on(case), ranks), done.run(case, 0))


@pytest.mark.parametrize("what", ["evaluated", "compared"])
@pytest.mark.parametrize("ranks", STARTS[:-1])
def test_figures_are_the_same_on_any_number_of_ranks(ranks: int, what: str, done: Done) -> None:
    assert done.given[ranks][what] == done.given[0][what]
    assert 0 < done.given[0][what]["loss"] < 9


def test_gradients_in_bf16_are_nearly_those(done: Done) -> None:
    half, exact = done.run("half", 2), done.run("accumulated", 2)
    assert losses(half) == pytest.approx(losses(exact), rel=1e-3)
    one, other = tensors(half / "model.gguf"), tensors(exact / "model.gguf")
    assert any((one[name] != other[name]).any() for name in one)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_file_is_there_once(ranks: int, done: Done) -> None:
    for case in ("accumulated", "lora"):
        ours, alone = ({path.name for path in done.run(case, number).rglob("*")} for number in (ranks, 0))
        assert ours == alone
        steps_told = [line["step"] for line in steps(done.run(case, ranks))]
        assert steps_told == list(range(1, STEPS + 1))


def test_metrics_tell_of_ranks(done: Done) -> None:
    for ranks in (2, 4):
        for line in steps(done.run("accumulated", ranks)):
            assert (
                line["ranks"] == ranks
                and 0 <= line["slowest"] < ranks
                and 0 <= line["seconds_exposed"] < line["seconds"]
            )
    assert not OF_RANKS & {key for line in steps(done.run("accumulated", 0)) for key in line}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_run_that_is_not_divided(case: str, done: Done) -> None:
    """But for rounding, which says that it was divided indeed; and for dropouts, which are other ones."""
    here, there = losses(done.run(case, 0)), losses(done.run(whole(case), 0))
    np.testing.assert_allclose(
        here[:3], there[:3], rtol=0.05 if "lora" in case or case in ("pairs", "answers") else 1e-3
    )
    assert here != there


# ---- the command ---------------------------------------------------------------


WORDS = (
    "--vocab-size",
    "bytes",
    "--embd",
    32,
    "--head",
    4,
    "--layer",
    1,
    "--ff",
    64,
    "--ctx",
    32,
    "--iters",
    3,
    "--threads",
    1,
)


def test_one_rank_tells(material: Material, tmp_path: Path) -> None:
    """As it is told where there are no others; and what two differ in is how long it takes, and what the memory holds."""
    given = ("from-scratch", material.text, *WORDS, "--batch", 4, "--grad-acc", 2, "--grad-groups", 8)
    several = command(3, *given, "--out", tmp_path / "several")
    assert several.code == 0, several.err
    alone = run(*given, "--out", tmp_path / "alone")
    for name in ("out", "err"):
        ours, theirs = (
            re.findall(r"^(?!compil)\S+", getattr(each, name), re.MULTILINE) for each in (several, alone)
        )
        assert ours == theirs
    same_run(tmp_path / "several", tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "several"]


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "no power of two": (("--grad-groups", 3), "power of two"),
    "more groups than rows": (
        ("--batch", 2, "--grad-acc", 2, "--grad-groups", 8),
        "at most 4, the rows of a step",
    ),
    "none": (("--grad-groups", 0), "power of two"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_groups_that_cannot_be(which: str, material: Material, tmp_path: Path) -> None:
    words, why = REFUSED[which]
    done = run("from-scratch", material.text, *WORDS, *words, "--out", tmp_path / "run")
    assert (
        done.code == 2
        and len(done.errors) == 1
        and "--grad-groups" in done.errors[0]
        and why in done.errors[0]
    )
    assert not (tmp_path / "run").exists()


def test_ranks_without_work_and_data_that_only_one_can_read(material: Material, tmp_path: Path) -> None:
    """Each is told once, and nothing is left behind."""
    few = command(
        3, "from-scratch", material.text, *WORDS, "--batch", 2, "--grad-groups", 2, "--out", tmp_path / "run"
    )
    assert (
        few.code == 2 and len(few.errors) == 1 and "3" in few.errors[0] and "--grad-groups" in few.errors[0]
    )
    lone = command(2, "from-scratch", "-", *WORDS, "--out", tmp_path / "run")
    assert lone.code == 1 and lone.errors == [
        "error: standard input can be read by only one process (got 2 processes); name a file that all of them can read "
        "[stream-in-parallel-run]"
    ]
    assert not (tmp_path / "run").exists()
