"""Runs that are killed, before each file operation, at any moment, or by a signal that asks: they go on, and end the same."""

import json
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

from torments import gguf
from torments.core import INTERRUPTED, Argument, Kind, Trial, judged, last_line
from torments.house import OFTEN, TINY, House
from torments.processes import ROOT

RANDOM, SIGNALS, EARLY = 240, 60, 24  # trials of those kinds in full
AGAIN = 3  # times that one run is killed, at most


@dataclass(frozen=True, kw_only=True)
class Command:
    """Something that is killed."""

    words: tuple[Argument, ...]
    result: str
    given: tuple[str, ...]
    again: tuple[Argument, ...] = ()  # how to go on, if not by the same words

    @property
    def run(self) -> str:
        return str(Path(self.result).parent)


TUNE: tuple[Argument, ...] = ("finetune", "base.gguf", "text.txt", *OFTEN, "--ctx", 32, "--out", "out")
BASE = ("base.gguf", "text.txt")
COPIED: tuple[Argument, ...] = ("--checkpoint-out", "c-ITERATION.gguf", "--sample-every", 2)
COMMANDS = {
    "from-scratch": Command(
        words=("from-scratch", "text.txt", *TINY, *OFTEN, "--out", "out"),
        result="out/model.gguf",
        given=("text.txt",),
        again=("from-scratch", "--resume", "out"),
    ),
    "lora": Command(
        words=(*TUNE, "--peft", "peft"),
        result="out/adapter.gguf",
        given=BASE,
        again=("finetune", "--resume", "out"),
    ),
    "full": Command(
        words=(*TUNE, "--full"), result="out/model.gguf", given=BASE, again=("finetune", "--resume", "out")
    ),
    "resume": Command(
        words=("from-scratch", "--resume", "run", "--iters", 6),
        result="run/model.gguf",
        given=("run", "text.txt"),
    ),
    "overwrite": Command(
        words=("from-scratch", "text.txt", *TINY, *OFTEN, "--seed", 3, "--out", "run", "--overwrite"),
        result="run/model.gguf",
        given=("run", "text.txt"),
        again=("from-scratch", "--resume", "run"),
    ),
    "copies": Command(
        words=("from-scratch", "text.txt", *TINY, *OFTEN, *COPIED, "--out", "out"),
        result="out/model.gguf",
        given=("text.txt",),
        again=("from-scratch", "--resume", "out", *COPIED[:2]),
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
        given=("base.gguf", "adapter.gguf", "merged.gguf"),
    ),
}
COMMANDS |= {  # whose files are those of others: they are killed at random moments alone
    "quantised": Command(
        words=("finetune", "q8.gguf", "chats.jsonl", *OFTEN, "--ctx", 32, "--out", "out"),
        result="out/adapter.gguf",
        given=("q8.gguf", "chats.jsonl"),
        again=("finetune", "--resume", "out"),
    ),
    "preference": Command(
        words=(
            "finetune",
            "base.gguf",
            "better.jsonl",
            *OFTEN,
            "--ctx",
            32,
            "--objective",
            "dpo",
            "--out",
            "out",
        ),
        result="out/adapter.gguf",
        given=("base.gguf", "better.jsonl"),
        again=("finetune", "--resume", "out"),
    ),
    "lbfgs": Command(
        words=(
            "from-scratch",
            "text.txt",
            *TINY,
            *OFTEN,
            "--arch",
            "gemma3",
            "--optimizer",
            "lbfgs",
            "--out",
            "out",
        ),
        result="out/model.gguf",
        given=("text.txt",),
        again=("from-scratch", "--resume", "out"),
    ),
}
NAMES = list(COMMANDS)
BY_OPERATION = NAMES[:7]


# ---- what an undisturbed run does ------------------------------------------


def undisturbed(house: House, name: str) -> Path:
    """The folder of a run of it that nothing happened to."""
    place = house.folder / "undisturbed" / name
    if not (place / "operations").is_file():
        shutil.rmtree(place, ignore_errors=True)
        trial = Trial(kind="undisturbed", number=0, seed=0, place=place, house=house)
        trial.given(*COMMANDS[name].given)
        plan = {"under": [str(trial.folder)], "count": str(place / "counted"), "sizes": str(place / "sizes")}
        ended = trial.run(*COMMANDS[name].words, plan=plan)
        if trial.faults or ended.code:
            raise SystemExit(
                f"error: an undisturbed {name} fails: {(trial.faults or [last_line(ended.err)])[0]}"
            )
        (place / "counted").rename(place / "operations")
        (place / "seconds").write_text(str(ended.wall))
    return place


def writes(house: House, name: str) -> list[int]:
    """The numbers of those operations that write."""
    sizes = (undisturbed(house, name) / "sizes").read_text().split()
    return [number for number, size in enumerate(sizes, 1) if int(size)]


def operations(house: House) -> list[tuple[str, int]]:
    """Every file operation of every command."""
    return [
        (name, n)
        for name in BY_OPERATION
        for n in range(1, int((undisturbed(house, name) / "operations").read_text()) + 1)
    ]


def count(house: House) -> int:
    return len(operations(house)) + RANDOM + SIGNALS + EARLY


# ---- trials ----------------------------------------------------------------


def trial(t: Trial) -> None:
    struck = operations(t.house)
    beyond = t.number - len(struck)
    name, n = struck[t.number] if beyond < 0 else (NAMES[beyond % len(NAMES)], 0)
    command = COMMANDS[name]
    t.given(*command.given)
    if name == "overwrite":
        (t.folder / "run" / "notes.txt").write_text("mine")
    before = held(t.folder / command.run) if command.run != "." else 0
    if n:
        t.run(
            *command.words,
            plan={"under": [str(t.folder)], "at": n, "do": "kill"},
            codes=(-signal.SIGKILL,),
            said=False,
        )
    elif beyond < RANDOM:
        for time in range(1 + beyond // len(NAMES) % AGAIN):  # and what goes on with it is killed, too
            at_random(t, command, signal.SIGKILL, real=beyond % 8 == 0, again=time > 0)
    else:
        number = t.random.choice([signal.SIGINT, signal.SIGTERM])
        at_random(t, command, number, real=True, early=beyond >= RANDOM + SIGNALS)
    check(t, name, before)


def at_random(
    t: Trial, command: Command, number: int, real: bool, early: bool = False, again: bool = False
) -> None:
    """A signal at some moment of a run that is a little longer than it needs to be."""
    seconds = (
        0.1
        if early
        else float((undisturbed(t.house, name_of(command)) / "seconds").read_text()) + (1.2 if real else 0)
    )
    words = command.again if again and command.again and held(t.folder / command.run) else command.words
    running = t.start(*words, real=real)
    moment = t.random.random() * seconds
    t.tell(f"signal {number} after {moment:.3f} s")
    running.until(lambda: False, moment)
    running.signal(number)
    ended = running.wait()
    t.codes.append(ended.code)
    codes = (0, -number) if number == signal.SIGKILL else (0, INTERRUPTED, 128 + number, -number)
    trace = ended.err.partition("Traceback")[2]
    if not trace or f"{ROOT}/llamatrain/" in trace:  # the interpreter's own first moments are its own
        t.faults += judged(ended, codes, said=False)


def name_of(command: Command) -> str:
    return next(name for name, each in COMMANDS.items() if each is command)


def check(t: Trial, name: str, before: int, best: bool = True) -> None:
    """What was there is there, and going on ends with the bits of a run that nothing happened to."""
    command = COMMANDS[name]
    if name == "export-lora":
        t.whole(t.folder / "merged.gguf")
    elif t.must(
        not before or held(t.folder / command.run), "no checkpoint of the run that was there is left"
    ):
        t.whole(t.folder / command.run)
    ended = t.run(*(command.again or command.words), judge=False) if command.again else None
    old = name == "overwrite" and same(
        t.folder / command.result, t.house.things / command.result
    )  # it was not replaced yet
    if ended is None or ended.code or old:
        ended = t.run(*command.words, codes=(0,))
    if ended.code == 0:
        good = undisturbed(t.house, name) / "here"
        t.must(
            same(t.folder / command.result, good / command.result),
            "what was gone on with ends with other bits",
        )
        named = Path(command.run) / "best.gguf"
        if best and (good / named).is_file():
            t.must(same(t.folder / named, good / named), "its best is another's")
        t.must(timeless(t.folder / command.run) == timeless(good / command.run), "its metrics are others")
        t.whole(t.folder / command.result)
        t.tidy(t.folder)
    if name == "copies":
        t.must(
            copies(t.folder) == ["c-2.gguf", "c-4.gguf", "c-LATEST.gguf"],
            f"of the copies there are {copies(t.folder)}",
        )
        shown = [
            json.loads(line)["step"] for line in (t.folder / "out" / "samples.jsonl").read_text().splitlines()
        ]
        t.must(shown == [0, 2, 4], f"samples are of steps {shown}")
    if name == "overwrite":
        t.must((t.folder / "run" / "notes.txt").is_file(), "a file of the user's in the folder is gone")


def held(folder: Path) -> int:
    """Checkpoints that are there, also of a run that was put aside."""
    return len(list(folder.rglob("checkpoint-[0-9]*.gguf")))


def copies(folder: Path) -> list[str]:
    """Checkpoints that lie beside the run's folder."""
    return sorted(path.name for path in folder.glob("c-*.gguf"))


def same(one: Path, other: Path) -> bool:
    """The same tensors, bit for bit."""
    if not one.is_file():
        return False
    left, right = (gguf.parse(path.read_bytes()) for path in (one, other))
    return left.infos == right.infos and left.data == right.data


def timeless(folder: Path) -> list[dict[str, object]]:
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


KIND = Kind(
    name="kills",
    what="killed before each file operation, at any moment, again while it is resumed; then the same bits",
    count=count,
    short=5,
    trial=trial,
)
