"""Our adapters in llama.cpp itself: the logits of base and adapter, and the merged file's."""

import os
from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters import gguf
from llamatrain.adapters.adapter import Adapter
from llamatrain.adapters.read import read_adapter
from llamatrain.data.tokenizer import load as load_tokenizer
from llamatrain.gguf.reader import open_gguf
from llamatrain.sample.decoder import Decoder
from tests.helpers.adapter_files import adapter, linear, merged
from tests.helpers.cli import ran
from tests.helpers.llama_cpp import Served
from tests.helpers.small_models import EMBEDDINGS, OUTPUT, loaded, small, tokens, weights, written

pytestmark = pytest.mark.llama_cpp

H = small()
MATRICES = [EMBEDDINGS, *linear(H), OUTPUT]
IDS = tokens(40)


def made(folder: Path, kind: str = "f32", names: list[str] = MATRICES, alpha: float = 6) -> tuple[Path, Path]:
    gguf.write_adapter(folder / "a.gguf", adapter(H, names, rank=3, alpha=alpha), kind)  # type: ignore[arg-type]
    return written(folder / "base.gguf", H, weights(H)), folder / "a.gguf"


def of_llama_cpp(model: Path, **settings: object) -> np.ndarray:
    llama_cpp = pytest.importorskip("llama_cpp")
    unset = {f"yarn_{key}": -1.0 for key in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")}
    fixed = {
        "n_ctx": 64,
        "logits_all": True,
        "type_k": 0,
        "type_v": 0,
        "n_threads": 1,
        "verbose": False,
        **unset,
    }
    witness = llama_cpp.Llama(os.fspath(model), **fixed, **settings)
    witness.eval(IDS)
    found = np.array(witness.scores[: len(IDS)])
    witness.close()
    return found


def ours(model: Path) -> np.ndarray:
    h, arrays = loaded(open_gguf(model))
    decoder = Decoder(h, arrays, ctx=64)
    return np.array([decoder.feed([token]).copy() for token in IDS])


@pytest.mark.parametrize(("kind", "alpha", "scale"), [("f32", 6, 1.0), ("f32", 0, 0.5), ("f16", 6, -0.5)])
def test_logits_of_base_and_adapter(tmp_path: Path, kind: str, alpha: float, scale: float) -> None:
    base, path = made(tmp_path, kind, alpha=alpha)
    ran("export-lora", base, "--lora-scaled", path, scale, "--out", tmp_path / "m.gguf")
    expected = of_llama_cpp(base, lora_path=os.fspath(path), lora_scale=scale)
    found, limit = (
        ours(tmp_path / "m.gguf"),
        2e-3 if kind == "f32" else 1e-2,
    )  # it rounds what meets half floats to such
    assert np.abs(found - expected).max() <= limit < 0.5 < np.abs(found - ours(base)).max()
    assert np.abs(of_llama_cpp(tmp_path / "m.gguf") - expected).max() <= limit


def off_a_server(base: Path, path: Path, scale: float, expected: np.ndarray) -> np.ndarray:
    """How far its logarithms of probabilities with the adapter are from those of the expected logits."""
    xllamacpp = pytest.importorskip("xllamacpp")
    params, info = xllamacpp.CommonParams(), xllamacpp.CommonAdapterLoraInfo()
    info.path, info.scale = os.fspath(path), scale
    params.model.path, params.hostnames, params.port, params.lora_adapters = (
        os.fspath(base),
        ["127.0.0.1"],
        0,
        [info],
    )
    params.n_ctx, params.warmup, params.verbosity, params.cpuparams.n_threads = 256, False, 0, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    tokenizer = load_tokenizer(open_gguf(base).metadata)
    # The server gives no probabilities of a token that ends the text or is a part of a character.
    last = next(
        place for place in range(1, len(IDS)) if b"!" <= tokenizer.decode([expected[place].argmax()]) <= b"~"
    )
    server = xllamacpp.Server(params)
    asked = {"prompt": IDS[: last + 1], "temperature": 0.0, "n_predict": 1, "n_probs": 258}
    first = Served(server.listening_address).post("completion", **asked)["completion_probabilities"][0][
        "top_logprobs"
    ]
    del server
    found = expected[last].astype(np.float64) - expected[last].max()
    found -= np.log(np.exp(found).sum())
    assert len(first) == 258
    return np.array([abs(found[each["id"]] - each["logprob"]) for each in first])


def beside(base: Path, adapters: list[Adapter]) -> np.ndarray:
    h, arrays = loaded(open_gguf(base))
    decoder = Decoder(h, merged(arrays, adapters), ctx=64)
    return np.array([decoder.feed([token]).copy() for token in IDS])


def test_a_server_with_the_adapter(tmp_path: Path) -> None:
    base, path = made(tmp_path)
    assert off_a_server(base, path, 0.5, beside(base, [read_adapter(path, H).scale_by(0.5)])).max() <= 2e-3


@pytest.mark.parametrize("kind", ["iq4_nl", "iq4_xs"])
def test_a_server_with_four_bits_and_an_adapter_with_norms(tmp_path: Path, kind: str) -> None:
    """It takes both, and of the adapter leaves the norms out, as the file says; its products round what meets four bits."""
    h = small(embd=256, heads=4, head_size=64, ff=256, layers=1)
    base, path = written(tmp_path / "base.gguf", h, weights(h)), tmp_path / "a.gguf"
    gguf.write_adapter(path, adapter(h, [*linear(h), "output_norm.weight"]).scale_by(3))
    ran("export-lora", base, "--lora-scaled", path, 0, "--type", kind, "--out", tmp_path / "four.gguf")
    assert open_gguf(tmp_path / "four.gguf").tensors["blk.0.attn_q.weight"].type.name == kind.upper()
    whole = read_adapter(path, h)
    without, none = (beside(tmp_path / "four.gguf", each) for each in ([whole.without(whole.norm_names)], []))
    off = off_a_server(tmp_path / "four.gguf", path, 1.0, without).mean()
    assert off < 0.1 * np.abs(without - none).mean()


@pytest.mark.parametrize(
    ("of", "kind"),
    [("F32", "q8_0"), ("F32", "q4_k"), ("Q4_K", "keep"), ("Q6_K", "f16"), ("F16", "bf16"), ("BF16", "q5_1")],
)
def test_merged_files_of_each_kind_open(tmp_path: Path, of: str, kind: str) -> None:
    h = small(embd=256, heads=4, head_size=64, ff=256, layers=1)
    base = written(tmp_path / "base.gguf", h, weights(h), of)
    gguf.write_adapter(tmp_path / "a.gguf", adapter(h, linear(h)))
    ran("export-lora", base, "--lora", tmp_path / "a.gguf", "--type", kind, "--out", tmp_path / "m.gguf")
    found, theirs = ours(tmp_path / "m.gguf"), of_llama_cpp(tmp_path / "m.gguf")
    spread = np.abs(found - ours(base)).mean()
    assert np.abs(found - theirs).mean() < 0.2 * spread
