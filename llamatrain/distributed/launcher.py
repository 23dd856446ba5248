"""What a launcher says of the processes that it has started: mpiexec, srun, and whatever starts them on a cluster."""

import os
from dataclasses import dataclass

RANKS = "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"
SIZES = "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"
STEP, TASK = (
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
)  # of Slurm, which may start processes that are to know nothing of each other
DIGITS = 9


@dataclass(frozen=True)
class LaunchInfo:
    rank: int
    size: int | None  # None: it does not say
    joined: bool  # whether it is one that lets them find each other

    @property
    def several(self) -> bool:
        return self.rank > 0 or (self.size or 0) > 1

    @property
    def words(self) -> str:
        return f"{self.size if self.size and self.size > 1 else 'several'} processes were started together"


def launched() -> LaunchInfo | None:
    """None where nobody has started several."""
    found, size = first_of(RANKS), first_of((*SIZES, STEP))
    if found is not None or first_of(SIZES) is not None:
        return LaunchInfo(found or 0, size, joined=True)
    if size is not None and size > 1:
        return LaunchInfo(first_of((TASK,)) or 0, size, joined=False)
    return None


def unlaunched() -> dict[str, str]:
    """The environment of a process that works for one of them and is none itself: it would wait to be joined."""
    return {name: value for name, value in os.environ.items() if name not in (*RANKS, *SIZES, STEP)}


def first_of(names: tuple[str, ...]) -> int | None:
    """What is no number, or more than there can be, was written by no launcher."""
    values = (os.environ.get(name, "") for name in names)
    return next(
        (int(value) for value in values if value.isdecimal() and value.isascii() and len(value) <= DIGITS),
        None,
    )
