"""Decoding with a cache: the same logits as the training graph, however the tokens come; gradients go through the cache."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.adapters.options import AdapterOptions
from llamatrain.commands.generate import LoadOptions, TextModel, TextStream
from llamatrain.engine.plan import Plan
from llamatrain.engine.program import Program
from llamatrain.errors import LlamatrainError, UsageError
from llamatrain.gguf.reader import open_gguf
from llamatrain.graph import ops as O
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.ops import cross_entropy_loss, flash_attn
from llamatrain.graph.tensor import F32, F64, I32, DType, Tensor, parameter, placeholder
from llamatrain.kernels.host_memory import HostMemory
from llamatrain.model.forward import ForwardPass
from llamatrain.model.frozen_weights import load_frozen
from llamatrain.model.hyperparameters import Hyperparameters, read_hyperparameters
from llamatrain.model.rope import Rope
from llamatrain.model.transformer import (
    build_training,
    last_hidden,
    make_caches,
    recurrence_of_rows,
    rope_state,
    trainable_weights,
)
from llamatrain.platform.memory import allocate
from llamatrain.sample.decoder import Decoder, Generation
from llamatrain.sample.options import SamplingOptions
from tests.helpers.cli import ran, text_file
from tests.helpers.errors import raises
from tests.helpers.llama_cpp import served
from tests.helpers.lora_runs import WIDE, base
from tests.helpers.small_models import Arrays, loaded, small, tokens, weights, written

GREEDY = SamplingOptions(temp=0)
SHAPES = [
    small(),
    small(tied=True, layers=1),
    small(embd=40, heads=2, kv_heads=1, head_size=48, rope=Rope(48, base=5e5, kind="linear", factor=2.0)),
    small(heads=8, kv_heads=8, head_size=6, ff=50),  # a head so small that kernels do it otherwise
    small(ctx=200, rope=Rope(8, kind="yarn", factor=4.0, original_ctx=32)),  # not all of a head turns
]


def trained_logits(h: Hyperparameters, arrays: Arrays, ids: list[int], kernels: str) -> np.ndarray:
    """Of all tokens at once, by the graph that is trained."""
    leaves, table = trainable_weights(h), rope_state(h, len(ids))
    made = build_training(h, leaves, 1, len(ids), table, flash=False)
    output = made.loss.node.sources[0]  # the logits that the loss reads
    program = Program.build(
        [output],
        {leaves[name]: arrays[name] for name in leaves} | {table: h.rope_table(len(ids))},
        kernels=kernels,
    )
    program.write(made.inputs["tokens"], ids)
    program.write(made.inputs["positions"], np.arange(len(ids)))
    program.write(made.inputs["mask"], np.where(np.tri(len(ids), dtype=bool), 0, -1e30))
    program()
    return program.read(output).copy()


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("h", SHAPES, ids=Hyperparameters.describe)
def test_however_the_tokens_come(h: Hyperparameters, kernels: str) -> None:
    arrays, ids = weights(h), tokens(min(h.ctx, 90 if kernels == "cpu" else 30))
    expected = trained_logits(h, arrays, ids, kernels)
    decoder = Decoder(h, arrays, ctx=h.ctx, threads=2, kernels=kernels)
    close(np.array([decoder.feed([each]).copy() for each in ids]), expected)
    for cuts in ([], [1], [5, 6, 20], [len(ids) - 1]):
        decoder.reset()
        for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
            close(decoder.feed(ids[start:end]), expected[end - 1])
            assert decoder.position == end and decoder.free_positions == h.ctx - end


def test_a_text_leaves_nothing_to_the_next() -> None:
    h = small()
    decoder = Decoder(h, weights(h), ctx=h.ctx)
    first = decoder.feed(tokens(20)).copy()
    decoder.reset()
    decoder.feed(tokens(h.ctx, seed=5))
    decoder.reset()
    np.testing.assert_array_equal(decoder.feed(tokens(20)), first)


def test_weights_that_change_are_seen() -> None:
    h = small()
    arrays = weights(h)
    decoder = Decoder(h, arrays, ctx=h.ctx)
    decoder.feed(tokens(9))
    for name, array in arrays.items():
        array[...] = weights(h, seed=2)[name]
    decoder.reset()
    np.testing.assert_array_equal(decoder.feed(tokens(9)), Decoder(h, arrays, ctx=h.ctx).feed(tokens(9)))


def test_weights_that_cannot_be_written_will_do() -> None:
    h = small(layers=1)
    arrays = weights(h)
    expected = Decoder(h, arrays, ctx=8).feed(tokens(3)).copy()
    for array in arrays.values():
        array.flags.writeable = False
    assert np.array_equal(Decoder(h, arrays, ctx=8).feed(tokens(3)), expected)


@pytest.mark.parametrize("ctx", [1, 7, 64, 70])
def test_the_context_is_used_to_its_end(ctx: int) -> None:
    h = small(layers=1, ctx=128)
    decoder = Decoder(h, weights(h), ctx=ctx)
    assert np.all(np.isfinite(decoder.feed(tokens(ctx)))) and decoder.free_positions == 0
    with raises("context-full", match=f"^1 tokens .*{ctx} of {ctx} tokens"):
        decoder.feed([1])
    decoder.reset()
    with pytest.raises(LlamatrainError, match=f"{ctx + 1} tokens do not fit"):
        decoder.feed(tokens(ctx + 1))


@pytest.mark.parametrize("token", [-1, 258, 1 << 40])
def test_a_token_that_is_not_there(token: int) -> None:
    h = small(layers=1)
    with raises("unknown-token", UsageError, match=f"258.*got {token}"):
        Decoder(h, weights(h), ctx=8).feed([0, token])


def test_what_it_takes_is_known_before() -> None:
    h = small()
    cost, decoder = Decoder.plan(h, 50, threads=2), Decoder(h, weights(h), ctx=50, threads=2)
    decoder.feed(tokens(3))
    assert decoder.arena is not None and cost.arena == decoder.arena.size
    assert cost.caches == 2 * h.layers * 50 * h.kv_heads * h.head_size * 4 + 50 * h.head_size * 4
    shared = Decoder(h, weights(h), ctx=50, threads=2, arena=allocate(cost.arena))
    np.testing.assert_array_equal(
        shared.feed(tokens(50)), Decoder(h, weights(h), ctx=50, threads=2).feed(tokens(50))
    )


def test_pages_of_a_base_may_be_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a decoder that is told to, as that of a run's samples is where the run does it itself."""
    bound = list[HostMemory]()

    def program(plan: Plan, memory: Any, device: HostMemory, **more: Any) -> Program:
        bound.append(device)
        return Program(plan, memory, device, **more)

    monkeypatch.setattr("llamatrain.sample.decoder.Program", program)
    model = base(tmp_path / "base.gguf", WIDE, "Q8_0")
    gguf = open_gguf(model)
    leaves, arrays = load_frozen(gguf, h := read_hyperparameters(gguf))
    found = [
        Decoder(h, arrays, ctx=8, weights=leaves, drop_base=drops).feed(tokens(3)).copy()
        for drops in (False, True)
    ]
    assert [device.drop_pages for device in bound] == [False, True] and np.array_equal(*found)
    assert Decoder.plan(h, 8, weights=leaves, drop_base=True) == Decoder.plan(h, 8, weights=leaves)
    bound.clear()
    run = (
        "--ctx",
        32,
        "--batch",
        1,
        "--iters",
        1,
        "--sample-every",
        1,
        "--cache-base",
        "off",
        "--out",
        tmp_path / "run",
    )
    ran("finetune", model, text_file(tmp_path, 300), *run)
    assert bound and all(device.drop_pages for device in bound)


# ---- generating ------------------------------------------------------------


def test_greedy_tokens_are_the_likeliest() -> None:
    h = small()
    arrays = weights(h)
    made = Generation(Decoder(h, arrays, ctx=h.ctx), tokens(5), SamplingOptions(temp=0, n=12))
    found = list(made)
    logits = trained_logits(h, arrays, made.tokens, "cpu")
    assert found == logits[4:-1].argmax(1).tolist() and made.stop_reason == "n" and len(set(found)) > 4


def test_generating_ends() -> None:
    h = small(ctx=40)
    decoder = Decoder(h, weights(h), ctx=h.ctx)

    def made(
        options: SamplingOptions = GREEDY, ends: tuple[int, ...] = (), prompt: int = 5
    ) -> tuple[list[int], str]:
        generation = Generation(decoder, tokens(prompt), options, ends)
        return list(generation), generation.stop_reason

    whole = made()
    assert (len(whole[0]), whole[1]) == (35, "ctx")
    assert made() == whole  # begins anew
    end = next(i for i, token in enumerate(whole[0]) if token not in whole[0][:i] and i > 2)
    assert made(ends=(whole[0][end],)) == (whole[0][:end], "end")
    assert made(SamplingOptions(temp=0, n=7)) == (whole[0][:7], "n")
    assert made(SamplingOptions(temp=0, n=0)) == ([], "n")
    assert made(prompt=40) == ([], "ctx")


def test_the_seed_decides() -> None:
    h = small()
    decoder = Decoder(h, weights(h), ctx=h.ctx, threads=2)
    texts = [
        list(Generation(decoder, tokens(5), SamplingOptions(n=20, temp=2.0, seed=seed))) for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


# ---- beyond the context -----------------------------------------------------


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("h", [replace(h, layers=1) for h in SHAPES], ids=Hyperparameters.describe)
def test_what_is_left_after_a_shift_is_as_if_it_had_always_stood_there(
    h: Hyperparameters, kernels: str
) -> None:
    """Of one layer, whose keys and values know of no other tokens."""
    arrays, ids = weights(h), tokens(31)
    decoder = Decoder(h, arrays, ctx=24, kernels=kernels)
    for keep, gone in ((0, 11), (3, 10), (21, 1)):
        decoder.reset()
        decoder.feed(ids[:23])
        assert decoder.shift_context(keep) and decoder.position == 23 - gone
        left = [*ids[:keep], *ids[keep + gone : 23]]
        fresh = Decoder(h, arrays, ctx=24, kernels=kernels)
        fresh.feed(left)
        close(decoder.feed(ids[23:24]), fresh.feed(ids[23:24]))
    assert not decoder.shift_context(decoder.position - 1) and not decoder.shift_context(decoder.position)


def test_what_a_cache_holds_is_known() -> None:
    h, ids = small(ctx=40), tokens(30)
    decoder = Decoder(h, weights(h), ctx=h.ctx)
    decoder.feed(ids)
    assert decoder.rewind([*ids[:20], 1 + max(ids[20], 1)]) == decoder.position == 20
    decoder.feed(ids[20:])
    assert decoder.rewind(ids) == 29  # a last one is fed, for the logits behind it
    decoder.feed(ids[29:])
    assert decoder.shift_context(3) and decoder.rewind(ids) == 3  # the others' values know of what has gone


def test_generating_goes_on_behind_the_context() -> None:
    h = small(ctx=40)
    decoder = Decoder(h, weights(h), ctx=h.ctx)
    made = Generation(decoder, tokens(5), SamplingOptions(temp=0, n=100), keep=5)
    found = list(made)
    assert len(found) == 100 and made.stop_reason == "n"
    assert found[:35] == list(Generation(decoder, tokens(5), GREEDY))
    assert len(list(Generation(decoder, tokens(40), SamplingOptions(temp=0, n=9), keep=0))) == 9
    full = Generation(decoder, tokens(39), SamplingOptions(temp=0, n=9), keep=39)
    assert len(list(full)) == 1 and full.stop_reason == "ctx"  # all of it is kept


def test_llama_cpp_goes_on_in_the_same_way(tmp_path: Path) -> None:
    h, prompt = small(), tokens(9)
    told = {
        "prompt": [int(token) for token in prompt],
        "n_predict": 150,
        "temperature": 0,
        "ignore_eos": True,
    }
    with served(written(tmp_path / "m.gguf", h, weights(h)), ctx_shift=True) as server:
        expected = server.post("completion", **told, n_keep=4, return_tokens=True)["tokens"]
    decoder = Decoder(*loaded(open_gguf(tmp_path / "m.gguf")), ctx=64)
    assert (
        list(Generation(decoder, prompt, SamplingOptions(temp=0, n=150), keep=5)) == expected
    )  # and one that begins


@pytest.mark.parametrize("keep", [0, 4, -1, 30, 500])
def test_llama_cpp_keeps_as_many_tokens(keep: int, tmp_path: Path) -> None:
    """Through many shifts; -1 and more than the prompt has, too."""
    h, path = small(), tmp_path / "m.gguf"
    written(path, h, weights(h, seed=2))
    model, told = (
        TextModel(path, LoadOptions(ctx=64), AdapterOptions()),
        {"n_predict": 400, "temperature": 0, "ignore_eos": True},
    )
    with served(path, ctx_shift=True) as server:
        for length in (3, 9, 40):
            ids = tokens(length, seed=length)
            follow = server.post(
                "completion", prompt=[*map(int, ids)], **told, n_keep=keep, return_tokens=True
            )["tokens"]
            stay = TextStream(model, ids, SamplingOptions(ctx_shift=True, keep=keep)).tokens_to_keep(True)
            assert stay is not None
            found = likeliest(Decoder(*loaded(open_gguf(path)), ctx=64), ids, follow, stay)
            assert found == follow, keep


def likeliest(
    decoder: Decoder, prompt: list[int], follow: list[int], keep: int, longer: float = 1.0
) -> list[int]:
    """What would be drawn behind each token of a text, but for its end; with keys that each shift makes `longer`."""
    logits, found = decoder.feed(prompt).copy(), list[int]()
    for token in follow:
        logits[1] = -np.inf
        found.append(int(np.argmax(logits)))
        if decoder.free_positions == 1:
            assert decoder.shift_context(keep)
            for cache in decoder.graphs.caches[::2] if longer != 1 else ():
                decoder.memory[cache].view(np.float32)[...] *= np.float32(longer)
        logits = decoder.feed([token]).copy()
    return found


def test_llama_cpp_makes_yarn_s_keys_longer_at_each_shift(tmp_path: Path) -> None:
    """As if they were not so already, the ones that stay in place, too: texts are the same where we do that, and else are not."""
    h, path = small(ctx=64, rope=Rope(16, kind="yarn", factor=4.0, original_ctx=16)), tmp_path / "m.gguf"
    written(path, h, weights(h, seed=2))
    told = {"n_predict": 300, "temperature": 0, "ignore_eos": True, "n_keep": 4, "return_tokens": True}
    with served(path, ctx_shift=True) as server:
        follow = server.post("completion", prompt=[*map(int, tokens(9))], **told)["tokens"]
    found = [
        likeliest(Decoder(*loaded(open_gguf(path)), ctx=64), tokens(9), follow, 5, by)
        for by in (1.0, 1 + 0.1 * np.log(4))
    ]
    assert found[1] == follow and found[0][:55] == follow[:55] and found[0] != follow


# ---- gradients through the cache -------------------------------------------


def cached_loss(
    h: Hyperparameters,
    weights_: dict[str, Tensor],
    parts: list[int],
    caches: list[Tensor],
    table: Tensor,
    dtype: DType,
) -> tuple[Tensor, list[dict[str, Tensor]], dict[str, Tensor]]:
    """The loss of the last part's tokens, each part reading what those before it wrote into the cache."""
    inputs = []
    for count in parts:
        given = {name: placeholder(name, (1, count), I32) for name in ("tokens", "positions", "starts")}
        inputs.append(given)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, given=given, count=count) -> Tensor:
            for place, x in ((2 * layer, k), (2 * layer + 1, v)):
                rows = O.reshape(x, shape=(count, caches[place].shape[1]))
                caches[place] = O.set_rows(caches[place], rows, O.reshape(given["positions"], shape=(count,)))
            seen = [
                O.reshape(caches[2 * layer + i], shape=(1, h.ctx, h.kv_heads, h.head_size)) for i in (0, 1)
            ]
            return flash_attn(q, *seen, given["starts"], given["positions"], scale=h.head_size**-0.5)[0]

        x, _ = last_hidden(
            ForwardPass(
                h=h,
                weights=weights_,
                tokens=given["tokens"],
                positions=given["positions"],
                table=table,
                attend=attend,
                recurrence=recurrence_of_rows(None),
            )
        )
    read = {
        "targets": placeholder("targets", (parts[-1],), I32),
        "weights": placeholder("weights", (parts[-1],), dtype),
    }
    return cross_entropy_loss(O.matmul(x, weights_[h.output_weight]), *read.values()), inputs, read


@pytest.mark.parametrize("parts", [[7], [1, 1, 5], [4, 3]])
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_gradients_through_the_cache_are_those_of_training(parts: list[int], kernels: str) -> None:
    h = small(vocab=20, embd=24, ff=40, head_size=8, ctx=9, layers=2)
    dtype = F64 if kernels == "reference" else F32
    arrays = {name: array.astype(dtype.numpy) for name, array in weights(h).items()}
    ids, last, length = np.array(tokens(8, vocab=20)), parts[-1], sum(parts)
    shares = np.linspace(1.0, 2.0, last)

    leaves, table = trainable_weights(h, dtype), rope_state(h, h.ctx, dtype)
    caches = make_caches(h, h.ctx, dtype)
    old = np.random.default_rng(3)
    memory = {leaves[name]: arrays[name] for name in leaves} | {
        table: h.rope_table(h.ctx).astype(dtype.numpy)
    }
    memory |= {cache: old.standard_normal(cache.shape).astype(dtype.numpy) for cache in caches}
    loss, inputs, read = cached_loss(h, leaves, parts, caches, table, dtype)
    loss, grads = value_and_gradients(loss, list(leaves.values()))
    program, start = Program.build([loss, *grads], memory, kernels=kernels), 0
    for given, count in zip(inputs, parts, strict=True):
        program.write(given["tokens"], ids[start : start + count])
        program.write(given["positions"], np.arange(start, start + count))
        program.write(given["starts"], 0)
        start += count
    program.write(read["targets"], ids[1:][length - last : length])
    program.write(read["weights"], shares)
    program()

    made = build_training(h, leaves, 1, length, table)
    expected, wanted = value_and_gradients(made.loss, list(leaves.values()))
    whole = Program.build(
        [expected, *wanted], {leaf: memory[leaf] for leaf in (*leaves.values(), table)}, kernels=kernels
    )
    for name, values in (
        ("tokens", ids[:length]),
        ("positions", np.arange(length)),
        ("starts", 0),
        ("targets", ids[1 : length + 1]),
    ):
        whole.write(made.inputs[name], values)
    whole.write(made.inputs["weights"], np.r_[np.zeros(length - last), shares])
    whole()

    tolerance = 1e-11 if dtype is F64 else 1e-5
    assert float(program.read(loss)) == pytest.approx(float(whole.read(expected)), rel=tolerance)
    for name, mine, theirs in zip(leaves, grads, wanted, strict=True):
        assert np.linalg.norm(program.read(mine) - whole.read(theirs)) <= tolerance * np.linalg.norm(
            whole.read(theirs)
        ), name


def test_gradients_through_the_cache_are_slopes() -> None:
    h = small(vocab=12, embd=8, ff=12, heads=2, kv_heads=1, head_size=4, ctx=6, layers=1)
    arrays = {name: array.astype(np.float64) for name, array in weights(h).items()}
    leaves, table = trainable_weights(h, F64), rope_state(h, h.ctx, F64)
    caches = [parameter(cache.name, cache.shape, F64) for cache in make_caches(h, h.ctx)]
    asked = [*leaves.values(), *caches]
    random = np.random.default_rng(4)
    memory = {leaves[name]: arrays[name] for name in leaves} | {table: h.rope_table(h.ctx).astype(np.float64)}
    memory |= {cache: random.standard_normal(cache.shape) for cache in caches}
    loss, inputs, read = cached_loss(h, leaves, [2, 2], list(caches), table, F64)
    loss, grads = value_and_gradients(loss, asked)
    program = Program.build([loss, *grads], memory, kernels="reference")
    for start, given in zip((1, 3), inputs, strict=True):  # the first row of the cache is that of the caller
        program.write(given["tokens"], random.integers(0, 12, 2))
        program.write(given["positions"], [start, start + 1])
        program.write(given["starts"], 0)
    program.write(read["targets"], [3, 4])
    program.write(read["weights"], [1.0, 0.5])
    program()
    found = {leaf: program.read(grad).copy() for leaf, grad in zip(asked, grads, strict=True)}
    for leaf in asked:
        way = random.standard_normal(leaf.shape)
        ends = []
        for step in (1e-6, -2e-6):
            memory[leaf] += step * way
            program()
            ends.append(float(program.read(loss)))
        memory[leaf] += 1e-6 * way
        slope = float(np.sum(found[leaf] * way))
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(slope, rel=1e-5, abs=1e-8), leaf.name
        assert slope != 0
