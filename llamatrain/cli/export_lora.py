"""`llamatrain export-lora`: a model and its adapters made one."""

import math
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from llamatrain.adapters.options import LoraOptions
from llamatrain.cli.application import Command, application, options_of
from llamatrain.recipe.loading import adapted, opened
from llamatrain.config.options import Checked, Option, build
from llamatrain.config.shared import THREADS
from llamatrain.config.units import Size
from llamatrain.errors import FileError, LlamatrainError, UsageError
from llamatrain.recipe.interrupts import ending, without_terminal
from llamatrain.machine.printable import printable

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.adapters.adapter import Adapter
    from llamatrain.adapters.merge import MergedTensor, Rounding
    from llamatrain.files.reader import Gguf
    from llamatrain.files.types import GgmlType
    from llamatrain.model.hyperparameters import Hyperparameters
    from llamatrain.model.lora import Weights

CHECKED = 128  # tokens, at most, whose logits are compared
ROUNDED = 0.25  # of what is added to a weight: how far off it may be, unsaid


command = application()


@dataclass(frozen=True)
class ExportOptions(Checked, panel="The new model"):
    out: Annotated[Path, Option("The file to write.")]
    type: Annotated[
        Literal["keep", "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k", "q5_1", "q5_0", "q4_1", "q4_0"],
        Option("The type of the new model's matrices; keep: that which each has in BASE.", unit="TYPE"),
    ] = "keep"
    overwrite: Annotated[bool, Option("Replace the file --out.")] = False
    check: Annotated[str, Option("Compare the logits of BASE with its adapters to those of the new file, on this text.")] = ""
    threads: Annotated[int | None, THREADS] = None


@command.command(cls=Command)
@options_of(ExportOptions, LoraOptions)
def export_lora(base: Annotated[Path, typer.Argument(metavar="BASE")], **said: Any) -> None:
    """Merge adapters into BASE, a GGUF model, quantised or not: the new file is a model like any other.

    Adapters need not cover the same weights. What none of them touches is copied as it is.
    """
    from llamatrain.adapters import merge
    from llamatrain.files.reader import open_gguf
    from llamatrain.files.types import by_name
    from llamatrain.machine.units import cores
    from llamatrain.model.hyperparameters import read

    options, lora = build(ExportOptions, said), build(LoraOptions, said)
    if not lora.scaled:
        raise UsageError("there is nothing to merge: name an adapter with --lora or --lora-scaled")
    threads, gguf = options.threads or cores(), open_gguf(base)
    h = read(gguf)
    if gguf.kind != "model":
        raise FileError(f"{base}: no model but a {gguf.kind}; a model is needed")
    check_place(options, [base, *(path for path, _ in lora.scaled)])
    adapters = read_adapters(lora, h, base)
    kind = None if options.type == "keep" else by_name(options.type.upper())
    made = merge.pieces(gguf, adapters, kind)
    check_room(options.out, sum(piece.info.nbytes for piece in made))
    tell_types(made, kind)
    expected = with_adapters(gguf, h, adapters, options.check, threads) if options.check else None
    export(options.out, gguf, made, kind, threads)
    if expected:
        compare(options.out, *expected, threads)


def tell(line: str) -> None:
    with suppress(OSError):  # the file is what matters
        print(printable(line, sys.stderr.encoding), file=sys.stderr, flush=True)


def read_adapters(lora: LoraOptions, h: "Hyperparameters", base: Path) -> "list[Adapter]":
    """Each checked to be one for this base."""
    from llamatrain.adapters.adapter import check
    from llamatrain.adapters.reading import read

    adapters = []
    for path, scale in lora.scaled:
        adapter = read(path, h)
        check(adapter, h, base)
        adapters.append(adapter.scaled(scale))
    return adapters


# ---- before anything is written --------------------------------------------


def check_place(options: ExportOptions, inputs: Sequence[Path]) -> None:
    out = options.out
    if not out.exists():
        return
    if not out.is_file():
        raise FileError(f"{out}: this is a folder or a device, no place for a file")
    for path in inputs:
        if any(out.samefile(file) for file in files_of(path)):
            raise UsageError(f"--out {out} would replace {path}, which is being read: another name will do")
    if not options.overwrite:
        raise FileError(f"{out}: is there already; --overwrite replaces it")


def files_of(path: Path) -> Iterator[Path]:
    """All parts of a split model, all files of a folder; else the file itself."""
    from llamatrain.files.reader import PART_NAME

    part = PART_NAME.fullmatch(path.name)
    if part:
        names = (PART_NAME.fullmatch(file.name) for file in path.parent.iterdir())
        yield from (path.with_name(name[0]) for name in names if name and name.group(1, 3) == part.group(1, 3))
    elif path.exists():
        yield from path.iterdir() if path.is_dir() else (path,)


def check_room(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.resolve().parent).free  # of a link's target
    if needed > free:
        raise FileError(f"{out}: takes {Size(needed).words}, and {Size(free).words} are free there")


def tell_types(made: "Sequence[MergedTensor]", kind: "GgmlType | None") -> None:
    others = [piece.base for piece in made if kind and piece.type is not kind and len(piece.base.shape) == 2]
    if others and kind:
        more = f" and {len(others) - 1} more keep their" if len(others) > 1 else " keeps its"
        tell(f"note: {others[0].name}{more} type: rows of {others[0].shape[1]} are no whole blocks of {kind.block}")


# ---- writing ---------------------------------------------------------------


def export(out: Path, base: "Gguf", made: "Sequence[MergedTensor]", kind: "GgmlType | None", threads: int) -> None:
    from tqdm import tqdm

    from llamatrain.adapters import merge

    size = sum(piece.info.nbytes for piece in made)
    settings: dict[str, Any] = {"unit": "B", "unit_scale": True, "leave": False, "disable": None, "delay": 0.5}
    with ended_in_order(), tqdm(total=size, desc="merging", **settings) as bar:
        roundings = merge.write(out, base, made, kind, threads=threads, progress=bar.update)
    touched, copied = sum(bool(piece.adapters) for piece in made), sum(piece.copied for piece in made)
    tell(f"{out}: {Size(size).words}, {touched} of {len(made)} tensors merged, {copied} copied as they were")
    tell_rounding(roundings, made)


def tell_rounding(roundings: "dict[str, Rounding]", made: "Sequence[MergedTensor]") -> None:
    worst = max(roundings, key=lambda name: roundings[name].share, default="")
    if worst and roundings[worst].share > ROUNDED:
        kinds = {piece.type.name for piece in made if piece.rounds}
        finer = "f32" if kinds & {"F16", "BF16"} else "f16" if "Q8_0" in kinds else "q8_0"
        off, added = (math.fsum(getattr(each, name) for each in roundings.values()) for name in ("off", "added"))
        tell(
            f"note: rounded to its type, {worst} is off by {roundings[worst].share:.0%} of what was added to it, "
            f"all weights together by {math.sqrt(off / added):.0%}; --type {finer} rounds less"
        )


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM, or the end of the terminal, ends the program as an error would, so that no half file stays behind."""
    if threading.current_thread() is not threading.main_thread():  # elsewhere there are no signals to be had
        yield
        return
    before = {each: signal.signal(each, leave) for each in ending() if each != signal.SIGINT}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def leave(number: int, frame: object) -> NoReturn:
    without_terminal()
    sys.exit(128 + number)


# ---- --check ---------------------------------------------------------------


def with_adapters(
    gguf: "Gguf", h: "Hyperparameters", adapters: "Sequence[Adapter]", text: str, threads: int
) -> "tuple[list[int], np.ndarray]":
    """The tokens of a text, and the logits behind each, of the base with its adapters beside it."""
    from llamatrain.cli.generate import understood
    from llamatrain.data.tokenizer import to_bytes

    tokens, _, _ = understood(gguf, h, to_bytes(text))
    if len(tokens) > CHECKED:
        tell(f"note: --check compares the first {CHECKED} of {len(tokens)} tokens")
    matrices = [
        replace(each, pairs={name: pair for name, pair in each.pairs.items() if name not in each.norms}) for each in adapters
    ]
    weights, arrays = adapted(gguf, h, matrices, threads)
    for adapter in adapters:
        arrays |= {name: arrays[name] + adapter.delta(name)[0] for name in adapter.norms}
    return tokens[:CHECKED], logits(gguf, h, weights, arrays, tokens[:CHECKED], threads)


def compare(out: Path, tokens: list[int], expected: "np.ndarray", threads: int) -> None:
    import numpy as np

    from llamatrain.files.reader import open_gguf

    gguf = open_gguf(out)
    difference = np.abs(logits(gguf, *opened(gguf, LoraOptions(), threads), tokens, threads) - expected)
    print(f"largest difference {difference.max():.3g}\nmean difference    {difference.mean():.3g}")
    print(f"logits within      {expected.min():.3g} to {expected.max():.3g}\ntokens             {len(tokens)}")


def logits(
    gguf: "Gguf", h: "Hyperparameters", weights: "Weights", arrays: "dict[str, np.ndarray]", tokens: list[int], threads: int
) -> "np.ndarray":
    import numpy as np

    from llamatrain.model.load import check_memory
    from llamatrain.sample.decoder import Decoder

    check_memory(gguf, Decoder.plan(h, len(tokens), threads, weights=weights).total, "a shorter text for --check")
    decoder = Decoder(h, arrays, ctx=len(tokens), threads=threads, weights=weights)
    found = np.array([decoder.feed([token]).copy() for token in tokens])
    if not np.isfinite(found).all():
        raise LlamatrainError(
            f"{gguf.path}: nothing can be compared: on that text its logits are not finite; its weights, or those of an adapter, "
            "are damaged or too large"
        )
    return found
