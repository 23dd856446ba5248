"""Reads from the environment if a launcher (mpiexec, srun) started this process, and as which rank."""

import os
from dataclasses import dataclass

from llamatrain.errors import UsageError

RANKS = "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"
SIZES = "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"
# environment variables of Slurm, which may also start independent processes
STEP = "SLURM_STEP_NUM_TASKS"
TASK = "SLURM_PROCID"
DIGITS = 9


@dataclass(frozen=True)
class LaunchInfo:
    """The rank and the number of processes as the launcher gives them."""

    rank: int
    size: int | None  # None: unknown
    can_join: bool  # the launcher supports MPI

    @property
    def is_multi_process(self) -> bool:
        """True if more than one process was started."""
        return self.rank > 0 or (self.size or 0) > 1

    @property
    def description(self) -> str:
        """A description of the launch for messages."""
        return f"{self.size if self.size and self.size > 1 else 'several'} processes were started together"


def get_launch_info() -> LaunchInfo | None:
    """Return the launch info, or None if no launcher started several processes."""
    rank, size = first_number(RANKS), first_number((*SIZES, STEP))
    if rank is not None or first_number(SIZES) is not None:
        return LaunchInfo(rank or 0, size, can_join=True)
    if size is not None and size > 1:
        return LaunchInfo(first_number((TASK,)) or 0, size, can_join=False)
    return None


def env_without_launcher() -> dict[str, str]:
    """Return the environment for a helper process, which must not join the run.

    It lacks the launcher's variables.
    """
    return {name: value for name, value in os.environ.items() if name not in (*RANKS, *SIZES, STEP)}


def first_number(names: tuple[str, ...]) -> int | None:
    """Return the first of these variables that is a valid number, or None."""
    values = (os.environ.get(name, "") for name in names)
    return next(
        (int(value) for value in values if value.isdecimal() and value.isascii() and len(value) <= DIGITS),
        None,
    )


def check_single_process(what: str, remedy: str) -> None:
    """Raise if several processes would each have an object of their own."""
    if (started := get_launch_info()) and started.is_multi_process:
        raise UsageError(
            f"{what} belong to one process, but {started.description}; {remedy}", code="single-process"
        )
