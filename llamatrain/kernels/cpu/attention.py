"""Attention in blocks of queries and keys, forward and backward, without storing all scores.

After Dao et al., FlashAttention (2022): a softmax that is rescaled as more keys come, and a backward pass
that recomputes the scores from the log of their sums. A job belongs to one key/value head; nothing is added
across jobs, so there are no atomics, and the order of sums is fixed. Memory besides the results is a few
blocks for each thread.

Blocks of keys before a window are skipped, like those behind the last key. A cap is one more pass over a
block of scores.
"""

from math import ceil

import numpy as np

from llamatrain.kernels.cpu import small_attention as small
from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.attention_args import Forward, Gradients, Heads
from llamatrain.kernels.cpu.attention_back import attend_back
from llamatrain.kernels.cpu.attention_blocks import SHARED_BLOCKS, SIDE, STATE_BYTES
from llamatrain.kernels.cpu.attention_forward import attend
from llamatrain.kernels.cpu.registry import kernel
from llamatrain.kernels.cpu.small_attention import is_small
from llamatrain.kernels.cpu.tiles import packed_bytes

NO_WINDOW = 1 << 40  # keys; a window larger than any row


def product_mode(q) -> int:
    """Return the mode of matrix products for queries."""
    return tiles.choose_mode("bf16" if q.dtype == np.uint16 else "f32")


def panel_sizes(q) -> tuple[int, ...]:
    """Return the bytes of packed blocks: rows of a head, a head transposed, scores."""
    mode, size, side = product_mode(q), q.shape[3], int(SIDE)
    return tuple(packed_bytes(mode, *shape) for shape in ((side, size), (size, side), (side, side)))


def uses_small(q, k, attrs) -> bool:
    """Return True if the kernel of small heads is used."""
    return is_small(q, k) and not attrs.get("cap")


def thread_bytes(q, k, attrs) -> int:
    """Return the bytes that a thread needs, forward."""
    if uses_small(q, k, attrs):
        return small.thread_bytes(q, k)
    along, across, square = panel_sizes(q)
    return (SHARED_BLOCKS + 1) * along + across + square + 4 * int(SIDE) ** 2 + SHARED_BLOCKS * STATE_BYTES


def thread_bytes_back(q, k, attrs) -> int:
    """Return the bytes that a thread needs, backward."""
    if uses_small(q, k, attrs):
        return small.thread_bytes(q, k)
    along, across, square = panel_sizes(q)
    return (
        2 * (along + across)
        + SHARED_BLOCKS * (2 * along + across)
        + STATE_BYTES
        + 8 * int(SIDE) ** 2
        + 2 * square
    )


def takes_floats(outs, ins, attrs) -> bool:
    """Return True if all arrays are float32, bf16 or int32."""
    return all(each.dtype in (np.float32, np.uint16, np.int32) for each in (*outs, *ins))


def make_heads(q, k, attrs) -> Heads:
    """Return the sizes of an attention."""
    (_, length, heads, size), (_, keys, groups, _) = q.shape, k.shape
    return Heads(
        length=length,
        keys=keys,
        heads=heads,
        groups=groups,
        size=size,
        mode=product_mode(q),
        half=q.dtype == np.uint16,
        scale=attrs["scale"],
        window=attrs.get("window") or NO_WINDOW,
        cap=attrs.get("cap", 0.0),
    )


@kernel(
    "flash_attn",
    scratch=lambda outs, ins, attrs, threads: threads * thread_bytes(ins[0], ins[1], attrs),
    takes=takes_floats,
)
def flash_attn(outs, ins, attrs, scratch, threads):
    """Return the calls of `flash_attn`."""
    (q, k, v, starts, *lasts), (out, lse) = ins, outs
    (batch, length, heads, _), groups = q.shape, k.shape[2]
    arrays = {
        "q": q,
        "k": k,
        "v": v,
        "starts": starts,
        "lasts": lasts[0] if lasts else 0,
        "out": out,
        "lse": lse,
    }
    how = {"scratch": scratch, "thread_bytes": thread_bytes(q, k, attrs), "shape": make_heads(q, k, attrs)}
    if uses_small(q, k, attrs):
        return [
            small.attend_small.call(**arrays, **how, items=batch * groups, block=small.choose_job_block(q, k))
        ]
    jobs = batch * groups * ceil(heads // groups * ceil(length / SIDE) / SHARED_BLOCKS)
    return [attend.call(**arrays, **how, items=jobs, block=1)]


@kernel(
    "flash_attn_back",
    scratch=lambda outs, ins, attrs, threads: threads * thread_bytes_back(ins[1], ins[2], attrs),
    takes=takes_floats,
)
def flash_attn_back(outs, ins, attrs, scratch, threads):
    """Return the calls of `flash_attn_back`."""
    (dout, q, k, v, out, lse, starts, *lasts) = ins
    forward, gradients = Forward(dout, q, k, v, out, lse), Gradients(*outs)
    ranges = {"starts": starts, "lasts": lasts[0] if lasts else 0}
    how = {
        "scratch": scratch,
        "thread_bytes": thread_bytes_back(q, k, attrs),
        "shape": make_heads(q, k, attrs),
    }
    jobs = q.shape[0] * k.shape[2]
    if uses_small(q, k, attrs):
        return [
            small.attend_small_back.call(
                forward, gradients=gradients, **ranges, **how, items=jobs, block=small.choose_job_block(q, k)
            )
        ]
    return [
        attend_back.call(
            forward,
            gradients=gradients,
            **ranges,
            **how,
            out_half=out.dtype == np.uint16,
            items=jobs,
            block=1,
        )
    ]
