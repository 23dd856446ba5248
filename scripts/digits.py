"""Trains a net that reads digits, saves it as GGUF, loads it again and measures it.

    python scripts/digits.py [dense|conv] [--data FOLDER] [--out FILE] [--epochs N]

FOLDER has the four unpacked files of MNIST, such as train-images-idx3-ubyte. Without it, digits are drawn from a
small font of seven lines: larger or smaller, a little off the middle, dimmed, with noise.
"""

import argparse
from pathlib import Path

import numpy as np

from llamatrain.custom import Dataset, Graph, evaluate, fit, ops, read_idx

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
SIDE, BATCH = 28, 50
DRAWN = 4000, 1000  # samples for training and for the test


def draw_digits(count: int, seed: int) -> Dataset:
    """Return images (count, 28, 28) with values around 0 to 1, and the digits that they show."""
    random = np.random.default_rng(seed)
    digits = random.integers(0, 10, count)
    glyphs = (FONT[digits, :, None] >> np.arange(4, -1, -1)) & 1  # (count, 7, 5)
    images = 0.1 * random.standard_normal((count, SIDE, SIDE))
    for image, glyph in zip(images, glyphs, strict=True):
        tall, wide = random.integers(14, 23), random.integers(10, 17)
        top, left = ((SIDE - size) // 2 + random.integers(-2, 3) for size in (tall, wide))
        scaled = glyph[np.arange(tall) * 7 // tall][:, np.arange(wide) * 5 // wide]
        image[top : top + tall, left : left + wide] += scaled * random.uniform(0.6, 1.0)
    return Dataset(images.astype(np.float32), digits)


def read_mnist(folder: Path, part: str) -> Dataset:
    """Return the part "train" or "t10k" of MNIST."""
    images = read_idx(folder / f"{part}-images-idx3-ubyte") / np.float32(255)
    return Dataset(images, read_idx(folder / f"{part}-labels-idx1-ubyte"))


def build_dense() -> Graph:
    """Return a net of two dense layers."""
    graph = Graph(batch=BATCH, name="digits-dense")
    images = graph.input((SIDE, SIDE))
    hidden = ops.relu(graph.linear("hidden", ops.flatten(images), 200))
    graph.output = graph.linear("output", hidden, 10)
    return graph


def build_conv() -> Graph:
    """Return a net of two convolutions and a dense layer."""
    graph = Graph(batch=BATCH, name="digits-conv")
    x = ops.reshape(graph.input((SIDE, SIDE)), shape=(BATCH, 1, SIDE, SIDE))
    for name, filters in (("conv1", 8), ("conv2", 16)):
        x = ops.pool_2d(ops.relu(graph.conv_2d(name, x, filters, 3, padding=1)), 2)
    graph.output = graph.linear("output", ops.flatten(x), 10)
    return graph


NETS = {"dense": build_dense, "conv": build_conv}


def main(arguments: list[str] | None = None) -> None:
    """Train, save, load, and print the accuracy on digits that were not trained."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("net", nargs="?", choices=NETS, default="dense")
    parser.add_argument("--data", type=Path, help="a folder with MNIST's files")
    parser.add_argument("--out", type=Path, default="digits.gguf", help="the file for the weights")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.data:
        train, test = (read_mnist(options.data, part) for part in ("train", "t10k"))
    else:
        train, test = (draw_digits(count, seed) for seed, count in enumerate(DRAWN))
    graph = NETS[options.net]()
    fit(graph, train, loss="cross_entropy", epochs=options.epochs, validation=0.1, show=True)
    graph.save(options.out)
    loaded = NETS[options.net]()
    loaded.load(options.out)
    print(f"{options.out}: {evaluate(loaded, test)} on {len(test):,} other digits")


if __name__ == "__main__":
    main()
