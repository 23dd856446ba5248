"""The door for Python: what a notebook does with it, what it prints (nothing), how it fails, and whose signals it takes."""

import gc
import io
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
from llamatrain.machine.terminal import bar, shown
from llamatrain.recipe.interrupts import CallerInterrupts
from llamatrain.train.programs import Programs
from tests.runs import ROOT, ran, same_bits, started, steps, text_file, until
from tests.runs import finished as ended
from tests.runs import lines as lines_of_metrics

TINY = dict[str, Any](vocab_size="bytes", embd=32, head=4, layer=2, ff=64, ctx=32, batch=4, precision="f32")
WORDS = ("--ctx", 32, "--batch", 4, "--vocab-size", "bytes", "--embd", 32, "--head", 4, "--layer", 2, "--ff", 64)
WORDS = (*WORDS, "--precision", "f32", "--val-split", 0.1, "--eval-every", 5)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Terminal]:
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
    assert "iters is 12 from now on, and was 6" in more.notes
    assert [step for step, _ in more.validations] == [5, 6, 10, 12]
    assert more.perplexity == math.exp(more.validations[-1][1])
    assert {"config.toml", "metrics.jsonl", "loss.svg", "checkpoint-LATEST.gguf"} <= {file.name for file in run.folder.iterdir()}

    found = llamatrain.evaluate(str(more.result), text, ctx=32)
    assert found.perplexity == math.exp(found.loss) and found.tokens > 5000 and found.bits_per_byte

    adapter = llamatrain.finetune(more.result, text, iters=4, lora_r=2, lr=1e-2, out="tuned")
    assert adapter.result == Path("tuned/adapter.gguf") and len(adapter.losses) == 4 and adapter.perplexity is None
    beside = llamatrain.evaluate(more.result, text, ctx=32, lora=[adapter.result]).loss
    merged = llamatrain.export_lora(more.result, lora=adapter.result, out="merged.gguf", check="some words")
    assert (merged.tensors, merged.merged, merged.copied) == (21, 14, 7) and merged.bytes < merged.path.stat().st_size
    assert merged.check and merged.check.largest < 1e-4
    assert llamatrain.evaluate(merged.path, text, ctx=32).loss == pytest.approx(beside, rel=1e-5) != found.loss

    model = llamatrain.load(merged.path, threads=1)
    said = model.generate("ab", n=20, seed=1)
    assert said == "".join(model.stream("ab", n=20, seed=1)) == model.generate(b"ab", n=20, seed=1)
    assert said == ran("generate", merged.path, "--prompt", "ab", "-n", 20, "--seed", 1, "--threads", 1).out
    both = zip(model.stream("ab", n=5, temp=0), model.stream("xy", n=5, temp=0), strict=False)
    assert model.generate("ab", n=5, temp=0).startswith("".join(one for one, _ in both))
    assert model.generate("ab", temp=0) and model.notes == (
        "the context of 32 tokens is full; a larger ctx takes more, ctx_shift goes on",
    )
    with pytest.raises(llamatrain.UsageError, match=r"^5 is no prompt: it takes a text, or bytes$"):
        model.generate(5)  # type: ignore[arg-type]


def test_it_learns_what_the_command_learns(tmp_path: Path) -> None:
    """To the bit, and again in the same process."""
    text = text_file(tmp_path)
    with started("from-scratch", text, "--iters", 8, "--out", tmp_path / "command", *WORDS) as process:
        assert ended(process).code == 0
    for _ in range(2):
        run = llamatrain.from_scratch(text, iters=8, val_split=0.1, eval_every=5, out="python", overwrite=True, **TINY)
        assert run.losses == [line["loss"] for line in steps(tmp_path / "command")]
        same_bits(run.result, tmp_path / "command" / "model.gguf")
    assert (tmp_path / "command" / "config.toml").read_text() == (tmp_path / "python" / "config.toml").read_text()


def test_without_data_it_is_the_sine_wave(tmp_path: Path) -> None:
    run = llamatrain.from_scratch(iters=2, sample_every=1)
    assert run.folder == Path("runs/from-scratch-1") and len(run.losses) == 2 and not run.validations
    stopped = llamatrain.from_scratch(max_time="1s", iters=10**6, batch=1)
    assert not stopped.finished and stopped.reason == "the time is up" and stopped.steps == len(stopped.losses) < 10**6


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of other libraries' own, which are looked at, too
def test_what_a_call_took_is_let_go() -> None:
    gc.collect()
    gc.disable()
    try:
        llamatrain.from_scratch(iters=1)
        assert not [each for each in gc.get_objects() if isinstance(each, Programs)]
    finally:
        gc.enable()


def test_show_prints_what_the_command_prints(quiet: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    llamatrain.from_scratch(iters=2, out="one", show=True)
    times = re.compile(
        r" +[\d,.]+ tok/s| +[\d.]+ m?s/step|in \d+:\d\d, [\d.]+ m?s each| +\d+:\d\d( left)?|memory.*(\n +.*)*|one|two|compil.*\n"
    )
    command = ran("from-scratch", "--iters", 2, "--out", "two").err
    assert times.sub("", told.getvalue()) == times.sub("", command) and "step 2/2" in command
    monkeypatch.setattr(sys, "stderr", Terminal())
    with bar("nobody looks", total=1) as silent, shown(), bar("somebody looks", total=1) as seen:
        assert silent.disable and not seen.disable


# ---- errors ----------------------------------------------------------------

SLIPS: list[tuple[Callable[[], object], str]] = [
    (lambda: llamatrain.from_scratch(itters=3), "there is no option itters; did you mean iters?"),
    (lambda: llamatrain.from_scratch(iters=-3), "iters -3 cannot be; it takes 0 or more, and less than 2^31"),
    (lambda: llamatrain.from_scratch(memory="much"), "memory: 'much' is no size; write it as 6GB, 800MB or 6GiB"),
    (lambda: llamatrain.from_scratch(flash=False, loss="squared-error"), "flash=False and loss squared-error exclude each other"),
    (lambda: llamatrain.from_scratch(delta=1e-3), "delta means nothing without past; leave it out"),
    (lambda: llamatrain.from_scratch("x.txt", val=3), "val 3 cannot be; it takes a list"),
    (lambda: llamatrain.from_scratch(["x.txt"]), "'x.txt' is no path: files are named one by one, options by keyword"),  # type: ignore[arg-type]
    (
        lambda: llamatrain.finetune("none.gguf", "x.txt"),
        "none.gguf: No such file or directory",
    ),
    (llamatrain.finetune, "no model: name a GGUF file, and the data to train on"),
    (lambda: llamatrain.evaluate("none.gguf", "x", json=True), "there is no option json"),
    (lambda: llamatrain.evaluate("none.gguf"), "no data: name files (text, JSON, CSV, Parquet), folders or globs"),
    (lambda: llamatrain.load("none.gguf"), "none.gguf: No such file or directory"),
    (
        lambda: llamatrain.export_lora("b.gguf", out="m.gguf"),
        "there is nothing to merge: name an adapter with lora or lora_scaled",
    ),
]


@pytest.mark.parametrize(("slip", "told"), SLIPS, ids=[told for _, told in SLIPS])
def test_errors_speak_python(slip: Callable[[], object], told: str) -> None:
    with pytest.raises(llamatrain.LlamatrainError) as failed:
        slip()
    assert str(failed.value) == told


def test_a_folder_is_free_again_after_an_error(tmp_path: Path) -> None:
    llamatrain.from_scratch(iters=1, out="mine")
    told = "resume mine goes on with it, overwrite removes it, another out leaves it alone"
    for _ in range(2):
        with pytest.raises(llamatrain.LlamatrainError, match=told):
            llamatrain.from_scratch(out="mine")
    with pytest.raises(llamatrain.LlamatrainError, match="go on with `llamatrain from-scratch --resume mine`"):
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
    with pytest.raises(KeyboardInterrupt, match="the run is saved; resume='mine' goes on with it"):
        llamatrain.from_scratch(iters=300, out="mine")
    thread.join()
    assert 0 < len(steps(Path("mine"))) < 300
    run = llamatrain.from_scratch(resume="mine")
    assert run.losses == whole.losses
    same_bits(run.result, whole.result)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_before_there_is_anything_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("llamatrain.recipe.run.settle", lambda *_: signal.raise_signal(signal.SIGINT))
        llamatrain.from_scratch(iters=2, out="mine")
    assert not Path("mine").exists()
    assert llamatrain.from_scratch(iters=2, out="mine").finished


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt) as error, CallerInterrupts() as interrupts:
        interrupts.saving = True
        signal.raise_signal(signal.SIGINT)
        assert interrupts.asked == signal.SIGINT
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
