"""Decoding with states: the same logits however tokens come, and nothing left of another text."""

from pathlib import Path

import numpy as np
import pytest

from llamatrain.gguf.reader import open_gguf
from llamatrain.sample.decoder import Decoder, Generation
from llamatrain.sample.options import SamplingOptions
from tests.helpers.architecture_models import prompt, shape_of, weights, written
from tests.helpers.cli import run
from tests.helpers.errors import raises
from tests.helpers.small_models import loaded

ARCHITECTURES = ["qwen35", "lfm2", "granitehybrid", "falcon-h1"]
IDS = prompt(60)


def decoder_of(arch: str, folder: Path, ctx: int = 64) -> Decoder:
    shape = shape_of(arch, "a")
    h, arrays = loaded(open_gguf(written(folder / "model.gguf", shape, weights(shape))))
    return Decoder(h, arrays, ctx=ctx)


def one_by_one(decoder: Decoder, ids: list[int]) -> np.ndarray:
    return np.array([decoder.feed([token]).copy() for token in ids])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chunks_are_single_tokens(arch: str, tmp_path: Path) -> None:
    decoder = decoder_of(arch, tmp_path)
    expected = one_by_one(decoder, IDS)
    for cuts in ([60], [7, 60], [1, 9, 10, 33, 60], [59, 60]):
        decoder.reset()
        for first, last in zip([0, *cuts], cuts, strict=False):
            found = decoder.feed(IDS[first:last]).copy()
            np.testing.assert_allclose(found, expected[last - 1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_another_text_starts_afresh(arch: str, tmp_path: Path) -> None:
    decoder = decoder_of(arch, tmp_path)
    expected = one_by_one(decoder, IDS[:20])
    decoder.reset()
    decoder.feed(IDS[30:50])
    decoder.reset()
    assert np.array_equal(one_by_one(decoder, IDS[:20]), expected)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_state_cannot_go_back(arch: str, tmp_path: Path) -> None:
    """The same beginning is kept if all of it was read, and computed again if not."""
    decoder = decoder_of(arch, tmp_path)
    decoder.feed(IDS[:20])
    assert decoder.rewind(IDS[:30]) == 20
    kept = decoder.feed(IDS[20:30]).copy()
    assert decoder.rewind([*IDS[:10], 5, 6, 7]) == 0
    assert decoder.rewind(IDS[:30]) == 0
    np.testing.assert_allclose(decoder.feed(IDS[:30]), kept, rtol=0, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_full_context_is_refused(arch: str, tmp_path: Path) -> None:
    decoder = decoder_of(arch, tmp_path, ctx=32)
    with raises("context-full"):
        list(Generation(decoder, IDS[:10], SamplingOptions(n=60, temp=0), keep=4))
    stopped = Generation(decoder, IDS[:10], SamplingOptions(n=60, temp=0))
    assert len(list(stopped)) == 22 and stopped.stop_reason == "ctx"


def test_the_command_refuses_to_shift(tmp_path: Path) -> None:
    decoder_of("qwen35", tmp_path)
    given = ("generate", tmp_path / "model.gguf", "--prompt", "to be", "-n", 60, "--ctx", 32, "--temp", 0)
    refused = run(*given, "--ctx-shift")
    assert refused.code == 2 and "--ctx-shift is not possible with a qwen35" in refused.err
    done = run(*given)
    assert done.code == 0 and "raise --ctx" in done.err and "--ctx-shift" not in done.err
