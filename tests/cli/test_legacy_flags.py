"""Command lines as they were written for llama.cpp's own training programs."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from llamatrain.cli.main import load_command
from llamatrain.legacy.flags import COMPOUND, EXPORT, TABLES, UNCHANGED
from llamatrain.legacy.translate import translate_command_line
from tests.helpers.cli import Argument, ran, run, same_bits, steps, text_file
from tests.helpers.lora_runs import base, random_adapter
from tests.helpers.small_models import small
from tests.helpers.test_data import PLACE

TABLE = PLACE.parent / "ANCESTORS.md"
TINY = ("--embd", 32, "--head", 4, "--layer", 1, "--ff", 64)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path, 3008)
    base(tmp_path / "M.gguf", small())
    return tmp_path


def words(command: str, *said: Argument) -> tuple[list[str], list[str]]:
    return translate_command_line(command, [str(each) for each in said], load_command(command).params)


# ---- the table -------------------------------------------------------------


def told_of(program: str) -> set[str]:
    """The options of a program's help, as it stands in the facts about it."""
    if not TABLE.exists():
        pytest.skip(f"{TABLE} is not there")
    text = TABLE.read_text()
    part = text[text.index(f"old llama-{program} --help") :]
    lines = part[: part.index("\n```\n", part.index("```\n") + 4)].splitlines()
    return {
        name
        for line in lines
        if line.startswith("  -")
        for name in re.findall(r"(?<![\w-])--?[a-z][\w-]*", line[:37])
    }


@pytest.mark.parametrize(
    ("program", "command"),
    [("train-text-from-scratch", "from-scratch"), ("finetune", "finetune"), ("export-lora", "export-lora")],
)
def test_each_of_their_options_is_understood(program: str, command: str) -> None:
    there = {name for param in load_command(command).params for name in (*param.opts, *param.secondary_opts)}
    known = there | {*TABLES[command]} | ({*COMPOUND} if TABLES[command] is not EXPORT else set())
    told = told_of(program)
    assert len(told) > 10
    assert {name.replace("_", "-") for name in told} - {"--help", "-h"} <= known


@pytest.mark.parametrize("command", TABLES)
def test_what_it_is_called_here_is_there(command: str) -> None:
    there = {
        name for param in load_command(command).params for name in (*param.opts, *param.secondary_opts)
    } | {
        "BASE",
        "DATA",
        "",
    }
    there |= {"--help"}
    assert {now.partition(" ")[0] for now in TABLES[command].values()} <= there
    assert command in ("export-lora", "generate") or {*UNCHANGED} - there <= {
        "--only-write-lora",
        "--lora-alpha",
        "--lora-r",
        "--lora-scaled",
    }


def test_none_of_it_is_in_help() -> None:
    for command in TABLES:
        shown = ran(command, "--help").out
        assert not [
            old
            for old in {*TABLES[command], *COMPOUND}
            if old not in UNCHANGED and re.search(rf"(?<![\w-]){old}(?![\w-])", shown)
        ]


CALLED: list[tuple[str, Sequence[Argument], Sequence[Argument], str]] = [
    ("from-scratch", ["--train-data", "T"], ["--", "T"], "other names here: --train-data is DATA"),
    ("from-scratch", ["--train_data=T"], ["--", "T"], "--train-data is DATA"),
    ("from-scratch", ["--vocab-model", "V"], ["--vocab-from", "V"], "--vocab-model is --vocab-from"),
    (
        "from-scratch",
        ["-s", 1, "-c", 2, "-t", 3, "-b", 4],
        ["--seed", 1, "--ctx", 2, "--threads", 3, "--batch", 4],
        "-s is --seed",
    ),
    ("from-scratch", ["--use-flash"], ["--flash"], "--use-flash is --flash"),
    ("from-scratch", ["--use-checkpointing"], ["--remat", "block"], "--use-checkpointing is --remat block"),
    ("from-scratch", ["--no-checkpointing"], ["--remat", "none"], "--no-checkpointing is --remat none"),
    (
        "from-scratch",
        ["--opt-past", 3, "--opt-delta", 0.1],
        ["--stop-window", 3, "--stop-delta", 0.1],
        "--opt-past is --stop-window",
    ),
    ("from-scratch", ["--opt-past", -1], ["--stop-window", 0], "--opt-past is --stop-window"),
    ("from-scratch", ["--save-every", -1, "--epochs", -1], ["--save-every", 0], ""),
    (
        "from-scratch",
        ["--opt-max-no-improvement", 3],
        ["--max-no-improvement", 3],
        "--opt-max-no-improvement is",
    ),
    ("from-scratch", ["--adam-alpha", "1e-3"], ["--lr", "1e-3"], "--adam-alpha is --lr"),
    ("from-scratch", ["--adam-decay", 0.1], ["--weight-decay", 0.1], "--adam-decay is --weight-decay"),
    (
        "from-scratch",
        ["--adam-decay-min-ndim", 1],
        ["--decay-min-ndim", 1],
        "--adam-decay-min-ndim is --decay-min-ndim",
    ),
    (
        "from-scratch",
        ["--adam-beta1", 0.8, "--adam-beta2", 0.9],
        ["--beta1", 0.8, "--beta2", 0.9],
        "--adam-beta2 is --beta2",
    ),
    (
        "from-scratch",
        ["--adam-gclip", 2, "--adam-epsf", 0.1],
        ["--clip", 2, "--stop-rel", 0.1],
        "--adam-epsf is --stop-rel",
    ),
    ("from-scratch", ["-ngl", 99], [], "-ngl has no effect here: all work is done by the processor"),
    ("from-scratch", ["--n-gpu-layers", 99], [], "--n-gpu-layers has no effect here"),
    (
        "from-scratch",
        ["--sample_start", "--x", "--grad_acc", 2],
        ["--sample-start", "--x", "--grad-acc", 2],
        "",
    ),
    ("from-scratch", ["--adam-iter", 30], ["--iters", 30], "--adam-iter is --iters"),
    (
        "from-scratch",
        ["--cos-decay-steps", 1000],
        ["--decay-steps", 900, "--warmup", 100],
        "--cos-decay-steps 1000 is --decay-steps 900 --warmup 100 here: it counted from the first step on",
    ),
    (
        "from-scratch",
        ["--warmup", 10, "--cos-decay-steps", 30],
        ["--warmup", 10, "--decay-steps", 20],
        "--decay-steps 20 here",
    ),
    (
        "from-scratch",
        ["--warmup", 40, "--cos-decay-steps", 30],
        ["--warmup", 40, "--decay-steps", 1],
        "--decay-steps 1 here",
    ),
    (
        "from-scratch",
        ["--enable-restart", "--warmup", 10, "--cos-decay-steps", 30, "--cos-decay-restart", 1.5],
        ["--warmup", 10, "--restart-growth", 1.5, "--decay-steps", 30],
        "--enable-restart is --restart-growth 1.5 here",
    ),
    (
        "from-scratch",
        ["--enable-restart"],
        ["--restart-growth", 1.1, "--decay-steps", 1000, "--warmup", 100],
        "--enable-restart is --restart-growth 1.1 here",
    ),
    (
        "from-scratch",
        ["--enable-restart", "--disable-restart"],
        ["--restart-growth", 0],
        "--disable-restart is --restart-growth 0",
    ),
    (
        "from-scratch",
        ["--cos-decay-restart", 2],
        [],
        "--cos-decay-restart has no effect without --enable-restart",
    ),
    (
        "from-scratch",
        ["--cos-decay-min", 0.2],
        ["--lr-min", 0.0002],
        "--cos-decay-min 0.2 is --lr-min 0.0002 here",
    ),
    (
        "finetune",
        ["--cos-decay-min", 0.2],
        ["--lr-min", "0.0002", "--lr", "0.001"],
        "--lr-min 0.0002 --lr 0.001 here: where its cosine ended",
    ),
    (
        "finetune",
        ["--adam-alpha", "1e-2", "--adam-min-alpha", "1e-3"],
        ["--lr", "1e-2", "--lr-min", 0.0019],
        "--lr-min 0.0019",
    ),
    (
        "finetune",
        ["--model-base", "M", "--train-data", "T"],
        ["M", "--", "T"],
        "--model-base is BASE, --train-data is DATA",
    ),
    ("finetune", ["T", "--model-base", "M"], ["M", "T"], "--model-base is BASE"),
    (
        "finetune",
        ["--rank-wq", 3, "--rank-ffn_up", 2],
        ["--lora-rank-of", "attn_q=3", "--lora-rank-of", "ffn_up=2"],
        "--rank-wq is --lora-rank-of attn_q",
    ),
    (
        "finetune",
        ["--rank-out", 3],
        [
            "--lora-rank-of",
            "output=3",
            "--target",
            "attn_q,attn_k,attn_v,attn_output,ffn_gate,ffn_up,ffn_down,output",
        ],
        "the rank of output adds an adapter: --target attn_q,attn_k",
    ),
    (
        "export-lora",
        ["-m", "B", "--model-out", "O", "-l", "A", "-s", "C", "0.5", "-t", "2"],
        ["B", "--out", "O", "--lora", "A", "--lora-scaled", "C", "0.5", "--threads", "2"],
        "-m is BASE",
    ),
    (
        "export-lora",
        ["B", "--out", "O", "--lora-scaled", "a:b:-1e-1"],
        ["B", "--out", "O", "--lora-scaled", "a:b", "-1e-1"],
        "",
    ),
    ("finetune", ["M", "T", "--iters", 3, "--no-shuffle"], ["M", "T", "--iters", 3, "--no-shuffle"], ""),
    ("generate", ["M", "-n", 3], ["M", "-n", 3], ""),
]


@pytest.mark.parametrize(("command", "said", "meant", "note"), CALLED)
def test_what_is_meant(command: str, said: Sequence[Argument], meant: Sequence[Argument], note: str) -> None:
    found, notes = words(command, *said)
    assert found == [str(each) for each in meant]
    assert note in "\n".join(notes) and bool(note) == bool(notes)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            ("--adam-alpha", "1e-3", "--lr", "2e-3"),
            "--adam-alpha 1e-3 and --lr 2e-3 are the same option with different values",
        ),
        (("--iters", 3, "--adam-iter", 4), "--iters 3 and --adam-iter 4 are the same option"),
        (
            ("--lr-min", 0.5, "--cos-decay-min", 0.2),
            "--lr-min 0.5 and --cos-decay-min 0.0002 are the same option",
        ),
        (("--train-data", "a", "b"), "--train-data a and b both name the data"),
        (("--adam-iter",), "option '--adam-iter' requires an argument"),
        (("--adam-iter", "x"), "--iters must be a whole number (got 'x')"),
        (("--adam-alpha", "x", "--cos-decay-min", "y"), "--cos-decay-min must be a number (got y)"),
        (("--use-flash=1",), "no such option --use-flash"),
        (
            ("--cos-decay-min", 0.2, "--config", "c.toml"),
            "--cos-decay-min depends on the learning rate in the --config file",
        ),
    ],
)
def test_what_cannot_be(said: Sequence[Argument], told: str, place: Path) -> None:
    done = run("from-scratch", *said)
    assert done.code == 2 and len(done.errors) == 1 and told in done.errors[0], done.err


def test_two_models_are_one_too_many(place: Path) -> None:
    for arguments in (
        ("finetune", "M.gguf", "text.txt", "--model-base", "N.gguf"),
        ("export-lora", "M.gguf", "-m", "N.gguf", "-o", "x.gguf"),
    ):
        done = run(*arguments)
        assert "N.gguf and M.gguf" in done.err and "[two-models]" in done.err
    found, _ = words("finetune", "M.gguf", "--model-base", "M.gguf", "--train-data", "text.txt")
    assert found == ["M.gguf", "--", "text.txt"]


def test_what_was_said_twice_alike_is_no_slip() -> None:
    found, _ = words("from-scratch", "--lr", "0.001", "--adam-alpha", "1e-3", "--adam-alpha", "1e-3")
    assert found == ["--lr", "0.001", "--lr", "1e-3", "--lr", "1e-3"]


# ---- commands ----------------------------------------------------------------


def test_each_command_answers_to_its_other_name_in_every_place(place: Path) -> None:
    """Begun, gone on with, by a file of options, planned, and told apart from the other."""
    wave = ("--iters", 2, "--sample-every", 0, "--eval-every", 0)
    ran("train-from-scratch", *wave, "--out", "wave")
    ran("from-scratch", *wave, "--out", "same")
    same_bits(Path("wave/model.gguf"), Path("same/model.gguf"))
    ran("train-from-scratch", "--resume", "wave", "--iters", 3)
    ran("train-from-scratch", "--config", "wave/config.toml", "--iters", 3, "--out", "again")
    assert len(steps(Path("wave"))) == len(steps(Path("again"))) == 3
    ran("finetune-lora", "M.gguf", "text.txt", "--iters", 1, "--ctx", 32, "--out", "lora")
    ran("finetune-lora", "--resume", "lora", "--iters", 2)
    ran("finetune-lora", "--only-write-lora", "--resume", "lora", "--out", "written")
    for name, other, folder in (
        ("train-from-scratch", "finetune", "lora"),
        ("finetune-lora", "from-scratch", "wave"),
    ):
        done = run(name, "--resume", folder)
        assert (
            done.code == 2
            and f"this is a checkpoint of {other}; use llamatrain {other} --resume {folder}" in done.err
        )
    for name in ("train-from-scratch", "finetune-lora"):
        given = ("M.gguf", "text.txt") if name == "finetune-lora" else ()
        assert '"total"' in ran("plan", name, *given, "--json").out
        assert f"Usage: llamatrain plan {name}" in ran("plan", name, "--help").out


# ---- whole runs ------------------------------------------------------------


def test_their_finetune(place: Path) -> None:
    theirs = "--model-base M.gguf --train-data text.txt --lora-r 4 --rank-wq 2 --adam-iter 3 --adam-alpha 1e-3 -c 32 -b 4 -t 2"
    done = ran("finetune", *theirs.split(), "--use-checkpointing", "--out", "theirs")
    assert (
        done.err.count("--adam-alpha") == 1
        and "--adam-alpha is --lr" in done.err
        and "note: other names here" in done.err
    )
    ours = "--lora-r 4 --lora-rank-of attn_q=2 --iters 3 --lr 1e-3 --ctx 32 --batch 4 --threads 2 --remat block --out ours"
    assert "other names here" not in ran("finetune", "M.gguf", "text.txt", *ours.split()).err
    same_bits(Path("theirs/adapter.gguf"), Path("ours/adapter.gguf"))


def test_their_training_from_scratch(place: Path) -> None:
    theirs = "--vocab-model M.gguf --train-data text.txt --adam_iter 3 --adam-alpha 3e-3 --cos-decay-min 0.5 -c 32 -b 2 -s 3 -ngl 0"
    done = ran("train-from-scratch", *theirs.split(), *TINY, "--out", "theirs")
    assert "-ngl has no effect here" in done.err
    ours = "text.txt --vocab-from M.gguf --iters 3 --lr 3e-3 --lr-min 15e-4 --ctx 32 --batch 2 --seed 3"
    ran("from-scratch", *ours.split(), *TINY, "--out", "ours")
    same_bits(Path("theirs/model.gguf"), Path("ours/model.gguf"))
    assert "memory" not in ran("plan", "train-from-scratch", *theirs.split(), *TINY).err


def test_their_iterations_are_those_of_one_call(place: Path) -> None:
    ran(
        "from-scratch", "text.txt", *TINY, "--vocab-size", "bytes", "--adam-iter", 2, "-c", 32, "--out", "one"
    )
    done = ran(
        "from-scratch", "--checkpoint-in", "one/checkpoint-2.gguf", "--adam-iter", 3, "-c", 32, "--out", "two"
    )
    assert "--adam-iter 3 is --iters 5 here" in done.err and "2 steps are done" in done.err
    assert len(steps(Path("two"))) == 5
    assert "--iters 6 here" in ran("from-scratch", "--resume", "two", "--adam-iter", 1).err


def test_their_schedule_is_lowest_where_it_was(place: Path) -> None:
    theirs = "--warmup 4 --cos-decay-steps 10 --cos-decay-min 0.2 --adam-alpha 1e-2 --adam-iter 12 -c 32 -b 1"
    ran(
        "from-scratch",
        "--train-data",
        "text.txt",
        "--vocab-size",
        "bytes",
        *TINY,
        *theirs.split(),
        "--out",
        "it",
    )
    rates = [line["lr"] for line in steps(Path("it"))]
    assert rates[3] == max(rates) == 1e-2
    assert rates[9] == rates[11] == min(rates[4:]) == pytest.approx(2e-3) and rates[8] > rates[9]


def test_their_export(place: Path) -> None:
    h = small()
    random_adapter(Path("a.gguf"), h, ["blk.0.attn_q.weight"])
    random_adapter(Path("b.gguf"), h, ["blk.1.ffn_up.weight"], size=0.2)
    ran(
        "export-lora",
        *["-m", "M.gguf", "-o", "theirs.gguf", "-l", "a.gguf", "-s", "b.gguf", "0.5", "-t", "2"],
    )
    ran("export-lora", "M.gguf", "--lora", "a.gguf", "--lora-scaled", "b.gguf", 0.5, "--out", "ours.gguf")
    assert Path("theirs.gguf").read_bytes() == Path("ours.gguf").read_bytes()
    ran(
        "export-lora",
        *["-m", "M.gguf", "--lora", "a.gguf", "--lora-scaled", "b.gguf:0.5", "-o", "today.gguf"],
    )
    assert Path("today.gguf").read_bytes() == Path("ours.gguf").read_bytes()
