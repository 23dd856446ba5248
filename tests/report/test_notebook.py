"""Runs, sweeps and progress in notebooks: with a stand-in for IPython, and in a kernel where there is one."""

import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import llamatrain
from llamatrain.platform.notebook import NotebookBar, bar_html, in_notebook
from llamatrain.platform.terminal import LoggedBar, progress_bar, show_log
from llamatrain.report import notebook as drawn
from llamatrain.report.notebook import NotebookProgress, facts_html, table_html

SMALL = {"embd": 8, "head": 2, "layer": 1, "ctx": 8, "vocab_size": "8", "iters": 3}


class Well(HTMLParser):
    """Checks that all elements of a text are closed, and collects their names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.names = list[str](), list[str]()
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook shows, one entry for each drawing."""
    found: list[str] = []
    handle = SimpleNamespace(update=found.append)

    def display(html: str, display_id: bool) -> SimpleNamespace:
        assert display_id
        found.append(html)
        return handle

    python, module = ModuleType("IPython"), ModuleType("IPython.display")
    python.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    module.HTML, module.display = str, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return found


def test_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    shell = ModuleType("IPython")
    shell.get_ipython = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", shell)  # of a terminal
    assert not in_notebook()


def test_bars(shown: list[str]) -> None:
    assert in_notebook()
    with show_log(), progress_bar("reading <x>", total=4) as bar:
        assert isinstance(bar, NotebookBar)
        for _ in range(4):
            bar.update()
    assert "reading &lt;x&gt;: 0 of 4" in shown[0] and 'value="0" max="4"' in shown[0]
    assert len(shown) == 2 and "4 of 4" in shown[-1] and 'value="4"' in shown[-1]
    assert all(Well(each).names == ["div", "progress"] for each in shown)


def test_a_bar_that_is_not_shown(shown: list[str]) -> None:
    with progress_bar("reading", total=4) as bar:
        assert not isinstance(bar, NotebookBar | LoggedBar)
        bar.update()
    assert shown == []


def test_a_bar_without_a_total() -> None:
    assert "value" not in bar_html("x", 3, None) and 'max="1"' in bar_html("x", 0, 0)


def test_a_run_is_drawn_while_it_goes_on(shown: list[str], tmp_path: Path) -> None:
    run = llamatrain.from_scratch(out=tmp_path / "run", show=True, **SMALL)  # type: ignore[arg-type]
    assert "step 3 of 3" in shown[-1] and 'value="3" max="3"' in shown[-1]
    assert f"loss {run.losses[-1]:.4f}" in shown[-1] and "data:image/svg+xml" in shown[-1]
    shown.clear()
    llamatrain.from_scratch(out=tmp_path / "quiet", **SMALL)  # type: ignore[arg-type]
    assert shown == []


def test_drawings_are_rare(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("llamatrain.platform.notebook.time.monotonic", lambda: now)
    progress = NotebookProgress("finetune", 10_000, now)
    for step in range(1, 5001):
        now += 0.01
        progress.add({"step": step, "loss": 2.0, "tokens_per_second": 100.0}, now)
    assert 45 <= len(shown) <= 51
    assert "left" in shown[-1]


def test_a_loss_that_is_no_number(shown: list[str]) -> None:
    progress = NotebookProgress("finetune", None, 0.0)
    progress.add({"step": 1, "loss": None}, 1.0)
    progress.add({"step": 2, "val_loss": 3.0}, 2.0)
    assert "loss nan" in shown[0]


def test_the_result_of_a_run(tmp_path: Path) -> None:
    run = llamatrain.from_scratch(out=tmp_path / "<run>", **SMALL)  # type: ignore[arg-type]
    page = run._repr_html_()
    assert {"table", "img"} <= {*Well(page).names}
    assert "&lt;run&gt;" in page and "<run>" not in page and f"{run.losses[-1]:.4f}" in page
    for file in run.folder.iterdir():
        file.unlink()
    run.folder.rmdir()
    assert "img" not in Well(run._repr_html_()).names


def test_tables_escape_their_cells() -> None:
    for page in (facts_html([("a<b", "<script>")]), table_html(["<x>"], [["<y>"]])):
        assert "<script>" not in page and "<x>" not in page and "<y>" not in page and Well(page).names


def test_the_styles_of_a_picture_stay_apart() -> None:
    assert "<style" not in drawn.picture("<svg><style>text {}</style></svg>")


def test_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Callable[[int], str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text(words(2000))
    (tmp_path / "c.toml").write_text(
        'embd = 8\nhead = 2\nlayer = 1\nctx = 8\nvocab-size = "bytes"\niters = 2\nval-split = 0.2\n'
    )
    page = llamatrain.sweep("c.toml", "t.txt", lr=[1e-3, 1e-2])._repr_html_()
    assert Well(page).names.count("tr") == 3 and "0.01" in page


@pytest.fixture
def words() -> Callable[[int], str]:
    return lambda count: ("the quick brown fox " * count)[:count]


def test_in_a_kernel(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel run a notebook")
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    settings = ", ".join(f"{name}={value!r}" for name, value in SMALL.items())
    cell = f"import llamatrain\nllamatrain.from_scratch(out='run', show=True, {settings})"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs: list[Any] = book.cells[0].outputs
    pages = ["".join(each["data"]["text/html"]) for each in outputs if "text/html" in each.get("data", {})]
    assert len(pages) == 2  # the progress, drawn again in its place, and the result
    assert "step 3 of 3" in pages[0] and "<table>" in pages[1]
