"""Trains a control vector: directions that make one text of each pair likelier than the other, with a frozen model.

The loss of a pair is -log sigmoid(m - m₀), in which m is the logarithm of how much likelier the first text is,
and m₀ the same without directions. So a pair whose texts differ enough hardly counts any more. Its gradient is
that of the two texts' own losses, times how wrong the pair still is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llamatrain.engine.device import Device
from llamatrain.engine.plan import Plan, plan
from llamatrain.engine.program import Program
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.tensor import collect_leaves, parameter
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights
from llamatrain.model.transformer import DIRECTION, build_training, rope_state

BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam
Pair = tuple[Sequence[int], Sequence[int]]  # the tokens of two texts


class TextLoss:
    """Computes the negative log-likelihood of a text, and its gradient for the directions of all blocks but the first."""

    def __init__(
        self, h: Hyperparameters, weights: Weights, arrays: dict[str, np.ndarray], length: int, device: Device
    ) -> None:
        """Plan the graph for texts of up to `length` tokens; its memory is allocated at first use."""
        self._directions = [parameter(DIRECTION.format(layer), (h.embd,)) for layer in range(1, h.layers)]
        named = {leaf.name: leaf for leaf in self._directions}
        table = rope_state(h, length)
        graph = build_training(h, Weights({**weights.tensors, **named}, weights.deltas), 1, length, table)
        loss, gradients = value_and_gradients(graph.loss, self._directions)
        self._loss, self._gradients, self._inputs = loss, gradients, graph.inputs
        self._length, self._device = length, device
        outputs = [loss, *gradients]
        self.plan: Plan = plan(
            outputs, scratch=device.scratch, resident=device.resident_bytes, rewrite=device.rewrite
        )
        self._memory = {leaf: arrays[leaf.name] for leaf in collect_leaves(outputs) if leaf.name in arrays}
        self._memory[table] = h.rope_table(length)
        self._program: Program | None = None

    def compute(self, tokens: Sequence[int], directions: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the loss of a text with directions, and the gradient, which is like them: (blocks - 1, width)."""
        if self._program is None:
            self._program = Program(self.plan, self._memory, self._device)
        program, count = self._program, len(tokens) - 1
        padded = np.full(self._length + 1, tokens[-1])
        padded[: len(tokens)] = tokens
        program.write(self._inputs["tokens"], padded[:-1])
        program.write(self._inputs["positions"], np.arange(self._length))
        program.write(self._inputs["starts"], 0)
        program.write(self._inputs["targets"], padded[1:])
        program.write(self._inputs["weights"], np.arange(self._length) < count)
        for leaf, direction in zip(self._directions, directions, strict=True):
            program.write(leaf, direction)
        program()
        return float(program.read(self._loss)), np.stack([program.read(each) for each in self._gradients])


@dataclass
class DirectionTrainer:
    """Trains directions on pairs of texts, all of which are in each step, with Adam."""

    loss: TextLoss
    pairs: Sequence[Pair]
    rates: np.ndarray  # (blocks - 1, 1): how far a number of each direction moves in a step
    directions: np.ndarray  # (blocks - 1, width)
    _first_margins: list[float] = field(default_factory=list)
    _steps: int = 0

    def __post_init__(self) -> None:
        self._moments = np.zeros((2, *self.directions.shape))

    def step(self) -> float:
        """Change the directions once, and return the mean loss of the pairs before."""
        total, gradient = 0.0, np.zeros(self.directions.shape)
        for number, (wanted, unwanted) in enumerate(self.pairs):
            loss, wanted_gradient = self.loss.compute(wanted, self.directions)
            other, unwanted_gradient = self.loss.compute(unwanted, self.directions)
            if number == len(self._first_margins):
                self._first_margins.append(other - loss)
            gain = other - loss - self._first_margins[number]
            total += float(np.logaddexp(0.0, -gain))
            wrong = float(np.exp(-np.logaddexp(0.0, gain)))  # sigmoid(-gain)
            gradient += wrong * (wanted_gradient.astype(np.float64) - unwanted_gradient)
        self._update(gradient / len(self.pairs))
        return total / len(self.pairs)

    def _update(self, gradient: np.ndarray) -> None:
        """Take a step of Adam."""
        self._steps += 1
        for moment, value, beta in zip(self._moments, (gradient, gradient**2), BETAS, strict=True):
            moment += (1 - beta) * (value - moment)
        mean, square = (
            moment / (1 - beta**self._steps) for moment, beta in zip(self._moments, BETAS, strict=True)
        )
        self.directions = self.directions - self.rates * mean / (np.sqrt(square) + EPS)
