"""The built-in sine wave, and L-BFGS against AdamW on it."""

import math
import re
import resource
import subprocess
from pathlib import Path

import numpy as np
import pytest

from llamatrain.config.options import format_flag, option_specs
from llamatrain.distributed.cores import count_cores
from llamatrain.gguf.reader import open_gguf
from llamatrain.run.options import TrainOptions
from tests.helpers.cli import PROGRAM, ROOT, Done, environment, losses, ran, same_bits, steps, timeless


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done, float]:
    """One command, no data: the folder, what was said, the seconds of a processor it took."""
    place, begun = tmp_path_factory.mktemp("demo"), processor()
    done = subprocess.run(
        [*PROGRAM, "from-scratch"],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return place / "runs" / "from-scratch-1", Done(0, done.stdout, done.stderr), processor() - begun


def test_it_ends_within_a_minute(demo: tuple[Path, Done, float]) -> None:
    """On a machine that has nothing else to do."""
    assert demo[2] < 60 * count_cores()


def processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def reported(done: Done) -> float:
    told = re.findall(r"correlation of 64 .*: (-?[01]?\.\d+)", done.err)
    assert told, done.err[-2000:]
    return float(told[-1])


def test_it_says_how_well_it_learned(demo: tuple[Path, Done, float]) -> None:
    assert demo[1].out == "" and reported(demo[1]) >= 0.95


def test_what_it_generates_is_a_wave(demo: tuple[Path, Done, float]) -> None:
    """64 steps from the file itself, after one period of 16 tokens; tokens 1 to 31 are the levels."""
    wave = np.sin(2 * math.pi * np.arange(16 + 64) / 16)
    period = np.rint(16 + 15 * wave[:16]).astype(int)
    prompt = " ".join(map(str, [0, *period]))
    done = ran("generate", demo[0] / "model.gguf", "--prompt", prompt, "-n", 64, "--temp", 0)
    levels = [int(word) for word in done.out.split()]
    assert len(levels) == 64 and np.corrcoef(levels, wave[16:])[0, 1] >= 0.95


def test_it_draws_target_and_model(demo: tuple[Path, Done, float]) -> None:
    err = demo[1].err.lower()
    assert "target" in err and "model" in err
    assert len(losses(demo[0])) >= 10 and losses(demo[0])[-1] < losses(demo[0])[0]


def test_the_config_is_the_same_in_a_file(tmp_path: Path) -> None:
    ran("from-scratch", "--iters", 20, "--out", tmp_path / "demo")
    ran(
        "from-scratch",
        "--config",
        ROOT / "configs" / "sine.toml",
        "--iters",
        20,
        "--out",
        tmp_path / "config",
    )
    assert timeless(tmp_path / "config") == timeless(tmp_path / "demo")
    same_bits(tmp_path / "config" / "model.gguf", tmp_path / "demo" / "model.gguf")
    resolved = [(tmp_path / name / "config.toml").read_text() for name in ("demo", "config")]
    assert resolved[0] == resolved[1]


def test_the_wave_s_model_opens_elsewhere(demo: tuple[Path, Done, float]) -> None:
    found = open_gguf(demo[0] / "model.gguf")
    assert found.metadata["tokenizer.ggml.model"] in ("none", "no_vocab")
    llama_cpp = pytest.importorskip("llama_cpp")
    llama_cpp.Llama(str(found.path), n_ctx=8, verbose=False).close()


def test_squared_error_as_the_ancestor_had_it(tmp_path: Path) -> None:
    """The name of the option is asked of the program itself."""
    options = option_specs(TrainOptions).values()
    words = {
        format_flag(each.name): choice for each in options for choice in each.choices if "square" in choice
    }
    assert words, "no option speaks of squared error"
    ((name, choice),) = words.items()
    ran("from-scratch", name, choice, "--iters", 30, "--out", tmp_path / "run")
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]


# ---- L-BFGS ----------------------------------------------------------------

FIXED = ("--batch", 8, "--ctx", 32, "--grad-acc", 1)


def evaluations_to(folder: Path, loss: float) -> float:
    """Of loss and gradient, until a step begins with this loss; without end where none does."""
    return next((line["step"] for line in steps(folder) if line["loss"] <= loss), math.inf)


@pytest.mark.slow
def test_lbfgs_needs_a_third_of_the_evaluations_of_adamw(tmp_path: Path) -> None:
    """On rows that stay the same. AdamW may take the best of four rates."""
    data = tmp_path / "wave.txt"
    data.write_bytes(
        bytes(round(80 + 15 * math.sin(2 * math.pi * place / 17)) for place in range(8 * 32))
    )  # one batch
    shape = (
        "--vocab-size",
        "bytes",
        "--embd",
        32,
        "--head",
        4,
        "--layer",
        1,
        "--ff",
        64,
        "--precision",
        "f32",
        "--no-shuffle",
    )
    ran(
        "from-scratch",
        data,
        *shape,
        *FIXED,
        "--optimizer",
        "lbfgs",
        "--iters",
        40,
        "--out",
        tmp_path / "lbfgs",
    )
    reached = losses(tmp_path / "lbfgs")[-1]
    needed = open_gguf(tmp_path / "lbfgs" / "checkpoint-LATEST.gguf").get_value(
        "optimizer.lbfgs.evaluations", int
    )
    adamw = []
    for rate in (1e-3, 3e-3, 1e-2, 3e-2):
        given = (
            "--lr",
            rate,
            "--schedule",
            "constant",
            "--warmup",
            0,
            "--weight-decay",
            0,
            "--iters",
            6 * needed,
        )
        ran("from-scratch", data, *shape, *FIXED, *given, "--out", tmp_path / f"adamw-{rate}")
        adamw.append(evaluations_to(tmp_path / f"adamw-{rate}", reached))
    assert 3 * needed <= min(adamw), (needed, adamw)
