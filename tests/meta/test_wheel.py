"""The wheel with kernels in it, in an environment without a compiler: every kernel of every class, at once, in little memory."""

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from llamatrain.compiler import prebuilt
from llamatrain.platform import systems

ROOT = Path(__file__).resolve().parents[2]
MOST = 10 << 20
FIRST, WHOLE, PEAK = (
    2.0,
    8.0,
    110e6,
)  # seconds to the first step and to the end of the demo on two processors, bytes
PEAKING = """
import re, runpy, sys, atexit
from pathlib import Path
atexit.register(lambda: print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]))
sys.argv = ["llamatrain", "from-scratch", "--out", "run"]
runpy.run_module("llamatrain", run_name="__main__")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    environment = {
        **os.environ,
        prebuilt.LIBRARIES_VARIABLE: str(folder / "libraries"),
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "build_wheel.py"), str(folder)], check=True, env=environment
    )
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.slow
def test_every_kernel_of_every_class_is_in_it(wheel: Path) -> None:
    assert (
        wheel.stat().st_size <= MOST and wheel.name.startswith("llamatrain-") and "-py3-none-" in wheel.name
    )
    host = systems.host_platform()
    classes = host.classes if host else ()
    with zipfile.ZipFile(wheel) as files:
        manifest = json.loads(files.read("llamatrain/compiler/libraries/manifest.json"))
        libraries = {name: files.read(f"llamatrain/compiler/libraries/{name}.so") for name in classes}
    assert manifest["libraries"].keys() == {*classes} and len(manifest["kernels"]) > 60
    for code in libraries.values():
        for where in manifest["kernels"]:
            assert code.count(re.sub(r"[.:]", "_", where).encode() + b"\0") == 1, where


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_the_demo_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    assert subprocess.run([python, "-c", "import numba"], capture_output=True, check=False).returncode
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}

    def timed(*words: str) -> tuple[float, float, str]:
        start, first, said = time.monotonic(), 0.0, []
        with subprocess.Popen(
            [python, *words], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
        ) as run:
            assert run.stderr
            for line in run.stderr:
                said.append(line)
                first = first or (line.startswith("step ") and time.monotonic() - start) or 0.0
        assert run.returncode == 0, "".join(said)
        return first, time.monotonic() - start, "".join(said)

    runs = [timed("-m", "llamatrain", "from-scratch", "--overwrite", "--out", "run") for _ in range(3)]
    assert min(first for first, _, _ in runs) <= FIRST and min(whole for _, whole, _ in runs) <= WHOLE
    assert not any("compil" in said or "numpy" in said for _, _, said in runs)
    peak = subprocess.run(
        [python, "-c", PEAKING], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert int(peak.stdout.split()[-1]) * 1024 <= PEAK
    assert not (tmp_path / ".cache" / "llamatrain" / "machine").exists()
