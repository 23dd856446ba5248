"""What attention's compiled calls are given."""

from typing import Any, NamedTuple

from llamatrain.compiler.declare import F32, Real


class Heads(NamedTuple):
    """Queries and keys in a batch's row, heads of both, the size of a head; how products are made, and of what. How many keys a
    query sees at most, and what scores are capped at; 0: they are not."""

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
    """What the forward pass took and gave, and the gradient of what it gave."""

    dout: Any
    q: Any
    k: Any
    v: Any
    out: Any
    lse: F32


class Gradients(NamedTuple):
    dq: Any
    dk: Any
    dv: Any
