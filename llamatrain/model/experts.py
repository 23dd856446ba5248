"""Mixtures of experts: feed-forward parts of which a router chooses k for each token (Shazeer et al. 2017).

The shares of the chosen experts multiply their inner activations, before the last product: that is the same as
multiplying their results, and what must be kept for the gradient of the shares is narrower.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import numpy as np

from llamatrain.graph import ops as O
from llamatrain.graph.ops import (
    balance_loss,
    normalize_rows,
    scale_rows,
    sigmoid,
    soft_max,
    sort_choices,
    split_columns,
    sum_choices,
    swiglu,
    take_choices,
    take_columns,
    top_k,
)
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Key, Shape
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.limits import BadHyperparameter

SCORE_BIAS = "blk.{}.exp_probs_b.bias"
Scores = Literal["softmax", "sigmoid"]
Gate = Callable[[Tensor, Tensor], Tensor]
Present = Callable[[Hyperparameters, int], bool]  # by a block's number

# Of models whose feed-forward width is that of an expert.
COUNT_KEYS = {
    "expert_count": Key("experts", int, min_value=1),
    "expert_used_count": Key("experts_used", int, min_value=1),
}
# Before the keys of all models, one of which has its default from here.
KEYS = COUNT_KEYS | {"expert_feed_forward_length": Key("expert_ff", int, min_value=1)}
FEED_FORWARD_LENGTH = {  # of blocks without experts, of which there are none
    "feed_forward_length": Key("ff", int, lambda known: known["expert_ff"])
}
# Behind the keys of all models; of models that have always an expert that all tokens use.
ALWAYS_SHARED_KEYS = {
    "expert_shared_feed_forward_length": Key("shared_ff", int, lambda known: known["ff"], min_value=1)
}
SHARED_KEYS = {"expert_shared_feed_forward_length": Key("shared_ff", int, 0)}
# of models whose files have, instead of a width, the number of experts that stand for the one that all tokens use
SHARED_COUNT_KEYS = {"expert_shared_count": Key("shared_count")}
# how scores become shares; Hugging Face's models and llama.cpp's files may differ in defaults, and files name all
ROUTING_KEYS = {
    "expert_weights_scale": Key("share_scale", float, 0.0),
    "expert_weights_norm": Key("normalizes_shares", bool, False),
    "expert_group_count": Key("groups", int, 0),
    "expert_group_used_count": Key("groups_used", int, 0),
}
# how scores are computed, where most models of an architecture have sigmoids
SIGMOID_KEYS = {"expert_gating_func": Key("gating", int, 2)}
DENSE_KEYS = {"leading_dense_block_count": Key("dense_blocks", int, 0)}
OPTIONAL_KEYS = {  # of architectures that have experts in some models
    key: replace(each, default=0, min_value=0, is_left_out=True) for key, each in KEYS.items()
}
NEW_MODEL_COUNTS = {name: itemgetter(name) for name in ("experts", "experts_used")}
NEW_MODEL_VALUES = NEW_MODEL_COUNTS | {"expert_ff": itemgetter("expert_ff")}


class Choices(NamedTuple):
    """The experts of all tokens in sorted order (`graph/ops/experts.py`)."""

    order: Tensor  # (tokens, k): the choice at each place
    expert: Tensor  # (tokens, k): its expert
    ends: Tensor  # (experts): where each expert's choices end


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The way from scores of a router to the shares of the experts that it chooses."""

    scores: Scores = "softmax"
    normalized: bool = False  # the shares of a token are divided by their sum
    groups: int = 1  # of neighboring experts
    groups_used: int = (
        1  # a token's experts are of these groups, whose two largest scores have the largest sums
    )
    scale: float = 1.0  # of shares


JOINED = "blk.{}.ffn_gate_up_exps.weight"  # that some files have instead of two stacks
SCALE = "blk.{}.ffn_down_exps.scale"  # of each expert's output
GATINGS: dict[int, Scores] = {1: "softmax", 2: "sigmoid"}  # by the number in a file


def gating_of(h: Hyperparameters, **more: Any) -> Routing:
    """Return the routing with the scores that a file names."""
    return Routing(scores=GATINGS[int(h.extra["gating"])], **more)


def routing_of(h: Hyperparameters) -> Routing:
    """Return the routing that a file describes; 0 means no scale, and no groups."""
    scale, groups = h.extra["share_scale"] or 1.0, int(h.extra["groups"])
    normalized = bool(h.extra["normalizes_shares"])
    if groups < 2:
        return gating_of(h, normalized=normalized, scale=scale)
    used = int(h.extra["groups_used"])
    return gating_of(h, normalized=normalized, scale=scale, groups=groups, groups_used=used)


def has_experts(h: Hyperparameters, layer: int = 0) -> bool:
    """Return True if the blocks of a model have experts, where only some models of an architecture have them."""
    return bool(h.extra.get("experts"))


def is_dense(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block is one of the first, which may have one feed-forward part instead of experts."""
    return layer < h.extra.get("dense_blocks", 0)


def is_mixture(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block has experts."""
    return not is_dense(h, layer)


def has_shared(h: Hyperparameters, layer: int) -> bool:
    """Return True if a block has an expert that all tokens use."""
    return shared_width(h) > 0 and is_mixture(h, layer)


def shared_width(h: Hyperparameters) -> int:
    """Return the width of the expert that all tokens use; 0 if there is none."""
    if "shared_count" in h.extra:  # of experts that are as wide as a file says, or as the others
        return int(h.extra["shared_count"] * (h.extra.get("shared_ff") or h.extra["expert_ff"]))
    return int(h.extra.get("shared_ff", 0))


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


def router(module: str = "mlp.gate", is_linear: bool = False) -> dict[str, layers.Weight]:
    """Return the weight that scores the experts of a block, of a module that may be a linear layer."""
    return {
        "blk.{}.ffn_gate_inp.weight": layers.block_weight(
            "router",
            lambda h: (int(h.extra["experts"]), h.embd),
            module if is_linear else f"{module}.weight",
            default_target=False,
            is_parameter=not is_linear,
        )
    }


def no_bias(generator: np.random.Generator, shape: Shape) -> np.ndarray:
    """Return the initial bias of scores."""
    return np.zeros(shape)


def score_bias(module: str, **facts: Any) -> dict[str, layers.Weight]:
    """Return what is added to scores only to choose experts. It balances them, and no gradient reaches it."""
    return {SCORE_BIAS: layers.block_vector("constant", count("experts"), module, initial=no_bias, **facts)}


def stacks(inner: layers.Size, module: str = "mlp.experts") -> dict[str, layers.Weight]:
    """Return the experts of a block, which have this width, with a stack for gates and one for values."""
    both = f"{module}.gate_up_proj"
    return {
        "blk.{}.ffn_gate_exps.weight": stack(inner, width, both, part=(0, 2)),
        "blk.{}.ffn_up_exps.weight": stack(inner, width, both, part=(1, 2)),
        "blk.{}.ffn_down_exps.weight": stack(width, inner, f"{module}.down_proj", residual=True),
    }


def joinable_stacks(inner: layers.Size, module: str = "mlp.experts") -> dict[str, layers.Weight]:
    """Return the same experts, of which some files have one stack for gates and values.

    llama.cpp reads such files of few architectures. The gates of an expert come first.
    """
    joined = stack(lambda h: 2 * inner(h), width, f"{module}.gate_up_proj", optional=True)
    return {JOINED: joined} | {
        name: replace(kind, replaced_by=JOINED) if kind.part[1] == 2 else kind
        for name, kind in stacks(inner, module).items()
    }


def shared_expert(modules: Mapping[str, str], present: Present = has_shared) -> dict[str, layers.Weight]:
    """Return the expert that all tokens use, by the modules of its weights."""
    sizes = {
        "ffn_gate": (shared_width, width),
        "ffn_up": (shared_width, width),
        "ffn_down": (width, shared_width),
    }
    joined = modules["ffn_gate"] == modules["ffn_up"]
    parts = {"ffn_gate": (0, 2), "ffn_up": (1, 2)} if joined else {}
    return {
        f"blk.{{}}.{name}_shexp.weight": layers.block_matrix(
            out,
            into,
            modules[name],
            residual=name == "ffn_down",
            part=parts.get(name, (0, 1)),
            present=present,
        )
        for name, (out, into) in sizes.items()
    }


def shared_modules(module: str) -> dict[str, str]:
    """Return the modules of the weights of the expert that all tokens use, by the module around them."""
    return {f"ffn_{part}": f"{module}.{part}_proj" for part in ("gate", "up", "down")}


SHARED_MODULES = shared_modules("mlp.shared_expert")
SHARED_GATE: dict[str, layers.Weight] = {
    "blk.{}.ffn_gate_inp_shexp.weight": layers.block_vector("bias", width, "mlp.shared_expert_gate")
}
ROUTER = router()
EXPERTS = stacks(count("expert_ff"))


def check(h: Hyperparameters) -> None:
    """Raise BadHyperparameter if a token has no experts, or more than there are."""
    experts, used = (int(h.extra.get(name, 0)) for name in ("experts", "experts_used"))
    if not 1 <= used <= experts:
        raise BadHyperparameter("experts_used", f"{used}", f"must be 1 to the {experts} experts")
    if (gating := int(h.extra.get("gating", 1))) not in GATINGS:
        raise BadHyperparameter("gating", f"{gating}", "must be 1 (softmax) or 2 (sigmoid)")
    if (groups := int(h.extra.get("groups", 0))) > 1:
        check_groups(h, groups, int(h.extra["groups_used"]))


def check_groups(h: Hyperparameters, groups: int, groups_used: int) -> None:
    """Raise BadHyperparameter if groups have no two experts, or those that are used too few."""
    experts, used = int(h.extra["experts"]), int(h.extra["experts_used"])
    if experts % groups or experts // groups < 2:
        raise BadHyperparameter("groups", f"{groups}", f"must divide the {experts} experts in twos or more")
    if not 1 <= groups_used <= groups or used > experts // groups * groups_used:
        requirement = f"must be 1 to {groups} groups with at least {used} experts"
        raise BadHyperparameter("groups_used", f"{groups_used}", requirement)


def check_optional(h: Hyperparameters) -> None:
    """Raise BadHyperparameter if a model has experts, and not as many as a token needs."""
    if has_experts(h):
        check(h)


# ---- the forward pass -------------------------------------------------------


def choose_experts(model: ForwardPass, layer: int, y: Tensor, routing: Routing) -> tuple[Choices, Tensor]:
    """Return the choices of all tokens, and their shares in sorted order."""
    experts, used = int(model.h.extra["experts"]), int(model.h.extra["experts_used"])
    scores = model.linear(y, f"blk.{layer}.ffn_gate_inp")
    bias = model.weights.get(SCORE_BIAS.format(layer))
    # the same as shares divided by their sum, and in the same order
    chosen_only = routing.scores == "softmax" and routing.normalized and bias is None
    probabilities = sigmoid(scores) if routing.scores == "sigmoid" else soft_max(scores)
    scores = scores if chosen_only else probabilities
    ids = top_k(
        scores if bias is None else O.add(scores, bias),
        k=used,
        groups=routing.groups,
        groups_used=routing.groups_used,
    )
    if model.balance_weights:
        distribution = normalize_rows(probabilities) if routing.scores == "sigmoid" else probabilities
        model.balance_terms.append(balance_loss(distribution, ids, model.balance_weights))
    shares = take_columns(scores, ids)
    if routing.normalized:
        shares = soft_max(shares) if chosen_only else normalize_rows(shares)
    if routing.scale != 1:
        shares = O.scale(shares, by=routing.scale)
    choices = Choices(*sort_choices(ids, experts=experts))
    shares = take_choices(shares, choices.order)
    if factors := model.weights.get(SCALE.format(layer)):
        found = O.get_rows(O.reshape(factors, shape=(experts, 1)), choices.expert)
        shares = O.mul(shares, O.reshape(found, shape=shares.shape))
    return choices, shares


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
    routing: Routing = Routing(),
    scored: Tensor | None = None,
) -> Tensor:
    """Return the sum of the chosen experts' outputs, each times its share; `scored` is the router's input, if not y."""
    prefix = f"blk.{layer}"
    choices, shares = choose_experts(model, layer, scored or y, routing)
    if JOINED.format(layer) in model.weights:
        both = multiply(model, y, f"{prefix}.ffn_gate_up_exps", choices)
        gates, up = split_columns(both, sizes=(both.shape[-1] // 2,) * 2)
    else:
        gates, up = (
            multiply(model, y, f"{prefix}.{name}", choices) for name in ("ffn_gate_exps", "ffn_up_exps")
        )
    inner = gate(gates, up)
    outputs = multiply(model, scale_rows(inner, shares), f"{prefix}.ffn_down_exps", choices, shares)
    return sum_choices(outputs, choices.order)


def mixed_feed_forward(model: ForwardPass, layer: int, y: Tensor, routing: Routing = Routing()) -> Tensor:
    """Return the output of the chosen experts and of the one that all tokens use, if any; or of a dense block."""
    if is_dense(model.h, layer):
        return layers.feed_forward(model, layer, y)
    output = feed_forward(model, layer, y, routing=routing)
    if not has_shared(model.h, layer):
        return output
    return O.add(output, layers.feed_forward(model, layer, y, suffix="_shexp"))


def gated_shared_expert(model: ForwardPass, layer: int, y: Tensor) -> Tensor:
    """Return the output of the expert that all tokens use, times the sigmoid of its score."""
    vector = model.weights[f"blk.{layer}.ffn_gate_inp_shexp.weight"]
    share = sigmoid(O.matmul(y, O.reshape(vector, shape=(1, model.h.embd))))

    def gate(gates: Tensor, up: Tensor) -> Tensor:
        return scale_rows(swiglu(gates, up), share)

    return layers.feed_forward(model, layer, y, gate, suffix="_shexp")


def feed_forward_with_shared(
    model: ForwardPass, layer: int, y: Tensor, routing: Routing = Routing()
) -> Tensor:
    """Return the output of the chosen experts, and of the gated one that all tokens use."""
    return O.add(feed_forward(model, layer, y, routing=routing), gated_shared_expert(model, layer, y))
