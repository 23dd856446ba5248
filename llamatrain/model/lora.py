"""LoRA adapters (Hu et al. 2021) as a function from weights to weights: y = W x + s · B (A x), with W frozen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from llamatrain.graph import ops as O
from llamatrain.graph.dynamic_axis import find_dynamic_dim
from llamatrain.graph.ops import dropout
from llamatrain.graph.tensor import Tensor


@dataclass(frozen=True)
class Delta:
    """The factors of an adapter of one weight (out, in): a is (r, in), b is (out, r).

    For embeddings, a is (vocabulary, r) and b is (embd, r). For a norm (n), the weight is a matrix of one
    row. For experts (E, out, in), a is (E, r, in) and b is (E, out, r).
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0  # the share of its input that is dropped
    salt: int = 0  # distinguishes its mask from those of other adapters

    def product(self, transposed: bool = False) -> Tensor:
        """Return what is added to the weight: s B A, or s a bᵀ for a transposed pair."""
        made = O.matmul(self.a, self.b) if transposed else O.matmul_nn(self.b, self.a)
        return O.scale(made, by=self.scale)


@dataclass(frozen=True)
class DropoutDelta:
    """Dropout of adapter inputs, by a batch's key: a seed and the number of its first row in the step."""

    key: Tensor  # (2,) i32
    length: int = 1  # tokens of a row
    scored_tokens: Tensor | None = None

    def apply(self, x: Tensor, delta: Delta) -> Tensor:
        """Apply an adapter's dropout to its input."""
        tokens = [self.scored_tokens] if self.scored_tokens and find_dynamic_dim([x]) else []
        return dropout(x, self.key, *tokens, rate=delta.dropout, salt=delta.salt, length=self.length)


@dataclass(frozen=True)
class Weights(Mapping[str, Tensor]):
    """The weights of a model by GGUF name, with their adapters."""

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
        """Add to y, the product of x and a weight, what the weight's adapters contribute."""
        for delta in self.deltas.get(name, ()):
            dropped = self.dropout.apply(x, delta) if self.dropout and delta.dropout else x
            y = O.add(y, O.matmul(O.scale(O.matmul(dropped, delta.a), by=delta.scale), delta.b))
        return y

    def add_expert_lora(self, y: Tensor, x: Tensor, name: str, order: Tensor, ends: Tensor) -> Tensor:
        """Add to y, the products of choices and the weights of their experts, what adapters contribute."""
        for delta in self.deltas.get(name, ()):
            inner = O.scale(O.expert_matmul(x, delta.a, order, ends), by=delta.scale)
            y = O.add(y, O.expert_matmul(inner, delta.b, order, ends))
        return y

    def embed_lora(self, x: Tensor, tokens: Tensor, name: str) -> Tensor:
        """Add to x, the embeddings of tokens, what the adapters contribute."""
        for delta in self.deltas.get(name, ()):
            rows = O.reshape(O.get_rows(delta.a, tokens), shape=(tokens.size, delta.a.shape[1]))
            x = O.add(x, O.matmul(O.scale(rows, by=delta.scale), delta.b))
        return x

    def norm_weight(self, name: str) -> Tensor:
        """Return a norm's weight plus its adapters."""
        w = self.tensors[name]
        for delta in self.deltas.get(name, ()):
            w = O.add(w, O.reshape(delta.product(), shape=w.shape))
        return w

    def with_tensors(self, others: Mapping[str, Tensor]) -> "Weights":
        """Return the weights with some tensors replaced, which include what adapters add to them."""
        kept = {name: deltas for name, deltas in self.deltas.items() if name not in others}
        return replace(self, tensors={**self.tensors, **others}, deltas=kept)

    def with_deltas(self, more: Mapping[str, Sequence[Delta]]) -> "Weights":
        """Return the weights with further adapters."""
        names = [*self.deltas, *(name for name in more if name not in self.deltas)]
        both = {name: (*self.deltas.get(name, ()), *more.get(name, ())) for name in names}
        return Weights(self.tensors, both, self.dropout)

    def for_rows(self, length: int, scored_tokens: Tensor | None) -> "Weights":
        """Return the weights for rows of `length` tokens, of which only `scored_tokens` reach the output."""
        return replace(
            self, dropout=self.dropout and replace(self.dropout, length=length, scored_tokens=scored_tokens)
        )
