"""Argument tuples of attention kernels."""

from typing import Any, NamedTuple

from llamatrain.compiler.declare import F32, Real


class Heads(NamedTuple):
    """The sizes of an attention.

    Queries and keys in a row of the batch, heads of both, the size of a head; the mode of products and
    whether sources are bf16; the scale and cap of scores (0: no cap), and the largest number of keys a query
    sees.
    """

    length: int
    keys: int
    heads: int
    groups: int
    size: int
    mode: int
    half: int
    scale: Real
    window: int
    cap: Real


class Forward(NamedTuple):
    """Sources and results of the forward pass, and the gradient of its output."""

    dout: Any
    q: Any
    k: Any
    v: Any
    out: Any
    lse: F32


class Gradients(NamedTuple):
    """The gradients of q, k and v."""

    dq: Any
    dk: Any
    dv: Any
