"""Builds training graphs from a loss: gradients, precision, recomputation, and the optimizer step.

Gradients are streamed (each is used by its weight's update as soon as it is computed, and its memory is
freed) or held (each has memory of its own, for clipping by norm, accumulation and minimizers). The gradient
of an embedding is dense only if others are added to it; otherwise it is stored as the rows of the tokens that
occurred.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from llamatrain.errors import GraphError
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.int8 import Int8Weights, use_int8_products
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
from llamatrain.graph.rewrite import read_stored
from llamatrain.graph.tensor import Tensor, placeholder, state
from llamatrain.optim.optimizer import ElementwiseRule

Gradient = tuple[Tensor, ...]  # dense; or its nonzero rows, and the index of each row among them (`opt_rows`)


@dataclass
class LossAndGradients:
    """A loss, and its gradients by parameter."""

    loss: Tensor
    grads: dict[Tensor, Tensor]
    extra: list[Tensor] = field(default_factory=list)  # further outputs of the same pass

    @cached_property
    def dense(self) -> dict[Tensor, Gradient]:
        """The gradients, all dense."""
        return {w: (grad,) for w, grad in self.grads.items()}

    @cached_property
    def sparse(self) -> dict[Tensor, Gradient]:
        """The gradients, as rows where that is smaller."""
        return {w: sparse_rows(grad) for w, grad in self.grads.items()}

    def gradients_for(self, rule: ElementwiseRule) -> dict[Tensor, Gradient]:
        """Return the gradients in the form that a rule takes."""
        return self.sparse if rule.takes_sparse_rows else self.dense


def sparse_rows(grad: Tensor) -> Gradient:
    """Return a gradient as rows and their positions, if that is smaller, else dense."""
    node = grad.node
    if node is None or node.op is not get_rows_back or node.sources[0].size + grad.shape[0] >= grad.size:
        return (grad,)
    rows, places = opt_rows(*node.sources, rows=grad.shape[0])
    return rows, places


def clip_gradients(grads: Iterable[Gradient], limit: float) -> tuple[Tensor, Tensor]:
    """Return the clipping factor, and the norm of all gradients together."""
    factor, norm = clip_factor(
        *(opt_sum_sqr(*grad) if len(grad) > 1 else sum_sqr(*grad) for grad in grads), limit=limit
    )
    return factor, norm


def differentiate(
    loss: Tensor,
    parameters: Sequence[Tensor],
    *,
    precision: str = "f32",
    borders: Sequence[Tensor] = (),
    remat: str | int = "none",
    more: Sequence[Tensor] = (),
    int8_weights: Int8Weights | None = None,
    stored: Mapping[Tensor, Tensor] | None = None,
) -> LossAndGradients:
    """Return a loss with its gradients, in a precision; products with `int8_weights` are in 8-bit integers.

    Values between the `borders` of blocks are recomputed (see remat). Values that are `stored` are read from leaves.
    """
    value, grads = value_and_gradients(loss, parameters)
    outputs = read_stored([value, *more, *grads, loss, *borders], stored or {})
    outputs = use_int8_products(outputs, int8_weights or {})
    if precision == "bf16":
        outputs = round_products(outputs)
    elif precision != "f32":
        raise GraphError(f"precision must be f32 or bf16 (got {precision!r})", code="unknown-precision")
    count = 1 + len(more) + len(grads)
    wanted, (forward, *marks) = outputs[:count], outputs[count:]
    value, *rest = apply_policy(wanted, forward, marks, remat)
    extra_outputs, grads = rest[: len(more)], rest[len(more) :]
    return LossAndGradients(value, dict(zip(parameters, grads, strict=True)), extra_outputs)


@dataclass
class ScheduleInputs:
    """The inputs of an update: the optimizer's row of numbers."""

    schedule: Tensor


Rates = Mapping[Tensor, Tensor]  # the row that a weight's schedule is multiplied by


def schedule_input(rule: ElementwiseRule) -> Tensor:
    """Return the input for the optimizer's numbers."""
    return placeholder("schedule", rule.schedule(1, 0.0).shape)


def scale_rate(schedule: Tensor, weight: Tensor, rates: Rates | None) -> Tensor:
    """Return the schedule of a weight, multiplied by its own row of rates if it has one."""
    return mul(schedule, rates[weight]) if rates and weight in rates else schedule


def streamed_update(
    gradients: LossAndGradients, rule: ElementwiseRule, rates: Rates | None = None
) -> tuple[ScheduleInputs, list[Tensor]]:
    """Return loss and updates as one program, without clipping or accumulation."""
    schedule = schedule_input(rule)
    one = fill(shape=(), value=1.0)
    return ScheduleInputs(schedule), [
        gradients.loss,
        *update_all(gradients.gradients_for(rule), rule, schedule, one, rates),
    ]


def update_all(
    grads: Mapping[Tensor, Gradient],
    rule: ElementwiseRule,
    schedule: Tensor,
    factor: Tensor,
    rates: Rates | None,
) -> list[Tensor]:
    """Return the updates of all weights."""
    return [
        step
        for w, (g, *places) in grads.items()
        for step in rule.update(w, g, scale_rate(schedule, w, rates), factor, *places)
    ]


@dataclass
class HeldGradients:
    """Memory for gradients, as state tensors of each parameter, and the tensors that fill it."""

    loss: Tensor
    blocks: dict[Tensor, Gradient]  # parameter: its gradient's memory
    first: list[Tensor]  # gradients of a step's first micro-batch, to be pinned to `memory`
    more: list[Tensor]  # gradients of further micro-batches, added in place
    extra: list[Tensor]

    @property
    def memory(self) -> list[Tensor]:
        """The state tensors of all gradients."""
        return [state for block in self.blocks.values() for state in block]


def hold_gradients(gradients: LossAndGradients, dense: bool = True) -> HeldGradients:
    """Give gradients memory of their own.

    `first` overwrites it, so that nothing must be zeroed; `more` adds to it, if gradients are dense.
    """
    grads = gradients.dense if dense else gradients.sparse
    blocks = {
        w: tuple(
            state(f"{w.name}.{kind}", part.shape, part.dtype)
            for kind, part in zip(("grad", "places"), grad, strict=False)
        )
        for w, grad in grads.items()
    }
    used: set[Tensor] = set()
    first = []
    for part in (part for grad in grads.values() for part in grad):
        first.append(cont(part) if part in used or part.node is None else part)
        used.add(part)
    all_of = {w: tuple((0, size, 1) for size in w.shape) for w in grads}
    more = [acc(*blocks[w], *grad, slices=all_of[w], into=True) for w, grad in grads.items()] if dense else []
    return HeldGradients(loss=gradients.loss, blocks=blocks, first=first, more=more, extra=gradients.extra)


def update_step(
    held: HeldGradients, rule: ElementwiseRule, clip: float, rates: Rates | None = None
) -> tuple[ScheduleInputs, Tensor, list[Tensor]]:
    """Return the graph that ends a step: the norm, and each weight updated by its clipped gradient."""
    schedule = schedule_input(rule)
    factor, norm = clip_gradients(held.blocks.values(), clip)
    return ScheduleInputs(schedule), norm, [norm, *update_all(held.blocks, rule, schedule, factor, rates)]
