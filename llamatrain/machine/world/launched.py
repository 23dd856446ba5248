"""What a launcher says of the processes that it has started: mpiexec, srun, and whatever starts them on a cluster."""

import os
from dataclasses import dataclass

RANKS = "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"
SIZES = "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"
STEP, TASK = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"  # of Slurm, which may start processes that are to know nothing of each other


@dataclass(frozen=True)
class Launched:
    rank: int
    size: int | None  # None: it does not say
    joined: bool  # whether it is one that lets them find each other


def launched() -> Launched | None:
    """None where nobody has started several."""
    found, size = first_of(RANKS), first_of((*SIZES, STEP))
    if found is not None or first_of(SIZES) is not None:
        return Launched(found or 0, size, joined=True)
    if size is not None and size > 1:
        return Launched(first_of((TASK,)) or 0, size, joined=False)
    return None


def first_of(names: tuple[str, ...]) -> int | None:
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdecimal()), None)
