"""What all tests share."""

import signal
from importlib.util import find_spec

import pytest

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in the background of a script: those who are started would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("torch") is None:
        for item in items:
            if item.get_closest_marker("reference"):
                item.add_marker(pytest.mark.skip(reason="torch is not installed"))
