"""Blocks that differ: in the numbers of their heads, in the width of feed-forward, in the size of heads, and in weights."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.adapters import peft
from llamatrain.adapters.read import read_adapter
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import Kind, Value, numbers, strings
from llamatrain.graph import ops as O
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.forward import ForwardPass
from llamatrain.model.hyperparameters import Hyperparameters, find_optional, read_hyperparameters
from llamatrain.model.lora_targets import block_matrices, match_target
from llamatrain.model.rope import Rope
from llamatrain.run.inputs import fingerprint
from llamatrain.sample.decoder import Decoder
from tests.helpers.adapter_files import adapter
from tests.helpers.errors import raises
from tests.helpers.small_models import LLAMA, loss_of, small, tokens, weights, written

L = "llama."
SMALL_HEADS = {"head_size": 8, "rope": Rope(8, base=500.0)}


def block_values(h: Hyperparameters, layer: int) -> Mapping[str, Any]:
    """Return other heads for the odd blocks."""
    return SMALL_HEADS if layer % 2 else {}


TWO_HEAD_SIZES = replace(
    LLAMA,
    block_values=block_values,
    ropes=lambda h: [h.rope, SMALL_HEADS["rope"]],
    rope_index=lambda h, layer: layer % 2,
)
BIASED = LLAMA.weights | {
    "blk.{}.attn_q.bias": replace(
        LLAMA.weights["blk.{}.attn_q.bias"], optional=False, present=lambda h, layer: layer == 1
    )
}
MODELS = {
    "numbers of heads and widths": small(
        layers=3, by_block={"ff": (96, 32, 64), "kv_heads": (2, 1, 2), "heads": (4, 3, 2)}
    ),
    "two sizes of heads": small(layers=3, architecture=TWO_HEAD_SIZES),
    "two sizes of heads that rotate in halves": small(
        layers=3, architecture=replace(TWO_HEAD_SIZES, rotation="halves")
    ),
    "weights": small(architecture=replace(LLAMA, weights=BIASED)),
}
NO_OWN_KEYS = 2  # the blocks from this one on read the keys and values of an earlier one


def sharing_block(model: ForwardPass, layer: int, x: Tensor) -> Tensor:
    """Return the output of a block that may read another block's keys and values."""
    prefix = f"blk.{layer}"
    if layer < NO_OWN_KEYS:
        return layers.block(model, layer, x)
    q = model.split_heads(model.linear(model.norm(x, f"{prefix}.attn_norm"), f"{prefix}.attn_q"), 4)
    attended = model.attention(layer, model.apply_rope(layer, q))
    x = O.add(model.keep_scored_rows(layer, x), model.linear(attended, f"{prefix}.attn_output"))
    return O.add(x, layers.feed_forward(model, layer, model.norm(x, f"{prefix}.ffn_norm")))


OWN_KEYS = {
    name: replace(kind, present=lambda h, layer: layer < NO_OWN_KEYS)
    if name in ("blk.{}.attn_k.weight", "blk.{}.attn_v.weight")
    else kind
    for name, kind in LLAMA.weights.items()
}
MODELS["shared keys and values"] = small(
    layers=4,
    architecture=replace(
        LLAMA,
        weights=OWN_KEYS,
        block=sharing_block,
        kv_block=lambda h, layer: layer if layer < NO_OWN_KEYS else layer % 2,
    ),
)
DIFFERENT = MODELS["numbers of heads and widths"]


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    """Of all weights at once, by differences, with attention in both ways."""
    h, random, step = MODELS[name], np.random.default_rng(2), 1e-6
    arrays = {key: array.astype(np.float64) for key, array in weights(h).items()}
    loss, grads = loss_of(h, arrays, 9)
    way = {key: array.std() * random.standard_normal(array.shape) for key, array in arrays.items()}
    ahead, behind = (
        loss_of(h, {key: arrays[key] + sign * step * way[key] for key in arrays}, 9)[0] for sign in (1, -1)
    )
    assert sum(np.vdot(grads[key], way[key]) for key in arrays) == pytest.approx(
        (ahead - behind) / (2 * step), rel=1e-5
    )
    plain, others = loss_of(h, arrays, 9, flash=False)
    assert loss == pytest.approx(plain, rel=1e-12)
    for key, grad in grads.items():
        np.testing.assert_allclose(others[key], grad, rtol=0, atol=1e-9 * max(1, np.abs(grad).max()))


@pytest.mark.parametrize("name", MODELS)
def test_decoding_and_a_shifted_context(name: str) -> None:
    """Token by token as at once; and what is left of one block's context is as if it had always stood there."""
    h, ids = MODELS[name], tokens(40)
    arrays = weights(h)
    whole, parts = Decoder(h, arrays, ctx=64).feed(ids).copy(), Decoder(h, arrays, ctx=64)
    for token in ids:
        last = parts.feed([token])
    np.testing.assert_allclose(last, whole, rtol=0, atol=1e-4)
    for layer in h.kv_blocks:
        one = replace(h.for_block(layer), layers=1, architecture=LLAMA, by_block={})
        alone = {key: array for key, array in arrays.items() if not key.startswith("blk.")}
        alone |= {
            key: arrays[key.replace("blk.0.", f"blk.{layer}.")] for key in one.shapes if key not in alone
        }
        shifted, fresh = (Decoder(one, alone, ctx=64) for _ in range(2))
        shifted.feed(ids)
        assert shifted.shift_context(4) and shifted.position == 22
        fresh.feed([*ids[:4], *ids[22:]])
        np.testing.assert_allclose(shifted.feed([3]), fresh.feed([3]), rtol=0, atol=1e-4)
    before = parts.feed([3]).copy()
    assert parts.shift_context(4) and np.abs(parts.feed([3]) - before).max() > 1e-3


def test_numbers_of_a_file(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", DIFFERENT, weights(DIFFERENT))
    gguf = open_gguf(path)
    h = read_hyperparameters(gguf)
    assert h == DIFFERENT and h.describe().endswith("ff 32 to 96, vocabulary 258")
    assert gguf.metadata[f"{L}feed_forward_length"].tolist() == [96, 32, 64]
    assert h.shapes["blk.1.attn_k.weight"] == (16, 64) and h.shapes["blk.2.attn_output.weight"] == (64, 32)
    equal = {f"{L}attention.head_count": numbers(Kind.UINT32, [4, 4])}
    plain = read_hyperparameters(
        open_gguf(written(tmp_path / "equal.gguf", small(), weights(small()), more=equal))
    )
    assert plain == small() and not plain.by_block
    swapped = replace(DIFFERENT, by_block=DIFFERENT.by_block | {"heads": (4, 2, 3), "kv_heads": (2, 2, 1)})
    other = written(tmp_path / "other.gguf", swapped, weights(swapped))
    assert repr(swapped) == repr(h) and fingerprint(open_gguf(other)) != fingerprint(gguf)


WRONG: dict[str, tuple[Value, str]] = {
    "too few": (
        numbers(Kind.INT32, [96]),
        "feed_forward_length must have a number in range for each of 2 blocks",
    ),
    "below 0": (numbers(Kind.INT32, [96, -1]), "feed_forward_length must have a number in range"),
    "fractions": (numbers(Kind.FLOAT32, [96, 96]), "feed_forward_length must have a number in range"),
    "words": (strings(["96", "96"]), "feed_forward_length must have a number in range"),
    "large": (numbers(Kind.UINT32, [96, 1 << 31]), r"feed_forward_length must be .*\(got 2147483648\)"),
    "not of these weights": (
        numbers(Kind.INT32, [96, 64]),
        r"the shape of blk\.1\.ffn_gate\.weight must be \[64, 64\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_numbers_that_cannot_be(name: str, tmp_path: Path) -> None:
    value, told = WRONG[name]
    more = {f"{L}feed_forward_length": value}
    path = written(tmp_path / "m.gguf", small(), weights(small()), more=more)
    with raises("invalid-hyperparameter" if "shape" not in told else "wrong-tensor-shape", match=told):
        read_hyperparameters(open_gguf(path))
    heads = {f"{L}attention.head_count_kv": numbers(Kind.INT32, [2, 3])}
    path = written(tmp_path / "m.gguf", small(), weights(small()), more=heads)
    with raises("invalid-hyperparameter", match=r"llama\.attention\.head_count_kv must divide the 4 heads"):
        read_hyperparameters(open_gguf(path))


def test_optional_weights_of_some_blocks(tmp_path: Path) -> None:
    """Only if the architecture says so: else one of them is missing."""
    pattern, name = "blk.{}.attn_k.bias", "blk.1.attn_k.bias"
    kind = replace(LLAMA.weights[pattern], optional_by_block=True)
    architecture = replace(LLAMA, weights=LLAMA.weights | {pattern: kind})
    arrays = weights(small(optional_weights=frozenset({pattern})))
    del arrays["blk.0.attn_k.bias"]
    gguf = open_gguf(written(tmp_path / "m.gguf", small(), arrays))
    assert find_optional(gguf, architecture, 2) == {name} and find_optional(gguf, LLAMA, 2) == {pattern}
    shapes = small(architecture=architecture, optional_weights=frozenset({name})).shapes
    assert [each for each in shapes if each.endswith("bias")] == [name]


def test_targets() -> None:
    """Blocks without a weight have no adapter of it."""
    kinds = dict(LLAMA.weights)
    kinds["blk.{}.attn_v.weight"] = replace(
        kinds["blk.{}.attn_v.weight"], present=lambda h, layer: layer == 1
    )
    h = small(layers=3, architecture=replace(LLAMA, weights=kinds))
    assert match_target("attn_v", h) == match_target("blk.0-.attn_v", h) == {"blk.1.attn_v.weight"}
    assert "blk.0.attn_v.weight" not in block_matrices(h) and len(block_matrices(h)) == 3 * 7 - 2
    with raises("unknown-target", match="^blk.2.attn_v: the model has no such weight$"):
        match_target("blk.2.attn_v", h)


@pytest.mark.parametrize("rotation", ["pairs", "halves"])
def test_adapters_of_peft(rotation: str, tmp_path: Path) -> None:
    """Rows of queries and keys are in their order by the heads of their own block."""
    h = replace(DIFFERENT, architecture=replace(LLAMA, rotation=rotation))
    made = replace(adapter(h, block_matrices(h)), architecture=h.architecture)
    peft.write_peft(tmp_path / "p", made, "", h)
    assert peft.list_tensors(tmp_path / "p")[0]["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    back = read_adapter(tmp_path / "p", h)
    for name in made.pairs:
        np.testing.assert_allclose(back.delta(name), made.delta(name), atol=1e-6)
