"""A folder that came from somewhere else: nothing outside it is written, and nothing in it is believed."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from llamatrain.adapters import peft
from llamatrain.checkpoints.filenames import LATEST
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.checkpoints.signature import SIGNATURE, sign
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import string
from llamatrain.report.metrics import Metrics
from tests.checkpoints.test_run_folder import at, names, newest_step, refused
from tests.helpers.cli import TINY, Argument, Done, ran, run, started, text_file
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small
from tests.helpers.timeout import TooLong
from tests.helpers.tiny_checkpoint import forge

PLAIN = ("--kernels", "reference", "--batch", 2, "--ctx", 32, "--seed", 1, "--save-every", 1)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begun(out: str = "run", *more: Argument) -> Path:
    text_file(Path())
    ran("from-scratch", "text.txt", *TINY, *PLAIN, "--iters", 2, "--out", out, *more)
    return Path(out)


def tuned(out: str = "run", *more: Argument) -> Path:
    text_file(Path())
    base(Path("base.gguf"), small())
    ran("finetune", "base.gguf", "text.txt", *PLAIN, "--iters", 2, "--precision", "f32", "--out", out, *more)
    return Path(out)


def with_options(folder: Path, own: bool = False, **parts: object) -> Path:
    """The run's checkpoint says other options, and its checksum is right; if it is one's own, its signature, too."""
    checkpoint, newest, _ = RunFolder.read_newest(folder)
    options = checkpoint.options
    for name, values in parts.items():
        options[name] = {**options[name], **values} if isinstance(values, dict) else values
    changed = {"training.options": string(json.dumps(options))}
    if own:
        extra = json.loads(open_gguf(newest).get_value("training.extra", str))
        changed["training.extra"] = string(json.dumps({**extra, SIGNATURE: sign(options)}))
    forged = forge(newest, folder / "forged", changed)
    for file in folder.glob("checkpoint-*"):
        file.unlink()
    forged.rename(folder / "checkpoint-2.gguf")
    return folder


@contextmanager
def untouched(*mine: Path) -> Iterator[None]:
    """The user's files are to the byte what they were, and no more came beside them."""
    before = {path: (path.read_bytes(), path.stat().st_ino, names(path.parent)) for path in mine}
    yield
    assert {path: (path.read_bytes(), path.stat().st_ino, names(path.parent)) for path in mine} == before


def mine(name: str) -> Path:
    path = Path("home") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"mine: {name}")
    return path


LINKED = (
    "config.toml",
    "loss.svg",
    "report.html",
    "report.json",
    "metrics.jsonl",
    "model.gguf",
    LATEST,
    "checkpoint-3.gguf",
)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_links_are_replaced_and_not_followed(link: object, place: Path) -> None:
    folder = begun()
    targets = {name: mine(name).absolute() for name in LINKED}
    for name, target in targets.items():
        (folder / name).unlink(missing_ok=True)
        link(target, folder / name)  # type: ignore[operator]
    with untouched(*targets.values()):
        ran("from-scratch", "--resume", folder, "--iters", 4)
    for name, target in targets.items():
        assert not (folder / name).exists() or not (folder / name).samefile(target)


def test_a_link_to_itself_among_what_is_read(place: Path) -> None:
    """It is no name of what would be replaced."""
    begun()
    tuned("tune", "--peft", "theirs")
    Path("theirs/loop").symlink_to("loop")
    assert tuned("run", "--lora", "theirs", "--overwrite").name == "run"


def test_links_in_a_run_that_is_replaced(place: Path) -> None:
    folder, targets = Path("run"), [mine(name).absolute() for name in (*LINKED, "checkpoint-9.gguf")]
    folder.mkdir()
    for target in targets:
        (folder / target.name).symlink_to(target)
    with untouched(*targets):
        begun("run", "--overwrite")
    assert not [path for path in folder.iterdir() if path.is_symlink()]


def test_links_to_folders_are_not_entered(place: Path) -> None:
    kept = mine("config.toml")
    with RunFolder.create(place / "run", "finetune") as made:
        made.save(at(1), 1)
    for name in (".replaced-x", ".replacing-x", "checkpoint-7.gguf", ".model.gguf.00000000.tmp"):
        (place / "run" / name).symlink_to(place / "home")
    with untouched(kept):
        assert newest_step(place / "run") == 1
        with RunFolder(place / "run") as again:
            again.save(at(2), 1)


@pytest.mark.parametrize("aside", [".replaced-x", ".replacing-x", ".replaced-1-2", ".replacing-1-2-x"])
def test_what_was_planted_does_not_come_back(aside: str, place: Path) -> None:
    """Only what this program put aside, in this folder, does."""
    folder = place / "run"
    (folder / aside).mkdir(parents=True)
    (folder / aside / "config.toml").write_text("planted")
    (folder / aside / "model.gguf").write_text("planted")
    (folder / "config.toml").write_text("mine")
    before = names(folder)
    refused(RunFolder.read_newest, folder)
    RunFolder(folder).close()
    assert (folder / "config.toml").read_text() == "mine" and names(folder) == before


def test_what_was_put_aside_does_not_come_back_in_a_copy(place: Path) -> None:
    with RunFolder.create(place / "run", "finetune") as made:
        made.save(at(7), 1)
    with RunFolder.create(place / "run", "finetune", overwrite=True) as made:
        made.replace_run()
    shutil.copytree("run", "copy")
    assert "no checkpoint to resume from" in refused(RunFolder.read_newest, place / "copy")
    assert newest_step(place / "run") == 7


def test_folders_in_the_place_of_files_stay(place: Path) -> None:
    kept = place / "run" / "checkpoint-1.gguf" / "text"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    (place / "run" / ".model.gguf.00000000.tmp").mkdir()
    with RunFolder.create(place / "run", "finetune", overwrite=True) as made:
        made.replace_run()
        for step in (0, 2, 3):
            made.save(at(step), 1)
        made.remove_replaced()
    with RunFolder.create(place / "run", "finetune", overwrite=True) as made:
        made.replace_run()
        made.save(at(0), 1)
        made.remove_replaced()
    assert kept.read_text() == "mine"
    assert names(place / "run") == [
        ".model.gguf.00000000.tmp",
        "checkpoint-0.gguf",
        "checkpoint-1.gguf",
        LATEST,
    ]
    assert newest_step(place / "run") == 0


@pytest.mark.parametrize("name", ["checkpoint-5.gguf", LATEST])
def test_links_to_nowhere_and_round_and_round_are_passed_over(name: str, place: Path) -> None:
    with RunFolder.create(place / "run", "finetune") as made:
        made.save(at(1), 1)
    (place / "run" / name).unlink(missing_ok=True)
    for target in ("nowhere", name):
        (place / "run" / name).symlink_to(target)
        assert newest_step(place / "run") == 1
        (place / "run" / name).unlink()


# ---- pipes and devices -----------------------------------------------------


def fifo(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def waited(*_: object) -> None:
    raise TooLong


def told(*arguments: Argument) -> Done:
    """Of a command that is not to wait for anything."""
    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(20)
    try:
        done = run(*arguments)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert "Traceback" not in done.err and len(done.errors) == (done.code != 0)
    return done


def test_metrics_that_are_a_pipe(place: Path) -> None:
    folder = begun()
    fifo(folder / "metrics.jsonl")
    assert told("from-scratch", "--resume", folder, "--iters", 3, "--out", "other").code == 0
    assert Path("other/metrics.jsonl").read_text().count("\n") == 1
    assert (
        "metrics.jsonl: this is a folder, a device or a pipe"
        in told("from-scratch", "--resume", folder, "--iters", 3).err
    )
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to("/dev/zero")
    assert told("from-scratch", "--resume", folder, "--iters", 3).code == 0
    assert (folder / "metrics.jsonl").read_text().count("\n") == 1 and not (
        folder / "metrics.jsonl"
    ).is_symlink()


STRANGE = (
    "/dev/zero",
    "/dev/stdin",
    "/proc/self/environ",
    "pipe",
    "linked",
    "loop",
    "loop/x",
    "/**/*",
    "/*/*/*/*/*",
)


@pytest.mark.parametrize("part", ["files", "val"])
@pytest.mark.parametrize("name", STRANGE)
def test_data_that_a_checkpoint_names(
    name: str, part: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text files are read; nothing that waits, has no end, or is half the disk."""
    monkeypatch.setattr("llamatrain.data.find_files.MAX_EXAMINED", 1000, raising=False)
    folder = begun()
    fifo(place / "pipe")
    (place / "linked").symlink_to("pipe")
    (place / "loop").symlink_to("loop")
    named = name if name.startswith("/") else str(place / name)
    with_options(folder, **({"files": [named]} if part == "files" else {"data": {"val": [named]}}))
    done = told("from-scratch", "--resume", folder, "--iters", 3)
    assert done.code == (2 if name.startswith("loop") else 1) and named in done.err
    assert told("plan", "from-scratch", "--resume", folder).code in (0, 1, 2)


@pytest.mark.parametrize("name", ["", "**", "**/*.txt", "*/*", "**/nothing"])
def test_a_checkpoint_does_not_have_everything_looked_through(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun()
    many = place / "many"
    for number in range(40):
        (many / str(number)).mkdir(parents=True)
        (many / str(number) / "a.txt").touch()
    with_options(folder, files=[str(many / name)])
    monkeypatch.setattr("llamatrain.data.find_files.MAX_EXAMINED", 30, raising=False)
    assert "more than 30 files and folders" in told("from-scratch", "--resume", folder, "--iters", 3).err
    assert (
        "more than 30" not in told("from-scratch", str(many / name), "--resume", folder, "--iters", 3).err
    )  # named now


def test_other_files_that_a_checkpoint_names(place: Path) -> None:
    folder = tuned()
    pipe = str(fifo(place / "pipe"))
    for parts in (
        {"base": pipe},
        {"base": "/dev/zero"},
        {"base": "/dev/stdin"},
        {"lora": {"lora_scaled": [[pipe, 1.0]]}},
    ):
        with_options(folder, **parts)
        assert told("finetune", "--resume", folder, "--iters", 3).code == 2
        assert told("finetune", "--resume", folder, "--iters", 3, "--trust").code == 1


# ---- where a checkpoint would have it written ------------------------------


def written(folder: Path) -> bytes:
    return (folder / peft.WEIGHTS).read_bytes()


def test_a_folder_for_peft_that_only_the_checkpoint_names(place: Path) -> None:
    folder = with_options(tuned("run", "--peft", "theirs"), True, tune={"peft": str(place / "mine")})
    shutil.copytree("theirs", "mine")
    done = ran("finetune", "--resume", folder, "--iters", 3, "--trust")
    assert written(Path("mine")) == written(Path("theirs"))
    assert done.err.count(f"--peft {place / 'mine'}") == 1
    before = written(Path("mine"))
    ran("finetune", "--resume", folder, "--iters", 4, "--peft", "mine")
    assert written(Path("mine")) != before


@pytest.mark.parametrize("name", ["run/peft", "run/../beside", "run/link"])
@pytest.mark.parametrize("own", [True, False])
def test_a_folder_for_peft_inside_the_runs_own(own: bool, name: str, place: Path) -> None:
    folder = tuned()
    (place / "outside").mkdir()
    (folder / "link").symlink_to(place / "outside")
    with_options(folder, own, tune={"peft": f"{place}/{name}"})
    ran("finetune", "--resume", folder, "--iters", 3, "--trust")
    assert (Path(name) / peft.WEIGHTS).exists() == (own and name == "run/peft")
    assert not list(Path("outside").iterdir()) and not Path("beside").exists()


OUTS = {"checkpoint_out": "from-scratch", "model_out": "from-scratch", "lora_out": "finetune"}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", OUTS)
def test_no_file_is_written_that_only_a_checkpoint_names(name: str, own: bool, place: Path) -> None:
    """Nor is it where the checkpoint is one's own, and may hold what somebody else has put in it."""
    folder, command = begun() if OUTS[name] == "from-scratch" else tuned(), OUTS[name]
    keys = mine("authorized_keys").absolute()
    keys.chmod(0o600)
    with_options(folder, own, outs={name: str(keys)})
    shutil.copytree(folder, "copy")
    write = "--only-write-lora" if command == "finetune" else "--only-write-model"
    with untouched(keys):
        done = ran(command, "--resume", folder, "--iters", 3, "--trust")
        assert f"note: {keys} is not written, since only the checkpoint names it; " in done.err
        ran(command, "--resume", "copy/checkpoint-2.gguf", "--iters", 3, "--out", "new", "--trust")
        ran(command, "--checkpoint-in", "copy/checkpoint-2.gguf", write, "--trust")
        ran(command, "--resume", "copy", write, "--trust")
        ran(command, "--resume", folder, "--iters", 4, "--trust")
    assert keys.stat().st_mode & 0o777 == 0o600
    assert str(keys) not in (folder / "config.toml").read_text() or own


@pytest.mark.parametrize("own", [True, False])
def test_a_file_inside_the_folder_is_written_where_the_checkpoint_is_ones_own(own: bool, place: Path) -> None:
    """The folder of a checkpoint that came alone may be the user's home."""
    folder = with_options(begun(), own, outs={"model_out": str(place / "run" / "mine.gguf")})
    ran("from-scratch", "--resume", folder, "--iters", 3, "--trust")
    assert (folder / "mine.gguf").exists() == own


def test_words_of_a_checkpoint_change_no_name_that_is_given_now(place: Path) -> None:
    keys = mine("keys").absolute()
    folder = with_options(begun(), outs={"pattern_fn_it": "model.gguf", "fn_latest": "keys"})
    with untouched(keys):
        assert (
            told(
                "from-scratch", "--resume", folder, "--iters", 3, "--trust", "--model-out", "home/model.gguf"
            ).code
            == 0
        )
        Path("home/model.gguf").unlink()
    with_options(folder, outs={"fn_latest": "../keys"})
    assert "fn_latest" in told("from-scratch", "--resume", folder, "--iters", 3, "--trust").err


# ---- a checkpoint from elsewhere ---------------------------------------------


def test_the_files_that_only_a_checkpoint_names_are_listed(place: Path) -> None:
    begun().rename("moved")
    done = ran("from-scratch", "--resume", "moved", "--iters", 3)
    assert f"note: reading {place}/text.txt, which the checkpoint names" in done.err
    assert (
        "which the checkpoint names"
        not in ran("from-scratch", "text.txt", "--resume", "moved", "--iters", 4).err
    )


def test_a_checkpoint_from_elsewhere_has_no_file_read_unasked(place: Path) -> None:
    secret = mine("secret.txt").absolute()
    secret.write_text("mine, and of nobody else " * 400)
    folder = with_options(begun(), files=[str(secret)])
    for words in ((folder,), (folder / "checkpoint-2.gguf", "--out", "new")):
        done = told("from-scratch", "--resume", *words, "--iters", 3)
        assert (
            done.code == 2
            and f"names files to read: {secret}; " in done.err
            and "--trust" in done.err
            and "[untrusted-checkpoint]" in done.err
        )
    assert told("plan", "from-scratch", "--resume", folder).code == 2
    assert "checkpoint names" not in ran("from-scratch", secret, "--resume", folder, "--iters", 3).err
    with_options(folder, files=[str(secret)], run={"note": "other"})
    assert (
        f"note: reading {secret}, which someone else's checkpoint names"
        in ran("from-scratch", "--resume", folder, "--trust", "--iters", 4).err
    )
    ran("from-scratch", "--resume", folder, "--iters", 5)  # it is one's own from then on


def test_a_checkpoint_of_another_user_is_told_by_the_key(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun()
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
    assert "[untrusted-checkpoint]" in told("from-scratch", "--resume", folder, "--iters", 3).err
    ran("from-scratch", "text.txt", "--resume", folder, "--iters", 3)
    key = place / "state" / "llamatrain" / "checkpoint-key"
    assert key.stat().st_mode & 0o777 == 0o600 and key.stat().st_size == 32
    ran("from-scratch", "--resume", folder, "--iters", 4)
    key.chmod(0o644)  # somebody may have read it
    assert "[untrusted-checkpoint]" in told("from-scratch", "--resume", folder, "--iters", 5).err
    ran("from-scratch", "text.txt", "--resume", folder, "--iters", 5)
    assert key.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/none")
    ran("from-scratch", "text.txt", "--resume", folder, "--iters", 6)  # without a key it is named each time
    assert "[untrusted-checkpoint]" in told("from-scratch", "--resume", folder, "--iters", 7).err


def test_trust_means_nothing_to_a_new_run(place: Path) -> None:
    text_file(place)
    assert (
        "--trust has no effect without --resume or --checkpoint-in"
        in told("from-scratch", "text.txt", "--trust").err
    )


def test_a_checkpoint_from_elsewhere_sends_no_figures(place: Path) -> None:
    folder = with_options(begun(), run={"log": ["csv", "wandb"]})
    done = ran("from-scratch", "--resume", folder, "--iters", 3, "--trust")
    assert "nothing is sent to wandb, since only someone else's checkpoint asks for " in done.err
    assert (folder / "metrics.csv").exists() and not (folder / "loggers.json").exists()


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for tensorboardX, which may not be installed."""
    module = ModuleType("tensorboardX")
    for name in ("summary", "event_file_writer.EventsWriter", "proto.event_pb2", "proto.summary_pb2"):
        inner, _, attribute = name.rpartition(".")
        made = ModuleType(f"tensorboardX.{inner}") if inner else module
        monkeypatch.setitem(sys.modules, made.__name__, sys.modules.get(made.__name__, made))
        setattr(sys.modules[made.__name__], attribute, object())
    monkeypatch.setattr("llamatrain.report.loggers.find_spec", lambda name: object())


def test_a_folder_of_events_that_leads_elsewhere(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    outside = mine("victim").absolute()
    folder = with_options(begun(), run={"log": ["tensorboard"]})
    (folder / "tensorboard").symlink_to(outside.parent)
    with untouched(outside):
        assert (
            "tensorboard: this is a link"
            in ran("from-scratch", "--resume", folder, "--iters", 3, "--trust").err
        )


def test_links_in_a_folder_for_peft_are_replaced(place: Path) -> None:
    kept = mine(peft.WEIGHTS).absolute()
    (place / "run" / "peft").mkdir(parents=True)
    for name in (peft.WEIGHTS, peft.CONFIG):
        (place / "run" / "peft" / name).symlink_to(kept)
    with untouched(kept):
        tuned("run", "--peft", "run/peft", "--overwrite")
    assert not (place / "run" / "peft" / peft.WEIGHTS).is_symlink()


def test_a_config_file_replaces_no_adapter(place: Path) -> None:
    """It may be another's; what is named on the command line is meant."""
    tuned("run", "--peft", "theirs")
    before = written(Path("theirs"))
    again = ("finetune", "--config", "run/config.toml", "--out", "two", "--lr", 0.1)
    for more in ((), ("--overwrite",)):
        assert (
            "theirs already holds an adapter" in told(*again, *more).err and written(Path("theirs")) == before
        )
    ran(*again, "--overwrite", "--peft", "theirs")
    assert written(Path("theirs")) != before


# ---- what a run reads ------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.toml", "model.gguf"])
def test_what_is_read_is_not_replaced(name: str, place: Path) -> None:
    folder = begun()
    text = Path("text.txt").read_text()
    inside = folder / name
    before = {
        "metrics.jsonl": json.dumps({"text": text}) + "\n",
        "config.toml": "lr = 0.1\n",
        "model.gguf": text,
    }[name]
    inside.write_text(before)
    named: dict[str, list[tuple[Argument, ...]]] = {
        "metrics.jsonl": [
            (inside,),
            (folder,),
            ("run/metr*",),
            ("text.txt", "--val", inside),
            ("linked.jsonl",),
        ],
        "config.toml": [("text.txt", "--config", inside)],
        "model.gguf": [(inside,), ("text.txt", "--val", inside)],
    }
    Path("linked.jsonl").symlink_to(inside)
    for arguments in named[name]:
        done = told("from-scratch", *arguments, *TINY, *PLAIN, "--iters", 1, "--out", folder, "--overwrite")
        assert (
            done.code == 1 and (name in done.err or "linked" in done.err) and "[overwrites-input]" in done.err
        ), done.err
        assert inside.read_text() == before and (folder / LATEST).exists()


def test_a_fresh_file_of_figures_is_a_new_one(place: Path) -> None:
    kept = mine("figures").absolute()
    (place / "metrics.jsonl").symlink_to(kept)
    with untouched(kept):
        with Metrics.create(place / "metrics.jsonl") as metrics:
            metrics.write({"step": 1})
        (place / "metrics.jsonl").unlink()
        os.link(kept, place / "hard.jsonl")
        with Metrics.create(place / "hard.jsonl") as metrics:
            metrics.write({"step": 1})


def test_reading_commands_change_nothing_in_a_foreign_folder(place: Path) -> None:
    folder = begun()
    (folder / ".replaced-x").mkdir()
    (folder / ".replaced-x" / "config.toml").touch()
    (folder / "checkpoint-9.gguf").symlink_to("/dev/zero")
    before = {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}
    assert told("generate", folder / "model.gguf", "--prompt", "a", "-n", 1).code == 0
    assert told("evaluate", folder / "model.gguf", "text.txt").code == 0
    assert told("inspect", folder / LATEST).code == 0
    assert told("inspect", folder / "checkpoint-9.gguf").code == 1
    assert told("plan", "from-scratch", "--resume", folder).code == 0
    assert told("from-scratch", "--checkpoint-in", folder / "checkpoint-9.gguf", "text.txt").code == 1
    assert {path: path.lstat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_run_through_a_link_of_the_users_own(place: Path) -> None:
    begun().rename("elsewhere")
    Path("run").symlink_to("elsewhere")
    ran("from-scratch", "--resume", "run", "--iters", 3)
    assert Path("run").is_symlink() and (Path("elsewhere") / "checkpoint-3.gguf").exists()
    with started("from-scratch", "--resume", "run/checkpoint-LATEST.gguf", "--iters", 4) as process:
        assert process.wait(60) == 0
    assert (Path("elsewhere") / "checkpoint-4.gguf").exists()
