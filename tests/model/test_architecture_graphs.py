"""Each architecture's graph: gradients by differences, attention in two ways, and its numbers in a file and back."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamatrain.errors import FileError
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import Kind, number, numbers, strings
from llamatrain.graph.tensor import collect_leaves
from llamatrain.model.architectures import find_architecture, supported_names, text_model_names
from llamatrain.model.distill import Teacher
from llamatrain.model.hyperparameters import Hyperparameters, default_extra, read_hyperparameters
from llamatrain.model.limits import BadHyperparameter
from llamatrain.model.options import ModelOptions
from llamatrain.model.rope import Rope
from llamatrain.model.transformer import build_training, rope_state, trainable_weights
from llamatrain.preference.forward import PairForward
from tests.helpers.small_models import loss_of, small, weights, written

OWN = {  # numbers that only some have, such that all of them matter
    "window": 3,
    "period": 2,
    "score_cap": 2.0,
    "logit_cap": 5.0,
    "near_base": 100.0,
    "embedding_scale": 3.0,
    "residual_scale": 0.5,
    "attention_scale": 0.4,
    "logit_scale": 1.7,
    "extra_blocks": 0,
    "attention_period": 2,
    "taps": 3,
    "key_size": 4,
    "key_heads": 2,
    "value_heads": 4,
    "value_width": 24,
    "pooling": 1,
    "temperature_scale": 0.6,
    "yarn_log_multiplier": 1.0,
    "yarn_beta_fast": 8.0,
    "yarn_beta_slow": 0.5,
    "deepstack_layers": 3,
    "window_head_size": 12,
    "window_rope_size": 8,
    "shared_kv_blocks": 0,
    "per_layer_size": 5,
    "rotates": True,
    "experts": 4,
    "experts_used": 2,
    "expert_ff": 24,
    "shared_ff": 24,
    "dense_blocks": 1,
    "gating": 2,
    "expert_interval": 1,
    "shared_count": 2,
    "share_scale": 1.5,
    "normalizes_shares": True,
    "groups": 2,
    "groups_used": 1,
    "key_length": 16,
    "value_length": 12,
    "kv_rank": 20,
    "q_rank": 10,
}


def of(name: str) -> Hyperparameters:
    """A small model of an architecture."""
    found = find_architecture(name)
    own = {each: OWN[each] for each in default_extra(found, OWN | {"head_size": 16, "embd": 32})}
    factors = {"long": FACTORS, "short": FACTORS[::-1], "original_ctx": 4} if name == "phi3" else {}
    turned = 12 if factors else 16
    return small(
        architecture=found,
        layers=4,
        kv_heads=4 if "kv_rank" in own else 2,  # latents are those of all heads
        extra=own,
        by_block=found.new_model_blocks(4, 2),
        optional_weights=found.new_model_weights,
        tied=found.ties_by_default,
        rope=found.new_model_rope(Rope(turned, **factors)),
    )


FACTORS = np.linspace(1, 4, 6).astype(np.float32)


@pytest.mark.parametrize("name", text_model_names())
def test_gradients_of_each(name: str) -> None:
    """Of all weights at once, by differences."""
    h, random, step = of(name), np.random.default_rng(2), 1e-6
    arrays = {key: array.astype(np.float64) for key, array in weights(h).items()}
    _, grads = loss_of(h, arrays, 9)
    way = {key: array.std() * random.standard_normal(array.shape) for key, array in arrays.items()}
    losses = [
        loss_of(h, {key: arrays[key] + sign * step * way[key] for key in arrays}, 9)[0] for sign in (1, -1)
    ]
    slope = (losses[0] - losses[1]) / (2 * step)
    assert sum(np.vdot(grads[key], way[key]) for key in grads) == pytest.approx(slope, rel=1e-5)
    assert all(np.abs(grad).max() > 0 for grad in grads.values())


@pytest.mark.parametrize("name", text_model_names())
def test_attention_in_pieces_is_the_same(name: str) -> None:
    """As a product, a softmax and a product; of windows and caps too."""
    h = of(name)
    arrays = {key: array.astype(np.float64) for key, array in weights(h).items()}
    (loss, grads), (plain, others) = loss_of(h, arrays, 9), loss_of(h, arrays, 9, flash=False)
    assert loss == pytest.approx(plain, rel=1e-12)
    for key, grad in grads.items():
        np.testing.assert_allclose(others[key], grad, rtol=0, atol=1e-9 * max(1, np.abs(grad).max()))


@pytest.mark.parametrize("name", supported_names())
def test_numbers_of_a_file(name: str, tmp_path: Path) -> None:
    h = of(name)
    assert read_hyperparameters(open_gguf(written(tmp_path / "m.gguf", h, weights(h)))) == h


def test_blocks_with_windows_may_be_listed(tmp_path: Path) -> None:
    def seen(marks: list[bool]) -> list[int]:
        listed = {"gemma2.attention.sliding_window_pattern": numbers(Kind.BOOL, marks)}
        h = read_hyperparameters(
            open_gguf(written(tmp_path / "m.gguf", of("gemma2"), weights(of("gemma2")), more=listed))
        )
        return [h.attention_mask(layer).window for layer in range(4)]

    assert (
        seen([True, True, False, True]) == [3, 3, 0, 3]
        and seen([True] * 4) == [3] * 4
        and seen([False] * 4) == [0] * 4
    )
    for marks in ([True, False, False, True], [True, False]):
        with pytest.raises(FileError, match=r"sliding_window_pattern is not a repeating pattern of 4 blocks"):
            seen(marks)


PERIOD = "gemma2.attention.sliding_window_pattern"
HOSTILE = {
    "a window that no file keeps": (
        "gemma3",
        {"gemma3.attention.sliding_window": number(Kind.UINT64, 2**40)},
        "sliding_window",
    ),
    "a period likewise": ("gemma2", {PERIOD: number(Kind.UINT64, 2**63 + 1)}, "sliding_window_pattern"),
    "a base without end": (
        "gemma3",
        {"gemma3.rope.freq_base_swa": number(Kind.FLOAT64, 1e300)},
        "rope.freq_base_swa",
    ),
    "a cap without end": (
        "gemma2",
        {"gemma2.attn_logit_softcapping": number(Kind.FLOAT64, 1e300)},
        "attn_logit_softcapping",
    ),
    "a scale without end": (
        "granite",
        {"granite.embedding_scale": number(Kind.FLOAT64, 1e39)},
        "embedding_scale",
    ),
    "marks that are words": ("gemma2", {PERIOD: strings(["x"] * 4)}, "not a repeating pattern of 4 blocks"),
    "marks that are fractions": (
        "gemma2",
        {PERIOD: numbers(Kind.FLOAT32, [1.0] * 4)},
        "not a repeating pattern of 4 blocks",
    ),
    "marks of blocks without number": (
        "gemma2",
        {PERIOD: numbers(Kind.BOOL, [True, False]), "gemma2.block_count": number(Kind.UINT32, 2**32 - 1)},
        "not a repeating pattern of 4294967295 blocks",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_numbers_that_cannot_be(name: str, tmp_path: Path) -> None:
    """Told by file and key, at once."""
    arch, keys, told = HOSTILE[name]
    path = written(tmp_path / "m.gguf", of(arch), weights(of(arch)), more=keys)
    with pytest.raises(FileError, match=rf"^{re.escape(str(path))}: [^\n]*{told}[^\n]*$"):
        read_hyperparameters(open_gguf(path))


def test_embeddings_of_new_models_are_tied_where_those_of_the_family_are() -> None:
    tied = {name for name in text_model_names() if ModelOptions(arch=name).hyperparameters(300).tied}
    gemmas = {"gemma", "gemma2", "gemma3", "gemma3n", "gemma4"}
    assert tied == {"command-r", "cohere2", "granitehybrid", "lfm2", "lfm2moe", *gemmas}


def test_a_teacher_is_told_how_long_rows_are() -> None:
    """Whatever number of rotations its pupil has: long factors are for long rows."""
    h, teacher = of("gemma3"), Teacher(h=of("phi3"), share=0.5, half=False)
    made = build_training(h, trainable_weights(h), 1, 4, rope_state(h, 4), teacher=teacher)
    (found,) = made.more_states.values()
    assert np.array_equal(found, teacher.h.rope_table(4))


@pytest.mark.parametrize("name", supported_names())
def test_heads_that_turn_in_part(name: str) -> None:
    """Of some architectures llama.cpp takes none such."""
    if find_architecture(name).partial_rotary:
        assert replace(of(name), rope=Rope(8)).rope.size == 8
    else:
        with pytest.raises(BadHyperparameter, match=f"size must be the head size, 16, in a {name} .got 8"):
            replace(of(name), rope=Rope(8))


def test_every_fused_head_has_the_cap() -> None:
    """Of a loss, of what judges, and of what compares answers."""
    h = of("gemma2")
    weights, table = trainable_weights(h), rope_state(h, 8)
    made = build_training(h, weights, 1, 8, table)
    assert made.evaluation
    ways = PairForward(h=h, table=table, batch=1, length=8, answers=2, drop_untrained=False, flash=True)
    rows, _ = ways.losses(weights, ways.inputs())
    for name, each in (("", made.loss), ("_judged", made.evaluation[0]), ("_rows", rows)):
        assert (
            each.node
            and each.node.op.name == f"linear_cross_entropy{name}"
            and each.node.attrs["cap"] == OWN["logit_cap"]
        )


def test_no_fused_loss_leaves_out_the_bias_of_an_output() -> None:
    h = of("phi2")
    weights, table = trainable_weights(h), rope_state(h, 8)
    made = build_training(h, weights, 1, 8, table)
    ways = PairForward(h=h, table=table, batch=1, length=8, answers=2, drop_untrained=False, flash=True)
    assert made.evaluation
    for loss in (made.loss, made.evaluation[0], ways.losses(weights, ways.inputs())[0]):
        assert loss.node and not loss.node.op.name.startswith("linear_")
        assert weights["output.bias"] in collect_leaves([loss])
