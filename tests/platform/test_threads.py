"""Little memory: a thread that there is no room for, and a part of the program that cannot be loaded, are told in words."""

import subprocess
import sys

import pytest

from llamatrain.cli import main as cli
from llamatrain.errors import words_of
from tests.helpers.emulator import needs_memory_limits

STARVED = """
import resource, threading
from pathlib import Path
from llamatrain.platform.threads import start_thread
first = threading.Thread(target=int)
first.start(), first.join()  # whose stack the next one takes
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
try:
    start_thread(threading.Thread(target=int, daemon=True))
except MemoryError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
@needs_memory_limits
def test_a_thread_without_memory_is_refused_and_not_waited_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARVED], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "for one more thread\n", done.stderr


def test_a_part_that_cannot_be_loaded_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> object:
        raise ImportError("numpy/random.so: failed to map\n segment from shared object")

    monkeypatch.setattr(cli.typer.main, "get_command", fail)
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err
    assert end.value.code == 1
    assert (
        said
        == "error: a part of the program cannot be loaded: numpy/random.so: failed to map segment from shared object\n"
    )
    assert words_of(ImportError()) == "a part of the program cannot be loaded: ImportError"
