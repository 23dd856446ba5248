"""Runs with `--base-precision int8`: they learn, go on with the same bits, and say what they do."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.checkpoints.checkpoint import write_checkpoint
from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.engine import device as devices
from llamatrain.kernels.cpu.registry import BINDINGS
from llamatrain.run import resolve, trainable
from llamatrain.run.prepare import prepare, start_request
from llamatrain.run.request import request_finetune
from tests.helpers.cli import (
    TINY,
    Argument,
    lines,
    losses,
    metrics,
    ran,
    run,
    same_bits,
    steps,
    text_file,
    timeless,
)
from tests.helpers.lora_runs import WIDE, base
from tests.helpers.mpi_programs import needs_mpi
from tests.helpers.multi_rank import Job, done_by, job
from tests.helpers.opaque_device import OpaqueDevice
from tests.helpers.preferences import lines as write_rows
from tests.helpers.preferences import rows
from tests.helpers.small_models import EMBEDDINGS, OUTPUT, small
from tests.run.test_from_scratch_errors import refused
from tests.run.test_resume import kill_at

INT8 = ("--base-precision", "int8")
LORA = ("--lora-r", 4, "--ctx", 32, "--batch", 2, "--seed", 5, "--lr", 1e-2, "--precision", "f32")
ALL_ON = (
    *LORA,
    "--grad-acc",
    2,
    "--val-split",
    0.05,
    "--eval-every",
    4,
    "--save-every",
    3,
    "--lora-dropout",
    0.2,
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    base(tmp_path / "base.gguf", WIDE, "Q4_K")
    return tmp_path


def finetune(out: str, *more: Argument) -> list[Argument]:
    return ["finetune", "base.gguf", "text.txt", *more, "--out", out]


def stored_precision(folder: Path) -> Any:
    return read_checkpoint(folder / "checkpoint-LATEST.gguf").options["tune"]["base_precision"]


def val_losses(folder: Path) -> list[float]:
    return [line["val_loss"] for line in metrics(folder) if "val_loss" in line]


# ---- what is learned ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["BF16", "Q4_K"])
def test_losses_are_near_those_in_float32(kind: str, place: Path) -> None:
    base(place / "base.gguf", WIDE, kind)
    many = (*LORA, "--iters", 30, "--val-split", 0.1, "--eval-every", 15)
    for precision in ("same", "int8"):
        ran(*finetune(precision, *many, "--base-precision", precision))
    rounded, exact = (losses(place / precision) for precision in ("int8", "same"))
    assert all(one != other for one, other in zip(rounded, exact, strict=True))
    np.testing.assert_allclose(rounded, exact, rtol=0.02)
    np.testing.assert_allclose(val_losses(place / "int8"), val_losses(place / "same"), rtol=0.02)
    assert np.mean(rounded[-5:]) < np.mean(rounded[:5]) - 1


def test_bf16_products_beside_it(place: Path) -> None:
    """Those of adapters, of attention and of the head are in bf16; the base is copied to int8, not to bf16."""
    for out, more in (("bf16", ()), ("int8", INT8)):
        done = ran(*finetune(out, *LORA, "--iters", 10, "--precision", "bf16", *more))
    assert "bf16 (products with the base in int8)" in " ".join(done.err.split())
    np.testing.assert_allclose(losses(place / "int8"), losses(place / "bf16"), rtol=0.02)
    assert losses(place / "int8") != losses(place / "bf16")
    assert read_checkpoint(place / "int8" / "checkpoint-10.gguf").options["tune"]["cache_base"] == "int8"


def test_preferences(place: Path) -> None:
    """Before the first step the adapter changes nothing: answers are as likely as by the reference model."""
    write_rows(place / "answers.jsonl", rows(20))
    given = ("--objective", "dpo", *LORA, "--ctx", 96, "--iters", 2)
    for precision in ("same", "int8"):
        ran(
            "finetune",
            "base.gguf",
            "answers.jsonl",
            *given,
            "--base-precision",
            precision,
            "--out",
            precision,
        )
    rounded, exact = steps(place / "int8"), steps(place / "same")
    assert rounded[0]["loss"] == pytest.approx(np.log(2), rel=1e-6) and rounded[0]["margin"] == 0
    assert rounded[0]["grad_norm"] == pytest.approx(exact[0]["grad_norm"], rel=0.05)
    assert rounded[0]["grad_norm"] != exact[0]["grad_norm"]
    assert rounded[1]["loss"] == pytest.approx(exact[1]["loss"], rel=0.02)


def test_a_rate_that_blows_up_is_noticed(place: Path) -> None:
    done = run(
        *finetune(
            "run", *LORA, *INT8, "--lr", 1e9, "--clip", 0, "--warmup", 0, "--iters", 50, "--save-every", 1
        )
    )
    refused_late = [line for line in done.err.splitlines() if line.startswith("error:")]
    assert done.code == 1 and len(refused_late) == 1 and "checkpoint-" in refused_late[0]
    assert all(np.isfinite(losses(place / "run")))


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_stays_as_it_is(tied: bool, place: Path) -> None:
    """Frozen matrices of blocks are rounded; a head that is the embeddings, too, is none of them."""
    base(place / "base.gguf", small(tied=tied), "Q4_0")
    said = {"ctx": 32, "batch": 2, "base_precision": "int8", "target": ("attn_q",)}
    request = request_finetune("base.gguf", ("text.txt",), said)
    asked, sources, notes = start_request(request)
    spec = prepare(asked, sources, None, notes, request.changed).fitted.plan.spec
    names = {tensor.name for tensor in spec.int8_weights}
    linear = {name for name, shape in spec.h.shapes.items() if name.startswith("blk.") and len(shape) == 2}
    assert linear <= names <= linear | {EMBEDDINGS}
    assert (EMBEDDINGS if tied else OUTPUT) not in names


# ---- the same bits -----------------------------------------------------------------------------


def same_run(one: Path, other: Path) -> None:
    assert timeless(one) == timeless(other)
    same_bits(one / "adapter.gguf", other / "adapter.gguf")


@pytest.mark.parametrize(
    "way",
    [("--remat", "block", "--precision", "bf16"), ("--optimizer", "sgd", "--kernels", "reference")],
    ids=lambda way: " ".join(map(str, way)),
)
def test_some_steps_and_then_the_rest(way: tuple[Argument, ...], place: Path) -> None:
    ran(*finetune("whole", *ALL_ON, *INT8, *way, "--iters", 6))
    ran(*finetune("parts", *ALL_ON, *INT8, *way, "--iters", 6, "--max-time", "0.01s"))
    assert 0 < len(steps(place / "parts")) < 6 and stored_precision(place / "parts") == "int8"
    ran("finetune", "--resume", "parts", "--max-time", "1h")
    assert losses(place / "parts") == losses(place / "whole") and stored_precision(place / "parts") == "int8"
    same_bits(place / "whole" / "adapter.gguf", place / "parts" / "adapter.gguf")
    same_bits(place / "whole" / "checkpoint-6.gguf", place / "parts" / "checkpoint-6.gguf")


def test_a_run_that_is_killed_goes_on_with_the_same_bits(place: Path) -> None:
    words = ("--iters", 40, *ALL_ON, *INT8)
    ran(*finetune("whole", *words))

    def moment() -> bool:
        time.sleep(0.002)
        return lines(place / "killed") >= 9

    assert kill_at(moment, *finetune("killed", *words))
    ran("finetune", "--resume", "killed")
    same_run(place / "whole", place / "killed")


@pytest.mark.parametrize("kind", ["Q4_K", "F32", "F16", "IQ4_XS"])
def test_copies_of_the_base_change_nothing(kind: str, place: Path) -> None:
    """Also a run that goes on without them, or with them."""
    base(place / "base.gguf", WIDE, kind)
    words = (*ALL_ON, *INT8, "--iters", 6)
    for cache in ("off", "int8", "auto"):
        ran(*finetune(cache, *words, "--cache-base", cache))
    same_run(place / "off", place / "int8")
    same_run(place / "off", place / "auto")
    for old, new in (("off", "int8"), ("int8", "off")):
        copied = ("--checkpoint-in", f"{old}/checkpoint-3.gguf", "--out", f"{old}-{new}")
        done = ran("finetune", *copied, "--cache-base", new)
        assert f"--cache-base is now {new} (it was {old})" in done.err and "slightly" not in done.err
        same_bits(place / "off" / "adapter.gguf", place / f"{old}-{new}" / "adapter.gguf")


def test_a_base_that_changes_while_it_is_copied(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = trainable.pack_for_int8

    def change_and_pack(*given: Any) -> Any:
        with (place / "base.gguf").open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"none")
        return pack(*given)

    monkeypatch.setattr(trainable, "pack_for_int8", change_and_pack)
    refused(run(*finetune("run", *LORA, *INT8, "--iters", 1)), 1, "base.gguf", "changed")


def test_copies_are_made_where_they_fit(place: Path) -> None:
    base(place / "base.gguf", small(embd=256, heads=4, head_size=64, ff=1024, layers=8), "Q4_0")
    words = finetune("run", *LORA, *INT8)[:-2]
    plans = {
        cache: json.loads(ran("plan", *words, "--cache-base", cache, "--json").out)
        for cache in ("off", "int8")
    }
    copied = plans["int8"]["packed_copies"]  # two bytes for each of 7.9 million elements, and their scales
    assert 16_000_000 < copied < 16_500_000 and plans["off"]["packed_copies"] == 0
    between = f"{(plans['off']['total'] + plans['int8']['total']) // 2 // 1000}KB"
    for limit, cache in (((), "int8"), (("--memory", between), "off")):
        assert json.loads(ran("plan", *words, *limit, "--json").out)["cache_base"] == cache
    refused(
        run(*words, "--iters", 1, "--memory", between, "--cache-base", "int8"),
        1,
        "--cache-base off",
    )


def test_threads_and_recomputed_values_change_nothing(place: Path) -> None:
    for out, more in (("one", ("--threads", 1)), ("two", ("--threads", 2)), ("block", ("--remat", "block"))):
        ran(*finetune(out, *ALL_ON, *INT8, "--iters", 4, *more))
    same_run(place / "one", place / "two")
    same_run(place / "one", place / "block")


def test_numpy_follows_compiled_kernels(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products have the same bits; other ops differ a little, and then values round to other integers.

    With AVX-512, the last bit of a norm does that in the first step, so numpy's norm is used for it.
    """
    for kernels in ("cpu", "reference"):
        ran(*finetune(kernels, *LORA, *INT8, "--lr", 1e-3, "--iters", 6, "--kernels", kernels))
    compiled, plain = losses(place / "cpu"), losses(place / "reference")
    np.testing.assert_allclose(compiled, plain, rtol=2e-3)
    monkeypatch.delitem(BINDINGS, "rms_norm")
    ran(*finetune("norm", *LORA, *INT8, "--lr", 1e-3, "--iters", 1))
    assert losses(place / "norm")[0] == pytest.approx(plain[0], rel=1e-5)


@needs_mpi
def test_any_number_of_ranks(place: Path) -> None:
    """Also if other ranks go on with it."""
    given: dict[str, Any] = {
        "ctx": 32,
        "batch": 4,
        "lora_r": 4,
        "lora_dropout": 0.2,
        "precision": "f32",
        "lr": 1e-2,
        "seed": 5,
        "base_precision": "int8",
        "iters": 4,
        "save_every": 2,
        "grad_groups": 4,
        "threads": 1,
        "sample_every": 0,
    }

    def started(ranks: int) -> Job:
        return job("finetune", place / "base.gguf", place / "text.txt", out=place / f"on-{ranks}", **given)

    def resumed(ranks: int, other: int) -> Job:
        first = place / f"on-{other}" / "checkpoint-2.gguf"
        return job("finetune", resume=first, out=place / f"resumed-by-{ranks}")

    for ranks, jobs in ((0, [started(0)]), (2, [started(2), resumed(2, 0)]), (0, [resumed(0, 2)])):
        for found in done_by(ranks, jobs, place):
            assert isinstance(found, dict), found
    for name in ("on-2", "resumed-by-2", "resumed-by-0"):
        assert losses(place / name)[-2:] == losses(place / "on-0")[-2:]
        same_bits(place / name / "adapter.gguf", place / "on-0" / "adapter.gguf")


# ---- what is said and kept ---------------------------------------------------------------------


def test_the_header_the_checkpoint_and_the_configuration_say_it(place: Path) -> None:
    for precision in ("same", "int8"):
        done = ran(*finetune(precision, *LORA, "--iters", 2, "--base-precision", precision))
        assert ("products with the base in int8" in " ".join(done.err.split())) == (precision == "int8")
        assert stored_precision(place / precision) == precision
    assert 'base-precision = "int8"' in (place / "int8" / "config.toml").read_text()
    ran("finetune", "--config", "int8/config.toml", "--out", "again")
    same_run(place / "int8", place / "again")


def test_a_run_changes_over_with_a_note(place: Path) -> None:
    ran(*finetune("run", *LORA, *INT8, "--iters", 2))
    done = ran("finetune", "--resume", "run", "--iters", 3, "--base-precision", "same")
    assert (
        "--base-precision is now same (it was int8)" in done.err
        and "results will differ slightly" in done.err
    )
    assert "--cache-base is now off, since int8 copies are for int8 products" in done.err
    assert stored_precision(place / "run") == "same"
    done = ran("finetune", "--resume", "run", "--iters", 4, *INT8)
    assert "--base-precision is now int8 (it was same)" in done.err
    assert stored_precision(place / "run") == "int8"


def test_a_checkpoint_from_before_the_option_is_gone_on_with_as_it_was(place: Path) -> None:
    for out, iters in (("whole", 4), ("run", 2)):
        ran(*finetune(out, *LORA, "--schedule", "constant", "--base-precision", "same", "--iters", iters))
    older = read_checkpoint(place / "run" / "checkpoint-2.gguf")
    del older.options["tune"]["base_precision"]
    write_checkpoint(place / "older.gguf", older)
    done = ran("finetune", "--resume", "older.gguf", "--trust", "--iters", 4, "--out", "resumed")
    assert "--base-precision" not in done.err and stored_precision(place / "resumed") == "same"
    same_bits(place / "whole" / "adapter.gguf", place / "resumed" / "adapter.gguf")


def test_the_plan_says_it(place: Path) -> None:
    for precision in ("same", "int8"):
        words = ("plan", *finetune("run", *LORA, "--base-precision", precision)[:-2])
        planned = json.loads(ran(*words, "--json").out)
        assert planned["base_precision"] == precision and planned["precision"] == "f32"
        assert ("f32 (products with the base in int8)" in ran(*words).out) == (precision == "int8")


# ---- the default -------------------------------------------------------------------------------


@pytest.fixture
def large(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A processor without AMX, on which the base counts as large."""
    monkeypatch.setattr(resolve, "INT8_ELEMENTS", 1000)
    monkeypatch.setattr(resolve, "enabled_units", lambda: {"avx512", "avx512vnni", "avx512bf16"})
    return place


AUTO = ("--lora-r", 4, "--ctx", 32, "--batch", 2)


def planned_precision(*more: Argument) -> str:
    words = ("plan", *finetune("run", *AUTO, *more)[:-2], "--json")
    precision: str = json.loads(ran(*words).out)["base_precision"]
    return precision


def test_large_quantized_bases_are_multiplied_in_int8(large: Path) -> None:
    assert planned_precision() == planned_precision("--base-precision", "auto") == "int8"
    done = ran(*finetune("run", *AUTO, "--iters", 2))
    assert "products with the base in int8" in " ".join(done.err.split())
    assert stored_precision(large / "run") == "int8"
    assert "--base-precision" not in ran("finetune", "--resume", "run", "--iters", 3).err


@pytest.mark.parametrize(
    "more",
    [
        ("--precision", "f32"),
        ("--precision", "bf16"),
        ("--base-precision", "same"),
        ("--kernels", "reference"),
        ("--optimizer", "lbfgs"),
        ("--full",),
    ],
    ids=" ".join,
)
def test_what_was_asked_for_comes_first(more: tuple[str, ...], large: Path) -> None:
    rank = () if "--full" in more else AUTO[:2]
    words = ("plan", "finetune", "base.gguf", "text.txt", *rank, *AUTO[2:], *more, "--json")
    assert json.loads(ran(*words).out)["base_precision"] == "same"


def test_not_for_preferences(large: Path) -> None:
    write_rows(large / "answers.jsonl", rows(20))
    words = (
        "plan",
        "finetune",
        "base.gguf",
        "answers.jsonl",
        "--objective",
        "dpo",
        *AUTO,
        "--ctx",
        96,
        "--json",
    )
    assert json.loads(ran(*words).out)["base_precision"] == "same"


def test_not_for_other_bases_and_processors(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(resolve, "enabled_units", lambda: {"avx512", "avx512vnni", "avx512bf16", "amx"})
        assert planned_precision() == "same"
    with monkeypatch.context() as patch:
        patch.setattr(resolve, "INT8_ELEMENTS", 100_000_000)
        assert planned_precision() == "same"
    base(large / "base.gguf", WIDE, "F16")
    assert planned_precision() == "same"


# ---- what is refused ---------------------------------------------------------------------------


def test_what_cannot_be(place: Path) -> None:
    for more, words in (
        (
            (*INT8, "--cache-base", "bf16", "--precision", "bf16"),
            ("--cache-base bf16", "--base-precision same"),
        ),
        ((*INT8, "--cache-base", "bf16"), ("--cache-base bf16",)),
        (("--cache-base", "int8"), ("--cache-base int8", "--base-precision int8")),
        (
            (*INT8, "--cache-base", "int8", "--kernels", "reference"),
            ("--cache-base int8", "--kernels cpu"),
        ),
        ((*INT8, "--full"), ("--base-precision", "--full")),
        (("--base-precision", "int4"), ("--base-precision", "auto, same or int8", "int4")),
        (("--base-precision",), ("--base-precision",)),
    ):
        rank = () if "--full" in more else ("--lora-r", 4)
        refused(run(*finetune("run", "--ctx", 32, "--batch", 2, *rank), *more), 2, *words)
        assert not (place / "run").exists()
    refused(run("from-scratch", "text.txt", *TINY, *INT8, "--out", "run"), 2, "--base-precision")


def test_a_device_without_such_products(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.FACTORIES, "torch-cpu", lambda *_: OpaqueDevice())
    words = finetune("run", *LORA, "--iters", 1, "--device", "torch-cpu")
    for start in ((), ("plan",)):
        given = words[:-2] if start else words
        refused(run(*start, *given, *INT8), 2, "--base-precision int8", "--device cpu", "torch-cpu")
    ran(*words, "--base-precision", "same")
