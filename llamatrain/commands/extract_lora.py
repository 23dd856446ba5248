"""Extracts an adapter from a tuned model: the difference from its base, in low rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from llamatrain.commands.new_file import OUT, OVERWRITE, check_output
from llamatrain.config.common import THREADS
from llamatrain.config.options import Option, Options
from llamatrain.errors import FileError, LlamatrainError
from llamatrain.io.disk_space import check_disk_space
from llamatrain.platform.terminal import log_line, progress_bar
from llamatrain.run.lora_options import LORA_R, LORA_RANK_OF, RANK, TARGET, LoraOptions, adapter_ranks

if TYPE_CHECKING:
    from llamatrain.adapters.extract import ExtractedPair
    from llamatrain.gguf.reader import Gguf
    from llamatrain.model.hyperparameters import Hyperparameters

FLOAT32 = 4  # bytes
MAX_NAMED = 3  # tensors that a warning names


@dataclass(frozen=True)
class ExtractOptions(Options, panel="The adapter"):
    """Options of `extract-lora`."""

    out: Annotated[Path, OUT]
    lora_r: Annotated[int, LORA_R] = RANK
    target: Annotated[tuple[str, ...], TARGET] = ()
    lora_rank_of: Annotated[tuple[str, ...], LORA_RANK_OF] = ()
    adapter_type: Annotated[Literal["f32", "f16"], Option("Number type of the adapter.")] = "f32"
    overwrite: Annotated[bool, OVERWRITE] = False
    verbose: Annotated[
        bool, Option("Print for each weight which share of the difference its pair holds.", short="v")
    ] = False
    threads: Annotated[int | None, THREADS] = None


@dataclass(frozen=True, kw_only=True)
class Extracted:
    """The result of an extraction."""

    path: Path
    bytes: int
    share: float  # of the squared norm of the differences, over all weights with a pair
    shares: dict[str, float]  # by weight
    omitted: tuple[str, ...]  # tensors that differ, and are not in the adapter
    notes: tuple[str, ...]


def extract_lora(base: Path, tuned: Path, options: ExtractOptions) -> Extracted:
    """Write the adapter that makes the tuned model of the base, as far as its rank allows."""
    from llamatrain.adapters import gguf as adapter_files
    from llamatrain.adapters.adapter import Adapter
    from llamatrain.distributed.cores import count_cores
    from llamatrain.gguf.compare import check_alike

    threads = options.threads or count_cores()
    first, second, h = open_pair(base, tuned)
    check_alike(first, second)
    ranks = adapter_ranks(
        LoraOptions(lora_r=options.lora_r, target=options.target, lora_rank_of=options.lora_rank_of), h
    )
    check_output(options.out, [base, tuned], overwrite=options.overwrite)
    check_disk_space(options.out, adapter_bytes(ranks, h, options.adapter_type))
    extracted, omitted = extract_pairs(first, second, h, ranks, threads)
    if not extracted:
        raise LlamatrainError(
            f"{tuned}: no weight that could have a pair differs from {base}, so there is no adapter to extract"
            + (f"; {describe_omitted(omitted)}" if omitted else ""),
            code="no-difference",
        )
    adapter = Adapter(
        source=tuned,
        alpha=float(options.lora_r),
        pairs={name: each.pair for name, each in extracted.items()},
        name=f"adapter of {first.metadata.get_text('general.name') or base.stem}",
        architecture=h.architecture,
    )
    adapter_files.write_adapter(options.out, adapter, options.adapter_type)
    notes = [describe_omitted(omitted)] if omitted else []
    notes += [adapter_files.norms_note(adapter.norm_names)] if adapter.norm_names else []
    result = Extracted(
        path=options.out,
        bytes=options.out.stat().st_size,
        share=sum(each.held for each in extracted.values()) / sum(each.total for each in extracted.values()),
        shares={name: each.share for name, each in extracted.items()},
        omitted=tuple(omitted),
        notes=tuple(notes),
    )
    print_result(result, options.verbose)
    return result


def open_pair(base: Path, tuned: Path) -> "tuple[Gguf, Gguf, Hyperparameters]":
    """Open both models, and return them with the hyperparameters of the base."""
    from llamatrain.gguf.reader import open_gguf
    from llamatrain.model.hyperparameters import read_hyperparameters

    opened = open_gguf(base), open_gguf(tuned)
    for gguf in opened:
        if gguf.kind != "model":
            raise FileError(
                f"{gguf.path}: a model is needed (got a file of kind {gguf.kind})", code="not-a-model"
            )
    return *opened, read_hyperparameters(opened[0])


def adapter_bytes(ranks: Mapping[str, int], h: "Hyperparameters", number_type: str) -> int:
    """Return the size of an adapter that has a pair for every weight."""
    shapes = h.shapes
    numbers = sum(
        (sum(shapes[name]) if len(shapes[name]) < 3 else shapes[name][0] * sum(shapes[name][1:])) * rank
        for name, rank in ranks.items()
    )
    return numbers * (FLOAT32 if number_type == "f32" else FLOAT32 // 2)


def extract_pairs(
    base: "Gguf", tuned: "Gguf", h: "Hyperparameters", ranks: Mapping[str, int], threads: int
) -> "tuple[dict[str, ExtractedPair], list[str]]":
    """Return the pairs of weights that differ, and the names of other tensors that differ."""
    from llamatrain.adapters.extract import differs, extract_pair
    from llamatrain.io.mapped_file import verify_unchanged

    extracted: dict[str, ExtractedPair] = {}
    omitted: list[str] = []
    total = sum(tensor.nbytes for tensor in base.tensors.values())
    with (
        verify_unchanged([*base.mapped_files, *tuned.mapped_files]),
        progress_bar("extracting", total=total, unit="B", unit_scale=True) as bar,
    ):
        for name, tensor in base.tensors.items():
            other = tuned.tensors[name]
            if differs(tensor, other, threads):
                if name in ranks:
                    extracted[name] = extract_pair(
                        tensor, other, ranks[name], h.architecture, tuned.path, threads
                    )
                else:
                    omitted.append(name)
            bar.update(tensor.nbytes)
    return extracted, omitted


def describe_omitted(names: Sequence[str]) -> str:
    """Return a warning about tensors that differ and are not in the adapter."""
    named = ", ".join(names[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    verb = "differs" if len(names) == 1 else "differ"
    return f"{named}{more} {verb} too, and got no pair; --target says which weights get one"


def print_result(result: Extracted, verbose: bool) -> None:
    """Print the shares that the adapter holds, and warnings."""
    if verbose:
        for name, share in result.shares.items():
            log_line(f"{name}: {share:.2%} of the difference's squared norm")
    log_line(
        f"{result.path}: an adapter of {len(result.shares)} weights, with {result.share:.2%} of the squared norm of "
        "their differences"
    )
    for line in result.notes:
        log_line(f"warning: {line}")
