"""The forward pass of preference training: the log-probability of each answer of a batch."""

from dataclasses import dataclass

from llamatrain.graph import ops as O
from llamatrain.graph.tensor import I32, Tensor, placeholder
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights
from llamatrain.model.transformer import make_inputs, token_losses

MISMATCHED = "others."  # prefix of the inputs for answers to other prompts


@dataclass(frozen=True, kw_only=True)
class PairForward:
    """The forward pass of a model over all answers of a batch."""

    h: Hyperparameters
    table: Tensor
    batch: int
    length: int
    answers: int
    drop_untrained: bool
    flash: bool

    def inputs(self, name: str = "") -> dict[str, Tensor]:
        """Return the inputs by name: `sequences` is each token's answer, `shares` its weight in that answer."""
        rows = make_inputs(
            self.batch, self.length, self.table.dtype, self.flash, self.drop_untrained and self.flash, name
        )
        count = rows.pop("weights").shape
        shares = placeholder(f"{name}shares", count, self.table.dtype)
        return rows | {"sequences": placeholder(f"{name}sequences", count, I32), "shares": shares}

    def losses(self, weights: Weights, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of each token, and the inputs of the blocks."""
        return token_losses(self.h, weights, inputs, self.table)

    def sum_answers(self, losses: Tensor, shares: Tensor, sequences: Tensor) -> Tensor:
        """Return the sum over the tokens of each answer: (answers,)."""
        weighted = O.reshape(O.mul(losses, shares), shape=(losses.shape[0], 1))
        return O.reshape(O.get_rows_back(weighted, sequences, rows=self.answers), shape=(self.answers,))

    def log_probs(self, losses: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return the log-probability of each answer: (answers,)."""
        return O.scale(self.sum_answers(losses, inputs["shares"], inputs["sequences"]), by=-1.0)
