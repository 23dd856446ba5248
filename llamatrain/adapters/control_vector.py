"""Control vectors in llama.cpp's format: a GGUF file with a tensor `direction.N` for the output of block N.

Blocks count from 0, and there is no direction for block 0. The output of a block is what the next one reads,
behind the sum with its input. Each token's output gets the direction times a scale.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from llamatrain.adapters.options import ControlOptions
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf.parser import quote
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import Kind, number, string
from llamatrain.gguf.writer import create_gguf
from llamatrain.graph.tensor import state
from llamatrain.io.mapped_file import verify_unchanged
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights
from llamatrain.model.transformer import DIRECTION

Directions = dict[int, np.ndarray]  # in float32, by block
NAME = re.compile(r"direction\.([1-9][0-9]{0,5})")


def read_control_vector(path: Path, h: Hyperparameters) -> Directions:
    """Return the directions in a file, and check that they fit a model."""
    gguf = open_gguf(path)
    if gguf.kind != "control vector":
        raise FileError(
            f"{path}: a control vector is needed (got a file of kind {gguf.kind})",
            code="not-a-control-vector",
        )
    directions: Directions = {}
    with verify_unchanged(gguf.mapped_files):
        for name, tensor in gguf.tensors.items():
            match = NAME.fullmatch(name)
            if not match or int(match[1]) >= h.layers:
                raise FileError(
                    f"{path}: {quote(name)} is not a direction for a model of {h.layers} blocks; the names are "
                    f"direction.1 to direction.{h.layers - 1}",
                    code="unknown-tensor",
                )
            if tensor.type.name != "F32" or tensor.shape != (h.embd,):
                raise FileError(
                    f"{path}: {name} must be F32 with {h.embd} numbers, as wide as the model (got "
                    f"{tensor.type.name} {list(tensor.shape)})",
                    code="wrong-tensor-shape",
                )
            directions[int(match[1])] = np.array(tensor.raw.view("<f4"), np.float32)
            if not np.isfinite(directions[int(match[1])]).all():
                raise FileError(f"{path}: {name} is not finite", code="not-finite")
    return directions


def write_control_vector(path: Path, directions: Mapping[int, np.ndarray], h: Hyperparameters) -> None:
    """Write a file atomically."""
    metadata = {
        "general.architecture": string("controlvector"),
        "controlvector.model_hint": string(h.architecture.name),
        "controlvector.layer_count": number(Kind.INT32, len(directions)),
    }
    infos = [
        TensorInfo(DIRECTION.format(layer), type_by_name("F32"), (h.embd,)) for layer in sorted(directions)
    ]
    with create_gguf(path, metadata, infos) as out:
        for layer in sorted(directions):
            out.write(DIRECTION.format(layer), np.ascontiguousarray(directions[layer], "<f4").view(np.uint8))


def load_control_vectors(options: ControlOptions, h: Hyperparameters) -> Directions:
    """Return the sum of all control vectors, scaled, for the blocks that they may change."""
    last = h.layers - 1 if options.control_vector_last is None else options.control_vector_last
    total: Directions = {}
    for path, scale in options.scaled:
        for layer, direction in read_control_vector(path, h).items():
            if options.control_vector_first <= layer <= last:
                scaled = np.float32(scale) * direction
                total[layer] = total[layer] + scaled if layer in total else scaled
    if options.scaled and not total:
        raise UsageError(
            f"no control vector has a direction for the blocks {options.control_vector_first} to {last}; change "
            "--control-vector-first or --control-vector-last",
            code="no-such-block",
        )
    return total


def add_directions(
    weights: Weights, arrays: dict[str, np.ndarray], directions: Directions
) -> tuple[Weights, dict[str, np.ndarray]]:
    """Return weights and arrays with the directions, which are then added to the outputs of blocks."""
    named = {DIRECTION.format(layer): direction for layer, direction in directions.items()}
    leaves = {name: state(name, direction.shape) for name, direction in named.items()}
    return Weights({**weights.tensors, **leaves}, weights.deltas, weights.dropout), arrays | named
