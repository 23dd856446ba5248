"""Many texts at a time: each has the tokens that it has alone, whatever the others are."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from llamatrain.gguf.reader import open_gguf
from llamatrain.platform.memory import allocate
from llamatrain.sample.batch import BatchDecoder, Completion, Request, complete
from llamatrain.sample.decoder import Decoder, Generation
from llamatrain.sample.options import SamplingOptions
from tests.helpers.architecture_models import SHAPES, prompt, shape_of, weights, written
from tests.helpers.errors import raises
from tests.helpers.small_models import loaded, small
from tests.helpers.small_models import weights as small_weights

CTX = 80
BEGINNING = prompt(66, 9)  # more than the largest chunk
PROMPTS = [
    prompt(70, 1),
    prompt(3, 2),
    [*BEGINNING, 1],
    prompt(1, 4),
    [*BEGINNING, 2, 3],
    BEGINNING,
    BEGINNING,
]
# sampled and greedy texts of different lengths; the last two continue the same prompt with different seeds
REQUESTS = [
    Request(tokens, SamplingOptions(temp=0 if index % 3 == 0 else 0.8, n=3 + 2 * index, seed=index))
    for index, tokens in enumerate(PROMPTS)
]


def model_of(arch: str, folder: Path):
    shape = shape_of(arch, "a")
    return loaded(open_gguf(written(folder / f"{arch}.gguf", shape, weights(shape))))


def decoder_of(arch: str, folder: Path, slots: int = 4, ctx: int = CTX, kernels: str = "cpu") -> BatchDecoder:
    return BatchDecoder(*model_of(arch, folder), ctx=ctx, slots=slots, kernels=kernels)


def texts(decoder: BatchDecoder, requests: Sequence[Request]) -> list[list[int]]:
    found = {one.index: one.tokens for one in complete(decoder, requests)}
    return [found[index] for index in range(len(requests))]


def completion(decoder: BatchDecoder, tokens: list[int], ends: Sequence[int] = (), **options) -> Completion:
    (found,) = complete(decoder, [Request(tokens, SamplingOptions(temp=0, **options))], ends)
    return found


# ---- what a text depends on ----------------------------------------------------


@pytest.mark.parametrize("arch", SHAPES)
def test_texts_are_those_of_one_at_a_time(arch: str, tmp_path: Path) -> None:
    h, arrays = model_of(arch, tmp_path)
    single = Decoder(h, arrays, ctx=CTX)
    expected = [list(Generation(single, each.tokens, each.options)) for each in REQUESTS]
    assert texts(BatchDecoder(h, arrays, ctx=CTX, slots=4), REQUESTS) == expected


def logits_of(
    decoder: BatchDecoder, slot: int, neighbours: Sequence[int] = (), before: Sequence[int] = ()
) -> np.ndarray:
    """Return the logits of one text that shares the decoder with others, and follows one in its slot."""
    text = [*prompt(76, 3)]
    if before:
        decoder.fill(slot, before, shared=64)
    rows = [decoder.fill(slot, text[:70]).copy()]
    for other in neighbours:
        decoder.fill(other, prompt(10 + other, other))
    for number, token in enumerate(text[70:]):
        fed = {slot: token} | {other: (number * other) % 7 for other in neighbours}
        rows.append(decoder.step(fed)[slot].copy())
    return np.array(rows)


@pytest.mark.parametrize("arch", ["llama", "qwen35", "mixtral", "falcon-h1", "gpt-oss"])
def test_logits_do_not_depend_on_neighbours(arch: str, tmp_path: Path) -> None:
    """They have the same bits in every slot, beside any other texts, and behind a prompt with the same beginning."""
    alone = logits_of(decoder_of(arch, tmp_path), 0)
    assert np.array_equal(logits_of(decoder_of(arch, tmp_path), 3, neighbours=[0, 1, 2]), alone)
    same_beginning = [*prompt(76, 3)[:66], 1, 2]
    assert np.array_equal(logits_of(decoder_of(arch, tmp_path), 2, [1], before=same_beginning), alone)


@pytest.mark.parametrize("arch", ["llama", "lfm2"])
def test_logits_do_not_depend_on_the_number_of_slots(arch: str, tmp_path: Path) -> None:
    four = logits_of(decoder_of(arch, tmp_path, slots=4), 1, neighbours=[0])
    assert np.array_equal(logits_of(decoder_of(arch, tmp_path, slots=16), 12, neighbours=[3, 15]), four)


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_logits_of_one_slot_are_those_of_the_decoder(arch: str, tmp_path: Path) -> None:
    """With more slots, the first have the same bits, and the others differ by rounding."""
    single, text = Decoder(*model_of(arch, tmp_path), ctx=CTX), prompt(76, 3)
    expected = np.array(
        [single.feed(text[:70]).copy(), *(single.feed([token]).copy() for token in text[70:])]
    )
    assert np.array_equal(logits_of(decoder_of(arch, tmp_path, slots=1), 0), expected)
    found = logits_of(decoder_of(arch, tmp_path), 0)
    assert np.array_equal(found[0], expected[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_the_order_and_the_share_of_a_process_change_nothing(arch: str, tmp_path: Path) -> None:
    decoder = decoder_of(arch, tmp_path)
    expected = texts(decoder, REQUESTS)
    assert texts(decoder, REQUESTS[::-1])[::-1] == expected
    assert texts(decoder, REQUESTS[::2]) == expected[::2]
    assert [texts(decoder, [each])[0] for each in REQUESTS] == expected


def test_samples_of_a_prompt_depend_on_their_seeds(tmp_path: Path) -> None:
    decoder = decoder_of("llama", tmp_path)
    options = [SamplingOptions(n=8, temp=2.0, top_k=0, seed=seed) for seed in (1, 2, 1, 3)]
    first, second, again, third = texts(decoder, [Request(BEGINNING, each) for each in options])
    assert first == again and len({tuple(each) for each in (first, second, third)}) == 3


@pytest.mark.parametrize("kernels", ["reference", "torch-cpu"])
def test_other_kernels(kernels: str, tmp_path: Path) -> None:
    if kernels == "torch-cpu":
        pytest.importorskip("torch")
    greedy = [Request(tokens, SamplingOptions(temp=0, n=3)) for tokens in PROMPTS[:4]]
    for arch in ("llama", "qwen35"):
        assert texts(decoder_of(arch, tmp_path, kernels=kernels), greedy) == texts(
            decoder_of(arch, tmp_path), greedy
        )


def test_changed_weights_are_used(tmp_path: Path) -> None:
    h = small(ctx=CTX)
    arrays = small_weights(h)
    decoder, asked = (
        BatchDecoder(h, arrays, ctx=CTX, slots=2),
        [Request([1, 2, 3], SamplingOptions(temp=0, n=9))],
    )
    texts(decoder, asked)
    changed = small_weights(h, seed=5)
    for name, array in arrays.items():
        array[...] = changed[name]
    assert texts(decoder, asked) == texts(BatchDecoder(h, changed, ctx=CTX, slots=2), asked)


# ---- how much is computed ------------------------------------------------------


class Counting(BatchDecoder):
    """A decoder that counts its steps, and the tokens of prompts that it computes."""

    steps = read = 0

    def step(self, tokens):
        self.steps += 1
        return super().step(tokens)

    def watch_prompts(self) -> None:
        feed = self._prompts.feed

        def count(tokens):
            self.read += len(tokens)
            return feed(tokens)

        self._prompts.feed = count  # type: ignore[method-assign]


def counting(arch: str, folder: Path, slots: int = 4, ctx: int = 200) -> Counting:
    decoder = Counting(*model_of(arch, folder), ctx=ctx, slots=slots)
    decoder.watch_prompts()
    return decoder


def test_a_slot_is_used_again_as_soon_as_its_text_ends(tmp_path: Path) -> None:
    """One long text and seven short ones take as many steps as the long one."""
    decoder = counting("llama", tmp_path, slots=2)
    counts = [24, *[4] * 7]
    requests = [Request([9, index], SamplingOptions(temp=0, n=count)) for index, count in enumerate(counts)]
    finished = list(complete(decoder, requests))
    assert decoder.steps == 23
    assert finished[-1].index == 0 and {len(each.tokens) for each in finished[:-1]} == {4}


@pytest.mark.parametrize("arch", ["llama", "qwen35", "granitehybrid"])
def test_a_shared_beginning_is_computed_once(arch: str, tmp_path: Path) -> None:
    decoder, beginning = counting(arch, tmp_path), prompt(130, 5)
    tails = [[1, 2], [3], [4, 5, 6]]
    options = SamplingOptions(temp=0, n=2)
    shuffled = [Request([*beginning, *tails[i % 3]], options) for i in range(9)]
    texts(decoder, shuffled)
    # the two whole chunks of 64 tokens are read once, the rest of each prompt once, and equal prompts once
    assert decoder.read == 128 + sum(2 + len(tail) for tail in tails)


# ---- how texts end -------------------------------------------------------------


def test_stop_reasons(tmp_path: Path) -> None:
    decoder = decoder_of("llama", tmp_path)
    tokens = completion(decoder, [1, 2], n=5).tokens
    assert completion(decoder, [1, 2], n=5) == Completion(0, tokens, "n")
    assert completion(decoder, [1, 2], n=0) == Completion(0, [], "n")
    end = tokens[3]
    before = tokens[: tokens.index(end)]
    assert completion(decoder, [1, 2], ends=[end]) == Completion(0, before, "end")
    full = completion(decoder, [1, 2])
    assert full.stop_reason == "ctx" and len(full.tokens) == CTX - 2


@pytest.mark.parametrize("length", [CTX - 1, CTX, CTX + 1, 3 * CTX])
def test_prompts_that_fill_the_context(length: int, tmp_path: Path) -> None:
    """As in `Generation`; others in the batch are not affected."""
    decoder = decoder_of("qwen35", tmp_path)
    requests = [Request(prompt(length), SamplingOptions(temp=0, n=4)), REQUESTS[1]]
    found = {one.index: one for one in complete(decoder, requests)}
    assert found[0].stop_reason == "ctx" and len(found[0].tokens) == max(0, CTX - length)
    assert found[1].tokens == texts(decoder, REQUESTS[1:2])[0]


def test_the_caller_can_stop_a_text(tmp_path: Path) -> None:
    decoder, seen = decoder_of("llama", tmp_path), dict[int, list[int]]()

    def stops(index: int, token: int) -> bool:
        seen.setdefault(index, []).append(token)
        return index == 1 and len(seen[1]) == 2

    requests = [Request(tokens, SamplingOptions(temp=0, n=6)) for tokens in PROMPTS[:3]]
    found = {one.index: one for one in complete(decoder, requests, (), stops)}
    assert {index: one.stop_reason for index, one in found.items()} == {0: "n", 1: "stop", 2: "n"}
    assert {index: one.tokens for index, one in found.items()} == seen and len(seen[1]) == 2


def test_no_requests(tmp_path: Path) -> None:
    assert list(complete(decoder_of("llama", tmp_path), [])) == []


def test_bad_requests_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    decoder, options = counting("llama", tmp_path), SamplingOptions(n=2, seed=1)
    vocab = decoder.h.vocab
    for bad, code, text in [
        (Request([], options), "no-prompt", "prompt 2 of 2 has no tokens"),
        (Request([1, vocab], options), "unknown-token", f"got {vocab}"),
        (Request([1, -1], options), "unknown-token", "got -1"),
        (Request([1], SamplingOptions(ctx_shift=True)), "no-context-shift", "cannot be shifted"),
    ]:
        with raises(code, match=text):
            list(complete(decoder, [Request([1], options), bad]))
    assert decoder.read == 0


# ---- memory --------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
def test_memory_is_as_planned(arch: str, tmp_path: Path) -> None:
    h, arrays = model_of(arch, tmp_path)
    one, many = (BatchDecoder.plan(h, CTX, slots) for slots in (1, 9))
    single = Decoder.plan(h, CTX)
    table = h.rope_table(CTX).nbytes
    assert one.caches - table == 2 * (single.caches - table)
    assert many.caches - table == 10 * (single.caches - table)
    arena = allocate(many.arena)
    assert texts(BatchDecoder(h, arrays, ctx=CTX, slots=9, arena=arena), REQUESTS) == texts(
        decoder_of(arch, tmp_path, slots=9), REQUESTS
    )
