"""Computes how much memory a run may take, and checks what it takes before it is planned."""

from collections.abc import Iterable, Iterator

from llamatrain.config.units import Size
from llamatrain.distributed.comm import get_comm
from llamatrain.engine.device import create_device
from llamatrain.errors import MemoryPlanError
from llamatrain.platform.memory import available_bytes, resident_bytes

FREE_SHARE = 0.9  # share of the free memory that is the limit by default


def own_memory(device: str) -> int | None:
    """Return the bytes that a run may take of a device's own memory; None if it has only the host's."""
    return None if device in ("cpu", "reference") else create_device(device).memory_limit()


def memory_limit(option: int | None, device: str = "cpu") -> int | None:
    """Return the bytes that a run may take: the --memory option, or nearly all that is free on its device."""
    if option is not None:
        return option
    if (own := own_memory(device)) is not None:
        return own
    free = available_bytes()
    return None if free is None else int((free / get_comm().local_size + resident_bytes()) * FREE_SHARE)


def check_resident(limit: int | None, device: str = "cpu") -> None:
    """Raise if the process already takes more than the limit, which covers the whole process.

    On a device with memory of its own, the limit is for that.
    """
    if own_memory(device) is not None:
        return
    if limit is not None and (resident := resident_bytes()) > limit:
        raise MemoryPlanError(
            f"the program alone takes {Size(resident).text}, but --memory is {Size(limit).text}",
            code="out-of-memory",
        )


def read_within(limit: int | None, texts: Iterable[str]) -> Iterator[str]:
    """Yield texts, and raise when reading them takes more memory than the limit."""
    for text in texts:
        yield text
        check_resident(limit)
