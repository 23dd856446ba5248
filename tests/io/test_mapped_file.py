"""What is mapped of a file that is cut short: whoever reads there goes on, and any other fault is as ever."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from llamatrain.io import mapped_file
from llamatrain.io.madvise import release_pages
from llamatrain.platform.memory import resident_bytes
from tests.stress.test_inputs_changed import apart

pytestmark = pytest.mark.skipif(
    os.name != "posix", reason="elsewhere no file can be changed while it is mapped"
)


READERS = {
    "numpy": "array.sum()",
    "bytes": "bytes(file[:])",
    "crc32": "zlib.crc32(array)",
    "kernel": "quants.decode(array[: 18 * 1000 * 16].reshape(1000, -1), type_by_name('Q4_0'), threads=2)",
    "backwards": "[int(each) for each in array[::-4096]]",
}
READING = """
import os, sys, zlib
from pathlib import Path
import numpy as np
from llamatrain.gguf import quants
from llamatrain.io.mapped_file import mapped_files, map_file
from llamatrain.gguf.types import type_by_name
for reader in sys.argv[2:]:
    path = Path(sys.argv[1])
    path.write_bytes(b"\\1" * 300_000)
    file = map_file(path)
    array = np.frombuffer(file, np.uint8)
    assert file.describe_change() is None and mapped_files([array]) == [file]
    os.truncate(path, 5000)
    eval(reader)
    assert file.has_lost_pages and not array[8192:].any() and array[:5000].all(), reader
    print(file.describe_change())
"""


def test_whoever_reads_what_was_cut_off_goes_on(tmp_path: Path) -> None:
    """Numpy, Python, zlib, two threads of compiled code."""
    done = apart("-X", "faulthandler", "-c", READING, tmp_path / "f", *READERS.values())
    assert done.code == 0 and not done.err, (done.code, done.err)
    said = "was truncated from 300000 to 5000 bytes while it was being read"
    assert done.out.splitlines() == [said] * len(READERS)


STRANGE = """
import mmap, os, signal, sys
from pathlib import Path
from llamatrain.io.mapped_file import map_file
ours = map_file(Path(sys.argv[1]))
with open(sys.argv[2], "r+b") as file:
    theirs = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
os.truncate(sys.argv[2], 0)
print(theirs[5000])
"""


@pytest.mark.parametrize("handled", [False, True])
def test_another_fault_ends_the_process_as_ever(handled: bool, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(10_000))
    options = ["-X", "faulthandler"] if handled else []
    done = apart(*options, "-c", STRANGE, tmp_path / "a", tmp_path / "b")
    assert done.code == -signal.SIGBUS
    assert ("Fatal Python error: Bus error" in done.err) is handled


def descriptors() -> int:
    """That this process has open; 0 where nobody counts them."""
    there = Path("/proc/self/fd")
    return sum(1 for _ in there.iterdir()) if there.exists() else 0


def test_the_mapping_goes_with_its_last_view(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(10_000))
    before = descriptors()
    file = mapped_file.map_file(path)
    start = file.start
    del file
    assert start not in mapped_file.open_mappings
    assert descriptors() == before


def test_small_arrays_that_are_released_leave_nothing(tmp_path: Path) -> None:
    """The system maps pages around one that is read; those before it came back after they were let go. How many it maps follows
    from how the file came into its memory: four files are written and read in different ways."""
    size = 20_000
    for turn in range(4):
        (path := tmp_path / f"f{turn}").write_bytes(bytes(500 * size))
        if turn % 2:
            path.read_bytes()
        array = np.frombuffer(mapped_file.map_file(path), np.uint8)
        before = resident_bytes()
        for begin in range(0, len(array), size):
            part = array[begin : begin + size]
            part.max()
            release_pages(part)
        assert resident_bytes() - before < 1e6
