"""The forward pass of preference training: the log-probability of each answer of a batch."""

from dataclasses import dataclass

from llamatrain.graph import ops as O
from llamatrain.graph.ops import cross_entropy_rows, linear_cross_entropy_rows
from llamatrain.graph.tensor import I32, Tensor, placeholder
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights
from llamatrain.model.transformer import compute_logits, forward, make_inputs, output_is_one_matrix

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
        weights = weights.for_rows(self.length, inputs.get("scored_indices"))
        x, borders = forward(self.h, weights, inputs, self.table)
        if self.flash and output_is_one_matrix(self.h, weights):
            return linear_cross_entropy_rows(
                x, weights[self.h.output_weight], inputs["targets"], cap=self.h.logit_cap
            ), borders
        return cross_entropy_rows(compute_logits(self.h, x, weights), inputs["targets"]), borders

    def sum_answers(self, losses: Tensor, shares: Tensor, sequences: Tensor) -> Tensor:
        """Return the sum over the tokens of each answer: (answers,)."""
        weighted = O.reshape(O.mul(losses, shares), shape=(losses.shape[0], 1))
        return O.reshape(O.get_rows_back(weighted, sequences, rows=self.answers), shape=(self.answers,))

    def log_probs(self, losses: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return the log-probability of each answer: (answers,)."""
        return O.scale(self.sum_answers(losses, inputs["shares"], inputs["sequences"]), by=-1.0)
