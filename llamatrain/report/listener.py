"""Passes each line of metrics to a Python program while a run goes on."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Listener = Callable[[Mapping[str, Any]], object]
_listeners = list[Listener]()


@contextmanager
def add_listener(listener: Listener | None) -> Iterator[None]:
    """Call `listener` with each line of metrics.jsonl while the context is open; its errors end the run."""
    if listener is None:
        yield
        return
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def notify(line: Mapping[str, Any]) -> None:
    """Call all listeners with a line."""
    for listener in tuple(_listeners):
        listener(line)
