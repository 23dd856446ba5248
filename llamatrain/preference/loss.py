"""The graph of a preference loss."""

from llamatrain.graph import ops as O
from llamatrain.graph.tensor import Tensor, placeholder
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights
from llamatrain.model.transformer import TrainingGraph
from llamatrain.preference.forward import PairForward
from llamatrain.preference.objective import Answers, Objective


def preference_loss(
    objective: Objective,
    h: Hyperparameters,
    weights: Weights,
    reference: Weights,
    *,
    batch: int,
    length: int,
    table: Tensor,
    sparse: bool = False,
    flash: bool = True,
) -> TrainingGraph:
    """Build the graph of a preference loss.

    The input `worth` is the weight of each pair or answer in the loss; `words` is that of each token of the
    chosen answers, if those are trained by cross entropy.
    """
    answers = objective.max_answers(batch, length)
    forward = PairForward(
        h=h, table=table, batch=batch, length=length, answers=answers, sparse=sparse, flash=flash
    )
    inputs = forward.inputs()
    losses, block_inputs = forward.losses(weights, inputs)
    log_probs = forward.log_probs(losses, inputs)
    log_ratios = log_probs
    if objective.uses_reference:
        log_ratios = O.sub(log_probs, forward.log_probs(forward.losses(reference, inputs)[0], inputs))
    rewards = O.scale(log_ratios, by=objective.beta)
    units = answers // 2 if objective.compares_pairs else answers
    inputs["worth"] = placeholder("worth", (units,), table.dtype)
    unit_losses = objective.loss(Answers(rewards, log_probs, forward, weights, reference, inputs))
    parts = [O.mul(inputs["worth"], unit_losses)]
    if objective.trains_chosen:
        inputs["words"] = placeholder("words", losses.shape, table.dtype)
        parts.append(forward.sum_answers(losses, inputs["words"], inputs["sequences"]))
    terms = [O.sum(part) for part in parts]
    loss = O.add(*terms) if len(terms) > 1 else terms[0]
    return TrainingGraph(
        inputs,
        table,
        block_inputs,
        loss,
        {},
        terms=tuple(terms),
        rewards=rewards,
        term_parts=tuple(parts),
    )
