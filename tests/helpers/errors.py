"""Check errors by their code, so that a message can be reworded without changing tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llamatrain.errors import LlamatrainError


@contextmanager
def raises(
    code: str, kind: type[LlamatrainError] = LlamatrainError, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[LlamatrainError]]:
    """Expect an error of `kind` with this code. `match` checks values in the message, never whole sentences."""
    with pytest.raises(kind, match=match) as info:
        yield info
    assert info.value.code == code, f"{info.value} [{info.value.code}]"
