"""Reads the adapter in a checkpoint of llama.cpp's old finetune: factors as in its `.bin` files, with GGUF names.

It trained W + B A regardless of alpha, which a checkpoint does not state: the scale is 1.
"""

from collections import Counter
from collections.abc import Mapping

from llamatrain.adapters.adapter import (
    Adapter,
    Halves,
    LoraPair,
    check_halves,
    decode_factor,
    is_transposed,
    parse_factor_name,
)
from llamatrain.adapters.gguf import SUFFIXES
from llamatrain.errors import FileError
from llamatrain.gguf.parser import quote
from llamatrain.gguf.reader import Gguf
from llamatrain.io.mapped_file import verify_unchanged
from llamatrain.legacy.adapter_bin import ARCHITECTURE, transpose_halves
from llamatrain.model.architecture import split_block_number
from llamatrain.model.architectures import find_architecture

RUN = ("training.", "optimizer.")  # keys and tensors of the run
VERSIONS = (0, 1)  # of training.file_version
RANK = "training.lora.rank."


def is_legacy_checkpoint(gguf: Gguf) -> bool:
    """Return True if the file is such a checkpoint."""
    is_finetune = gguf.kind == "checkpoint" and gguf.metadata.get_text("training.type") == "finetune_lora"
    return is_finetune and gguf.get_value("training.file_version", int) in VERSIONS


def read_legacy_checkpoint(gguf: Gguf) -> Adapter:
    """Read the adapter."""
    with verify_unchanged(gguf.mapped_files):
        return parse_adapter(gguf)


def parse_adapter(gguf: Gguf) -> Adapter:
    """Return the adapter in an open file."""
    path, halves_by_name, architecture = gguf.path, Halves(), find_architecture(ARCHITECTURE)
    for tensor in gguf.tensors.values():
        if tensor.name.startswith(RUN):
            continue
        weight, half = parse_factor_name(halves_by_name, path, tensor.name, SUFFIXES)
        if tensor.type.name != "F32":
            raise FileError(
                f"{path}: tensor {quote(tensor.name)} must be F32 (got {tensor.type.name})",
                code="wrong-tensor-type",
            )
        halves_by_name[weight][half] = decode_factor(path, tensor.name, tensor.raw, tensor.type)
    for name, halves in halves_by_name.items():
        transpose_halves(halves, is_transposed(architecture, name))
    check_halves(path, halves_by_name, architecture)
    pairs = {name: LoraPair(factors["a"], factors["b"], 1.0) for name, factors in halves_by_name.items()}
    check_ranks(gguf, pairs)
    common_rank = Counter(pair.rank for pair in pairs.values()).most_common(1)[0][0]
    return Adapter(source=path, alpha=float(common_rank), pairs=pairs, architecture=architecture)


def check_ranks(gguf: Gguf, pairs: Mapping[str, LoraPair]) -> None:
    """Raise if a factor's rank differs from the one stated for its kind of weight."""
    for name, pair in pairs.items():
        key = RANK + split_block_number(name)[0].removesuffix(".weight").removeprefix("blk.{}.")
        if (stated := gguf.get_value(key, int, pair.rank)) != pair.rank:
            raise FileError(
                f"{gguf.path}: {key} is {stated}, but the factors of {quote(name)} have rank {pair.rank}",
                code="rank-mismatch",
            )
