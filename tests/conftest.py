"""What all tests share."""

import gc
import os
import signal
import tempfile
from importlib.util import find_spec

import pytest

# In the background of a script it is ignored, and would be by whoever is started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # llama.cpp would wait in a debugger when it gives up
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the processors: a second thread in each would mostly wait for the first.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from llamatrain.distributed import cores

    cores.count_cpus = lambda: 1

# The key that tells a user's own checkpoints; processes that tests start find the same.
STATE = tempfile.TemporaryDirectory(prefix="llamatrain-state-")
os.environ["XDG_STATE_HOME"] = STATE.name


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes name no test: packed ones hold the time, and every process has to find the same names."""
    return argname if isinstance(val, bytes) else None


# A test with the marker is skipped at once if none of these packages is installed.
PEERS = {"reference": ("torch",), "llama_cpp": ("xllamacpp", "llama_cpp")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, packages in PEERS.items():
        if any(map(find_spec, packages)):
            continue
        missing = pytest.mark.skip(reason=f"{' or '.join(packages)} is not installed")
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(missing)


def pytest_collection_finish() -> None:
    """Keep the collector from walking all modules and tests again and again, which took a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, *gc.get_threshold()[1:])
