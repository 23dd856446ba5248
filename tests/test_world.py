"""Processes that a launcher has started together: what they tell each other, and how they end."""

from tests.ranks import needs_mpi, python

MEETS = """
from llamatrain.machine.world import world
there = world()
print(there.rank, there.size, there.gathered(there.rank * 2), there.from_first("of %d" % there.rank), flush=True)
"""


@needs_mpi
def test_what_each_has_comes_to_all() -> None:
    done = python(3, "-c", MEETS)
    assert done.code == 0 and not done.err
    assert sorted(done.out.splitlines()) == [f"{rank} 3 [0, 2, 4] of 0" for rank in range(3)]
