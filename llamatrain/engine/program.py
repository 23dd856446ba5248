"""A plan bound to memory and kernels: a flat list of calls, to be run step after step.

Consecutive compiled calls become one table that the thread team runs without coming back to Python; ops without a compiled
kernel (or all of them, with kernels "reference") are plain calls between the tables.
"""

import contextlib
import math
import mmap
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from llamatrain.engine.order import layout_of, owner_of
from llamatrain.engine.plan import ALIGNMENT, Plan, ScratchRule, plan
from llamatrain.errors import GraphError
from llamatrain.files import quants
from llamatrain.files.pages import map_of, release
from llamatrain.files.types import GgmlType
from llamatrain.graph.tensor import Node, Quantised, Tensor
from llamatrain.kernels import reference
from llamatrain.kernels.blocks import Blocks

LARGE = 1 << 21  # a huge page; what is smaller comes from the heap
COPIED = 8 << 20  # bytes of a file that are copied at a time


def allocate(size: int) -> np.ndarray:
    """Bytes, zeroed by the system when first touched, aligned for vectors and tiles, in huge pages where there are such."""
    if size < LARGE:
        memory = np.zeros(size + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + size]
    pages = mmap.mmap(-1, size + LARGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    start = -memory.ctypes.data % LARGE
    return memory[start : start + size]


def empty(tensor: Tensor) -> np.ndarray:
    return allocate(tensor.nbytes).view(tensor.dtype.numpy).reshape(tensor.dtype.held(tensor.shape))


def packed_copy(raw: np.ndarray, kind: GgmlType, shape: tuple[int, ...], threads: int = 1) -> np.ndarray:
    """A weight of a file rounded to bf16, for a state of that type: it serves every product. The file's pages are dropped."""
    copy = allocate(2 * math.prod(shape)).view(np.uint16).reshape(shape)
    step = max(1, COPIED // raw.shape[1])
    for lo in range(0, len(raw), step):
        quants.decode(raw[lo : lo + step], kind, bf16=True, out=copy[lo : lo + step], threads=threads)
        release(raw[: lo + step])  # from the beginning: reading on maps some pages before those that are read
    return copy


KERNELS = ("cpu", "reference")


def _changed(plan: Plan) -> set[Tensor]:
    """The tensors of the caller's whose memory the program writes to."""
    return {owner_of(node.sources[index]) for node in plan.nodes for index in node.aliases.values()} | plan.pinned


@dataclass(frozen=True)
class Shape:
    """An array as a scratch rule sees it, before there is one."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def _binding(node: Node) -> Any:
    """The compiled kernel that takes this node, if any."""
    from llamatrain.kernels import cpu

    found = cpu.BINDINGS.get(node.op.name)
    return found if found and found.takes(*_seen(node), node.attrs) else None


def _seen(node: Node) -> tuple[list[Shape | Blocks], list[Shape | Blocks]]:
    outs, ins = ([_shape(tensor) for tensor in tensors] for tensors in (node.outputs, node.sources))
    return outs, ins


def _shape(tensor: Tensor) -> Shape | Blocks:
    if isinstance(tensor.dtype, Quantised):
        return Blocks(tensor.dtype.kind, tensor.shape)
    return Shape(tensor.shape, tensor.dtype.numpy)


def scratch_rule(kernels: str, threads: int) -> ScratchRule:
    """What each node's kernel needs beside its outputs, in bytes."""

    def compiled(node: Node) -> int:
        found = _binding(node)
        return found.scratch(*_seen(node), node.attrs, threads) if found else 0

    return compiled if kernels == "cpu" else lambda node: 0


class Program:
    """Bound once; called for every step."""

    def __init__(self, plan: Plan, memory: Mapping[Tensor, np.ndarray], *, kernels: str = "cpu", threads: int = 1,
                 arena: np.ndarray | None = None) -> None:  # fmt: skip
        """`memory` has an array for each leaf and pinned output that is not to be made here.

        Programs that never run at once may share an `arena`, made by `allocate` for the largest of them: outputs that lie in
        it are valid until the next run of any.
        """
        if kernels not in KERNELS or threads < 1:
            raise GraphError(f"kernels are {' or '.join(KERNELS)}, threads 1 or more; received {kernels!r} and {threads}")
        self.plan, self.kernels, self.threads = plan, kernels, threads
        self.changed = _changed(plan)
        self.arena = allocate(plan.arena) if arena is None else _shared(arena, plan.arena)
        self.owned: dict[Tensor, np.ndarray] = {}
        for tensor, array in memory.items():
            self._adopt(plan.outputs.get(tensor, tensor), array)
        self.steps = [(node, self._bind(node)) for node in plan.nodes if not node.op.layout]
        self.runs = _grouped(self.steps, threads)

    @classmethod
    def of(cls, outputs: Iterable[Tensor], memory: Mapping[Tensor, np.ndarray] | None = None, *, kernels: str = "cpu",
           threads: int = 1, naive: bool = False, limit: int | None = None, drop_base: bool = False,
           arena: np.ndarray | None = None) -> "Program":  # fmt: skip
        """Plan and bind in one go; outputs that `memory` has an array for are pinned to it."""
        outputs, memory = list(outputs), memory or {}
        pinned = [output for output in outputs if output in memory and output.node]
        rule = scratch_rule(kernels, threads)
        laid_out = plan(outputs, pinned=pinned, scratch=rule, naive=naive, memory=limit, drop_base=drop_base)
        return cls(laid_out, memory, kernels=kernels, threads=threads, arena=arena)

    def __call__(self) -> None:
        for run in self.runs:
            run()

    def __getitem__(self, tensor: Tensor) -> np.ndarray:
        """The array of a leaf or an output; valid until the next run."""
        if tensor.node and tensor not in self.plan.outputs:
            raise GraphError(f"{tensor!r} is no output of this program, so nothing of it is kept")
        return self._array(self.plan.outputs.get(tensor, tensor))

    def profile(self, runs: int = 5) -> list[tuple[Node, float]]:
        """Each node with its median time in seconds. It runs: what a step changes is changed."""
        times: dict[Node, list[float]] = defaultdict(list)
        alone = [(node, _grouped([(node, calls)], self.threads)) for node, calls in self.steps]
        for _ in range(runs):
            for node, parts in alone:
                start = time.perf_counter()
                for part in parts:
                    part()
                times[node].append(time.perf_counter() - start)
        return [(node, float(np.median(taken))) for node, taken in times.items()]

    def first_not_finite(self) -> Tensor | None:
        """The first tensor that holds NaN or an infinity: of the leaves, then of the values in the order they are made.

        It runs: what a step changes is changed. `graph.show.described` has words for an unnamed value.
        """
        for leaf in (leaf for role in ("parameter", "state", "input") for leaf in self.plan.leaves(role)):
            if not all(map(_finite, _pieces(self._source(leaf)))):
                return leaf
        for node, calls in self.steps:
            for part in _grouped([(node, calls)], self.threads):
                part()
            for output in node.outputs:
                if not _finite(self._array(output), masks=(node.op.name, output.index) in MASKS):
                    return output
        return None

    def _adopt(self, tensor: Tensor, array: np.ndarray) -> None:
        if array.shape != tensor.dtype.held(tensor.shape) or array.dtype != tensor.dtype.numpy or not array.flags.c_contiguous:
            raise GraphError(f"{tensor!r} was given an array of {array.dtype}{list(array.shape)} with strides {array.strides}")
        if owner_of(tensor) in self.changed and not array.flags.writeable:
            raise GraphError(f"{tensor!r} is changed by the program, but was given an array that cannot be written")
        self.owned[tensor] = array

    def _array(self, tensor: Tensor) -> np.ndarray:
        tensor_owner, at = layout_of(tensor)
        owner = owner_of(tensor_owner)
        if owner not in self.owned:
            offset = self.plan.offsets.get(owner)
            place = self.arena[offset : offset + owner.nbytes] if offset is not None else None
            self.owned[owner] = empty(owner) if place is None else place.view(owner.dtype.numpy).reshape(owner.shape)
        if isinstance(owner.dtype, Quantised):
            return self.owned[owner]
        flat, size = self.owned[owner].reshape(-1), owner.dtype.size
        if tensor.size == 0:
            return flat[:0].reshape(tensor.shape)
        return np.lib.stride_tricks.as_strided(flat[at.offset :], tensor.shape, [s * size for s in at.strides])

    def _source(self, tensor: Tensor) -> np.ndarray | Blocks:
        array = self._array(tensor)
        return Blocks(tensor.dtype.kind, tensor.shape, array) if isinstance(tensor.dtype, Quantised) else array

    def _mapped(self, node: Node) -> list[np.ndarray]:
        """What it reads of a mapped file, but for what is small."""
        arrays = (self.owned.get(owner_of(source)) for source in node.sources)
        return [array for array in arrays if array is not None and array.ndim > 1 and map_of(array) is not None]

    def _bind(self, node: Node) -> list[Any]:
        outs, ins = [self._array(output) for output in node.outputs], [self._source(source) for source in node.sources]
        found = _binding(node) if self.kernels == "cpu" else None
        if not any(out.size for out in outs):
            return []
        drops = [partial(release, array) for array in self._mapped(node)] if self.plan.drops_base else []
        if not found:
            return [lambda: reference.run(node.op.name, outs, ins, node.attrs), *drops]
        offset, size = self.plan.scratch.get(node, (0, 0))
        if size < (needed := found.scratch(*_seen(node), node.attrs, self.threads)):
            raise GraphError(f"{node!r} needs {needed} bytes of scratch memory, planned are {size}: plan with its scratch_rule")
        return [*found.bind(outs, ins, node.attrs, self.arena[offset : offset + size], self.threads), *drops]


def _shared(arena: np.ndarray, size: int) -> np.ndarray:
    """The part of the caller's arena that a plan of this size needs."""
    if arena.dtype != np.uint8 or arena.ndim != 1 or not arena.flags.c_contiguous or not arena.flags.writeable:
        raise GraphError(f"an arena is a row of bytes that can be written; received {arena.dtype}{list(arena.shape)}")
    if arena.size < size or arena.ctypes.data % ALIGNMENT:
        raise GraphError(f"the plan needs an arena of {size:,} bytes, aligned to {ALIGNMENT}; received {arena.size:,} bytes")
    return arena[:size]


MASKS = {("diag_mask_inf", 0), ("flash_attn", 1)}  # (op, output): minus infinity means nothing seen there


def _finite(array: np.ndarray, masks: bool = False) -> bool:
    """Whether no element is NaN or an infinity; with `masks`, minus infinity may stand there."""
    if array.dtype == np.int32:
        return True
    if array.dtype == np.uint16:  # bfloat16: all bits of the exponent
        return not np.any((array & np.uint16(0x7F80)) == 0x7F80)
    return bool(np.all(array < np.inf if masks else np.isfinite(array)))


def _pieces(source: np.ndarray | Blocks) -> Iterator[np.ndarray]:
    """The array; of a quantised weight some rows at a time, decoded."""
    if not isinstance(source, Blocks):
        yield source
        return
    step = max(1, LARGE // source.shape[1])
    for first in range(0, source.shape[0], step):
        yield source.rows(np.s_[first : first + step])


def _grouped(steps: Iterable[tuple[Node, list[Any]]], threads: int) -> list[Callable[[], None]]:
    calls = [call for _, each in steps for call in each]
    runs: list[Callable[[], None]] = []
    for plain, group in groupby(calls, callable):
        if plain:
            runs.extend(group)
        else:
            from llamatrain.machine import threads as team

            runs.append(team.Table(list(group), threads))
    return runs
