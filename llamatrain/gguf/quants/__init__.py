"""Decodes weights of GGUF files to float32 or bf16, and encodes them.

Every type can be decoded. Compiled code decodes those that are used for training; kernels call
`decoding.decode_blocks` themselves. The `gguf` package decodes all but four types, with the same bits. F32,
F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K to Q6_K, IQ4_NL and IQ4_XS can be encoded. Those of 2 to 6 bits can be
encoded by importance: what the squared error of each weight is multiplied with.
"""

from collections.abc import Callable, Iterator

import numpy as np

from llamatrain.compiler.cache import INSTALL_HINT, code_cache
from llamatrain.errors import LlamatrainError
from llamatrain.gguf.quants.kinds import (
    BF16,
    BY_IMPORTANCE,
    COMPILED,
    F32,
    FROM_EXTREMES,
    NON_LINEAR,
    SEARCHED_SCALES,
)
from llamatrain.gguf.types import TYPES, GgmlType

CHUNK_ELEMENTS = 1 << 20  # weights that numpy converts at once
BLOCK_ELEMENTS = 1 << 15  # weights in a block of a thread
MIN_IMPORTANCE = 1e-4  # as a share of the mean
MAX_HALF = 65504.0  # the largest half float: block scales are half floats
WRITABLE_TYPES = tuple(
    kind.name for number, kind in TYPES.items() if number in FROM_EXTREMES | SEARCHED_SCALES | {F32}
)


class QuantError(LlamatrainError):
    """Weights cannot be encoded as a type, or a type cannot be decoded."""


# ---- decoding -----------------------------------------------------------------------------------


def decode(
    raw: np.ndarray,
    kind: GgmlType,
    *,
    bf16: bool = False,
    out: np.ndarray | None = None,
    threads: int = 1,
) -> np.ndarray:
    """Decode weights from bytes, whose last axis is a row of blocks.

    The result, new or `out`, is float32, or with `bf16` bfloat16 (as uint16), rounded to nearest even.
    """
    columns, rest = divmod(raw.shape[-1], kind.block_bytes)
    columns *= kind.block_size
    if rest:
        raise QuantError(
            f"rows of {raw.shape[-1]} bytes cannot be {kind.name}, whose blocks have {kind.block_bytes} bytes",
            code="wrong-row-size",
        )
    out = _check_or_allocate(out, (*raw.shape[:-1], columns), np.uint16 if bf16 else np.float32)
    if out.size:
        rows = raw.reshape(-1, raw.shape[-1])
        if (
            kind.number in COMPILED
            and code_cache.is_available()
            and (not code_cache.lookup_only or _is_compiled())
        ):
            _decode_compiled(rows, kind, out.reshape(-1, columns), threads)
        else:
            _decode_by_numpy(rows, kind, out.reshape(-1, columns))
    return out


def _check_or_allocate(out: np.ndarray | None, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    if out is None:
        return np.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
        raise ValueError(
            f"the result is {np.dtype(dtype)} {shape}, contiguous; `out` is {out.dtype} {out.shape}"
        )
    return out


def _is_compiled() -> bool:
    from llamatrain.gguf.quants.decoding import decode_rows

    return bool(decode_rows.address)


def _decode_compiled(rows: np.ndarray, kind: GgmlType, out: np.ndarray, threads: int) -> None:
    from llamatrain.compiler.thread_pool import CallTable
    from llamatrain.gguf.quants.decoding import decode_rows

    bf16 = int(out.dtype == np.uint16)
    source = (rows.ctypes.data, rows.strides[0])
    to = (out.ctypes.data, out.strides[0])
    elements = out.shape[1]
    CallTable(
        [
            decode_rows.call(
                kind.number, bf16, *source, *to, elements, items=len(rows), block=BLOCK_ELEMENTS // elements
            )
        ],
        threads,
    )()


def _decode_by_numpy(rows: np.ndarray, kind: GgmlType, out: np.ndarray) -> None:
    step = max(1, CHUNK_ELEMENTS // out.shape[1])
    for lo in range(0, len(rows), step):
        chunk = np.ascontiguousarray(rows[lo : lo + step])
        with np.errstate(all="ignore"):  # a block may contain any bits
            values = np.ascontiguousarray(_find_decoder(kind)(chunk).reshape(len(chunk), -1), np.float32)
        if out.dtype == np.uint16:
            out[lo : lo + step] = _round_to_bf16(values)
        else:
            out[lo : lo + step] = values


def _round_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to bfloat16, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, nearest).astype(np.uint16)


def _find_decoder(kind: GgmlType) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that decodes rows of bytes with numpy."""
    if kind.name in NUMPY_TYPES:
        return lambda rows: rows.view(NUMPY_TYPES[kind.name])
    if kind.name in OWN_DECODERS:
        return lambda rows: OWN_DECODERS[kind.name](rows.reshape(-1, kind.block_bytes))
    import gguf

    try:
        number = gguf.GGMLQuantizationType(kind.number)
        gguf.dequantize(np.zeros((1, kind.block_bytes), np.uint8), number)
    except (ValueError, NotImplementedError) as error:
        raise QuantError(
            f"cannot decode {kind.name}; a newer `gguf` package may support it", code="undecodable-type"
        ) from error
    return lambda rows: gguf.dequantize(rows, number)


def _q8_k(blocks: np.ndarray) -> np.ndarray:
    """Decode Q8_K: d (float32), 256 codes, and sums of them that only products need."""
    return blocks[:, :4].copy().view(np.float32) * blocks[:, 4:260].view(np.int8).astype(np.float32)


def _q1_0(blocks: np.ndarray) -> np.ndarray:
    """Decode Q1_0: d (half), 128 bits that mean d or -d."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return np.where(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little") == 1, d, -d)


NUMPY_TYPES = {"F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
OWN_DECODERS = {"Q8_K": _q8_k, "Q1_0": _q1_0}  # the `gguf` package has these types, but no decoder


# ---- encoding -----------------------------------------------------------------------------------


def encode(
    values: np.ndarray,
    kind: GgmlType,
    *,
    importance: np.ndarray | None = None,
    out: np.ndarray | None = None,
    threads: int = 1,
    name: str = "",
) -> np.ndarray:
    """Encode float weights as bytes, whose last axis is a row. `name` stands for the weights in an error.

    `importance` has a number for each weight, or one row for all; other types than BY_IMPORTANCE ignore it.
    """
    if kind.name not in WRITABLE_TYPES:
        raise QuantError(
            f"{kind.name} cannot be written; choose one of {', '.join(WRITABLE_TYPES)}",
            code="unwritable-type",
        )
    if values.dtype.kind != "f":  # bfloat16 arrays are integers
        raise ValueError(f"weights to encode are floats; these are {values.dtype}")
    columns = values.shape[-1]
    if columns % kind.block_size:
        raise QuantError(
            f"{name or 'weights'}: rows of {columns} cannot be {kind.name}, whose blocks have {kind.block_size} weights",
            code="wrong-row-size",
        )
    out = _check_or_allocate(
        out, (*values.shape[:-1], columns // kind.block_size * kind.block_bytes), np.uint8
    )
    weighting = _spread_importance(importance, int(np.prod(values.shape[:-1])), columns)
    for lo, hi in _row_chunks(values):
        chunk = np.ascontiguousarray(values.reshape(-1, columns)[lo:hi], np.float32)
        _check_values(chunk, kind, name, lo)
        target = out.reshape(-1, out.shape[-1])[lo:hi]
        if code_cache.is_available():
            weighted = importance is not None and kind.number in BY_IMPORTANCE
            _encode_compiled(chunk, kind, target, threads, weighting[lo:hi], weighted)
        else:
            target[:] = _encode_by_numpy(chunk, kind)
    return out


def _spread_importance(importance: np.ndarray | None, rows: int, columns: int) -> np.ndarray:
    """Return a row of importances for each row of weights; without importances, all weights are equally important.

    They are divided by their mean, so that sums neither overflow nor vanish, and are never less than MIN_IMPORTANCE:
    a weight that some data does not use is still a number near its true one.
    """
    if importance is None:
        return np.broadcast_to(np.ones(columns, np.float32), (rows, columns))
    mean = importance.mean(axis=-1, keepdims=True, dtype=np.float64)
    scaled = np.maximum(importance / np.where(mean > 0, mean, 1), MIN_IMPORTANCE).astype(np.float32)
    return np.broadcast_to(scaled.reshape(-1, columns), (rows, columns))


def encode_chunks(
    values: np.ndarray, kind: GgmlType, *, threads: int = 1, name: str = ""
) -> Iterator[np.ndarray]:
    """Encode weights and yield the bytes in chunks of rows, so that a large tensor is not held twice."""
    for lo, hi in _row_chunks(values):
        yield encode(values.reshape(-1, values.shape[-1])[lo:hi], kind, threads=threads, name=name)


def _row_chunks(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that are processed at once."""
    if values.size:
        rows, step = values.size // values.shape[-1], max(1, CHUNK_ELEMENTS // values.shape[-1])
        yield from ((lo, min(rows, lo + step)) for lo in range(0, rows, step))


def _check_values(values: np.ndarray, kind: GgmlType, name: str, first_row: int) -> None:
    """Raise QuantError unless every value is finite and small enough for its block's scale."""
    limit = np.finfo(np.float32).max if kind.number in (F32, BF16) else MAX_HALF
    if -limit <= values.min() and values.max() <= limit:  # both comparisons are false for NaN
        return
    row, column = np.argwhere(~(np.abs(values) <= limit))[0]
    value = values[row, column]
    reason = "not finite" if not np.isfinite(value) else f"beyond {limit:g}, the largest half float"
    raise QuantError(
        f"{name or 'weights'}: {value:g} at row {first_row + row}, column {column}, cannot be stored as {kind.name}: it is {reason}",
        code="unencodable-weight",
    )


def _encode_by_numpy(values: np.ndarray, kind: GgmlType) -> np.ndarray:
    if kind.number in SEARCHED_SCALES:
        raise QuantError(f"only compiled kernels can write {kind.name}; {INSTALL_HINT}", code="no-compiler")
    import gguf

    encoded: np.ndarray = gguf.quantize(values, gguf.GGMLQuantizationType(kind.number))
    return encoded.view(np.uint8)


def _encode_compiled(
    values: np.ndarray,
    kind: GgmlType,
    out: np.ndarray,
    threads: int,
    importance: np.ndarray,
    weighted: bool,
) -> None:
    from llamatrain.compiler.thread_pool import CallTable
    from llamatrain.gguf.quants.encoding import encode_rows
    from llamatrain.gguf.quants.iq4 import encode_iq4_rows
    from llamatrain.gguf.quants.kquants import SHAPES, encode_k_rows
    from llamatrain.gguf.quants.weighted import SHAPES as WEIGHTED_SHAPES
    from llamatrain.gguf.quants.weighted import encode_weighted_rows

    words = (
        kind.number,
        values.ctypes.data,
        values.strides[0],
        out.ctypes.data,
        out.strides[0],
        values.shape[1],
    )
    weighting = importance.ctypes.data, importance.strides[0]
    rows = {"items": len(values), "block": 1}
    if kind.number == F32:
        out[:] = values.view(np.uint8)
    elif kind.number in SHAPES:
        CallTable([encode_k_rows.call(*words, *weighting, *SHAPES[kind.number], **rows)], threads)()
    elif kind.number in NON_LINEAR:
        CallTable([encode_iq4_rows.call(*words, *weighting, **rows)], threads)()
    elif weighted:
        call = encode_weighted_rows.call(*words, *weighting, *WEIGHTED_SHAPES[kind.number], **rows)
        CallTable([call], threads)()
    else:
        CallTable(
            [encode_rows.call(*words, items=len(values), block=BLOCK_ELEMENTS // values.shape[1])], threads
        )()
