"""What a run does before its first step: no more than it needs, and nothing twice."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from llamatrain.engine.plan import Plan, plan
from llamatrain.graph.tensor import Tensor
from llamatrain.train import graphs
from tests.cli.test_cli import loaded
from tests.helpers.cli import TINY, ran, text_file

OF_TEXT = {
    *(
        f"llamatrain.data.{name}"
        for name in ("corpus", "encode", "templates", "tokenizer.counting", "tokenizer.learning")
    ),
    *("llamatrain.commands.merge_adapters", "concurrent.futures", "jinja2", "tqdm"),
}


def test_a_run_without_text_loads_nothing_of_it(tmp_path: Path) -> None:
    words = [
        "llamatrain",
        "from-scratch",
        "--iters",
        "0",
        "--kernels",
        "reference",
        "--out",
        str(tmp_path / "run"),
    ]
    found = loaded(f"from llamatrain.cli.main import main; sys.argv = {words}; main()")
    assert "llamatrain.train.loop" in found and not OF_TEXT & found


def test_each_graph_of_a_run_is_laid_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def counted(outputs: Iterable[Tensor], **how: Any) -> Plan:
        done.append(len([*outputs]))
        return plan(outputs, **how)

    monkeypatch.setattr(graphs, "plan", counted)
    text = text_file(tmp_path)
    ran(
        "from-scratch",
        text,
        *TINY,
        "--ctx",
        32,
        "--val-split",
        0.2,
        "--iters",
        2,
        "--remat",
        "none",
        "--out",
        tmp_path / "run",
    )
    assert len(done) == 3  # gradients, the step, the loss of what is validated
