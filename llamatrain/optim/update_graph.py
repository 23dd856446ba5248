"""From a loss to training programs' graphs: gradients, precision, recomputation, and the optimizer's step.

Gradients are streamed (each is used up by its weight's step as soon as it is there, and its memory is free again) or kept
(each lies in memory of its own, for clipping by norm, accumulation and minimizers). That of an embedding is kept whole only where
others are added to it: else it is the rows of the tokens that were there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from llamatrain.errors import GraphError
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.ops import (
    acc,
    clip_factor,
    cont,
    fill,
    get_rows_back,
    mul,
    opt_rows,
    opt_sum_sqr,
    sum_sqr,
)
from llamatrain.graph.precision import round_products
from llamatrain.graph.remat import apply_policy
from llamatrain.graph.tensor import Tensor, placeholder, state
from llamatrain.optim.optimizer import ElementwiseRule

Gradient = tuple[
    Tensor, ...
]  # whole; or its rows that are not 0, and the places of all rows among them (`opt_rows`)


@dataclass
class LossAndGradients:
    """A loss to run, and its gradients by parameter."""

    loss: Tensor
    grads: dict[Tensor, Tensor]
    beside: list[Tensor] = field(default_factory=list)  # what else is wanted of the same pass

    @cached_property
    def whole(self) -> dict[Tensor, Gradient]:
        return {w: (grad,) for w, grad in self.grads.items()}

    @cached_property
    def brief(self) -> dict[Tensor, Gradient]:
        """The gradients, as rows where that is less."""
        return {w: brief(grad) for w, grad in self.grads.items()}

    def used_by(self, rule: ElementwiseRule) -> dict[Tensor, Gradient]:
        return self.brief if rule.brief else self.whole


def brief(grad: Tensor) -> Gradient:
    made = grad.node
    if made is None or made.op is not get_rows_back or made.sources[0].size + grad.shape[0] >= grad.size:
        return (grad,)
    rows, places = opt_rows(*made.sources, rows=grad.shape[0])
    return rows, places


def clipped(grads: Iterable[Gradient], limit: float) -> tuple[Tensor, Tensor]:
    """What is left of them, and the norm of all of them together."""
    factor, norm = clip_factor(
        *(opt_sum_sqr(*each) if len(each) > 1 else sum_sqr(*each) for each in grads), limit=limit
    )
    return factor, norm


def differentiate(
    loss: Tensor,
    parameters: Sequence[Tensor],
    *,
    precision: str = "f32",
    borders: Sequence[Tensor] = (),
    remat: str | int = "none",
    beside: Sequence[Tensor] = (),
) -> LossAndGradients:
    """The loss with its gradients, in a precision, and with values between the `borders` of blocks made again (see remat)."""
    value, grads = value_and_gradients(loss, parameters)
    outputs = [value, *beside, *grads, loss, *borders]
    if precision == "bf16":
        outputs = round_products(outputs)
    elif precision != "f32":
        raise GraphError(f"unknown precision {precision!r}; known are f32, bf16")
    count = 1 + len(beside) + len(grads)
    asked, (forward, *marks) = outputs[:count], outputs[count:]
    value, *rest = apply_policy(asked, forward, marks, remat)
    told, grads = rest[: len(beside)], rest[len(beside) :]
    return LossAndGradients(value, dict(zip(parameters, grads, strict=True)), told)


@dataclass
class ScheduleInputs:
    """What a step is told: the optimizer's own row of numbers."""

    schedule: Tensor


Rates = Mapping[Tensor, Tensor]  # weight: a row, what its own schedule is multiplied by


def row_of(rule: ElementwiseRule) -> Tensor:
    return placeholder("schedule", rule.schedule(1, 0.0).shape)


def scheduled(schedule: Tensor, weight: Tensor, rates: Rates | None) -> Tensor:
    return mul(schedule, rates[weight]) if rates and weight in rates else schedule


def stream(
    made: LossAndGradients, rule: ElementwiseRule, rates: Rates | None = None
) -> tuple[ScheduleInputs, list[Tensor]]:
    """One program: loss, and each weight changed as soon as its gradient is there. No clipping, no accumulation."""
    schedule = row_of(rule)
    one = fill(shape=(), value=1.0)
    return ScheduleInputs(schedule), [made.loss, *stepped(made.used_by(rule), rule, schedule, one, rates)]


def stepped(
    grads: Mapping[Tensor, Gradient],
    rule: ElementwiseRule,
    schedule: Tensor,
    factor: Tensor,
    rates: Rates | None,
) -> list[Tensor]:
    return [
        step
        for w, (g, *places) in grads.items()
        for step in rule.step(w, g, scheduled(schedule, w, rates), factor, *places)
    ]


@dataclass
class HeldGradients:
    """Memory for gradients, states of each parameter, and what fills it."""

    loss: Tensor
    blocks: dict[Tensor, Gradient]  # parameter: its gradient's memory
    first: list[Tensor]  # to be pinned to `memory`: the gradients of a step's first micro-batch
    more: list[Tensor]  # in place: those of a further micro-batch added
    beside: list[Tensor]

    @property
    def memory(self) -> list[Tensor]:
        return [state for block in self.blocks.values() for state in block]


def hold(made: LossAndGradients, whole: bool = True) -> HeldGradients:
    """Gradients that stay. `first` overwrites them, so that nothing need be zeroed; `more` adds to them, if they are `whole`."""
    grads = made.whole if whole else made.brief
    blocks = {
        w: tuple(
            state(f"{w.name}.{kind}", part.shape, part.dtype)
            for kind, part in zip(("grad", "places"), grad, strict=False)
        )
        for w, grad in grads.items()
    }
    taken: set[Tensor] = set()
    first = []
    for part in (part for grad in grads.values() for part in grad):
        first.append(cont(part) if part in taken or part.node is None else part)
        taken.add(part)
    all_of = {w: tuple((0, size, 1) for size in w.shape) for w in grads}
    more = [acc(*blocks[w], *grad, slices=all_of[w], into=True) for w, grad in grads.items()] if whole else []
    return HeldGradients(loss=made.loss, blocks=blocks, first=first, more=more, beside=made.beside)


def apply(
    kept: HeldGradients, rule: ElementwiseRule, clip: float, rates: Rates | None = None
) -> tuple[ScheduleInputs, Tensor, list[Tensor]]:
    """The program that ends a step: the gradients' norm, and every weight changed by its kept gradient, clipped to that norm."""
    schedule = row_of(rule)
    factor, norm = clipped(kept.blocks.values(), clip)
    return ScheduleInputs(schedule), norm, [norm, *stepped(kept.blocks, rule, schedule, factor, rates)]
