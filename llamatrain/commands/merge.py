"""Merges adapters into a model, converts its matrices to another type, or does both."""

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from llamatrain.adapters.options import AdapterOptions
from llamatrain.commands.logit_diff import Comparison, before_export, compared
from llamatrain.config.common import THREADS
from llamatrain.config.options import Option, Options
from llamatrain.config.units import Size
from llamatrain.errors import FileError, MissingError, UsageError
from llamatrain.platform.terminal import log_line, progress_bar

if TYPE_CHECKING:
    from llamatrain.adapters.adapter import Adapter
    from llamatrain.adapters.merge import MergedTensor, Rounding
    from llamatrain.gguf.reader import Gguf
    from llamatrain.gguf.types import GgmlType
    from llamatrain.model.hyperparameters import Hyperparameters

NO_ADAPTER = "there is nothing to merge: name an adapter with --lora or --lora-scaled"
ROUNDED = 0.25  # of what is added to a weight: how far off it may be, unsaid


@dataclass(frozen=True)
class ExportOptions(Options, panel="The new model"):
    out: Annotated[Path | None, Option("The file to write.", short="o")] = None
    only_adapter: Annotated[bool, Option("Write the adapters alone, as one that llama.cpp loads.")] = False
    peft: Annotated[
        Path | None,
        Option("Write the adapters, as one, for Hugging Face's PEFT into this folder.", unit="FOLDER"),
    ] = None
    type: Annotated[
        Literal[
            "keep",
            "f32",
            "f16",
            "bf16",
            "q8_0",
            "q6_k",
            "q5_k",
            "q4_k",
            "q3_k",
            "q2_k",
            "q5_1",
            "q5_0",
            "q4_1",
            "q4_0",
            "iq4_nl",
            "iq4_xs",
        ],
        Option(
            "The type of the new model's matrices; keep: that which each has in BASE. Needs no adapter.",
            unit="TYPE",
        ),
    ] = "keep"
    overwrite: Annotated[bool, Option("Replace the file --out.")] = False
    check: Annotated[
        str,
        Option(
            "Compare the logits of BASE with its adapters to those of the new file, on this text, and judge the difference."
        ),
    ] = ""
    threads: Annotated[int | None, THREADS] = None


@dataclass(frozen=True, kw_only=True)
class Merged:
    path: Path
    bytes: int
    tensors: int
    merged: int  # tensors that an adapter changed
    copied: int  # tensors that are to the byte what they were
    notes: tuple[str, ...]
    check: Comparison | None


@dataclass(frozen=True, kw_only=True)
class MergePlan:
    """What is made one, and seen to fit together."""

    gguf: "Gguf"
    h: "Hyperparameters"
    adapters: "Sequence[Adapter]"
    made: "Sequence[MergedTensor]"
    kind: "GgmlType | None"
    threads: int
    notes: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        self.notes.append(line)
        log_line(f"note: {line}")


def merged(base: Path, options: ExportOptions, lora: AdapterOptions) -> Merged:
    """The new file, written; and compared, if that is asked for."""
    out = options.out
    assert out
    merging = prepared(base, out, options, lora)
    note_rest(merging)
    inputs = merging.gguf, merging.h, merging.adapters, merging.threads
    expected = before_export(*inputs, options.check, merging.note) if options.check else None
    write(out, merging)
    made = merging.made
    return Merged(
        path=out,
        bytes=size_of(made),
        tensors=len(made),
        merged=touched(made),
        copied=sum(piece.is_copy for piece in made),
        check=compared(out, expected, merging.threads) if expected else None,
        notes=tuple(merging.notes),
    )


def opened(base: Path, lora: AdapterOptions) -> "tuple[Gguf, Hyperparameters, list[Adapter]]":
    """The base, and the adapters for it."""
    from llamatrain.gguf.reader import open_gguf
    from llamatrain.model.hyperparameters import read_hyperparameters

    gguf = open_gguf(base)
    h = read_hyperparameters(gguf)
    if gguf.kind != "model":
        raise FileError(f"{base}: no model but a {gguf.kind}; a model is needed")
    return gguf, h, read_adapters(lora, h, base)


def prepared(base: Path, out: Path, options: ExportOptions, lora: AdapterOptions) -> MergePlan:
    from llamatrain.adapters import merge
    from llamatrain.distributed.cores import count_cores
    from llamatrain.gguf.types import type_by_name

    if not lora.scaled and options.type == "keep":
        raise UsageError(f"{NO_ADAPTER}, or a type to convert {base} to with --type")
    gguf, h, adapters = opened(base, lora)
    check_place(options, [base, *(path for path, _ in lora.scaled)])
    kind = None if options.type == "keep" else type_by_name(options.type.upper())
    made = merge.plan_merge(gguf, adapters, kind)
    check_room(out, size_of(made))
    return MergePlan(
        gguf=gguf, h=h, adapters=adapters, made=made, kind=kind, threads=options.threads or count_cores()
    )


def size_of(made: "Sequence[MergedTensor]") -> int:
    return sum(piece.info.nbytes for piece in made)


def touched(made: "Sequence[MergedTensor]") -> int:
    return sum(bool(piece.adapters) for piece in made)


def read_adapters(lora: AdapterOptions, h: "Hyperparameters", base: Path) -> "list[Adapter]":
    """Each checked to be one for this base."""
    from llamatrain.adapters.adapter import check_fits
    from llamatrain.adapters.read import read_adapter

    adapters = []
    for path, scale in lora.scaled:
        adapter = read_adapter(path, h)
        check_fits(adapter, h, base)
        adapters.append(adapter.scale_by(scale))
    return adapters


# ---- before anything is written --------------------------------------------


def check_place(options: ExportOptions, inputs: Sequence[Path]) -> None:
    from llamatrain.checkpoints.filenames import is_same_file
    from llamatrain.run.input_watch import files_of_input

    out = options.out
    if out is None:
        return
    if Path(os.path.realpath(out)).is_symlink():
        raise FileError(f"{out}: this is a link to itself, no place for a file")
    if not os.path.lexists(out.parent):
        raise MissingError(f"{out}: its folder is not there")
    if not out.exists():
        return
    if not out.is_file():
        raise FileError(f"{out}: this is a folder or a device, no place for a file")
    for path in inputs:
        if any(is_same_file(out, file) for file in files_of_input(path)):
            raise UsageError(f"--out {out} would replace {path}, which is being read: another name will do")
    if not options.overwrite:
        raise FileError(f"{out}: is there already; --overwrite replaces it")


def check_room(out: Path, needed: int) -> None:
    free = shutil.disk_usage(Path(os.path.realpath(out)).parent).free  # of a link's target
    if needed > free:
        raise FileError(f"{out}: takes {Size(needed).text}, and {Size(free).text} are free there")


def note_rest(merging: MergePlan) -> None:
    from llamatrain.model.hyperparameters import describe_unused, unused_tensors

    if names := unused_tensors(merging.gguf, merging.h):
        merging.note(describe_unused(names, "kept as they are"))
    kind = merging.kind
    others = [
        piece.base for piece in merging.made if kind and piece.type is not kind and len(piece.base.shape) == 2
    ]
    if others and kind:
        more = f" and {len(others) - 1} more keep their" if len(others) > 1 else " keeps its"
        merging.note(
            f"{others[0].name}{more} type: rows of {others[0].shape[1]} are no whole blocks of {kind.block_size}"
        )


# ---- writing ---------------------------------------------------------------


def write(out: Path, merging: MergePlan) -> None:
    from llamatrain.adapters import merge

    made, size = merging.made, size_of(merging.made)
    with progress_bar(
        "merging" if merging.adapters else "converting", total=size, unit="B", unit_scale=True
    ) as told:
        roundings = merge.write_merged(
            out, merging.gguf, made, merging.kind, threads=merging.threads, progress=told.update
        )
    copied = sum(piece.is_copy for piece in made)
    converted = sum(piece.type is not piece.base.type for piece in made)
    counts = [f"{touched(made)} of {len(made)} tensors merged"] if merging.adapters else []
    counts += (
        [f"{converted} of {len(made)} tensors converted to {merging.kind.name.lower()}"]
        if merging.kind
        else []
    )
    log_line(f"{out}: {Size(size).text}, {', '.join(counts)}, {copied} copied as they were")
    note_rounding(roundings, merging)


def note_rounding(roundings: "dict[str, Rounding]", merging: MergePlan) -> None:
    worst = max(roundings, key=lambda name: roundings[name].share, default="")
    if worst and roundings[worst].share > ROUNDED:
        kinds = {piece.type.name for piece in merging.made if piece.is_rounded}
        finer = "f32" if kinds & {"F16", "BF16"} else "f16" if "Q8_0" in kinds else "q8_0"
        error, change = (
            math.fsum(getattr(each, name) for each in roundings.values()) for name in ("error", "change")
        )
        merging.note(
            f"rounded to its type, {worst} is off by {roundings[worst].share:.0%} of what was added to it, "
            f"all weights together by {math.sqrt(error / change):.0%}; --type {finer} rounds less"
        )
