"""The graph of the loss: clipped ratios of token probabilities, and the divergence from a reference.

    ratio = p / p_old        (p_old: when the answer was generated)
    loss  = Σ share · (-min(ratio · advantage, clip(ratio) · advantage) + beta · divergence)

The shares of tokens and the advantages of answers are data (`grpo.advantages`). The divergence is the estimate
p_ref / p - log(p_ref / p) - 1 (Schulman 2020), with the model without its adapter as reference.
"""

from llamatrain.graph import ops as O
from llamatrain.graph.ops import add_number, detached, exp, relu
from llamatrain.graph.tensor import I32, Tensor, placeholder
from llamatrain.grpo.settings import Grpo
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights
from llamatrain.model.transformer import TrainingGraph, make_inputs, token_losses

ANSWER_ROWS = "answer_rows"  # the row of each token
SHARES, ADVANTAGES, OLD_LOG_PROBS = "token_shares", "advantages", "old_log_probs"


def grpo_loss(
    settings: Grpo,
    h: Hyperparameters,
    weights: Weights,
    reference: Weights,
    *,
    batch: int,
    length: int,
    table: Tensor,
    drop_untrained: bool = False,
    flash: bool = True,
) -> TrainingGraph:
    """Build the graph of the loss; its output `log_probs` are those of the trained tokens, then of the reference."""
    inputs = make_inputs(batch, length, table.dtype, flash, drop_untrained and flash)
    count = inputs.pop("weights").shape
    names = (SHARES, ADVANTAGES, *([OLD_LOG_PROBS] if settings.keeps_log_probs else []))
    tokens = {name: placeholder(name, count, table.dtype) for name in names}

    def log_probs_of(model: Weights) -> tuple[Tensor, list[Tensor]]:
        losses, borders = token_losses(h, model, inputs, table, temperature=settings.temperature)
        return O.scale(losses, by=-1.0), borders

    log_probs, borders = log_probs_of(weights)
    old = tokens[OLD_LOG_PROBS] if settings.keeps_log_probs else detached(log_probs)
    losses = policy_losses(log_probs, old, tokens[ADVANTAGES], settings)
    outputs = [log_probs]
    if settings.beta:
        reference_log_probs, _ = log_probs_of(reference)
        losses = O.add(losses, O.scale(divergences(log_probs, reference_log_probs), by=settings.beta))
        outputs.append(reference_log_probs)
    inputs[ANSWER_ROWS] = placeholder(ANSWER_ROWS, count, I32)
    shares = O.reshape(O.mul(losses, tokens[SHARES]), shape=(count[0], 1))
    loss = O.sum(O.get_rows_back(shares, inputs[ANSWER_ROWS], rows=batch), name="loss")
    return TrainingGraph(
        inputs | tokens, table, borders, loss, {}, terms=(loss,), log_probs=tuple(map(detached, outputs))
    )


def policy_losses(log_probs: Tensor, old: Tensor, advantages: Tensor, settings: Grpo) -> Tensor:
    """Return the loss of each token without the divergence: minus the smaller of two products."""
    ratios = exp(O.sub(log_probs, old))
    clipped = clip(ratios, 1 - settings.epsilon, 1 + settings.epsilon_high)
    gains, clipped_gains = O.mul(ratios, advantages), O.mul(clipped, advantages)
    return O.sub(relu(O.sub(gains, clipped_gains)), gains)


def clip(x: Tensor, low: float, high: float) -> Tensor:
    """Return x within bounds."""
    above_low, above_high = (relu(add_number(x, -bound)) for bound in (low, high))
    return add_number(O.sub(above_low, above_high), low)


def divergences(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Return the estimate of the divergence at each token."""
    log_ratios = O.sub(reference, log_probs)
    return add_number(O.sub(exp(log_ratios), log_ratios), -1.0)
