"""`llamatrain export-lora` as a process: the memory it takes, and what an interrupt leaves."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters import gguf
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.writer import create_gguf
from llamatrain.model.hyperparameters import Hyperparameters
from tests.helpers.adapter_files import adapter
from tests.helpers.cli import environment, finished, started, until
from tests.helpers.small_models import EMBEDDINGS, small

LARGE = small(
    vocab=50_000, embd=1024, heads=8, kv_heads=8, head_size=128, layers=1, ff=256
)  # 100 MB of embeddings in F16


def large(folder: Path, h: Hyperparameters = LARGE, kind: str = "F16") -> tuple[Path, Path]:
    """Weights that are all alike, quickly written."""
    path = folder / "base.gguf"
    kinds = {name: type_by_name(kind if len(shape) == 2 else "F32") for name, shape in h.shapes.items()}
    infos = [TensorInfo(name, kinds[name], shape) for name, shape in h.shapes.items()]
    with create_gguf(path, h.metadata("large"), infos) as out:
        for info in infos:
            raw = (
                np.full(info.nbytes // 2, 0x2C00, np.uint16)
                if info.type.name == "F16"
                else np.ones(info.elements, np.float32)
            )
            out.write(info.name, raw)
    gguf.write_adapter(folder / "a.gguf", adapter(h, (EMBEDDINGS, "blk.0.attn_q.weight"), rank=2))
    return path, folder / "a.gguf"


PEAK = """
import re, sys
from pathlib import Path
from tests.helpers.cli import ran
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
def export(folder, kind):
    ran("export-lora", f"{folder}/base.gguf", "--lora", f"{folder}/a.gguf", "--out", f"{folder}/m.gguf", "--type", kind)
export(sys.argv[1], sys.argv[3])
before = peak()
export(sys.argv[2], sys.argv[3])
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is told otherwise there")
@pytest.mark.parametrize("kind", ["keep", "q8_0"])
def test_the_memory_it_takes(tmp_path: Path, kind: str) -> None:
    """Of a tensor of 100 MB some rows at a time, be it merged (embeddings) or copied (output); beyond a tiny export."""
    for name, h in (("tiny", small(embd=64, vocab=64)), ("large", LARGE)):
        (tmp_path / name).mkdir()
        large(tmp_path / name, h)
    made = [sys.executable, "-c", PEAK, tmp_path / "tiny", tmp_path / "large", kind]
    done = subprocess.run(made, env=environment(), capture_output=True, text=True, check=True, timeout=60)
    assert (tmp_path / "large" / "m.gguf").stat().st_size > 100_000_000
    assert int(done.stdout) < 50_000_000


@pytest.mark.skipif(os.name == "nt", reason="signals are others there")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_an_interrupt_leaves_no_half_file(tmp_path: Path, number: int, code: int) -> None:
    base, lora = large(tmp_path)
    (tmp_path / "m.gguf").write_text("what was there")
    there = set(tmp_path.iterdir())
    arguments = ("--lora", lora, "--out", tmp_path / "m.gguf", "--type", "q3_k", "--overwrite")
    with started("export-lora", base, *arguments) as process:
        until(lambda: len(list(tmp_path.iterdir())) > len(there), process)
        process.send_signal(number)
        done = finished(process)
    assert done.code == code and not done.errors and "Traceback" not in done.err
    assert set(tmp_path.iterdir()) == there and (tmp_path / "m.gguf").read_text() == "what was there"
