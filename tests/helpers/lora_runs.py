"""Bases to finetune, of every type that can be trained on, and the adapters that runs leave."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from llamatrain.adapters import gguf
from llamatrain.adapters.adapter import Adapter, LoraPair
from llamatrain.data.tokenizer import new_vocab
from llamatrain.gguf import quants
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import GgmlType, TensorInfo, type_by_name
from llamatrain.gguf.values import string
from llamatrain.gguf.writer import create_gguf
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.init import init_weights
from tests.helpers.small_models import EMBEDDINGS, Arrays, small

LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
TYPES = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "IQ4_NL",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_XS",
)
# Types that nothing here encodes: random codes, and block scales that make of them weights of this deviation.
SCALED_TO = {"IQ3_S": 100.0}

WIDE = small(embd=256, heads=4, head_size=64, ff=256, layers=1)  # rows that any type can hold


def new_weights(h: Hyperparameters, seed: int = 1) -> Arrays:
    """As of a new model; its norms are not all 1."""
    made = {name: np.empty(shape, np.float32) for name, shape in h.shapes.items()}
    init_weights(h, seed, made)
    random = np.random.default_rng(seed)
    for array in made.values():
        if array.ndim == 1:
            array += 0.2 * random.standard_normal(array.shape, np.float32)
    return made


def random_blocks(shape: tuple[int, ...], kind: GgmlType, random: np.random.Generator) -> np.ndarray:
    raw = random.integers(0, 256, (shape[0], shape[1] // kind.block_size, kind.block_bytes), np.uint8)
    raw[..., :2] = np.frombuffer(np.float16(shape[1] ** -0.5 / SCALED_TO[kind.name]).tobytes(), np.uint8)
    return raw.reshape(shape[0], -1)


def base(
    path: Path, h: Hyperparameters, kind: str = "F32", arrays: Arrays | None = None, template: str = ""
) -> Path:
    """A model file; its matrices are of a kind, its vocabulary is bytes."""
    chats = {"tokenizer.chat_template": string(template)} if template else {}
    random = np.random.default_rng(1)
    arrays = arrays or new_weights(h)
    infos = [
        TensorInfo(name, type_by_name(kind if array.ndim == 2 else "F32"), array.shape)
        for name, array in arrays.items()
    ]
    with create_gguf(path, h.metadata("base") | new_vocab.bytes_vocabulary() | chats, infos) as out:
        for info in infos:
            if info.type.name in SCALED_TO:
                out.write(info.name, random_blocks(info.shape, info.type, random))
            else:
                out.write(info.name, quants.encode(arrays[info.name], info.type))
    return path


def decoded(path: Path) -> Arrays:
    """The weights of a model, whatever their types."""
    tensors = open_gguf(path).tensors
    return {
        name: quants.decode(tensor.raw, tensor.type).reshape(tensor.shape) for name, tensor in tensors.items()
    }


def pairs(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The factors a and b of an adapter in float32, by the names of the weights."""
    file = open_gguf(path)
    found = {name: tensor.raw.view(np.float32).reshape(tensor.shape) for name, tensor in file.tensors.items()}
    names = [name.removesuffix(".lora_a") for name in found if name.endswith(".lora_a")]
    assert len(found) == 2 * len(names)
    return {name: (found[f"{name}.lora_a"], found[f"{name}.lora_b"]) for name in names}


def alpha(path: Path) -> float:
    return open_gguf(path).get_value("adapter.lora.alpha", float)


def deltas(path: Path) -> Arrays:
    """What an adapter adds to each weight, as llama.cpp would reckon it."""
    read = gguf.parse_adapter(open_gguf(path))
    return {name: read.delta(name) for name in read.pairs}


def random_adapter(
    path: Path, h: Hyperparameters, names: Iterable[str], rank: int = 4, size: float = 0.1
) -> Path:
    """Both factors are of this size: nothing is 0, as in a new adapter b is."""
    random, made = np.random.default_rng(7), {}
    for name in names:
        out, into = h.shapes[name]
        shapes = ((out, rank), (into, rank)) if name == EMBEDDINGS else ((rank, into), (out, rank))
        a, b = (np.float32(size) * random.standard_normal(shape, np.float32) for shape in shapes)
        made[name] = LoraPair(a, b, 1.0)
    gguf.write_adapter(path, Adapter(source=Path("made"), alpha=float(rank), pairs=made, name="random"))
    return path
