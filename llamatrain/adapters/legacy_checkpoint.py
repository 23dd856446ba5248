"""Adapters in checkpoints of llama.cpp's old finetune: factors as in its `.bin` files, under the names that GGUF adapters have.

What it trained was W + B A, whatever alpha it was given, which a checkpoint does not say: the scale is 1.
"""

from collections import Counter
from collections.abc import Mapping

from llamatrain.adapters.adapter import Adapter, Halves, LoraPair, check_halves, floats, half_of, turned
from llamatrain.adapters.gguf import SUFFIXES
from llamatrain.adapters.legacy_bin import ARCHITECTURE, turn
from llamatrain.errors import FileError
from llamatrain.gguf.parser import quote
from llamatrain.gguf.reader import Gguf
from llamatrain.io.mapped_file import verify_unchanged
from llamatrain.model.architecture import split_block_number
from llamatrain.model.architectures import find_architecture

RUN = ("training.", "optimizer.")  # keys and tensors of the run
VERSIONS = (0, 1)  # of training.file_version
RANK = "training.lora.rank."


def is_one(gguf: Gguf) -> bool:
    told = gguf.kind == "checkpoint" and gguf.metadata.get_text("training.type") == "finetune_lora"
    return told and gguf.get_value("training.file_version", int) in VERSIONS


def read(gguf: Gguf) -> Adapter:
    with verify_unchanged(gguf.mapped_files):
        return adapter_of(gguf)


def adapter_of(gguf: Gguf) -> Adapter:
    path, found, architecture = gguf.path, Halves(), find_architecture(ARCHITECTURE)
    for tensor in gguf.tensors.values():
        if tensor.name.startswith(RUN):
            continue
        weight, half = half_of(found, path, tensor.name, SUFFIXES)
        if tensor.type.name != "F32":
            raise FileError(f"{path}: {quote(tensor.name)} is {tensor.type.name}, where F32 is needed")
        found[weight][half] = floats(path, tensor.name, tensor.raw, tensor.type)
    for name, halves in found.items():
        turn(halves, turned(architecture, name))
    check_halves(path, found, architecture)
    pairs = {name: LoraPair(each["a"], each["b"], 1.0) for name, each in found.items()}
    check_ranks(gguf, pairs)
    usual = Counter(pair.rank for pair in pairs.values()).most_common(1)[0][0]
    return Adapter(source=path, alpha=float(usual), pairs=pairs, architecture=architecture)


def check_ranks(gguf: Gguf, pairs: Mapping[str, LoraPair]) -> None:
    """It says them by kinds of weights."""
    for name, pair in pairs.items():
        key = RANK + split_block_number(name)[0].removesuffix(".weight").removeprefix("blk.{}.")
        if (said := gguf.get_value(key, int, pair.rank)) != pair.rank:
            raise FileError(
                f"{gguf.path}: {key} is {said}, and the factors of {quote(name)} have a rank of {pair.rank}"
            )
