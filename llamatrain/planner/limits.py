"""How much memory a run may take, and that nothing before it takes more."""

from collections.abc import Iterable, Iterator

from llamatrain.config.units import Size
from llamatrain.distributed.comm import get_comm
from llamatrain.errors import MemoryPlanError
from llamatrain.platform.memory import available_bytes, resident_bytes

FREE_SHARE = 0.9  # of what is free, where no limit is given


def memory_limit(option: int | None) -> int | None:
    """Bytes that a run may take: as it was told, or nearly all that is free, its own share included."""
    if option is not None:
        return option
    free = available_bytes()
    return None if free is None else int((free / get_comm().local_size + resident_bytes()) * FREE_SHARE)


def check_resident(limit: int | None) -> None:
    """What the program has taken before its run is planned is a part of what it was told to take."""
    if limit is not None and (resident := resident_bytes()) > limit:
        raise MemoryPlanError(
            f"the program itself holds {Size(resident).text} by now, and --memory allows {Size(limit).text}"
        )


def read_within(limit: int | None, texts: Iterable[str]) -> Iterator[str]:
    """The texts, as long as what is made of them leaves the program within its limit."""
    for text in texts:
        yield text
        check_resident(limit)
