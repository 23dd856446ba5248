"""Encoding by importance: the error that counts is smaller than without it, and than what llama.cpp writes."""

import ctypes
import importlib.util

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from llamatrain.gguf.quants import decode, encode
from llamatrain.gguf.quants.kinds import BY_IMPORTANCE
from llamatrain.gguf.types import TYPES, GgmlType, type_by_name

KINDS = [TYPES[number] for number in sorted(BY_IMPORTANCE)]
LAWS = ("normal", "student", "shifted")


def name(kind: GgmlType) -> str:
    return kind.name


def weights(law: str, rows: int = 16, columns: int = 1024) -> np.ndarray:
    rng = np.random.default_rng(1)
    x = rng.standard_t(4, (rows, columns)) if law == "student" else rng.standard_normal((rows, columns))
    return (x + (3.0 if law == "shifted" else 0.0)).astype(np.float32)


def importances(columns: int = 1024) -> np.ndarray:
    return np.random.default_rng(2).gamma(0.5, 1.0, columns).astype(np.float32)


def error(x: np.ndarray, w: np.ndarray, raw: np.ndarray, kind: GgmlType) -> float:
    """The mean squared error that counts, by the mean square of the weights."""
    difference = decode(raw, kind).astype(np.float64) - x
    return float((w * difference**2).sum() / (w * x.astype(np.float64) ** 2).sum())


def by_llama_cpp(x: np.ndarray, w: np.ndarray, kind: GgmlType) -> np.ndarray:
    package = importlib.util.find_spec("xllamacpp")
    if not package or not package.submodule_search_locations:
        pytest.skip("xllamacpp is not installed: there is no llama.cpp to compare with")
    import xllamacpp  # noqa: F401  # loads what its library needs

    function = ctypes.CDLL(f"{package.submodule_search_locations[0]}/xllamacpp.abi3.so").ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    raw = np.zeros((len(x), kind.row_bytes(x.shape[1])), np.uint8)
    assert function(kind.number, x.ctypes.data, raw.ctypes.data, 0, *x.shape, w.ctypes.data) == raw.size
    return raw


@pytest.mark.parametrize("kind", KINDS, ids=name)
@pytest.mark.parametrize("law", LAWS)
def test_the_error_that_counts_is_smaller(kind: GgmlType, law: str) -> None:
    x, w = weights(law), importances()
    weighted, plain = (error(x, w, encode(x, kind, importance=each), kind) for each in (w, None))
    # far from zero, a type without offsets uses few of its codes, whatever is important
    assert weighted < (1.001 if law == "shifted" else 0.9) * plain


@pytest.mark.parametrize("kind", KINDS, ids=name)
@pytest.mark.parametrize("law", LAWS)
def test_no_error_is_larger_than_that_of_llama_cpp(kind: GgmlType, law: str) -> None:
    x, w = weights(law), importances()
    ours, theirs = (
        error(x, w, raw, kind) for raw in (encode(x, kind, importance=w), by_llama_cpp(x, w, kind))
    )
    assert ours <= 1.02 * theirs


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_each_row_may_have_its_own_importances(kind: GgmlType) -> None:
    x, w = weights("normal", 4), importances()
    each = np.stack([w, w[::-1], w, np.ones_like(w)])
    together = encode(x, kind, importance=each)
    alone = [encode(row[None], kind, importance=own)[0] for row, own in zip(x, each, strict=True)]
    assert_array_equal(together, alone)
    assert_array_equal(encode(x, kind, importance=each, threads=2), together)


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_only_ratios_count(kind: GgmlType) -> None:
    """Powers of two change no digit, and the smallest and largest sums neither vanish nor overflow."""
    x, w = weights("student", 4), importances()
    expected = encode(x, kind, importance=w)
    for factor in (2.0**-100, 2.0**100):
        assert_array_equal(encode(x, kind, importance=w * np.float32(factor)), expected)


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_weights_that_no_data_uses_are_near_what_they_were(kind: GgmlType) -> None:
    x, w = weights("normal", 8), importances()
    w[:512] = 0.0
    unused = np.zeros_like(w)
    unused[:512] = 1.0
    assert error(x, unused, encode(x, kind, importance=w), kind) < 0.2
    nothing = encode(x, kind, importance=np.zeros_like(w))
    assert error(x, np.ones_like(w), nothing, kind) < 0.1


def test_other_types_ignore_importances() -> None:
    x, w = weights("normal", 4), importances()
    for other in ("Q8_0", "F16", "BF16", "F32"):
        kind = type_by_name(other)
        assert_array_equal(encode(x, kind, importance=w), encode(x, kind))
