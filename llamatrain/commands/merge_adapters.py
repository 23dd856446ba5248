"""Merges adapters into a model, converts its matrices to another type, or does both."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

from llamatrain.adapters.options import AdapterOptions
from llamatrain.commands.logit_diff import Comparison, compare_logits, logits_before
from llamatrain.commands.new_file import (
    OUT,
    OVERWRITE,
    check_output,
    describe_kept_types,
    find_type,
    total_bytes,
)
from llamatrain.config.common import THREADS
from llamatrain.config.options import Option, Options
from llamatrain.config.units import Size
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf.type_names import MatrixType, QuantizedName
from llamatrain.io.disk_space import check_disk_space
from llamatrain.platform.terminal import log_line, progress_bar
from llamatrain.sources.options import OLLAMA

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.adapters.adapter import Adapter
    from llamatrain.adapters.merge import MergedTensor, Rounding
    from llamatrain.gguf.reader import Gguf
    from llamatrain.gguf.types import GgmlType
    from llamatrain.model.hyperparameters import Hyperparameters

NO_ADAPTER = "no adapter to merge; name one with --lora or --lora-scaled"
MAX_UNREPORTED = 0.25  # rounding error, as a share of what is added to a weight


@dataclass(frozen=True)
class ExportOptions(Options, panel="The new model"):
    """Options of `export-lora`."""

    out: Annotated[Path | None, OUT] = None
    only_adapter: Annotated[bool, Option("Write only the adapters, as one GGUF adapter.")] = False
    peft: Annotated[
        Path | None,
        Option("Write the adapters, as one, in PEFT's format into this folder.", unit="FOLDER"),
    ] = None
    type: Annotated[
        Literal["auto", MatrixType],
        Option(
            "Type of the new model's matrices, also without adapters; keep: the type that each has in BASE; auto: "
            "the type that the adapters were trained for (--quant-aware), otherwise keep.",
            unit="TYPE",
        ),
    ] = "auto"
    imatrix: Annotated[
        Path | None,
        Option(
            "Importance matrix of BASE, as imatrix and llama.cpp write it: columns that matter more are rounded less.",
            unit="FILE",
        ),
    ] = None
    overwrite: Annotated[bool, OVERWRITE] = False
    ollama: Annotated[str, OLLAMA] = ""
    check: Annotated[
        str,
        Option("Compare the logits of the new file with those of BASE and its adapters on this text."),
    ] = ""
    threads: Annotated[int | None, THREADS] = None


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The result of an export or a merge."""

    path: Path
    bytes: int
    tensors: int
    merged: int  # tensors that were changed
    copied: int  # tensors that are to the byte what they were
    notes: tuple[str, ...]
    check: Comparison | None


@dataclass(frozen=True, kw_only=True)
class MergePlan:
    """A merge that was checked and can be written."""

    gguf: "Gguf"
    h: "Hyperparameters"
    adapters: "Sequence[Adapter]"
    tensors: "Sequence[MergedTensor]"
    target_type: "GgmlType | None"
    threads: int
    importances: "Mapping[str, np.ndarray]" = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        """Print and store a note."""
        self.notes.append(line)
        log_line(f"note: {line}")


def merge_to_file(base: Path, options: ExportOptions, lora: AdapterOptions) -> Merged:
    """Write the merged model, and compare it if that was asked for."""
    out = options.out
    assert out
    plan = plan_export(base, out, options, lora)
    note_unchanged(plan)
    model = plan.gguf, plan.h, plan.adapters, plan.threads
    expected = logits_before(*model, options.check, plan.note) if options.check else None
    write_file(out, plan)
    tensors = plan.tensors
    return Merged(
        path=out,
        bytes=total_bytes(tensors),
        tensors=len(tensors),
        merged=count_merged(tensors),
        copied=sum(tensor.is_copy for tensor in tensors),
        check=compare_logits(out, expected, plan.threads) if expected else None,
        notes=tuple(plan.notes),
    )


def open_base(base: Path, lora: AdapterOptions) -> "tuple[Gguf, Hyperparameters, list[Adapter]]":
    """Open the base and the adapters for it."""
    from llamatrain.gguf.reader import open_gguf
    from llamatrain.model.hyperparameters import read_hyperparameters

    gguf = open_gguf(base)
    h = read_hyperparameters(gguf)
    if gguf.kind != "model":
        raise FileError(
            f"{base}: the base must be a model (got a file of kind {gguf.kind})", code="not-a-model"
        )
    return gguf, h, read_adapters(lora, h, base)


def plan_export(base: Path, out: Path, options: ExportOptions, lora: AdapterOptions) -> MergePlan:
    """Check everything that can fail, and plan the tensors of the new file."""
    from llamatrain.adapters import merge
    from llamatrain.distributed.cores import count_cores
    from llamatrain.model.file_types import choose_types

    if not lora.scaled and options.type in ("auto", "keep"):
        raise UsageError(f"{NO_ADAPTER}, or convert {base} with --type", code="no-adapter")
    gguf, h, adapters = open_base(base, lora)
    inputs = [base, *(path for path, _ in lora.scaled), *([options.imatrix] if options.imatrix else [])]
    check_output(out, inputs, overwrite=options.overwrite)
    target_type = choose_target(options.type, adapters)
    tensors = merge.plan_merge(gguf, adapters, choose_types(gguf.tensors, h, target_type, base))
    if options.imatrix and target_type and options.type == "auto":
        raise UsageError(
            "--imatrix would round differently from how the adapters were trained; leave it out, or choose a --type",
            code="conflicting-options",
        )
    importances = read_importances(options.imatrix, tensors) if options.imatrix else {}
    check_disk_space(out, total_bytes(tensors))
    return MergePlan(
        gguf=gguf,
        h=h,
        adapters=adapters,
        tensors=tensors,
        target_type=target_type,
        threads=options.threads or count_cores(),
        importances=importances,
    )


def choose_target(name: Literal["auto", MatrixType], adapters: "Sequence[Adapter]") -> "GgmlType | None":
    """Return the type that matrices get, or None if each keeps its own; "auto" is what adapters were trained for."""
    if name != "auto":
        return find_type(name)
    trained_for = {adapter.merged_type: adapter for adapter in adapters if adapter.merged_type}
    if len(trained_for) > 1:
        kinds = " and ".join(sorted(trained_for))
        raise UsageError(
            f"the adapters were trained for different types ({kinds}); choose one with --type",
            code="conflicting-types",
        )
    for kind, adapter in trained_for.items():
        if kind not in get_args(QuantizedName):
            raise FileError(
                f"{adapter.source}: trained for the unknown type {kind[:40]!r}; choose one with --type",
                code="unknown-type",
            )
        log_line(f"note: matrices become {kind}, which {adapter.source} was trained for")
        return find_type(cast("MatrixType", kind))
    return None


def read_importances(path: Path, tensors: "Sequence[MergedTensor]") -> "Mapping[str, np.ndarray]":
    """Read an importance matrix for the tensors that are encoded; raise if it has no effect on any of them."""
    from llamatrain.gguf.imatrix import fit_importances, read_imatrix
    from llamatrain.gguf.quants.kinds import BY_IMPORTANCE

    found = read_imatrix(path)
    encoded = [tensor for tensor in tensors if not tensor.is_copy and tensor.type.number in BY_IMPORTANCE]
    if not encoded:
        raise UsageError(
            "--imatrix has no effect on the types that are written; leave it out, or choose a --type of 2 to 6 bits, "
            "such as q4_k",
            code="unused-option",
        )
    return fit_importances(path, found, [tensor.base for tensor in encoded])


def count_merged(tensors: "Sequence[MergedTensor]") -> int:
    """Return how many tensors an adapter changes."""
    return sum(bool(tensor.adapters) for tensor in tensors)


def read_adapters(lora: AdapterOptions, h: "Hyperparameters", base: Path) -> "list[Adapter]":
    """Read the adapters, and check that each fits the base."""
    from llamatrain.adapters.adapter import check_fits
    from llamatrain.adapters.read import read_adapter

    adapters = []
    for path, scale in lora.scaled:
        adapter = read_adapter(path, h)
        check_fits(adapter, h, base)
        adapters.append(adapter.scale_by(scale))
    return adapters


# ---- before anything is written --------------------------------------------


def note_unchanged(plan: MergePlan) -> None:
    """Note tensors that are not used, or that cannot have the new type."""
    from llamatrain.model.hyperparameters import describe_unused, unused_tensors

    if names := unused_tensors(plan.gguf, plan.h):
        plan.note(describe_unused(names, "kept" if plan.target_type else "kept as they are"))
    if note := describe_kept_types(plan.tensors, plan.h, plan.target_type):
        plan.note(note)
    if plan.importances and (note := describe_unweighted(plan)):
        plan.note(note)


def describe_unweighted(plan: MergePlan) -> str | None:
    """Return a note about matrices for which the importance matrix has nothing, or None."""
    from llamatrain.gguf.quants.kinds import BY_IMPORTANCE

    names = [
        tensor.base.name
        for tensor in plan.tensors
        if not tensor.is_copy
        and tensor.type.number in BY_IMPORTANCE
        and tensor.base.name not in plan.importances
    ]
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"{names[0]}{more} not in the importance matrix; all columns count the same" if names else None


# ---- writing ---------------------------------------------------------------


def write_file(out: Path, plan: MergePlan) -> None:
    """Write the merged model and print a summary."""
    from llamatrain.adapters import merge

    tensors, size = plan.tensors, total_bytes(plan.tensors)
    with progress_bar(
        "merging" if plan.adapters else "converting", total=size, unit="B", unit_scale=True
    ) as bar:
        roundings = merge.write_merged(
            out,
            plan.gguf,
            tensors,
            plan.target_type,
            importances=plan.importances,
            threads=plan.threads,
            progress=bar.update,
        )
    copied = sum(tensor.is_copy for tensor in tensors)
    converted = sum(tensor.type is not tensor.base.type for tensor in tensors)
    counts = [f"{count_merged(tensors)} of {len(tensors)} tensors merged"] if plan.adapters else []
    counts += (
        [f"{converted} of {len(tensors)} tensors converted to {plan.target_type.name.lower()}"]
        if plan.target_type
        else []
    )
    log_line(f"{out}: {Size(size).text}, {', '.join(counts)}, {copied} copied unchanged")
    note_rounding(roundings, plan)


def note_rounding(roundings: "dict[str, Rounding]", plan: MergePlan) -> None:
    """Note if rounding loses much of what the adapters add, unless they were trained with that rounding."""
    worst = max(roundings, key=lambda name: roundings[name].share, default="")
    kinds = {tensor.type.name for tensor in plan.tensors if tensor.is_rounded}
    if kinds <= {adapter.merged_type.upper() for adapter in plan.adapters}:
        return
    if worst and roundings[worst].share > MAX_UNREPORTED:
        finer = "f32" if kinds & {"F16", "BF16"} else "f16" if "Q8_0" in kinds else "q8_0"
        error, change = (
            math.fsum(getattr(rounding, name) for rounding in roundings.values())
            for name in ("error", "change")
        )
        plan.note(
            f"rounding loses {roundings[worst].share:.0%} of what the adapters add to {worst}, "
            f"and {math.sqrt(error / change):.0%} over all weights; --type {finer} loses less"
        )
