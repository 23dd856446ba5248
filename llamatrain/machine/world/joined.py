"""The processes that a launcher has started, once they have found each other."""

from importlib.util import find_spec

from llamatrain.errors import UsageError
from llamatrain.machine.world.alone import Alone, World
from llamatrain.machine.world.launched import Launched

EXTRA = "pip install 'llamatrain[mpi]'"


def joined(told: Launched) -> World:
    many = f"{told.size} processes were started together"
    if not told.joined:
        raise UsageError(f"{many}, each as if it were alone: srun --mpi=pmix (or pmi2) lets them find each other")
    if find_spec("mpi4py") is None:
        if told.size in (None, 1):
            return Alone()
        raise UsageError(f"{many}, and what they speak by is not installed: {EXTRA}")
    from llamatrain.machine.world.mpi import Mpi

    found = Mpi()
    if told.size is not None and told.size > 1 and found.size == 1:
        raise UsageError(
            f"{many}, and found nobody: their launcher is of another MPI than mpi4py here; that of {EXTRA} is `mpiexec` beside it"
        )
    return found
