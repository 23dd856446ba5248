"""Gemma 3n (Gemma Team 2025).

Four streams of activations, of which one goes through each block (AltUp, Baykal et al. 2023); a low-rank
residual parallel to attention (LAuReL, Menghani et al. 2024); an embedding of each token for each block; sparse
activations in the first blocks; and keys and values that the last blocks read from earlier ones.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from llamatrain.graph import ops as O
from llamatrain.graph.ops import geglu, join_columns, softcap, split_columns
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture, Key, WeightKind, is_windowed
from llamatrain.model.architectures import gemma2, gemma4
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.rope import Rope

STREAMS, LAUREL_RANK = 4, 64
OWN_KEYS, SPARSE, PERIOD = 20, 10, 5  # blocks with keys of their own, blocks with sparse activations
KEYS = {
    "rope.freq_base_swa": Key("near_base", float, 10000.0, min_value=1),
    "attention.sliding_window": Key("window"),
    "attention.sliding_window_pattern": Key("windowed", bool, by_block=True),
    "attention.shared_kv_layers": Key(
        "shared_kv_blocks", int, lambda known: max(0, known["layers"] - OWN_KEYS)
    ),
    "embedding_length_per_layer_input": Key("per_layer_size", int, 256, min_value=1),
    # the cutoff above the mean in deviations; minus infinity: none
    "activation_sparsity_scale": Key("sparsity", float, by_block=True, min_value=-math.inf),
    "final_logit_softcapping": Key("logit_cap", float, 30.0, min_value=1e-6),
}
SPARSITY = 1.6448533535003662  # of new models: 95 of 100 activations are 0


def rotations(h: Hyperparameters) -> Sequence[Rope]:
    """Return the rotations: scaling applies only to blocks without a window."""
    return [h.rope, Rope(h.rope.size, base=h.extra["near_base"], length=h.rope.length)]


def new_blocks(count: int, kv_heads: int) -> dict[str, tuple[float, ...]]:
    """Return the windows and the sparsity of a new model's blocks."""
    return {
        "windowed": tuple(is_windowed(PERIOD, layer) for layer in range(count)),
        "sparsity": tuple(SPARSITY if layer < SPARSE else -math.inf for layer in range(count)),
    }


# ---- weights ---------------------------------------------------------------


def stack(module: str) -> layers.Weight:
    """Return a stack of square matrices, one for each stream but the first."""
    return WeightKind(role="stack", shape=lambda h: (STREAMS - 1, h.embd, h.embd), module=module)


STREAM_PROJECTIONS = {
    "altup_proj.weight": stack("model.altup_projections"),
    "altup_unembd_proj.weight": stack("model.altup_unembed_projections"),
}
ALTUP: dict[str, layers.Weight] = {
    "blk.{}.altup_correct_coef.weight": layers.block_matrix(
        lambda h: STREAMS, lambda h: STREAMS, "altup.correction_coefs"
    ),
    "blk.{}.altup_correct_scale.weight": layers.block_norm("altup.correct_output_scale"),
    "blk.{}.altup_predict_coef.weight": layers.block_matrix(
        lambda h: STREAMS**2, lambda h: STREAMS, "altup.prediction_coefs"
    ),
    "blk.{}.altup_router.weight": replace(
        layers.block_matrix(lambda h: STREAMS, lambda h: h.embd, "altup.modality_router"),
        default_target=False,
    ),
    "blk.{}.altup_router_norm.weight": layers.block_norm("altup.router_norm"),
}
LAUREL = {
    "blk.{}.laurel_l.weight": layers.block_matrix(
        lambda h: LAUREL_RANK, lambda h: h.embd, "laurel.linear_left"
    ),
    "blk.{}.laurel_r.weight": layers.block_matrix(
        lambda h: h.embd, lambda h: LAUREL_RANK, "laurel.linear_right"
    ),
    "blk.{}.laurel_post_norm.weight": layers.block_norm("laurel.post_laurel_norm"),
}
ATTENTION = gemma4.ATTENTION | {
    gemma4.VALUES: replace(gemma4.ATTENTION[gemma4.VALUES], optional=False, optional_by_block=False)
}


# ---- streams ---------------------------------------------------------------


def split_streams(x: Tensor) -> list[Tensor]:
    """Return the streams, which are joined in a row."""
    return [*split_columns(x, sizes=(x.shape[1] // STREAMS,) * STREAMS)]


def by_stream(x: Tensor, count: int) -> Tensor:
    """Reshape rows to (tokens, streams, width)."""
    return O.reshape(x, shape=(x.shape[0], count, x.shape[1] // count))


def magnitude(x: Tensor) -> Tensor:
    """Return the root mean square over the last axis."""
    return O.sqrt(O.scale(O.sum_rows(O.sqr(x)), by=1 / x.shape[-1]))


def with_magnitude(x: Tensor, like: Tensor) -> Tensor:
    """Return streams (tokens, streams, width), each as large as the rows of `like`."""
    target = O.reshape(magnitude(like), shape=(like.shape[0], 1, 1))
    return O.mul(x, O.div(target, magnitude(x)))


def embed(model: ForwardPass) -> Tensor:
    """Return all streams: the token embeddings, and projections of them that are as large."""
    x, weight = gemma2.embed(model), model.weights["altup_proj.weight"]
    model.side_inputs.extend(gemma4.per_layer_inputs(model, x))
    others = O.matmul(x, O.reshape(weight, shape=(weight.shape[0] * weight.shape[1], weight.shape[2])))
    scaled = with_magnitude(by_stream(others, STREAMS - 1), x)
    return join_columns(x, O.reshape(scaled, shape=others.shape))


def merge_streams(model: ForwardPass, x: Tensor) -> Tensor:
    """Return the norm of the mean of the first stream and projections of the others that are as large."""
    width = model.h.embd
    first, others = split_columns(x, sizes=(width, (STREAMS - 1) * width))
    stacked = O.cont(O.permute(by_stream(others, STREAMS - 1), axes=(1, 0, 2)))
    projected = O.matmul(stacked, model.weights["altup_unembd_proj.weight"])
    scaled = with_magnitude(O.cont(O.permute(projected, axes=(1, 0, 2))), first)
    total = first
    for each in split_columns(O.reshape(scaled, shape=others.shape), sizes=(width,) * (STREAMS - 1)):
        total = O.add(total, each)
    mean = model.keep_scored_rows(model.h.layers - 1, O.scale(total, by=1 / STREAMS))
    return layers.final_norm(model, mean)


def route(model: ForwardPass, prefix: str, x: Tensor) -> Tensor:
    """Return a number of each stream for each token, between -1 and 1."""
    normed = O.scale(model.norm(x, f"{prefix}.altup_router_norm"), by=1 / x.shape[1])
    return softcap(model.linear(normed, f"{prefix}.altup_router"), cap=1.0)


def predict(model: ForwardPass, prefix: str, x: Tensor) -> Tensor:
    """Return all streams plus mixtures of them, whose shares depend on the first stream."""
    shares = model.linear(route(model, prefix, split_streams(x)[0]), f"{prefix}.altup_predict_coef")
    mixed = O.matmul_nn(O.reshape(shares, shape=(x.shape[0], STREAMS, STREAMS)), by_stream(x, STREAMS))
    return O.add(x, O.reshape(mixed, shape=x.shape))


def correct(model: ForwardPass, prefix: str, predicted: Tensor, output: Tensor) -> Tensor:
    """Add to each stream a share of what the block's output differs from the first stream by."""
    shares = model.linear(route(model, prefix, output), f"{prefix}.altup_correct_coef")
    shares = O.add(shares, O.fill(shape=(), value=1.0, dtype=shares.dtype))
    change = O.sub(output, split_streams(predicted)[0])
    changes = O.matmul_nn(
        O.reshape(shares, shape=(*shares.shape, 1)),
        O.reshape(change, shape=(change.shape[0], 1, change.shape[1])),
    )
    return O.add(predicted, O.reshape(changes, shape=predicted.shape))


# ---- blocks ----------------------------------------------------------------


def sparse_geglu(gate: Tensor, up: Tensor, cutoff: float) -> Tensor:
    """Return geglu of what the gate exceeds its mean by, less `cutoff` deviations."""
    centered = O.sub(gate, O.scale(O.sum_rows(gate), by=1 / gate.shape[1]))
    return geglu(O.relu(O.sub(centered, O.scale(magnitude(centered), by=cutoff))), up)


def feed_forward(model: ForwardPass, layer: int, y: Tensor) -> Tensor:
    """Return the feed-forward output, with sparse activations in some blocks."""
    cutoff = model.h.by_block["sparsity"][layer]
    gate = geglu if math.isinf(cutoff) else partial(sparse_geglu, cutoff=cutoff)
    return layers.feed_forward(model, layer, y, gate)


def laurel(model: ForwardPass, prefix: str, y: Tensor) -> Tensor:
    """Return y plus its low-rank projection."""
    low = model.linear(model.linear(y, f"{prefix}.laurel_l"), f"{prefix}.laurel_r")
    return O.add(y, model.norm(low, f"{prefix}.laurel_post_norm"))


def block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return all streams behind a block, which the first one goes through.

    Rows whose logits are not needed are dropped behind the last block: streams are reshaped, which needs all
    rows.
    """
    prefix, model = f"blk.{layer}", replace(model, scored_tokens=None)
    predicted = predict(model, prefix, x)
    active = split_streams(predicted)[0]
    y = model.norm(active, f"{prefix}.attn_norm")
    attended = model.norm(gemma4.attention(model, layer, y), f"{prefix}.post_attention_norm")
    both = O.add(O.add(active, attended), laurel(model, prefix, y))
    z = O.scale(both, by=math.sqrt(0.5))
    output = feed_forward(model, layer, model.norm(z, f"{prefix}.ffn_norm"))
    z = O.add(z, model.norm(output, f"{prefix}.post_ffw_norm"))
    corrected = correct(model, prefix, predicted, z)
    first, *others = split_streams(corrected)
    scaled = O.mul(first, model.weights.norm_weight(f"{prefix}.altup_correct_scale.weight"))
    change = gemma4.gate_side_input(model, layer, scaled)
    return join_columns(first, *(O.add(each, change) for each in others))


ARCHITECTURE = Architecture(
    name="gemma3n",
    keys=layers.KEYS | KEYS,
    weights=layers.EMBEDDINGS
    | STREAM_PROJECTIONS
    | gemma4.PER_LAYER_EMBEDDINGS
    | layers.BEFORE_ATTENTION
    | ATTENTION
    | gemma2.AFTER_ATTENTION
    | gemma2.BEFORE_FEED_FORWARD
    | layers.FEED_FORWARD
    | gemma2.AFTER_FEED_FORWARD
    | gemma4.PER_LAYER_INPUT
    | ALTUP
    | LAUREL
    | layers.FINAL,
    rotation="halves",
    embed=embed,
    block=block,
    final_norm=merge_streams,
    partial_rotary=True,
    ropes=rotations,
    rope_index=lambda h, layer: int(gemma4.has_window(h, layer)),
    kv_block=gemma4.kv_block,
    attention_mask=gemma4.attention_mask,
    logit_cap=gemma2.logit_cap,
    ties_by_default=True,
    new_model_values={"window": 512, "shared_kv_blocks": 0},
    new_model_blocks=new_blocks,
    supported_values=layers.SUPPORTED_VALUES
    | {
        "altup.num_inputs": (STREAMS, "another number of streams"),
        "altup.active_idx": (0, "another stream that goes through blocks"),
    },
)
