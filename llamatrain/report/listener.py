"""Tells a Python program of each line of metrics while a run goes on."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Listener = Callable[[Mapping[str, Any]], object]
_listeners = list[Listener]()


@contextmanager
def add_listener(listener: Listener | None) -> Iterator[None]:
    """While this is open, call the listener with each line as metrics.jsonl has it; an error that it raises ends the run."""
    if listener is None:
        yield
        return
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def notify(line: Mapping[str, Any]) -> None:
    for listener in tuple(_listeners):
        listener(line)
