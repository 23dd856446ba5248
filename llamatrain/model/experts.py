"""Mixtures of experts: feed-forward parts of which a router chooses k for each token (Shazeer et al. 2017).

The shares of the chosen experts multiply their inner activations, before the last product: that is the same as
multiplying their results, and what must be kept for the gradient of the shares is narrower.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from llamatrain.graph import ops as O
from llamatrain.graph.ops import (
    scale_rows,
    soft_max,
    sort_choices,
    sum_choices,
    swiglu,
    take_choices,
    take_columns,
    top_k,
)
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Key
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.limits import BadHyperparameter

Gate = Callable[[Tensor, Tensor], Tensor]

# Before the keys of all models, one of which has its default from here.
KEYS = {
    "expert_count": Key("experts", int, min_value=1),
    "expert_used_count": Key("experts_used", int, min_value=1),
    "expert_feed_forward_length": Key("expert_ff", int, min_value=1),
}
NEW_MODEL_VALUES = {name: itemgetter(name) for name in ("experts", "experts_used", "expert_ff")}


class Choices(NamedTuple):
    """The experts of all tokens in sorted order (`graph/ops/experts.py`)."""

    order: Tensor  # (tokens, k): the choice at each place
    expert: Tensor  # (tokens, k): its expert
    ends: Tensor  # (experts): where each expert's choices end


# How scores of a router become the shares of the experts that it chooses: the softmax of all, of which those of the
# chosen are taken, or the softmax of the chosen ones, which is the same as if those shares are divided by their sum.
Routing = Literal["softmax", "softmax of chosen"]


# ---- weights ----------------------------------------------------------------


def count(name: str) -> layers.Size:
    """Return a function that gives one of the hyperparameters."""
    return lambda h: int(h.extra[name])


def stack(out: layers.Size, into: layers.Size, module: str, **facts: Any) -> layers.Weight:
    """Return the weights of all experts of a block, of which none gets an adapter by default."""
    return layers.block_weight(
        "experts",
        lambda h: (int(h.extra["experts"]), out(h), into(h)),
        module,
        default_target=False,
        is_parameter=True,
        **facts,
    )


def width(h: Hyperparameters) -> int:
    """Return the width of the model."""
    return h.embd


ROUTER: dict[str, layers.Weight] = {
    "blk.{}.ffn_gate_inp.weight": layers.block_weight(
        "router",
        lambda h: (int(h.extra["experts"]), h.embd),
        "mlp.gate.weight",
        default_target=False,
        is_parameter=True,
    )
}
EXPERTS: dict[str, layers.Weight] = {
    "blk.{}.ffn_gate_exps.weight": stack(count("expert_ff"), width, "mlp.experts.gate_up_proj", part=(0, 2)),
    "blk.{}.ffn_up_exps.weight": stack(count("expert_ff"), width, "mlp.experts.gate_up_proj", part=(1, 2)),
    "blk.{}.ffn_down_exps.weight": stack(width, count("expert_ff"), "mlp.experts.down_proj", residual=True),
}


def check(h: Hyperparameters) -> None:
    """Raise BadHyperparameter if a token has more experts than there are."""
    experts, used = int(h.extra["experts"]), int(h.extra["experts_used"])
    if used > experts:
        raise BadHyperparameter("experts_used", f"{used}", f"must be at most the {experts} experts")


# ---- the forward pass -------------------------------------------------------


def choose_experts(model: ForwardPass, y: Tensor, router: str, routing: Routing) -> tuple[Choices, Tensor]:
    """Return the choices of all tokens, and their shares in sorted order."""
    experts, used = int(model.h.extra["experts"]), int(model.h.extra["experts_used"])
    scores = model.linear(y, router)
    if routing == "softmax":
        scores = soft_max(scores)
    ids = top_k(scores, k=used)
    shares = take_columns(scores, ids)
    if routing == "softmax of chosen":
        shares = soft_max(shares)
    choices = Choices(*sort_choices(ids, experts=experts))
    return choices, take_choices(shares, choices.order)


def multiply(
    model: ForwardPass, x: Tensor, name: str, choices: Choices, shares: Tensor | None = None
) -> Tensor:
    """Return each choice times the weight of its expert, with its bias and adapters.

    If x was multiplied with shares, so is the bias.
    """
    order, expert, ends = choices
    y = O.expert_matmul(x, model.weights[f"{name}.weight"], order, ends, name=name)
    if bias := model.weights.get(f"{name}.bias"):
        rows = O.get_rows(bias, expert)
        y = O.add(y, scale_rows(rows, shares) if shares else rows)
    return model.weights.add_expert_lora(y, x, f"{name}.weight", order, ends)


def feed_forward(
    model: ForwardPass,
    layer: int,
    y: Tensor,
    gate: Gate = swiglu,
    routing: Routing = "softmax",
) -> Tensor:
    """Return the sum of the chosen experts' outputs, each times its share."""
    prefix = f"blk.{layer}"
    choices, shares = choose_experts(model, y, f"{prefix}.ffn_gate_inp", routing)
    gates = multiply(model, y, f"{prefix}.ffn_gate_exps", choices)
    inner = gate(gates, multiply(model, y, f"{prefix}.ffn_up_exps", choices))
    outputs = multiply(model, scale_rows(inner, shares), f"{prefix}.ffn_down_exps", choices, shares)
    return sum_choices(outputs, choices.order)
