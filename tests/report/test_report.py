"""What a person sees of a run: on plain streams, on terminals, and when it goes wrong."""

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from llamatrain.report.format import line_interval
from llamatrain.report.metrics import Metrics
from llamatrain.report.records import Score, StepLine
from llamatrain.report.report import Report
from tests.helpers.step_records import line_of


class Run:
    """A report on a stream, with a clock that goes when it is told to."""

    def __init__(
        self,
        folder: Path,
        iters: int,
        encoding: str = "utf-8",
        width: int = 100,
        terminal: bool = False,
        **more: Any,
    ) -> None:
        self.now = 0.0
        self.folder = folder
        self.stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
        self.console = Console(
            file=self.stream, width=width, height=24, force_terminal=terminal, color_system=None
        )
        metrics = Metrics.create(folder / "metrics.jsonl")
        self.report = Report(metrics, iters=iters, console=self.console, clock=lambda: self.now, **more)

    def step(self, step: int, loss: float = 2.5, takes: float = 2.0, grad_norm: float | None = 0.8) -> None:
        self.now += takes
        self.report.on_step(line_of(step, loss, 1e-3, grad_norm, step * 512, takes, 512 / takes))

    def text(self) -> str:
        self.stream.flush()
        buffer = self.stream.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode(self.stream.encoding)

    def lines(self, start: str = "") -> list[str]:
        return [line for line in self.text().splitlines() if line.startswith(start)]


def scored(loss: float, tokens: int, error: float | None = None, right: float | None = None) -> Score:
    return Score(loss=loss, loss_error=error, accuracy=right, accuracy_error=right and 0.0043, tokens=tokens)


# ---- lines -----------------------------------------------------------------


def test_a_step_is_one_aligned_line(tmp_path: Path) -> None:
    run = Run(tmp_path, 100, every=1)
    with run.report:
        run.step(1, 8.25)
        run.step(2, 7.5, grad_norm=None)
        run.step(3, float("nan"), grad_norm=1234.5)
        run.report.on_validation(3, scored(2.25, 4096))
    assert run.text().splitlines() == [
        "step   1/100  loss  8.2500  lr 1.00e-03  norm  0.800      256 tok/s   0:02",
        "step   2/100  loss  7.5000  lr 1.00e-03      256 tok/s   0:04   3:16 left",
        "step   3/100  loss     nan  lr 1.00e-03  norm 1.2e+03      256 tok/s   0:06   3:14 left",
        " val   3/100  loss  2.2500  perplexity 9.49  4,096 tokens",
    ]


def test_a_line_says_where_in_the_data_it_is_and_how_sure_a_validation(tmp_path: Path) -> None:
    """And the last one says all that was done."""
    run = Run(tmp_path, 100, every=1)
    told = {
        "step": 40,
        "loss": 2.5,
        "lr": 1e-3,
        "grad_norm": None,
        "tokens": 20480,
        "seconds": 0.25,
        "tokens_per_second": 2048.0,
    }
    place = {"epoch": 3, "sample": 250, "samples": 1000, "total_seconds": 70.0}
    with run.report:
        run.report.on_step(StepLine(**told, **place))
        run.report.on_validation(40, scored(2.25, 4096, 0.0123, 0.25))
        run.report.end(tmp_path)
    lines = run.text().splitlines()
    told_in = "step  40/100  loss  2.5000  lr 1.00e-03  epoch 3  sample   250/1,000    2,048 tok/s    250 ms/step   0:00"
    assert lines[0] == told_in
    assert (
        lines[1]
        == " val  40/100  loss  2.2500 ± 0.0123  perplexity 9.49  accuracy 25.0 ± 0.43 %  4,096 tokens"
    )
    seen = "40 steps, 2.25 times through 1,000 samples, 20,480 tokens in 1:10, 1.75 s each"
    assert lines[-1] == f"{seen}; validation loss 2.2500 ± 0.0123, accuracy 25.0 ± 0.43 %"
    step, validation = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {name: step[name] for name in place} == place
    assert validation == {
        "step": 40,
        "val_loss": 2.25,
        "val_tokens": 4096,
        "val_loss_error": 0.0123,
        "val_accuracy": 0.25,
        "val_accuracy_error": 0.0043,
    }


def test_metrics_are_as_they_are_promised(tmp_path: Path) -> None:
    run = Run(tmp_path, 100)
    with run.report:
        run.step(1)
        run.step(2, grad_norm=None)
        run.report.on_validation(2, scored(2.25, 4096))
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {
            "step": 1,
            "loss": 2.5,
            "lr": 1e-3,
            "grad_norm": 0.8,
            "tokens": 512,
            "seconds": 2.0,
            "tokens_per_second": 256.0,
        },
        {"step": 2, "loss": 2.5, "lr": 1e-3, "tokens": 1024, "seconds": 2.0, "tokens_per_second": 256.0},
        {"step": 2, "val_loss": 2.25, "val_tokens": 4096},
    ]


def test_tokens_a_second_are_those_of_the_last_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, 5, every=5)
    with run.report:
        for step, takes in enumerate((60.0, 1.0, 1.0, 1.0, 30.0), 1):
            run.step(step, takes=takes)
    assert "    512 tok/s" in run.lines("step 5/5")[0]


@pytest.mark.parametrize(
    ("iters", "takes", "most"), [(256, 5.0, 150), (10_000, 1.5, 150), (10_000, 0.002, 21), (30, 2.0, 30)]
)
def test_lines_are_few_and_the_first_and_the_last_are_among_them(
    tmp_path: Path, iters: int, takes: float, most: int
) -> None:
    run = Run(tmp_path, iters)
    with run.report:
        for step in range(1, iters + 1):
            run.step(step, takes=takes)
        shown_at_once = run.lines("step")
    assert shown_at_once == run.lines("step")
    shown = [int(re.findall(r"\d+", line)[0]) for line in run.lines("step")]
    assert (shown[0], shown[-1]) == (1, iters)
    assert most / 3 < len(shown) <= most + 1
    assert len(set(shown)) == len(shown)


def test_slow_steps_are_not_silent_for_long(tmp_path: Path) -> None:
    run = Run(tmp_path, 100_000)
    with run.report:
        for step in range(1, 11):
            run.step(step, takes=200.0)
    assert len(run.lines("step")) == 6


def test_every_says_which_steps_have_a_line(tmp_path: Path) -> None:
    run = Run(tmp_path, 25, every=10)
    with run.report:
        for step in range(1, 26):
            run.step(step, takes=1e-4)
    assert [line.split()[1] for line in run.lines("step")] == ["1/25", "10/25", "20/25", "25/25"]


def test_a_run_that_stops_early_shows_its_last_step(tmp_path: Path) -> None:
    run = Run(tmp_path, 1000, every=100)
    with pytest.raises(KeyboardInterrupt), run.report:
        for step in range(1, 8):
            run.step(step)
        raise KeyboardInterrupt
    assert [line.split()[1] for line in run.lines("step")] == ["1/1000", "7/1000"]


@pytest.mark.parametrize(
    ("iters", "every"), [(1, 1), (150, 1), (151, 2), (256, 2), (750, 5), (10_000, 100), (0, 1)]
)
def test_strides_are_round(iters: int, every: int) -> None:
    assert line_interval(iters) == every


def test_the_header_is_aligned_and_wrapped_below_its_values(tmp_path: Path) -> None:
    run = Run(tmp_path, 10, width=40)
    with run.report:
        run.report.print_header(
            [
                ("model", "llama, 4 layers"),
                ("data", "one two three four five six seven eight"),
                ("to", "x" * 50),
            ]
        )
    assert run.text().splitlines() == [
        "model  llama, 4 layers",
        "data   one two three four five six seven",
        "       eight",
        f"to     {'x' * 33}",
        f"       {'x' * 17}",
        "",
    ]


def test_the_display_begins_with_the_header(tmp_path: Path) -> None:
    run = Run(tmp_path, 10, terminal=True)
    with run.report:
        run.report.print_header([("model", "llama")])
        run.report.log("compiling")
        assert run.text().endswith("compiling\n" + "─" * 32 + "  0/10  0:00")


def test_a_console_without_braille_gets_ascii(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "linux")
    run = Run(tmp_path, 2)
    with run.report:
        run.step(1)
        run.step(2, 1.5)
        run.report.end(tmp_path)
    assert "* training" in run.text()
    assert run.text().isascii()


def test_texts_of_others_stay_texts(tmp_path: Path) -> None:
    run = Run(tmp_path, 10, terminal=True)
    with run.report:
        run.report.log("[bold]a[/bold] \x1b[2J\nb :smile:")
        run.report.warn("[/] \u202e")
        run.report.print_header([("[red]n", "\x9b1m[link=x]v")])
        run.report.show_activity("[red]\x07")
        run.report.print_sample(5, "a[blue]\x1b]0;t\x07\r\n\tb\x00")
        run.step(1)
    shown = run.text()
    assert r"[bold]a[/bold] \x1b[2J\nb :smile:" in shown
    assert r"warning: [/] \u202e" in shown
    assert r"[red]n  \x9b1m[link=x]v" in shown
    assert r"│ a[blue]\x1b]0;t\x07\r" + "\n│     b\\x00\n" in shown.replace("\r\n", "\n")
    assert "\x07" not in shown
    assert not re.search(r"\x1b(?!\[(\?25[lh]|2K|\d*A))", shown)  # nothing but the display's own movements


def test_samples_are_of_a_limited_length(tmp_path: Path) -> None:
    run = Run(tmp_path, 10)
    with run.report:
        run.report.print_sample(5, "a\n" * 100)
        run.report.print_sample(6, "b" * 5000)
    first, second = run.text().split("sample at step 6\n")
    assert first.splitlines() == ["sample at step 5", *["│ a"] * 12, "│ ..."]
    assert second.count("b") == 1000
    assert second.rstrip().endswith("...")


def test_plain_streams_have_plain_lines(tmp_path: Path) -> None:
    """Whatever they can write: here ASCII, and an error for all else."""
    run = Run(tmp_path, 4, encoding="ascii")
    with run.report:
        run.report.print_header([("data", "Größe")])
        for step in range(1, 5):
            run.step(step, 1 / step)
        run.report.print_sample(4, "naïve")
        run.report.print_waves([0, 1, 0, -1], [0.5, 0, 0, 0])
        run.report.on_save(4, "runs/1/checkpoint-4.gguf")
        run.report.end(tmp_path)
    shown = run.text()
    assert shown.isascii()
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert "saved at step 4: runs/1/checkpoint-4.gguf\n" in shown
    assert "| na\\xefve" in shown
    assert ". target   o model   # both" in shown
    assert "* training" in shown
    assert (tmp_path / "loss.svg").read_text().startswith("<svg")


def test_the_end_draws_all_of_a_resumed_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {n}, "loss": {9 - n / 10}}}\n' for n in range(1, 61))
    )
    metrics = Metrics.resume(tmp_path / "metrics.jsonl", 50)
    stream = io.StringIO()
    with Report(metrics, iters=100, console=Console(file=stream, width=80)) as report:
        report.set_start(50)
        report.on_step(line_of(51, 3.0, 1e-3, None, 51, 0.1, 10.0))
        report.end(tmp_path)
    noise = re.search(r'class="training noise" points="([^"]*)"', (tmp_path / "loss.svg").read_text())
    assert noise
    assert len(noise[1].split()) == 51
    assert "loss by step" in stream.getvalue()


def test_a_picture_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    run = Run(tmp_path, 1)
    with run.report:
        run.step(1)
        run.report.end(tmp_path / "none")
    assert run.lines("warning: ")[0].endswith("cannot be written: No such file or directory")


@pytest.mark.parametrize("width", [40, 60, 80])
def test_on_a_terminal_no_line_is_too_wide(tmp_path: Path, width: int) -> None:
    run = Run(tmp_path, 2000, width=width, terminal=True)
    with run.report:
        run.report.set_start(990)
        for step in range(991, 1000):
            run.step(step)
        run.report.on_validation(999, scored(2.5, 4096))
        run.report.on_save(999, "x")
        run.report.print_waves([0.5] * 64, [0.1] * 64)
        below = list(run.console.render_lines(run.report._display(), pad=False))
    shown = [re.sub(r"\x1b\[[?\d]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", run.text())]
    assert max(map(len, shown)) <= width
    assert all(
        "999/2000" in line and "loss  2.5000" in line
        for line in shown
        if line.startswith("step") and "999" in line
    )
    assert len(below) == 12  # nine rows of waves, what they are, the loss so far, and one line of progress
    assert "999/2000" in "".join(segment.text for segment in below[-1])
    assert "loss 2.5000" in "".join(segment.text for segment in below[-2])


def test_a_step_that_is_not_printed_costs_little(tmp_path: Path) -> None:
    lines = [line_of(n, 2.3 / n, 1e-3 / 3, 0.8 / n, n * 512, 0.0004 / n, 1e6 / n) for n in range(1, 10_001)]
    costs = []
    with Report(
        Metrics.create(tmp_path / "metrics.jsonl"),
        iters=10**6,
        every=10**6,
        console=Console(file=io.StringIO()),
    ) as report:
        for first in range(0, 10_000, 1000):
            begun = time.process_time()
            for line in lines[first : first + 1000]:
                report.on_step(line)
            costs.append((time.process_time() - begun) / 1000)
    assert min(costs) < 60e-6  # 15 alone, 30 beside other processes; a line on the screen takes 1,000
