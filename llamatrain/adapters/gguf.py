"""Reads and writes adapters in GGUF, as llama.cpp loads them.

The tensors are `<weight>.lora_a` and `<weight>.lora_b`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from llamatrain.adapters.adapter import (
    Adapter,
    Half,
    Halves,
    LoraPair,
    check_halves,
    decode_factor,
    default_scale,
    has_experts,
    parse_factor_name,
)
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf import quants
from llamatrain.gguf.constants import LlamaFileType
from llamatrain.gguf.parser import quote
from llamatrain.gguf.reader import Gguf, open_gguf
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import Value, f32, string, u32
from llamatrain.gguf.writer import create_gguf
from llamatrain.io.mapped_file import verify_unchanged
from llamatrain.model.architecture import Architecture
from llamatrain.model.architectures import DEFAULT, find_architecture

MERGED_TYPE = "llamatrain.merged_type"  # key of the type that an adapter was trained to be merged into
SUFFIXES: dict[str, Half] = {".lora_a": "a", ".lora_b": "b"}
# types that converters write; with smaller ones, a small file could need much memory
READABLE = ("F32", "F16", "BF16", "Q8_0")
FILE_TYPES = {"f32": LlamaFileType.ALL_F32, "f16": LlamaFileType.MOSTLY_F16}


def parse_adapter(gguf: Gguf) -> Adapter:
    """Return the adapter in an open GGUF file."""
    path = gguf.path
    if gguf.kind != "adapter":
        description = (
            "neither an adapter nor a model" if gguf.kind == "other" else f"no adapter but a {gguf.kind}"
        )
        raise FileError(f"{path}: {description}; give an adapter", code="not-an-adapter")
    if (kind := gguf.get_value("adapter.type", str)) != "lora":
        raise FileError(f"{path}: adapter.type must be lora (got {quote(kind)})", code="unsupported-adapter")
    if "adapter.alora.invocation_tokens" in gguf.metadata:
        raise FileError(
            f"{path}: adapters that are activated by tokens (aLoRA) are not supported",
            code="unsupported-adapter",
        )
    try:
        architecture = find_architecture(gguf.get_value("general.architecture", str, DEFAULT))
    except UsageError as error:
        raise FileError(f"{path}: {error}", code=error.code) from None
    with verify_unchanged(gguf.mapped_files):
        return read_pairs(gguf, architecture)


def read_pairs(gguf: Gguf, architecture: Architecture[Any, Any]) -> Adapter:
    """Return the adapter, given its architecture."""
    path, alpha, halves = gguf.path, gguf.get_value("adapter.lora.alpha", float, 0.0), Halves()
    for tensor in gguf.tensors.values():
        name, half = parse_factor_name(halves, path, tensor.name, SUFFIXES)
        if tensor.type.name not in READABLE:
            raise FileError(
                f"{path}: tensor {quote(tensor.name)} must be one of {', '.join(READABLE)} (got "
                f"{tensor.type.name})",
                code="wrong-tensor-type",
            )
        halves[name][half] = decode_factor(
            path, tensor.name, tensor.raw, tensor.type, has_experts(architecture, name)
        )
    check_halves(path, halves, architecture)
    pairs = {
        name: LoraPair(factors["a"], factors["b"], default_scale(alpha, factors["b"].shape[-1]))
        for name, factors in halves.items()
    }
    name = gguf.get_value("general.name", str, "")
    return Adapter(
        source=path,
        alpha=alpha,
        pairs=pairs,
        name=name,
        merged_type=gguf.get_value(MERGED_TYPE, str, ""),
        architecture=architecture,
    )


def write_adapter(
    path: str | Path,
    adapter: Adapter,
    kind: Literal["f32", "f16"] = "f32",
    metadata: Mapping[str, Value] | None = None,
) -> None:
    """Write an adapter atomically; `metadata` is added to the keys that an adapter must have.

    The file has one alpha for all pairs, so any other scale is folded into b. A description warns about pairs
    of norms.
    """
    note = {"general.description": string(norms_note(adapter.norm_names))} if adapter.norm_names else {}
    own = (
        note
        | {
            "general.type": string("adapter"),
            "general.architecture": string(adapter.architecture.name),
            "general.name": string(adapter.name),
            "general.file_type": u32(FILE_TYPES[kind]),
            "adapter.type": string("lora"),
            "adapter.lora.alpha": f32(adapter.alpha),
        }
        | ({MERGED_TYPE: string(adapter.merged_type)} if adapter.merged_type else {})
    )
    tensors = {
        f"{name}{suffix}": factor
        for name, pair in as_stored(adapter).pairs.items()
        for suffix, factor in ((".lora_a", pair.a), (".lora_b", pair.b))
    }
    written = type_by_name(kind.upper())
    infos = [TensorInfo(name, written, factor.shape) for name, factor in tensors.items()]
    with create_gguf(path, own | dict(metadata or {}) | own, infos, open_gguf) as out:
        for name, factor in tensors.items():
            out.write(name, quants.encode_chunks(factor, written, name=name))


def norms_note(norms: Sequence[str]) -> str:
    """Return the warning about pairs of norms."""
    return (
        f"llama.cpp applies no pairs of norms, such as that for {norms[0]}, and says nothing: "
        "export-lora merges them"
    )


def as_stored(adapter: Adapter) -> Adapter:
    """Return the adapter with the numbers that are read from its file in float32."""
    alpha = float(np.float32(adapter.alpha))
    pairs = {
        name: LoraPair(pair.a, fold_scale(adapter.alpha, pair), default_scale(alpha, pair.rank))
        for name, pair in adapter.pairs.items()
    }
    return replace(adapter, alpha=alpha, pairs=pairs)


def fold_scale(alpha: float, pair: LoraPair) -> np.ndarray:
    """Return b multiplied so that the default scale gives the pair's own."""
    default = default_scale(alpha, pair.rank)
    return pair.b if pair.scale == default else pair.b * np.float32(pair.scale / default)
