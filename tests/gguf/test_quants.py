"""Quantised weights: decoded values have the bits of the `gguf` package, K-quants lie closer than llama.cpp's own."""

import ctypes
import importlib.util
from platform import machine

import gguf
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from llamatrain.gguf import quants
from llamatrain.gguf.quants import QuantError, decode, encode
from llamatrain.gguf.quants.kinds import COMPILED, FROM_EXTREMES, SEARCHED_SCALES
from llamatrain.gguf.types import TYPES, GgmlType, type_by_name

NUMBERS = {"F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
NOT_IN_GGUF = ("Q8_1", "Q8_K", "Q1_0")  # Q8_1 exists only inside products; no one decodes it
DECODED = [kind for kind in TYPES.values() if kind.name not in (*NUMBERS, *NOT_IN_GGUF)]
SOME = [TYPES[number] for number in sorted(COMPILED)]
FITTED = [TYPES[number] for number in sorted(SEARCHED_SCALES)]
# half floats: zeros, denormals, the largest, infinities, NaN
EXTREME_HALVES = np.array(
    [0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x7C01], np.uint16
)


def name(kind: GgmlType) -> str:
    return kind.name


def random_rows(kind: GgmlType, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * kind.block_bytes), np.uint8)


def by_gguf(raw: np.ndarray, kind: GgmlType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(raw, gguf.GGMLQuantizationType(kind.number))


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Nearest even, by the definition: what lies between two neighbours goes to the nearer or the even one."""
    below = values.view(np.uint32) >> 16
    rest = values.view(np.uint32) & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (below % 2 == 1))
    return np.where(np.isnan(values), below | 0x40, below + up).astype(np.uint16)


def widened(bf16: np.ndarray) -> np.ndarray:
    return (bf16.astype(np.uint32) << 16).view(np.float32)


def same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Any NaN is as good as another."""
    assert_array_equal(np.isnan(got), np.isnan(want))
    number = ~np.isnan(want)
    assert_array_equal(got.view(np.uint32)[number], want.view(np.uint32)[number])


# ---- decoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DECODED, ids=name)
def test_random_blocks_decode_to_the_bits_of_gguf(kind: GgmlType) -> None:
    raw = random_rows(kind, 33, 700 if kind.block_size == 1 else 6)
    want = by_gguf(raw, kind)
    same_bits(decode(raw, kind), want)
    same_bits(widened(decode(raw, kind, bf16=True)), widened(to_bf16(want)))


@pytest.mark.parametrize("kind", [kind for kind in DECODED if kind.block_size > 1], ids=name)
def test_extreme_scales_decode_to_the_bits_of_gguf(kind: GgmlType) -> None:
    raw = random_rows(kind, len(EXTREME_HALVES), 8).reshape(len(EXTREME_HALVES), 8, kind.block_bytes)
    extreme = EXTREME_HALVES.view(np.uint8).reshape(-1, 1, 2)
    for at in range(0, 8, 2):  # scales stand first or last, alone or in twos
        places = (slice(0, 2), slice(2, 4), slice(-2, None), slice(-4, -2))
        raw[:, at, places[at // 2]] = extreme[:, 0]
        raw[:, at + 1, places[at // 2]] = np.roll(extreme, 3, axis=0)[:, 0]
    raw = raw.reshape(len(raw), -1)
    same_bits(decode(raw, kind), by_gguf(raw, kind))


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_decode_to_float32(number: str) -> None:
    values = np.array([[-100, 0, 1, 77], [5, -6, 7, 127]]).astype(NUMBERS[number])
    assert_array_equal(decode(values.view(np.uint8), type_by_name(number)), values.astype(np.float32))


def test_types_that_only_ggml_defines() -> None:
    rng = np.random.default_rng(1)
    codes, d = rng.integers(-128, 128, (3, 256), np.int8), np.array([[0.5], [-2.0], [1e-9]], np.float32)
    raw = np.concatenate([d.view(np.uint8), codes.view(np.uint8), np.zeros((3, 32), np.uint8)], axis=1)
    assert_array_equal(decode(raw, type_by_name("Q8_K")), d * codes)
    signs = rng.integers(0, 2, (3, 128), np.uint8)
    halves = np.array([[0.5], [-2.0], [3.0]], np.float16)
    raw = np.concatenate([halves.view(np.uint8), np.packbits(signs, axis=1, bitorder="little")], axis=1)
    assert_array_equal(decode(raw, type_by_name("Q1_0")), halves.astype(np.float32) * (2.0 * signs - 1))
    with pytest.raises(QuantError, match="Q8_1"):
        decode(np.zeros((1, 40), np.uint8), type_by_name("Q8_1"))


@pytest.mark.parametrize("kind", [*SOME, type_by_name("IQ2_S")], ids=name)
def test_panels_are_parts_of_the_whole_and_threads_change_nothing(kind: GgmlType) -> None:
    wide = kind.block_size if kind.block_size > 1 else 48
    size = kind.row_bytes(wide)
    raw = random_rows(kind, 50, 5 * wide // kind.block_size)
    for bf16 in (False, True):
        whole = decode(raw, kind, bf16=bf16)
        panel = decode(raw[7:43, size : 4 * size], kind, bf16=bf16, threads=2)
        assert_array_equal(
            panel.view(np.uint8), np.ascontiguousarray(whole[7:43, wide : 4 * wide]).view(np.uint8)
        )
    many = np.tile(raw, (40, 1))
    assert_array_equal(
        decode(many, kind, threads=1).view(np.uint8), decode(many, kind, threads=2).view(np.uint8)
    )


def test_shapes_and_results_given() -> None:
    kind = type_by_name("Q4_0")
    raw = random_rows(kind, 6, 2).reshape(2, 3, -1)
    whole = decode(raw, kind)
    assert whole.shape == (2, 3, 64)
    out = np.zeros((3, 64), np.float32)
    assert decode(raw[1], kind, out=out) is out
    assert_array_equal(out.view(np.uint32), whole[1].view(np.uint32))
    assert decode(raw[:, :0], kind).shape == (2, 0, 64)
    assert decode(raw[..., :0], kind).shape == (2, 3, 0)
    assert encode(np.zeros((3, 0), np.float32), kind).shape == (3, 0)
    assert encode(np.zeros_like(whole), kind).shape == raw.shape
    with pytest.raises(ValueError, match="uint16"):
        encode(decode(raw, kind, bf16=True), kind)
    with pytest.raises(ValueError, match="float32"):
        decode(raw, kind, out=np.zeros((2, 3, 64)))
    with pytest.raises(QuantError, match="37 bytes cannot be Q4_0, whose blocks have 18 bytes"):
        decode(np.zeros((1, 37), np.uint8), kind)


# ---- encoding -----------------------------------------------------------------------------------


def weights(law: str, rows: int = 64, columns: int = 1024) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = (
        rng.standard_t(3, (rows, columns))
        if law in ("student", "channels")
        else rng.standard_normal((rows, columns))
    )
    if law == "outlier":
        x[np.arange(rows), rng.integers(0, columns, rows)] = 250.0
    if law == "channels":
        x *= np.exp(rng.standard_normal((1, columns)))
    if law == "shifted":
        x += 3.0
    return (0.02 * x).astype(np.float32)


LAWS = ("normal", "student", "outlier", "channels", "shifted")


def error(x: np.ndarray, raw: np.ndarray, kind: GgmlType) -> float:
    """Root mean square of the error, in terms of the weights' own."""
    difference = by_gguf(raw, kind).astype(np.float64) - x
    return float(np.sqrt(np.mean(difference**2) / np.mean(x.astype(np.float64) ** 2)))


@pytest.mark.parametrize("kind", [TYPES[number] for number in sorted(FROM_EXTREMES)], ids=name)
def test_simple_types_are_written_as_gguf_writes_them(kind: GgmlType) -> None:
    number = gguf.GGMLQuantizationType(kind.number)
    for law in LAWS:
        for scale in (1.0, 1e3, 1e-5, 1e-7, 1e-30, 3e-38):
            x = weights(law) * np.float32(scale)
            x[3, :320], x[4, :320] = 0.0, -0.25 * scale
            with np.errstate(all="ignore"):
                ours, theirs = encode(x, kind), gguf.quantize(x, number).view(np.uint8)
            if scale < 1e-37 and machine().lower() not in ("x86_64", "amd64"):
                # numpy divides by a step that is zero; what infinity is as an integer depends on the processor
                ours, theirs = decode(ours, kind), by_gguf(theirs, kind)
            assert_array_equal(ours, theirs, f"{law} x {scale}")


def test_halves_of_any_length_round_to_even() -> None:
    edges = np.array([0, 1, 2, 3, 0.5, 1023, 1023.5, 1024.5, 2.0**14, 2.0**15 - 8]) * 2.0**-24
    x = np.concatenate(
        [edges, -edges, [65504.0, 2049.0, 2051.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1e-45]]
    ).astype(np.float32)[None]
    for columns in (x.shape[1], 1, 16, 17):
        some = x[:, :columns]
        assert_array_equal(encode(some, type_by_name("F16")), some.astype(np.float16).view(np.uint8))
        assert_array_equal(
            encode(some, type_by_name("BF16")).view(np.uint16), to_bf16(np.ascontiguousarray(some))
        )
        assert_array_equal(encode(some, type_by_name("F32")).view(np.float32), some)


# error() of what llama.cpp's reference quantiser writes for these weights
REFERENCE = {
    "Q2_K": (0.29610, 0.35094, 0.12866, 0.35456, 0.12509),
    "Q3_K": (0.15149, 0.19202, 0.06527, 0.16286, 0.10194),
    "Q4_K": (0.07147, 0.09351, 0.02495, 0.09682, 0.02787),
    "Q5_K": (0.03627, 0.04731, 0.02388, 0.05152, 0.01386),
    "Q6_K": (0.01780, 0.02567, 0.01706, 0.02885, 0.01203),
    "IQ4_NL": (0.07649, 0.10179, 0.05482, 0.10536, 0.06115),
    "IQ4_XS": (0.07703, 0.10289, 0.08049, 0.10691, 0.06171),
}


@pytest.mark.parametrize("kind", FITTED, ids=name)
def test_what_is_fitted_is_nearer_than_the_reference(kind: GgmlType) -> None:
    for law, reference in zip(LAWS, REFERENCE[kind.name], strict=True):
        x = weights(law)
        assert error(x, encode(x, kind), kind) <= reference, law


VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.0])


def best_error(x: np.ndarray) -> float:
    """What no IQ4_NL can be under by more than the scale's rounding: each block with the best of very many scales."""
    blocks = x.reshape(-1, 32).astype(np.float64)
    peak, best = np.abs(blocks).max(1, keepdims=True), np.full(len(blocks), np.inf)
    for scale in np.concatenate([1 / np.linspace(60, 160, 250), -1 / np.linspace(60, 160, 250)]):
        near = VALUES[np.abs(blocks[..., None] / (peak * scale)[..., None] - VALUES).argmin(-1)]
        left = (blocks**2).sum(1) - (near * blocks).sum(1) ** 2 / (near**2).sum(1)
        best = np.minimum(best, left)
    return float(np.sqrt(best.sum() / (blocks**2).sum()))


@pytest.mark.parametrize("law", LAWS)
def test_iq4_nl_is_next_to_the_best_that_can_be(law: str) -> None:
    x = weights(law, 8, 512)
    assert error(x, encode(x, type_by_name("IQ4_NL")), type_by_name("IQ4_NL")) <= 1.005 * best_error(x)


def quantize_chunk() -> "ctypes._NamedFuncPointer":
    package = importlib.util.find_spec("xllamacpp")
    if not package or not package.submodule_search_locations:
        pytest.skip("xllamacpp is not installed: there is no llama.cpp to compare with")
    import xllamacpp  # noqa: F401  # loads what its library needs

    function = ctypes.CDLL(f"{package.submodule_search_locations[0]}/xllamacpp.abi3.so").ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return function


def by_llama_cpp(x: np.ndarray, kind: GgmlType) -> np.ndarray:
    raw = np.zeros((len(x), kind.row_bytes(x.shape[1])), np.uint8)
    assert quantize_chunk()(kind.number, x.ctypes.data, raw.ctypes.data, 0, *x.shape, None) == raw.size
    return raw


@pytest.mark.parametrize("kind", FITTED, ids=name)
def test_the_reference_is_what_llama_cpp_writes(kind: GgmlType) -> None:
    for law, reference in zip(LAWS, REFERENCE[kind.name], strict=True):
        x = weights(law)
        of_llama_cpp = error(x, by_llama_cpp(x, kind), kind)
        assert of_llama_cpp == pytest.approx(reference, rel=2e-3)
        assert error(x, encode(x, kind), kind) <= 1.02 * of_llama_cpp, law


@pytest.mark.parametrize("kind", FITTED, ids=name)
def test_extreme_blocks(kind: GgmlType) -> None:
    x = np.zeros((8, 256), np.float32)
    x[1:5] = [[0.75], [-0.75], [1e-30], [-65504.0]]
    x[5, 200], x[6, :16] = -3.0, 1e-3  # d of the latter is denormal
    x[7] = np.where(np.arange(256) % 2, 65504.0, -65504.0)
    got = by_gguf(encode(x, kind), kind)
    assert not got[0].any()
    assert not got[3].any()
    # of the others no code stands for 0, and 113 and -127 are the farthest
    same, zeros, few, both = (3e-4, 3e-4, 0.03, 5e-4) if kind.name.endswith("_K") else (5e-4, 0.01, 0.1, 0.07)
    for row, bound in ((1, same), (2, same), (4, same), (5, zeros), (6, few), (7, both)):
        assert np.abs(got[row] - x[row]).max() <= bound * np.abs(x[row]).max(), row


@pytest.mark.parametrize("kind", FITTED, ids=name)
def test_what_is_fitted_stays_where_they_are_on_their_grid(kind: GgmlType) -> None:
    """What was decoded is encoded again with little loss, as when an adapter is merged that changes a part."""
    x = weights("student")
    raw = encode(x, kind)
    y = decode(raw, kind)
    assert error(y, encode(y, kind), kind) < 0.25 * error(x, raw, kind)


@pytest.mark.parametrize("kind", FITTED, ids=name)
def test_pieces_and_threads_write_the_same(kind: GgmlType, monkeypatch: pytest.MonkeyPatch) -> None:
    x = weights("student", 24)
    whole = encode(x, kind)
    assert_array_equal(encode(x, kind, threads=2), whole)
    monkeypatch.setattr(quants, "CHUNK_ELEMENTS", 5 * 1024)
    assert_array_equal(np.concatenate(list(quants.encode_chunks(x.astype(np.float64), kind))), whole)
    out = np.zeros_like(whole)
    assert encode(x, kind, out=out) is out
    assert_array_equal(out, whole)


@pytest.mark.parametrize("kind", [type_by_name(each) for each in quants.WRITABLE_TYPES], ids=name)
def test_what_cannot_be_written_is_refused(kind: GgmlType) -> None:
    x = np.zeros((3, 512), np.float32)
    for value, why in ((np.nan, "not finite"), (np.inf, "not finite"), (-np.inf, "not finite")):
        x[2, 300] = value
        with pytest.raises(
            QuantError,
            match=f"blk.0: {value} at row 2, column 300, cannot be stored as {kind.name}: it is {why}",
        ):
            encode(x, kind, name="blk.0")
    x[2, 300] = 7e4
    if kind.name in ("F32", "BF16"):
        assert encode(x, kind).any()
    else:
        with pytest.raises(QuantError, match=r"70000 at row 2, column 300, .* beyond 65504"):
            encode(x, kind)
    if kind.block_size > 1:
        with pytest.raises(
            QuantError,
            match=f"rows of 500 cannot be {kind.name}, whose blocks have {kind.block_size} weights",
        ):
            encode(x[:, :500], kind)


def test_a_type_that_is_not_written_is_refused() -> None:
    with pytest.raises(QuantError, match=r"IQ2_S cannot be written; choose one of F32, F16, "):
        encode(np.zeros((1, 256), np.float32), type_by_name("IQ2_S"))
