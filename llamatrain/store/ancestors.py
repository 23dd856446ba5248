"""Checkpoints of llama.cpp's train-text-from-scratch, said in the present keys.

Their moments lie in the order in which the parameters turn up in the graph of the loss, gone through depth first; ours
have a list of names beside them. Of their shuffle (std::mt19937 over a list of all samples) nothing can be used.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from llamatrain.errors import FileError
from llamatrain.files.cursor import quoted
from llamatrain.files.reader import FileTensor, Gguf, Metadata
from llamatrain.files.values import Kind, Value, number, numbers, string, strings, u64

OWN = ("training.", "optimizer.")  # all other keys and tensors are the model's
NO_TOKEN = 2**32 - 1  # written for a token that the vocabulary does not have
GOING_UP = ("attn_v", "attn_k", "attn_q", "ffn_up")
GOING_DOWN = ("ffn_down", "ffn_gate", "ffn_norm", "attn_output", "attn_norm")


def upgraded(gguf: Gguf) -> tuple[Gguf, list[str]]:
    """The same run in the present form, and what of it is lost."""
    if (kind := gguf.value("training.type", str, "train_model")) != "train_model":
        raise FileError(
            f"{gguf.path}: a run of llama.cpp's, of type {quoted(kind)}; of its runs those of type train_model can be resumed"
        )
    optimizer = gguf.value("optimizer.type", str)
    if optimizer not in ("adam", "lbfgs"):
        raise FileError(f"{gguf.path}: the optimizer {quoted(optimizer)} is unknown; llama.cpp had adam and lbfgs")
    weights = {name: tensor for name, tensor in gguf.tensors.items() if not name.startswith(OWN)}
    moments = {name: tensor for name, tensor in gguf.tensors.items() if name.startswith("optimizer.adam.")}
    order = parameter_order(gguf, weights)
    notes = [
        "this checkpoint is of llama.cpp's train-text-from-scratch, which kept no options in it",
        "its shuffle cannot be continued: the data begins anew",
    ]
    if optimizer == "adam":
        check_order(gguf, order)
    else:  # the gradient of its L-BFGS belongs to samples that cannot be had again
        notes.append("its optimizer's history is not used: the first step goes along the gradient")
        moments = {}
    metadata = {
        **{key: value for key, value in gguf.metadata.typed.items() if not key.startswith(OWN) and not _no_token(key, value)},
        "training.type": string(kind),
        **_counters(gguf),
        **_stop(gguf, f"optimizer.{optimizer}"),
        "training.options": string("{}"),
        "training.extra": string("{}"),
        "optimizer.type": string(optimizer),
        "optimizer.parameter_order": strings(order),
    }
    return replace(gguf, metadata=Metadata(metadata), tensors=weights | moments), notes


def _no_token(key: str, value: Value) -> bool:
    return key.endswith("_token_id") and value.decode() == NO_TOKEN


def _counters(gguf: Gguf) -> dict[str, Value]:
    """As they are: version 0 had them in 32 bits, and no epochs."""
    training = [f"training.{name}_count" for name in ("iteration", "sample", "token", "epoch")]
    kept = {key: gguf.metadata.typed[key] for key in (*training, "optimizer.parameter_count") if key in gguf.metadata}
    return {"training.epoch_count": u64(0), "training.seconds": number(Kind.FLOAT64, 0.0), **kept}


def _stop(gguf: Gguf, prefix: str) -> dict[str, Value]:
    fresh = gguf.value("optimizer.just_initialized", bool, False)
    best = math.inf if fresh else gguf.value(f"{prefix}.best_loss", float)
    previous = math.nan if fresh else gguf.value(f"{prefix}.previous_loss", float, math.nan)  # L-BFGS has none
    count = 0 if fresh else gguf.value(f"{prefix}.no_improvement_count", int, 0)
    return {
        "training.best_loss": number(Kind.FLOAT64, best),
        "training.previous_loss": number(Kind.FLOAT64, previous),
        "training.no_improvement_count": number(Kind.INT64, count),
        "training.past_loss_values": numbers(Kind.FLOAT64, _past_losses(gguf, f"{prefix}.past_loss_values")),
    }


def _past_losses(gguf: Gguf, name: str) -> list[float]:
    """Oldest first, out of a ring in which the loss of iteration i is at i modulo its length."""
    if name not in gguf.tensors or gguf.tensors[name].type.name != "F32":
        return []
    ring, step = gguf.tensors[name].raw.view("<f4").ravel(), gguf.value("training.iteration_count", int)
    return [float(ring[i % ring.size]) for i in range(max(0, step - ring.size), step)]


# ---- the order of the moments ----------------------------------------------


def parameter_order(gguf: Gguf, weights: Mapping[str, FileTensor]) -> list[str]:
    layers = gguf.value("llama.block_count", int)
    if len(weights) != layers * len(GOING_UP + GOING_DOWN) + 3:
        raise FileError(f"{gguf.path}: {len(weights)} weights are not those of a llama of {layers} layers")
    up = [f"blk.{layer}.{name}" for layer in range(layers) for name in GOING_UP]
    down = [f"blk.{layer}.{name}" for layer in reversed(range(layers)) for name in GOING_DOWN]
    order = [f"{name}.weight" for name in ("output", "output_norm", *down, "token_embd", *up)]
    if missing := [name for name in order if name not in weights]:
        raise FileError(f"{gguf.path}: the tensor {missing[0]} is missing")
    return order


def check_order(gguf: Gguf, order: list[str]) -> None:
    """Moments that are zero belong to tokens never seen: whole rows of the embedding.

    The ancestor could go through its graph the other way round, too, where that took less memory, and the file does not say so.
    """
    second = gguf.tensors.get("optimizer.adam.second_moments")
    sizes = [gguf.tensors[name].elements for name in order]
    if second is None or second.type.name != "F32" or second.elements != sum(sizes):
        return  # refused with other things that do not fit together
    zero = second.raw.view("<f4").ravel() == 0
    at = order.index("token_embd.weight")
    rows = zero[sum(sizes[:at]) :][: sizes[at]].reshape(gguf.tensors[order[at]].shape)
    in_rows = rows.all(-1).sum() * rows.shape[-1]
    if not zero.all() and zero.sum() > 2 * in_rows + zero.size // 100:
        raise FileError(
            f"{gguf.path}: the moments do not lie in the order that is known; the weights can be had from the model file"
        )
