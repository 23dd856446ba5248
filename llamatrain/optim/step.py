"""From a loss to training programs' graphs: gradients, precision, recomputation, and the optimizer's step.

Gradients are streamed (each is used up by its weight's step as soon as it is there, and its memory is free again) or kept
(each lies in memory of its own, for clipping by norm, accumulation and L-BFGS).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamatrain.errors import GraphError
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.ops import acc, clip_factor, cont, fill, mul, opt_step_adamw, opt_step_sgd, sum_sqr
from llamatrain.graph.precision import round_products
from llamatrain.graph.remat import rematerialise
from llamatrain.graph.tensor import Tensor, placeholder, state
from llamatrain.optim.adamw import decay_of


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Decoupled decay, only for tensors of enough dimensions."""

    weight_decay: float = 0.1
    decay_min_ndim: int = 2

    def decay(self, weight: Tensor) -> float:
        return decay_of(weight.shape, self.weight_decay, self.decay_min_ndim)

    def step(self, weight: Tensor, grad: Tensor, schedule: Tensor, factor: Tensor) -> Tensor:
        """The weight, changed in place."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Loshchilov and Hutter's."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def step(self, weight: Tensor, grad: Tensor, schedule: Tensor, factor: Tensor) -> Tensor:
        moments = [state(f"{weight.name}.{kind}", weight.shape, weight.dtype) for kind in ("m", "v")]
        return opt_step_adamw(
            weight, *moments, grad, schedule, factor,
            beta1=self.beta1, beta2=self.beta2, eps=self.eps, decay=self.decay(weight),
        )[0]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Gradient descent with momentum."""

    momentum: float = 0.9

    def step(self, weight: Tensor, grad: Tensor, schedule: Tensor, factor: Tensor) -> Tensor:
        velocity = state(f"{weight.name}.m", weight.shape, weight.dtype)
        return opt_step_sgd(weight, velocity, grad, schedule, factor, momentum=self.momentum, decay=self.decay(weight))[0]


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
    """What a step is told: rate and bias corrections (see optim.adamw)."""

    schedule: Tensor


Rates = Mapping[Tensor, Tensor]  # weight: (3,), what its own schedule is multiplied by


def scheduled(schedule: Tensor, weight: Tensor, rates: Rates | None) -> Tensor:
    return mul(schedule, rates[weight]) if rates and weight in rates else schedule


def stream(made: Differentiated, optimizer: Optimizer, rates: Rates | None = None) -> tuple[StepInputs, list[Tensor]]:
    """One program: loss, and each weight changed as soon as its gradient is there. No clipping, no accumulation."""
    schedule = placeholder("schedule", (3,))
    one = fill(shape=(), value=1.0)
    steps = [optimizer.step(w, g, scheduled(schedule, w, rates), one) for w, g in made.grads.items()]
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
    return Kept(made.loss, blocks, first, more)


def apply(kept: Kept, optimizer: Optimizer, clip: float, rates: Rates | None = None) -> tuple[StepInputs, Tensor, list[Tensor]]:
    """The program that ends a step: the gradients' norm, and every weight changed by its kept gradient, clipped to that norm."""
    schedule = placeholder("schedule", (3,))
    factor, norm = clip_factor(*(sum_sqr(block) for block in kept.blocks.values()), limit=clip)
    steps = [optimizer.step(w, block, scheduled(schedule, w, rates), factor) for w, block in kept.blocks.items()]
    return StepInputs(schedule), norm, [norm, *steps]
