"""From a loss to training programs' graphs: gradients, precision, recomputation, and the optimizer's step.

Gradients are streamed (each is used up by its weight's step as soon as it is there, and its memory is free again) or kept
(each lies in memory of its own, for clipping by norm, accumulation and minimizers).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamatrain.errors import GraphError
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.ops import acc, clip_factor, cont, fill, mul, sum_sqr
from llamatrain.graph.precision import round_products
from llamatrain.graph.remat import rematerialise
from llamatrain.graph.tensor import Tensor, placeholder, state
from llamatrain.optim.optimizer import StepRule


@dataclass
class Differentiated:
    """A loss to run, and its gradients by parameter."""

    loss: Tensor
    grads: dict[Tensor, Tensor]


def differentiate(
    loss: Tensor,
    parameters: Sequence[Tensor],
    *,
    precision: str = "f32",
    borders: Sequence[Tensor] = (),
    remat: str | int = "none",
) -> Differentiated:
    """The loss with its gradients, in a precision, and with values between the `borders` of blocks made again (see remat)."""
    value, grads = value_and_gradients(loss, parameters)
    outputs = [value, *grads, loss, *borders]
    if precision == "bf16":
        outputs = round_products(outputs)
    elif precision != "f32":
        raise GraphError(f"unknown precision {precision!r}; known are f32, bf16")
    asked, (forward, *marks) = outputs[: 1 + len(grads)], outputs[1 + len(grads) :]
    value, *grads = rematerialise(asked, forward, marks, remat)
    return Differentiated(value, dict(zip(parameters, grads, strict=True)))


@dataclass
class StepInputs:
    """What a step is told: the optimizer's own row of numbers."""

    schedule: Tensor


Rates = Mapping[Tensor, Tensor]  # weight: a row, what its own schedule is multiplied by


def row_of(rule: StepRule) -> Tensor:
    return placeholder("schedule", rule.schedule(1, 0.0).shape)


def scheduled(schedule: Tensor, weight: Tensor, rates: Rates | None) -> Tensor:
    return mul(schedule, rates[weight]) if rates and weight in rates else schedule


def stream(made: Differentiated, rule: StepRule, rates: Rates | None = None) -> tuple[StepInputs, list[Tensor]]:
    """One program: loss, and each weight changed as soon as its gradient is there. No clipping, no accumulation."""
    schedule = row_of(rule)
    one = fill(shape=(), value=1.0)
    steps = [step for w, g in made.grads.items() for step in rule.step(w, g, scheduled(schedule, w, rates), one)]
    return StepInputs(schedule), [made.loss, *steps]


@dataclass
class Kept:
    """Memory for gradients, one state for each parameter, and what fills it."""

    loss: Tensor
    blocks: dict[Tensor, Tensor]  # parameter: its gradient's memory
    first: list[Tensor]  # to be pinned to `blocks`: the gradients of a step's first micro-batch
    more: list[Tensor]  # in place: those of a further micro-batch added


def hold(made: Differentiated) -> Kept:
    """Gradients that stay. `first` overwrites them, so that nothing need be zeroed; `more` adds to them."""
    blocks = {w: state(f"{w.name}.grad", w.shape, w.dtype) for w in made.grads}
    taken: set[Tensor] = set()
    first = []
    for grad in made.grads.values():
        first.append(cont(grad) if grad in taken or grad.node is None else grad)
        taken.add(grad)
    whole = {w: tuple((0, size, 1) for size in w.shape) for w in made.grads}
    more = [acc(blocks[w], grad, slices=whole[w], into=True) for w, grad in made.grads.items()]
    return Kept(loss=made.loss, blocks=blocks, first=first, more=more)


def apply(kept: Kept, rule: StepRule, clip: float, rates: Rates | None = None) -> tuple[StepInputs, Tensor, list[Tensor]]:
    """The program that ends a step: the gradients' norm, and every weight changed by its kept gradient, clipped to that norm."""
    schedule = row_of(rule)
    factor, norm = clip_factor(*(sum_sqr(block) for block in kept.blocks.values()), limit=clip)
    steps = [step for w, g in kept.blocks.items() for step in rule.step(w, g, scheduled(schedule, w, rates), factor)]
    return StepInputs(schedule), norm, [norm, *steps]
