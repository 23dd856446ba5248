"""Kills runs before each file operation, at random moments, and by signals.

Resumed, they must end with the same bits.
"""

import json
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

from torments import gguf
from torments.fixtures import SAVING, TINY, Fixtures
from torments.processes import ROOT
from torments.trial import INTERRUPTED, Argument, Kind, Trial, find_faults, last_line

RANDOM, SIGNALS, EARLY = 240, 60, 24  # numbers of trials
MAX_KILLS = 3  # of one run


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command to kill."""

    words: tuple[Argument, ...]
    result: str
    inputs: tuple[str, ...]
    resume_words: tuple[Argument, ...] = ()  # the command that resumes it, if not the same

    @property
    def run(self) -> str:
        """The folder of the run."""
        return str(Path(self.result).parent)


TUNE: tuple[Argument, ...] = ("finetune", "base.gguf", "text.txt", *SAVING, "--ctx", 32, "--out", "out")
BASE = ("base.gguf", "text.txt")
COPIED: tuple[Argument, ...] = ("--checkpoint-out", "c-ITERATION.gguf", "--sample-every", 2)
COMMANDS = {
    "from-scratch": Command(
        words=("from-scratch", "text.txt", *TINY, *SAVING, "--out", "out"),
        result="out/model.gguf",
        inputs=("text.txt",),
        resume_words=("from-scratch", "--resume", "out"),
    ),
    "lora": Command(
        words=(*TUNE, "--peft", "peft"),
        result="out/adapter.gguf",
        inputs=BASE,
        resume_words=("finetune", "--resume", "out"),
    ),
    "full": Command(
        words=(*TUNE, "--full"),
        result="out/model.gguf",
        inputs=BASE,
        resume_words=("finetune", "--resume", "out"),
    ),
    "resume": Command(
        words=("from-scratch", "--resume", "run", "--iters", 6),
        result="run/model.gguf",
        inputs=("run", "text.txt"),
    ),
    "overwrite": Command(
        words=("from-scratch", "text.txt", *TINY, *SAVING, "--seed", 3, "--out", "run", "--overwrite"),
        result="run/model.gguf",
        inputs=("run", "text.txt"),
        resume_words=("from-scratch", "--resume", "run"),
    ),
    "copies": Command(
        words=("from-scratch", "text.txt", *TINY, *SAVING, *COPIED, "--out", "out"),
        result="out/model.gguf",
        inputs=("text.txt",),
        resume_words=("from-scratch", "--resume", "out", *COPIED[:2]),
    ),
    "export-lora": Command(
        words=(
            "export-lora",
            "base.gguf",
            "--lora",
            "adapter.gguf",
            "--out",
            "merged.gguf",
            "--type",
            "f16",
            "--overwrite",
        ),
        result="merged.gguf",
        inputs=("base.gguf", "adapter.gguf", "merged.gguf"),
    ),
}
COMMANDS |= {  # killed at random moments only: their file operations are those of other commands
    "quantised": Command(
        words=("finetune", "q8.gguf", "chats.jsonl", *SAVING, "--ctx", 32, "--out", "out"),
        result="out/adapter.gguf",
        inputs=("q8.gguf", "chats.jsonl"),
        resume_words=("finetune", "--resume", "out"),
    ),
    "preference": Command(
        words=(
            "finetune",
            "base.gguf",
            "better.jsonl",
            *SAVING,
            "--ctx",
            32,
            "--objective",
            "dpo",
            "--out",
            "out",
        ),
        result="out/adapter.gguf",
        inputs=("base.gguf", "better.jsonl"),
        resume_words=("finetune", "--resume", "out"),
    ),
    "lbfgs": Command(
        words=(
            "from-scratch",
            "text.txt",
            *TINY,
            *SAVING,
            "--arch",
            "gemma3",
            "--optimizer",
            "lbfgs",
            "--out",
            "out",
        ),
        result="out/model.gguf",
        inputs=("text.txt",),
        resume_words=("from-scratch", "--resume", "out"),
    ),
}
NAMES = list(COMMANDS)
BY_OPERATION = NAMES[:7]


# ---- undisturbed runs -------------------------------------------------------


def undisturbed_run(fixtures: Fixtures, name: str) -> Path:
    """Return the folder of a run of the command that nothing happened to."""
    folder = fixtures.folder / "undisturbed" / name
    if not (folder / "operations").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        trial = Trial(kind="undisturbed", number=0, seed=0, root=folder, fixtures=fixtures)
        trial.copy_files(*COMMANDS[name].inputs)
        plan = {
            "under": [str(trial.folder)],
            "count": str(folder / "counted"),
            "sizes": str(folder / "sizes"),
        }
        result = trial.run(*COMMANDS[name].words, plan=plan)
        if trial.faults or result.code:
            raise SystemExit(
                f"error: an undisturbed {name} fails: {(trial.faults or [last_line(result.err)])[0]}"
            )
        (folder / "counted").rename(folder / "operations")
        (folder / "seconds").write_text(str(result.wall))
    return folder


def list_writes(fixtures: Fixtures, name: str) -> list[int]:
    """Return the numbers of the operations that write."""
    sizes = (undisturbed_run(fixtures, name) / "sizes").read_text().split()
    return [number for number, size in enumerate(sizes, 1) if int(size)]


def list_operations(fixtures: Fixtures) -> list[tuple[str, int]]:
    """Return every file operation of every command."""
    return [
        (name, n)
        for name in BY_OPERATION
        for n in range(1, int((undisturbed_run(fixtures, name) / "operations").read_text()) + 1)
    ]


def count_trials(fixtures: Fixtures) -> int:
    """Count the trials of this kind."""
    return len(list_operations(fixtures)) + RANDOM + SIGNALS + EARLY


# ---- trials ----------------------------------------------------------------


def trial(t: Trial) -> None:
    """Kill a command before an operation, at random, or by a signal, and check that it resumes."""
    operations = list_operations(t.fixtures)
    extra = t.number - len(operations)
    name, n = operations[t.number] if extra < 0 else (NAMES[extra % len(NAMES)], 0)
    command = COMMANDS[name]
    t.copy_files(*command.inputs)
    if name == "overwrite":
        (t.folder / "run" / "notes.txt").write_text("mine")
    checkpoints = count_checkpoints(t.folder / command.run) if command.run != "." else 0
    if n:
        t.run(
            *command.words,
            plan={"under": [str(t.folder)], "at": n, "do": "kill"},
            codes=(-signal.SIGKILL,),
            check_errors=False,
        )
    elif extra < RANDOM:
        for time in range(1 + extra // len(NAMES) % MAX_KILLS):  # and the resumed run is killed, too
            signal_at_random(t, command, signal.SIGKILL, real=extra % 8 == 0, resume=time > 0)
    else:
        number = t.random.choice([signal.SIGINT, signal.SIGTERM])
        signal_at_random(t, command, number, real=True, early=extra >= RANDOM + SIGNALS)
    check_resumed(t, name, checkpoints)


def signal_at_random(
    t: Trial, command: Command, number: int, real: bool, early: bool = False, resume: bool = False
) -> None:
    """Send a signal at a random moment of a run."""
    if early:
        seconds = 0.1
    else:
        undisturbed = undisturbed_run(t.fixtures, get_name(command))
        seconds = float((undisturbed / "seconds").read_text()) + (1.2 if real else 0)
    words = (
        command.resume_words
        if resume and command.resume_words and count_checkpoints(t.folder / command.run)
        else command.words
    )
    running = t.start(*words, real=real)
    moment = t.random.random() * seconds
    t.log(f"signal {number} after {moment:.3f} s")
    running.until(lambda: False, moment)
    running.signal(number)
    result = running.wait()
    t.codes.append(result.code)
    codes = (0, -number) if number == signal.SIGKILL else (0, INTERRUPTED, 128 + number, -number)
    trace = result.err.partition("Traceback")[2]
    if not trace or f"{ROOT}/llamatrain/" in trace:  # the interpreter may be starting
        t.faults += find_faults(result, codes, check_errors=False)


def get_name(command: Command) -> str:
    """Return the name of a command."""
    return next(name for name, other in COMMANDS.items() if other is command)


def check_resumed(t: Trial, name: str, checkpoints: int, best: bool = True) -> None:
    """Check that nothing is lost, and that the resumed run ends with the bits of an undisturbed one."""
    command = COMMANDS[name]
    if name == "export-lora":
        t.check_gguf(t.folder / "merged.gguf")
    elif t.expect(
        not checkpoints or count_checkpoints(t.folder / command.run),
        "no checkpoint of the earlier run is left",
    ):
        t.check_gguf(t.folder / command.run)
    result = t.run(*(command.resume_words or command.words), check=False) if command.resume_words else None
    old = name == "overwrite" and same_tensors(
        t.folder / command.result, t.fixtures.files / command.result
    )  # it was not replaced yet
    if result is None or result.code or old:
        result = t.run(*command.words, codes=(0,))
    if result.code == 0:
        expected = undisturbed_run(t.fixtures, name) / "here"
        t.expect(
            same_tensors(t.folder / command.result, expected / command.result),
            "the resumed run ends with other bits",
        )
        named = Path(command.run) / "best.gguf"
        if best and (expected / named).is_file():
            t.expect(same_tensors(t.folder / named, expected / named), "best.gguf differs")
        t.expect(
            read_metrics(t.folder / command.run) == read_metrics(expected / command.run),
            "the metrics differ",
        )
        t.check_gguf(t.folder / command.result)
        t.check_leftovers(t.folder)
    if name == "copies":
        t.expect(
            list_copies(t.folder) == ["c-2.gguf", "c-4.gguf", "c-LATEST.gguf"],
            f"the copies are {list_copies(t.folder)}",
        )
        shown = [
            json.loads(line)["step"] for line in (t.folder / "out" / "samples.jsonl").read_text().splitlines()
        ]
        t.expect(shown == [0, 2, 4], f"the steps of samples are {shown}")
    if name == "overwrite":
        t.expect((t.folder / "run" / "notes.txt").is_file(), "a file of the user in the folder is missing")


def count_checkpoints(folder: Path) -> int:
    """Count the checkpoints in a folder, those of replaced runs included."""
    return len(list(folder.rglob("checkpoint-[0-9]*.gguf")))


def list_copies(folder: Path) -> list[str]:
    """Return the names of checkpoints that are written next to the folder of the run."""
    return sorted(path.name for path in folder.glob("c-*.gguf"))


def same_tensors(one: Path, other: Path) -> bool:
    """Return whether two files have the same tensors, bit for bit."""
    if not one.is_file():
        return False
    left, right = (gguf.parse(path.read_bytes()) for path in (one, other))
    return left.infos == right.infos and left.data == right.data


def read_metrics(folder: Path) -> list[dict[str, object]]:
    """Return the metrics of a run without the times."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


KIND = Kind(
    name="kills",
    what="kill before each file operation, at random, and while resuming; then the same bits",
    count=count_trials,
    short=5,
    trial=trial,
)
