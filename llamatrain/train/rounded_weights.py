"""Weights that products read as the exported file will hold them, for quantization-aware training.

In the graph that is differentiated, such a weight is `fake_quantize` of what is trained, whose gradient passes
straight through. The graphs that run read the rounded weight from memory instead (`read_stored`): it is encoded
once per step, in the bytes of the file, and recomputed activations, validation and samples see the same values.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from llamatrain.engine.device import Device, Memory
from llamatrain.gguf import quants
from llamatrain.gguf.types import GgmlType
from llamatrain.graph.ops import fake_quantize
from llamatrain.graph.tensor import F32, QuantizedType, Tensor, quantized, state

# the trained arrays by name -> the encoded rows of a weight, in chunks
EncodeWeight = Callable[[str, Mapping[str, np.ndarray]], Iterable[np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class RoundedWeight:
    """A weight that is rounded to a type."""

    kind: GgmlType
    stored: Tensor  # the leaf that graphs read
    rounded: Tensor | None  # what it stands for in the graph that is differentiated; None: it is not trained

    @classmethod
    def make(cls, name: str, kind: GgmlType, shape: tuple[int, ...], *, decodes: bool) -> "RoundedWeight":
        """Return a weight that is not trained. If products decode its type, it is stored in it, else in float32."""
        stored = state(f"{name}.rounded", shape, quantized(kind.name) if decodes else F32)
        return cls(kind=kind, stored=stored, rounded=None)

    def trained_by(self, weight: Tensor) -> "RoundedWeight":
        """Return the weight with what is rounded."""
        return RoundedWeight(
            kind=self.kind, stored=self.stored, rounded=fake_quantize(weight, kind=self.kind.name)
        )

    @property
    def in_graph(self) -> Tensor:
        """The tensor that graphs are built on."""
        return self.stored if self.rounded is None else self.rounded


class RoundedWeights:
    """The rounded weights of a run in a device's memory."""

    def __init__(
        self, weights: Mapping[str, RoundedWeight], encode: EncodeWeight, device: Device, threads: int
    ) -> None:
        self.weights, self.encode, self.device, self.threads = weights, encode, device, threads
        self.memory: dict[str, Memory] = {
            weight.stored.name: device.allocate(weight.stored.nbytes) for weight in weights.values()
        }
        self._is_complete = False

    def update(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Round the weights again after a step; those that are not trained are encoded once."""
        for name, weight in self.weights.items():
            if weight.rounded is not None or not self._is_complete:
                self._write(weight, self.encode(name, arrays))
        self._is_complete = True

    def _write(self, weight: RoundedWeight, chunks: Iterable[np.ndarray]) -> None:
        """Write the encoded rows of a weight to its memory."""
        stored = weight.stored
        matrix = state("rows", (prod(stored.shape[:-1]), stored.shape[-1]), stored.dtype)
        width = stored.dtype.storage_shape(matrix.shape)[-1] * stored.dtype.size
        place = self.device.view(self.memory[stored.name], matrix, 0, (width, stored.dtype.size))
        row = 0
        for chunk in chunks:
            values = (
                chunk
                if isinstance(stored.dtype, QuantizedType)
                else quants.decode(chunk, weight.kind, threads=self.threads)
            )
            self.device.write(place, values, np.s_[row : row + len(values)])
            row += len(values)
