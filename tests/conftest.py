"""What all tests share."""

from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("torch") is None:
        for item in items:
            if item.get_closest_marker("reference"):
                item.add_marker(pytest.mark.skip(reason="torch is not installed"))
