"""`llamatrain inspect`: what it shows, to people and to programs."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from llamatrain.adapters import peft
from llamatrain.cli.inspect import command
from llamatrain.cli.main import main
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import Kind, f32, numbers, string, strings, u32
from llamatrain.gguf.writer import create_gguf
from llamatrain.platform.escape import make_printable
from tests.helpers.adapter_files import adapter
from tests.helpers.cli import run
from tests.helpers.small_models import small
from tests.helpers.test_data import material
from tests.helpers.tiny_gguf import every_kind, llama_metadata, llama_tensors, write_arrays


def inspect(path: Path, *options: str) -> str:
    result = CliRunner().invoke(command, [str(path), *options], catch_exceptions=False)
    assert result.exit_code == 0 and not result.stderr
    return result.stdout


def facts(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(inspect(path, "--json"), parse_constant=refuse)


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_model_for_people(tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "tiny.gguf", llama_metadata(), llama_tensors())
    text = inspect(path)
    shown = rows(text)
    for row in (
        [str(path)],
        ["kind", "model"],
        ["architecture", "llama"],
        ["embedding_length", "32"],
        ["attention.layer_norm_rms_epsilon", "1e-05"],
        ["model", "llama"],
        ["tokens", "259", "values"],
        ["bos_token_id", "1", "<s>"],
        ["F32", "12", "26,912", "107,648"],
        ["total", "12", "26,912", "107,648"],
    ):
        assert row in shown, row
    assert "training state" not in text and max(map(len, text.splitlines())) <= 100


def test_types_stand_in_the_order_of_their_size(tmp_path: Path) -> None:
    infos = [TensorInfo("a", type_by_name("F32"), (8,)), TensorInfo("b", type_by_name("Q4_K"), (4, 256))]
    with create_gguf(tmp_path / "q.gguf", {"general.architecture": string("llama")}, infos) as out:
        for info in infos:
            out.write(info.name, [bytes(info.nbytes)])
    shown = rows(inspect(tmp_path / "q.gguf"))
    assert shown[-3:] == [
        ["Q4_K", "1", "1,024", "576"],
        ["F32", "1", "8", "32"],
        ["total", "2", "1,032", "608"],
    ]


def test_a_model_for_programs(tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "tiny.gguf", llama_metadata(), llama_tensors())
    found = facts(path)
    assert list(found) == ["kind", "architecture", "metadata", "tensors"]
    assert found["kind"] == "model" and found["architecture"] == "llama"
    assert (
        found["metadata"]["llama.block_count"] == 1 and len(found["metadata"]["tokenizer.ggml.tokens"]) == 259
    )
    assert found["metadata"]["llama.attention.layer_norm_rms_epsilon"] == float(np.float32(1e-5))
    assert found["tensors"][0] == {
        "name": "token_embd.weight",
        "type": "F32",
        "shape": [259, 32],
        "bytes": 33152,
    }


def test_an_adapter_shows_its_rank(tmp_path: Path) -> None:
    metadata = {
        "general.type": string("adapter"),
        "adapter.type": string("lora"),
        "adapter.lora.alpha": f32(16),
    }
    factors = {
        "q.weight.lora_a": np.zeros((4, 32), np.float32),
        "q.weight.lora_b": np.zeros((64, 4), np.float32),
    }
    shown = rows(inspect(write_arrays(tmp_path / "a.gguf", metadata, factors)))
    for row in (["kind", "adapter"], ["adapter.lora.alpha", "16.0"], ["rank", "4"]):
        assert row in shown, row


def test_every_kind_of_value_is_shown(tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "kinds.gguf", {**every_kind(), "long": string("word " * 50)}, {})
    found = facts(path)["metadata"]
    assert (
        found["a.UINT64"] == 2**64 - 1 and found["a.true"] is True and found["b.floats"] == [0.5, None, None]
    )
    assert found["b.nested"] == [["a", "", "bc"], [1, -2]] and found["b.bools"] == [True, False, True]
    text = inspect(path)
    assert ["a.float32", "0.1"] in rows(text) and "(250 characters)" in text
    assert "snö" in text and r"\x00" in text and "\x00" not in text and r"\udcff" in text


def test_a_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    metadata = {
        "general.name": string("\x1b[2J[bold]x[/nothing]"),
        "tokenizer.\x1b]0;": u32(1),
        "general.architecture": u32(3),
    }
    text = inspect(write_arrays(tmp_path / "t.gguf", metadata, {"\x1b": np.zeros(1, np.float32)}))
    assert "\x1b" not in text and r"\x1b[2J[bold]x[/nothing]" in text


@pytest.mark.parametrize(
    ("encoding", "shown"), [("utf-8", "é\\x1b\n"), ("ascii", r"\xe9\x1b" + "\n"), ("cp1252", "é\\x1b\n")]
)
def test_a_text_is_made_printable(encoding: str, shown: str) -> None:
    assert make_printable("é\x1b\n", encoding, keep="\n") == shown


def test_a_broken_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\3\0")
    monkeypatch.setattr(sys, "argv", ["llamatrain", "inspect", str(path)])
    with pytest.raises(SystemExit) as leaving:
        main()
    out, err = capsys.readouterr()
    assert (
        leaving.value.code == 1
        and not out
        and err.startswith(f"error: {path}: the header, at byte 4: ")
        and err.count("\n") == 1
    )


@pytest.mark.parametrize("tokens", [numbers(Kind.INT32, [1, 2]), u32(4), string("text")])
def test_a_vocabulary_of_another_kind_is_shown_all_the_same(tmp_path: Path, tokens: Any) -> None:
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.bos_token_id": f32(0.5),
        "tokenizer.ggml.eos_token_id": u32(9),
    }
    assert ["eos_token_id", "9"] in rows(inspect(write_arrays(tmp_path / "v.gguf", metadata, {})))


def test_a_tokens_number_is_a_number_that_the_vocabulary_has(tmp_path: Path) -> None:
    numbers_of = {"bos": u32(1), "eos": u32(2), "padding": f32(0.5), "unknown": string("x")}
    metadata = {f"tokenizer.ggml.{name}_token_id": value for name, value in numbers_of.items()}
    path = write_arrays(
        tmp_path / "v.gguf", {"tokenizer.ggml.tokens": strings(["<unk>", "<s>"]), **metadata}, {}
    )
    assert rows(inspect(path))[-4:] == [
        ["bos_token_id", "1", "<s>"],
        ["eos_token_id", "2", "(no", "such", "token)"],
        ["padding_token_id", "0.5"],
        ["unknown_token_id", "x"],
    ]


@pytest.mark.parametrize(
    ("name", "kind", "shown"),
    [
        ("vocab/ggml-vocab-llama-bpe.gguf", "vocabulary", ["tokens", "128,256", "values"]),
        ("ancestors/model.gguf", "model", ["F32", "21", "147,776", "591,104"]),
        ("ancestors/train-checkpoint.gguf", "checkpoint", ["optimizer", "2", "1,182,208"]),
        ("ancestors/lora-checkpoint.gguf", "checkpoint", ["iteration_count", "20"]),
    ],
)
def test_files_of_others(name: str, kind: str, shown: list[str]) -> None:
    text = inspect(material(name))
    assert ["kind", kind] in rows(text) and shown in rows(text)


# ---- adapters that are no GGUF ---------------------------------------------


def test_a_bin_of_the_ancestors() -> None:
    path = material("ancestors/lora.bin")
    shown, found = rows(inspect(path)), facts(path)
    for row in (["kind", "adapter"], ["rank", "4"], ["alpha", "4"], ["F32", "42", "13,637", "54,548"]):
        assert row in shown, row
    assert found["kind"] == "adapter" and found["metadata"] == {
        "format": "llama.cpp's old finetune",
        "rank": 4,
        "alpha": 4,
    }
    assert found["tensors"][0] == {
        "name": "token_embd.weight.loraA",
        "type": "F32",
        "shape": [64, 4],
        "bytes": 1024,
    }


def test_a_folder_of_peft_s(tmp_path: Path) -> None:
    h = small()
    peft.write_peft(tmp_path / "p", adapter(h, ["blk.0.attn_q.weight"]), "mine", h)
    for path in (tmp_path / "p", tmp_path / "p" / peft.CONFIG, tmp_path / "p" / peft.WEIGHTS):
        shown, found = rows(inspect(path)), facts(path)
        for row in (
            ["kind", "adapter"],
            ["format", "PEFT"],
            ["r", "4"],
            ["lora_alpha", "8"],
            ["F32", "2", "512", "2,048"],
        ):
            assert row in shown, row
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        assert found["metadata"]["base_model_name_or_path"] == "mine" and found["tensors"][0]["name"] == name


def test_folders_and_files_that_are_neither(tmp_path: Path) -> None:
    (tmp_path / "half.bin").write_bytes(b"algg" + bytes(7))
    (tmp_path / "wide.bin").write_bytes(
        b"algg" + np.array([1, 4, 4, 2, 9, 0, 2**32 - 1, 2**32 - 1], "<u4").tobytes() + b"a" * 9
    )
    (tmp_path / "p").mkdir()
    for name, told in (
        ("half.bin", "bytes should follow"),
        ("wide.bin", "should follow, but the file has"),
        ("p", "no adapter_config.json"),
    ):
        done = run("inspect", tmp_path / name)
        assert done.code == 1 and told in done.err and done.err.count("\n") == 1
    (tmp_path / "p" / peft.CONFIG).write_text("[]")
    assert "its JSON must be an object [invalid-json]" in run("inspect", tmp_path / "p").err
    (tmp_path / "p" / peft.CONFIG).write_text("{}")
    assert "No such file" in run("inspect", tmp_path / "p").err
