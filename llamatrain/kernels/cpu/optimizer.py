"""The optimizer's step: one walk through weights, moments and gradient.

schedule: rate, 1 - beta1^t, 1 - beta2^t; factor multiplies the gradient first. As torch.optim does it, in float32.
"""

import math

import numpy as np

from llamatrain.kernels.cpu.binding import kernel
from llamatrain.kernels.cpu.portions import portion
from llamatrain.machine.entry import F32, Entry, Real, f32
from llamatrain.machine.simd import LANES, load_to, sqrt, store_to


@Entry
def adamw_flat(
    lo, hi, thread, w: F32, m: F32, v: F32, g: F32, schedule: F32, factors: F32, beta1: Real, beta2: Real, eps: Real, decay: Real
):
    factor = factors[0]
    keep = np.float32(1 - schedule[0] * decay)
    step = np.float32(-schedule[0] / schedule[1])
    spread = np.float32(math.sqrt(schedule[2]))
    for i in range(lo, hi, LANES):
        gradient = load_to(g, i, hi) * factor
        first, second = load_to(m, i, hi), load_to(v, i, hi)
        first = first + (gradient - first) * np.float32(1 - beta1)
        second = second * np.float32(beta2) + gradient * gradient * np.float32(1 - beta2)
        store_to(m, i, hi, first, 0)
        store_to(v, i, hi, second, 0)
        change = first / (sqrt(second) / spread + np.float32(eps))
        store_to(w, i, hi, load_to(w, i, hi) * keep + change * step, 0)


@Entry
def sgd_flat(lo, hi, thread, w: F32, m: F32, g: F32, schedule: F32, factors: F32, momentum: Real, decay: Real):
    rate, factor = schedule[0], factors[0]
    carried, keep = np.float32(momentum), np.float32(1 - rate * decay)
    for i in range(lo, hi, LANES):
        change = load_to(m, i, hi) * carried + load_to(g, i, hi) * factor
        store_to(m, i, hi, change, 0)
        store_to(w, i, hi, load_to(w, i, hi) * keep - change * rate, 0)


@kernel("opt_step_adamw")
def opt_step_adamw(outs, ins, attrs, scratch, threads):
    numbers = {name: attrs[name] for name in ("beta1", "beta2", "eps", "decay")}
    return [adamw_flat.call(*ins, **numbers, items=ins[0].size, block=portion(ins[0].size, 8, LANES))]


@kernel("opt_step_sgd")
def opt_step_sgd(outs, ins, attrs, scratch, threads):
    numbers = {name: attrs[name] for name in ("momentum", "decay")}
    return [sgd_flat.call(*ins, **numbers, items=ins[0].size, block=portion(ins[0].size, 8, LANES))]


@Entry
def clip(lo, hi, thread, factor: F32, norm: F32, limit: Real, count, *sums):
    """The norm of what `count` sums of squares belong to, and what it leaves of a gradient."""
    squares = 0.0
    for i in range(count):
        squares += f32(sums[i])[0]
    found = math.sqrt(squares)
    norm[0] = found
    factor[0] = min(1.0, limit / (found + 1e-6)) if limit > 0 and found < math.inf else 1.0


@kernel("clip_factor")
def clip_factor(outs, ins, attrs, scratch, threads):
    return [clip.call(*outs, attrs["limit"], len(ins), *ins, items=1, block=1)]
