"""Gathers a sharded optimizer state on rank 0, piece by piece, for a checkpoint."""

from collections.abc import Iterator, Sequence

import numpy as np

from llamatrain.distributed.comm import Comm
from llamatrain.train.parallel.partition import ParamSlice
from llamatrain.train.programs import FlatParams

SliceOwners = Sequence[tuple[ParamSlice, int]]  # in the order of the vector, each with its rank


class GatheredState:
    """A state whose pieces are sent to rank 0 while it is iterated."""

    dtype = np.dtype(np.float32)

    def __init__(self, comm: Comm, kind: str, slices: SliceOwners, local: FlatParams) -> None:
        self._comm, self._kind, self._slices, self._local = comm, kind, slices, local
        self.shape = (sum(part.stop - part.start for part, _ in slices),)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield all pieces in order.

        If iteration stops early, the rest is received and dropped, because the other ranks are sending it.
        """
        self._comm.broadcast((self._kind, "", None))
        buffer = np.empty(
            max(
                (part.stop - part.start for part, rank in self._slices if rank != self._comm.rank), default=0
            ),
            np.float32,
        )
        remaining = iter(self._slices)
        try:
            for part, rank in remaining:
                yield self._receive_piece(part, rank, buffer)
        finally:
            for part, rank in remaining:
                self._receive_piece(part, rank, buffer)

    def _receive_piece(self, part: ParamSlice, rank: int, buffer: np.ndarray) -> np.ndarray:
        """Return a piece, valid until the next one is requested."""
        if rank == self._comm.rank:
            return self._local.parts[part.key].reshape(-1)
        piece = buffer[: part.stop - part.start]
        self._comm.receive(piece, rank)
        return piece

    def send_pieces(self) -> None:
        """Send this rank's pieces to rank 0."""
        for part, rank in self._slices:
            if rank == self._comm.rank:
                self._comm.send(self._local.parts[part.key].reshape(-1), 0)
