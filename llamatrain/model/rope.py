"""Rotary positions as a table of cosines and sines: frequency base, factors, linear and YaRN scaling (Peng et al. 2023).

Pair i of r/2 turns by position · base^(-2i/r), divided by its factor where the file has such (Llama 3). Scaling as llama.cpp does
it: linear slows every pair; YaRN leaves the fast ones, slows the slow ones, and makes queries and keys a little longer.
"""

import math
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from llamatrain.errors import FileError
from llamatrain.files.cursor import quoted
from llamatrain.files.reader import Gguf
from llamatrain.files.values import Value, f32, string, u32
from llamatrain.model.unfit import Unfit

FACTORS = "rope_freqs.weight"  # where a file has them
KEYS = {  # where it has the other numbers, behind the architecture's name
    "size": "rope.dimension_count",
    "base": "rope.freq_base",
    "kind": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "length": "rope.scaling.attn_factor",
    "original_ctx": "rope.scaling.original_context_length",
}
KINDS = ("none", "linear", "yarn")
# YaRN: pairs that turn more often than the first in the original context are left alone, less often than the second slowed in
# full. llama.cpp takes these for a llama whatever rope.scaling.yarn_beta_fast and _slow say in its file.
OFTEN, SELDOM = 32.0, 1.0


def as_kept(number: float) -> float:
    """A number as files have it, in float32: a model made of options is to the bit the one that its file gives."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))


@dataclass(frozen=True)
class Rope:
    size: int  # elements of a head that are rotated
    _: KW_ONLY
    base: float = 10000.0
    kind: str = "none"
    factor: float = 1.0  # positions count 1/factor
    original_ctx: int = 0  # YaRN: what the model was first trained for
    length: float = 1.0  # what a rotated vector is multiplied by, beside YaRN's own share
    factors: np.ndarray | None = field(default=None, repr=False, compare=False)  # (r/2,)

    def __post_init__(self) -> None:
        for name in ("base", "factor", "length"):
            object.__setattr__(self, name, as_kept(getattr(self, name)))
        if not 1 <= self.base < math.inf:
            raise Unfit("base", f"{self.base:g}", "it takes 1 or more, such as 10000")
        if self.kind not in KINDS:
            raise Unfit("kind", quoted(self.kind), f"{', '.join(KINDS)} are supported")
        for name in ("factor", "length"):
            if not 0 < getattr(self, name) < math.inf:
                raise Unfit(name, f"{getattr(self, name):g}", "it takes more than 0, such as 4")
        if self.kind == "yarn" and not self.original_ctx > 0:
            raise Unfit("original_ctx", f"{self.original_ctx}", "YaRN takes the context that a model was first trained for")
        if self.kind == "yarn" and not self.base > 1:
            raise Unfit("base", f"{self.base:g}", "YaRN takes more than 1")
        if self.factors is not None and not (self.factors.shape == (self.size // 2,) and np.all(self.factors > 0)):
            raise Unfit("factors", f"{list(self.factors.shape)}", f"it takes {self.size // 2} numbers above 0")

    def table(self, positions: int) -> np.ndarray:
        """Cosine and sine for each position and pair: (positions, r/2, 2)."""
        pair = np.arange(self.size // 2)
        frequency = self.base ** (-2.0 * pair / self.size) / (1.0 if self.factors is None else self.factors.astype(np.float64))
        length = self.length
        if self.kind == "yarn":
            slowed = self._slowed(pair)
            frequency = frequency * (slowed / self.factor + (1.0 - slowed))
            length *= 1.0 + 0.1 * math.log(self.factor) if self.factor > 1 else 1.0
        elif self.kind == "linear":
            frequency = frequency / self.factor
        angles = np.outer(np.arange(positions), frequency)
        return (length * np.stack([np.cos(angles), np.sin(angles)], -1)).astype(np.float32)

    def turn(self, positions: int) -> np.ndarray:
        """Cosine and sine that a vector is further by so many positions, its length left alone: (1, r/2, 2)."""
        there = self.table(positions + 1)[-1:].astype(np.float64)
        return (there / np.hypot(there[..., :1], there[..., 1:])).astype(np.float32)

    def _slowed(self, pair: np.ndarray) -> np.ndarray:
        """How much of the scaling each pair takes: 0 for the fast ones, 1 for the slow, a ramp between."""

        def turning(times: float) -> float:
            """The pair that turns so often in the original context."""
            return self.size * math.log(self.original_ctx / (times * 2 * math.pi)) / (2 * math.log(self.base))

        first = max(0, math.floor(turning(OFTEN)))
        last = min(self.size - 1, math.ceil(turning(SELDOM)))
        return np.clip((pair - first) / max(0.001, last - first), 0.0, 1.0)

    # ---- in files ----------------------------------------------------------

    def metadata(self) -> dict[str, Value]:
        found = {"size": u32(self.size), "base": f32(self.base)}
        if self.kind != "none":
            found |= {"kind": string(self.kind), "factor": f32(self.factor)}
        if self.length != 1:
            found["length"] = f32(self.length)
        if self.kind == "yarn":
            found["original_ctx"] = u32(self.original_ctx)
        return {KEYS[name]: value for name, value in found.items()}

    @classmethod
    def read(cls, gguf: Gguf, architecture: str, head_size: int, ctx: int) -> "Rope":
        def number(key: str, default: float) -> float:
            return gguf.value(f"{architecture}.{key}", float, default)

        factor = number(KEYS["factor"], 0.0) or number("rope.scale_linear", 0.0) or 1.0
        kind = gguf.value(f"{architecture}.{KEYS['kind']}", str, "linear" if factor != 1 else "none")
        return cls(
            gguf.value(f"{architecture}.{KEYS['size']}", int, head_size),
            base=number(KEYS["base"], 10000.0),
            kind=kind,
            factor=factor if kind != "none" else 1.0,
            original_ctx=gguf.value(f"{architecture}.{KEYS['original_ctx']}", int, ctx) if kind == "yarn" else 0,
            length=number(KEYS["length"], 1.0),
            factors=_factors(gguf),
        )


def _factors(gguf: Gguf) -> np.ndarray | None:
    tensor = gguf.tensors.get(FACTORS)
    if tensor is None:
        return None
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise FileError(f"{gguf.path}: {FACTORS} is {tensor.type.name} {list(tensor.shape)}, where a row of F32 is needed")
    return np.array(tensor.raw.view(np.float32))  # files are written from it as long as a run lasts
