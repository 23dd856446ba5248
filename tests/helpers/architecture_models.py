"""Small models of each architecture with random weights, in files as llama.cpp's converter writes them."""

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from tests.helpers.architecture_family import (
    CONTROL,
    EMBEDDINGS,
    OUTPUT,
    ROUTER,
    VOCABULARY,
    WORDS,
    Numbers,
    Shape,
    key_and_value_length,
)
from tests.helpers.architectures import FAMILIES

Arrays = dict[str, np.ndarray]
SHAPES = {arch: family.shapes for arch, family in FAMILIES.items() if family.predicts_text}
# architectures that differ in more than a table; others are variants of them
BASIC = ("gemma3", "gemma4", "granitehybrid", "lfm2", "llama", "olmo2", "phi3", "qwen35", "starcoder2")
CASES = [(arch, name) for arch, shapes in SHAPES.items() for name in shapes]


def rows(shape: Shape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return Hugging Face's name and the axes of each weight, by GGUF's name."""
    family = FAMILIES[shape.arch]
    ends = [row for row in family.end_rows(shape) if not (shape.tied and row[0] == OUTPUT)]
    blocks = [
        (f"blk.{layer}.{mine}", f"{family.prefix}layers.{layer}.{theirs}", axes)
        for layer in range(shape.layers)
        for mine, theirs, axes in family.block_rows(shape, layer)
    ]
    return {
        mine: (theirs, tuple(getattr(shape, axis) for axis in axes.split()))
        for mine, theirs, axes in [ends[0], *blocks, *ends[1:]]
    }


def trainable(shape: Shape) -> list[str]:
    """The weights that full training changes."""
    return [name for name in rows(shape) if not name.endswith(FAMILIES[shape.arch].constants)]


def linear(shape: Shape) -> list[str]:
    """The matrices of all blocks that PEFT, too, has adapters of."""
    return [name for name in adaptable(shape) if not name.endswith(FAMILIES[shape.arch].not_in_peft)]


def adaptable(shape: Shape) -> list[str]:
    """The matrices of all blocks."""
    ends = FAMILIES[shape.arch].without_adapter
    return [
        name
        for name, (_, axes) in rows(shape).items()
        if len(axes) == 2 and name.startswith("blk.") and not name.endswith((*ends, "bias"))
    ]


def mixtures(shape: Shape) -> list[str]:
    """The routers and the stacks of experts, which get no adapter by default."""
    return [
        name
        for name in rows(shape)
        if ("_exps.weight" in name or name.endswith(ROUTER))
        and not name.endswith(FAMILIES[shape.arch].stacks_without_adapter)
    ]


def weights(shape: Shape, seed: int = 1, last: float = 2.5) -> Arrays:
    """As GGUF has them. Heads see some tokens more than others, and what is said is `last` times as sure as a new model is."""
    made = {}
    for name, (_, axes) in rows(shape).items():
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        special = FAMILIES[shape.arch].initial(shape, name, axes, generator)
        if special is not None:
            made[name] = special
            continue
        random = generator.standard_normal(axes, np.float32)
        if len(axes) == 1:
            made[name] = np.float32(0.3) * random + np.float32(name.endswith("norm.weight"))
        else:
            gain = 1.0 if name.startswith("blk.") else last
            alone = name == EMBEDDINGS and not shape.tied
            made[name] = random * np.float32(1.0 if alone else gain / math.sqrt(axes[-1]))
    return made


# ---- as a file --------------------------------------------------------------


def keys(shape: Shape) -> Numbers:
    """What llama.cpp's converter writes behind the architecture's name."""
    family = FAMILIES[shape.arch]
    found: Numbers = {
        "context_length": shape.ctx,
        "embedding_length": shape.embd,
        "block_count": shape.layers,
        "feed_forward_length": shape.ff,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.layer_norm_rms_epsilon": shape.eps,
        "rope.freq_base": shape.base,
    }
    if shape.head_size * shape.heads != shape.embd:
        found |= key_and_value_length(shape)
    found |= family.keys(shape)
    return {key: value for key, value in found.items() if key not in family.dropped_keys(shape)}


def full_key(shape: Shape, key: str) -> str:
    """Return a key as it is in files."""
    return key if FAMILIES[shape.arch].whole_keys(key) else f"{shape.file_arch}.{key}"


def written(
    path: Path, shape: Shape, arrays: Arrays, said: Mapping[str, int | float | str] | None = None
) -> Path:
    """A model file with a vocabulary of bytes."""
    out = gguf.GGUFWriter(path, shape.file_arch)
    out.add_name("small")
    adds = {
        int: out.add_uint32,
        float: out.add_float32,
        str: out.add_string,
        bool: out.add_bool,
        list: out.add_array,
    }
    for key, value in (keys(shape) if said is None else said).items():
        adds[type(value)](full_key(shape, key), value)
    out.add_tokenizer_model("llama")
    out.add_token_list(WORDS)
    out.add_token_scores([0.0] * VOCABULARY)
    out.add_token_types([2, 3, 3] + [6] * 256)
    out.add_unk_token_id(0)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_add_space_prefix(False)
    tensors = arrays | FAMILIES[shape.arch].tensors(shape)
    for name in ("long", "short"):
        if factors := getattr(shape, name):
            tensors[f"rope_factors_{name}.weight"] = np.array(factors, np.float32)
    for name, array in tensors.items():
        out.add_tensor(name, np.ascontiguousarray(array))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


# ---- shapes -----------------------------------------------------------------


def shape_of(arch: str, name: str) -> Shape:
    return SHAPES[arch][name]


# Sizes of rows that every type can hold.
WIDE = {
    "a": {"embd": 256, "heads": 4, "kv_heads": 2, "head_size": 64, "ff": 256, "layers": 2},
    "b": {"embd": 256, "heads": 2, "kv_heads": 1, "head_size": 128, "ff": 512, "layers": 3},
    "c": {"embd": 256, "heads": 8, "kv_heads": 8, "head_size": 32, "ff": 768, "layers": 3},
}


def wide(arch: str, name: str = "a") -> Shape:
    """Of rows that every type can hold."""
    first = SHAPES[arch][name]
    sizes = WIDE[name] | FAMILIES[arch].wide
    # Rotated in part, a head of another size has other factors; scores of larger heads stay as large.
    score_scale = first.score_scale * math.sqrt(first.head_size / sizes["head_size"])
    return replace(first, **sizes, turned=12 if first.turned else 0, score_scale=score_scale)


def prompt(count: int = 40, seed: int = 0) -> list[int]:
    """Tokens that are letters but the first."""
    letters = np.random.default_rng(seed).integers(CONTROL + 0x21, CONTROL + 0x7F, count - 1)
    return [1, *letters.tolist()]
