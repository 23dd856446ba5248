"""Writes a llama with random weights: something of a real model's shape, to measure memory and speed with.

    python scripts/random_model.py OUT.gguf                                        TinyLlama's shape, in Q4_0
    python scripts/random_model.py OUT.gguf --shape 7b --type q4_k
    python scripts/random_model.py OUT.gguf --embd 256 --layer 4 --head 8 --ff 768 --vocab-from MODEL.gguf

A piece of a tensor is made, encoded and written before the next: the largest model takes some megabytes of memory. Matrices
are of the type, norms are F32 ones. The vocabulary is that of another file, or bytes, with unused tokens up to the size.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from bench.shapes import SHAPES

from llamatrain.adapters.merge import file_type
from llamatrain.data.tokenizer import new_vocab
from llamatrain.data.tokenizer.vocabulary import KEY
from llamatrain.distributed.cores import count_cores
from llamatrain.errors import LlamatrainError, UsageError
from llamatrain.gguf import quants
from llamatrain.gguf.constants import TokenType
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import GgmlType, TensorInfo, type_by_name
from llamatrain.gguf.values import Kind, Value, numbers, strings, u32
from llamatrain.gguf.writer import create_gguf
from llamatrain.model.architectures import DEFAULT, find_architecture
from llamatrain.model.hyperparameters import Hyperparameters, tokenizer_metadata
from llamatrain.model.init import standard_deviation
from llamatrain.model.limits import MAX_SIZE
from llamatrain.model.rope import Rope

NAMES = ("embd", "layer", "head", "head_kv", "ff", "vocab", "ctx")
PIECE = 1 << 22  # weights that are in memory at once


def vocabulary(size: int) -> dict[str, Value]:
    """Bytes, and what fills it up to the size."""
    keys = new_vocab.bytes_vocabulary()
    tokens, kinds = (list(keys[f"{KEY}{name}"].decode()) for name in ("tokens", "token_type"))
    if size < len(tokens):
        raise UsageError(f"--vocab {size} has no room for the {len(tokens)} tokens of bytes")
    unused = range(size - len(tokens))
    return keys | {
        f"{KEY}tokens": strings([*tokens, *(f"<unused{i}>" for i in unused)]),
        f"{KEY}token_type": numbers(Kind.INT32, [*kinds, *(TokenType.UNUSED for _ in unused)]),
    }


def pieces(
    info: TensorInfo, kind: GgmlType, scale: float, random: np.random.Generator
) -> Iterator[np.ndarray]:
    """The bytes of a tensor, some rows at a time."""
    rows, columns = info.shape
    step = max(1, PIECE // columns)
    for lo in range(0, rows, step):
        values = random.standard_normal((min(step, rows - lo), columns), np.float32)
        values *= np.float32(scale)
        yield quants.encode(values, kind, threads=count_cores(), name=info.name)


def write(path: Path, h: Hyperparameters, words: dict[str, Value], kind: GgmlType, seed: int) -> None:
    infos = [
        TensorInfo(name, kind if len(shape) == 2 else type_by_name("F32"), shape)
        for name, shape in h.shapes.items()
    ]
    random = np.random.default_rng(seed)
    keys = h.metadata(f"random {kind.name}") | words | {"general.file_type": u32(file_type(kind))}
    with create_gguf(path, keys, infos) as out:
        for info in infos:
            if len(info.shape) == 1:
                out.write(info.name, np.ones(info.shape, np.float32))
            else:
                out.write(info.name, pieces(info, kind, standard_deviation(h, info.name), random))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--shape", choices=SHAPES, default="1.1b", help="what the sizes are that are not given"
    )
    for name in NAMES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--tied", action="store_true", help="the embeddings serve as output, too")
    parser.add_argument("--type", choices=[name.lower() for name in quants.WRITABLE_TYPES], default="q4_0")
    parser.add_argument("--vocab-from", type=Path, help="a GGUF file with a vocabulary; it decides the size")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        make(given)
    except (LlamatrainError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def make(given: argparse.Namespace) -> None:
    sizes = dict(zip(NAMES, SHAPES[given.shape], strict=True))
    sizes |= {name: value for name in NAMES if (value := getattr(given, name)) is not None}
    for name, value in (*sizes.items(), ("seed", given.seed)):
        if not (name != "seed") <= value <= MAX_SIZE:
            raise UsageError(f"--{name.replace('_', '-')} {value} cannot be")
    words = (
        tokenizer_metadata(open_gguf(given.vocab_from).metadata.raw_values)
        if given.vocab_from
        else vocabulary(sizes["vocab"])
    )
    embd, layers, heads, kv_heads, ff, _, ctx = sizes.values()
    if embd % heads:
        raise UsageError(f"--embd {embd} does not divide among {heads} heads (--head)")
    kind = type_by_name(given.type.upper())
    if embd % kind.block_size or ff % kind.block_size:
        raise UsageError(
            f"rows of --embd {embd} and --ff {ff} are no whole {kind.name} blocks of {kind.block_size}"
        )
    size, vocab = embd // heads, len(words[f"{KEY}tokens"].decode())
    h = Hyperparameters(
        architecture=find_architecture(DEFAULT),
        vocab=vocab,
        embd=embd,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ff=ff,
        ctx=ctx,
        head_size=size,
        rope=Rope(size),
        tied=given.tied,
    )
    write(given.out, h, words, kind, given.seed)
    nbytes = given.out.stat().st_size
    print(f"{given.out}: {h.describe()}; {h.parameter_count:,} weights in {math.ceil(nbytes / 1e6):,} MB")


if __name__ == "__main__":
    main()
