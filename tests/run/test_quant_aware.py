"""Runs with `--quant-aware`: the exported file is what was trained, to the last bit."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamatrain
from llamatrain.adapters import gguf as adapter_files
from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.engine import device as devices
from llamatrain.gguf import quants
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import type_by_name
from llamatrain.planner import time as forecasts
from tests.helpers import architecture_runs
from tests.helpers.architecture_models import mixtures, wide
from tests.helpers.cli import Argument, losses, metrics, ran, run, text, text_file, timeless
from tests.helpers.lora_runs import WIDE, base, random_adapter
from tests.helpers.mpi_programs import needs_mpi
from tests.helpers.multi_rank import Job, done_by, job
from tests.helpers.opaque_device import OpaqueDevice
from tests.helpers.preferences import lines as write_rows
from tests.helpers.preferences import rows
from tests.helpers.small_models import small
from tests.run.test_from_scratch_errors import refused

COMMON = ("--ctx", 32, "--batch", 2, "--seed", 5, "--lr", 1e-2, "--precision", "f32", "--iters", 6)
NEW = ("--vocab-size", "bytes", "--embd", 256, "--head", 4, "--layer", 1, "--ff", 256)
LORA = ("--lora-r", 3, "--rslora", "--lora-alpha", 5)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    (tmp_path / "val.txt").write_text(text(1500, seed=2))
    base(tmp_path / "base.gguf", WIDE, "Q8_0")
    return tmp_path


def last_validation(folder: Path) -> float:
    return [line["val_loss"] for line in metrics(folder) if "val_loss" in line][-1]


def exported_loss(path: Path) -> float:
    found = llamatrain.evaluate(path, "val.txt", ctx=32, batch=2, precision="f32")
    assert found.loss is not None
    return found.loss


def kinds(path: Path) -> dict[str, str]:
    return {name: tensor.type.name for name, tensor in open_gguf(path).tensors.items()}


def raw(path: Path) -> dict[str, bytes]:
    return {name: tensor.raw.tobytes() for name, tensor in open_gguf(path).tensors.items()}


def finetune(out: str, kind: str, *more: Argument, name: str = "base.gguf") -> list[Argument]:
    given = ("--val", "val.txt", *COMMON, "--quant-aware", kind, *more)
    return ["finetune", name, "text.txt", *given, "--out", out]


def from_scratch(out: str, kind: str, *more: Argument) -> list[Argument]:
    """Without a kind, an ordinary run."""
    rounding = ("--quant-aware", kind) if kind else ()
    return ["from-scratch", "text.txt", "--val", "val.txt", *NEW, *COMMON, *rounding, *more, "--out", out]


# ---- the exported file -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "q4_k"])
def test_a_new_model_is_written_as_it_was_validated(kind: str, place: Path) -> None:
    ran(*from_scratch("run", kind))
    model = place / "run" / "model.gguf"
    assert exported_loss(model) == last_validation(place / "run")
    masters = read_checkpoint(place / "run" / "checkpoint-6.gguf").weights
    wanted = {
        name: quants.encode(array, type_by_name(kinds(model)[name])).tobytes()
        for name, array in masters.items()
    }
    assert raw(model) == wanted
    assert {kind.upper(), "F32"} == {*kinds(model).values()}


def test_types_are_those_that_export_lora_chooses(place: Path) -> None:
    """Norms stay in float32, and so do matrices whose rows are no whole blocks."""
    more = ("--ff", 144, "--embd", 64)
    ran(*from_scratch("rounded", "q4_0", *more))
    ran(*from_scratch("plain", "", *more))
    ran("export-lora", "plain/model.gguf", "--type", "q4_0", "--out", "exported.gguf")
    found = kinds(place / "rounded" / "model.gguf")
    assert found == kinds(place / "exported.gguf")
    assert found["blk.0.ffn_down.weight"] == found["output_norm.weight"] == "F32"
    assert exported_loss(place / "rounded" / "model.gguf") == last_validation(place / "rounded")
    for key in ("general.file_type", "general.quantization_version"):
        values = {open_gguf(path).metadata[key] for path in ("rounded/model.gguf", "exported.gguf")}
        assert len(values) == 1


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "q4_k"])
def test_a_merged_adapter_is_what_was_validated(kind: str, place: Path) -> None:
    """Another scale than alpha / rank is folded into the adapter's file."""
    ran(*finetune("run", kind, *LORA))
    ran("export-lora", "base.gguf", "--lora", "run/adapter.gguf", "--out", "merged.gguf")
    assert exported_loss(place / "merged.gguf") == last_validation(place / "run")
    assert {kind.upper(), "F32"} == {*kinds(place / "merged.gguf").values()}


WAYS: dict[str, tuple[Argument, ...]] = {
    "merged adapters below it": ("--lora-scaled", "other.gguf", 0.5),
    "norms and the output": ("--target", "norms,output,attn_q"),
    "embeddings": ("--target", "token_embd,ffn_up"),
    "from an adapter": ("--lora-init", "other.gguf"),
    "recomputed": ("--remat", "block", "--grad-acc", 2),
}


@pytest.mark.parametrize("way", WAYS)
def test_adapters_of_all_kinds(way: str, place: Path) -> None:
    other = random_adapter(place / "other.gguf", WIDE, ["blk.0.attn_v.weight"], size=0.05)
    ran(*finetune("run", "q5_0", *WAYS[way]))
    lora = ("--lora-scaled", other, 0.5) if "--lora-scaled" in WAYS[way] else ()
    ran("export-lora", "base.gguf", *lora, "--lora", "run/adapter.gguf", "--out", "merged.gguf")
    assert exported_loss(place / "merged.gguf") == last_validation(place / "run")


def test_a_weight_that_keeps_its_type_is_rounded_to_that(place: Path) -> None:
    h = small(ff=144)
    base(place / "base.gguf", h, "F16")
    ran(*finetune("run", "q4_0", *LORA))
    ran("export-lora", "base.gguf", "--lora", "run/adapter.gguf", "--out", "merged.gguf")
    assert kinds(place / "merged.gguf")["blk.0.ffn_down.weight"] == "F16"
    assert exported_loss(place / "merged.gguf") == last_validation(place / "run")


def test_a_whole_model(place: Path) -> None:
    done = ran(*finetune("run", "iq4_nl", "--full"))
    assert exported_loss(place / "run" / "model.gguf") == last_validation(place / "run")
    assert "all weights are trained in F32 (Q8_0 ones are unpacked)" in " ".join(done.err.split())


def test_factors_of_a_new_model(place: Path) -> None:
    """Products of factors are rounded, not the factors."""
    ran(*from_scratch("run", "q4_0", "--lora-r", 4))
    assert exported_loss(place / "run" / "model.gguf") == last_validation(place / "run")


@pytest.mark.parametrize("arch", ["gemma3n", "qwen3moe", "granitehybrid"])
def test_other_architectures(arch: str, place: Path) -> None:
    """Stacks of experts are rounded, routers and taps are not; some weights are no matrices of one block."""
    shape = wide(arch)
    model = architecture_runs.base(place, shape)
    target = ("--target", "attention,experts") if mixtures(shape) else ()
    ran(*finetune("full", "q4_0", "--full", "--iters", 2, name=str(model)))
    ran(*finetune("lora", "q4_0", *target, "--iters", 2, name=str(model)))
    ran("export-lora", model, "--lora", "lora/adapter.gguf", "--out", "merged.gguf")
    for out, path in (("full", "full/model.gguf"), ("lora", "merged.gguf")):
        assert exported_loss(place / path) == pytest.approx(last_validation(place / out), rel=1e-6)


def test_preferences_compare_with_the_base_as_it_is(place: Path) -> None:
    """Rounding alone makes the trained model differ from the base, so that the first margin is not 0."""
    write_rows(place / "answers.jsonl", rows(20))
    given = (
        "--objective",
        "dpo",
        "--ctx",
        96,
        "--batch",
        2,
        "--iters",
        2,
        "--precision",
        "f32",
        "--lr",
        1e-3,
    )
    margins = {}
    for kind in ("q2_k", "none"):
        rounding = () if kind == "none" else ("--quant-aware", kind)
        ran("finetune", "base.gguf", "answers.jsonl", *given, *rounding, "--out", kind)
        margins[kind] = metrics(place / kind)[0]["margin"]
    assert margins["none"] == 0 != margins["q2_k"]


@pytest.mark.parametrize("way", ["lora", "full"])
def test_generated_answers_are_those_of_the_exported_model(way: str, place: Path) -> None:
    prompts = [{"prompt": f"say {number}"} for number in range(6)]
    write_rows(place / "prompts.jsonl", prompts[:4])
    write_rows(place / "others.jsonl", prompts[4:])
    (place / "reward.py").write_text("def reward(prompt, answer, row): return sum(answer.encode())\n")
    given = ("--objective", "grpo", "--reward", "reward.py", "--num-generations", 2, "--lr", 1e-2)
    lengths = ("--ctx", 64, "--batch", 4, "--max-completion-length", 12, "--iters", 3, "--precision", "f32")
    more = ("--quant-aware", "q4_0", "--val", "others.jsonl", *(("--full",) if way == "full" else ()))
    ran("finetune", "base.gguf", "prompts.jsonl", *given, *lengths, *more, "--out", "run")
    result = place / "run" / "model.gguf"
    if way == "lora":
        ran("export-lora", "base.gguf", "--lora", "run/adapter.gguf", "--out", "merged.gguf")
        result = place / "merged.gguf"
    answers = llamatrain.load(result).generate_many(prompts[4:], n=12, temp=0, parallel=4)
    wanted = np.mean([sum(answer.text.encode()) for answer in answers])
    assert wanted == [line["val_reward"] for line in metrics(place / "run") if "val_reward" in line][-1] > 0


# ---- what is learned ---------------------------------------------------------------------------


def test_it_learns_and_rounding_matters(place: Path) -> None:
    for kind in ("q2_k", "q8_0"):
        ran(*from_scratch(kind, kind, "--iters", 40))
        found = losses(place / kind)
        assert np.mean(found[-5:]) < np.mean(found[:5]) - 1
    ran(*from_scratch("plain", "", "--iters", 40))
    assert len({losses(place / name)[0] for name in ("plain", "q8_0", "q2_k")}) == 3


def test_bf16_and_samples(place: Path) -> None:
    done = ran(
        *from_scratch("run", "q4_0", "--precision", "bf16", "--sample-every", 3, "--sample-prompt", "a")
    )
    assert "weights rounded to q4_0" in " ".join(done.err.split())
    found = llamatrain.evaluate("run/model.gguf", "val.txt", ctx=32, batch=2, precision="bf16")
    assert found.loss == last_validation(place / "run")


def test_samples_are_those_of_the_exported_model(place: Path) -> None:
    more = ("--sample-every", 6, "--sample-prompt", "a")
    done = ran(*from_scratch("run", "q2_k", *more))
    shown = ran("generate", "run/model.gguf", "--prompt", "a", "-n", 8, "--temp", 0).out
    assert shown.strip() and "sample at step 6" in done.err


def test_a_device_with_memory_of_its_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for out, made in (("full", from_scratch), ("lora", finetune)):
        ran(*made(f"{out}-host", "q4_0", "--kernels", "reference"))
        with monkeypatch.context() as patch:
            patch.setitem(devices.FACTORIES, "torch-cpu", lambda *_: OpaqueDevice())
            ran(*made(out, "q4_0", "--device", "torch-cpu"))
        assert losses(place / out) == losses(place / f"{out}-host")


@pytest.mark.reference
@pytest.mark.parametrize("way", ["full", "lora"])
def test_torch(way: str, place: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    ran(*(from_scratch if way == "full" else finetune)("run", "q4_0", "--device", "torch-cpu"))
    result = place / "run" / "model.gguf"
    if way == "lora":
        ran("export-lora", "base.gguf", "--lora", "run/adapter.gguf", "--out", "merged.gguf")
        result = place / "merged.gguf"
    assert exported_loss(result) == pytest.approx(last_validation(place / "run"), rel=1e-5)


# ---- the same bits -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["new", "lora"])
def test_a_resumed_run_ends_with_the_same_bits(way: str, place: Path) -> None:
    """The checkpoint has the weights as they are trained, and not as they are rounded."""
    made, result = (from_scratch, "model.gguf") if way == "new" else (finetune, "adapter.gguf")
    more = ("--iters", 12, "--save-every", 3, "--eval-every", 4, "--grad-acc", 2, "--keep", 9)
    ran(*made("whole", "q4_0", *more))
    command = "from-scratch" if way == "new" else "finetune"
    ran(command, "--resume", "whole/checkpoint-6.gguf", "--out", "resumed")
    assert raw(place / "resumed" / result) == raw(place / "whole" / result)
    assert timeless(place / "resumed")[-4:] == timeless(place / "whole")[-4:]
    assert losses(place / "resumed")[-6:] == losses(place / "whole")[-6:]


@needs_mpi
@pytest.mark.parametrize("way", ["new", "lora"])
def test_any_number_of_ranks(way: str, place: Path) -> None:
    given: dict[str, Any] = {
        "ctx": 32,
        "batch": 4,
        "precision": "f32",
        "lr": 1e-2,
        "seed": 5,
        "quant_aware": "q4_0",
        "iters": 4,
        "grad_groups": 4,
        "threads": 1,
        "val": [str(place / "val.txt")],
    }
    sizes = {"vocab_size": "bytes", "embd": 64, "head": 4, "layer": 1}

    def started(ranks: int) -> Job:
        files, out = [place / "text.txt"], place / f"on-{ranks}"
        if way == "new":
            return job("from_scratch", *files, out=out, **given, **sizes)
        return job("finetune", place / "base.gguf", *files, out=out, **given)

    for ranks in (0, 2):
        (found,) = done_by(ranks, [started(ranks)], place)
        assert isinstance(found, dict), found
    result = "model.gguf" if way == "new" else "adapter.gguf"
    assert raw(place / "on-0" / result) == raw(place / "on-2" / result)
    assert last_validation(place / "on-0") == last_validation(place / "on-2")


def test_another_type_is_refused_in_a_resumed_run(place: Path) -> None:
    ran(*finetune("run", "q4_0"))
    shutil.copytree(place / "run", place / "before")
    done = run("finetune", "--resume", "run", "--iters", 8, "--quant-aware", "q8_0")
    refused(done, 2, "--quant-aware must stay as it was", "it is q4_0")
    assert raw(place / "run" / "adapter.gguf") == raw(place / "before" / "adapter.gguf")
    ran("finetune", "--resume", "run", "--iters", 8, "--quant-aware", "q4_0")
    ran("finetune", "--config", "run/config.toml", "--out", "again")
    assert 'quant-aware = "q4_0"' in (place / "again" / "config.toml").read_text()


def test_only_writing_the_result(place: Path) -> None:
    ran(*from_scratch("run", "q4_0"))
    ran("from-scratch", "--resume", "run", "--only-write-model", "--out", "written")
    assert raw(place / "written" / "model.gguf") == raw(place / "run" / "model.gguf")


# ---- the plan ----------------------------------------------------------------------------------


def test_the_plan_has_the_rounded_weights(place: Path) -> None:
    sizes = {}
    for name, command in (("full", from_scratch("r", "q4_0")), ("lora", finetune("r", "q4_0"))):
        plan = json.loads(ran("plan", *command[:-2], "--json").out)
        sizes[name] = plan["rounded_weights"]
        ran(*command[:-1], name)
    model = open_gguf(place / "full" / "model.gguf").tensors.values()
    assert sizes["full"] == sum(tensor.raw.nbytes for tensor in model if tensor.type.name == "Q4_0")
    ran("export-lora", "base.gguf", "--lora", "lora/adapter.gguf", "--out", "merged.gguf")
    merged = open_gguf(place / "merged.gguf").tensors.values()
    assert sizes["lora"] == sum(tensor.raw.nbytes for tensor in merged if tensor.type.name == "Q4_0")


def test_the_forecast_has_the_time_to_round(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "encoding_seconds", lambda kind, threads: 1.0)
    plan = json.loads(ran("plan", *from_scratch("r", "q4_k")[:-2], "--json").out)
    ran(*from_scratch("r", "q4_k"))
    tensors = open_gguf(place / "r" / "model.gguf").tensors.values()
    rounded = sum(math.prod(tensor.shape) for tensor in tensors if tensor.type.name in ("Q4_K", "Q6_K"))
    assert rounded <= plan["seconds_of_step"] < rounded + 10


def test_the_time_to_encode_a_weight() -> None:
    assert 0 < forecasts.encoding_seconds(type_by_name("Q8_0"), 1) < 1e-3


# ---- export-lora -------------------------------------------------------------------------------


def merge(*more: Argument, out: str = "merged.gguf") -> list[Argument]:
    return ["export-lora", "base.gguf", *more, "--out", out, "--overwrite"]


def with_type(path: Path, kind: str) -> Path:
    adapter = adapter_files.parse_adapter(open_gguf(random_adapter(path, WIDE, ["blk.0.attn_q.weight"])))
    object.__setattr__(adapter, "merged_type", kind)
    adapter_files.write_adapter(path, adapter)
    return path


def test_a_given_type_comes_first(place: Path) -> None:
    adapter = with_type(place / "a.gguf", "q4_0")
    for kind, wanted in (("auto", "Q4_0"), ("q5_1", "Q5_1"), ("keep", "Q8_0")):
        ran(*merge("--lora", adapter, "--type", kind))
        assert kinds(place / "merged.gguf")["blk.0.attn_q.weight"] == wanted
    ran(*merge("--lora", random_adapter(place / "plain.gguf", WIDE, ["blk.0.attn_q.weight"])))
    assert kinds(place / "merged.gguf")["blk.0.attn_q.weight"] == "Q8_0"


def test_a_note_says_that_an_adapter_is_not_merged(place: Path) -> None:
    adapter = with_type(place / "a.gguf", "q4_0")
    for words in (("generate", "base.gguf", "--prompt", "a", "-n", 1), ("evaluate", "base.gguf", "val.txt")):
        assert "was trained for a model in q4_0; used without merging" in ran(*words, "--lora", adapter).err


def test_types_that_contradict_each_other(place: Path) -> None:
    one, other = with_type(place / "a.gguf", "q4_0"), with_type(place / "b.gguf", "q8_0")
    refused(run(*merge("--lora", one, "--lora", other)), 2, "different types", "q4_0 and q8_0", "--type")
    ran(*merge("--lora", one, "--lora", other, "--type", "q4_0"))
    ran("export-lora", "base.gguf", "--lora", one, "--lora", other, "--only-adapter", "--out", "both.gguf")
    assert adapter_files.parse_adapter(open_gguf("both.gguf")).merged_type == ""


def test_no_note_says_that_rounding_loses_what_was_trained_with_it(place: Path) -> None:
    base(place / "base.gguf", WIDE, "Q4_0")
    small_change = random_adapter(place / "a.gguf", WIDE, ["blk.0.attn_q.weight"], size=1e-4)
    assert "rounding loses" in ran(*merge("--lora", small_change)).err
    adapter = adapter_files.parse_adapter(open_gguf(small_change))
    adapter_files.write_adapter(small_change, replace(adapter, merged_type="q4_0"))
    for kind in ("auto", "keep"):
        assert "rounding loses" not in ran(*merge("--lora", small_change, "--type", kind)).err


@pytest.mark.parametrize("kind", ["q9_9", "f16", "../x", "Q4_0", "x" * 9999])
def test_an_adapter_with_an_unknown_type(kind: str, place: Path) -> None:
    adapter = with_type(place / "a.gguf", kind)
    refused(run(*merge("--lora", adapter)), 1, "unknown type", "--type")
    assert not (place / "merged.gguf").exists()
    ran(*merge("--lora", adapter, "--type", "q8_0"))


# ---- what cannot work --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--lora-dropout", 0.1), "--lora-dropout has no effect with --quant-aware"),
        (("--base-precision", "int8"), "--base-precision has no effect with --quant-aware"),
        (("--cache-base", "bf16"), "--cache-base has no effect with --quant-aware"),
        (("--adapter-type", "f16"), "--adapter-type has no effect with --quant-aware"),
        (("--quant-aware", "q9_9"), "--quant-aware"),
        (("--quant-aware", "f16"), "--quant-aware"),
        (("--quant-aware", ""), "--quant-aware"),
    ],
)
def test_options_that_exclude_each_other(more: tuple[Argument, ...], words: str, place: Path) -> None:
    refused(run(*finetune("run", "q4_0", *more)), 2, words)
    assert not (place / "run").exists()


def test_an_optimizer_without_rounding(place: Path) -> None:
    done = run("finetune", "base.gguf", "text.txt", "--quant-aware", "q4_0", "--optimizer", "lbfgs")
    refused(done, 2, "--quant-aware has no effect with --optimizer lbfgs")


def test_a_type_that_fits_no_matrix(place: Path) -> None:
    done = run(*from_scratch("run", "q4_k", "--embd", 32, "--ff", 64))
    refused(done, 2, "--quant-aware q4_k fits no matrix of the model: rows must be multiples of 256")
    base(place / "base.gguf", small(), "Q4_0")
    refused(run(*finetune("run", "q4_k")), 2, "fits no matrix of .*base.gguf")
    assert not (place / "run").exists()


def test_weights_that_grow_beyond_the_type(place: Path) -> None:
    """The run stops at the step, and its last checkpoint is good."""
    done = run(*from_scratch("run", "q4_0", "--optimizer", "sgd", "--lr", 1e7, "--warmup", 0, "--clip", 1))
    refused(done, 1, "step ", "largest half float|not finite|nan|inf", "last good checkpoint")
    read_checkpoint(place / "run" / "checkpoint-LATEST.gguf")


def test_a_base_that_is_cut_during_the_run(place: Path) -> None:
    """Each step reads the base again."""
    from llamatrain.run import trainable

    steps = []
    original = trainable.LoraAdapter.encode_weight

    def cut(self: Any, name: str, parts: Any) -> Any:
        steps.append(name)
        if len(steps) == 30:
            with (place / "base.gguf").open("r+b") as file:
                file.truncate(1000)
        return original(self, name, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainable.LoraAdapter, "encode_weight", cut)
        done = run(*finetune("run", "q4_0"))
    refused(done, 1, "base.gguf")
