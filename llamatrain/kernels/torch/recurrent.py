"""Torch kernels of `graph/ops/recurrent.py`, in the same order.

The gated delta rule is computed in chunks of tokens, as `kernels/cpu/delta_rule.py` describes. With D, a, K, Q, V
and S from there, and X the inverse of I + tril(beta K Kᵀ D, -1), the changes of a chunk are (Yang et al. 2024)

    U = X beta V - (X beta a K) S

Only S and U depend on the chunk before. The rest is computed at once for all chunks of a group of chunks. Here
arrays of a group have the shape (chunks, batch, repeats, key heads, tokens, size).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llamatrain.graph.ops.recurrent import CHUNK
from llamatrain.graph.tensor import Node
from llamatrain.graph.tensor import Tensor as GraphTensor
from llamatrain.kernels.torch.registry import kernel, result_bytes, writing_kernel


def visible_taps(starts: Tensor, taps: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield, for each tap, its distance to the past and which tokens from there on see that far: (B, T, 1)."""
    seen_before = torch.arange(starts.shape[1], device=starts.device) - starts
    for tap in range(taps):
        distance = taps - 1 - tap
        yield tap, distance, (seen_before >= distance)[:, distance:, None]


def shift(x: Tensor, distance: int) -> Tensor:
    """Return x of `distance` tokens before, for the tokens that have one."""
    return x[:, : max(0, x.shape[1] - distance)]


def conv_bytes(node: Node) -> int:
    """Return the bytes of an array like x, and of what a tap sees."""
    x, _, starts = node.sources
    return x.nbytes + 32 * starts.size


@writing_kernel(conv_bytes)
def causal_conv(x: Tensor, w: Tensor, starts: Tensor, *, out: tuple[Tensor, ...]) -> None:
    """Convolve each channel of x over time with its own taps; the last tap belongs to the token itself."""
    y = out[0].zero_()
    for tap, distance, seen in visible_taps(starts, w.shape[1]):
        y[:, distance:].addcmul_(shift(x, distance).where(seen, 0), w[:, tap])


@writing_kernel(conv_bytes)
def causal_conv_back(dy: Tensor, w: Tensor, starts: Tensor, *, out: tuple[Tensor, ...]) -> None:
    """Return the gradient of x."""
    dx = out[0].zero_()
    for tap, distance, seen in visible_taps(starts, w.shape[1]):
        shift(dx, distance).addcmul_(dy[:, distance:].where(seen, 0), w[:, tap])


@writing_kernel(conv_bytes)
def causal_conv_weight_back(
    dy: Tensor, x: Tensor, starts: Tensor, *, taps: int, out: tuple[Tensor, ...]
) -> None:
    """Return the gradient of w."""
    for tap, distance, seen in visible_taps(starts, taps):
        out[0][:, tap] = shift(x, distance).where(seen, 0).mul_(dy[:, distance:]).sum((0, 1))


@kernel(lambda node: 2 * result_bytes(node))
def causal_conv_step(state: Tensor, x: Tensor, w: Tensor, *, into: bool = False) -> tuple[Tensor, Tensor]:
    """Convolve tokens behind a state (B, taps - 1, channels), the tokens before; return the new state, too."""
    rows, out, length = torch.cat([state, x], dim=1), torch.zeros_like(x), x.shape[1]
    for tap in range(w.shape[1]):
        out.addcmul_(rows[:, tap : tap + length], w[:, tap])
    return rows[:, length:], out


# ---- gated delta rule ------------------------------------------------------

GROUP = 1 << 16  # tokens times batch times heads that are computed at once
FEW_TOKENS = 8  # up to so many are decoded one by one


class Sources(NamedTuple):
    """The sources of a group of chunks."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class Parts(NamedTuple):
    """The terms by which chunks change the state S before them, and read from it."""

    reads: Tensor  # a Q
    weights: Tensor  # Q Kᵀ D
    keys: Tensor  # D[last] K
    kept: Tensor  # a[last]
    changes: Tensor  # X beta V; without the correction, beta V
    forgets: Tensor | None  # X beta a K


class Inverse(torch.autograd.Function):
    """The inverse of I + L for a strictly lower triangular L."""

    @staticmethod
    def forward(context: Any, lower: Tensor) -> Tensor:
        """Return the inverse."""
        inverse = invert(lower)
        context.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient of L."""
        (inverse,) = context.saved_tensors
        return -(inverse.mT @ gradients[0] @ inverse.mT)


def corners(lower: Tensor, level: int) -> Tensor:
    """Return the lower left quarter of each block of 2 ** (level + 1) rows on the diagonal, else zeros."""
    half = torch.arange(lower.shape[-1], device=lower.device) >> level
    block = half >> 1
    return lower.where((block[:, None] == block) & (half[:, None] != half), 0)


def invert(lower: Tensor) -> Tensor:
    """Return the inverse of I + L: the inverses of its diagonal blocks, joined to those of larger blocks.

    A product of powers of L would lose all digits where many tokens have the same key.
    """
    size = lower.shape[-1]
    inverse = torch.eye(size, dtype=lower.dtype, device=lower.device) - corners(lower, 0)
    for level in range(1, (size - 1).bit_length()):
        inverse = inverse - inverse @ corners(lower, level) @ inverse
    return inverse


def split(x: Tensor, first: int, until: int, chunk: int, key_heads: int) -> Tensor:
    """Return tokens of x (B, T, heads, size) in chunks; behind the last token are zeros."""
    tokens = pad(x[:, first:until], (0, 0, 0, 0, 0, max(0, until - x.shape[1])))
    chunks = tokens.unflatten(2, (-1, key_heads)).unflatten(1, (-1, chunk))
    return chunks.permute(1, 0, 3, 4, 2, 5).contiguous()


def join(x: Tensor) -> Tensor:
    """Return chunks as (B, tokens, heads, size)."""
    return x.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)


def split_heads(states: Tensor, key_heads: int) -> Tensor:
    """Return states (B, chunks, H, d, e) like the chunks."""
    return states.unflatten(2, (-1, key_heads)).transpose(0, 1).contiguous()


def split_sources(sources: Sources, first: int, until: int, chunk: int) -> Sources:
    """Return the tokens in chunks."""
    key_heads = sources.q.shape[2]
    wide = (x if x.dim() == 4 else x[..., None] for x in sources)
    return Sources(*(split(x, first, until, chunk, key_heads) for x in wide))


def split_begins(starts: Tensor, first: int, until: int, chunk: int) -> Tensor:
    """Return, for the tokens in chunks, whether a sample begins with them: (chunks, batch, 1, 1, tokens)."""
    positions = torch.arange(starts.shape[1], device=starts.device)
    begins = (starts >= positions)[:, first:until]
    begins = pad(begins, (0, max(0, until - starts.shape[1])))
    return begins.unflatten(1, (-1, chunk)).transpose(0, 1)[:, :, None, None]


def groups(v: Sequence[int], chunk: int) -> list[tuple[int, int]]:
    """Return the first tokens of groups of chunks, and their ends, by the shape of v."""
    batch, length, heads, _ = v
    step = chunk * max(1, GROUP // (batch * heads * chunk))
    end = -(-length // chunk) * chunk
    return [(first, min(first + step, end)) for first in range(0, end, step)]


def decays(g: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    """Return D, and a as a column; g is a column.

    The sums of D are not differences of sums from the chunk's begin: those are less exact.
    """
    sample = begins.cumsum(-1, dtype=torch.int32)
    tokens = torch.arange(g.shape[-2], device=g.device)
    later = tokens[:, None] > tokens
    sums = g.where(later, 0).cumsum(-2)
    seen = (sample[..., None] == sample[..., None, :]) & (tokens[:, None] >= tokens)
    carry = g.cumsum(-2).where((sample == 0)[..., None], -torch.inf)
    return sums.where(seen, -torch.inf).exp(), carry.exp()


def solve(sources: Sources, begins: Tensor, correct: bool) -> Parts:
    """Return the terms of chunks, which do not depend on the state before them."""
    q, k, v, g, beta = sources
    decay, carry = decays(g, begins)
    changes, forgets = beta * v, None
    if correct:
        inverse = Inverse.apply((k @ k.mT * decay * beta).tril(-1))
        changes, forgets = inverse @ changes, inverse @ (beta * carry * k)
    last = decay[..., -1:, :].mT
    return Parts(carry * q, q @ k.mT * decay, k * last, carry[..., -1:, :], changes, forgets)


def chunk_of(parts: Parts, number: int) -> Parts:
    """Return the parts of one chunk."""
    return Parts(*(part if part is None else part[number] for part in parts))


def find_changes(parts: Parts, state: Tensor) -> Tensor:
    """Return U, what each token adds to the state for its key."""
    return parts.changes if parts.forgets is None else parts.changes - parts.forgets @ state


def outputs(parts: Parts, state: Tensor, changes: Tensor) -> Tensor:
    """Return the outputs of all tokens."""
    return parts.reads @ state + parts.weights @ changes


def next_state(parts: Parts, state: Tensor, changes: Tensor) -> Tensor:
    """Return the state behind the tokens."""
    return parts.kept * state + parts.keys.mT @ changes


def run_chunks(parts: Parts, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of a group of chunks, the states before each, and the state behind the last."""
    states, changes = [], []
    for number in range(len(parts.reads)):
        part = chunk_of(parts, number)
        states.append(state)
        changes.append(find_changes(part, state))
        state = next_state(part, state, changes[-1])
    before = torch.stack(states)
    return outputs(parts, before, torch.stack(changes)), before, state


def state_gradients(parts: Parts, dout: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the states behind each chunk of a group, and of the state before the first."""
    dchanges, dstates = parts.weights.mT @ dout, parts.reads.mT @ dout
    after = []
    for number in reversed(range(len(dout))):
        part = chunk_of(parts, number)
        after.append(dstate)
        before = part.kept * dstate + dstates[number]
        if part.forgets is not None:
            before -= part.forgets.mT @ (dchanges[number] + part.keys @ dstate)
        dstate = before
    return torch.stack(after[::-1]), dstate


def initial_state(sources: Sources) -> Tensor:
    """Return a state of zeros."""
    (batch, _, key_heads, size), (heads, width) = sources.q.shape, sources.v.shape[2:]
    return sources.v.new_zeros(batch, heads // key_heads, key_heads, size, width)


def run_groups(
    sources: Sources, starts: Tensor, state: Tensor, chunk: int, correct: bool
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield, for each group of chunks, its tokens, outputs, states before each chunk, and state behind it."""
    for first, until in groups(sources.v.shape, chunk):
        begins = split_begins(starts, first, until, chunk)
        parts = solve(split_sources(sources, first, until, chunk), begins, correct)
        results, before, state = run_chunks(parts, state)
        tokens = slice(first, min(until, sources.v.shape[1]))
        yield tokens, join(results)[:, : tokens.stop - first], before, state


def delta_bytes(q: GraphTensor, v: GraphTensor, node: Node, squares: int, rows: int, states: int) -> int:
    """Return the bytes of a group's arrays, by how many there are: C x C for a chunk, C x (d + e), and d x e."""
    (batch, length, heads, width), size = v.shape, q.shape[3]
    chunk = min(node.attrs.get("chunk", CHUNK), length)
    if not node.attrs.get("correct", True):
        squares -= squares // 3
    first, until = groups(v.shape, chunk)[0]
    tokens = batch * heads * (until - first)
    numbers = squares * chunk + rows * (size + width) + states * size * width // chunk
    return v.dtype.size * tokens * numbers


def forward_bytes(node: Node) -> int:
    """Return the bytes that the forward pass needs."""
    q, _, v, *_ = node.sources
    return delta_bytes(q, v, node, 8, 5, 3)


@writing_kernel(forward_bytes)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor,
    *,
    chunk: int = CHUNK,
    correct: bool = True,
    out: tuple[Tensor, ...],
) -> None:
    """Return the outputs of all tokens, and the state behind the tokens before each chunk."""
    sources, chunk = Sources(q, k, v, g, beta), min(chunk, v.shape[1])
    for tokens, results, before, _ in run_groups(sources, starts, initial_state(sources), chunk, correct):
        out[0][:, tokens] = results
        out[1][:, tokens.start // chunk :][:, : len(before)] = before.flatten(2, 3).transpose(0, 1)


def group_gradients(
    sources: Sources, begins: Tensor, before: Tensor, dout: Tensor, dstate: Tensor, correct: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the gradients of a group's sources, and of the state before it."""
    leaves = Sources(*(x.detach().requires_grad_() for x in sources))
    with torch.enable_grad():
        parts = solve(leaves, begins, correct)
        changes = find_changes(parts, before)
        results = outputs(parts, before, changes), next_state(parts, before, changes)
    fixed = Parts(*(part if part is None else part.detach() for part in parts))
    dafter, dstate = state_gradients(fixed, dout, dstate)
    with torch.autograd.set_multithreading_enabled(False):  # so that this thread's calls can be captured
        return torch.autograd.grad(results, leaves, (dout, dafter)), dstate


def back_bytes(node: Node) -> int:
    """Return the bytes that the gradient needs."""
    _, q, _, v, *_ = node.sources
    return delta_bytes(q, v, node, 12, 9, 6)


@writing_kernel(back_bytes)
def gated_delta_rule_back(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor,
    states: Tensor,
    *,
    chunk: int = CHUNK,
    correct: bool = True,
    out: tuple[Tensor, ...],
) -> None:
    """Return the gradients of q, k, v, g and beta.

    The states are known, so only their own gradients go from chunk to chunk. With them, autograd finds the
    others for all chunks of a group at once.
    """
    sources, (length, key_heads) = Sources(q, k, v, g, beta), q.shape[1:3]
    chunk, dstate = min(chunk, length), initial_state(sources)
    for first, until in reversed(groups(v.shape, chunk)):
        gradients, dstate = group_gradients(
            split_sources(sources, first, until, chunk),
            split_begins(starts, first, until, chunk),
            split_heads(states[:, first // chunk : until // chunk], key_heads),
            split(dout, first, until, chunk, key_heads),
            dstate,
            correct,
        )
        for place, gradient in zip(out, gradients, strict=True):
            part = place[:, first:until]
            part.copy_(join(gradient)[:, : part.shape[1]].view_as(part))


def step_bytes(node: Node) -> int:
    """Return the bytes that decoding needs, results included."""
    _, q, _, v, *_ = node.sources
    results = 2 * result_bytes(node)
    return results if v.shape[1] <= FEW_TOKENS else results + delta_bytes(q, v, node, 8, 5, 3)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key heads for all value heads: value head h reads the key head h modulo their number."""
    return x.repeat(1, 1, heads // x.shape[2], 1)


def delta_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, correct: bool
) -> tuple[Tensor, Tensor]:
    """Process one token: state (B, H, d, e), q and k (B, H, d), v (B, H, e). Return the state and the output."""
    state = state * g.exp()[..., None, None]
    error = v[..., None, :] - k[..., None, :] @ state if correct else v[..., None, :]
    state.add_(k[..., None] * (beta[..., None, None] * error))
    return state, (q[..., None, :] @ state).squeeze(-2)


@kernel(step_bytes)
def gated_delta_step(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    correct: bool = True,
    into: bool = False,
) -> tuple[Tensor, Tensor]:
    """Process tokens from a state (B, H, d, e); return the new state and the outputs."""
    length, out = v.shape[1], torch.empty_like(v)
    if length <= FEW_TOKENS:
        q, k = repeat_heads(q, v.shape[2]), repeat_heads(k, v.shape[2])
        for t in range(length):
            state, out[:, t] = delta_step(state, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], correct)
        return state, out
    starts = g.new_full(g.shape[:2], -1, dtype=torch.int32)  # no sample begins here
    state, chunk = state.unflatten(1, (-1, q.shape[2])), min(CHUNK, length)
    for tokens, results, _, after in run_groups(Sources(q, k, v, g, beta), starts, state, chunk, correct):
        out[:, tokens], state = results, after
    return state.flatten(1, 2), out
