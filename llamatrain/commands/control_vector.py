"""Makes a control vector of pairs of texts: of what the blocks of a model give out for one side and the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from llamatrain.commands.new_file import OUT, OVERWRITE, check_output
from llamatrain.config.common import THREADS
from llamatrain.config.options import (
    COUNT,
    Condition,
    Option,
    Options,
    changed_options,
    reject_unused,
    unused_options,
)
from llamatrain.config.read_limited import read_limited
from llamatrain.errors import DataError, LlamatrainError
from llamatrain.platform.terminal import log_line, progress_bar

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.adapters.control_vector import Directions
    from llamatrain.data.tokenizer import Tokenizer
    from llamatrain.gguf.reader import Gguf
    from llamatrain.model.hyperparameters import Hyperparameters
    from llamatrain.model.lora import Weights
    from llamatrain.sample.hidden_states import BlockOutputs
    from llamatrain.train.directions import Pair

OTHERWISE = "with --method {method}"
COMPARES = Condition(lambda values: values["method"] != "trained", OTHERWISE)
TRAINS = Condition(lambda values: values["method"] == "trained", OTHERWISE)
MAX_BYTES = 1 << 26  # of a file of texts


@dataclass(frozen=True)
class ControlVectorOptions(Options, panel="The control vector"):
    """Options of `control-vector`."""

    out: Annotated[Path, OUT]
    method: Annotated[
        Literal["mean", "pca", "trained"],
        Option(
            "mean: the mean of the differences; pca: the direction in which they are largest, as long as they are "
            "in it on average; trained: directions that make the positive texts likelier than the negative ones.",
            unit="METHOD",
        ),
    ] = "mean"
    tokens: Annotated[
        Literal["last", "all"],
        Option(
            "Compare what blocks give out for the last token of a text, or the mean over all.",
            unit="TOKENS",
            when=(COMPARES,),
        ),
    ] = "last"
    iters: Annotated[
        int, Option("Steps, each with all pairs.", unit="STEPS", least=1, most=COUNT, when=(TRAINS,))
    ] = 20
    lr: Annotated[
        float,
        Option(
            "Change in a step, as a share of the size of what blocks give out.",
            unit="RATE",
            above=0,
            most=1,
            example="0.01",
            when=(TRAINS,),
        ),
    ] = 0.01
    overwrite: Annotated[bool, OVERWRITE] = False
    threads: Annotated[int | None, THREADS] = None


@dataclass(frozen=True, kw_only=True)
class ControlVector:
    """The result of `control-vector`."""

    path: Path
    pairs: int
    lengths: dict[int, float]  # of the directions, by block


def make_control_vector(
    model: Path, positive: Path, negative: Path, options: ControlVectorOptions
) -> ControlVector:
    """Write the control vector that leads from negative texts to positive ones."""
    import numpy as np

    from llamatrain.adapters.control_vector import write_control_vector
    from llamatrain.gguf.reader import open_gguf
    from llamatrain.io.mapped_file import verify_unchanged

    values = vars(options)
    reject_unused(unused_options(values, ControlVectorOptions), changed_options(values, ControlVectorOptions))
    gguf = open_gguf(model)
    check_output(options.out, [model, positive, negative], overwrite=options.overwrite)
    with verify_unchanged(gguf.mapped_files):
        texts = read_pairs(positive, negative)
        h, directions = find_directions(gguf, positive, negative, texts, options)
    write_control_vector(options.out, directions, h)
    lengths = {layer: float(np.linalg.norm(direction)) for layer, direction in directions.items()}
    blocks, pairs = len(directions), len(texts[0])
    log_line(
        f"{options.out}: a control vector of {blocks} block{'s' * (blocks > 1)}, from {pairs} pair{'s' * (pairs > 1)}"
    )
    return ControlVector(path=options.out, pairs=len(texts[0]), lengths=lengths)


def find_directions(
    gguf: "Gguf",
    positive: Path,
    negative: Path,
    texts: tuple[list[str], list[str]],
    options: ControlVectorOptions,
) -> "tuple[Hyperparameters, Directions]":
    """Return the model, and the direction of each block but the first."""
    import numpy as np

    from llamatrain.adapters.load_adapted import load_with_adapters
    from llamatrain.adapters.options import AdapterOptions
    from llamatrain.commands.generate import load_tokenizer
    from llamatrain.distributed.cores import count_cores
    from llamatrain.sample.hidden_states import BlockOutputs

    threads = options.threads or count_cores()
    h, weights, arrays = load_with_adapters(gguf, AdapterOptions(), threads)
    if h.layers < 2:
        raise LlamatrainError(
            f"{gguf.path}: the model has one block only, and control vectors change no first block",
            code="unsupported-model",
        )
    tokenizer = load_tokenizer(gguf, h)
    sides = [
        [encode_text(gguf, h, tokenizer, path, text) for text in side]
        for path, side in zip((positive, negative), texts, strict=True)
    ]
    pairs = list(zip(*sides, strict=True))
    length = max(len(tokens) for side in sides for tokens in side)
    outputs = compare_pairs(BlockOutputs(gguf, h, weights, arrays, length, threads), pairs, options.tokens)
    if not np.isfinite(outputs).all():
        raise LlamatrainError(
            f"{gguf.path}: what the blocks give out is not finite; the file is damaged", code="not-finite"
        )
    if options.method == "trained":
        return h, train_directions(gguf, h, weights, arrays, pairs, outputs, options)
    return h, main_directions(outputs[:, 0] - outputs[:, 1], options.method)


def compare_pairs(
    outputs: "BlockOutputs", pairs: "Sequence[Pair]", place: Literal["last", "all"]
) -> "np.ndarray":
    """Return what blocks give out for the texts of each pair: (pairs, 2, blocks, width)."""
    import numpy as np

    found = []
    with progress_bar("reading", total=len(pairs), unit=" pairs") as bar:
        for pair in pairs:
            found.append([outputs.compute(tokens, place) for tokens in pair])
            bar.update(1)
    return np.array(found)


def train_directions(
    gguf: "Gguf",
    h: "Hyperparameters",
    weights: "Weights",
    arrays: "dict[str, np.ndarray]",
    pairs: "Sequence[Pair]",
    outputs: "np.ndarray",
    options: ControlVectorOptions,
) -> "Directions":
    """Return trained directions; `outputs` say how large the numbers of each block are."""
    import numpy as np

    from llamatrain.distributed.cores import count_cores
    from llamatrain.engine.device import create_device
    from llamatrain.model.load import check_memory
    from llamatrain.train.directions import DirectionTrainer, TextLoss

    if short := next((pair for pair in pairs if min(map(len, pair)) < 2), None):
        raise DataError(
            f"a text must have two tokens or more to be trained on (got {min(map(len, short))})",
            code="text-too-short",
        )
    device = create_device("cpu", options.threads or count_cores())
    length = max(len(tokens) for pair in pairs for tokens in pair) - 1
    loss = TextLoss(h, weights, arrays, length, device)
    check_memory(gguf, loss.plan.arena, "a shorter text")
    sizes = np.sqrt(np.mean(np.square(outputs[:, :, 1:], dtype=np.float64), axis=(0, 1, 3)))[:, None]
    trainer = DirectionTrainer(loss, pairs, options.lr * sizes, np.zeros((h.layers - 1, h.embd)))
    with progress_bar("training", total=options.iters, unit=" steps") as bar:
        for step in range(options.iters):
            value = trainer.step()
            if not np.isfinite(value):
                raise LlamatrainError(
                    f"the loss of step {step + 1} is not finite; use a smaller --lr", code="not-finite"
                )
            bar.update(1)
    log_line(f"the loss of a pair was {np.log(2):.3f} at first, and {value:.3f} before the last step")
    return {layer + 1: each.astype(np.float32) for layer, each in enumerate(trainer.directions)}


def read_pairs(positive: Path, negative: Path) -> tuple[list[str], list[str]]:
    """Return the texts of both files, which must be equally many."""
    one, other = read_texts(positive), read_texts(negative)
    if len(one) != len(other):
        raise DataError(
            f"{negative}: there must be as many lines as in {positive}, each with a text (got {len(other)} and "
            f"{len(one)})",
            code="unequal-pairs",
        )
    return one, other


def read_texts(path: Path) -> list[str]:
    r"""Return the texts of a file: its lines that are not empty, in which \n stands for a line break."""
    raw = read_limited(path, MAX_BYTES, "a file of texts")
    try:
        lines = raw.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8", code="not-utf8") from None
    texts = [line.replace("\\n", "\n") for line in lines if line]
    if not texts:
        raise DataError(f"{path}: the file has no text; write one in each line", code="no-data")
    return texts


def encode_text(
    gguf: "Gguf", h: "Hyperparameters", tokenizer: "Tokenizer | None", path: Path, text: str
) -> list[int]:
    """Return the tokens of a text, as `generate` would read it."""
    from llamatrain.commands.generate import encode_prompt
    from llamatrain.data.tokenizer import to_bytes

    tokens, count = encode_prompt(gguf, tokenizer, to_bytes(text), h.ctx)
    if count > h.ctx:
        raise DataError(
            f"{path}: a text must fit the model's context of {h.ctx} tokens (got {count}); shorten it",
            code="text-too-long",
        )
    if max(tokens) >= h.vocab:
        raise DataError(
            f"{path}: token numbers must be below {h.vocab} (got {max(tokens)})", code="unknown-token"
        )
    return tokens


def main_directions(differences: "np.ndarray", method: Literal["mean", "pca", "trained"]) -> "Directions":
    """Return the direction of each block but the first, given the differences (pairs, blocks, width)."""
    import numpy as np

    find = mean_direction if method == "mean" else main_direction
    directions = {
        layer: find(differences[:, layer].astype(np.float64)).astype(np.float32)
        for layer in range(1, differences.shape[1])
    }
    if not any(direction.any() for direction in directions.values()):
        raise DataError(
            "the texts of each pair give the same, so there is no direction between them",
            code="no-difference",
        )
    return directions


def mean_direction(rows: "np.ndarray") -> "np.ndarray":
    """Return the mean of rows."""
    return rows.mean(axis=0)


def main_direction(rows: "np.ndarray") -> "np.ndarray":
    """Return the first principal direction of rows around zero, as long as they are in it on average.

    Its sign is that of the rows' mean.
    """
    import numpy as np

    main = np.linalg.svd(rows, full_matrices=False)[2][0]
    return main * np.mean(rows @ main)
