"""From choosing data to a merged file through HTTP, and runs that are stopped, resumed and found again."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamatrain.gguf.reader import open_gguf
from llamatrain.ui.runs import is_locked
from tests.helpers.cli import TINY, finished, lines, pairs_file, ran, same_bits, started, text_file, until
from tests.helpers.ui_client import Client, served, served_by_command

SMALL = {"ctx": "32", "batch": "2", "precision": "f32"}
LONG = {**SMALL, "iters": "1000000", "save_every": "0"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ui")
    text_file(folder), pairs_file(folder)
    ran("from-scratch", folder / "text.txt", *TINY, "--ctx", 256, "--iters", 4, "--out", folder / "base")
    (folder / "base" / "model.gguf").rename(folder / "base.gguf")
    return folder


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[Client]:
    with served(root) as found:
        yield found


def finetune(**options: str) -> dict[str, Any]:
    return {
        "command": "finetune",
        "base": "base.gguf",
        "data": "pairs.jsonl",
        "options": {**SMALL, **options},
    }


def test_from_data_to_a_merged_file(client: Client, root: Path) -> None:
    entries = {entry["name"]: entry["kind"] for entry in client.get("/api/files")["entries"]}
    assert entries["base.gguf"] == "model" and entries["pairs.jsonl"] == "data" and entries["base"] == "run"

    request = finetune(iters="6", val_split="0.2", eval_every="3", lora_r="4")
    preview = client.post("/api/preview", **request)
    runs = [run for row in preview["rows"] for sample in row["samples"] for run in sample["runs"]]
    assert any(trained for _, trained in runs) and not all(trained for _, trained in runs)
    assert "samples for validation" in preview["summary"][0]
    plan = client.post("/api/plan", **request)
    assert (
        plan["fits"]
        and plan["total"] > 1e6
        and plan["adapter"]
        and sum(plan["needs"].values()) == plan["total"]
    )

    folder = client.post("/api/start", **request)["folder"]
    assert folder == "runs/finetune-1"
    run = client.reach(folder, "finished", "failed")
    assert (run["state"], run["step"], run["iters"], run["error"]) == ("finished", 6, 6, "")
    assert run["line"].startswith("llamatrain finetune --out=runs/finetune-1") and run["log"]
    assert "<svg" in run["charts"] and "validation" in run["charts"] and "<script" not in run["charts"]
    assert run["results"] == ["adapter.gguf", "best.gguf"] and run["base"].endswith("base.gguf")
    assert b"<main>" in client.send("GET", f"/report?folder={folder}").body

    sources = [{"model": run["base"], "lora": f"{folder}/adapter.gguf"}, {"model": "base.gguf", "lora": ""}]
    for chat in (False, True, True):  # the second turn of a chat remembers the first
        body = {
            "name": "tab",
            "sources": sources,
            "prompt": "ab",
            "chat": chat,
            "sampling": {"n": 3, "temp": 0},
        }
        pieces = client.send("POST", "/api/chat", json.dumps(body).encode()).lines
        assert [piece["side"] for piece in pieces if piece.get("done")] == [0, 1]
        assert not any("error" in piece for piece in pieces)

    export = {"model": run["base"], "lora": f"{folder}/adapter.gguf", "out": f"{folder}/merged.gguf"}
    assert client.post("/api/export", **export)["path"] == f"{folder}/merged.gguf"
    assert "exists already" in client.refused("/api/export", **export)["error"]
    ran(
        "export-lora",
        root / "base.gguf",
        "--lora",
        root / folder / "adapter.gguf",
        "--out",
        root / "same.gguf",
    )
    same_bits(root / folder / "merged.gguf", root / "same.gguf")
    assert (
        client.send("GET", f"/download?path={folder}/merged.gguf").body == (root / "same.gguf").read_bytes()
    )


def test_a_new_model_from_text(client: Client) -> None:
    options = {
        "vocab_size": "bytes",
        "embd": "32",
        "head": "4",
        "layer": "1",
        "ff": "32",
        "iters": "2",
        **SMALL,
    }
    request = {"command": "from-scratch", "data": "text.txt", "tokens_of": "base.gguf", "options": options}
    assert client.post("/api/preview", **request)["rows"]
    assert client.post("/api/plan", **request)["parameters"] > 1000
    run = client.reach(client.post("/api/start", **request)["folder"], "finished", "failed")
    assert run["state"] == "finished" and run["results"] == ["model.gguf"] and run["base"] == ""
    out = f"{run['folder']}/small.gguf"
    client.post("/api/export", model=f"{run['folder']}/model.gguf", out=out, type="q8_0")
    kinds = {tensor.type.name for tensor in open_gguf(Path(out)).tensors.values()}
    assert "Q8_0" in kinds


def test_rows_of_preferences_say_which_answer_they_are(client: Client, root: Path) -> None:
    rows = [
        {"prompt": "a", "chosen": "good", "rejected": "bad"},
        {"prompt": "b", "chosen": "yes", "rejected": "no"},
    ]
    (root / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = client.post("/api/preview", **finetune(objective="dpo") | {"data": "choices.jsonl"})["rows"]
    samples = [sample for row in found for sample in row["samples"]]
    told = {(sample["kind"], text) for sample in samples for text, trained in sample["runs"] if trained}
    words = {(kind, text.partition("<")[0]) for kind, text in told}
    assert words == {("chosen", "good"), ("rejected", "bad"), ("chosen", "yes"), ("rejected", "no")}


def test_a_run_is_stopped_and_resumed(client: Client, root: Path) -> None:
    folder = client.post("/api/start", **finetune(**LONG, out="long"))["folder"]
    until(lambda: client.run(folder)["step"] > 5)
    live = client.run(folder)
    assert live["state"] == "running" and live["left"] > 0 and not live["resumable"] and live["memory"] != 0
    # a second tab sees the same run, and cannot start another one
    assert client.get("/api/runs")["runs"][0]["folder"] == folder
    assert "a run goes on in long" in client.refused("/api/start", **finetune())["error"]
    assert "a run goes on" in client.refused("/api/resume", folder=folder)["error"]

    client.post("/api/stop", folder=folder)
    stopped = client.reach(folder, "stopped", "failed")
    assert stopped["state"] == "stopped" and stopped["resumable"] and stopped["results"] == ["adapter.gguf"]
    assert "has ended" in client.refused("/api/stop", folder=folder)["error"]
    step = stopped["step"]
    assert client.refused("/api/resume", folder=folder, iters="many")["field"] == "iters"
    assert client.post("/api/resume", folder=folder, iters=str(step + 3))["folder"] == folder
    again = client.reach(folder, "finished", "failed")
    assert (again["state"], again["step"]) == ("finished", step + 3), again["log"]


def test_a_run_that_fails_says_why_and_leaves_nothing(client: Client, root: Path) -> None:
    (root / "empty.jsonl").write_text("")
    request = finetune() | {"data": "empty.jsonl"}
    folder = client.post("/api/start", **request)["folder"]
    until(lambda: client.run(folder)["state"] not in ("starting", "running"))
    until(lambda: not (root / folder).exists())
    failed = client.run(folder)
    assert failed["state"] == "failed" and "empty.jsonl" in failed["error"] and not failed["resumable"]


def test_modules_in_the_folder_are_not_imported(tmp_path: Path, root: Path) -> None:
    for name in ("base.gguf", "pairs.jsonl"):
        (tmp_path / name).symlink_to(root / name)
    for name in ("numpy", "json", "typer", "llamatrain"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a hostile module')")
    with served(tmp_path) as client:
        folder = client.post("/api/start", **finetune(iters="2"))["folder"]
        assert client.reach(folder, "finished", "failed")["state"] == "finished", client.run(folder)["log"]


def test_a_run_is_not_replaced_by_accident(client: Client, root: Path) -> None:
    before = (root / "base" / "metrics.jsonl").read_bytes()
    error = client.refused("/api/start", **finetune(out="base"))
    assert error["field"] == "out" and "already contains a run" in error["error"]
    assert (root / "base" / "metrics.jsonl").read_bytes() == before


def test_a_killed_run_ends_nothing_else(client: Client, root: Path) -> None:
    folder = client.post("/api/start", **finetune(**LONG, out="killed"))["folder"]
    until(lambda: client.run(folder)["step"] > 2)
    (process,) = (path for path in Path("/proc").glob("[1-9]*") if is_run(path, "--out=killed"))
    os.kill(int(process.name), signal.SIGKILL)
    run = client.reach(folder, "failed")
    assert "code -9" in run["error"] and run["resumable"]


def is_run(process: Path, word: str) -> bool:
    try:
        return word.encode() in (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def test_runs_of_the_command_line_are_found(client: Client, root: Path) -> None:
    with started(
        "finetune", root / "base.gguf", root / "pairs.jsonl", "--iters", 10**6, "--out", root / "other"
    ) as run:
        until(lambda: lines(root / "other") > 2, run)
        assert is_locked(root / "other")
        assert client.run("other")["state"] == "running elsewhere"
        assert "not started here" in client.refused("/api/stop", folder="other")["error"]
        run.send_signal(signal.SIGINT)
        finished(run)
    assert client.run("other")["state"] == "stopped" and client.run("other")["resumable"]


def test_ctrl_c_saves_the_run(root: Path) -> None:
    with served_by_command(root) as (client, server):
        folder = client.post("/api/start", **finetune(**LONG, out="last"))["folder"]
        until(lambda: client.run(folder)["step"] > 2)
        server.send_signal(signal.SIGINT)
        done = finished(server)
    assert done.code == 0 and "saving the run" in done.err and "--resume" in done.err
    assert not is_locked(root / "last") and (root / "last" / "checkpoint-LATEST.gguf").exists()
    with served(root) as again:  # a page that is opened later finds it
        assert again.run("last")["state"] == "stopped" and again.run("last")["resumable"]


def test_a_second_ctrl_c_ends_both_at_once(root: Path) -> None:
    with served_by_command(root) as (client, server):
        folder = client.post("/api/start", **finetune(**LONG, out="ended"))["folder"]
        until(lambda: client.run(folder)["step"] > 2)
        server.send_signal(signal.SIGINT)
        time.sleep(0.4)  # less is taken for one signal
        server.send_signal(signal.SIGINT)
        assert finished(server).code in (0, -signal.SIGINT, 130)  # 0: the run was saved by then
    until(lambda: not is_locked(root / "ended"), seconds=20)


def test_ctrl_c_without_a_run(root: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with served_by_command(root) as (client, server):
            assert client.get("/api/runs")["runs"]
            server.send_signal(number)
            assert finished(server).code == 0
