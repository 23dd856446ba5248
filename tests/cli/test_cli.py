"""The command itself: what it loads, what its help shows, what its words mean, and how it fails."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from llamatrain import __version__
from llamatrain.adapters.options import AdapterOptions
from llamatrain.cli import main as cli
from llamatrain.cli.typer_app import Command, make_app, with_options
from llamatrain.config.options import format_flag, option_specs
from llamatrain.data.options import DataOptions
from llamatrain.errors import LlamatrainError, UsageError
from llamatrain.run.options import TrainOptions
from llamatrain.run.request import FINETUNE_OPTIONS, FROM_SCRATCH_OPTIONS
from tests.helpers.cli import ran
from tests.helpers.cli import run as tried

HEAVY = {"numpy", "numba", "llvmlite", "gguf", "torch", "jinja2", "tokenizers", "tqdm", "pydantic"}


def loaded(code: str) -> set[str]:
    """The modules that a Python of its own has loaded behind `code`: what it takes to start, without a clock."""
    code = f"import sys\ntry:\n    exec({code!r})\nexcept SystemExit:\n    pass\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stderr.splitlines()[-1].split())


def test_the_package_is_imported_fast() -> None:
    assert loaded("import llamatrain") - loaded("pass") <= {"llamatrain"}


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--help",),
        ("finetune", "--help"),
        ("plan", "from-scratch", "--help"),
        ("ui", "--help"),
        ("nope",),
    ],
    ids=" ".join,
)
def test_help_loads_nothing_heavy(words: tuple[str, ...]) -> None:
    found = loaded(f"from llamatrain.cli.main import main; sys.argv = {['llamatrain', *words]}; main()")
    assert not HEAVY & found
    assert len(found) < 500
    if words[:1] == ("finetune",):  # nor a command that was not asked for
        names = ("", ".main", ".typer_app", ".help", ".finetune", ".from_scratch")
        assert {name for name in found if name.startswith("llamatrain.cli")} == {
            f"llamatrain.cli{name}" for name in names
        }
        assert {name for name in found if name.startswith("llamatrain.legacy")} == {
            f"llamatrain.legacy{name}" for name in ("", ".flags", ".translate")
        }


@pytest.mark.parametrize(
    "words", [("generate", "none.gguf"), ("plan", "finetune", "none.gguf", "x", "--batch", "2")], ids=" ".join
)
def test_a_command_holds_no_more_than_it_needs(words: tuple[str, ...]) -> None:
    """What typer loads to make values would stay for as long as a run lasts."""
    assert "pydantic" not in loaded(
        f"from llamatrain.cli.main import main; sys.argv = {['llamatrain', *words]}; main()"
    )


def test_it_is_a_module_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llamatrain", "--version"], check=True, capture_output=True, text=True
    )
    assert done.stdout == f"llamatrain {__version__}\n"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["llamatrain", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    return exit_info.value.code


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"llamatrain {__version__}\n"


def test_without_arguments_it_says_what_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 0
    assert "Usage: llamatrain" in capsys.readouterr().out


# ---- help ------------------------------------------------------------------

PAGES = [(), *((name,) for name in cli.COMMANDS), ("plan", "from-scratch"), ("plan", "finetune")]
CLASSES = {"from-scratch": FROM_SCRATCH_OPTIONS, "finetune": FINETUNE_OPTIONS}


def page(*words: str, columns: int = 100) -> str:
    found = CliRunner(env={"COLUMNS": str(columns)}).invoke(
        cli.app, [*words, "--help"], prog_name="llamatrain"
    )
    assert found.exit_code == 0 and not found.stderr
    return found.stdout


def flowing(shown: str) -> str:
    """Without the frames and the breaks of lines."""
    return " ".join(shown.replace("│", " ").split())


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
@pytest.mark.parametrize("columns", [60, 100])
def test_help_keeps_to_the_terminal(words: tuple[str, ...], columns: int) -> None:
    """No line is longer, and no sentence is cut."""
    shown = page(*words, columns=columns)
    assert max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown
    for each in (
        each
        for cls in CLASSES.get(words[-1] if words else "", ())
        for each in option_specs(cls).values()
        if not each.option.hidden
    ):
        assert each.option.sentence in flowing(shown), each.name


def test_options_stand_in_panels_of_their_purpose() -> None:
    shown = page("finetune")
    titles = re.findall(r"^╭─ (.+?) ─*╮$", shown, re.MULTILINE)
    assert titles == [
        "Where it is stored",
        "An adapter",
        "Adapters",
        "Preferences",
        "Embeddings",
        "Rewards",
        "Data",
        "Training",
        "Optimizer",
        "Learning rate",
        "When to stop",
        "Speed and memory",
        "The run",
        "Options",
    ]
    rates = shown[shown.index("─ Learning rate ─") : shown.index("─ When to stop ─")]
    declared_rates = [
        format_flag(each.name)
        for each in option_specs(TrainOptions).values()
        if each.panel == "Learning rate"
    ]
    assert re.findall(r"^│ (--[a-z-]+)", rates, re.MULTILINE) == declared_rates
    assert "[default: 4]" in shown and "2 / the width of the model" in flowing(shown)  # its own


def test_what_is_on_or_off_has_one_line() -> None:
    shown = page("from-scratch")
    for each in (
        each for cls in CLASSES["from-scratch"] for each in option_specs(cls).values() if each.kind is bool
    ):
        assert len(re.findall(rf"^│ {format_flag(each.name)}\b", shown, re.MULTILINE)) == 1
        assert shown.count(f"{format_flag(f'no_{each.name}')} ") == (each.default is not False), each.name


def test_both_names_of_a_command_are_told() -> None:
    for shown in (page(), page("plan")):
        assert "Also called train-from-scratch." in flowing(
            shown
        ) and "Also called finetune-lora." in flowing(shown)


def test_shells_complete_it() -> None:
    assert "--install-completion" in page() and "--install-completion" not in page("finetune")

    def completed(words: str) -> list[str]:
        env = {
            "_LLAMATRAIN_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        return CliRunner(env=env).invoke(cli.app, [], prog_name="llamatrain").stdout.split()

    assert completed("llamatrain ev") == ["evaluate"]
    assert completed("llamatrain from-scratch --optimizer ") == ["adamuon", "adamw", "lbfgs", "muon", "sgd"]
    assert "--lora-scaled" in completed("llamatrain generate --lora")


# ---- words -----------------------------------------------------------------

SLIPS: list[tuple[list[str], str]] = [
    (["--verzion"], "no such option --verzion; did you mean --version? [unknown-option]"),
    (["finetune", "--batchs", "3"], "no such option --batchs; did you mean --batch? [unknown-option]"),
    (
        ["finetune", "--quite-unknown"],
        "no such option --quite-unknown; see llamatrain finetune --help [unknown-option]",
    ),
    (
        ["plan", "finetune", "--lora-rr", "3"],
        "no such option --lora-rr; did you mean --lora-r? [unknown-option]",
    ),
    (["generat"], "no such command 'generat'; did you mean generate? [unknown-command]"),
    (
        ["train-from-scrath"],
        "no such command 'train-from-scrath'; did you mean train-from-scratch? [unknown-command]",
    ),
    (["plan", "finetun"], "no such command 'finetun'; did you mean finetune? [unknown-command]"),
    (["plan", "evaluate"], "no such command 'evaluate'; see llamatrain plan --help [unknown-command]"),
    (["generate"], "missing argument 'MODEL'; see llamatrain generate --help [missing-argument]"),
    (
        ["generate", "m.gguf", "x"],
        "got unexpected extra argument(s) (x); give the prompt with --prompt 'TEXT' [unexpected-argument]",
    ),
    (
        ["export-lora", "m.gguf"],
        "--out is missing; name the file to write, or a folder with --peft [missing-option]",
    ),
    (["from-scratch", "--batch"], "option '--batch' requires an argument [missing-value]"),
    (["from-scratch", "--batch", "x"], "--batch must be a whole number (got 'x') [invalid-option]"),
    (
        ["from-scratch", "--batch", "9" * 100_000],
        f"--batch must be a whole number (got '{'9' * 40}'...) [invalid-option]",
    ),
    (["from-scratch", "--lr", "nan"], "--lr must be a number (got nan) [invalid-option]"),
    (["from-scratch", "--lr", "-1"], "--lr must be 0 or more (got -1) [invalid-option]"),
    (
        ["from-scratch", "--optimizer", "adm"],
        "--optimizer must be adamuon, adamw, lbfgs, muon or sgd (got 'adm'); did you mean adamw? [invalid-option]",
    ),
    (
        ["from-scratch", "--memory", "6GQ"],
        "--memory: '6GQ' is not a size; write it as 6GB, 800MB or 6GiB [invalid-option]",
    ),
    (["from-scratch", "--out", ""], "--out: the path is empty [invalid-option]"),
    (
        ["from-scratch", "x", "--resume", "a", "--overwrite"],
        "--resume and --overwrite exclude each other [conflicting-options]",
    ),
    (
        ["generate", "m.gguf", "--lora-scaled", "a"],
        "option '--lora-scaled' requires 2 arguments [missing-value]",
    ),
    (
        ["generate", "m.gguf", "--lora-scaled", "a", "x"],
        "--lora-scaled must be a file and a number such as 0.5 (got 'a' 'x') [invalid-option]",
    ),
]


@pytest.mark.parametrize(("words", "told"), SLIPS)
def test_a_slip_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert run(monkeypatch, *words) == 2
    message, _, code = told.partition(" [")
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {message}") and printed.count("\n") == 1, printed
    assert printed.endswith(f" [{code}\n" if code else f"{message}\n"), printed


def test_a_group_without_a_command_shows_which_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "plan") == 2
    told = capsys.readouterr()
    assert (
        not told.out
        and told.err.startswith("error: ")
        and "llamatrain plan finetune" in told.err
        and told.err.count("\n") == 1
    )


@pytest.mark.parametrize(
    "long",
    ["9" * 100_000, "\x1b[2J" * 20_000, "a/" * 50_000, "ü" * 50_000],
    ids=["digits", "escapes", "path", "letters"],
)
@pytest.mark.parametrize(
    "words",
    [
        ["LONG"],
        ["--LONG"],
        ["from-scratch", "LONG"],
        ["from-scratch", "--batch", "LONG"],
        ["from-scratch", "--size", "LONG"],
        ["from-scratch", "--vocab-size", "LONG"],
        ["from-scratch", "--memory", "no LONG"],
        ["generate", "LONG"],
        ["finetune", "LONG", "x"],
    ],
    ids=" ".join,
)
def test_no_error_is_a_book(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    long: str,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *(word.replace("LONG", long) for word in words)) in (1, 2)
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and len(told) < 620
    assert told.strip().isprintable()


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "MODEL"],
        ["inspect", "MODEL"],
        ["evaluate", "MODEL", "TEXT"],
        ["finetune", "MODEL", "TEXT"],
        ["plan", "finetune", "MODEL", "TEXT"],
        ["export-lora", "MODEL", "--lora", "MODEL", "--out", "m.gguf"],
        ["preview", "TEXT", "--model", "MODEL"],
        ["from-scratch", "TEXT", "--vocab-from", "MODEL"],
        ["from-scratch", "--config", "MODEL"],
        ["from-scratch", "--resume", "MODEL"],
        ["from-scratch", "--checkpoint-in", "MODEL"],
        ["finetune", "--checkpoint-in", "MODEL", "TEXT"],
        ["finetune", "--resume", "MODEL"],
    ],
    ids=" ".join,
)
def test_a_file_that_is_not_there_is_no_slip_of_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("words " * 1000)
    assert (
        run(monkeypatch, *(word.replace("MODEL", "none.gguf").replace("TEXT", "text.txt") for word in words))
        == 2
    )
    assert re.search(r"^error: (.+/)?none\.gguf: .+\n\Z", capsys.readouterr().err, re.MULTILINE)
    assert not (tmp_path / "m.gguf").exists()


def test_nothing_is_read_into_what_follows_two_dashes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "generate", "--", "--lora-scaled") == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: --lora-scaled: No such file or directory; ")
    assert printed.endswith(" [no-such-file]\n") and printed.count("\n") == 1


def test_options_said_one_way_or_another() -> None:
    """Pairs as two words or with a sign; on and off."""
    found: dict[str, Any] = {}
    command = make_app()

    @command.command(cls=Command)
    @with_options(AdapterOptions, DataOptions)
    def told(data: Annotated[list[str] | None, typer.Argument()] = None, **said: Any) -> None:
        found.clear()
        found.update(said, data=data)

    def said(*words: str) -> dict[str, Any]:
        assert CliRunner().invoke(command, words, catch_exceptions=False).exit_code == 0
        return {name: value for name, value in found.items() if name != "data"}

    pairs = ((Path("a"), 0.5), (Path("b=c"), -2.0))
    assert said("--lora-scaled", "a", "0.5", "--lora-scaled", "b=c", "-2") == {"lora_scaled": pairs}
    assert said("--lora-scaled=a", "0.5", "--lora-scaled=b=c", "-2") == {"lora_scaled": pairs}
    assert said("--lora-scaled=a", "0.5", "text", "--", "--lora-scaled", "x") == {"lora_scaled": pairs[:1]}
    assert found["data"] == ["text", "--lora-scaled", "x"]
    assert said("--sample-start", "--lora-scaled") == {"sample_start": "--lora-scaled"}
    assert said("--pack", "--no-shuffle") == {"pack": True, "shuffle": False}
    assert said("--no-pack") == {"pack": False}  # over a file that says otherwise
    assert said() == {} and said("--val-split", "0") == {"val_split": 0.0}


def test_both_names_of_a_command_do_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without data, that is the sine wave."""
    monkeypatch.chdir(tmp_path)
    arenas = [
        json.loads(ran("plan", name, "--json").out)["arena"]
        for name in ("train-from-scratch", "from-scratch")
    ]
    assert arenas[0] == arenas[1]
    ran("train-from-scratch", "--iters", 1, "--sample-every", 0)
    assert (tmp_path / "runs" / "from-scratch-1" / "model.gguf").is_file()
    told = [tried("plan", name, "none.gguf", "x").err for name in ("finetune", "finetune-lora")]
    assert told[0] == told[1] and "none.gguf: No such file" in told[0]


# ---- errors ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (LlamatrainError("no room"), 1, "error: no room"),
        (UsageError("no sense"), 2, "error: no sense"),
        (LlamatrainError("\x1b[2J\nx"), 1, r"error: \x1b[2J\nx"),
        (OSError(28, "No space left on device", "a.bin"), 1, "error: a.bin: No space left on device"),
        (OSError(5, "Input/output error"), 1, "error: Input/output error"),
        (OSError("told nothing"), 1, "error: told nothing"),
        (MemoryError(), 1, "error: not enough memory; a smaller model, --ctx or --batch takes less"),
        (LlamatrainError("x" * 300), 1, f"error: {'x' * 300}"),
        (LlamatrainError("x" * 100_000 + " ends"), 1, f"error: {'x' * 195} ... {'x' * 100} ends"),
        (
            MemoryError("9 GiB"),
            1,
            "error: not enough memory (9 GiB); a smaller model, --ctx or --batch takes less",
        ),
    ],
)
def test_an_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    line: str,
) -> None:
    def fail(program: object, context: object) -> None:
        raise error

    monkeypatch.setattr(cli.AllCommands, "invoke", fail)
    assert run(monkeypatch) == code
    assert capsys.readouterr().err == line + "\n"


def test_an_interrupt_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(program: object, context: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.AllCommands, "invoke", stop)
    assert run(monkeypatch) == 130
    assert not capsys.readouterr().err.strip()


@pytest.mark.skipif(os.name == "nt", reason="streams are others there")
@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_streams_that_are_closed(closed: str) -> None:
    """Nothing is put into the place of another, nothing fails, and nothing has to be closed at the end."""
    code = (
        "import sys; from llamatrain.cli import main as cli; from llamatrain.errors import LlamatrainError\n"
        "def all(program, context):\n"
        "    print(sys.stdin.isatty(), sys.stdin.buffer.read(1), file=sys.stderr); sys.stdout.buffer.write(b'out')\n"
        "    raise LlamatrainError('failed')\n"
        "cli.AllCommands.invoke = all; sys.argv = ['llamatrain']; cli.main()"
    )
    words = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-W", "error", "-X", "dev", "-c", code]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ("" if "1>" in closed else "out")
    assert done.stderr == ("" if "2>" in closed else "False b''\nerror: failed\n")


@pytest.mark.skipif(os.name == "nt", reason="pipes break otherwise there")
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_leaves_is_no_error(tmp_path: Path, lines: int) -> None:
    """Few lines meet the closed pipe when they are flushed, many when they are printed."""
    printing = f"cli.AllCommands.invoke = lambda program, context: print('line\\n' * {lines})"
    code = f"import sys\nfrom llamatrain.cli import main as cli\nsys.argv = ['llamatrain']\n{printing}\ncli.main()"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
