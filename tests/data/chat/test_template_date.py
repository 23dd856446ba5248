"""The day that a chat template reads is that on which a run began, whenever it goes on."""

import json
import tomllib
from datetime import date
from pathlib import Path

import pytest

from llamatrain.data.encode import Encoder
from llamatrain.data.find_files import find_sources
from llamatrain.data.options import DataOptions
from llamatrain.data.records import ChatRecord
from llamatrain.run import config
from tests.data.chat.test_encode import talk
from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.chat_templates import CHATML, LAYOUTS, Layout
from tests.helpers.cli import ran, run
from tests.helpers.llama_cpp import model_with

DATED = "{{ strftime_now('%d %b %Y') }} {{ date_string }} {{ datetime }}|" + CHATML


def text(day: str, template: str = DATED) -> str:
    tokenizer = ByteTokenizer(chat_template=template)
    encoder = Encoder(tokenizer, DataOptions(date=day), 64)
    with encoder.template:
        (sample,) = encoder.encode_record(ChatRecord(talk("hi", "ho")))
    return tokenizer.decode(sample.tokens).decode()


def test_a_template_reads_the_day_that_is_named() -> None:
    assert text("2024-02-29").startswith("29 Feb 2024 29 Feb 2024 Feb 29 2024|")


def identity(day: str, template: str, folder: Path) -> str:
    (path := folder / "c.jsonl").write_text(json.dumps({"messages": talk("hi", "ho")}))
    return Encoder(ByteTokenizer(chat_template=template), DataOptions(date=day), 64)._compute_identity(
        find_sources([str(path)])
    )


def test_tokens_are_known_by_the_day_where_the_template_reads_it(tmp_path: Path) -> None:
    assert identity("2024-02-29", DATED, tmp_path) != identity("2024-03-01", DATED, tmp_path)
    assert identity("2024-02-29", CHATML, tmp_path) == identity("2024-03-01", CHATML, tmp_path)


def test_a_run_that_goes_on_another_day_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(DATED, "<s>", "<|im_end|>", ("<|im_start|>",))
    base, data = model_with(layout.vocabulary(), tmp_path / "b.gguf"), tmp_path / "c.jsonl"
    data.write_text(f"{json.dumps({'messages': talk('hi', 'ho')})}\n" * 8)
    few = ("--batch", 1, "--ctx", 64, "--save-every", 1, "--schedule", "constant", "--warmup", 0)
    ran("finetune", base, data, *few, "--iters", 4, "--out", tmp_path / "whole")
    day = tomllib.loads((tmp_path / "whole" / "config.toml").read_text())["date"]
    assert day == date.today().isoformat()
    ran("finetune", base, data, *few, "--iters", 2, "--out", tmp_path / "two")

    class Later(date):
        @classmethod
        def today(cls) -> "Later":
            return cls(2031, 5, 17)

    monkeypatch.setattr(config, "date", Later)
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path / "empty"))  # the tokens of the day before are gone
    ran("finetune", "--resume", tmp_path / "two", "--iters", 4)
    losses = [losses_in(tmp_path / name / "metrics.jsonl") for name in ("whole", "two")]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert tomllib.loads((tmp_path / "two" / "config.toml").read_text())["date"] == day


def losses_in(metrics: Path) -> list[float]:
    lines = map(json.loads, metrics.read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("day", ["yesterday", "2024-2-29", "2023-02-29", "20240229"])
def test_a_day_that_is_none_is_refused(day: str, tmp_path: Path) -> None:
    base = model_with(LAYOUTS["chatml"].vocabulary(), tmp_path / "b.gguf")
    (tmp_path / "c.jsonl").write_text("{}")
    done = run("finetune", base, tmp_path / "c.jsonl", "--date", day)
    assert done.code == 2 and f"--date must be a day such as 2026-11-23 (got '{day}')" in done.err
