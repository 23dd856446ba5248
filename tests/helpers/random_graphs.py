"""Random graphs for the planner's tests, and what their values are when every node has memory of its own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from hypothesis import note
from hypothesis import strategies as st

from llamatrain.graph import ops as O
from llamatrain.graph.printing import as_text
from llamatrain.graph.tensor import I32, Tensor, collect_nodes, placeholder, state
from llamatrain.kernels.reference import KERNELS

SEEN = {
    "reshape": lambda x, shape: x.reshape(shape),
    "permute": lambda x, axes: x.transpose(axes),
    "view": lambda x, slices: x[tuple(slice(*each) for each in slices)],
}


def evaluated(outputs: Iterable[Tensor], arrays: Mapping[Tensor, np.ndarray]) -> dict[Tensor, np.ndarray]:
    """Every value that the outputs need, each a new array; nothing is changed in place."""
    values = dict(arrays)
    for node in collect_nodes(outputs):
        made = (SEEN | KERNELS)[node.op.name](*(values[source] for source in node.sources), **node.attrs)
        made = made if isinstance(made, tuple) else (made,)
        values |= {
            out: np.array(each, out.dtype.numpy, order="C")
            for out, each in zip(node.outputs, made, strict=True)
        }
    return values


@dataclass
class RandomGraph:
    """Matrices of a few sizes, and one state that is read in all its versions and changed in place.

    `age` of a value: how many changes of the state it waits for. A reader of version k must not wait for a later one.
    """

    arrays: dict[Tensor, np.ndarray] = field(default_factory=dict)
    pool: list[Tensor] = field(default_factory=list)
    age: dict[Tensor, int] = field(default_factory=dict)
    memory: set[Tensor] = field(default_factory=set)  # what lies in the state
    current: Tensor = None  # type: ignore[assignment]
    outputs: list[Tensor] = field(default_factory=list)
    pinned: list[Tensor] = field(default_factory=list)

    def leaf(self, made: Tensor, values: np.ndarray) -> Tensor:
        self.arrays[made] = np.asarray(values, made.dtype.numpy)
        self.age[made] = 0
        return made

    def values(self, *shape: int) -> np.ndarray:
        return np.random.default_rng(len(self.arrays)).standard_normal(shape)


SHAPES = st.tuples(st.sampled_from((1, 2, 5, 16, 33)), st.sampled_from((1, 3, 16, 40)))


@st.composite
def random_graphs(draw: st.DrawFn, most: int = 30) -> RandomGraph:
    g = RandomGraph()
    for number in range(draw(st.integers(1, 3))):
        shape = draw(SHAPES)
        g.pool.append(g.leaf(placeholder(f"x{number}", shape), g.values(*shape)))
    shape = draw(SHAPES)
    g.current = g.leaf(state("state", shape), g.values(*shape))
    g.pool.append(g.current)
    g.memory.add(g.current)
    for _ in range(draw(st.integers(1, most))):
        draw(st.sampled_from(STEPS))(draw, g)
    candidates = [t for t in g.pool if t.node and (t not in g.memory or t is g.current)]
    g.outputs = (
        draw(st.lists(st.sampled_from(candidates), min_size=1, max_size=4, unique=True)) if candidates else []
    )
    g.pinned = [output for output in g.outputs if output not in g.memory and draw(st.booleans())]
    note(as_text(g.outputs))
    return g


def pick(
    draw: st.DrawFn, g: RandomGraph, *others: Tensor, like: Tensor | None = None, any_shape: bool = True
) -> Tensor:
    """A value that may be read together with `others`; the newest are the likeliest."""

    def fits(t: Tensor) -> bool:
        if like is not None and not any_shape and t.shape != like.shape:
            return False
        together = [t, *others]
        return max(g.age[each] for each in together) <= min(
            (g.age[each] for each in together if each in g.memory), default=10**9
        )

    fitting = [t for t in g.pool if fits(t)]
    return fitting[-1 - draw(st.integers(0, len(fitting) - 1))] if fitting else others[0]


def keep(
    g: RandomGraph, made: Tensor | tuple[Tensor, ...], *sources: Tensor, lies_in: Tensor | None = None
) -> None:
    for each in made if isinstance(made, tuple) else (made,):
        g.age[each] = max(g.age[source] for source in sources)
        if lies_in in g.memory:
            g.memory.add(each)
        g.pool.append(each)


def element_by_element(draw: st.DrawFn, g: RandomGraph) -> None:
    x = pick(draw, g)
    ways = (O.silu, O.sqr, O.soft_max, O.cont, lambda x: O.scale(x, by=0.5), lambda x: O.softcap(x, cap=2.0))
    keep(g, draw(st.sampled_from(ways))(x), x)


def two(draw: st.DrawFn, g: RandomGraph) -> None:
    a = pick(draw, g)
    b = pick(draw, g, a, like=a, any_shape=draw(st.booleans()))
    fits = all(m == n or 1 in (m, n) for m, n in zip(a.shape, b.shape, strict=True))
    keep(g, draw(st.sampled_from((O.add, O.sub, O.mul)))(a, b if fits else a), a, b)


def one_row(draw: st.DrawFn, g: RandomGraph) -> None:
    """A value and a part of itself: whoever writes over the whole destroys the part."""
    x = pick(draw, g)
    columns = (0, x.shape[1], 1)
    first, last = (O.view(x, slices=((row, row + 1, 1), columns)) for row in (0, x.shape[0] - 1))
    keep(g, O.add(x, first) if draw(st.booleans()) else O.acc(x, last, slices=((0, 1, 1), columns)), x)


def seen_otherwise(draw: st.DrawFn, g: RandomGraph) -> None:
    x = pick(draw, g)
    rows, columns = x.shape
    views = (
        lambda: O.transpose(x),
        lambda: O.reshape(x, shape=(columns, rows)),
        lambda: O.view(x, slices=((0, (rows + 1) // 2, 1), (0, columns, 1))),
        lambda: O.view(x, slices=((0, rows, 2), (columns // 2, columns, 1))),
    )
    keep(g, draw(st.sampled_from(views))(), x, lies_in=x)


def norm(draw: st.DrawFn, g: RandomGraph) -> None:
    x = pick(draw, g)
    w = g.leaf(placeholder("w", x.shape[1:]), g.values(*x.shape[1:]))
    if draw(st.booleans()):
        keep(g, O.rms_norm(x, w, eps=1e-3), x)
        return
    dy = pick(draw, g, x, like=x, any_shape=False)
    dx, _ = O.rms_norm_back(dy if dy.shape == x.shape else x, x, w, eps=1e-3)
    keep(g, dx, x, dy)  # the other output has no reader


def gate(draw: st.DrawFn, g: RandomGraph) -> None:
    a = pick(draw, g)
    b = pick(draw, g, a, like=a, any_shape=False)
    b = b if b.shape == a.shape else a
    forth, back = draw(
        st.sampled_from(((O.swiglu, O.swiglu_back), (O.geglu, O.geglu_back), (O.reglu, O.reglu_back)))
    )
    if draw(st.booleans()):
        keep(g, forth(a, b), a, b)
    else:
        keep(g, back(a, b, a if draw(st.booleans()) else b), a, b)


def columns(draw: st.DrawFn, g: RandomGraph) -> None:
    """Cut, joined, or taken for the two sides of a gate."""
    x = pick(draw, g)
    width = x.shape[1]
    if width > 1 and draw(st.booleans()):
        first = draw(st.integers(1, width - 1))
        keep(g, O.split_columns(x, sizes=(first, width - first)), x)
        return
    y = pick(draw, g, x, like=x, any_shape=False)
    whole = O.join_columns(x, y if y.shape == x.shape else x)
    keep(g, whole, x, y)
    keep(g, O.swiglu_halves(whole) if draw(st.booleans()) else O.swiglu_halves_back(x, whole), x, y)


def product(draw: st.DrawFn, g: RandomGraph) -> None:
    x = pick(draw, g)
    keep(g, O.matmul(x, x) if draw(st.booleans()) else O.out_prod(x, x), x)


def change(draw: st.DrawFn, g: RandomGraph) -> None:
    """The state in its next version, in the same memory."""
    old = g.current
    fitting = [t for t in g.pool if t not in g.memory and t.shape == old.shape]
    y = draw(st.sampled_from(fitting)) if fitting else O.fill(shape=old.shape, value=0.5)
    g.age.setdefault(y, 0)
    if draw(st.booleans()):
        new = O.acc(old, y, slices=tuple((0, size, 1) for size in old.shape), into=True)
    else:
        ids = g.leaf(placeholder("ids", old.shape[:1], I32), np.arange(old.shape[0])[::-1])
        new = O.set_rows(old, y, ids, into=True)
    g.memory.add(new)
    g.age[new] = g.age[old] + 1
    g.pool.append(new)
    g.current = new


STEPS = (element_by_element, two, two, one_row, seen_otherwise, norm, gate, columns, product, change)
