"""Merges whole models into one: their average, a point between two, or a base with what models have learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from llamatrain.commands.merge_adapters import Merged
from llamatrain.commands.new_file import (
    OUT,
    OVERWRITE,
    check_output,
    describe_kept_types,
    find_type,
    total_bytes,
)
from llamatrain.config.common import THREADS
from llamatrain.config.options import (
    COUNT,
    Condition,
    Option,
    OptionError,
    Options,
    changed_options,
    reject_unused,
    unused_options,
)
from llamatrain.config.units import Size
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf.type_names import MatrixType
from llamatrain.io.disk_space import check_disk_space
from llamatrain.merging.recipe import TASK_METHODS, MethodName, Recipe, Source
from llamatrain.platform.terminal import log_line, progress_bar

if TYPE_CHECKING:
    from llamatrain.gguf.reader import Gguf
    from llamatrain.model.hyperparameters import Hyperparameters

LARGEST = 1000.0  # of weights; a larger one is a mistake
MAX_NAMED = 3  # keys that a note names
OTHERWISE = "with --method {method}"
ADDS_DIFFERENCES = Condition(lambda values: values["method"] in TASK_METHODS, OTHERWISE)
KEEPS_A_SHARE = Condition(
    lambda values: values["method"] in TASK_METHODS and TASK_METHODS[values["method"]].keeps != "all",
    OTHERWISE,
)
DROPS_AT_RANDOM = Condition(lambda values: values["method"].startswith("dare-"), OTHERWISE)
IS_NO_ARC = Condition(lambda values: values["method"] != "slerp", OTHERWISE)


@dataclass(frozen=True)
class MergeOptions(Options, panel="The new model"):
    """Options of `merge`."""

    out: Annotated[Path, OUT]
    method: Annotated[
        MethodName,
        Option(
            "linear: the average of all; slerp: a point on the arc between two; the others add to a base what "
            "models have learned, with all values of the differences, with the largest (ties), or with random ones "
            "(dare), and where signs differ, with those of one sign (-ties).",
            unit="METHOD",
        ),
    ] = "linear"
    base: Annotated[
        Path | None,
        Option("The model that all of MODELS were made from.", when=(ADDS_DIFFERENCES,)),
    ] = None
    weight: Annotated[
        tuple[float, ...],
        Option(
            "Weight of a model; given once, for all, or once for each; default: 1. With slerp, the place "
            "between the models: 0 is the first, 1 the second; default: 0.5.",
            unit="WEIGHT",
            least=-LARGEST,
            most=LARGEST,
            example="0.5",
        ),
    ] = ()
    density: Annotated[
        tuple[float, ...],
        Option(
            "Share of a model's difference that is kept; given once, for all, or once for each; default: 0.5.",
            unit="SHARE",
            above=0,
            most=1,
            when=(KEEPS_A_SHARE,),
        ),
    ] = ()
    lambda_: Annotated[
        float,
        Option(
            "Factor of the merged differences.",
            unit="FACTOR",
            least=-LARGEST,
            most=LARGEST,
            when=(ADDS_DIFFERENCES,),
        ),
    ] = 1.0
    normalize: Annotated[
        bool | None,
        Option(
            "Divide by the sum of the weights, with -ties of those that take part; default: with linear and ties.",
            when=(IS_NO_ARC,),
        ),
    ] = None
    seed: Annotated[
        int,
        Option(
            "Seed of the values that are dropped.",
            unit="NUMBER",
            least=0,
            most=COUNT,
            when=(DROPS_AT_RANDOM,),
        ),
    ] = 0
    type: Annotated[
        MatrixType,
        Option(
            "Type of the new model's matrices; keep: the type that each has in the base or the first model.",
            unit="TYPE",
        ),
    ] = "keep"
    overwrite: Annotated[bool, OVERWRITE] = False
    threads: Annotated[int | None, THREADS] = None


def merge_models(paths: Sequence[Path], options: MergeOptions) -> Merged:
    """Write the merge of models."""
    from llamatrain.distributed.cores import count_cores
    from llamatrain.merging import models as merging
    from llamatrain.model.file_types import choose_types

    recipe = make_recipe(len(paths), options)
    inputs = [*paths, *([options.base] if options.base else [])]
    first, h, opened = open_models(paths, options.base)
    check_output(options.out, inputs, overwrite=options.overwrite)
    notes = [note for model in opened if (note := describe_keys(first, model))]
    weighted = [opened[source.number] for source in recipe.sources]
    kind = find_type(options.type)
    tensors = merging.plan_merge(first, weighted, choose_types(first.tensors, h, kind, first.path), recipe)
    size = total_bytes(tensors)
    check_disk_space(options.out, size)
    if note := describe_kept_types(tensors, h, kind):
        notes.append(note)
    for note in notes:
        log_line(f"note: {note}")
    with progress_bar("merging", total=size, unit="B", unit_scale=True) as bar:
        merging.write_merge(
            options.out,
            first,
            weighted,
            tensors,
            recipe,
            kind,
            threads=options.threads or count_cores(),
            progress=bar.update,
        )
    copied = sum(tensor.is_copy for tensor in tensors)
    merged = len(tensors) - copied
    log_line(
        f"{options.out}: {Size(size).text}, {merged} of {len(tensors)} tensors merged, {copied} copied unchanged"
    )
    return Merged(
        path=options.out,
        bytes=size,
        tensors=len(tensors),
        merged=merged,
        copied=copied,
        notes=tuple(notes),
        check=None,
    )


# ---- the recipe ------------------------------------------------------------


def make_recipe(count: int, options: MergeOptions) -> Recipe:
    """Return the method and its numbers, after checking that the options are complete and have an effect."""
    values: dict[str, Any] = vars(options)
    reject_unused(unused_options(values, MergeOptions), changed_options(values, MergeOptions))
    method, task = options.method, TASK_METHODS.get(options.method)
    if task and options.base is None:
        raise OptionError(
            lambda spelt: (
                f"{spelt('base')} is missing; --method {method} needs the model that all others were made from"
            ),
            code="missing-option",
        )
    if count < (1 if task else 2) or (method == "slerp" and count > 2):
        needed = "two models" if method == "slerp" else "two models or more"
        raise UsageError(f"--method {method} merges {needed} (got {count})", code="wrong-number-of-models")
    weights = slerp_weights(options) if method == "slerp" else repeat("weight", options.weight, 1.0, count)
    densities = repeat("density", options.density, 0.5, count)
    normalize = options.normalize if options.normalize is not None else task.normalizes if task else True
    if method == "slerp":
        normalize = False
    elif not task and normalize and not sum(weights):
        raise UsageError(
            "the sum of all --weight is 0, so it cannot divide; add --no-normalize, or change the weights",
            code="invalid-option",
        )
    sources = (
        Source(number=number, weight=weight, density=density)
        for number, (weight, density) in enumerate(zip(weights, densities, strict=True))
        if weight
    )
    recipe = Recipe(
        method=method, sources=tuple(sources), normalize=normalize, scale=options.lambda_, seed=options.seed
    )
    if not (recipe.sources or task):
        raise UsageError("every --weight is 0; give a model another one", code="invalid-option")
    return recipe


def repeat(name: str, values: Sequence[float], default: float, count: int) -> list[float]:
    """Return one value for each model."""
    if len(values) not in (0, 1, count):
        raise OptionError(
            lambda spelt: (
                f"{spelt(name)} must be given once, or once for each of the {count} models (got {len(values)} "
                "values)"
            )
        )
    return list(values) if len(values) == count else [values[0] if values else default] * count


def slerp_weights(options: MergeOptions) -> list[float]:
    """Return the weights of the ends of an arc for a place on it."""
    places = options.weight or (0.5,)
    if len(places) > 1 or not 0 <= places[0] <= 1:
        given = ", ".join(f"{place:g}" for place in places)
        raise OptionError(
            lambda spelt: (
                f"{spelt('weight')} must be one number from 0 to 1 with --method slerp (got {given})"
            )
        )
    return [1 - places[0], places[0]]


# ---- the models ------------------------------------------------------------


def open_models(paths: Sequence[Path], base: Path | None) -> "tuple[Gguf, Hyperparameters, list[Gguf]]":
    """Open all models. Return the base, or else the first; its hyperparameters; and the models."""
    from llamatrain.gguf.compare import check_alike
    from llamatrain.gguf.reader import open_gguf
    from llamatrain.model.hyperparameters import read_hyperparameters

    opened = [open_gguf(path) for path in paths]
    first = open_gguf(base) if base else opened[0]
    for model in (first, *opened):
        if model.kind != "model":
            raise FileError(
                f"{model.path}: only models can be merged (got a file of kind {model.kind})",
                code="not-a-model",
            )
    h = read_hyperparameters(first)
    for model in opened:
        check_alike(first, model)
    return first, h, opened


def describe_keys(first: "Gguf", model: "Gguf") -> str | None:
    """Return a note about hyperparameters that differ, or None."""
    from llamatrain.gguf.compare import differing_keys

    keys = differing_keys(first, model)
    if not keys:
        return None
    named = ", ".join(keys[:MAX_NAMED]) + (
        f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else ""
    )
    return f"{model.path} has other values of {named}; the new model has those of {first.path}"
