"""The symbolic graph: tensors, the nodes that compute them, and the ops that define a node.

A graph is given by its output tensors: each knows its node, and each node its sources. Nodes have a serial
number and are created after their sources, so sorting by it is a topological order; nothing here recurses.
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
    """An element type, and the numpy type that holds it."""

    name: str
    numpy: np.dtype

    @property
    def size(self) -> int:
        """The bytes of an element."""
        return self.numpy.itemsize

    def storage_shape(self, shape: "Shape") -> "Shape":
        """Return the shape of the array that holds a tensor of this type."""
        return shape

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, repr=False)
class QuantizedType(DType):
    """A quantized weight as in a GGUF file: rows of blocks, as bytes. It is read-only."""

    kind: GgmlType

    def storage_shape(self, shape: "Shape") -> "Shape":
        """Return the shape in bytes."""
        return (*shape[:-1], self.kind.row_bytes(shape[-1]))


@dataclass(frozen=True, repr=False)
class PackedType(DType):
    """A frozen matrix that a device has packed for its own products, in as many bytes as it says."""

    nbytes: int

    def storage_shape(self, shape: "Shape") -> "Shape":
        """Return the shape in bytes."""
        return (self.nbytes,)


F32 = DType("f32", np.dtype(np.float32))
F64 = DType("f64", np.dtype(np.float64))
BF16 = DType("bf16", np.dtype(np.uint16))  # numpy has no bfloat16; the bits are held as uint16
I32 = DType("i32", np.dtype(np.int32))

Shape = tuple[int, ...]


class DynamicDim(int):
    """The length of a dynamic first axis (dynamic_axis.py): the maximum, in multiples of a step."""

    step: int

    def __new__(cls, length: int, step: int) -> "DynamicDim":
        """Make a dimension with its step."""
        dim = super().__new__(cls, length)
        dim.step = step
        return dim


@cache
def quantized(name: str) -> QuantizedType:
    """Return the type of ggml's name, such as `quantized("Q4_0")`."""
    try:
        return QuantizedType(name.lower(), np.dtype(np.uint8), type_by_name(name))
    except KeyError:
        raise GraphError(f"ggml has no type {name!r}", code="unknown-type") from None


@dataclass(frozen=True)
class Spec:
    """The shape and type of an array."""

    shape: Shape
    dtype: DType

    def __post_init__(self) -> None:
        if not all(isinstance(size, int) and size >= 0 for size in self.shape) or not isinstance(
            self.dtype, DType
        ):
            raise ShapeError(f"{self.dtype}{list(self.shape)} is no type and shape that an array can have")
        if isinstance(self.dtype, QuantizedType) and (
            len(self.shape) not in (2, 3) or self.shape[-1] % self.dtype.kind.block_size
        ):
            raise ShapeError(
                f"{list(self.shape)} is no matrix or stack of matrices with rows of whole {self.dtype} blocks "
                f"of {self.dtype.kind.block_size}"
            )


def is_same_spec(one: Spec, other: Spec) -> bool:
    """Return True if a shape rule cannot tell the specs apart: a dynamic axis is more than its length."""
    return one is other or (
        one == other
        and not any(isinstance(size, DynamicDim) for spec in (one, other) for size in spec.shape[:1])
    )


class ShapeError(Exception):
    """Raised by a shape rule. The op adds its name and its sources."""


class Tensor:
    """A value of the graph. Leaves have no node and a role: input, parameter or state."""

    __slots__ = ("index", "name", "node", "role", "spec")

    def __init__(
        self, spec: Spec, role: str, name: str = "", node: "Node | None" = None, index: int = 0
    ) -> None:
        self.spec = spec
        self.role = role
        self.name = name
        self.node = node
        self.index = index

    @property
    def shape(self) -> Shape:
        """The shape."""
        return self.spec.shape

    @property
    def dtype(self) -> DType:
        """The type."""
        return self.spec.dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.dtype.storage_shape(self.shape)) * self.dtype.size

    def __repr__(self) -> str:
        return f"{self.name or self.role} {self.dtype}{list(self.shape)}"


def leaf(role: str, name: str, shape: Iterable[int], dtype: DType = F32) -> Tensor:
    """Create a leaf of a role."""
    if isinstance(dtype, QuantizedType) and role != "state":
        raise GraphError(
            f"{role} {name}: a {dtype} weight is read-only; make it a state", code="quantized-not-trainable"
        )
    try:
        lengths = tuple(size if isinstance(size, DynamicDim) else int(size) for size in shape)
        return Tensor(Spec(lengths, dtype), role, name)
    except ShapeError as misfit:
        raise GraphError(f"{role} {name}: {misfit}", code="invalid-shape") from None


def placeholder(name: str, shape: Iterable[int], dtype: DType = F32) -> Tensor:
    """Create an input, which is written before each run."""
    return leaf("input", name, shape, dtype)


def parameter(name: str, shape: Iterable[int], dtype: DType = F32) -> Tensor:
    """Create a trainable weight."""
    return leaf("parameter", name, shape, dtype)


def state(name: str, shape: Iterable[int], dtype: DType = F32) -> Tensor:
    """Create memory that runs read and change: moments, caches, accumulated gradients."""
    return leaf("state", name, shape, dtype)


class Node:
    """One application of an op."""

    __slots__ = ("attrs", "op", "outputs", "rounded", "serial", "sources")

    counter = itertools.count()

    def __init__(
        self,
        op: "Op",
        sources: tuple[Tensor, ...],
        attrs: dict[str, Any],
        name: str = "",
        rounded: frozenset[int] = frozenset(),
        specs: tuple[Spec, ...] | None = None,
    ) -> None:
        """Create a node; its float32 outputs in `rounded` are written in bf16 instead.

        The `specs` of the outputs are given if they are known, so that they need not be inferred.
        """
        self.op, self.sources, self.attrs, self.serial = op, sources, attrs, next(Node.counter)
        self.rounded = rounded
        self.outputs = tuple(
            Tensor(spec, "value", name, self, index)
            for index, spec in enumerate(specs or self.infer_specs(name))
        )

    def infer_specs(self, name: str) -> tuple[Spec, ...]:
        """Return the specs of the outputs by the op's rule, with some types rounded."""
        specs = self.op.check_specs(self.sources, self.attrs, name)
        return tuple(
            Spec(spec.shape, BF16) if index in self.rounded else spec for index, spec in enumerate(specs)
        )

    def with_sources(self, sources: tuple[Tensor, ...]) -> "Node":
        """Return this node, or an equal one if it gets other sources."""
        if sources == self.sources:
            return self
        known = all(is_same_spec(new.spec, old.spec) for new, old in zip(sources, self.sources, strict=True))
        specs = tuple(output.spec for output in self.outputs) if known else None
        return Node(self.op, sources, self.attrs, self.outputs[0].name, self.rounded, specs)

    @property
    def name(self) -> str:
        """The name of the first output, or the op and the serial number."""
        return self.outputs[0].name or f"{self.op.name}#{self.serial}"

    @property
    def aliases(self) -> Mapping[int, int]:
        """The source that each in-place output changes."""
        return {0: 0} if self.attrs.get("into") else self.op.aliases

    def __repr__(self) -> str:
        sources = ", ".join(
            source.name or (f"%{source.node.serial}" if source.node else "?") for source in self.sources
        )
        return f"{self.name} = {self.op.name}({sources})"


@dataclass(frozen=True)
class Layout:
    """The offset and strides, in elements, of a tensor in another one's memory."""

    offset: int
    strides: tuple[int, ...]


def dense(shape: Shape) -> tuple[int, ...]:
    """Return the strides of C order, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


ShapeRule = Callable[..., "Spec | tuple[Spec, ...]"]
Gradients = Sequence["Tensor | None"]


@dataclass(eq=False, repr=False)
class Op:
    """An op: a shape rule, a gradient rule (or the reason why there is none), and properties.

    Its kernel has its name.
    """

    rule: ShapeRule
    _: KW_ONLY
    # (output, source): the output may take over the source's memory
    in_place: tuple[tuple[int, int], ...] = ()
    aliases: Mapping[int, int] = field(default_factory=dict)  # output: source that it changes in place
    layout: Callable[..., Layout | None] | None = None  # a view's rule: it moves no bytes
    takes_views: bool = False  # kernels accept sources of any layout
    quantized_source: int | None = None  # the source that may be a quantized weight
    rounded_sources: tuple[int, ...] = ()  # the sources that mixed precision rounds to bfloat16
    rounds_outputs: bool = False  # bfloat16 sources give bfloat16 results
    bf16_sources: tuple[int, ...] = ()  # float32 sources that may be bfloat16 instead
    bf16_outputs: tuple[int, ...] = ()  # float32 outputs that may be written in bfloat16 instead
    is_cheap: bool = False  # costs little more than reading its sources: recomputed first
    masked_outputs: tuple[int, ...] = ()  # outputs in which minus infinity means that nothing is visible
    value_output: int | None = None  # of a gradient op: the output that equals its forward op's result
    stops_gradient: bool = False  # gradients stop here
    no_gradient: str = ""  # why there is no gradient
    gradient: Callable[..., Gradients] | None = field(default=None, init=False)
    selective: bool = field(default=False, init=False)  # the gradient rule has an argument `wanted`

    def __post_init__(self) -> None:
        self.name, self.__doc__ = self.rule.__name__, self.rule.__doc__

    def __call__(self, *sources: Tensor, name: str = "", **attrs: Any) -> Any:
        """Add a node to the graph, and return its output or outputs."""
        outputs = Node(self, sources, attrs, name).outputs
        return outputs if len(outputs) > 1 else outputs[0]

    def check_specs(
        self, sources: Sequence[Tensor], attrs: dict[str, Any], name: str = ""
    ) -> tuple[Spec, ...]:
        """Return the specs of the outputs.

        Raise GraphError with the op's name and sources if they do not fit.
        """
        if foreign := [source for source in sources if not isinstance(source, Tensor)]:
            raise GraphError(
                f"{self.name}{f' ({name})' if name else ''}: {foreign[0]!r} is not a tensor of a graph",
                code="not-a-tensor",
            )
        try:
            return self.infer_specs(*(source.spec for source in sources), **attrs)
        except (ShapeError, TypeError, ValueError, IndexError) as misfit:
            received = ", ".join(
                f"{s.name or f'source {i}'} {s.dtype}{list(s.shape)}" for i, s in enumerate(sources)
            )
            raise GraphError(
                f"{self.name}{f' ({name})' if name else ''}: {misfit} (got {received or 'no source'})",
                code="invalid-shape",
            ) from None

    def infer_specs(self, *sources: Spec, **attrs: Any) -> tuple[Spec, ...]:
        """Return the specs of the outputs by the shape rule."""
        for index, source in enumerate(sources):
            if isinstance(source.dtype, QuantizedType) and index != self.quantized_source:
                raise ShapeError(
                    f"a {source.dtype} weight is not taken as source {index}; {', '.join(quantized_ops())} read such"
                )
        full = (
            Spec(source.shape, F32) if index in self.bf16_sources and source.dtype is BF16 else source
            for index, source in enumerate(sources)
        )
        specs = self.rule(*full, **attrs)
        return specs if isinstance(specs, tuple) else (specs,)

    def __repr__(self) -> str:
        return self.name


OPS: dict[str, Op] = {}


def quantized_ops() -> list[str]:
    """Return the names of ops that accept a quantized weight."""
    return [name for name, each in OPS.items() if each.quantized_source is not None]


def op(**facts: Any) -> Callable[[ShapeRule], Op]:
    """Declare an op by its shape rule: specs and attributes in, spec or specs out.

    `facts` are fields of `Op`.
    """

    def declare(rule: ShapeRule) -> Op:
        OPS[rule.__name__] = declared = Op(rule, **facts)
        return declared

    return declare


def gradient(
    of: Op, selective: bool = False
) -> Callable[[Callable[..., Gradients]], Callable[..., Gradients]]:
    """Declare the gradient of an op: node and output gradients in, a gradient or None for each source out.

    The argument `wanted` of a selective rule says which gradients are needed: its op computes several at once.
    """

    def declare(rule: Callable[..., Gradients]) -> Callable[..., Gradients]:
        of.gradient, of.selective = rule, selective
        return rule

    return declare


# ---- walks -----------------------------------------------------------------


def collect_nodes(outputs: Iterable[Tensor]) -> list[Node]:
    """Return every node that the outputs need, each after its sources."""
    nodes: dict[int, Node] = {}
    waiting = [output.node for output in outputs if output.node]
    while waiting:
        node = waiting.pop()
        if node.serial not in nodes:
            nodes[node.serial] = node
            waiting.extend(source.node for source in node.sources if source.node)
    return [nodes[serial] for serial in sorted(nodes)]


def collect_leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that the outputs need, in the order of first use."""
    outputs = list(outputs)
    sources = itertools.chain(*(node.sources for node in collect_nodes(outputs)), outputs)
    return list(dict.fromkeys(source for source in sources if source.node is None))


def find_base(tensor: Tensor) -> Tensor:
    """Return the tensor that a view shows: a leaf or a node's output."""
    while tensor.node and tensor.node.op.layout:
        (tensor,) = tensor.node.sources
    return tensor
