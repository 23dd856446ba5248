"""Measures on some data how much each column of a model's weights matters, and writes llama.cpp's importance matrix."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from llamatrain.adapters.options import AdapterOptions
from llamatrain.commands.evaluate import open_rows
from llamatrain.commands.new_file import OUT, OVERWRITE, check_output
from llamatrain.commands.opened_model import OpenedModel, open_model
from llamatrain.config.common import CTX, THREADS
from llamatrain.config.options import (
    COUNT,
    Option,
    Options,
    build,
    changed_options,
    reject_unused,
    unused_options,
)
from llamatrain.data.options import DataOptions
from llamatrain.errors import LlamatrainError, UsageError
from llamatrain.platform.terminal import log_line, progress_bar
from llamatrain.preference.options import PreferenceOptions

if TYPE_CHECKING:
    from llamatrain.data.batches import Batches
    from llamatrain.gguf.imatrix import InputSums


@dataclass(frozen=True)
class ImatrixOptions(Options, panel="The importance matrix"):
    """Options of `imatrix`."""

    out: Annotated[Path, OUT]
    ctx: Annotated[int | None, CTX] = None
    chunks: Annotated[
        int | None, Option("Read this many rows of the data, at most.", unit="ROWS", least=1, most=COUNT)
    ] = None
    overwrite: Annotated[bool, OVERWRITE] = False
    threads: Annotated[int | None, THREADS] = None


@dataclass(frozen=True, kw_only=True)
class Imatrix:
    """The result of `imatrix`."""

    path: Path
    weights: int
    chunks: int
    tokens: int
    notes: tuple[str, ...] = ()


IMATRIX_OPTIONS = (ImatrixOptions, AdapterOptions, DataOptions)


def make_imatrix(model: Path, data: Sequence[str], given: Mapping[str, Any]) -> Imatrix:
    """Write the importance matrix of a model on data; `given` are options of IMATRIX_OPTIONS by name."""
    from llamatrain.distributed.once import run_on_rank_zero
    from llamatrain.gguf.imatrix import write_imatrix

    options, lora = build(ImatrixOptions, given), build(AdapterOptions, given)
    data_options = build(DataOptions, given)
    values = vars(data_options) | {"command": "imatrix"}
    reject_unused(unused_options(values, DataOptions), changed_options(given, DataOptions))
    if not data:
        raise UsageError(
            "no data given; name files (text, JSON, CSV, Parquet), folders or globs", code="no-data"
        )
    inputs = [
        model,
        *(path for path, _ in lora.scaled),
        *(Path(name) for name in data if Path(name).is_file()),
    ]
    check_output(options.out, inputs, overwrite=options.overwrite)
    opened = open_model(model, lora, options.threads, "cpu")
    rows = open_rows(data, opened, data_options, options.ctx, PreferenceOptions())
    sums, chunks = measure_inputs(opened, rows, options.chunks)
    tokens = int(sums[opened.h.output_weight].counts[0])
    run_on_rank_zero(lambda: write_imatrix(options.out, sums, data, chunks, max(rows.lengths)))
    log_line(f"{options.out}: an importance matrix of {len(sums)} weights, from {tokens:,} tokens")
    notes = describe_missing(opened, sums)
    for note in notes:
        log_line(f"note: {note}")
    return Imatrix(path=options.out, weights=len(sums), chunks=chunks, tokens=tokens, notes=notes)


def measure_inputs(
    model: OpenedModel, rows: "Batches", limit: int | None
) -> "tuple[dict[str, InputSums], int]":
    """Return the sums of all weights over some rows, and the number of rows. Ranks share the rows."""
    import numpy as np

    from llamatrain.distributed.comm import get_comm
    from llamatrain.io.mapped_file import mapped_files, verify_unchanged
    from llamatrain.sample.input_sums import InputMeter, add_sums
    from llamatrain.train.evaluate import gather_batch_losses

    comm, total, chunks = get_comm(), dict[str, "InputSums"](), 0
    meter = InputMeter(model.gguf, model.h, model.weights, model.arrays, rows.lengths, model.threads)
    files = mapped_files(model.arrays.values())
    own = limit and len(range(comm.rank, limit, comm.size))

    def measure_rows() -> "Iterator[tuple[dict[str, InputSums], int]]":
        for row in islice(rows.one_epoch(1, comm.rank, comm.size), own):
            with verify_unchanged(files):
                sums = meter.measure(row)
            yield sums, row.samples

    with progress_bar("reading", total=len(rows.dataset), unit=" samples") as bar:
        for sums, samples in gather_batch_losses(comm, measure_rows()):
            add_sums(total, sums)
            chunks += 1
            bar.update(samples)
    if not all(np.isfinite(squares).all() for squares, _ in total.values()):
        raise LlamatrainError(
            f"{model.gguf.path}: what the weights are multiplied with is not finite; the file is damaged",
            code="not-finite",
        )
    return total, chunks


def describe_missing(model: OpenedModel, sums: "Mapping[str, InputSums]") -> tuple[str, ...]:
    """Return a note about matrices without importances, and about experts that no token chose."""
    from llamatrain.model.lora_targets import group_weights

    matrices = [
        name
        for name, kind in model.h.weight_kinds()
        if kind.role in ("matrix", "output") and name not in sums
    ]
    notes = []
    if matrices:
        more = f" and {len(matrices) - 1} more have" if len(matrices) > 1 else " has"
        notes.append(f"{matrices[0]}{more} no importances; they are encoded as without the file")
    stacks = [name for name in group_weights("experts", model.h) if name in sums]
    if unused := sum(int((sums[name].counts == 0).sum()) for name in stacks):
        notes.append(f"{unused} matrices of experts were not used by any token; more data would reach them")
    return tuple(notes)
