"""A thread in which all work of the page is done, one piece after the other.

Models are opened, and processes for templates started, in one thread, and two requests never compete for the
processor or the memory.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from llamatrain.platform.threads import start_thread

T = TypeVar("T")
END = object()


class Worker:
    """A thread that runs functions in the order in which they are given. It ends with the process."""

    def __init__(self) -> None:
        self._waiting = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]()
        start_thread(threading.Thread(target=self._run, daemon=True))

    def _run(self) -> None:
        while True:
            future, function = self._waiting.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function after those that were given before."""
        future = Future[T]()
        self._waiting.put((future, function))
        return future

    def call(self, function: Callable[[], T]) -> T:
        """Run a function, and return its result."""
        return self.submit(function).result()

    def stream(self, make_items: Callable[[], Iterable[T]]) -> Iterator[T]:
        """Yield the items that the worker makes.

        It does not wait for the one who reads them, and ends when the reader leaves.
        """
        items, left = queue.SimpleQueue[Any](), threading.Event()

        def produce() -> None:
            try:
                for item in make_items():
                    if left.is_set():
                        return
                    items.put(item)
            finally:
                items.put(END)

        done = self.submit(produce)
        try:
            while (item := items.get()) is not END:
                yield item
            done.result()
        finally:
            left.set()
            done.cancel()
