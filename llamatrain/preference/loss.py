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
    drop_untrained: bool = False,
    flash: bool = True,
) -> TrainingGraph:
    """Build the graph of a preference loss.

    The input `unit_weights` is the weight of each pair or answer in the loss; `chosen_tokens` is that of each
    token of the chosen answers, if those are trained by cross entropy.
    """
    answers = objective.max_answers(batch, length)
    forward = PairForward(
        h=h,
        table=table,
        batch=batch,
        length=length,
        answers=answers,
        drop_untrained=drop_untrained,
        flash=flash,
    )
    inputs = forward.inputs()
    losses, block_inputs = forward.losses(weights, inputs)
    log_probs = forward.log_probs(losses, inputs)
    log_ratios = log_probs
    if objective.uses_reference:
        log_ratios = O.sub(log_probs, forward.log_probs(forward.losses(reference, inputs)[0], inputs))
    rewards = O.scale(log_ratios, by=objective.beta)
    units = answers // 2 if objective.compares_pairs else answers
    inputs["unit_weights"] = placeholder("unit_weights", (units,), table.dtype)
    unit_losses = objective.loss(Answers(rewards, log_probs, forward, weights, reference, inputs))
    parts = [O.mul(inputs["unit_weights"], unit_losses)]
    if objective.trains_chosen:
        inputs["chosen_tokens"] = placeholder("chosen_tokens", losses.shape, table.dtype)
        parts.append(forward.sum_answers(losses, inputs["chosen_tokens"], inputs["sequences"]))
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
