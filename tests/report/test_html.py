"""report.html of a run, and `report`: what was measured, and nothing that a browser would do."""

import json
import random
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from llamatrain.report.html import charts_section, run_page
from llamatrain.report.run_data import read_run_data
from llamatrain.report.series import RunSeries
from tests.helpers.cli import TINY, Done, metrics, ran, run, steps, text_file
from tests.report.test_plots import LINES

HOSTILE = "<script>alert(1)"
NAME = f"a{HOSTILE}<b>&amp;"
TASK = (
    *TINY,
    "--ctx",
    32,
    "--batch",
    2,
    "--eval-every",
    5,
    "--save-every",
    5,
    "--sample-every",
    5,
    "--seed",
    3,
    "--val-split",
    0.1,
)


class Seen(HTMLParser):
    """What a browser makes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.plots: dict[str, tuple[dict[str, str], dict[str, str]]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append((tag, found))
        if tag == "svg" and "data-x" in found:
            self.plot = self.plots.setdefault(found["aria-label"], (found, {}))
        if tag in ("polyline", "polygon") and self.plots:
            self.plot[1].setdefault(found["class"], found["points"])

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def points(self, plot: str, kind: str) -> list[tuple[float, float]]:
        """In steps and values, as the plot says that they are meant."""
        found, lines = self.plots[plot]
        (x0, x1), (y0, y1) = (map(float, found[name].split()) for name in ("data-x", "data-y"))
        pairs = (map(float, point.split(",")) for point in lines[kind].split())
        return [(x0 + x / 1000 * (x1 - x0), y0 + (1 - y / 1000) * (y1 - y0)) for x, y in pairs]


def seen(folder: Path) -> Seen:
    return Seen((folder / "report.html").read_text())


def undated(folder: Path) -> str:
    return re.sub(r"Drawn [-0-9: ]*", "", (folder / "report.html").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pages")
    folder = place / NAME
    text = text_file(place)
    ran(
        "from-scratch",
        text,
        *TASK,
        "--iters",
        20,
        "--sample-prompt",
        HOSTILE,
        "--note",
        HOSTILE,
        "--profile",
        "--out",
        folder,
    )
    return folder


# ---- what it shows ---------------------------------------------------------


@pytest.mark.parametrize(
    ("plot", "kind", "name"),
    [
        ("loss", "training noise", "loss"),
        ("loss", "validation", "val_loss"),
        ("learning rate", "training", "lr"),
        ("gradient norm", "training noise", "grad_norm"),
        ("tokens a second", "training noise", "tokens_per_second"),
    ],
)
def test_curves_are_those_of_the_metrics(whole: Path, plot: str, kind: str, name: str) -> None:
    page, lines = seen(whole), [line for line in metrics(whole) if name in line]
    low, high = map(float, page.plots[plot][0]["data-y"].split())
    drawn = page.points(plot, kind)
    assert np.allclose([step for step, _ in drawn], [line["step"] for line in lines], atol=0.02)
    expected = np.clip([line[name] for line in lines], None, high + 0.03 * (high - low))
    assert np.allclose([value for _, value in drawn], expected, atol=2e-4 * (high - low))


def test_a_validation_has_its_error(whole: Path) -> None:
    page, lines = seen(whole), [line for line in metrics(whole) if "val_loss" in line]
    band = [value for _, value in page.points("loss", "validation band")]
    expected = [line["val_loss"] + line["val_loss_error"] for line in lines]
    expected += [line["val_loss"] - line["val_loss_error"] for line in reversed(lines)]
    low, high = map(float, page.plots["loss"][0]["data-y"].split())
    assert np.allclose(band, expected, atol=2e-4 * (high - low))


def test_all_of_a_run_is_there(whole: Path) -> None:
    text = seen(whole).text
    for word in (
        "Samples",
        "Memory",
        "Profile",
        "Options",
        "Files",
        "step 20",
        "of 20",
        "model.gguf",
        "val-split",
        "ended: done",
    ):
        assert word in text, word
    assert text.count(f"\n{HOSTILE}") >= 4, "samples begin with their prompt"
    assert {"m-kept", "m-backward", "m-scratch"} <= {
        each.get("class", "").split(" ")[0] for _, each in seen(whole).tags
    }


def test_nothing_of_it_is_read_as_markup_or_asks_for_anything(whole: Path) -> None:
    page, text = seen(whole), (whole / "report.html").read_text()
    assert NAME in page.text and HOSTILE in page.text
    assert not {"script", "img", "link", "iframe", "b>", "object", "base"} & {tag for tag, _ in page.tags}
    assert not [
        each
        for _, each in page.tags
        if {"src", "href", "xlink:href"} & each.keys() or any(k.startswith("on") for k in each)
    ]
    assert not re.search(r"https?:|url\(|@import", text)
    (policy,) = [each["content"] for tag, each in page.tags if tag == "meta" and "http-equiv" in each]
    assert policy.startswith("default-src 'none'")


def test_hostile_files_are_shown_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 2}\n{"step": 2, "loss": "<b>", "lr": null, "seconds": "x"}\n'
    )
    (tmp_path / "samples.jsonl").write_text(
        json.dumps({"step": 1, "text": "</pre><script>x</script>\x00\x1b\ud800"}) + "\n[]\n"
    )
    (tmp_path / "config.toml").write_text(
        'iters = 5\nnote = "</dd><script>"\nlr = "\\u0000"\nx = [[["<i>"]]]\n'
    )
    told = {"facts": [["<i>", "<script>"], 5, ["a"]], "memory": {"calls": -1}, "ended": "<script>"}
    (tmp_path / "report.json").write_text(json.dumps(told))
    (tmp_path / "trace.json").write_text(
        json.dumps({"traceEvents": [{"name": "<i>", "cat": "<i>", "dur": 5, "args": {}}, 3]})
    )
    (tmp_path / "<script>.txt").write_text("")
    found = Seen(run_page(read_run_data(tmp_path)))
    assert not {"script", "i>"} & {tag for tag, _ in found.tags} and found.text.count("<script>") >= 5
    for name in ("samples.jsonl", "config.toml", "report.json", "trace.json"):
        (tmp_path / name).write_bytes(b"\xff[" * 1000)
    assert "Samples" not in Seen(run_page(read_run_data(tmp_path))).text


# ---- when it is drawn ------------------------------------------------------


def test_it_is_there_from_the_first_save_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = list[str]()
    from llamatrain.report import html_report

    before = html_report.write_text
    monkeypatch.setattr(html_report, "SLOW", 60.0)  # a busy machine may draw slowly
    monkeypatch.setattr(
        html_report, "write_text", lambda file, text: (pages.append(text), before(file, text))[1]
    )
    ran("from-scratch", text_file(tmp_path), *TASK, "--iters", 12, "--out", tmp_path / "run")
    shown = [re.search(r"<span>step</span><b>(\d+)</b><span>of 12", each) for each in pages]
    assert [each and int(each[1]) for each in shown] == [5, 10, 12, 12]
    assert "time left" in pages[0] and "time left" not in pages[-1]


def test_a_run_that_goes_on_keeps_its_samples(whole: Path, tmp_path: Path) -> None:
    def sampled(folder: Path) -> list[tuple[int, str]]:
        return [
            (line["step"], line["text"])
            for line in map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
        ]

    task = (text_file(tmp_path), *TASK, "--sample-prompt", "a")
    ran("from-scratch", *task, "--iters", 15, "--out", tmp_path / "one")
    ran(
        "from-scratch",
        *task,
        "--iters",
        10,
        "--lr-min",
        1e-4,
        "--decay-steps",
        14,
        "--warmup",
        1,
        "--out",
        tmp_path / "two",
    )
    ran(
        "from-scratch",
        "--resume",
        tmp_path / "two" / "checkpoint-5.gguf",
        "--iters",
        15,
        "--out",
        tmp_path / "three",
    )
    assert [step for step, _ in sampled(tmp_path / "one")] == [0, 5, 10, 15]
    assert [step for step, _ in sampled(tmp_path / "three")] == [0, 5, 10, 15]
    assert sampled(tmp_path / "three")[:3] == sampled(tmp_path / "two")
    shown = [text for text in seen(tmp_path / "three").texts if re.fullmatch(r"step \d+", text)]
    assert shown == ["step 15", "step 10", "step 5", "step 0"]


@settings(max_examples=100, deadline=None)
@given(LINES)
def test_whatever_the_figures_are_they_are_drawn(lines: list[dict]) -> None:
    every = [
        {**line, **({"lr": line["loss"], "grad_norm": line["loss"]} if "loss" in line else {})}
        for line in lines
    ]
    every = [
        {**line, **({"val_loss_error": line["val_loss"]} if "val_loss" in line else {})} for line in every
    ]
    drawn = charts_section(RunSeries.from_lines(every))
    assert Seen(drawn).tags and not re.search(r"\b(nan|inf)\b", drawn)


def test_the_waves_are_kept_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 8, "loss": 2}\n')
    lines = ({"step": n, "target": [0, 1, 0.5], "model": [None, 1e300, 0.25]} for n in (4, 8, 12))
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = [
        each
        for tag, each in Seen(run_page(read_run_data(tmp_path))).tags
        if tag == "svg" and each["aria-label"] == "wave"
    ]
    assert len(drawn) == 2  # what lies behind the last step is of a run that was given up


@pytest.mark.parametrize("name", ["report.html", "samples.jsonl", "report.json"])
def test_where_it_cannot_be_written_the_run_goes_on(tmp_path: Path, name: str) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    done = ran(
        "from-scratch",
        text_file(tmp_path),
        *TASK,
        "--iters",
        12,
        "--sample-prompt",
        "a",
        "--out",
        tmp_path / "run",
    )
    assert done.err.count("warning: ") == 1 and f"{name}: this is a folder" in done.err
    assert len(steps(tmp_path / "run")) == 12


def test_a_long_run_is_drawn_in_no_time(tmp_path: Path) -> None:
    noise = random.Random(1)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for n in range(1, 100_001):
            line = {
                "step": n,
                "loss": 2 + noise.gauss(0, 0.1),
                "lr": 1e-3,
                "grad_norm": 0.8,
                "tokens": 512 * n,
                "seconds": 0.01,
            }
            file.write(
                json.dumps(
                    {**line, "tokens_per_second": 51200.0, "epoch": 1, "sample": n, "total_seconds": 0.01 * n}
                )
                + "\n"
            )
    begun = time.process_time()
    text = run_page(read_run_data(tmp_path))
    assert time.process_time() - begun < 2.5  # it is 0.7 where nothing else runs
    assert len(text) < 200_000


# ---- the command -----------------------------------------------------------


def said(done: Done) -> str:
    assert done.err.count("\n") == 1 and not done.out, done
    return done.err


def test_it_is_the_page_again(whole: Path) -> None:
    before = undated(whole)
    (whole / "report.html").unlink()
    assert "report.html: the page of the run" in said(ran("report", whole))
    sizes = r'<td>[^<]*</td><td class="n">[^<]*B</td>'  # of files that were written after it
    assert re.sub(sizes, "", undated(whole)) == re.sub(sizes, "", before)


def test_an_older_run_has_one_too(whole: Path, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "config.toml"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    ran("report", tmp_path)
    text = seen(tmp_path).text
    assert "Options" in text and "Memory" not in text and "llamatrain from-scratch" in text


def test_several_lie_over_each_other(whole: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    ran("from-scratch", text_file(tmp_path), *TASK, "--lr", 0.002, "--iters", 10, "--out", other)
    out = tmp_path / "both.html"
    assert f"{out}: 2 runs in one page" in said(ran("report", whole, other, "--out", out))
    found = Seen(out.read_text())
    for plot, name in (("validation loss", "val_loss"), ("training loss, smoothed", "loss")):
        for number, folder in enumerate((whole, other)):
            drawn = [step for step, _ in found.points(plot, f"c{number}")]
            assert np.allclose(drawn, [line["step"] for line in metrics(folder) if name in line], atol=0.02)
    text = found.text.split("those that differ")[1]
    assert "lr" in text and "0.002" in text and "iters" in text and "val-split" not in text
    assert not {"script", "b>"} & {tag for tag, _ in found.tags}
    ran("report", other, whole, "--out", out)  # its own is replaced


def test_a_run_that_is_named_twice_is_one(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(whole.parent)
    out = tmp_path / "page.html"
    for words in ((whole, whole), (whole, f"{whole}/../{whole.name}"), (whole, Path(whole.name))):
        assert ran("report", *words, "--out", out).err == f"{out}: the page of the run\n"


def test_devices_are_left_alone(whole: Path) -> None:
    for out in ("/dev/stdout", "/dev/null"):
        done = run("report", whole, "--out", out)
        assert (done.code, done.err) == (
            1,
            f"error: {out}: this is a device or a pipe; give the name of a file [is-a-device]\n",
        )


def test_what_is_no_run_is_said(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("begun").mkdir()
    Path("begun/metrics.jsonl").write_text("")
    Path("mine.html").write_text("<html>mine</html>")
    for words, told in (
        (("none",), "none: no such folder; give the folder of a run [no-such-file]"),
        (("mine.html",), "mine.html: this is a file; give the folder of a run [not-a-run]"),
        (("empty",), "empty: the folder contains no run: metrics.jsonl is missing [not-a-run]"),
        (("begun",), "begun/metrics.jsonl: nothing to draw: the file contains no step yet [no-metrics]"),
        (
            (whole, "--out", "mine.html"),
            "mine.html: the file exists and was not written by llamatrain; choose another name [file-exists]",
        ),
        ((whole, "--out", "empty"), "empty: this is a folder; give the name of a file [is-a-folder]"),
        ((whole, "--out", "no/x.html"), "no/x.html: the folder does not exist [no-such-folder]"),
    ):
        done = run("report", *words)
        lost = "no such" in told or "does not exist" in told
        assert done.code == 1 + lost and said(done) == f"error: {told}\n"
    assert Path("mine.html").read_text() == "<html>mine</html>" and not Path("begun/report.html").exists()
    done = run("report")
    assert done.code == 2 and "missing argument 'RUN'" in said(done)


def test_a_damaged_line_is_said_and_passed_over(tmp_path: Path) -> None:
    good = [json.dumps({"step": n, "loss": 2.0}) for n in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join([*good[:2], '{"step": 3, "lo', "[]", *good[3:], '{"step": 6, "l'])
    )
    done = ran("report", tmp_path)
    assert (
        "warning: " in done.err
        and "metrics.jsonl: skipped line 3 and 2 others, which has no metrics of a step" in done.err
    )
    (tmp_path / "metrics.jsonl").write_text("\n".join([*good, '{"step": 6, "l']))  # a run that goes on
    assert "warning" not in ran("report", tmp_path).err
    assert len(seen(tmp_path).points("loss", "training noise")) == 5
