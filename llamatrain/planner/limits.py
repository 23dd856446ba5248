"""How much memory a run may take, and that nothing before it takes more."""

from collections.abc import Iterable, Iterator

from llamatrain.config.units import Size
from llamatrain.distributed.comm import get_comm
from llamatrain.errors import MemoryPlanError
from llamatrain.platform.memory import available_bytes, resident_bytes

SHARE = 0.9  # of what is free, where no limit is given


def allowed(told: int | None) -> int | None:
    """Bytes that a run may take: as it was told, or nearly all that is free, its own share included."""
    if told is not None:
        return told
    free = available_bytes()
    return None if free is None else int((free / get_comm().local_size + resident_bytes()) * SHARE)


def check_held(told: int | None) -> None:
    """What the program has taken before its run is planned is a part of what it was told to take."""
    if told is not None and (held := resident_bytes()) > told:
        raise MemoryPlanError(
            f"the program itself holds {Size(held).text} by now, and --memory allows {Size(told).text}"
        )


def within(told: int | None, texts: Iterable[str]) -> Iterator[str]:
    """The texts, as long as what is made of them leaves the program within its limit."""
    for text in texts:
        yield text
        check_held(told)
