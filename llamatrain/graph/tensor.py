"""The symbolic graph: tensors, the nodes that make them, and the ops that say what a node is.

A graph is nothing but its output tensors: each knows the node that makes it, each node its sources. Nodes carry a serial
number and are made after their sources, so sorting by it is a topological order; nothing here recurses.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Any

import numpy as np

from llamatrain.errors import GraphError
from llamatrain.gguf.types import GgmlType, type_by_name


@dataclass(frozen=True)
class DType:
    """An element type, and how numpy holds it."""

    name: str
    numpy: np.dtype

    @property
    def size(self) -> int:
        return self.numpy.itemsize

    def storage_shape(self, shape: "Shape") -> "Shape":
        """The shape of the array that holds such a tensor."""
        return shape

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, repr=False)
class QuantizedType(DType):
    """A weight as a GGUF file holds it, of any of ggml's types: bytes, a row of blocks for each of its rows. It is only read."""

    kind: GgmlType

    def storage_shape(self, shape: "Shape") -> "Shape":
        return (*shape[:-1], self.kind.row_bytes(shape[-1]))


F32 = DType("f32", np.dtype(np.float32))
F64 = DType("f64", np.dtype(np.float64))
BF16 = DType("bf16", np.dtype(np.uint16))  # numpy has no bfloat16: its bits
I32 = DType("i32", np.dtype(np.int32))

Shape = tuple[int, ...]


class DynamicDim(int):
    """The length of a first axis that varies (graph/varying.py): a run has so much of it at most, in multiples of a step."""

    step: int

    def __new__(cls, length: int, step: int) -> "DynamicDim":
        dim = super().__new__(cls, length)
        dim.step = step
        return dim


@cache
def quantized(name: str) -> QuantizedType:
    """The type that ggml calls so, as in `quantised("Q4_0")`."""
    try:
        return QuantizedType(name.lower(), np.dtype(np.uint8), type_by_name(name))
    except KeyError:
        raise GraphError(f"ggml has no type called {name!r}") from None


@dataclass(frozen=True)
class Spec:
    """What is known of an array before there is one."""

    shape: Shape
    dtype: DType

    def __post_init__(self) -> None:
        if not all(isinstance(size, int) and size >= 0 for size in self.shape) or not isinstance(
            self.dtype, DType
        ):
            raise ShapeError(f"{self.dtype}{list(self.shape)} is no type and shape that an array can have")
        if isinstance(self.dtype, QuantizedType) and (
            len(self.shape) != 2 or self.shape[1] % self.dtype.kind.block_size
        ):
            raise ShapeError(
                f"{list(self.shape)} is no matrix with rows of whole {self.dtype} blocks of {self.dtype.kind.block_size}"
            )


class ShapeError(Exception):
    """Raised by a shape rule: what does not fit. The op adds its name and what it received."""


class Tensor:
    """A value of the graph. Leaves have no node and a role: input, parameter or state."""

    __slots__ = ("dtype", "index", "name", "node", "role", "shape")

    def __init__(
        self, spec: Spec, role: str, name: str = "", node: "Node | None" = None, index: int = 0
    ) -> None:
        self.shape, self.dtype, self.role, self.name, self.node, self.index = (
            spec.shape,
            spec.dtype,
            role,
            name,
            node,
            index,
        )

    @property
    def spec(self) -> Spec:
        return Spec(self.shape, self.dtype)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.dtype.storage_shape(self.shape)) * self.dtype.size

    def __repr__(self) -> str:
        return f"{self.name or self.role} {self.dtype}{list(self.shape)}"


def leaf(role: str, name: str, shape: Iterable[int], dtype: DType = F32) -> Tensor:
    if isinstance(dtype, QuantizedType) and role != "state":
        raise GraphError(f"{role} {name}: a {dtype} weight is only read; make it a state")
    try:
        lengths = tuple(size if isinstance(size, DynamicDim) else int(size) for size in shape)
        return Tensor(Spec(lengths, dtype), role, name)
    except ShapeError as misfit:
        raise GraphError(f"{role} {name}: {misfit}") from None


def placeholder(name: str, shape: Iterable[int], dtype: DType = F32) -> Tensor:
    """An input: written before each run."""
    return leaf("input", name, shape, dtype)


def parameter(name: str, shape: Iterable[int], dtype: DType = F32) -> Tensor:
    return leaf("parameter", name, shape, dtype)


def state(name: str, shape: Iterable[int], dtype: DType = F32) -> Tensor:
    """Memory that runs read and change: moments, caches, kept gradients."""
    return leaf("state", name, shape, dtype)


class Node:
    """One application of an op."""

    __slots__ = ("attrs", "op", "outputs", "serial", "sources")

    counter = itertools.count()

    def __init__(self, op: "Op", sources: tuple[Tensor, ...], attrs: dict[str, Any], name: str = "") -> None:
        self.op, self.sources, self.attrs, self.serial = op, sources, attrs, next(Node.counter)
        specs = op.check_specs(sources, attrs, name)
        self.outputs = tuple(Tensor(spec, "value", name, self, index) for index, spec in enumerate(specs))

    @property
    def name(self) -> str:
        return self.outputs[0].name or f"{self.op.name}#{self.serial}"

    @property
    def aliases(self) -> Mapping[int, int]:
        """Which output is which source, changed in its place."""
        return {0: 0} if self.attrs.get("into") else self.op.aliases

    def __repr__(self) -> str:
        sources = ", ".join(
            source.name or (f"%{source.node.serial}" if source.node else "?") for source in self.sources
        )
        return f"{self.name} = {self.op.name}({sources})"


@dataclass(frozen=True)
class Layout:
    """Where a tensor's elements lie in the memory of another: offset and strides, in elements."""

    offset: int
    strides: tuple[int, ...]


def dense(shape: Shape) -> tuple[int, ...]:
    """The strides of elements in C order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


ShapeRule = Callable[..., "Spec | tuple[Spec, ...]"]
Gradients = Sequence["Tensor | None"]


@dataclass(eq=False, repr=False)
class Op:
    """A shape rule, a gradient rule (or why there is none), and, by its name, a kernel; with what else is known of it."""

    rule: ShapeRule
    _: KW_ONLY
    in_place: tuple[
        tuple[int, int], ...
    ] = ()  # (output, source): the output may take over the source's memory
    aliases: Mapping[int, int] = field(default_factory=dict)  # output: source, changed where it lies
    layout: Callable[..., Layout | None] | None = None  # a view's rule: it moves no bytes
    takes_views: bool = False  # its kernels take sources of any layout
    quantized_source: int | None = None  # the source that may be a quantised weight
    rounded_sources: tuple[int, ...] = ()  # the sources that mixed precision rounds to bfloat16
    rounds_outputs: bool = False  # of sources in bfloat16, results in it
    is_cheap: bool = False  # costs little more than reading its sources: made again before anything dear is
    masked_outputs: tuple[int, ...] = ()  # outputs where minus infinity means nothing seen there
    value_output: int | None = None  # of a gradient op: the output that is its forward op's result as well
    stops_gradient: bool = False  # no gradient is asked of what it is made of
    no_gradient: str = ""  # why there is none
    gradient: Callable[..., Gradients] | None = field(default=None, init=False)
    selective: bool = field(default=False, init=False)  # the gradient rule is told which gradients are wanted

    def __post_init__(self) -> None:
        self.name, self.__doc__ = self.rule.__name__, self.rule.__doc__

    def __call__(self, *sources: Tensor, name: str = "", **attrs: Any) -> Any:
        outputs = Node(self, sources, attrs, name).outputs
        return outputs if len(outputs) > 1 else outputs[0]

    def check_specs(
        self, sources: Sequence[Tensor], attrs: dict[str, Any], name: str = ""
    ) -> tuple[Spec, ...]:
        if foreign := [source for source in sources if not isinstance(source, Tensor)]:
            raise GraphError(
                f"{self.name}{f' ({name})' if name else ''}: {foreign[0]!r} is no tensor of a graph"
            )
        try:
            return self.infer_specs(*(source.spec for source in sources), **attrs)
        except (ShapeError, TypeError, ValueError, IndexError) as misfit:
            received = ", ".join(
                f"{s.name or f'source {i}'} {s.dtype}{list(s.shape)}" for i, s in enumerate(sources)
            )
            raise GraphError(
                f"{self.name}{f' ({name})' if name else ''}: {misfit}; received {received or 'no source'}"
            ) from None

    def infer_specs(self, *sources: Spec, **attrs: Any) -> tuple[Spec, ...]:
        for index, source in enumerate(sources):
            if isinstance(source.dtype, QuantizedType) and index != self.quantized_source:
                raise ShapeError(
                    f"a {source.dtype} weight is not taken as source {index}; {', '.join(quantized_ops())} read such"
                )
        specs = self.rule(*sources, **attrs)
        return specs if isinstance(specs, tuple) else (specs,)

    def __repr__(self) -> str:
        return self.name


OPS: dict[str, Op] = {}


def quantized_ops() -> list[str]:
    return [name for name, each in OPS.items() if each.quantized_source is not None]


def op(**facts: Any) -> Callable[[ShapeRule], Op]:
    """Declare an op by its shape rule: specs and attributes in, spec or specs out. Its facts are the fields of `Op`."""

    def declare(rule: ShapeRule) -> Op:
        OPS[rule.__name__] = declared = Op(rule, **facts)
        return declared

    return declare


def gradient(
    of: Op, selective: bool = False
) -> Callable[[Callable[..., Gradients]], Callable[..., Gradients]]:
    """Declare `of`'s gradient: node and the gradients of its outputs in, one gradient (or None) a source out.

    A selective rule is told for which sources a gradient is `wanted`: its op computes several in one go.
    """

    def declare(rule: Callable[..., Gradients]) -> Callable[..., Gradients]:
        of.gradient, of.selective = rule, selective
        return rule

    return declare


# ---- walks -----------------------------------------------------------------


def collect_nodes(outputs: Iterable[Tensor]) -> list[Node]:
    """Every node that the outputs need, each after its sources."""
    nodes: dict[int, Node] = {}
    waiting = [output.node for output in outputs if output.node]
    while waiting:
        node = waiting.pop()
        if node.serial not in nodes:
            nodes[node.serial] = node
            waiting.extend(source.node for source in node.sources if source.node)
    return [nodes[serial] for serial in sorted(nodes)]


def collect_leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaves that the outputs need, in the order of their first use."""
    outputs = list(outputs)
    sources = itertools.chain(*(node.sources for node in collect_nodes(outputs)), outputs)
    return list(dict.fromkeys(source for source in sources if source.node is None))


def find_base(tensor: Tensor) -> Tensor:
    """What this is a view of: a leaf or a node's result, in the state that it had then."""
    while tensor.node and tensor.node.op.layout:
        (tensor,) = tensor.node.sources
    return tensor
