"""`evaluate --report RUN`: results in the folder of a run, and on its page."""

import json
from pathlib import Path
from typing import Any

import pytest

from llamatrain.report.evaluation_rows import evaluation_rows, format_table
from llamatrain.report.evaluations import EVALUATIONS, MAX_KEPT, add_evaluation, read_evaluations
from llamatrain.report.html import run_page
from llamatrain.report.run_data import read_run_data
from tests.helpers.cli import TINY, ran, run, text_file
from tests.run.test_from_scratch_errors import refused

RESULT: dict[str, Any] = {
    "loss": 1.5,
    "loss_error": 0.25,
    "perplexity": 4.48,
    "accuracy": 0.5,
    "tokens": 1200,
    "kl_divergence": 0.125,
    "choices": [{"file": "a.jsonl", "acc": 0.75, "acc_error": 0.01, "acc_norm": None}],
    "exact_match": [{"file": "b.jsonl", "exact_match": 0.25}],
    "base": {
        "loss": 2.0,
        "tokens": 1200,
        "choices": [{"file": "a.jsonl", "acc": 0.5}],
        "exact_match": [{"file": "b.jsonl", "exact_match": 0.0}],
    },
}


def test_rows() -> None:
    rows = {row.name: row for row in evaluation_rows(RESULT)}
    assert [*rows] == [
        *("loss", "perplexity", "accuracy", "tokens", "KL(base || model)"),
        *("a.jsonl: acc", "b.jsonl: exact match"),
    ]
    assert rows["loss"].change == "-0.5" and rows["a.jsonl: acc"].change == "+25.00"
    assert rows["b.jsonl: exact match"].change == "+25.00" and rows["KL(base || model)"].base is None
    table = format_table(RESULT, "ascii")
    assert "1.5 +- 0.25" in table and "75.00 +- 1 %" in table and table.isascii()
    assert len({line.index("model") for line in table.splitlines()[:1]}) == 1


def test_page_of_a_run(tmp_path: Path) -> None:
    data, folder = text_file(tmp_path), tmp_path / "run"
    ran("from-scratch", data, *TINY, "--ctx", 32, "--iters", 3, "--out", folder)
    other = tmp_path / "other"
    ran("from-scratch", data, *TINY, "--ctx", 32, "--iters", 1, "--seed", 5, "--out", other)
    assert "Evaluations" not in (folder / "report.html").read_text()
    more = ("--compare", other / "model.gguf", "--report", folder, "--ctx", 32)
    for _ in range(2):  # the same evaluation replaces the older one
        done = ran("evaluate", folder / "model.gguf", data, *more, "--json")
    page, (line,) = (folder / "report.html").read_text(), (folder / EVALUATIONS).read_text().splitlines()
    assert json.loads(line)["result"] == json.loads(done.out)
    assert "Evaluations" in page and "KL(base || model)" in page
    assert "model.gguf, base: model.gguf, on text.txt" in page
    ran("evaluate", folder / "model.gguf", data, "--report", folder, "--ctx", 32)
    assert len(read_evaluations(folder)) == 2
    # a run that replaces this one begins without them
    ran("from-scratch", data, *TINY, "--ctx", 32, "--iters", 2, "--out", folder, "--overwrite")
    assert not (folder / EVALUATIONS).exists()
    refused(run("evaluate", folder / "model.gguf", data, "--report", tmp_path), 1, "metrics.jsonl")
    refused(run("evaluate", folder / "model.gguf", data, "--report", tmp_path / "none"), 2, "none")


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for number in range(MAX_KEPT + 5):
        add_evaluation(tmp_path, f"number {number}", RESULT)
    kept = read_evaluations(tmp_path)
    assert len(kept) == MAX_KEPT and kept[-1].title == f"number {MAX_KEPT + 4}"


@pytest.mark.parametrize(
    "lines",
    [
        ["not JSON", '{"title": "a"}', '{"title": 1, "result": {}}', "[" * 100_000, "3"],
        [json.dumps({"title": "<script>" * 1000, "result": {"loss": 1, "loss_error": "x", "base": [1]}})],
        [
            json.dumps(
                {
                    "title": "a",
                    "result": {"loss": 10**400, "choices": [3, {"acc": "x"}, {"file": {}, "acc": 1}]},
                }
            )
        ],
        [
            json.dumps(
                {"title": "a", "result": {"choices": {"acc": 1}, "accuracy": True, "exact_match": None}}
            )
        ],
        ['{"title": "a", "result": {"loss": NaN, "tokens": -Infinity, "perplexity": 1e999, "accuracy": 2}}'],
        ["x" * 10_000_000],
    ],
)
def test_damaged_files(lines: list[str], tmp_path: Path) -> None:
    (tmp_path / EVALUATIONS).write_text("\n".join(lines))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    page = run_page(read_run_data(tmp_path))
    assert "<script>" not in page and "nan" not in page.lower().replace("finance", "")
    add_evaluation(tmp_path, "new", RESULT)
    assert read_evaluations(tmp_path)[-1].title == "new"
