"""Rotary positions as a table of cosines and sines: base, factors, linear and YaRN scaling (Peng et al. 2023).

Pair i of r/2 rotates by position · base^(-2i/r), divided by its factor if the file has factors (Llama 3).
LongRoPE (Ding et al. 2024) has one set of factors for rows longer than the original context, and one for
others. Scaling follows llama.cpp: linear slows every pair; YaRN keeps the fast pairs, slows the slow ones,
and lengthens queries and keys a little.
"""

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from llamatrain.errors import FileError
from llamatrain.gguf.parser import quote
from llamatrain.gguf.reader import Gguf
from llamatrain.gguf.values import Value, f32, string, u32
from llamatrain.model.limits import BadHyperparameter

TENSORS = {  # tensors with factors
    "factors": "rope_freqs.weight",
    "long": "rope_factors_long.weight",
    "short": "rope_factors_short.weight",
}
KEYS = {  # keys, without the architecture's name
    "size": "rope.dimension_count",
    "base": "rope.freq_base",
    "kind": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "length": "rope.scaling.attn_factor",
    "original_ctx": "rope.scaling.original_context_length",
}
WINDOW_ROPE_SIZE = "rope.dimension_count_swa"  # of blocks with windows
KINDS = ("none", "linear", "yarn", "longrope")
# llama.cpp uses these values for most architectures, even if a file has yarn_beta_fast and _slow
FAST_TURNS, SLOW_TURNS = 32.0, 1.0


def to_float32(number: float) -> float:
    """Round a number to float32, as files store it.

    A model made from options is then equal to the bit to the one read from its file.
    """
    with np.errstate(over="ignore"):
        return float(np.float32(number))


@dataclass(frozen=True)
class Rope:
    """The rotation of heads, with its scaling."""

    size: int  # elements of a head that are rotated
    _: KW_ONLY
    base: float = 10000.0
    kind: str = "none"
    factor: float = 1.0  # positions count 1/factor
    original_ctx: int = 0  # YaRN, LongRoPE: what the model was first trained for
    length: float = 1.0  # a factor of rotated vectors, besides YaRN's own
    factors: np.ndarray | None = field(default=None, repr=False, compare=False)  # (r/2,)
    # YaRN: pairs that turn more often in the original context are kept, those that turn less often slowed
    fast_turns: float = field(default=FAST_TURNS, repr=False)
    slow_turns: float = field(default=SLOW_TURNS, repr=False)
    # lengthens rotated vectors by 1 + temperature · ln(1 + position // original_ctx)
    temperature: float = field(default=0.0, repr=False)
    # for rows longer than the original context
    long: np.ndarray | None = field(default=None, repr=False, compare=False)
    short: np.ndarray | None = field(default=None, repr=False, compare=False)  # for other rows

    def __post_init__(self) -> None:
        for name in ("base", "factor", "length", "fast_turns", "slow_turns", "temperature"):
            object.__setattr__(self, name, to_float32(getattr(self, name)))
        if not 1 <= self.base < math.inf:
            raise BadHyperparameter("base", f"{self.base:g}", "must be at least 1, such as 10000")
        if self.kind not in KINDS:
            raise BadHyperparameter("kind", quote(self.kind), f"must be one of {', '.join(KINDS)}")
        for name in ("factor", "length"):
            if not 0 < getattr(self, name) < math.inf:
                raise BadHyperparameter(name, f"{getattr(self, name):g}", "must be more than 0, such as 4")
        if (self.depends_on_length or self.temperature) and not self.original_ctx > 0:
            raise BadHyperparameter(
                "original_ctx",
                f"{self.original_ctx}",
                "must be the context that the model was first trained for, as YaRN and LongRoPE need it",
            )
        if self.kind == "yarn" and not self.base > 1:
            raise BadHyperparameter("base", f"{self.base:g}", "must be more than 1 for YaRN")
        for name, found in self.tensors.items():
            if not (found.shape == (self.size // 2,) and np.all(found > 0)):
                raise BadHyperparameter(
                    name, f"{list(found.shape)}", f"must be {self.size // 2} numbers above 0"
                )

    @property
    def depends_on_length(self) -> bool:
        """True if the rotation depends on the length of rows, relative to the original context."""
        return self.kind == "yarn" or self.long is not None or self.short is not None

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """The factors by field name."""
        return {name: found for name in TENSORS if (found := getattr(self, name)) is not None}

    def factors_for(self, positions: int) -> np.ndarray | float:
        """Return the factors for rows of a length."""
        chosen = self.long if positions > self.original_ctx else self.short
        factors = chosen if self.factors is None else self.factors
        return 1.0 if factors is None else factors.astype(np.float64)

    def table(self, positions: int) -> np.ndarray:
        """Return cosine and sine of each position and pair, for rows of that length: (positions, r/2, 2)."""
        return self.first_rows(positions, positions)

    def first_rows(self, count: int, positions: int) -> np.ndarray:
        """Return the first `count` rows of the table for rows of `positions` tokens."""
        pair = np.arange(self.size // 2)
        frequency = self.base ** (-2.0 * pair / self.size) / self.factors_for(positions)
        length = self.length
        if self.kind == "yarn":
            slow_share = self._slow_share(pair)
            frequency = frequency * (slow_share / self.factor + (1.0 - slow_share))
            length *= 1.0 + 0.1 * math.log(self.factor) if self.factor > 1 else 1.0
        elif self.kind != "none":
            frequency = frequency / self.factor
        position = np.arange(count)
        angles = np.outer(position, frequency)
        lengths = np.full(count, length)
        if self.temperature:
            lengths *= 1.0 + self.temperature * np.log1p(position // self.original_ctx)
        return (lengths[:, None, None] * np.stack([np.cos(angles), np.sin(angles)], -1)).astype(np.float32)

    def shift(self, distance: int, positions: int) -> np.ndarray:
        """Return cosine and sine of a shift by `distance` positions, without scaling: (1, r/2, 2)."""
        rotation = self.first_rows(distance + 1, positions)[-1:].astype(np.float64)
        return (rotation / np.hypot(rotation[..., :1], rotation[..., 1:])).astype(np.float32)

    def _slow_share(self, pair: np.ndarray) -> np.ndarray:
        """Return the share of scaling for each pair: 0 for the fast ones, 1 for the slow, a ramp between."""

        def pair_with_turns(turns: float) -> float:
            """Return the pair that makes this many turns within the original context."""
            return self.size * math.log(self.original_ctx / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        first = max(0, math.floor(pair_with_turns(self.fast_turns)))
        last = min(self.size - 1, math.ceil(pair_with_turns(self.slow_turns)))
        return np.clip((pair - first) / max(0.001, last - first), 0.0, 1.0)

    # ---- in files ----------------------------------------------------------

    def metadata(self) -> dict[str, Value]:
        """Return the metadata keys, behind the architecture's name."""
        values = {"size": u32(self.size), "base": f32(self.base)}
        if self.kind != "none":
            values |= {"kind": string(self.kind), "factor": f32(self.factor)}
        if self.length != 1:
            values["length"] = f32(self.length)
        if self.depends_on_length:
            values["original_ctx"] = u32(self.original_ctx)
        return {KEYS[name]: value for name, value in values.items()}

    @classmethod
    def read(cls, gguf: Gguf, architecture: str, head_size: int, ctx: int) -> "Rope":
        """Read the rotation from a file's metadata and tensors."""

        def number(key: str, default: float) -> float:
            return gguf.get_value(f"{architecture}.{key}", float, default)

        factor = number(KEYS["factor"], 0.0) or number("rope.scale_linear", 0.0) or 1.0
        kind = gguf.get_value(f"{architecture}.{KEYS['kind']}", str, "linear" if factor != 1 else "none")
        factors: dict[str, Any] = {
            name: _read_factors(gguf, tensor) for name, tensor in TENSORS.items() if tensor in gguf.tensors
        }
        scaled = kind == "yarn" or "long" in factors or "short" in factors
        size = gguf.get_value(f"{architecture}.{KEYS['size']}", int, head_size)
        return cls(
            size,
            base=number(KEYS["base"], 10000.0),
            kind=kind,
            factor=factor if kind != "none" else 1.0,
            original_ctx=gguf.get_value(f"{architecture}.{KEYS['original_ctx']}", int, ctx) if scaled else 0,
            length=number(KEYS["length"], 1.0),
            **factors,
        )


def _read_factors(gguf: Gguf, name: str) -> np.ndarray:
    tensor = gguf.tensors[name]
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        raise FileError(
            f"{gguf.path}: {name} must be a vector of F32 (got {tensor.type.name} {list(tensor.shape)})",
            code="wrong-tensor-shape",
        )
    return np.array(tensor.raw.view(np.float32))  # a copy: it is written to files until the run ends
