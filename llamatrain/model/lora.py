"""Low-rank adapters (Hu et al. 2021) as a function from weights to weights: y = W x + s · B (A x), and W is left alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llamatrain.graph import ops as O
from llamatrain.graph.dynamic_axis import find_dynamic_dim
from llamatrain.graph.ops import dropout
from llamatrain.graph.tensor import Tensor


@dataclass(frozen=True)
class Delta:
    """What an adapter adds to a weight (out, in): a is (r, in), b (out, r); of embeddings, a is (vocabulary, r), b (embd, r).

    A norm's gains (n) are a matrix of one row.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0  # the share of its input that it does not see in a step
    salt: int = 0  # sets what it does not see apart from what others do not


@dataclass(frozen=True)
class DropoutDelta:
    """What adapters do not see of their inputs, by the key of a batch: its seed, and which row of the step its first one is."""

    key: Tensor  # (2,) i32
    length: int = 1  # tokens of a row
    scored_tokens: Tensor | None = None

    def apply(self, x: Tensor, delta: Delta) -> Tensor:
        tokens = [self.scored_tokens] if self.scored_tokens and find_dynamic_dim([x]) else []
        return dropout(x, self.key, *tokens, rate=delta.dropout, salt=delta.salt, length=self.length)


@dataclass(frozen=True)
class Weights(Mapping[str, Tensor]):
    """Every weight by its GGUF name, with what adapters add to it."""

    tensors: Mapping[str, Tensor]
    deltas: Mapping[str, Sequence[Delta]] = field(default_factory=dict)
    dropout: "DropoutDelta | None" = None  # in training

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def add_lora(self, y: Tensor, x: Tensor, name: str) -> Tensor:
        """y, the product of x with a weight, and what adapters of that weight add to it."""
        for delta in self.deltas.get(name, ()):
            dropped = self.dropout.apply(x, delta) if self.dropout and delta.dropout else x
            y = O.add(y, O.matmul(O.scale(O.matmul(dropped, delta.a), by=delta.scale), delta.b))
        return y

    def embed_lora(self, x: Tensor, tokens: Tensor, name: str) -> Tensor:
        """x, the embeddings of tokens, and what adapters of those add to them."""
        for delta in self.deltas.get(name, ()):
            rows = O.reshape(O.get_rows(delta.a, tokens), shape=(tokens.size, delta.a.shape[1]))
            x = O.add(x, O.matmul(O.scale(rows, by=delta.scale), delta.b))
        return x

    def norm_weight(self, name: str) -> Tensor:
        """A norm's weight with what adapters add to it."""
        w = self.tensors[name]
        for delta in self.deltas.get(name, ()):
            row = O.scale(O.matmul_nn(delta.b, delta.a), by=delta.scale)
            w = O.add(w, O.reshape(row, shape=w.shape))
        return w

    def with_deltas(self, more: Mapping[str, Sequence[Delta]]) -> "Weights":
        """With further adapters beside those that are there."""
        names = [*self.deltas, *(name for name in more if name not in self.deltas)]
        both = {name: (*self.deltas.get(name, ()), *more.get(name, ())) for name in names}
        return Weights(self.tensors, both, self.dropout)

    def for_rows(self, length: int, scored_tokens: Tensor | None) -> "Weights":
        """Return the same for rows of so many tokens; `weighed` are the tokens that go on where not all do."""
        return replace(
            self, dropout=self.dropout and replace(self.dropout, length=length, scored_tokens=scored_tokens)
        )
