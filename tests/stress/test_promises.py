"""The program as a user meets it, each thing that was promised from outside: words, files and processes."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import (
    ROOT,
    TINY,
    Argument,
    Done,
    environment,
    finished,
    ran,
    run,
    started,
    text,
    text_file,
)
from tests.stress.test_forged_checkpoints import ARRAY, F32, U32, File, number, string

SMALL = (*TINY, "--layer", 1, "--ctx", 16, "--batch", 2, "--precision", "f32", "--iters", 2)
FLAG = re.compile(r"--[a-z]")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, and its text beside it."""
    place = tmp_path_factory.mktemp("trained")
    ran("from-scratch", text_file(place, 2000), *SMALL, "--out", place / "run")
    return place / "run"


@pytest.fixture
def place(tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own with model.gguf and text.txt in it."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(trained / "model.gguf", "model.gguf")
    shutil.copy(trained.parent / "text.txt", "text.txt")
    return tmp_path


def error(done: Done, code: int | tuple[int, ...] = (1, 2)) -> str:
    """The one line in which it ended."""
    assert done.code in (code if isinstance(code, tuple) else (code,)), done.err
    assert len(done.errors) == 1 and "Traceback" not in done.err, done.err
    assert len(done.errors[0]) < 400
    return done.errors[0].removeprefix("error: ")


# ---- words of the command ---------------------------------------------------


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("from-scratch", "--no-shufle"), "--no-shuffle"),
        (("from-scratch", "--Batch", "3"), "--batch"),
        (("train-from-scratch", "--vocab_size", "300"), "--vocab-size"),
        (("finetune-lora", "--lora-skaled", "a", "1"), "--lora-scaled"),
        (("plan", "train-from-scratch", "--sise", "tiny"), "--size"),
        (("plan", "train-from-scrach"), "train-from-scratch"),
        (("from_scratch",), "from-scratch"),
        (("finetun-lora",), "finetune-lora"),
        (("exportlora",), "export-lora"),
    ],
)
def test_what_was_meant_is_asked(words: tuple[str, ...], meant: str) -> None:
    message, _, code = error(run(*words), 2).rpartition(" ")
    assert message.endswith(f"; did you mean {meant}?") and code in ("[unknown-command]", "[unknown-option]")


@pytest.mark.parametrize("other", [("--prompt", "hi"), ("-n", 3), ("--temp", 0)])
def test_a_pair_that_lacks_its_number_is_what_is_told(other: tuple[Argument, ...], place: Path) -> None:
    """The next option is taken for it: the error is of the pair, not of what is left over."""
    for pair in (("--lora-scaled", "a.gguf"), ("--lora-scaled=a.gguf",)):
        assert "--lora-scaled" in error(run("generate", "model.gguf", *pair, *other), 2)


def test_what_is_off_by_default_is_no_slip_where_it_is_said(place: Path) -> None:
    """To leave packing off is what the sine wave does; at least it is called by the name that was given."""
    done = run("from-scratch", "--no-pack", "--iters", 1, "--out", "wave")
    assert done.code == 0 or "--no-pack" in error(done, 2)


@pytest.mark.parametrize("alias", ["train-from-scratch", "finetune-lora"])
def test_help_of_an_alias_speaks_of_it(alias: str) -> None:
    own, its = (ran(*words, alias, "--help").out for words in ((), ("plan",)))
    assert f"llamatrain {alias}" in own and f"llamatrain plan {alias}" in its


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("finetune-lora --li", "--line-search"),
        ("plan train-from-scratch --siz", "--size"),
        ("from-scratch --size ", "tiny"),
        ("from-scratch --no-sh", "--no-shuffle"),
        ("train-fr", "train-from-scratch"),
        ("plan finetune-", "finetune-lora"),
    ],
)
def test_shells_complete_aliases_too(typed: str, offered: str) -> None:
    env = environment(
        _LLAMATRAIN_COMPLETE="complete_bash",
        COMP_WORDS=f"llamatrain {typed}",
        COMP_CWORD=str(1 + typed.count(" ")),
    )
    program = [
        sys.executable,
        "-c",
        "import sys; sys.argv = ['llamatrain']; from llamatrain.cli.main import main; main()",
    ]
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=False)
    assert offered in done.stdout.split(), done.stderr


# ---- one checker ------------------------------------------------------------

BAD: list[tuple[str, str, Any, str]] = [  # where checkpoints keep it, its key, a value, what is told
    ("train", "batch", 0, "must be 1 to 65536 "),
    ("train", "batch", "many", "must be a whole number "),
    ("train", "lr", math.nan, "must be a number "),
    ("train", "lr", -1.0, "must be 0 or more "),
    ("train", "beta2", 1.0, "less than 1"),
    ("train", "eps", 0.0, "must be more than 0, "),
    ("train", "grad_acc", -3, "must be 1 or more, "),
    ("train", "optimizer", "adam", "must be adamuon, adamw, lbfgs, muon or sgd "),
    ("train", "schedule", "sideways", "must be "),
    ("train", "remat", "sometimes", "must be none, light"),
    ("train", "memory", "6GQ", "6GQ"),
    ("train", "precision", "f8", "must be "),
    ("train", "kernels", "cuda", "must be "),
    ("model", "ctx", 0, "must be "),
    ("model", "ctx", 2**40, "must be "),
    ("model", "rope_freq_base", 0.0, "must be "),
    ("model", "norm_rms_eps", 2.0, "must be "),
    ("model", "vocab_size", "some", "the word bytes"),
    ("data", "val_split", 1.5, "must be "),
    ("data", "train_on", "nothing", "must be "),
    ("run", "keep", 0, "must be "),
    ("run", "threads", -1, "must be "),
    ("run", "max_time", "soon", "soon"),
]


@pytest.mark.parametrize(
    ("group", "key", "value", "told"), BAD, ids=[f"{key}={value}" for _, key, value, _ in BAD]
)
def test_one_value_is_refused_alike_wherever_it_is_said(
    group: str, key: str, value: Any, told: str, place: Path, trained: Path
) -> None:
    """By its flag, by its key in TOML with the file, by its key in a checkpoint with that file: in the same words."""
    name = key.replace("_", "-")
    said = error(run("from-scratch", "text.txt", f"--{name}={value}", "--out", "run"), 2)
    Path("c.toml").write_text(f"{name} = {json.dumps(value) if isinstance(value, str) else value}\n")
    written = error(run("from-scratch", "text.txt", "--config", "c.toml", "--out", "run"), 2)
    file = File.read(trained / "checkpoint-2.gguf")
    options = json.loads(file.text("training.options"))
    assert key in options[group]
    options[group][key] = value
    file.but(training__options=string(json.dumps(options))).write(place / "crafted.gguf")
    kept = error(run("from-scratch", "--resume", "crafted.gguf", "--iters", 3, "--out", "run"))
    assert f"--{name}" in said and "c.toml" not in said
    assert "c.toml" in written and name in written and not FLAG.search(written)
    assert "crafted.gguf" in kept and key in kept and not FLAG.search(kept)
    for each in (said, written, kept):
        assert re.search(told, each), each
    words = {re.sub(rf"^.*?(--)?({name}|{key}):? ", "", each) for each in (said, written)}
    assert len(words) == 1, words
    assert not Path("run").exists()


def test_too_small_a_vocabulary_is_told_by_its_name(place: Path) -> None:
    assert "--vocab-size" in error(run("from-scratch", "text.txt", "--vocab-size", 0), 2)
    Path("c.toml").write_text("vocab-size = 0")
    told = error(run("from-scratch", "text.txt", "--config", "c.toml"), 2)
    assert told.startswith("c.toml: vocab-size")


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ("embd = 32\nhead = 5", "5 heads do not divide a width of 32 (head, embd)"),
        ("head = 4\nhead-kv = 3", "head-kv must divide the 4 heads (got 3)"),
        ("layer = 5000", "layer must be 1 to 4096 (got 5000)"),
        ("rope-freq-scale = 1e-45", "rope-freq-scale must be 1e-38 to 1e+38, such as 0.5 (got 1e-45)"),
        ("norm-rms-eps = 1e-60", "norm-rms-eps must be between 0 and 1, "),
        ("lr = [[]]", "lr must be a number (got a list)"),
    ],
)
def test_what_only_the_whole_shows_is_told_of_the_file_too(toml: str, told: str, place: Path) -> None:
    Path("c.toml").write_text(toml)
    for command in (("from-scratch",), ("plan", "from-scratch")):
        words = error(
            run(*command, "text.txt", "--vocab-size", "bytes", "--config", "c.toml", "--out", "run"), 2
        )
        assert words.startswith(f"c.toml: {told}") and not FLAG.search(words)


HARMS: dict[str, dict[str, tuple[int, bytes] | None]] = {
    "no epsilon": {"llama__attention__layer_norm_rms_epsilon": number(F32, 0.0)},
    "an epsilon of nan": {"llama__attention__layer_norm_rms_epsilon": number(F32, math.nan)},
    "a large epsilon": {"llama__attention__layer_norm_rms_epsilon": number(F32, 5.0)},
    "a base of 0": {"llama__rope__freq_base": number(F32, 0.0)},
    "a negative base": {"llama__rope__freq_base": number(F32, -10.0)},
    "a scale of 0": {
        "llama__rope__scaling__type": string("linear"),
        "llama__rope__scaling__factor": number(F32, 0.0),
    },
    "no heads": {"llama__attention__head_count": number(U32, 0)},
    "heads that do not divide": {"llama__attention__head_count": number(U32, 5)},
    "key heads that do not divide": {"llama__attention__head_count_kv": number(U32, 3)},
    "no context": {"llama__context_length": number(U32, 0)},
    "another width": {"llama__embedding_length": number(U32, 48)},
    "no width": {"llama__embedding_length": None},
    "more blocks": {"llama__block_count": number(U32, 2**31)},
    "another feed-forward part": {"llama__feed_forward_length": number(U32, 96)},
    "width in words": {"llama__embedding_length": string("wide")},
    "an odd rotation": {"llama__rope__dimension_count": number(U32, 7)},
    "another architecture": {"general__architecture": string("gemma4-assistant")},
    "no architecture": {"general__architecture": None},
    "no tokens": {
        "tokenizer__ggml__tokens": (ARRAY, string("")[1][:4].replace(b"\0", b"\x08", 1) + bytes(8))
    },
    "an unknown vocabulary": {"tokenizer__ggml__model": string("abacus")},
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(
    "words",
    [
        ("generate", "BAD", "--prompt", "a"),
        ("evaluate", "BAD", "text.txt"),
        ("finetune", "BAD", "text.txt", "--iters", 1, "--out", "run"),
        ("plan", "finetune", "BAD", "text.txt"),
        (
            "from-scratch",
            "text.txt",
            "--checkpoint-in",
            "BAD",
            "--iters",
            1,
            "--precision",
            "f32",
            "--out",
            "run",
        ),
        ("preview", "text.txt", "--model", "BAD"),
        ("inspect", "BAD"),
    ],
    ids=lambda words: " ".join(map(str, words[:2])),
)
def test_a_bad_file_is_never_told_a_flag(harm: str, words: tuple[Argument, ...], place: Path) -> None:
    bad = File.read(place / "model.gguf").but(**HARMS[harm]).write(place / "bad.gguf")
    done = run(*(bad if word == "BAD" else word for word in words))
    if done.code == 0:
        return
    told = error(done, 1)
    assert told.startswith(str(bad)) and not FLAG.search(told), told
    if "architecture" in harm and harm.startswith("another"):
        assert "gemma4-assistant" in told and "such as gemma4" in told, told


@pytest.mark.parametrize("way", ["key", "options"])
def test_an_unknown_optimizer_is_named_with_those_that_are(way: str, place: Path, trained: Path) -> None:
    file = File.read(trained / "checkpoint-2.gguf")
    if way == "key":
        crafted = file.but(optimizer__type=string("adagrad"))
    else:
        options = json.loads(file.text("training.options"))
        options["train"]["optimizer"] = "adagrad"
        crafted = file.but(training__options=string(json.dumps(options)))
    crafted.write(place / "crafted.gguf")
    told = error(run("from-scratch", "--resume", "crafted.gguf", "--iters", 3, "--out", "run"))
    assert "adagrad" in told and "adam" in told and "sgd" in told and "lbfgs" in told


# ---- what is taken for a model or for data ----------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("finetune", "MODEL", "text.txt"),
        ("plan", "finetune", "MODEL", "text.txt"),
        ("generate", "MODEL"),
        ("inspect", "MODEL"),
    ],
)
def test_a_folder_in_the_place_of_a_model_is_called_one(words: tuple[str, ...], place: Path) -> None:
    Path("folder").mkdir()
    told = error(run(*("folder" if word == "MODEL" else word for word in words)), 1)
    assert re.match(r"(.*/)?folder: (this is a|the) folder\b", told), told


def test_no_name_is_no_folder(place: Path) -> None:
    data = [
        ("from-scratch", ""),
        ("from-scratch", "text.txt", "--val", "", *SMALL),
        ("evaluate", "model.gguf", ""),
    ]
    for words in (("generate", ""), ("inspect", ""), ("evaluate", "", "text.txt"), *data):
        assert "empty" in error(run(*words))


NO_TEXT = {
    "table.csv": b"a,b\n" + b"1,2\n" * 900,
    "page.html": b"<p>words</p>\n" * 300,
    "latin.txt": "été là\n".encode("latin-1") * 300,
}


@pytest.mark.parametrize(
    "words",
    [
        ("finetune", "model.gguf", "DATA", "--iters", 1, "--out", "run"),
        ("evaluate", "model.gguf", "DATA"),
        ("preview", "DATA", "--model", "model.gguf"),
        ("from-scratch", "text.txt", "--val", "DATA", *SMALL, "--out", "run"),
        ("plan", "from-scratch", "DATA", "--vocab-size", "bytes"),
    ],
    ids=lambda words: " ".join(map(str, words[:1])),
)
@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_no_text_is_refused_by_every_command(
    name: str, words: tuple[Argument, ...], place: Path
) -> None:
    Path(name).write_bytes(NO_TEXT[name])
    done = run(*(name if word == "DATA" else word for word in words))
    if name != "page.html" and words[0] == "plan":
        assert done.code in (0, 1)  # neither text nor tables are read
        return
    assert name in error(done, 1)
    assert not Path("run/metrics.jsonl").exists()


@LINUX
def test_a_device_that_never_ends_is_no_data(place: Path) -> None:
    import resource

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 26, 1 << 26))

    with started("from-scratch", "/dev/zero", *SMALL, "--out", "run", preexec_fn=small_files) as process:
        assert "/dev/zero: this is a device" in error(finished(process), 1)


# ---- python, other systems, the demo ----------------------------------------


def test_without_assertions_it_is_the_same(place: Path, trained: Path) -> None:
    words = ["from-scratch", trained.parent / "text.txt", *SMALL, "--out", "run"]
    program = [sys.executable, "-O", "-m", "llamatrain", *map(str, words)]
    done = subprocess.run(program, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert File.read(place / "run" / "model.gguf").data == File.read(trained / "model.gguf").data


def test_no_signal_is_needed_to_be_imported_that_a_system_lacks() -> None:
    """Windows has neither the end of a terminal nor its size as a signal."""
    code = """
import importlib, pkgutil, signal, sys
import asyncio, filelock, numba, rich.live, subprocess, tqdm
lacking = "SIGHUP SIGPIPE SIGALRM SIGWINCH SIGUSR1 SIGUSR2 SIGQUIT SIGTSTP SIGCONT SIGPROF SIGCHLD SIGKILL"
for name in lacking.split():
    delattr(signal, name)
import llamatrain
for each in pkgutil.walk_packages(llamatrain.__path__, "llamatrain."):
    if not {"__main__", "torch"} & {*each.name.split(".")}:  # torch need not be installed
        importlib.import_module(each.name)
sys.argv = ["llamatrain", "plan", "from-scratch", "--json"]
from llamatrain.cli.main import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["total"] > 0


def test_the_peer_s_environment_needs_nothing_of_ours() -> None:
    """What `bench.py finetune --peer` starts has torch and PEFT there, and neither Numba nor gguf."""
    code = f"""
import sys, types
sys.path.insert(0, {str(ROOT / "scripts")!r})
for name in ("numba", "llvmlite", "gguf", "typer", "llamatrain"):
    sys.modules[name] = None
class Any_(types.ModuleType):
    def __getattr__(self, name):
        return type(name, (), {{}})
for name in ("torch", "peft", "transformers"):
    sys.modules[name] = Any_(name)
sys.modules["torch"].nn = Any_("nn")
from bench.peers import peft_step
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- what a plan says -------------------------------------------------------


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize("size", [300_000, 5_000_000])
def test_a_plan_with_a_learned_vocabulary_is_what_is_told_and_measured(size: int, place: Path) -> None:
    from tests.planner.test_plan_command import peak

    Path("words.txt").write_text("".join(text(50_000, seed) for seed in range(size // 50_000)))
    words = (
        "words.txt",
        "--size",
        "small",
        "--vocab-size",
        2048,
        "--iters",
        3,
        "--precision",
        "f32",
        "--batch",
        4,
    )
    with started("plan", "from-scratch", *words, "--json") as process:
        planned = json.loads(finished(process).out)["total"]
    with started("from-scratch", *words, "--out", "told") as process:
        head = finished(process, 300).err
    found = re.search(r"^memory +([0-9.]+) (MB|GB)", head, re.MULTILINE)
    assert found, head
    told = float(found[1]) * {"MB": 1e6, "GB": 1e9}[found[2]]
    measured = peak("from-scratch", *words, "--out", "measured")
    assert planned == pytest.approx(measured, rel=0.05), (
        f"{planned / 1e6:.0f} planned, {measured / 1e6:.0f} MB measured"
    )
    assert told == pytest.approx(measured, rel=0.05), (
        f"{told / 1e6:.0f} told, {measured / 1e6:.0f} MB measured"
    )


# ---- what a run writes down -------------------------------------------------


def test_an_option_file_of_a_resumed_alias_builds_the_same_model(place: Path) -> None:
    shape = ("--size", "tiny", "--vocab-size", 280, "--ctx", 16, "--batch", 2, "--precision", "f32")
    ran("train-from-scratch", "text.txt", *shape, "--iters", 1, "--out", "run")
    ran("train-from-scratch", "--resume", "run", "--iters", 2)
    written = Path("run/config.toml").read_text()
    assert 'size = "tiny"' in written and "280" in written
    ran("train-from-scratch", "--config", "run/config.toml", "--iters", 1, "--out", "again")
    files = [File.read(Path(folder, "model.gguf")) for folder in ("run", "again")]
    shapes = [{name: shape for name, (shape, _, _) in file.tensors.items()} for file in files]
    assert shapes[0] == shapes[1]
