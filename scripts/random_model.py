"""Writes a model with random weights and the shape of a real one, to measure memory and speed.

    python scripts/random_model.py OUT.gguf                                        TinyLlama's shape, in Q4_0
    python scripts/random_model.py OUT.gguf --shape 7b --type q4_k
    python scripts/random_model.py OUT.gguf --embd 256 --layer 4 --head 8 --ff 768 --vocab-from MODEL.gguf

A piece of a tensor is made, encoded and written before the next, so that the largest model takes some
megabytes of memory. Matrices have the type, norms are F32 ones. The vocabulary is that of another file, or
bytes, with unused tokens up to the size.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from bench.shapes import EXPERTS, FAMILIES, SHAPES

from llamatrain.data.tokenizer import new_vocab
from llamatrain.data.tokenizer.vocabulary import KEY
from llamatrain.distributed.cores import count_cores
from llamatrain.errors import LlamatrainError, UsageError
from llamatrain.gguf import quants
from llamatrain.gguf.constants import TokenType
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.rewrite import file_type
from llamatrain.gguf.types import GgmlType, TensorInfo, type_by_name
from llamatrain.gguf.values import Kind, Value, numbers, strings, u32
from llamatrain.gguf.writer import create_gguf
from llamatrain.model.architectures import DEFAULT, find_architecture
from llamatrain.model.hyperparameters import Hyperparameters, default_extra, default_lists, tokenizer_metadata
from llamatrain.model.init import init_weights, standard_deviation
from llamatrain.model.limits import MAX_SIZE
from llamatrain.model.rope import Rope

NAMES = ("embd", "layer", "head", "head_kv", "ff", "vocab", "ctx")
PIECE = 1 << 22  # weights in memory at once


def make_vocabulary(size: int) -> dict[str, Value]:
    """Return the metadata of a vocabulary of bytes and unused tokens."""
    keys = new_vocab.bytes_vocabulary()
    tokens, kinds = (list(keys[f"{KEY}{name}"].decode()) for name in ("tokens", "token_type"))
    if size < len(tokens):
        raise UsageError(
            f"--vocab must be at least {len(tokens)}, for the tokens of bytes (got {size})",
            code="invalid-size",
        )
    unused = range(size - len(tokens))
    return keys | {
        f"{KEY}tokens": strings([*tokens, *(f"<unused{i}>" for i in unused)]),
        f"{KEY}token_type": numbers(Kind.INT32, [*kinds, *(TokenType.UNUSED for _ in unused)]),
    }


def encode_pieces(
    info: TensorInfo, kind: GgmlType, scale: float, random: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield the bytes of a tensor, some rows at a time."""
    rows, columns = math.prod(info.shape[:-1]), info.shape[-1]
    step = max(1, PIECE // columns)
    for first in range(0, rows, step):
        values = random.standard_normal((min(step, rows - first), columns), np.float32)
        values *= np.float32(scale)
        yield quants.encode(values, kind, threads=count_cores(), name=info.name)


def write_model(
    path: Path, h: Hyperparameters, vocabulary: dict[str, Value], kind: GgmlType, seed: int
) -> None:
    """Write a model with random weights of a type."""
    infos = [
        TensorInfo(name, kind if h.is_matrix(name) else type_by_name("F32"), shape)
        for name, shape in h.shapes.items()
    ]
    random = np.random.default_rng(seed)
    keys = h.metadata(f"random {kind.name}") | vocabulary | {"general.file_type": u32(file_type(kind))}
    with create_gguf(path, keys, infos) as out:
        for info in infos:
            if not h.is_matrix(info.name):
                array = np.ones(info.shape, np.float32)
                init_weights(h, seed, {info.name: array})
                out.write(info.name, array)
            else:
                out.write(info.name, encode_pieces(info, kind, standard_deviation(h, info.name), random))


def main() -> None:
    """Write the model that the command line describes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1.1b", help="for sizes that are not given")
    for name in NAMES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--tied", action="store_true", help="use the embeddings as output, too")
    parser.add_argument("--type", choices=[name.lower() for name in quants.WRITABLE_TYPES], default="q4_0")
    parser.add_argument("--vocab-from", type=Path, help="a GGUF file; its vocabulary decides the size")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        make_model(args)
    except (LlamatrainError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def expert_sizes(shape: str) -> dict[str, int]:
    """Return the sizes of a shape's mixtures of experts, if it has any."""
    return dict(zip(("experts", "experts_used", "expert_ff"), EXPERTS.get(shape, ()), strict=False))


def make_model(args: argparse.Namespace) -> None:
    """Check the sizes and write the model."""
    sizes = dict(zip(NAMES, SHAPES[args.shape], strict=True))
    sizes |= {name: value for name in NAMES if (value := getattr(args, name)) is not None}
    for name, value in (*sizes.items(), ("seed", args.seed)):
        if not (name != "seed") <= value <= MAX_SIZE:
            least = 0 if name == "seed" else 1
            raise UsageError(
                f"--{name.replace('_', '-')} must be between {least} and {MAX_SIZE} (got {value})",
                code="invalid-size",
            )
    vocabulary = (
        tokenizer_metadata(open_gguf(args.vocab_from).metadata.raw_values)
        if args.vocab_from
        else make_vocabulary(sizes["vocab"])
    )
    embd, layers, heads, kv_heads, ff, _, ctx = sizes.values()
    if embd % heads:
        raise UsageError(f"--embd must be a multiple of --head (got {embd} and {heads})", code="invalid-size")
    kind = type_by_name(args.type.upper())
    if embd % kind.block_size or ff % kind.block_size:
        raise UsageError(
            f"--embd and --ff must be multiples of {kind.block_size}, the block size of {kind.name} "
            f"(got {embd} and {ff})",
            code="invalid-size",
        )
    family = FAMILIES.get(args.shape, (DEFAULT, embd // heads, embd // heads, args.tied))
    architecture, (_, head_size, rotated, tied) = find_architecture(family[0]), family
    h = Hyperparameters(
        architecture=architecture,
        vocab=len(vocabulary[f"{KEY}tokens"].decode()),
        embd=embd,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ff=ff,
        ctx=ctx,
        head_size=head_size,
        rope=Rope(rotated),
        tied=tied,
        extra=default_extra(architecture, {"head_size": head_size, "embd": embd} | expert_sizes(args.shape)),
        lists=default_lists(architecture, layers, head_size),
    )
    write_model(args.out, h, vocabulary, kind, args.seed)
    nbytes = args.out.stat().st_size
    print(f"{args.out}: {h.describe()}; {h.parameter_count:,} weights in {math.ceil(nbytes / 1e6):,} MB")


if __name__ == "__main__":
    main()
