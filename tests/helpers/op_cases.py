"""Every op on several shapes: size-1 axes, broadcasts, transposed and sliced views, repeated heads. Used by all op tests."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, reduce

import numpy as np

from llamatrain.graph import ops
from llamatrain.graph.ops.convolution import Window
from llamatrain.graph.tensor import F64, I32, DType, Tensor, placeholder


@dataclass
class Case:
    """Builds outputs from random leaves; `arrays` has the leaves' values, `wrt` those that gradients are checked for."""

    dtype: DType = F64
    seed: int = 0
    arrays: dict[Tensor, np.ndarray] = field(default_factory=dict)
    wrt: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def x(self, *shape: int, positive: bool = False, fixed: bool = False) -> Tensor:
        values = self.random.standard_normal(shape)
        return self.leaf(np.abs(values) + 0.5 if positive else values, fixed)

    def leaf(self, values, fixed: bool = False) -> Tensor:
        tensor = placeholder(f"x{len(self.arrays)}", np.shape(values), self.dtype)
        self.arrays[tensor] = np.asarray(values, self.dtype.numpy)
        if not fixed:
            self.wrt.append(tensor)
        return tensor

    def ids(self, values) -> Tensor:
        tensor = placeholder(f"i{len(self.arrays)}", np.shape(values), I32)
        self.arrays[tensor] = np.asarray(values, np.int32)
        return tensor

    def turned(self, *shape: int, **how: bool) -> Tensor:
        """A transposed view of this shape."""
        return ops.transpose(self.x(*shape[:-2], shape[-1], shape[-2], **how))

    def sliced(self, *shape: int, **how: bool) -> Tensor:
        """A view of this shape of every second element of something larger."""
        whole = self.x(*(2 * size + 1 for size in shape), **how)
        return ops.view(whole, slices=tuple((1, 2 * size + 1, 2) for size in shape))

    def rope_table(self, length: int, pairs: int, halves: bool = False) -> Tensor:
        angles = np.outer(np.arange(length), 1 / 100 ** (np.arange(pairs) / max(1, pairs)))
        return self.leaf(np.stack([np.cos(angles), np.sin(angles)], axis=1 if halves else -1), fixed=True)


def together(outputs: tuple[Tensor, Tensor]) -> Tensor:
    """Both, told apart."""
    return ops.add(outputs[0], ops.scale(outputs[1], by=0.3))


Make = Callable[[Case], "Tensor | tuple[Tensor, ...]"]
CASES: dict[str, list[Make]] = {}


def case(op: str, *makes: Make) -> None:
    CASES.setdefault(op, []).extend(makes)


for name in ("add", "sub", "mul", "div"):
    f = getattr(ops, name)
    case(
        name,
        lambda c, f=f: f(c.x(2, 3), c.x(2, 3, positive=True)),
        lambda c, f=f: f(c.x(3, 1, 4), c.x(2, 1, positive=True)),
        lambda c, f=f: f(c.turned(3, 4), c.sliced(3, 4, positive=True)),
        lambda c, f=f: f(c.x(), c.x(1, 1, positive=True)),
        lambda c, f=f: f(c.x(2, 3, 5), c.x(5, positive=True)),
    )
case(
    "add1",
    lambda c: ops.add1(c.x(2, 3), c.x()),
    lambda c: ops.add1(c.turned(4, 2), c.x(1, 1)),
    lambda c: ops.add1(c.x(1), c.x(1)),
)
XIELU = {"positive": 0.8, "negative": 1.3, "beta": 0.5, "eps": -0.01}
SET: dict[str, dict[str, float]] = {  # the numbers that some have
    "softcap": {"cap": 1.5},
    "softcap_back": {"cap": 1.5},
    "xielu": XIELU,
    "xielu_back": XIELU,
}
for name in (
    "neg",
    "abs",
    "sgn",
    "step",
    "relu",
    "relu_sqr",
    "sigmoid",
    "exp",
    "sin",
    "cos",
    "gelu",
    "silu",
    "softplus",
    "softcap",
    "xielu",
):
    f = partial(getattr(ops, name), **SET.get(name, {}))
    case(
        name,
        lambda c, f=f: f(c.x(2, 3)),
        lambda c, f=f: f(c.turned(3, 1, 5)),
        lambda c, f=f: f(c.sliced(2, 1, 4)),
    )
case(
    "glu",
    lambda c: ops.glu(c.x(2, 3), c.x(2, 3)),
    lambda c: ops.glu(c.turned(3, 1, 5), c.sliced(3, 1, 5)),
    lambda c: ops.glu(c.x(4), c.x(4)),
)
case(
    "glu_back",
    lambda c: together(ops.glu_back(c.x(2, 3), c.x(2, 3), c.x(2, 3))),
    lambda c: together(ops.glu_back(c.turned(3, 1, 5), c.sliced(3, 1, 5), c.x(3, 1, 5))),
    lambda c: ops.glu_back(c.x(4), c.x(4), c.x(4))[0],
)
for name in ("gelu_back", "relu_sqr_back", "silu_back", "soft_max_back", "softcap_back", "xielu_back"):
    f = partial(getattr(ops, name), **SET.get(name, {}))
    case(
        name,
        lambda c, f=f: f(c.x(2, 3), c.x(2, 3)),
        lambda c, f=f: f(c.turned(3, 1, 5), c.sliced(3, 1, 5)),
        lambda c, f=f: f(c.x(4), c.x(4)),
    )
for name in ("scale", "sqr", "sqrt", "log", "silu", "cont", "sum", "sum_rows", "mean", "sum_sqr", "soft_max"):
    f = getattr(ops, name)
    g = (lambda x, f=f: f(x, by=-0.7)) if name == "scale" else f
    case(
        name,
        lambda c, g=g: g(c.x(2, 3, positive=True)),
        lambda c, g=g: g(c.turned(3, 1, 5, positive=True)),
        lambda c, g=g: g(c.sliced(2, 1, 4, positive=True)),
        lambda c, g=g: g(c.x(7, positive=True)),
    )
case(
    "cast",
    lambda c: ops.cast(c.x(2, 3), dtype=c.dtype),
    lambda c: ops.cast(c.turned(3, 4), dtype=F64),
    lambda c: ops.cast(c.sliced(1, 3), dtype=F64),
)
case(
    "add_cast",
    lambda c: ops.add_cast(c.x(2, 3), c.x(3), dtype=F64),
    lambda c: ops.add_cast(c.turned(3, 4), c.x(3, 4), dtype=F64),
    lambda c: ops.add_cast(c.x(1, 1), c.x(2, 3), dtype=F64),
)
case(
    "fill",
    *(
        lambda c, s=s: ops.mul(c.x(*s), ops.fill(shape=s, value=1.5, dtype=c.dtype))
        for s in ((), (2, 3), (1, 4))
    ),
)
case(
    "repeat",
    lambda c: ops.repeat(c.x(2, 3), shape=(4, 9)),
    lambda c: ops.repeat(c.x(1, 1), shape=(3, 2)),
    lambda c: ops.repeat(c.turned(2, 3, 4), shape=(2, 6, 4)),
)
case(
    "repeat_back",
    lambda c: ops.repeat_back(c.x(4, 9), shape=(2, 3)),
    lambda c: ops.repeat_back(c.turned(3, 2), shape=(1, 1)),
    lambda c: ops.repeat_back(c.sliced(2, 6, 4), shape=(2, 3, 4)),
)
case(
    "matmul",
    lambda c: ops.matmul(c.x(3, 4), c.x(5, 4)),
    lambda c: ops.matmul(c.turned(2, 3, 4), c.sliced(1, 5, 4)),
    lambda c: ops.matmul(c.x(2, 2, 3, 3, 4), c.x(2, 2, 1, 5, 4)),  # three heads share a key head
    lambda c: ops.matmul(c.x(1, 1), c.x(1, 1)),
    lambda c: ops.matmul(c.x(3, 4), c.x(5, 4), c.x(5)),
    lambda c: ops.matmul(c.turned(2, 3, 4), c.sliced(5, 4), c.sliced(5)),
    lambda c: ops.matmul(c.x(2, 2, 3, 4), c.x(2, 1, 5, 4), c.x(5)),
)
case(
    "matmul_nn",
    lambda c: ops.matmul_nn(c.x(3, 5), c.x(5, 4)),
    lambda c: ops.matmul_nn(c.x(2, 3, 5), c.turned(5, 4)),
    lambda c: ops.matmul_nn(c.sliced(2, 2, 1, 5), c.x(2, 1, 5, 4)),
)
case(
    "out_prod",
    lambda c: ops.out_prod(c.x(6, 3), c.x(6, 4)),
    lambda c: ops.out_prod(c.turned(2, 6, 3), c.x(1, 6, 4)),
    lambda c: ops.out_prod(c.x(1, 3), c.sliced(2, 1, 4)),
)
case(
    "reshape",
    lambda c: ops.reshape(c.x(2, 6), shape=(3, 4)),
    lambda c: ops.reshape(c.turned(2, 6), shape=(12,)),
    lambda c: ops.reshape(c.sliced(1, 4), shape=(2, 1, 2)),
)
case(
    "permute",
    lambda c: ops.permute(c.x(2, 3, 4), axes=(2, 0, 1)),
    lambda c: ops.permute(c.turned(2, 1, 4), axes=(1, 0, 2)),
    lambda c: ops.permute(c.x(5), axes=(0,)),
    lambda c: ops.transpose(c.sliced(3, 2)),
)
case(
    "view",
    lambda c: ops.view(c.x(4, 5), slices=((1, 3, 1), (0, 5, 2))),
    lambda c: ops.view(c.turned(4, 5), slices=((0, 4, 3), (4, 5, 1))),
    lambda c: ops.view(c.sliced(3, 2), slices=((0, 3, 1), (1, 2, 1))),
    lambda c: ops.view(c.x(3), slices=((1, 1, 1),)),
)
case(
    "cpy",
    lambda c: ops.cpy(c.x(2, 3, fixed=True), c.x(2, 3)),
    lambda c: ops.cpy(c.x(4, 1, fixed=True), c.turned(4, 1)),
    lambda c: ops.cpy(c.x(2, 2, fixed=True), c.sliced(2, 2)),
)
for name in ("acc", "set"):
    f = getattr(ops, name)
    case(
        name,
        lambda c, f=f: f(c.x(4, 5), c.x(2, 3), slices=((1, 3, 1), (0, 5, 2))),
        lambda c, f=f: f(c.turned(4, 5), c.sliced(1, 5), slices=((3, 4, 1), (0, 5, 1))),
        lambda c, f=f: f(c.x(1), c.x(1), slices=((0, 1, 1),)),
    )
case(
    "get_rows",
    lambda c: ops.get_rows(c.x(5, 3), c.ids([4, 0, 4])),
    lambda c: ops.get_rows(c.turned(5, 3), c.ids([[1, 1], [2, 0]])),
    lambda c: ops.get_rows(c.sliced(1, 4), c.ids([0])),
)
case(
    "get_rows_back",
    lambda c: ops.get_rows_back(c.x(3, 4), c.ids([4, 0, 4]), rows=5),
    lambda c: ops.get_rows_back(c.turned(2, 2, 3), c.ids([[1, 1], [2, 0]]), rows=3),
    lambda c: ops.get_rows_back(c.sliced(1, 2), c.ids([0]), rows=1),
)
case(
    "set_rows",
    lambda c: ops.set_rows(c.x(5, 3), c.x(2, 3), c.ids([4, 0])),
    lambda c: ops.set_rows(c.x(4, 2, 3), c.x(1, 2, 3), c.ids([3])),
    lambda c: ops.set_rows(c.turned(3, 2), c.sliced(3, 2), c.ids([2, 0, 1])),
)
case(
    "diag",
    lambda c: ops.diag(c.x(1, 4)),
    lambda c: ops.diag(c.x(2, 3, 1, 2)),
    lambda c: ops.diag(c.turned(2, 1, 3)),
)
case(
    "diag_mask_inf",
    lambda c: ops.soft_max(ops.diag_mask_inf(c.x(4, 4))),
    lambda c: ops.soft_max(ops.diag_mask_inf(c.x(2, 1, 3, 5), past=2)),
    lambda c: ops.soft_max(ops.diag_mask_inf(c.turned(3, 3))),
)
case(
    "diag_mask_zero",
    lambda c: ops.diag_mask_zero(c.x(4, 4)),
    lambda c: ops.diag_mask_zero(c.x(2, 1, 3, 5), past=1),
    lambda c: ops.diag_mask_zero(c.sliced(3, 3)),
)
case(
    "rms_norm",
    lambda c: ops.rms_norm(c.x(3, 4), c.x(4), eps=1e-5),
    lambda c: ops.rms_norm(c.turned(2, 3, 5), c.x(5), eps=1e-2),
    lambda c: ops.rms_norm(c.sliced(2, 1), c.sliced(1), eps=1e-1),
)
case(
    "layer_norm",
    lambda c: ops.layer_norm(c.x(3, 4), c.x(4), eps=1e-5),
    lambda c: ops.layer_norm(c.x(3, 4), c.x(4), c.x(4), eps=1e-5),
    lambda c: ops.layer_norm(c.turned(2, 3, 5), c.x(5), c.sliced(5), eps=1e-2),
    lambda c: ops.layer_norm(c.sliced(2, 1), c.sliced(1), eps=1e-1),
)
case(
    "layer_norm_back",
    lambda c: together(ops.layer_norm_back(c.x(3, 4), c.x(3, 4), c.x(4), eps=1e-5)),
    lambda c: together(ops.layer_norm_back(c.turned(2, 3, 5), c.sliced(2, 3, 5), c.x(5), eps=1e-2)),
    lambda c: ops.layer_norm_back(c.x(2, 6), c.x(2, 6), c.x(6), eps=1e-1)[0],
    lambda c: ops.layer_norm_back(c.x(2, 6), c.x(2, 6), c.x(6), eps=1e-1)[1],
)
case(
    "norm",
    lambda c: ops.norm(c.x(3, 4), eps=1e-5),
    lambda c: ops.norm(c.turned(2, 3, 5), eps=1e-2),
    lambda c: ops.norm(c.sliced(2, 1), eps=1e-1),
)
case(
    "norm_back",
    lambda c: ops.norm_back(c.x(3, 4), c.x(3, 4), eps=1e-5),
    lambda c: ops.norm_back(c.turned(2, 3, 5), c.sliced(2, 3, 5), eps=1e-2),
    lambda c: ops.norm_back(c.x(6), c.x(6), eps=1e-1),
)
case(
    "rms_norm_back",
    lambda c: together(ops.rms_norm_back(c.x(3, 4), c.x(3, 4), c.x(4), eps=1e-5)),
    lambda c: together(ops.rms_norm_back(c.turned(2, 3, 5), c.sliced(2, 3, 5), c.x(5), eps=1e-2)),
    lambda c: ops.rms_norm_back(c.x(2, 6), c.x(2, 6), c.x(6), eps=1e-1)[0],
    lambda c: ops.rms_norm_back(c.x(2, 6), c.x(2, 6), c.x(6), eps=1e-1)[1],
)
case(
    "dropout",
    lambda c: ops.dropout(c.x(5, 7), c.ids([3, 9]), rate=0.5, salt=1, length=5),
    lambda c: ops.dropout(c.x(6, 3, 33), c.ids([-3, 1 << 30]), rate=0.1, salt=0, length=3),
    lambda c: ops.dropout(c.turned(9, 4), c.ids([0, 0]), rate=0.0, salt=7, length=9),
    lambda c: ops.dropout(c.x(4, 5), c.ids([0, 2]), c.ids([1, 3, 4, 7]), rate=0.5, salt=2, length=4),
)
for name in ("swiglu", "geglu", "reglu"):
    f, b = getattr(ops, name), getattr(ops, f"{name}_back")
    case(
        name,
        lambda c, f=f: f(c.x(3, 4), c.x(3, 4)),
        lambda c, f=f: f(c.turned(2, 5), c.sliced(2, 5)),
        lambda c, f=f: f(c.x(1, 1, 3), c.x(1, 1, 3)),
    )
    case(
        f"{name}_back",
        lambda c, b=b: together(b(c.x(3, 4), c.x(3, 4), c.x(3, 4))),
        lambda c, b=b: together(b(c.turned(2, 5), c.sliced(2, 5), c.x(2, 5))),
        lambda c, b=b: b(c.x(3), c.x(3), c.x(3))[0],
        lambda c, b=b: b(c.x(3), c.x(3), c.x(3))[1],
    )
case(
    "swiglu_halves",
    lambda c: ops.swiglu_halves(c.x(3, 8)),
    lambda c: ops.swiglu_halves(c.turned(5, 2)),
    lambda c: ops.swiglu_halves(c.sliced(1, 3, 6)),
)
case(
    "swiglu_halves_back",
    lambda c: ops.swiglu_halves_back(c.x(3, 4), c.x(3, 8)),
    lambda c: ops.swiglu_halves_back(c.turned(5, 1), c.sliced(5, 2)),
    lambda c: ops.swiglu_halves_back(c.x(2, 1, 3), c.x(2, 1, 6)),
)


def parts_together(parts: tuple[Tensor, ...]) -> Tensor:
    """All, told apart, whatever their widths."""
    return reduce(
        ops.add, (ops.scale(ops.sum_rows(ops.sqr(part)), by=1 + 0.3 * i) for i, part in enumerate(parts))
    )


case(
    "split_columns",
    lambda c: parts_together(ops.split_columns(c.x(3, 9), sizes=(4, 2, 3))),
    lambda c: parts_together(ops.split_columns(c.turned(4, 6), sizes=(1, 5))),
    lambda c: ops.split_columns(c.sliced(2, 2, 5), sizes=(2, 3))[1],  # of the first nothing is wanted
    lambda c: ops.split_columns(c.x(4), sizes=(4,)),
)
case(
    "join_columns",
    lambda c: ops.join_columns(c.x(3, 4), c.x(3, 2), c.x(3, 3)),
    lambda c: ops.join_columns(c.turned(4, 1), c.sliced(4, 5)),
    lambda c: ops.join_columns(c.x(2, 2, 3)),
)
for name in ("rope", "rope_back"):
    f = getattr(ops, name)
    case(
        name,
        lambda c, f=f: f(c.x(2, 3, 2, 4), c.ids([[0, 1, 2], [5, 0, 1]]), c.rope_table(6, 2)),
        lambda c, f=f: f(
            c.sliced(1, 2, 1, 6), c.ids([[3, 4]]), c.rope_table(5, 2)
        ),  # two elements pass through
        lambda c, f=f: f(
            ops.permute(c.x(2, 3, 2, 2), axes=(0, 2, 1, 3)), c.ids([[0, 1], [1, 2]]), c.rope_table(3, 1)
        ),
        lambda c, f=f: f(
            c.x(2, 2, 2, 6), c.ids([[0, 1], [5, 0]]), c.rope_table(6, 3, halves=True), halves=True
        ),
        lambda c, f=f: f(c.sliced(1, 2, 1, 7), c.ids([[3, 4]]), c.rope_table(5, 2, halves=True), halves=True),
    )


def attention(
    c: Case,
    batch: int,
    length: int,
    keys: int,
    heads: int,
    shared: int,
    size: int,
    *,
    packed=False,
    lasts=None,
    **how,
):
    starts = np.zeros((batch, length), np.int32)
    if packed:
        starts[:, length // 2 :] = length // 2
    ranges = [c.ids(starts)] + ([] if lasts is None else [c.ids(np.broadcast_to(lasts, (batch, length)))])
    q, k, v = c.x(batch, length, heads, size), c.x(batch, keys, shared, size), c.x(batch, keys, shared, size)
    return ops.flash_attn(q, k, v, *ranges, **{"scale": size**-0.5, **how})[0]


case(
    "flash_attn",
    lambda c: attention(c, 2, 5, 5, 2, 2, 4),
    lambda c: attention(c, 1, 6, 6, 4, 2, 3, packed=True),  # grouped heads, two samples in a row
    lambda c: attention(c, 2, 2, 5, 3, 1, 2),  # the keys before were cached
    lambda c: attention(c, 1, 3, 4, 2, 1, 1, lasts=[0, 3, -1]),  # the last query sees nothing
    lambda c: attention(c, 1, 6, 6, 2, 1, 3, window=2),
    lambda c: attention(c, 1, 3, 5, 2, 1, 2, packed=True, window=3, cap=0.7),
    lambda c: attention(c, 1, 3, 6, 2, 2, 2, lasts=[0, 5, -1], window=2, scale=1.3, cap=1.1),
    lambda c: attention(c, 2, 4, 4, 2, 1, 3, window=9, scale=2.0, cap=2.0),  # a window longer than the row
)


def targets(c: Case, rows: int, words: int) -> Tensor:
    return c.ids(np.where(np.arange(rows) == 1, -1, np.arange(rows) * 7 % words))


def probabilities(c: Case, rows: int, words: int) -> Tensor:
    p = np.abs(c.random.standard_normal((rows, words)))
    return c.leaf(p / p.sum(axis=1, keepdims=True), fixed=True)


case(
    "cross_entropy_loss",
    lambda c: ops.cross_entropy_loss(c.x(4, 5), targets(c, 4, 5), c.x(4, fixed=True)),
    lambda c: ops.cross_entropy_loss(
        c.turned(3, 4), probabilities(c, 3, 4), c.x(3, positive=True, fixed=True)
    ),
    lambda c: ops.cross_entropy_loss(c.sliced(1, 3), c.ids([2]), c.x(1, fixed=True)),
)
case(
    "linear_cross_entropy",
    lambda c: ops.linear_cross_entropy(
        c.x(4, 3), c.x(5, 3), targets(c, 4, 5), c.x(4, positive=True, fixed=True)
    ),
    lambda c: ops.linear_cross_entropy(c.turned(3, 4), c.sliced(6, 4), targets(c, 3, 6), c.x(3, fixed=True)),
    lambda c: ops.linear_cross_entropy(c.x(1, 1), c.x(2, 1), c.ids([1]), c.x(1, fixed=True)),
    lambda c: ops.linear_cross_entropy(c.x(4, 3), c.x(5, 3), targets(c, 4, 5), c.x(4, fixed=True), cap=1.3),
    lambda c: ops.linear_cross_entropy(
        c.x(4, 3), c.x(5, 3, fixed=True), targets(c, 4, 5), c.x(4, fixed=True), cap=0.8
    ),
)
case(
    "cross_entropy_rows",
    lambda c: ops.cross_entropy_rows(c.x(4, 5), targets(c, 4, 5)),
    lambda c: ops.cross_entropy_rows(c.turned(3, 4), targets(c, 3, 4)),
    lambda c: ops.sqr(ops.cross_entropy_rows(c.sliced(1, 3), c.ids([2]))),
)
case(
    "linear_cross_entropy_rows",
    lambda c: ops.linear_cross_entropy_rows(c.x(4, 3), c.x(5, 3), targets(c, 4, 5)),
    lambda c: ops.sqr(ops.linear_cross_entropy_rows(c.turned(3, 4), c.sliced(6, 4), targets(c, 3, 6))),
    lambda c: ops.linear_cross_entropy_rows(c.x(2, 1), c.x(2, 1), c.ids([1, 0])),
    lambda c: ops.sqr(ops.linear_cross_entropy_rows(c.x(3, 4), c.x(6, 4), targets(c, 3, 6), cap=0.9)),
)
case(
    "log_odds",
    lambda c: ops.log_odds(ops.neg(c.x(2, 3, positive=True))),
    lambda c: ops.log_odds(ops.scale(c.turned(3, 1, 2, positive=True), by=-0.2)),
    lambda c: ops.log_odds(ops.scale(c.sliced(4, positive=True), by=-9.0)),
)


def sample_starts(c: Case, batch: int, length: int, *cuts: int) -> Tensor:
    """Return the first token of each token's sample; samples begin at 0 and at the cuts."""
    starts = np.zeros((batch, length), np.int32)
    for cut in cuts:
        starts[-1, cut:] = cut  # the last row only
    return c.ids(starts)


case(
    "causal_conv",
    lambda c: ops.causal_conv(c.x(2, 5, 3), c.x(3, 4), sample_starts(c, 2, 5)),
    lambda c: ops.causal_conv(c.turned(2, 6, 2), c.x(2, 3), sample_starts(c, 2, 6, 2, 5)),
    lambda c: ops.causal_conv(c.x(1, 2, 1), c.x(1, 5), sample_starts(c, 1, 2, 1)),
    lambda c: ops.causal_conv(c.sliced(1, 3, 2), c.x(2, 1), sample_starts(c, 1, 3)),
)
case(
    "causal_conv_back",
    lambda c: ops.causal_conv_back(c.x(2, 5, 3), c.x(3, 4), sample_starts(c, 2, 5)),
    lambda c: ops.causal_conv_back(c.turned(2, 6, 2), c.x(2, 3), sample_starts(c, 2, 6, 2, 5)),
    lambda c: ops.causal_conv_back(c.x(1, 2, 1), c.x(1, 5), sample_starts(c, 1, 2)),
)
case(
    "causal_conv_weight_back",
    lambda c: ops.causal_conv_weight_back(c.x(2, 5, 3), c.x(2, 5, 3), sample_starts(c, 2, 5), taps=4),
    lambda c: ops.causal_conv_weight_back(
        c.x(2, 6, 2), c.turned(2, 6, 2), sample_starts(c, 2, 6, 2, 5), taps=3
    ),
    lambda c: ops.causal_conv_weight_back(c.x(1, 2, 1), c.x(1, 2, 1), sample_starts(c, 1, 2), taps=5),
)


def delta_rule(
    c: Case,
    batch: int,
    length: int,
    key_heads: int,
    heads: int,
    size: int,
    width: int,
    *cuts: int,
    correct: bool = True,
) -> Tensor:
    q, k = (ops.scale(c.x(batch, length, key_heads, size), by=0.5) for _ in range(2))
    v, g = c.x(batch, length, heads, width), ops.scale(c.x(batch, length, heads, positive=True), by=-0.4)
    beta = ops.sigmoid(c.x(batch, length, heads))
    starts = sample_starts(c, batch, length, *cuts)
    return ops.gated_delta_rule(q, k, v, g, beta, starts, chunk=16, correct=correct)[0]


case(
    "gated_delta_rule",
    lambda c: delta_rule(c, 2, 5, 2, 2, 3, 4),
    lambda c: delta_rule(c, 1, 19, 1, 2, 2, 3),  # more than one chunk; a key head for two value heads
    lambda c: delta_rule(c, 2, 7, 2, 4, 2, 1, 3, 4),  # three samples in a row
    lambda c: delta_rule(c, 1, 1, 1, 1, 1, 1),
    lambda c: delta_rule(c, 2, 19, 1, 2, 3, 2, 4, 9, correct=False),
)


def chosen(c: Case, ids: list[list[int]], experts: int) -> tuple[Tensor, Tensor]:
    """The order of choices, and where those of each expert end."""
    order, _, ends = ops.sort_choices(c.ids(ids), experts=experts)
    return order, ends


PAIRS = [[2, 0], [0, 3], [3, 2], [0, 2], [2, 3]]  # of four experts, of which one gets nothing
ONE_EXPERT = [[1], [1], [1]]
ALONE = [[0, 2, 1]]  # one row
case(
    "take_columns",
    lambda c: ops.take_columns(c.x(5, 4), c.ids(PAIRS)),
    lambda c: ops.take_columns(c.turned(3, 2), c.ids(ONE_EXPERT)),
    lambda c: ops.take_columns(c.sliced(1, 3), c.ids(ALONE)),
    lambda c: ops.take_columns(c.x(2, 3), c.ids([[1, 1], [0, 2]])),  # twice the same
)
case(
    "put_columns",
    lambda c: ops.put_columns(c.x(5, 2), c.ids(PAIRS), columns=4),
    lambda c: ops.put_columns(c.turned(3, 1), c.ids(ONE_EXPERT), columns=2),
    lambda c: ops.put_columns(c.sliced(1, 3), c.ids(ALONE), columns=3),
    lambda c: ops.put_columns(c.x(2, 2), c.ids([[1, 1], [0, 2]]), columns=3),
)
for name in ("take_choices", "put_choices"):
    f = getattr(ops, name)
    case(
        name,
        lambda c, f=f: f(c.x(5, 2), chosen(c, PAIRS, 4)[0]),
        lambda c, f=f: f(c.turned(3, 1), chosen(c, ONE_EXPERT, 2)[0]),
        lambda c, f=f: f(c.sliced(1, 3), chosen(c, ALONE, 3)[0]),
    )
case(
    "sum_choices",
    lambda c: ops.sum_choices(c.x(5, 2, 3), chosen(c, PAIRS, 4)[0]),
    lambda c: ops.sum_choices(c.turned(3, 1, 2), chosen(c, ONE_EXPERT, 2)[0]),
    lambda c: ops.sum_choices(c.sliced(1, 3, 70), chosen(c, ALONE, 3)[0]),
)
case(
    "spread_rows",
    lambda c: ops.spread_rows(c.x(5, 3), chosen(c, PAIRS, 4)[0]),
    lambda c: ops.spread_rows(c.turned(3, 2), chosen(c, ONE_EXPERT, 2)[0]),
    lambda c: ops.spread_rows(c.sliced(1, 70), chosen(c, ALONE, 3)[0]),
)
case(
    "scale_rows",
    lambda c: ops.scale_rows(c.x(2, 3), c.x(2)),
    lambda c: ops.scale_rows(c.turned(3, 2, 19), c.sliced(3, 2)),
    lambda c: ops.scale_rows(c.x(4), c.x()),
    lambda c: ops.scale_rows(c.sliced(3, 5), c.turned(3, 1)),
)
case(
    "dot_rows",
    lambda c: ops.dot_rows(c.x(2, 3), c.x(2, 3)),
    lambda c: ops.dot_rows(c.turned(3, 2, 19), c.sliced(3, 2, 19)),
    lambda c: ops.dot_rows(c.x(4), c.x(4)),
)
case(
    "expert_matmul",
    lambda c: ops.expert_matmul(c.x(5, 3), c.x(4, 2, 3), *chosen(c, PAIRS, 4)),
    lambda c: ops.expert_matmul(c.x(5, 2, 3), c.x(4, 2, 3), *chosen(c, PAIRS, 4)),
    lambda c: ops.expert_matmul(c.turned(3, 4), c.turned(2, 5, 4), *chosen(c, ONE_EXPERT, 2)),
    lambda c: ops.expert_matmul(c.sliced(1, 2), c.sliced(3, 1, 2), *chosen(c, ALONE, 3)),
)
case(
    "expert_matmul_nn",
    lambda c: ops.expert_matmul_nn(c.x(5, 2, 3), c.x(4, 3, 2), *chosen(c, PAIRS, 4)),
    lambda c: ops.expert_matmul_nn(c.x(5, 3), c.x(4, 3, 2), *chosen(c, PAIRS, 4)),
    lambda c: ops.expert_matmul_nn(c.turned(3, 1, 4), c.turned(2, 4, 5), *chosen(c, ONE_EXPERT, 2)),
    lambda c: ops.expert_matmul_nn(c.sliced(1, 3, 2), c.sliced(3, 2, 1), *chosen(c, ALONE, 3)),
)
case(
    "expert_out_prod",
    lambda c: ops.expert_out_prod(c.x(5, 2, 3), c.x(5, 2), *chosen(c, PAIRS, 4)),
    lambda c: ops.expert_out_prod(c.x(5, 3), c.x(5, 2, 2), *chosen(c, PAIRS, 4)),
    lambda c: ops.expert_out_prod(c.turned(3, 4), c.turned(3, 1, 5), *chosen(c, ONE_EXPERT, 2)),
    lambda c: ops.expert_out_prod(c.sliced(1, 3, 2), c.sliced(1, 3, 1), *chosen(c, ALONE, 3)),
    lambda c: ops.expert_out_prod(c.x(5, 3), c.x(5, 4), *chosen(c, PAIRS, 4)),
)
case(  # a layer: what an expert gives is weighed by its share
    "expert_matmul",
    lambda c: layer_of_experts(c, PAIRS, 4),
)

case(
    "normalize_rows",
    lambda c: ops.normalize_rows(c.x(2, 3, positive=True)),
    lambda c: ops.normalize_rows(c.turned(3, 2, 19, positive=True)),
    lambda c: ops.normalize_rows(c.sliced(2, 1, positive=True)),
)
case(
    "normalize_rows_back",
    lambda c: ops.normalize_rows_back(c.x(2, 3), c.x(2, 3, positive=True)),
    lambda c: ops.normalize_rows_back(c.sliced(3, 19), c.turned(3, 19, positive=True)),
    lambda c: ops.normalize_rows_back(c.x(4, 1), c.x(4, 1, positive=True)),
)
case(
    "balance_loss",
    lambda c: ops.balance_loss(c.x(5, 4), c.ids(PAIRS), c.x(5, positive=True, fixed=True)),
    lambda c: ops.balance_loss(c.turned(3, 2), c.ids(ONE_EXPERT), c.x(3, positive=True, fixed=True)),
    lambda c: ops.balance_loss(c.sliced(1, 3), c.ids(ALONE), c.x(1, positive=True, fixed=True)),
)
case(
    "balance_loss_back",
    lambda c: ops.balance_loss_back(c.x(), c.ids(PAIRS), c.x(5, positive=True, fixed=True), experts=4),
    lambda c: ops.balance_loss_back(c.x(), c.ids(ONE_EXPERT), c.x(3, positive=True, fixed=True), experts=2),
    lambda c: ops.balance_loss_back(c.x(), c.ids(ALONE), c.x(1, positive=True, fixed=True), experts=3),
)


def layer_of_experts(c: Case, ids: list[list[int]], experts: int) -> Tensor:
    """The whole of a mixture, through the shares of its router, too."""
    x, choices = c.x(len(ids), 3), c.ids(ids)
    order, _, ends = ops.sort_choices(choices, experts=experts)
    shares = ops.soft_max(ops.take_columns(ops.matmul(x, c.x(experts, 3)), choices))
    gate, up = (ops.expert_matmul(x, c.x(experts, 5, 3), order, ends) for _ in range(2))
    h = ops.scale_rows(ops.swiglu(gate, up), ops.take_choices(shares, order))
    return ops.sum_choices(ops.expert_matmul(h, c.x(experts, 3, 5), order, ends), order)


case(
    "clipped_swiglu",
    lambda c: ops.clipped_swiglu(c.x(2, 3), c.x(2, 3), slope=1.7, limit=0.6),
    lambda c: ops.clipped_swiglu(c.turned(3, 1, 5), c.sliced(3, 1, 5), slope=1.0, limit=9.0),
    lambda c: ops.clipped_swiglu(c.x(19), c.x(19), slope=1.7, limit=1.0),
)


def attention_with_sinks(c: Case, *sizes: int, **how: float) -> Tensor:
    """Attention and the log of its sums, both of which have a gradient."""
    out = attention(c, *sizes, **how)
    lse = ops.rows_of_lse(out.node.outputs[1])
    return ops.scale_rows(out, ops.sigmoid(ops.sub(lse, c.x(lse.shape[-1]))))


case(
    "flash_attn",
    lambda c: attention_with_sinks(c, 2, 5, 5, 2, 2, 4),
    lambda c: attention_with_sinks(c, 1, 6, 6, 4, 2, 3, packed=True, window=3),
    lambda c: attention_with_sinks(c, 1, 3, 4, 2, 1, 1, lasts=[0, 3, -1]),  # the last query sees nothing
)

# ---- windows over images ----------------------------------------------------

WINDOWS = {  # height and width of images, and the window that moves over them
    "one position": ((2, 3), Window((2, 3))),
    "padded": ((4, 3), Window((3, 2), padding=(1, 1))),
    "strides that leave a rest": ((6, 8), Window((2, 3), stride=(3, 2))),
    "spread": ((7, 5), Window((3, 2), stride=(2, 1), padding=(1, 0), dilation=(2, 3))),
}


def columns_like(c: Case, count: int, channels: int, image: tuple[int, int], window: Window) -> Tensor:
    """The windows of images of this size, as a leaf."""
    height, width = window.count_positions((count, channels, *image))
    return c.x(channels * window.size[0] * window.size[1], count * height * width)


def pooled_like(c: Case, count: int, channels: int, image: tuple[int, int], window: Window) -> Tensor:
    return c.x(count, channels, *window.count_positions((count, channels, *image)))


for image, window in WINDOWS.values():
    whole = {"shape": (2, 3, *image), "window": window}
    for name in ("im2col", "max_pool_2d", "avg_pool_2d"):
        f = partial(getattr(ops, name), window=window)
        case(name, lambda c, f=f, image=image: f(c.x(2, 3, *image)))
    case("im2col", lambda c, image=image, window=window: ops.im2col(c.turned(1, 2, *image), window=window))
    case(
        "max_pool_2d",
        lambda c, image=image, window=window: ops.max_pool_2d(c.sliced(2, 1, *image), window=window),
    )
    case(
        "col2im",
        lambda c, image=image, whole=whole: ops.col2im(
            columns_like(c, 2, 3, image, whole["window"]), **whole
        ),
    )
    case(
        "avg_pool_2d_back",
        lambda c, image=image, whole=whole: ops.avg_pool_2d_back(
            pooled_like(c, 2, 3, image, whole["window"]), **whole
        ),
    )
case(  # a layer, through its filters and its bias, too
    "im2col",
    lambda c: ops.conv_2d(
        c.x(2, 3, 5, 4), c.x(2, 3, 3, 2), c.x(2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)
    ),
)
