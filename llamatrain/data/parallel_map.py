"""Maps a function over groups of items on all cores, in order, with a progress bar."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from llamatrain.data.files import DataFile
from llamatrain.data.find_files import describe_files
from llamatrain.platform.terminal import progress_bar

MAX_ITEMS = 256  # lines or samples in a task
MAX_PENDING_BYTES = 8 << 20  # bytes of unfinished tasks, not counting one
A = TypeVar("A")
B = TypeVar("B")


def group_items(items: Iterable[tuple[int, A]]) -> Iterator[tuple[int, list[A]]]:
    """Group items into tasks of limited count and size; yield each group with its bytes."""
    group = list[A]()
    size = 0
    for bytes_, item in items:
        group.append(item)
        size += bytes_
        if len(group) == MAX_ITEMS or size > 1 << 20:
            yield size, group
            group = []
            size = 0
    if group:
        yield size, group


def map_in_order(
    work: Callable[[A], B], items: Iterable[tuple[int, A]], sources: list[DataFile]
) -> Iterator[B]:
    """Yield results in the order of the items, computed on all cores with few held at once."""
    from llamatrain.distributed.cores import count_cores

    pending = deque[tuple[int, Future[B]]]()
    with encoding_bar(sources) as bar, ThreadPoolExecutor(threads := count_cores()) as pool:

        def take_first() -> B:
            size, future = pending.popleft()
            result = future.result()
            bar.update(size)
            return result

        try:
            for size, item in items:
                pending.append((size, pool.submit(work, item)))
                while len(pending) > 2 * threads or sum(size for size, _ in pending) > MAX_PENDING_BYTES:
                    yield take_first()
            while pending:
                yield take_first()
        finally:
            for _, future in pending:
                future.cancel()


def encoding_bar(sources: list[DataFile]) -> Any:
    """Return a progress bar that counts bytes, up to their total if it is known."""
    total = sum(source.size for source in sources) if all(source.is_plain for source in sources) else None
    return progress_bar(f"tokenizing {describe_files(sources)}", total=total, unit="B", unit_scale=True)
