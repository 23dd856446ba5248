"""Small GGUF files to test with: a llama model that llama.cpp opens, and one with a value of each kind."""

from pathlib import Path

import numpy as np

from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import Kind, Value, boolean, f32, number, numbers, string, strings, u32, u64
from llamatrain.gguf.writer import create_gguf

WIDTH, FF, VOCABULARY, HEADS = 32, 64, 259, 2


def bytes_vocabulary() -> dict[str, Value]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    return {
        "tokenizer.ggml.model": string("llama"),
        "tokenizer.ggml.tokens": strings(tokens),
        "tokenizer.ggml.scores": numbers(Kind.FLOAT32, [0.0] * len(tokens)),
        "tokenizer.ggml.token_type": numbers(Kind.INT32, [2, 3, 3] + [6] * 256),
        "tokenizer.ggml.bos_token_id": u32(1),
        "tokenizer.ggml.eos_token_id": u32(2),
        "tokenizer.ggml.unknown_token_id": u32(0),
    }


def llama_metadata() -> dict[str, Value]:
    return {
        "general.architecture": string("llama"),
        "llama.context_length": u32(64),
        "llama.embedding_length": u32(WIDTH),
        "llama.feed_forward_length": u32(FF),
        "llama.block_count": u32(1),
        "llama.attention.head_count": u32(HEADS),
        "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
        "llama.vocab_size": u32(VOCABULARY),
        **bytes_vocabulary(),
    }


def llama_tensors() -> dict[str, np.ndarray]:
    shapes = {
        "token_embd": (VOCABULARY, WIDTH),
        "output_norm": (WIDTH,),
        "output": (VOCABULARY, WIDTH),
        "blk.0.attn_norm": (WIDTH,),
        "blk.0.attn_q": (WIDTH, WIDTH),
        "blk.0.attn_k": (WIDTH, WIDTH),
        "blk.0.attn_v": (WIDTH, WIDTH),
        "blk.0.attn_output": (WIDTH, WIDTH),
        "blk.0.ffn_norm": (WIDTH,),
        "blk.0.ffn_gate": (FF, WIDTH),
        "blk.0.ffn_up": (FF, WIDTH),
        "blk.0.ffn_down": (WIDTH, FF),
    }
    random = np.random.default_rng(1)
    return {f"{name}.weight": random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_arrays(path: Path, metadata: dict[str, Value], arrays: dict[str, np.ndarray]) -> Path:
    """A file of float32 tensors."""
    with create_gguf(
        path, metadata, [TensorInfo(name, type_by_name("F32"), array.shape) for name, array in arrays.items()]
    ) as out:
        for name, array in arrays.items():
            out.write(name, array)
    return path


def every_kind() -> dict[str, Value]:
    """A value of each kind, and the arrays that can be."""
    smallest = {kind: -(2 ** (8 * kind_bytes - 1)) for kind, kind_bytes in SIGNED.items()}
    nested = Kind.ARRAY.to_bytes(4, "little") + (2).to_bytes(8, "little")
    inner = [strings(["a", "", "bc"]).raw, numbers(Kind.INT16, [1, -2]).raw]
    return {
        "general.architecture": string("llama"),
        **{f"a.{kind.name}": number(kind, value) for kind, value in smallest.items()},
        **{f"a.{kind.name}": number(kind, 2 ** (8 * size) - 1) for kind, size in UNSIGNED.items()},
        "a.float32": f32(0.1),
        "a.float64": number(Kind.FLOAT64, 0.1),
        "a.true": boolean(True),
        "a.empty": string(""),
        "a.text": string("snö \U0001f600 \x00 \udcff"),
        "a.big": u64(2**63),
        "b.floats": numbers(Kind.FLOAT32, [0.5, float("nan"), float("inf")]),
        "b.bools": numbers(Kind.BOOL, [1, 0, 1]),
        "b.none": numbers(Kind.UINT8, []),
        "b.words": strings(["", "word", "ü", "\udc80", "x" * 300]),
        "b.nested": Value(Kind.ARRAY, nested + b"".join(bytes(raw) for raw in inner)),
    }


SIGNED = {Kind.INT8: 1, Kind.INT16: 2, Kind.INT32: 4, Kind.INT64: 8}
UNSIGNED = {Kind.UINT8: 1, Kind.UINT16: 2, Kind.UINT32: 4, Kind.UINT64: 8}
