"""Attention in blocks of queries and keys, forward and back, without ever holding all scores.

After Dao et al., FlashAttention (2022): a softmax that is corrected as further keys come, and a backward pass that makes the
scores again from the log of their sums. A job belongs to one head of keys and values; nothing is added across jobs, so
there are no atomics, and the sums' order is fixed. All memory beside the results is a few blocks for each thread.

A window is part of what a query sees, so that blocks before it are passed over as those behind it are. A cap is one more pass
over a block of scores, where there is one.
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

NO_WINDOW = 1 << 40  # keys: a window that nothing lies before


def product_mode(q) -> int:
    return tiles.choose_mode("bf16" if q.dtype == np.uint16 else "f32")


def panel_sizes(q) -> tuple[int, ...]:
    """Bytes of a packed block: of rows of a head, of a head across, of scores."""
    mode, size, side = product_mode(q), q.shape[3], int(SIDE)
    return tuple(packed_bytes(mode, *shape) for shape in ((side, size), (size, side), (side, side)))


def uses_small(q, k, attrs) -> bool:
    return is_small(q, k) and not attrs.get("cap")


def thread_bytes(q, k, attrs) -> int:
    if uses_small(q, k, attrs):
        return small.thread_bytes(q, k)
    along, across, square = panel_sizes(q)
    return (SHARED_BLOCKS + 1) * along + across + square + 4 * int(SIDE) ** 2 + SHARED_BLOCKS * STATE_BYTES


def thread_bytes_back(q, k, attrs) -> int:
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
    return all(each.dtype in (np.float32, np.uint16, np.int32) for each in (*outs, *ins))


def make_heads(q, k, attrs) -> Heads:
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
