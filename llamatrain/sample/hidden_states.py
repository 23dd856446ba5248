"""Computes what the blocks of a model give out for texts."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from llamatrain.engine.device import create_device
from llamatrain.engine.plan import plan
from llamatrain.engine.program import Program
from llamatrain.gguf.reader import Gguf
from llamatrain.graph.tensor import collect_leaves
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.load import check_memory
from llamatrain.model.lora import Weights
from llamatrain.model.transformer import build_block_outputs, rope_state

Place = Literal["last", "all"]


class BlockOutputs:
    """Computes the outputs of all blocks for texts of up to `length` tokens."""

    def __init__(
        self,
        gguf: Gguf,
        h: Hyperparameters,
        weights: Weights,
        arrays: dict[str, np.ndarray],
        length: int,
        threads: int,
    ) -> None:
        table = rope_state(h, length)
        self.length, self._graph = length, build_block_outputs(h, weights, length, table)
        device = create_device("cpu", threads)
        memory_plan = plan(
            self._graph.means,
            scratch=device.scratch,
            resident=device.resident_bytes,
            rewrite=device.rewrite,
        )
        check_memory(gguf, memory_plan.arena, "a shorter text")
        memory = {
            leaf: arrays[leaf.name] for leaf in collect_leaves(self._graph.means) if leaf.name in arrays
        }
        self._program = Program(memory_plan, memory | {table: h.rope_table(length)}, device)

    def compute(self, tokens: Sequence[int], place: Place) -> np.ndarray:
        """Return each block's output at the last token of a text, or its mean over all: (blocks, width)."""
        count, write = len(tokens), self._program.write
        write(self._graph.inputs["tokens"], [*tokens, *[tokens[-1]] * (self.length - count)])
        write(self._graph.inputs["positions"], np.arange(self.length))
        write(self._graph.inputs["starts"], 0)
        shares = np.zeros((1, self.length), np.float32)
        shares[0, count - 1 if place == "last" else 0 : count] = 1 if place == "last" else 1 / count
        write(self._graph.shares, shares)
        self._program()
        return np.concatenate([self._program.read(mean) for mean in self._graph.means])
