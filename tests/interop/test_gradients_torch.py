"""The second witness of every gradient: torch runs the same graph forward, and its autograd says what ours must be."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from llamatrain.engine.program import Program
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.tensor import BF16, F32, F64, Tensor, collect_nodes
from llamatrain.kernels.reference import KERNELS
from tests.graph.test_gradients import EACH, scalar
from tests.helpers.op_cases import CASES, Case
from tests.helpers.random_models import Size, llama

torch = pytest.importorskip("torch", reason="torch is not installed")
functional = torch.nn.functional

pytestmark = pytest.mark.reference

TYPES = {F32: torch.float32, F64: torch.float64, BF16: torch.bfloat16}


def region(slices):
    return tuple(slice(*each) for each in slices)


def written(x, y, at, add: bool = False):
    out = x.clone()
    out[at] = out[at] + y if add else y
    return out


def folded(y, shape):
    """The sum of the copies of shape that y is tiled with."""
    y = y.reshape([n for size, part in zip(y.shape, shape, strict=True) for n in (size // part, part)])
    return y.sum(dim=tuple(range(0, y.dim(), 2)))


def turned(x, positions, table, halves: bool = False, back: bool = False):
    if halves:
        return swapped(x, positions, table, back)
    pairs = table.shape[1]
    cos, sin = (table[positions.long()][:, :, None, :, part] for part in (0, 1))  # (B, T, 1, pairs)
    z = torch.view_as_complex(x[..., : 2 * pairs].reshape(*x.shape[:3], pairs, 2).contiguous())
    z = z * torch.complex(cos, -sin if back else sin)
    return torch.cat([torch.view_as_real(z).flatten(3), x[..., 2 * pairs :]], dim=3)


def swapped(x, positions, table, back: bool):
    """As models write it whose heads are cut in two: x cos + (-second, first) sin."""
    pairs = table.shape[2]
    cos, sin = (table[positions.long()][:, :, None, part].repeat(1, 1, 1, 2) for part in (0, 1))
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    crossed = torch.cat([-second, first], dim=3) * (-sin if back else sin)
    return torch.cat([x[..., : 2 * pairs] * cos + crossed, x[..., 2 * pairs :]], dim=3)


def dropped(x, *numbers, rate: float, **attrs):
    """Which elements are left out is data: the plain kernel tells it."""
    kept = (
        KERNELS["dropout"](
            np.ones(x.shape, np.float32), *(each.numpy() for each in numbers), rate=rate, **attrs
        )
        != 0
    )
    return x * torch.from_numpy(kept) / (1 - rate)


def capped(x, cap: float):
    return cap * torch.tanh(x / cap) if cap else x


def attention(q, k, v, starts, lasts=None, *, scale: float, window: int = 0, cap: float = 0.0):
    length, keys, times = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    if lasts is None:
        lasts = (torch.arange(length) + keys - length).expand(starts.shape)
    place = torch.arange(keys)
    seen = ((place >= starts[..., None]) & (place <= lasts[..., None]))[:, None]  # (B, 1, T, S)
    if window:
        seen = seen & (place > lasts[..., None] - window)[:, None]
    k, v = (each.repeat_interleave(times, dim=2) for each in (k, v))
    scores = capped(torch.einsum("bthd,bshd->bhts", q, k) * scale, cap)
    p = torch.where(seen, torch.where(seen, scores, -1e30).softmax(-1), 0.0)
    return torch.einsum("bhts,bshd->bthd", p, v), torch.where(seen, scores, -torch.inf).logsumexp(-1)


def cross_entropy(logits, targets, weights):
    if targets.dtype == torch.int32:
        each = functional.cross_entropy(logits, targets.long(), reduction="none", ignore_index=-1)
    else:
        each = functional.cross_entropy(logits, targets, reduction="none")
    return (each * weights).sum()


def normalized_back(dy, x):
    total = x.sum(-1, keepdim=True)
    return dy / total - (dy * x).sum(-1, keepdim=True) / total.square()


def balance(probabilities, ids, weights):
    experts = probabilities.shape[1]
    by = weights[:, None] / weights.sum()
    shares = (by * functional.one_hot(ids.long(), experts).double().mean(1)).sum(0)
    return experts * (shares * (by * probabilities).sum(0)).sum()


def balance_back(dloss, ids, weights, experts: int):
    probabilities = torch.zeros(len(ids), experts, dtype=weights.dtype, requires_grad=True)
    (grad,) = torch.autograd.grad(balance(probabilities, ids, weights), probabilities)
    return dloss * grad


def sorted_choices(ids, experts: int):
    order = torch.argsort(ids.flatten().long(), stable=True).reshape(ids.shape)
    counts = torch.bincount(ids.flatten().long(), minlength=experts)
    return order, ids.flatten()[order], counts.cumsum(0)


def rows_of_choices(x, order):
    """Return a row for each sorted choice: there are such rows, or rows whose choices share them."""
    return x if x.dim() == 3 else x[order.long() // order.shape[1]]


def expert_product(x, w, order, ends):
    """Return each choice times the matrix of its expert: x (rows, k, n) and w (experts, n, m)."""
    number = torch.searchsorted(ends.long(), torch.arange(order.numel()), right=True).reshape(order.shape)
    return torch.einsum("rkn,rknm->rkm", rows_of_choices(x, order), w[number])


def expert_outer(a, b, order, ends):
    """Return the sum of the outer products of each expert's choices."""
    number = torch.searchsorted(ends.long(), torch.arange(order.numel()), right=True).reshape(order.shape)
    chosen = functional.one_hot(number, len(ends)).to(a.dtype)
    return torch.einsum("rke,rkn,rkm->enm", chosen, rows_of_choices(a, order), rows_of_choices(b, order))


def clipped_gate(gate, up, slope: float, limit: float):
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    return g * torch.sigmoid(slope * g) * (u + 1)


def entropies(logits, targets):
    return functional.cross_entropy(logits, targets.long(), reduction="none", ignore_index=-1)


def masked(x, past: int, value: float):
    return x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1 + past), value)


def back(f: Callable[..., Any], one: bool = True) -> Callable[..., Any]:
    """The gradient of a function, as a function: what autograd makes of it is gone through again."""

    def gradients(dy, *sources, **attrs):
        found = torch.autograd.grad(f(*sources, **attrs), sources, dy, create_graph=True)
        return found[0] if one else found

    return gradients


def layer_norm(x, eps: float):
    return functional.layer_norm(x, x.shape[-1:], eps=eps)


def gelu(x):
    return functional.gelu(x, approximate="tanh")


def relu_sqr(x):
    return functional.relu(x).square()


def xielu(x, positive, negative, beta, eps):
    below = torch.expm1(torch.clamp(x, max=eps)) - x
    return torch.where(x > 0, positive * x * x, negative * below) + beta * x


def swiglu_halves(x):
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def causal_conv(x, w, starts):
    """Return the convolution of each sample of a row, by torch's own."""
    taps, rows = w.shape[1], []
    for row, first in zip(x, starts, strict=True):
        cuts = [*sorted(set(first.tolist())), len(row)]
        parts = [row[a:b].mT[None] for a, b in pairwise(cuts)]
        rows.append(
            torch.cat(
                [
                    functional.conv1d(part, w[:, None], padding=taps - 1, groups=len(w))[
                        0, :, : part.shape[2]
                    ]
                    for part in parts
                ],
                -1,
            ).mT
        )
    return torch.stack(rows)


def delta_rule(q, k, v, g, beta, starts, chunk, correct):
    """Return the outputs of the rule as a sum over all pairs of tokens, and the states before chunks."""
    (batch, length, heads, _), rows = v.shape, []
    q, k = (x.repeat(1, 1, heads // x.shape[2], 1).transpose(1, 2) for x in (q, k))
    v, beta, total = v.transpose(1, 2), beta.mT[..., None], g.mT.cumsum(-1)
    places = torch.arange(length)
    seen = (places <= places[:, None]) & (places >= starts[..., None])  # (batch, query, key)
    decay = torch.where(seen[:, None], total[..., None] - total[..., None, :], -torch.inf).exp()
    system = torch.eye(length) + correct * (beta * (k @ k.mT) * decay).tril(-1)
    change = torch.linalg.solve_triangular(system, beta * v, upper=False, unitriangular=True)
    out = ((q @ k.mT) * decay @ change).transpose(1, 2)
    for t in range(0, length, chunk):  # what the state would say to each unit vector
        known = decay[:, :, t - 1, :t, None] if t else torch.zeros(batch, heads, 0, 1)
        rows.append((known * k[:, :, :t]).mT @ change[:, :, :t])
    return out, torch.stack(rows, 1)


def columns(x, window):
    """Return torch's windows of each image, side by side."""
    made = functional.unfold(x, window.size, window.dilation, window.padding, window.stride)
    return made.transpose(0, 1).flatten(1)


def images(y, shape, window):
    each = y.reshape(len(y), shape[0], -1).transpose(0, 1)
    return functional.fold(each, shape[2:], window.size, window.dilation, window.padding, window.stride)


def mean_pool(x, window):
    """Return means of windows; torch has none of spread windows, which are a convolution of each channel."""
    if window.dilation == (1, 1):
        return functional.avg_pool2d(x, window.size, window.stride, window.padding)
    filters = torch.full((x.shape[1], 1, *window.size), 1 / (window.size[0] * window.size[1]))
    return functional.conv2d(x, filters, None, window.stride, window.padding, window.dilation, x.shape[1])


TORCH: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "abs": torch.abs,
    "sgn": torch.sign,
    "step": lambda x: (x.sign() + 1) / 2,
    "relu": torch.relu,
    "relu_sqr": relu_sqr,
    "relu_sqr_back": back(relu_sqr),
    "xielu": xielu,
    "xielu_back": back(xielu),
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "sin": torch.sin,
    "cos": torch.cos,
    "gelu": gelu,
    "gelu_back": back(gelu),
    "softcap": capped,
    "softcap_back": lambda dy, y, cap: dy * (1 - (y / cap).square()),
    "add1": lambda a, b: a + b.reshape(()),
    "scale": lambda x, by: x * by,
    "sqr": torch.square,
    "sqrt": torch.sqrt,
    "log": torch.log,
    "cast": lambda x, dtype: x.to(TYPES[dtype]),
    "add_cast": lambda a, b, dtype: a.to(TYPES[dtype]) + b.to(TYPES[dtype]),
    "fill": lambda shape, value, dtype: torch.full(shape, value, dtype=TYPES[dtype]),
    "sum": torch.sum,
    "sum_rows": lambda x: x.sum(-1, keepdim=True),
    "mean": torch.mean,
    "sum_sqr": lambda x: x.square().sum(),
    "repeat": lambda x, shape: x.repeat([size // n for size, n in zip(shape, x.shape, strict=True)]),
    "repeat_back": folded,
    "matmul": lambda x, w, *bias: sum(bias, x @ w.mT),
    "matmul_nn": lambda y, w: y @ w,
    "out_prod": lambda a, b: a.mT @ b,
    "reshape": torch.reshape,
    "permute": lambda x, axes: x.permute(axes),
    "view": lambda x, slices: x[region(slices)],
    "cont": torch.clone,
    "cpy": lambda x, y: y.to(x.dtype).clone(),
    "acc": lambda x, y, slices: written(x, y, region(slices), add=True),
    "set": lambda x, y, slices: written(x, y, region(slices)),
    "get_rows": lambda w, ids: functional.embedding(ids, w),
    "get_rows_back": lambda dy, ids, rows: torch.zeros(rows, dy.shape[-1]).index_add(
        0, ids.flatten(), dy.flatten(0, -2)
    ),
    "set_rows": lambda x, rows, ids: written(x, rows, ids.long()),
    "diag": lambda x: torch.diag_embed(x.squeeze(-2)),
    "diag_mask_inf": lambda x, past=0: masked(x, past, -torch.inf),
    "diag_mask_zero": lambda x, past=0: masked(x, past, 0.0),
    "rms_norm": lambda x, w, eps: functional.rms_norm(x, w.shape, w, eps),
    "rms_norm_back": back(lambda x, w, eps: functional.rms_norm(x, w.shape, w, eps), one=False),
    "layer_norm": lambda x, w, *bias, eps: functional.layer_norm(x, w.shape, w, *bias, eps=eps),
    "layer_norm_back": back(lambda x, w, eps: functional.layer_norm(x, w.shape, w, eps=eps), one=False),
    "norm": layer_norm,
    "norm_back": back(layer_norm),
    "silu": functional.silu,
    "silu_back": back(functional.silu),
    "dropout": dropped,
    "glu": lambda gate, up: torch.sigmoid(gate) * up,
    "glu_back": back(lambda gate, up: torch.sigmoid(gate) * up, one=False),
    "causal_conv": causal_conv,
    "causal_conv_back": lambda dy, w, starts: back(causal_conv, one=False)(
        dy, torch.zeros_like(dy).requires_grad_(), w, starts=starts
    )[0],
    "causal_conv_weight_back": lambda dy, x, starts, taps: back(causal_conv, one=False)(
        dy, x, torch.zeros(x.shape[-1], taps).requires_grad_(), starts=starts
    )[1],
    "gated_delta_rule": delta_rule,
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "swiglu_back": back(lambda gate, up: functional.silu(gate) * up, one=False),
    "geglu": lambda gate, up: gelu(gate) * up,
    "geglu_back": back(lambda gate, up: gelu(gate) * up, one=False),
    "reglu": lambda gate, up: torch.relu(gate) * up,
    "reglu_back": back(lambda gate, up: torch.relu(gate) * up, one=False),
    "swiglu_halves": swiglu_halves,
    "swiglu_halves_back": back(swiglu_halves),
    "split_columns": lambda x, sizes: x.split(sizes, dim=-1),
    "join_columns": lambda *parts: torch.cat(parts, dim=-1),
    "rope": turned,
    "rope_back": partial(turned, back=True),
    "sort_choices": sorted_choices,
    "take_columns": lambda x, ids: x.gather(-1, ids.long()),
    "put_columns": lambda y, ids, columns: torch.zeros(len(y), columns, dtype=y.dtype).scatter_add(
        -1, ids.long(), y
    ),
    "take_choices": lambda x, order: x.flatten()[order.long()],
    "put_choices": lambda y, order: (
        torch.zeros_like(y).flatten().index_put((order.flatten().long(),), y.flatten()).reshape(y.shape)
    ),
    "sum_choices": lambda y, order: torch.zeros(len(y), y.shape[-1], dtype=y.dtype).index_add(
        0, order.flatten().long() // order.shape[1], y.flatten(0, 1)
    ),
    "spread_rows": rows_of_choices,
    "scale_rows": lambda x, by: x * by.reshape(*x.shape[:-1], 1),
    "dot_rows": lambda a, b: (a * b).sum(-1),
    "expert_matmul": lambda x, w, order, ends: expert_product(x, w.mT, order, ends),
    "expert_matmul_nn": expert_product,
    "expert_out_prod": expert_outer,
    "clipped_swiglu": clipped_gate,
    "clipped_swiglu_back": back(clipped_gate, one=False),
    "normalize_rows": lambda x: x / x.sum(-1, keepdim=True),
    "normalize_rows_back": normalized_back,
    "balance_loss": balance,
    "balance_loss_back": balance_back,
    "soft_max": lambda x: x.softmax(-1),
    "soft_max_back": lambda dy, y: y * (dy - (dy * y).sum(-1, keepdim=True)),
    "flash_attn": attention,
    "cross_entropy_loss": cross_entropy,
    "cross_entropy_rows": entropies,
    "linear_cross_entropy_rows": lambda x, w, targets, cap=0.0: entropies(capped(x @ w.mT, cap), targets),
    "softplus": functional.softplus,
    "log_odds": lambda x: x - torch.log(-torch.expm1(x)),
    "im2col": columns,
    "col2im": images,
    "max_pool_2d": lambda x, window: functional.max_pool2d(
        x, window.size, window.stride, window.padding, window.dilation
    ),
    "avg_pool_2d": mean_pool,
    "avg_pool_2d_back": lambda dy, shape, window: back(mean_pool)(
        dy, torch.zeros(shape).requires_grad_(), window=window
    ),
    "linear_cross_entropy": lambda x, w, *aims, cap=0.0: cross_entropy(capped(x @ w.mT, cap), *aims),
}


def by_torch(loss: Tensor, wrt: list[Tensor], arrays: dict[Tensor, np.ndarray]) -> list[np.ndarray]:
    """The loss and its gradients."""
    values = {
        tensor: torch.from_numpy(array.copy()).requires_grad_(tensor in wrt)
        for tensor, array in arrays.items()
    }
    for node in collect_nodes([loss]):
        made = TORCH[node.op.name](*(values[source] for source in node.sources), **node.attrs)
        values.update(zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    found = torch.autograd.grad(values[loss], [values[tensor] for tensor in wrt], materialize_grads=True)
    return [values[loss].detach().numpy(), *(grad.numpy() for grad in found)]


def by_us(loss: Tensor, wrt: list[Tensor], arrays: dict[Tensor, np.ndarray]) -> list[np.ndarray]:
    value, grads = value_and_gradients(loss, wrt)
    program = Program.build([value, *grads], arrays, kernels="reference")
    program()
    return [program.read(tensor) for tensor in (value, *grads)]


def assert_near(ours: np.ndarray, theirs: np.ndarray, name: str, within: float = 1e-4) -> None:
    assert ours.shape == theirs.shape, name
    assert np.abs(ours - theirs).max(initial=0) <= within * max(1, np.abs(theirs).max(initial=0)), name


@pytest.mark.parametrize(("name", "index"), EACH)
def test_an_op_against_torch(name: str, index: int) -> None:
    case = Case(dtype=F32, seed=index)
    loss = scalar(case, CASES[name][index](case))
    pairs = zip(by_us(loss, case.wrt, case.arrays), by_torch(loss, case.wrt, case.arrays), strict=True)
    for ours, theirs in pairs:
        assert_near(ours, theirs, name)


@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("fused", [True, False])
def test_a_llama_against_torch(fused: bool, lora: int) -> None:
    size = Size(
        vocab=29, width=24, layers=2, heads=6, kv_heads=2, ff=40, ctx=10, batch=3, lora=lora, fused=fused
    )
    model = llama(size)
    arrays = model.random()
    if lora:
        frozen = [
            leaf for node in collect_nodes([model.loss]) for leaf in node.sources if leaf.role == "state"
        ]
        rng = np.random.default_rng(1)
        arrays |= {
            w: rng.standard_normal(w.shape).astype(np.float32) * np.float32(0.2)
            for w in frozen
            if w not in arrays
        }
    arrays |= model.position_arrays(
        np.repeat([[0, 6]], [6, 4], axis=1).astype(np.int32).repeat(3, axis=0)
    )  # two samples in a row
    arrays[model.targets][::7] = -1
    found = zip(
        by_us(model.loss, model.trained, arrays), by_torch(model.loss, model.trained, arrays), strict=True
    )
    for name, (ours, theirs) in zip(["loss", *(w.name for w in model.trained)], found, strict=True):
        assert np.abs(theirs).max() > 0, name
        assert_near(ours, theirs, name)
        # the absolute bound says little of small gradients
        assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max(), name
