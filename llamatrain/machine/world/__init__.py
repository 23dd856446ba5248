"""How many processes a run is of, and what they tell each other. Only `mpi` knows MPI, and it is imported only where a launcher
has started the process.

What is called on all of them, in one order, says so; a process that is alone is all of them.
"""

from functools import cache

from llamatrain.machine.world.alone import Alone, World
from llamatrain.machine.world.launched import Launched, launched

__all__ = ["Launched", "World", "launched", "world"]


@cache
def world() -> World:
    """Those that this process was started with."""
    told = launched()
    if told is None:
        return Alone()
    from llamatrain.machine.world.joined import joined

    return joined(told)
