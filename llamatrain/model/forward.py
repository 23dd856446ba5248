"""The parts that blocks are built from: weights with adapters, positions, heads and attention.

Activations are matrices with a row for each token; heads are (batch, length, heads, size).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from llamatrain.graph import ops as O
from llamatrain.graph.ops import layer_norm, rms_norm, rope
from llamatrain.graph.tensor import Tensor
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights

# layer, q, k, v (batch, length, heads, size) -> like q
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """Functions with which blocks see what precedes a token: in the row, or in a state while decoding."""

    # layer, x (batch, length, channels), taps -> like x
    convolve: Callable[[int, Tensor, Tensor], Tensor]
    # layer, q, k, v (batch, length, heads, size), decay, beta (batch, length, heads), correct -> like v
    delta_rule: Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True, kw_only=True)
class ForwardPass:
    """One forward pass. Training and decoding differ only in `attend` and `recurrence`."""

    h: Hyperparameters
    weights: Weights
    tokens: Tensor  # (batch, length)
    positions: Tensor  # like tokens
    table: Tensor  # the table of all rotations
    attend: Attend
    recurrence: Recurrence
    scored_tokens: Tensor | None = None  # the indices of tokens whose logits are needed; None: all
    # inputs of blocks besides the output of the block before, if the architecture has them
    side_inputs: list[Tensor] = field(default_factory=list)
    keys_and_values: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of earlier blocks
    # if experts are balanced: the weight of each token, and how unevenly each block chose its experts
    balance_weights: Tensor | None = None
    balance_terms: list[Tensor] = field(default_factory=list)

    def embedding(self, name: str) -> Tensor:
        """Return the embeddings of the tokens, with those of adapters."""
        rows = O.get_rows(self.weights[f"{name}.weight"], self.tokens, name=name)
        return self.weights.embed_lora(
            O.reshape(rows, shape=(self.tokens.size, rows.shape[-1])), self.tokens, f"{name}.weight"
        )

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Return x times a weight, plus its bias and its adapters."""
        bias = self.weights.get(f"{name}.bias")
        y = O.matmul(x, self.weights[f"{name}.weight"], *(() if bias is None else (bias,)), name=name)
        return self.weights.add_lora(y, x, f"{name}.weight")

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Return the RMS norm of x with a weight."""
        return rms_norm(x, self.weights.norm_weight(f"{name}.weight"), eps=self.h.rms_eps, name=name)

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        """Return the layer norm of x with a weight, and with a bias if there is one."""
        w, bias = self.weights.norm_weight(f"{name}.weight"), self.weights.get(f"{name}.bias")
        return layer_norm(x, w, *(() if bias is None else (bias,)), eps=self.h.rms_eps, name=name)

    def layer_norm_each_head(self, x: Tensor, name: str) -> Tensor:
        """Return the layer norm of each head, whose weight is a row of a matrix."""
        w = self.weights.norm_weight(f"{name}.weight")
        ones = O.fill(shape=x.shape[-1:], value=1.0, dtype=x.dtype)
        normal = O.reshape(layer_norm(x, ones, eps=self.h.rms_eps), shape=(self.tokens.size, w.size))
        return O.reshape(O.mul(normal, O.reshape(w, shape=(w.size,))), shape=x.shape)

    def norm_without_weight(self, x: Tensor) -> Tensor:
        """Return the RMS norm of x without a weight."""
        ones = O.fill(shape=x.shape[-1:], value=1.0, dtype=x.dtype)
        return rms_norm(x, ones, eps=self.h.rms_eps)

    def split_heads(self, x: Tensor, count: int) -> Tensor:
        """Reshape rows to (batch, length, heads, size)."""
        return O.reshape(x, shape=(*self.tokens.shape, count, x.shape[-1] // count))

    def apply_rope(self, layer: int, x: Tensor) -> Tensor:
        """Rotate heads of queries or keys by their positions."""
        index = self.h.architecture.rope_index(self.h, layer)
        return x if index is None else self.rotate(x, index)

    def rotate(self, x: Tensor, index: int) -> Tensor:
        """Rotate heads by their positions with one of the model's rotations."""
        table = rope_table_at(self.h, self.table, index)
        return rope(x, self.positions, table, halves=self.h.rotates_halves)

    def attention(self, layer: int, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        """Return the attention output, with a row for each token that is needed further.

        Without keys and values, those of an earlier block are read (`Architecture.kv_block`).
        """
        if k is None or v is None:
            k, v = self.keys_and_values[self.h.kv_block(layer)]
        else:
            self.keys_and_values[layer] = k, v
        attended = O.reshape(self.attend(layer, q, k, v), shape=(self.tokens.size, q.shape[2] * q.shape[3]))
        return self.keep_scored_rows(layer, attended)

    def keep_scored_rows(self, layer: int, x: Tensor) -> Tensor:
        """Behind the last block's attention, keep only the tokens whose logits are needed."""
        last = layer == self.h.layers - 1
        return O.get_rows(x, self.scored_tokens, name="scored") if last and self.scored_tokens else x


def rope_table_for(h: Hyperparameters, table: Tensor, layer: int) -> Tensor | None:
    """Return the part of the table of all rotations that a block uses, or None if it rotates nothing."""
    index = h.architecture.rope_index(h, layer)
    return None if index is None else rope_table_at(h, table, index)


def rope_table_at(h: Hyperparameters, table: Tensor, index: int) -> Tensor:
    """Return the part of the table of all rotations that belongs to one of them."""
    if len(h.ropes) == 1:
        return table
    positions = table_positions(h, table)
    counts = [positions * each for each in rows_per_position(h)]  # rows of each rotation
    first, (_, *rest) = sum(counts[:index]), table.shape
    part = O.view(table, slices=((first, first + counts[index], 1), *((0, each, 1) for each in rest)))
    pairs = h.ropes[index].size // 2
    if pairs == h.table_pairs:
        return part
    return O.reshape(part, shape=(positions, 2, pairs) if h.rotates_halves else (positions, pairs, 2))


def rows_per_position(h: Hyperparameters) -> list[int]:
    """Return how many rows of the table of all rotations a position has, for each rotation."""
    return [each.size // 2 // h.table_pairs for each in h.ropes]


def table_positions(h: Hyperparameters, table: Tensor) -> int:
    """Return the number of positions in the table of all rotations."""
    return table.shape[0] // sum(rows_per_position(h))
