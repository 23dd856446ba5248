"""Makes a control vector of pairs of texts: of what the blocks of a model give out for one side and the other."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from llamatrain.commands.new_file import OUT, OVERWRITE, check_output
from llamatrain.config.common import THREADS
from llamatrain.config.options import Option, Options
from llamatrain.config.read_limited import read_limited
from llamatrain.errors import DataError, LlamatrainError
from llamatrain.platform.terminal import log_line, progress_bar

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.adapters.control_vector import Directions
    from llamatrain.data.tokenizer import Tokenizer
    from llamatrain.gguf.reader import Gguf
    from llamatrain.model.hyperparameters import Hyperparameters

MAX_BYTES = 1 << 26  # of a file of texts


@dataclass(frozen=True)
class ControlVectorOptions(Options, panel="The control vector"):
    """Options of `control-vector`."""

    out: Annotated[Path, OUT]
    method: Annotated[
        Literal["mean", "pca"],
        Option(
            "mean: the mean of the differences; pca: the direction in which they are largest, as long as they are "
            "in it on average.",
            unit="METHOD",
        ),
    ] = "mean"
    tokens: Annotated[
        Literal["last", "all"],
        Option(
            "Compare what blocks give out for the last token of a text, or the mean over all.", unit="TOKENS"
        ),
    ] = "last"
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
    from llamatrain.adapters.load_adapted import load_with_adapters
    from llamatrain.adapters.options import AdapterOptions
    from llamatrain.commands.generate import load_tokenizer
    from llamatrain.distributed.cores import count_cores
    from llamatrain.gguf.reader import open_gguf
    from llamatrain.io.mapped_file import verify_unchanged
    from llamatrain.sample.hidden_states import BlockOutputs

    threads = options.threads or count_cores()
    gguf = open_gguf(model)
    check_output(options.out, [model, positive, negative], overwrite=options.overwrite)
    h, weights, arrays = load_with_adapters(gguf, AdapterOptions(), threads)
    if h.layers < 2:
        raise LlamatrainError(
            f"{model}: the model has one block only, and control vectors change no first block",
            code="unsupported-model",
        )
    sides = read_pairs(positive, negative)
    tokenizer = load_tokenizer(gguf, h)
    texts = [
        [encode_text(gguf, h, tokenizer, path, text) for text in side]
        for path, side in zip((positive, negative), sides, strict=True)
    ]
    outputs = BlockOutputs(
        gguf, h, weights, arrays, max(len(tokens) for side in texts for tokens in side), threads
    )
    differences = []
    with (
        verify_unchanged(gguf.mapped_files),
        progress_bar("reading", total=len(texts[0]), unit=" pairs") as bar,
    ):
        for one, other in zip(*texts, strict=True):
            differences.append(outputs.compute(one, options.tokens) - outputs.compute(other, options.tokens))
            bar.update(1)
    directions = find_directions(np.stack(differences), options.method, model)
    write_control_vector(options.out, directions, h)
    lengths = {layer: float(np.linalg.norm(direction)) for layer, direction in directions.items()}
    log_line(f"{options.out}: a control vector of {len(directions)} blocks, from {len(differences)} pairs")
    return ControlVector(path=options.out, pairs=len(differences), lengths=lengths)


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


def find_directions(differences: "np.ndarray", method: Literal["mean", "pca"], model: Path) -> "Directions":
    """Return the direction of each block but the first, given the differences (pairs, blocks, width)."""
    import numpy as np

    if not np.isfinite(differences).all():
        raise LlamatrainError(
            f"{model}: what the blocks give out is not finite; the file is damaged", code="not-finite"
        )
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
