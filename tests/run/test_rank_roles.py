"""Errors of a save on rank 0 reach the other ranks."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from llamatrain.errors import FileError
from llamatrain.run.rank_roles import FollowerCheckpointer, RankZeroCheckpointer
from llamatrain.train.state import RunState
from tests.helpers.errors import raises


@dataclass
class OneMessage:
    """Keeps what rank 0 sends, and returns it to the follower."""

    messages: list[Any] = field(default_factory=list)
    is_root: bool = True

    def broadcast(self, value: Any) -> Any:
        if self.is_root:
            self.messages.append(value)
            return value
        return self.messages.pop(0)


class FullDisk:
    def save(self, state: RunState, last: bool = False) -> str:
        raise FileError("c.gguf: cannot be written: no space", code="write-failed")


class Disk:
    def save(self, state: RunState, last: bool = False) -> str:
        return "c.gguf"


def test_a_follower_raises_the_error_of_rank_0_with_its_code() -> None:
    comm: Any = OneMessage()
    with pytest.raises(FileError):
        RankZeroCheckpointer(FullDisk(), comm).save(None)  # type: ignore[arg-type]
    comm.is_root = False
    with raises("write-failed", match=r"c\.gguf: cannot be written: no space"):
        FollowerCheckpointer(None, comm).save(None)  # type: ignore[arg-type]


def test_a_follower_returns_the_path_of_the_checkpoint() -> None:
    comm: Any = OneMessage()
    RankZeroCheckpointer(Disk(), comm).save(None)  # type: ignore[arg-type]
    comm.is_root = False
    assert FollowerCheckpointer(None, comm).save(None) == "c.gguf"  # type: ignore[arg-type]
