"""Functions that write models, adapters and other files."""

from dataclasses import replace
from typing import TYPE_CHECKING

from llamatrain.adapters.options import AdapterOptions
from llamatrain.api.calls import check_options, in_keywords_all, path_of, translate_errors
from llamatrain.commands.control_vector import ControlVector, ControlVectorOptions, make_control_vector
from llamatrain.commands.export import export
from llamatrain.commands.extract_lora import Extracted, ExtractOptions
from llamatrain.commands.extract_lora import extract_lora as extract_adapter
from llamatrain.commands.imatrix import IMATRIX_OPTIONS, Imatrix, make_imatrix
from llamatrain.commands.import_model import Imported, ImportOptions
from llamatrain.commands.import_model import import_model as run_import
from llamatrain.commands.merge_adapters import ExportOptions, Merged
from llamatrain.commands.merge_models import MergeOptions, merge_models
from llamatrain.commands.push import Pushed, PushOptions
from llamatrain.commands.push import push as push_result
from llamatrain.config.options import build
from llamatrain.config.signatures import document_options
from llamatrain.run.in_memory_rows import Data, Place, rows_for_call

if TYPE_CHECKING:
    from typing import Unpack

    from llamatrain.api.option_types import (
        ControlVectorOptionsGiven,
        ExportLoraOptions,
        ExtractOptionsGiven,
        ImatrixOptionsGiven,
        ImportOptionsGiven,
        MergeOptionsGiven,
        PushOptionsGiven,
    )


@document_options(ExportOptions, AdapterOptions, without=("out",))
def export_lora(
    base: Place, *, out: Place | None = None, show: bool = False, **options: "Unpack[ExportLoraOptions]"
) -> Merged:
    """Merge adapters into a model, or convert the model to another type, and write the result to `out`.

    Adapters are given as `lora` and `lora_scaled`. With `only_adapter` they are written as one adapter, with
    `peft` into a folder in PEFT's format.
    """
    with translate_errors(show):
        values = check_options({**options, "out": out}, ExportOptions, AdapterOptions)
        merged = export(path_of(base), build(ExportOptions, values), build(AdapterOptions, values))
        return replace(merged, notes=in_keywords_all(merged.notes))


@document_options(ExtractOptions, without=("out",))
def extract_lora(
    base: Place, tuned: Place, *, out: Place, show: bool = False, **options: "Unpack[ExtractOptionsGiven]"
) -> Extracted:
    """Write an adapter for a base of what a tuned model has learned: the difference of both, in low rank."""
    with translate_errors(show):
        values = check_options({**options, "out": out}, ExtractOptions)
        extracted = extract_adapter(path_of(base), path_of(tuned), build(ExtractOptions, values))
        return replace(extracted, notes=in_keywords_all(extracted.notes))


@document_options(MergeOptions, without=("out",))
def merge(*models: Place, out: Place, show: bool = False, **options: "Unpack[MergeOptionsGiven]") -> Merged:
    """Merge whole models into one, and write it to `out`: GGUF files of one architecture and shape."""
    with translate_errors(show):
        values = check_options({**options, "out": out}, MergeOptions)
        merged = merge_models([path_of(model) for model in models], build(MergeOptions, values))
        return replace(merged, notes=in_keywords_all(merged.notes))


@document_options(ImportOptions)
def import_model(folder: Place, show: bool = False, **options: "Unpack[ImportOptionsGiven]") -> Imported:
    """Convert a folder with a model of transformers to a GGUF file."""
    with translate_errors(show):
        values = check_options(options, ImportOptions)
        return run_import(path_of(folder), build(ImportOptions, values))


@document_options(ControlVectorOptions, without=("out",))
def control_vector(
    model: Place,
    positive: Place,
    negative: Place,
    *,
    out: Place,
    show: bool = False,
    **options: "Unpack[ControlVectorOptionsGiven]",
) -> ControlVector:
    """Write a control vector that leads a model from the texts of one file to those of another.

    Both files have one text in each line; lines of the same number are a pair.
    """
    with translate_errors(show):
        values = check_options({**options, "out": out}, ControlVectorOptions)
        files = path_of(model), path_of(positive), path_of(negative)
        return make_control_vector(*files, build(ControlVectorOptions, values))


@document_options(*IMATRIX_OPTIONS, without=("out",))
def imatrix(
    model: Place, *data: Data, out: Place, show: bool = False, **options: "Unpack[ImatrixOptionsGiven]"
) -> Imatrix:
    """Measure on data how much each column of a model's weights matters, and write llama.cpp's importance matrix.

    Data are paths, lists of them, or lists of rows.
    """
    with translate_errors(show), rows_for_call(data) as files:
        values = check_options({**options, "out": out}, *IMATRIX_OPTIONS)
        return make_imatrix(path_of(model), files, values)


@document_options(PushOptions)
def push(run: Place, repository: str, *, show: bool = False, **options: "Unpack[PushOptionsGiven]") -> Pushed:
    """Upload the result of a run, its folder or a GGUF file, to a repository `hf:OWNER/NAME` on Hugging Face."""
    with translate_errors(show):
        values = check_options(options, PushOptions)
        pushed = push_result(path_of(run), str(repository), build(PushOptions, values))
        return replace(pushed, notes=in_keywords_all(pushed.notes))
