"""Trains two dense layers on digits of 8 x 8 pixels with the engine alone, and AdamW in the graph.

    python scripts/digits.py [STEPS]

The digits are drawn from a small font of seven lines, at random positions, dimmed, with noise.
"""

import sys
import time

import numpy as np

from llamatrain.engine.program import Program
from llamatrain.graph.ops import cross_entropy_loss, matmul, relu
from llamatrain.graph.tensor import F32, I32, Tensor, parameter, placeholder
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.optim.update_graph import differentiate, streamed_update

# each number is a line of five pixels, from the top
FONT = np.array(
    [
        [14, 17, 19, 21, 25, 17, 14],
        [4, 12, 4, 4, 4, 4, 14],
        [14, 17, 1, 2, 4, 8, 31],
        [31, 2, 4, 2, 1, 17, 14],
        [2, 6, 10, 18, 31, 2, 2],
        [31, 16, 30, 1, 1, 17, 14],
        [6, 8, 16, 30, 17, 17, 14],
        [31, 1, 2, 4, 8, 8, 8],
        [14, 17, 17, 14, 17, 17, 14],
        [14, 17, 17, 15, 1, 2, 12],
    ]
)
SIDE, HIDDEN, BATCH, RATE = 8, 48, 64, 3e-3
OPTIMIZER = AdamW()


def draw_digits(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return images (count, 64) and the digits that they show."""
    digits = random.integers(0, 10, count)
    glyphs = (FONT[digits, :, None] >> np.arange(4, -1, -1)) & 1
    images = np.zeros((count, SIDE, SIDE), np.float32)
    for image, glyph in zip(images, glyphs, strict=True):
        top, left = random.integers(0, 2), random.integers(0, 4)
        image[top : top + 7, left : left + 5] = glyph * random.uniform(0.6, 1.0)
    return (images + 0.15 * random.standard_normal(images.shape)).astype(np.float32).reshape(
        count, -1
    ), digits.astype(np.int32)


class Classifier:
    """A classifier: one program trains and another one computes scores, over the same weights."""

    def __init__(self, seed: int = 0) -> None:
        sizes = {"in": (HIDDEN, SIDE**2), "out": (10, HIDDEN)}
        random = np.random.default_rng(seed)
        self.memory: dict[Tensor, np.ndarray] = {}
        layers = []
        for name, (outputs, inputs) in sizes.items():
            weight = parameter(f"{name}.weight", (outputs, inputs))
            bias = parameter(f"{name}.bias", (outputs,))
            self.memory |= {
                weight: (random.standard_normal((outputs, inputs)) * inputs**-0.5).astype(np.float32)
            }
            self.memory |= {bias: np.zeros(outputs, np.float32)}
            layers.append((weight, bias))
        self.images = placeholder("images", (BATCH, SIDE**2), F32)
        self.targets = placeholder("targets", (BATCH,), I32)
        shares = placeholder("shares", (BATCH,), F32)
        (first, first_bias), (second, second_bias) = layers
        self.scores = matmul(relu(matmul(self.images, first, first_bias)), second, second_bias)
        self.loss = cross_entropy_loss(self.scores, self.targets, shares)
        self.update_inputs, results = streamed_update(differentiate(self.loss, list(self.memory)), OPTIMIZER)
        states = {
            state: np.zeros(state.shape, np.float32)
            for weight in self.memory
            for state in OPTIMIZER.states_for(weight)
        }
        self.step = Program.build(results, self.memory | states)
        self.step.write(shares, 1 / BATCH)
        self.scorer = Program.build([self.scores], self.memory)
        self.steps = 0

    def learn(self, images: np.ndarray, digits: np.ndarray) -> float:
        """Take a step and return the loss before it."""
        self.steps += 1
        schedule = OPTIMIZER.schedule(self.steps, RATE)
        for leaf, values in (
            (self.images, images),
            (self.targets, digits),
            (self.update_inputs.schedule, schedule),
        ):
            self.step.write(leaf, values)
        self.step()
        return float(self.step.read(self.loss))

    def measure_accuracy(self, images: np.ndarray, digits: np.ndarray) -> float:
        """Return the share of images that are classified correctly."""
        predictions = []
        for first in range(0, len(images), BATCH):
            self.scorer.write(self.images, images[first : first + BATCH])
            self.scorer()
            predictions.append(self.scorer.read(self.scores).argmax(1))
        return float(np.mean(np.concatenate(predictions) == digits))


def main() -> None:
    """Train and print the accuracy on unseen digits."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    random = np.random.default_rng(1)
    start = time.perf_counter()
    unseen = draw_digits(16 * BATCH, random)
    classifier = Classifier()
    for step in range(1, steps + 1):
        loss = classifier.learn(*draw_digits(BATCH, random))
        if step % 100 == 0:
            accuracy = classifier.measure_accuracy(*unseen)
            seconds = time.perf_counter() - start
            print(f"step {step}  loss {loss:.3f}  accuracy {accuracy:.3f}  {seconds:.1f} s")


if __name__ == "__main__":
    main()
