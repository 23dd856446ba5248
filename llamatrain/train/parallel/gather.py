"""Gathers a sharded optimizer state on rank 0, piece by piece, for a checkpoint."""

from collections.abc import Iterator, Sequence

import numpy as np

from llamatrain.distributed.comm import Comm
from llamatrain.train.parallel.partition import ParamSlice
from llamatrain.train.programs import FlatParams

Owned = Sequence[tuple[ParamSlice, int]]  # in the order of the vector, each with its rank


class GatheredState:
    """A state whose pieces are sent to rank 0 while it is iterated."""

    dtype = np.dtype(np.float32)

    def __init__(self, world: Comm, kind: str, owned: Owned, own: FlatParams) -> None:
        self._world, self._kind, self._owned, self._own = world, kind, owned, own
        self.shape = (sum(cut.stop - cut.start for cut, _ in owned),)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield all pieces in order.

        If iteration stops early, the rest is received and dropped, because the other ranks are sending it.
        """
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
        """Return a piece, valid until the next one is requested."""
        if rank == self._world.rank:
            return self._own.parts[cut.key].reshape(-1)
        piece = room[: cut.stop - cut.start]
        self._world.receive(piece, rank)
        return piece

    def serve(self) -> None:
        """Send this rank's pieces to rank 0."""
        for cut, rank in self._owned:
            if rank == self._world.rank:
                self._world.send(self._own.parts[cut.key].reshape(-1), 0)
