"""Files to test with that are no part of the project: tests that need them skip where they are not."""

import os
from pathlib import Path

import pytest

PLACE = Path(
    os.environ.get("LLAMATRAIN_TEST_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data"
)


def material(name: str) -> Path:
    """The file of this name in the folder of test data."""
    path = PLACE / name
    if not path.exists():
        pytest.skip(f"{path} is not there; LLAMATRAIN_TEST_DATA can name the folder of test data")
    return path
