"""The door for Python: what a notebook does with it, what it prints (nothing), how it fails, and whose signals it takes."""

import gc
import inspect
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamatrain
from llamatrain.commands.evaluate import EvaluateOptions
from llamatrain.config.options import option_specs
from llamatrain.data.options import DataOptions
from llamatrain.errors import UsageError
from llamatrain.platform.terminal import progress_bar, show_log
from llamatrain.preference.options import PreferenceOptions
from llamatrain.run.request import FINETUNE_DEFAULTS, FINETUNE_OPTIONS, FROM_SCRATCH_OPTIONS
from llamatrain.run.signals import CallerInterrupts
from llamatrain.train.programs import TrainPrograms
from tests.helpers.cli import ROOT, ran, same_bits, started, steps, text, text_file, until
from tests.helpers.cli import finished as ended
from tests.helpers.cli import lines as lines_of_metrics
from tests.helpers.errors import raises

TINY = dict[str, Any](vocab_size="bytes", embd=32, head=4, layer=2, ff=64, ctx=32, batch=4, precision="f32")
WORDS = (
    "--ctx",
    32,
    "--batch",
    4,
    "--vocab-size",
    "bytes",
    "--embd",
    32,
    "--head",
    4,
    "--layer",
    2,
    "--ff",
    64,
)
WORDS = (*WORDS, "--precision", "f32", "--val-split", 0.1, "--eval-every", 5)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def quiet(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Terminal]:
    """Nothing is printed, be it on a terminal."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.chdir(tmp_path)
    yield terminal
    assert not terminal.getvalue()
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Tests may be run where Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_importing_it_loads_nothing() -> None:
    code = "import sys, llamatrain; dir(llamatrain); print(*{'numpy', 'numba', 'typer'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert not done.stdout.strip() and not done.stderr
    assert {name for name in dir(llamatrain) if name in llamatrain.__all__} == set(llamatrain.__all__)
    assert all(getattr(llamatrain, name) for name in llamatrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trained'"):
        _ = llamatrain.trained  # type: ignore[attr-defined]


def test_a_notebook(tmp_path: Path) -> None:
    text = text_file(tmp_path)
    run = llamatrain.from_scratch(text, val_split=0.1, iters=6, eval_every=5, out="mine", **TINY)
    assert (run.folder, run.result, run.steps) == (Path("mine"), Path("mine/model.gguf"), 6)
    assert run.finished and run.reason == "done" and run.notes == ()
    more = llamatrain.from_scratch(resume=run.folder, iters=np.int64(12))
    assert len(more.losses) == more.steps == 12 and more.losses[:6] == run.losses
    assert "iters is now 12 (it was 6)" in more.notes
    assert [step for step, _ in more.validations] == [5, 6, 10, 12]
    assert more.perplexity == math.exp(more.validations[-1][1])
    assert {"config.toml", "metrics.jsonl", "loss.svg", "checkpoint-LATEST.gguf"} <= {
        file.name for file in run.folder.iterdir()
    }

    found = llamatrain.evaluate(str(more.result), text, ctx=32)
    assert found.perplexity == math.exp(found.loss) and found.tokens > 5000 and found.bits_per_byte

    adapter = llamatrain.finetune(more.result, text, iters=4, lora_r=2, lr=1e-2, out="tuned")
    assert (
        adapter.result == Path("tuned/adapter.gguf")
        and len(adapter.losses) == 4
        and adapter.perplexity is None
    )
    beside = llamatrain.evaluate(more.result, text, ctx=32, lora=[adapter.result]).loss
    merged = llamatrain.export_lora(more.result, lora=adapter.result, out="merged.gguf", check="some words")
    assert (merged.tensors, merged.merged, merged.copied) == (
        21,
        14,
        7,
    ) and merged.bytes < merged.path.stat().st_size
    assert merged.check and merged.check.largest < 1e-4
    assert (
        llamatrain.evaluate(merged.path, text, ctx=32).loss == pytest.approx(beside, rel=1e-5) != found.loss
    )

    model = llamatrain.load(merged.path, threads=1)
    said = model.generate("ab", n=20, seed=1)
    assert said == "".join(model.stream("ab", n=20, seed=1)) == model.generate(b"ab", n=20, seed=1)
    assert said == ran("generate", merged.path, "--prompt", "ab", "-n", 20, "--seed", 1, "--threads", 1).out
    both = zip(model.stream("ab", n=5, temp=0), model.stream("xy", n=5, temp=0), strict=False)
    assert model.generate("ab", n=5, temp=0).startswith("".join(one for one, _ in both))
    assert model.generate("ab", temp=0) and len(model.notes) == 1
    assert model.notes[0].startswith("the context of 32 tokens is full; ")
    assert " ctx" in model.notes[0] and "ctx_shift" in model.notes[0] and "--" not in model.notes[0]
    with pytest.raises(llamatrain.UsageError, match=r"must be a text or bytes \(got 5\)$"):
        model.generate(5)  # type: ignore[arg-type]


def test_it_learns_what_the_command_learns(tmp_path: Path) -> None:
    """To the bit, and again in the same process."""
    text = text_file(tmp_path)
    with started("from-scratch", text, "--iters", 8, "--out", tmp_path / "command", *WORDS) as process:
        assert ended(process).code == 0
    for _ in range(2):
        run = llamatrain.from_scratch(
            text, iters=8, val_split=0.1, eval_every=5, out="python", overwrite=True, **TINY
        )
        assert run.losses == [line["loss"] for line in steps(tmp_path / "command")]
        same_bits(run.result, tmp_path / "command" / "model.gguf")
    assert (tmp_path / "command" / "config.toml").read_text() == (
        tmp_path / "python" / "config.toml"
    ).read_text()


def test_without_data_it_is_the_sine_wave(tmp_path: Path) -> None:
    run = llamatrain.from_scratch(iters=2, sample_every=1)
    assert run.folder == Path("runs/from-scratch-1") and len(run.losses) == 2 and not run.validations
    stopped = llamatrain.from_scratch(max_time="1s", iters=10**6, batch=1)
    assert (
        not stopped.finished
        and stopped.reason == "the time is up"
        and stopped.steps == len(stopped.losses) < 10**6
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of other libraries' own, which are looked at, too
def test_what_a_call_took_is_let_go() -> None:
    gc.collect()
    gc.disable()
    try:
        llamatrain.from_scratch(iters=1)
        assert not [each for each in gc.get_objects() if isinstance(each, TrainPrograms)]
    finally:
        gc.enable()


def test_show_prints_what_the_command_prints(
    quiet: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    llamatrain.from_scratch(iters=2, out="one", show=True)
    times = re.compile(
        r" +[\d,.]+ tok/s| +[\d.]+ m?s/step|in \d+:\d\d, [\d.]+ m?s each| +\d+:\d\d( left)?|memory.*(\n +.*)*|one|two|compil.*\n"
    )
    command = ran("from-scratch", "--iters", 2, "--out", "two").err
    assert times.sub("", told.getvalue()) == times.sub("", command) and "step 2/2" in command
    monkeypatch.setattr(sys, "stderr", Terminal())
    with (
        progress_bar("nobody looks", total=1) as silent,
        show_log(),
        progress_bar("somebody looks", total=1) as seen,
    ):
        assert not silent.is_enabled and seen.is_enabled


# ---- data in memory, and what goes on meanwhile -----------------------------


ROWS = [{"prompt": f"{number}?", "completion": text(9, number)} for number in range(30)]
FEW = dict[str, Any](TINY, iters=4, batch=2)


def test_rows_are_trained_as_those_of_a_file_and_lie_with_the_run(tmp_path: Path) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    of_file = llamatrain.from_scratch("rows.jsonl", out="file", **FEW)
    of_rows = llamatrain.from_scratch(ROWS, out="rows", **FEW)
    assert of_rows.losses == of_file.losses
    same_bits(of_rows.result, of_file.result)
    (data,) = Path("rows").glob("data-*.jsonl")
    assert data.read_bytes() == Path("rows.jsonl").read_bytes()


def test_a_run_of_rows_goes_on_with_nothing_else_also_elsewhere(tmp_path: Path) -> None:
    whole = llamatrain.from_scratch(ROWS, val=ROWS[:3], out="whole", eval_every=2, **{**FEW, "iters": 8})
    first = llamatrain.from_scratch(ROWS, val=ROWS[:3], out="first", eval_every=2, save_every=2, **FEW)
    first.folder.rename("moved")
    more = llamatrain.from_scratch(resume="moved", iters=8)
    assert (
        len(more.losses) == 8
        and more.losses[:4] == first.losses
        and more.validations[:2] == first.validations
    )
    assert [step for step, _ in more.validations] == [step for step, _ in whole.validations]
    again = llamatrain.from_scratch(ROWS, val=ROWS[:3], resume="moved", iters=10)
    assert again.steps == 10 and len([*Path("moved").glob("data-*.jsonl")]) == 1


def test_rows_of_a_run_that_does_not_begin_leave_nothing(tmp_path: Path) -> None:
    for more in ({}, {"out": "new"}):
        with pytest.raises(llamatrain.LlamatrainError, match=r"no row has a token to train on"):
            llamatrain.from_scratch([{"prompt": "x" * 99, "completion": "y"}] * 3, **more, **FEW)
    assert not Path("new").exists() and not Path("runs").exists()
    run = llamatrain.from_scratch(iters=1, out="old")
    there = sorted(run.folder.iterdir())
    with pytest.raises(llamatrain.LlamatrainError, match="already contains a run"):
        llamatrain.from_scratch(ROWS, out="old", **FEW)
    assert sorted(run.folder.iterdir()) == there


def test_lists_of_paths_and_rows_are_data_of_other_functions_too(tmp_path: Path) -> None:
    some = text_file(tmp_path)
    run = llamatrain.from_scratch([some, str(some)], iters=1, **TINY)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert llamatrain.evaluate(run.result, ROWS, ctx=32) == llamatrain.evaluate(
        run.result, "rows.jsonl", ctx=32
    )
    shown = llamatrain.preview(
        [{"prompt": "1?", "completion": "one"}, {"prompt": "2?", "completion": "two"}], model=run.result, n=9
    )
    assert (
        len(shown) == 1
        and {each.partition("<")[0] for each in shown[0].trained} == {"one", "two"}
        and len(shown[0].tokens) == len(shown[0].weights)
    )
    single = llamatrain.preview(ROWS, model=run.result, n=3, pack=False, shuffle=False)
    assert all(
        shown.trained[0].startswith(row["completion"]) for shown, row in zip(single, ROWS, strict=False)
    )
    assert len(single) == 3 and "0?" in single[0].text


def test_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (TINY, {**TINY, "embd": 64}):
        plan = llamatrain.plan("from-scratch", text_file(tmp_path), **words)
        said = json.loads(
            ran("plan", "from-scratch", tmp_path / "text.txt", *WORDS, "--embd", words["embd"], "--json").out
        )
        assert plan.parameters == said["parameters"] and plan.batch == 4 and plan.precision == "f32"
        assert plan.fits and plan.total == sum(plan.needs.values())
    run = llamatrain.from_scratch(text_file(tmp_path), iters=0, **TINY)
    tuned = llamatrain.plan("finetune", run.result, ROWS, lora_r=4)
    assert tuned.parameters > 0 and not [*Path().glob("runs/finetune*")]
    with pytest.raises(llamatrain.LlamatrainError, match="memory is 1 MB"):
        llamatrain.plan("from-scratch", text_file(tmp_path), memory="1MB", **TINY)
    with pytest.raises(llamatrain.UsageError, match="no model"):
        llamatrain.plan("finetune")


def test_progress_is_told_line_by_line(tmp_path: Path) -> None:
    said = list[Any]()
    run = llamatrain.from_scratch(
        text_file(tmp_path), iters=3, val_split=0.1, eval_every=2, progress=said.append, **TINY
    )
    assert [line["loss"] for line in said if "loss" in line] == run.losses
    assert [(line["step"], line["val_loss"]) for line in said if "val_loss" in line] == run.validations
    assert said == [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]

    def ended(line: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llamatrain.from_scratch(iters=3, progress=ended)
    llamatrain.from_scratch(iters=1)


# ---- a chat ------------------------------------------------------------------


def test_a_chat(tmp_path: Path) -> None:
    run = llamatrain.from_scratch(text_file(tmp_path), iters=1, **TINY)
    with llamatrain.chat(run.result, ctx=512, system="Be brief.", temperature=0, n=8, threads=1) as chat:
        first = chat.say("hello")
        assert "".join(chat.stream("more")) == chat.messages[-1]["content"]
        assert [each["role"] for each in chat.messages] == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        assert chat.messages[0]["content"] == "Be brief." and chat.messages[2]["content"] == first
        assert any("template" in note for note in chat.notes)
        with pytest.raises(llamatrain.UsageError, match=r"must be a text \(got 5\)"):
            chat.say(5)  # type: ignore[arg-type]
    model = llamatrain.load(run.result, threads=1, ctx=512)
    assert model.generate("ab", n=9, temperature=0) == model.generate("ab", n=9, temp=0)
    with raises("no-thinking-switch", match="think=False"):
        model.chat(think=False)
    with model.chat(chat_template="llama3", n=3) as other:
        other.say("a")


# ---- what type checkers and editors know -------------------------------------


def test_the_types_of_options_are_those_of_the_dataclasses() -> None:
    script = ROOT / "scripts" / "api_options.py"
    assert subprocess.run([sys.executable, script, "--check"], cwd=ROOT, check=False).returncode == 0, (
        "run scripts/api_options.py"
    )


@pytest.mark.parametrize(
    "name",
    [
        "from_scratch",
        "finetune",
        "export_lora",
        "extract_lora",
        "control_vector",
        "merge",
        "evaluate",
        "preview",
        "load",
    ],
)
def test_signatures_and_docstrings_name_every_option(name: str) -> None:
    function = getattr(llamatrain, name)
    from llamatrain.api import option_types

    given = {
        "from_scratch": "FromScratchOptions",
        "finetune": "FinetuneOptions",
        "export_lora": "ExportLoraOptions",
        "extract_lora": "ExtractOptionsGiven",
        "control_vector": "ControlVectorOptionsGiven",
    }
    typed = getattr(option_types, given.get(name, f"{name.title()}OptionsGiven")).__annotations__
    known = inspect.signature(function).parameters
    assert typed.keys() <= known.keys() and "options" not in known
    assert all(f"\n    {option}: " in function.__doc__ for option in typed)
    assert "--" not in function.__doc__


@pytest.mark.slow
def test_a_type_checker_sees_typos(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    calls = {
        "llamatrain.from_scratch('a.txt', itters=3)": "itters",
        "llamatrain.from_scratch('a.txt', iters='3')": "iters",
        "llamatrain.finetune('m.gguf', [{'text': 'a'}], lora_r=8, optimizer='adam')": "optimizer",
        "llamatrain.load('m.gguf').generate('a', temperture=0)": "temperture",
        "llamatrain.plan('finetune', 'm.gguf', 'a.txt', lora_rank=8)": "",
        "llamatrain.from_scratch('a.txt', ['b.txt'], iters=3, lr=1e-3, val=[{'text': 'a'}], memory='1GB')": None,
        "llamatrain.chat('m.gguf', system='x', temperature=0, lora=['a.gguf'])": None,
        "llamatrain.plan('from-scratch', iters=3, measure=True)": None,
    }
    Path("calls.py").write_text("import llamatrain\n" + "\n".join(calls) + "\n")
    words = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file=",
        "--follow-imports=silent",
        "--ignore-missing-imports",
        "calls.py",
    ]
    env = {**os.environ, "MYPYPATH": str(ROOT), "MYPY_CACHE_DIR": str(tmp_path / "mypy")}
    said = subprocess.run(words, env=env, capture_output=True, text=True, check=False).stdout
    for number, (call, word) in enumerate(calls.items(), 2):
        about = [line for line in said.splitlines() if line.startswith(f"calls.py:{number}: error")]
        assert bool(about) == (word is not None) and (not word or word in about[0]), (call, said)


# ---- errors ----------------------------------------------------------------

SLIPS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: llamatrain.from_scratch(itters=3),
        "no such option itters; did you mean iters? [unknown-option]",
    ),
    (
        lambda: llamatrain.from_scratch(iters=-3),
        "iters must be 0 or more, and less than 2^31 (got -3) [invalid-option]",
    ),
    (
        lambda: llamatrain.from_scratch(memory="much"),
        "memory: 'much' is not a size; write it as 6GB, 800MB or 6GiB [invalid-option]",
    ),
    (
        lambda: llamatrain.from_scratch(flash=False, loss="squared-error"),
        "flash=False and loss squared-error exclude each other",
    ),
    (
        lambda: llamatrain.from_scratch(delta=1e-3),
        "stop_delta has no effect without stop_window; leave it out [unused-option]",
    ),
    (lambda: llamatrain.from_scratch("x.txt", val=3), "val must be a list (got 3) [invalid-option]"),
    (
        lambda: llamatrain.from_scratch(5),
        "5 is not data; give a path, a list of paths, or a list of rows",
    ),  # type: ignore[arg-type]
    (
        lambda: llamatrain.from_scratch([{"text": "a"}, 5]),
        "5 in a list is not data; give a path, a list of paths, or a list of rows",
    ),  # type: ignore[list-item]
    (
        lambda: llamatrain.from_scratch([{"text": {1, 2j}}]),
        "row 1 of the data cannot be written as JSON: complex 2j",
    ),
    (
        lambda: llamatrain.from_scratch(learning_rate=1e-3),
        "no such option learning_rate; it is called lr here [unknown-option]",
    ),
    (
        lambda: llamatrain.chat("none.gguf", temp=0, temperature=0),
        "temp and temperature are the same option",
    ),
    (lambda: llamatrain.plan("merge"), "from-scratch or finetune (got 'merge')"),  # type: ignore[call-overload]
    (
        lambda: llamatrain.finetune("none.gguf", "x.txt"),
        "none.gguf: No such file or directory",
    ),
    (llamatrain.finetune, "no model given; name a GGUF file"),
    (lambda: llamatrain.evaluate("none.gguf", "x", json=True), "no such option json [unknown-option]"),
    (
        lambda: llamatrain.evaluate("none.gguf"),
        "no data given; name files (text, JSON, CSV, Parquet), folders or globs",
    ),
    (lambda: llamatrain.load("none.gguf"), "none.gguf: No such file or directory"),
    (
        lambda: llamatrain.export_lora("b.gguf", out="m.gguf"),
        "no adapter to merge; name one with lora or lora_scaled, or convert b.gguf with type [no-adapter]",
    ),
]


@pytest.mark.parametrize(("slip", "told"), SLIPS, ids=[told for _, told in SLIPS])
def test_errors_speak_python(slip: Callable[[], object], told: str) -> None:
    with pytest.raises(llamatrain.LlamatrainError) as failed:
        slip()
    message, _, code = told.partition(" [")
    assert message in str(failed.value) and "--" not in str(failed.value)
    assert failed.value.code and code in ("", f"{failed.value.code}]"), failed.value.code


def test_a_folder_is_free_again_after_an_error(tmp_path: Path) -> None:
    llamatrain.from_scratch(iters=1, out="mine")
    told = "resume it with resume mine, replace it with overwrite, or choose another out"
    for _ in range(2):
        with pytest.raises(llamatrain.LlamatrainError, match=told):
            llamatrain.from_scratch(out="mine")
    with pytest.raises(
        llamatrain.LlamatrainError,
        match=r"checkpoint of from-scratch; .*llamatrain from-scratch --resume mine",
    ):
        llamatrain.finetune(resume="mine")
    assert llamatrain.from_scratch(iters=2, out="mine", overwrite=True).steps == 2


# ---- signals ---------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="signals are others there")
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_saves_the_run(tmp_path: Path) -> None:
    whole = llamatrain.from_scratch(iters=300, out="whole")

    def interrupt() -> None:
        until(lambda: lines_of_metrics(Path("mine")) > 0)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match=r"the run is saved; .*resume='mine'"):
        llamatrain.from_scratch(iters=300, out="mine")
    thread.join()
    assert 0 < len(steps(Path("mine"))) < 300
    run = llamatrain.from_scratch(resume="mine")
    assert run.losses == whole.losses
    same_bits(run.result, whole.result)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_before_there_is_anything_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("llamatrain.run.train.prepare_folder", lambda *_: signal.raise_signal(signal.SIGINT))
        llamatrain.from_scratch(iters=2, out="mine")
    assert not Path("mine").exists()
    assert llamatrain.from_scratch(iters=2, out="mine").finished


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt) as error, CallerInterrupts() as interrupts:
        interrupts.can_save = True
        signal.raise_signal(signal.SIGINT)
        assert interrupts.pending == signal.SIGINT
        signal.raise_signal(signal.SIGINT)
    assert not error.value.args


@pytest.mark.usefixtures("interruptible")
def test_signals_of_others_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    handlers = list[Any]()

    def train() -> None:
        handlers.append(llamatrain.from_scratch(iters=2))
        with CallerInterrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert handlers[0].finished and handlers[1] is signal.default_int_handler
    with CallerInterrupts():
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with CallerInterrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


# ---- defaults that are said ------------------------------------------------


def defaults_of(*classes: type, **others: Any) -> dict[str, Any]:
    """All options at their defaults, as a wrapper around these functions passes them on."""
    known = {name: each.default for cls in classes for name, each in option_specs(cls).items()}
    return {name: value for name, value in (known | others).items() if value is not None}


def test_defaults_may_be_said(tmp_path: Path) -> None:
    """Also of options that would have no effect beside the others; with other values those are refused."""
    text, usual = text_file(tmp_path), defaults_of(*FINETUNE_OPTIONS, **FINETUNE_DEFAULTS)
    run = llamatrain.from_scratch(text, **defaults_of(*FROM_SCRATCH_OPTIONS) | TINY, iters=2)
    again = llamatrain.from_scratch(
        text,
        checkpoint_in=run.result,
        **defaults_of(*FROM_SCRATCH_OPTIONS) | {"ctx": 32, "batch": 4},
        iters=2,
    )
    assert again.steps == 2
    more = {"ctx": 32, "iters": 2, "lora_r": 8, "precision": "f32"}
    first = llamatrain.finetune(run.result, text, **usual | more, out="first")
    then = llamatrain.finetune(run.result, text, lora_init=first.result, **usual | more, out="then")
    whole = llamatrain.finetune(run.result, text, **usual | more | {"full": True}, out="whole")
    minimized = llamatrain.finetune(run.result, text, **usual | more | {"optimizer": "lbfgs"}, out="lbfgs")
    assert {each.steps for each in (then, whole, minimized)} == {2}
    resumed = llamatrain.finetune(resume=then.folder, rslora=False, lora_r=8, patience=0, iters=3)
    assert resumed.steps == 3
    judging = defaults_of(EvaluateOptions, DataOptions, PreferenceOptions)
    assert llamatrain.evaluate(run.result, text, **judging).tokens > 5000
    for said in (
        {"rslora": True},
        {"lora_r": 4},
        {"optimizer": "lbfgs", "lr": 1e-4},
        {"patience": 2},
        {"gamma": 0.5},
    ):
        with pytest.raises(llamatrain.UsageError, match="has no effect"):
            llamatrain.finetune(run.result, text, lora_init=first.result, **more | {"lora_r": 8} | said)
    with pytest.raises(llamatrain.UsageError, match="shuffle has no effect for evaluate"):
        llamatrain.evaluate(run.result, text, shuffle=False)


def test_data_that_is_empty_is_refused() -> None:
    with pytest.raises(UsageError, match="empty list"):
        llamatrain.from_scratch([], iters=1)


def test_paths_to_validate_with(tmp_path: Path) -> None:
    """One path, or several in a list."""
    data, other = text_file(tmp_path), tmp_path / "other.txt"
    other.write_text(text(2000, 7))
    for number, val in enumerate((other, [other], str(other))):
        run = llamatrain.from_scratch(
            data, val=val, size="tiny", vocab_size="bytes", iters=1, ctx=32, out=tmp_path / str(number)
        )
        assert run.validations
