"""Runs on devices with memory of their own: one that Python cannot read, and torch's CPU device."""

import json
from pathlib import Path

import numpy as np
import pytest

from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.engine import device as devices
from llamatrain.planner import limits
from tests.helpers.cli import TINY, Argument, losses, ran, run, same_bits, text_file
from tests.helpers.lora_runs import WIDE, base, random_adapter
from tests.helpers.opaque_device import LIMIT, OpaqueDevice
from tests.helpers.small_models import small

LORA = ("--lora-r", 4, "--ctx", 32, "--batch", 2, "--seed", 5, "--save-every", 3)
ALL_ON = (*LORA, "--grad-acc", 2, "--val-split", 0.05, "--eval-every", 4, "--lora-dropout", 0.2)
SAMPLES = ("--sample-every", 4, "--sample-prompt", "a")
SCRATCH = (*TINY, "--ctx", 32, "--batch", 2, "--seed", 3)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    return tmp_path


@pytest.fixture
def opaque(monkeypatch: pytest.MonkeyPatch) -> OpaqueDevice:
    """The device that --device torch-cpu stands for in the test."""
    device = OpaqueDevice()

    def create(name: str, threads: int, drops: bool, reads_ahead: bool) -> OpaqueDevice:
        return device

    monkeypatch.setitem(devices.FACTORIES, "torch-cpu", create)
    return device


def finetune(out: str, *more: Argument) -> list[Argument]:
    return ["finetune", "base.gguf", "text.txt", *more, "--out", out]


# ---- memory that Python cannot read ------------------------------------------------------------


def test_a_whole_finetuning_with_resume_and_samples(place: Path, opaque: OpaqueDevice) -> None:
    """The same bits as by numpy on the host, also if it is interrupted."""
    base(place / "base.gguf", small(), "Q4_0")
    ran(*finetune("host", *ALL_ON, *SAMPLES, "--iters", 8, "--kernels", "reference"))
    on_device = ran(*finetune("whole", *ALL_ON, *SAMPLES, "--iters", 8, "--device", "torch-cpu"))
    assert opaque.launches > 8 and "sample at step 8" in on_device.err
    assert losses(place / "whole") == losses(place / "host")
    ran(*finetune("parts", *ALL_ON, *SAMPLES, "--iters", 8, "--device", "torch-cpu", "--max-time", "0.01s"))
    ran("finetune", "--resume", "parts", "--max-time", "1h")
    for name in ("adapter.gguf", "best.gguf"):
        for other in ("whole", "parts"):
            assert (place / other / name).read_bytes() == (place / "host" / name).read_bytes()
    same_bits(place / "whole" / "checkpoint-8.gguf", place / "parts" / "checkpoint-8.gguf")


@pytest.mark.parametrize(
    "way",
    [
        ("--optimizer", "adamw", "--lora-plus-ratio", 4),
        ("--optimizer", "sgd", "--remat", "block"),
        ("--optimizer", "adamw", "--clip", 0, "--precision", "bf16", "--cache-base", "bf16"),
        ("--full", "--optimizer", "muon"),
        ("--full", "--optimizer", "adamuon"),
        ("--grad-groups", 2, "--grad-acc", 2),
        ("--full", "--grad-groups", 2, "--grad-acc", 4, "--optimizer", "muon"),
        ("--optimizer", "lbfgs"),
    ],
    ids=lambda way: " ".join(map(str, way)),
)
def test_every_way_to_train_gives_the_bits_of_the_host(
    way: tuple[Argument, ...], place: Path, opaque: OpaqueDevice
) -> None:
    base(place / "base.gguf", small(), "Q8_0")
    more = () if "--full" in way else ("--lora-r", 4)
    for out, device in (("host", ("--kernels", "reference")), ("away", ("--device", "torch-cpu"))):
        ran(*finetune(out, "--ctx", 32, "--batch", 2, "--iters", 3, *more, *way, *device))
    name = "model.gguf" if "--full" in way else "adapter.gguf"
    assert (place / "away" / name).read_bytes() == (place / "host" / name).read_bytes()


def test_a_new_model(place: Path, opaque: OpaqueDevice) -> None:
    for out, device in (("host", ("--kernels", "reference")), ("away", ("--device", "torch-cpu"))):
        ran(
            "from-scratch",
            "text.txt",
            *SCRATCH,
            "--iters",
            4,
            "--eval-every",
            2,
            "--val-split",
            0.1,
            *device,
            "--out",
            out,
        )
    assert (place / "away" / "model.gguf").read_bytes() == (place / "host" / "model.gguf").read_bytes()


def test_evaluation_and_generation_on_a_device(place: Path, opaque: OpaqueDevice) -> None:
    base(place / "base.gguf", small(), "Q4_0")
    random_adapter(place / "adapter.gguf", small(), ["blk.0.attn_q.weight"])
    for command in (
        ("evaluate", "base.gguf", "text.txt", "--lora", "adapter.gguf", "--ctx", 32, "--json"),
        ("generate", "base.gguf", "--prompt", "a", "--lora", "adapter.gguf", "-n", 8, "--temp", 0),
    ):
        here, away = ran(*command), ran(*command, "--device", "torch-cpu")
        assert away.out and (command[0] == "evaluate" or away.out == here.out)
    assert opaque.launches > 8


def test_the_limit_is_the_memory_of_the_device(place: Path, opaque: OpaqueDevice) -> None:
    base(place / "base.gguf", small(), "Q4_0")
    planned = ran("plan", *finetune("run", *LORA)[:-2], "--device", "torch-cpu", "--json")
    assert f"{LIMIT}" not in planned.out
    refused = run(*finetune("run", *LORA, "--device", "torch-cpu", "--memory", "100kB"))
    assert refused.code == 1 and len(refused.errors) == 1 and "and the limit is 100 kB" in refused.errors[0]
    assert not (place / "run").exists()
    ran(*finetune("run", *LORA, "--iters", 1, "--device", "torch-cpu", "--memory", "3MB"))


def test_the_host_must_have_room_for_its_copies(
    place: Path, opaque: OpaqueDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    base(place / "base.gguf", small(), "Q4_0")
    monkeypatch.setattr(limits, "available_bytes", lambda: 0)
    monkeypatch.setattr(limits, "resident_bytes", lambda: 1 << 20)
    done = run(*finetune("run", *LORA, "--device", "torch-cpu"))
    assert done.code == 1 and len(done.errors) == 1 and "of the host's memory" in done.errors[0]


def test_the_plan_is_what_the_device_allocates(place: Path, opaque: OpaqueDevice) -> None:
    base(place / "base.gguf", WIDE, "Q4_0")
    words = finetune("run", *LORA, "--iters", 2, "--device", "torch-cpu")
    planned = ran("plan", *words[:-2], "--json")
    before = opaque.allocated
    ran(*words)
    total = json.loads(planned.out)["total"]
    assert total == pytest.approx(opaque.allocated - before, rel=0.05)


# ---- torch's CPU device ------------------------------------------------------------------------


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_K", "IQ3_S"])
def test_an_adapter_by_torch(kind: str, place: Path) -> None:
    base(place / "base.gguf", WIDE, kind)
    ran(*finetune("host", *ALL_ON, "--iters", 4, "--kernels", "reference"))
    ran(*finetune("torch", *ALL_ON, "--iters", 4, "--device", "torch-cpu"))
    np.testing.assert_allclose(losses(place / "torch"), losses(place / "host"), rtol=2e-5)
    weights = [read_checkpoint(place / out / "checkpoint-4.gguf").weights for out in ("torch", "host")]
    for name, array in weights[0].items():
        np.testing.assert_allclose(array, weights[1][name], atol=2e-5, err_msg=name)


@pytest.mark.reference
@pytest.mark.parametrize(
    "way",
    [
        ("--optimizer", "sgd"),
        ("--optimizer", "muon"),
        ("--optimizer", "adamuon"),
        ("--optimizer", "lbfgs"),
        ("--arch", "qwen35", "--head", 2),
        ("--no-flash", "--loss", "cross-entropy"),
        ("--precision", "bf16"),
    ],
    ids=lambda way: " ".join(map(str, way)),
)
def test_a_new_model_by_torch(way: tuple[Argument, ...], place: Path) -> None:
    for out, device in (("host", ("--kernels", "reference")), ("torch", ("--device", "torch-cpu"))):
        ran("from-scratch", "text.txt", *SCRATCH, *way, "--iters", 4, *device, "--out", out)
    tolerance = 2e-3 if "bf16" in way else 2e-5
    np.testing.assert_allclose(losses(place / "torch"), losses(place / "host"), rtol=tolerance)


@pytest.mark.reference
def test_evaluation_and_generation_by_torch(place: Path) -> None:
    base(place / "base.gguf", WIDE, "Q5_K")
    random_adapter(place / "adapter.gguf", WIDE, ["blk.0.attn_q.weight"])
    words = ("--lora", "adapter.gguf", "--device")
    evaluate = ("evaluate", "base.gguf", "text.txt", "--ctx", 32, "--json", *words)
    here, there = (json.loads(ran(*evaluate, device).out) for device in ("cpu", "torch-cpu"))
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-5) and there["tokens"] == here["tokens"]
    generate = ("generate", "base.gguf", "--prompt", "a", "-n", 12, "--temp", 0, *words)
    assert ran(*generate, "torch-cpu").out == ran(*generate, "cpu").out


@pytest.mark.reference
@pytest.mark.parametrize("code", ["device-out-of-memory", "device-failed"])
def test_an_error_of_the_device_loses_nothing(
    code: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, exit code 1, and the run goes on from its last checkpoint to the same bits."""
    import torch

    from llamatrain.kernels.torch.device import TorchDevice

    base(place / "base.gguf", WIDE, "Q4_K")
    ran(*finetune("whole", *LORA, "--iters", 6, "--device", "torch-cpu"))
    run_all, count = TorchDevice.run_all, 0

    def fail_later(device: TorchDevice, runs: list) -> None:
        nonlocal count
        count += 1
        error = torch.OutOfMemoryError if code == "device-out-of-memory" else RuntimeError
        run_all(
            device, runs if count < 9 else [lambda: (_ for _ in ()).throw(error("the driver\nwent away"))]
        )

    with monkeypatch.context() as patched:
        patched.setattr(TorchDevice, "run_all", fail_later)
        done = run(*finetune("parts", *LORA, "--iters", 6, "--device", "torch-cpu"))
    assert done.code == 1 and len(done.errors) == 1 and done.errors[0].endswith(f"[{code}]")
    assert "Traceback" not in done.err
    ran("finetune", "--resume", "parts")
    assert (place / "parts" / "adapter.gguf").read_bytes() == (place / "whole" / "adapter.gguf").read_bytes()


@pytest.mark.reference
def test_an_interrupted_run_by_torch_has_the_same_bits(place: Path) -> None:
    base(place / "base.gguf", WIDE, "Q4_K")
    ran(*finetune("whole", *ALL_ON, "--iters", 6, "--device", "torch-cpu"))
    ran(*finetune("parts", *ALL_ON, "--iters", 6, "--device", "torch-cpu", "--max-time", "0.01s"))
    ran("finetune", "--resume", "parts", "--max-time", "1h")
    assert (place / "parts" / "adapter.gguf").read_bytes() == (place / "whole" / "adapter.gguf").read_bytes()


@pytest.mark.reference
def test_a_run_moves_to_another_device_with_a_note(place: Path) -> None:
    base(place / "base.gguf", WIDE, "Q4_K")
    ran(*finetune("run", *LORA, "--iters", 6, "--device", "torch-cpu", "--max-time", "0.01s"))
    resumed = ran("finetune", "--resume", "run", "--device", "cpu", "--max-time", "1h")
    assert "--device is now cpu (it was torch-cpu)" in resumed.err
    assert "the kernels are now those for" in resumed.err and len(losses(place / "run")) == 6


@pytest.mark.reference
def test_a_missing_card_is_one_line(place: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    base(place / "base.gguf", small(), "Q4_0")
    done = run(*finetune("run", *LORA, "--device", "cuda"))
    assert done.code == 1 and len(done.errors) == 1 and "finds no such processor" in done.errors[0]
    assert not (place / "run").exists()
    ran(*finetune("run", *LORA, "--iters", 1, "--device", "auto"))


@pytest.mark.reference
def test_an_old_torch_is_one_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from llamatrain.kernels.torch import device

    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    monkeypatch.setattr(device, "open_device", device.open_device.__wrapped__)
    base(place / "base.gguf", small(), "Q4_0")
    done = run(*finetune("run", *LORA, "--device", "torch-cpu"))
    assert done.code == 1 and len(done.errors) == 1 and "2.8 or newer (got 2.5.1+cpu)" in done.errors[0]


def test_without_torch_the_error_says_what_to_install(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    base(place / "base.gguf", small(), "Q4_0")
    done = run(*finetune("run", *LORA, "--device", "cuda"))
    assert done.code == 1 and len(done.errors) == 1 and "llamatrain[torch]" in done.errors[0]
    ran(*finetune("run", *LORA, "--iters", 1, "--device", "auto"))


def test_numpy_kernels_are_for_the_cpu(place: Path) -> None:
    base(place / "base.gguf", small(), "Q4_0")
    done = run(*finetune("run", *LORA, "--device", "cuda", "--kernels", "reference"))
    assert done.code == 2 and "--kernels reference is for --device cpu" in done.errors[0]
