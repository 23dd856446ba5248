"""What comes of a run that trains every weight."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from llamatrain.checkpoints.checkpoint import tensor_infos
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import Value, u32
from llamatrain.gguf.writer import new_gguf


def write_model(path: Path, metadata: Mapping[str, Value], weights: Mapping[str, np.ndarray]) -> None:
    """A model's file in float32, for llama.cpp."""
    with new_gguf(path, {**metadata, "general.file_type": u32(0)}, tensor_infos(weights), open_gguf) as out:
        for name, array in weights.items():
            out.write(name, array)
