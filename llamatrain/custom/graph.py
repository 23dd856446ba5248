"""A graph and its weights. The first axis of inputs and of the output is the batch."""

import math
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from llamatrain.config.messages import quote
from llamatrain.errors import FileError, GraphError
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import string
from llamatrain.gguf.writer import create_gguf, find_bad_name
from llamatrain.graph.ops import conv_2d, matmul, reshape
from llamatrain.graph.ops.convolution import Pair, pair
from llamatrain.graph.tensor import F32, I32, DType, Tensor, parameter, placeholder
from llamatrain.io.mapped_file import verify_unchanged
from llamatrain.model.load import decode_tensor

MAX_AXES = 4  # of a tensor in GGUF
ARCHITECTURE = "general.architecture"


class Graph:
    """A graph: inputs, named weights and an output. Between them are nodes of `graph.ops`."""

    def __init__(self, batch: int = 32, *, seed: int = 0, name: str = "custom") -> None:
        """Start a graph for batches of this many samples.

        `seed` determines the initial weights; `name` is the architecture in files.
        """
        for value, least, what in ((batch, 1, "batch"), (seed, 0, "seed")):
            if not isinstance(value, int) or value < least:
                raise GraphError(
                    f"{what} must be a whole number of at least {least} (got {quote(value)})",
                    code=f"invalid-{what}",
                )
        self.batch, self.seed, self.name = batch, seed, name
        self.inputs: dict[str, Tensor] = {}
        self.parameters: dict[str, Tensor] = {}
        self.weights: dict[str, np.ndarray] = {}  # values of the parameters
        self._output: Tensor | None = None

    def input(self, shape: tuple[int, ...], name: str = "input", dtype: DType = F32) -> Tensor:
        """Add an input with samples of this shape, and return it with the batch as first axis."""
        if name in self.inputs:
            raise GraphError(f"the graph has an input {quote(name)} already", code="name-taken")
        if dtype not in (F32, I32):
            raise GraphError(f"input {name}: its type must be f32 or i32 (got {dtype})", code="invalid-input")
        self.inputs[name] = placeholder(name, (self.batch, *shape), dtype)
        return self.inputs[name]

    def weight(self, name: str, shape: tuple[int, ...], initial: ArrayLike | None = None) -> Tensor:
        """Add a weight and return it.

        `initial` is a number or an array. Without it, values are normal with mean 0 and variance 2 / inputs,
        where inputs are the elements of all axes but the first (He et al. 2015).
        """
        if name in self.weights:
            raise GraphError(f"the graph has a weight {quote(name)} already", code="name-taken")
        tensor = parameter(name, shape)
        if not 1 <= len(tensor.shape) <= MAX_AXES or not tensor.size:
            raise GraphError(
                f"weight {name}: needs 1 to {MAX_AXES} axes, none of them empty (got {list(tensor.shape)})",
                code="invalid-shape",
            )
        if problem := find_bad_name([tensor_info(tensor)]):
            raise GraphError(problem, code="invalid-tensor-name")
        self.weights[name] = initial_values(tensor, self.seed, initial)
        self.parameters[name] = tensor
        return tensor

    def linear(self, name: str, x: Tensor, outputs: int, *, bias: bool = True) -> Tensor:
        """Return x wᵀ + b over the last axis, with the new weights NAME.weight and NAME.bias."""
        weight = self.weight(f"{name}.weight", (outputs, x.shape[-1]))
        biases = [self.weight(f"{name}.bias", (outputs,), 0.0)] if bias else []
        rows = reshape(x, shape=(math.prod(x.shape[:-1]), x.shape[-1]))
        return reshape(matmul(rows, weight, *biases), shape=(*x.shape[:-1], outputs))

    def conv_2d(
        self,
        name: str,
        x: Tensor,
        filters: int,
        size: int | Pair,
        *,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        dilation: int | Pair = 1,
        bias: bool = True,
    ) -> Tensor:
        """Return the convolution of images (N, C, H, W), with the new weights NAME.weight and NAME.bias."""
        channels = x.shape[1] if len(x.shape) == 4 else 1  # other shapes are refused below
        weight = self.weight(f"{name}.weight", (filters, channels, *pair(size)))
        biases = [self.weight(f"{name}.bias", (filters,), 0.0)] if bias else []
        return conv_2d(x, weight, *biases, stride=stride, padding=padding, dilation=dilation)

    @property
    def output(self) -> Tensor:
        """The output: scores, predictions or losses of each sample."""
        if self._output is None:
            raise GraphError("the graph has no output; set `graph.output`", code="no-output")
        return self._output

    @output.setter
    def output(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor) or tensor.shape[:1] != (self.batch,) or tensor.dtype is not F32:
            raise GraphError(
                f"the output must be an f32 tensor whose first axis is the batch of {self.batch} (got {tensor!r})",
                code="invalid-output",
            )
        self._output = tensor

    # ---- files -------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the weights to a GGUF file."""
        infos = [tensor_info(tensor) for tensor in self.parameters.values()]
        with create_gguf(path, {ARCHITECTURE: string(self.name)}, infos) as file:
            for name, array in self.weights.items():
                file.write(name, array)

    def load(self, path: str | Path) -> None:
        """Read the weights from a GGUF file, which must have them all, and no others."""
        gguf = open_gguf(path)
        if (name := gguf.get_value(ARCHITECTURE, str)) != self.name:
            raise FileError(
                f"{path}: has the graph {quote(name)}, and this one is {quote(self.name)}", code="other-graph"
            )
        shapes = {name: tensor.shape for name, tensor in gguf.tensors.items()}
        check_shapes(path, shapes, {name: array.shape for name, array in self.weights.items()})
        with verify_unchanged(gguf.mapped_files):
            loaded = {name: decode_tensor(gguf, gguf.tensors[name]) for name in self.weights}
        if bad := next((name for name, array in loaded.items() if not np.isfinite(array).all()), None):
            raise FileError(f"{path}: the weight {bad} has NaN or infinity", code="not-finite")
        for name, array in loaded.items():
            self.weights[name][...] = array


def tensor_info(tensor: Tensor) -> TensorInfo:
    """Return a weight's entry in a file."""
    return TensorInfo(tensor.name, type_by_name("F32"), tensor.shape)


def initial_values(tensor: Tensor, seed: int, initial: ArrayLike | None) -> np.ndarray:
    """Return the initial values of a weight. Each has a generator of its own, seeded by its name."""
    if initial is None:
        generator = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
        inputs = math.prod(tensor.shape[1:]) if len(tensor.shape) > 1 else 1
        return generator.standard_normal(tensor.shape, np.float32) * np.float32(math.sqrt(2 / inputs))
    try:
        values = np.broadcast_to(np.asarray(initial, np.float32), tensor.shape).copy()
    except (TypeError, ValueError):
        raise GraphError(
            f"weight {tensor.name}: the initial values must be a number or an array {list(tensor.shape)} "
            f"(got {quote(initial)})",
            code="invalid-weight",
        ) from None
    if not np.isfinite(values).all():
        raise GraphError(f"weight {tensor.name}: initial values are not finite", code="invalid-weight")
    return values


def check_shapes(
    path: str | Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that a file has the weights of a graph."""
    for name in [*expected, *found]:
        if found.get(name) != expected.get(name):
            there, here = (
                f"{list(shapes[name])}" if name in shapes else "missing" for shapes in (found, expected)
            )
            raise FileError(
                f"{path}: does not fit the graph: the weight {quote(name)} is {there} in the file and {here} in the graph",
                code="other-graph",
            )
