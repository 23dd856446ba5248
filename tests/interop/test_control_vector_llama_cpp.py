"""llama.cpp loads a control vector with the function of its own programs, and its logits change as ours do.

`xllamacpp` has no name for this in Python, so its library is called directly.
"""

import ctypes
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters.control_vector import add_directions, load_control_vectors
from llamatrain.adapters.load_adapted import load_with_adapters
from llamatrain.adapters.options import AdapterOptions, ControlOptions
from llamatrain.commands.logit_diff import compute_logits
from llamatrain.gguf.reader import open_gguf
from tests.helpers.cli import ran
from tests.helpers.small_models import small, tokens, weights, written

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(sys.platform != "linux", reason="the layout of C++ objects is that of Linux"),
]
SHORT_STRINGS = "_Z15common_tokenizePK11llama_vocabRKSsbb"  # its name differs with other strings
LOAD = "_Z26common_control_vector_loadRKSt6vectorI31common_control_vector_load_infoSaIS0_EE"
H = small(layers=4)
IDS = tokens(20)


class LoadInfo(ctypes.Structure):
    """A factor and a path: a std::string as wheels for older systems have it, which is a pointer."""

    _fields_ = [("strength", ctypes.c_float), ("path", ctypes.c_char_p)]


class Vector(ctypes.Structure):
    """A std::vector."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("begin", "end", "capacity")]


class LoadedVector(ctypes.Structure):
    _fields_ = [("width", ctypes.c_int), ("data", Vector)]


class Parameters(ctypes.Structure):
    """Parameters of llama.cpp as bytes: no shorter than any version's, and the last argument where they are one."""

    _fields_ = [("words", ctypes.c_uint64 * 256)]


class Batch(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 7)]


def library() -> ctypes.CDLL:
    package = importlib.util.find_spec("xllamacpp")
    if not package or not package.submodule_search_locations:
        pytest.skip("xllamacpp is not installed: there is no llama.cpp to compare with")
    import xllamacpp  # noqa: F401  # loads what its library needs

    found = ctypes.CDLL(f"{package.submodule_search_locations[0]}/xllamacpp.abi3.so")
    if not (hasattr(found, LOAD) and hasattr(found, SHORT_STRINGS)):
        pytest.skip("this llama.cpp does not export what loads control vectors, or has other strings")
    pointer = ctypes.c_void_p
    for name, kind, arguments in (
        (LOAD, LoadedVector, [pointer]),
        ("llama_model_default_params", Parameters, []),
        ("llama_context_default_params", Parameters, []),
        ("llama_model_load_from_file", pointer, [ctypes.c_char_p, Parameters]),
        ("llama_init_from_model", pointer, [pointer, Parameters]),
        (
            "llama_set_adapter_cvec",
            ctypes.c_int32,
            [pointer, pointer, ctypes.c_size_t, *[ctypes.c_int32] * 3],
        ),
        ("llama_batch_get_one", Batch, [pointer, ctypes.c_int32]),
        ("llama_decode", ctypes.c_int32, [pointer, Batch]),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [pointer, ctypes.c_int32]),
        ("llama_free", None, [pointer]),
        ("llama_model_free", None, [pointer]),
    ):
        getattr(found, name).restype, getattr(found, name).argtypes = kind, arguments
    return found


def load_vector(llama: ctypes.CDLL, path: Path, strength: float) -> LoadedVector:
    """As `common_init_from_params` does it with --control-vector-scaled."""
    infos = (LoadInfo * 1)(LoadInfo(strength, str(path).encode()))
    begin = ctypes.addressof(infos)
    end = begin + ctypes.sizeof(infos)
    return getattr(llama, LOAD)(ctypes.byref(Vector(begin, end, end)))


def their_logits(model: Path, vector: tuple[Path, float] | None) -> np.ndarray:
    """Of the last token, by llama.cpp."""
    llama = library()
    loaded = llama.llama_model_load_from_file(str(model).encode(), llama.llama_model_default_params())
    context = llama.llama_init_from_model(loaded, llama.llama_context_default_params())
    assert loaded and context
    if vector:
        made = load_vector(llama, *vector)
        count = (made.data.end - made.data.begin) // 4
        assert made.width == H.embd and count == made.width * (H.layers - 1)
        assert llama.llama_set_adapter_cvec(context, made.data.begin, count, made.width, 1, H.layers) == 0
    ids = (ctypes.c_int32 * len(IDS))(*IDS)
    assert llama.llama_decode(context, llama.llama_batch_get_one(ids, len(IDS))) == 0
    found = np.array(llama.llama_get_logits_ith(context, -1)[: H.vocab], np.float32)
    llama.llama_free(context)
    llama.llama_model_free(loaded)
    return found


def our_logits(model: Path, vector: tuple[Path, float] | None) -> np.ndarray:
    gguf = open_gguf(model)
    h, leaves, arrays = load_with_adapters(gguf, AdapterOptions(), 1)
    if vector:
        leaves, arrays = add_directions(
            leaves, arrays, load_control_vectors(ControlOptions(control_vector_scaled=(vector,)), h)
        )
    return compute_logits(gguf, h, leaves, arrays, IDS, 1)[-1]


@pytest.mark.parametrize("method", ["mean", "pca", "trained"])
def test_it_loads_and_has_the_same_effect(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = written(Path("m.gguf"), H, weights(H))
    Path("pos.txt").write_text("hello world\nabc\n")
    Path("neg.txt").write_text("good bye\nxyz\n")
    ran("control-vector", "m.gguf", "pos.txt", "neg.txt", "--method", method, "--out", "v.gguf")
    plain = their_logits(model, None)
    np.testing.assert_allclose(our_logits(model, None), plain, atol=2e-2)
    for scale in (1.0, -1.5):
        vector = (Path("v.gguf"), scale)
        theirs, ours = their_logits(model, vector), our_logits(model, vector)
        np.testing.assert_allclose(ours, theirs, atol=2e-2)
        assert np.abs(theirs - plain).max() > 0.3
