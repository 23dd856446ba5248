"""A vector of which each rank holds its segments: the first rank has it come piece by piece, while the others serve it."""

from collections.abc import Iterator, Sequence

import numpy as np

from llamatrain.distributed.comm import Comm
from llamatrain.train.parallel.partition import ParamSlice
from llamatrain.train.programs import FlatParams

Owned = Sequence[tuple[ParamSlice, int]]  # in the order of the vector, each with its rank


class GatheredState:
    """Of a kind of state; whoever goes through it has all of it come once."""

    dtype = np.dtype(np.float32)

    def __init__(self, world: Comm, kind: str, owned: Owned, own: FlatParams) -> None:
        self._world, self._kind, self._owned, self._own = world, kind, owned, own
        self.shape = (sum(cut.stop - cut.start for cut, _ in owned),)

    def __iter__(self) -> Iterator[np.ndarray]:
        """What is left half way comes all the same, and goes nowhere: the others have it under way."""
        self._world.from_first((self._kind, "", ""))
        room = np.empty(
            max((cut.stop - cut.start for cut, rank in self._owned if rank != self._world.rank), default=0),
            np.float32,
        )
        left = iter(self._owned)
        try:
            for cut, rank in left:
                yield self._come(cut, rank, room)
        finally:
            for cut, rank in left:
                self._come(cut, rank, room)

    def _come(self, cut: ParamSlice, rank: int, room: np.ndarray) -> np.ndarray:
        """A piece, which is there until the next one comes."""
        if rank == self._world.rank:
            return self._own.parts[cut.key].reshape(-1)
        piece = room[: cut.stop - cut.start]
        self._world.receive(piece, rank)
        return piece

    def serve(self) -> None:
        """By all but the first."""
        for cut, rank in self._owned:
            if rank == self._world.rank:
                self._world.send(self._own.parts[cut.key].reshape(-1), 0)
