"""Writes what `export-lora` is asked for: a merged model, or the adapters in another format."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llamatrain.adapters.options import AdapterOptions
from llamatrain.commands.merge_adapters import (
    NO_ADAPTER,
    ExportOptions,
    Merged,
    merge_to_file,
    open_base,
)
from llamatrain.commands.new_file import check_output
from llamatrain.errors import FileError, UsageError
from llamatrain.platform.terminal import log_line

if TYPE_CHECKING:
    from llamatrain.adapters.adapter import Adapter
    from llamatrain.model.hyperparameters import Hyperparameters

ADAPTER_TYPES = {"auto": "f32", "keep": "f32", "f32": "f32", "f16": "f16"}  # number types, by --type


def export(base: Path, options: ExportOptions, lora: AdapterOptions) -> Merged:
    """Merge adapters into a model, or write them as one adapter; create a model in Ollama of the result."""
    written = write_export(base, options, lora)
    if not options.ollama:
        return written
    from llamatrain.sources.create_in_ollama import create_in_ollama

    modelfile = written.path.with_name(f"{written.path.name}.Modelfile")
    model, adapter = (base, written.path) if options.only_adapter else (written.path, None)
    note = create_in_ollama(options.ollama, modelfile, model, adapter)
    return replace(written, notes=(*written.notes, note))


def write_export(base: Path, options: ExportOptions, lora: AdapterOptions) -> Merged:
    """Write what the options ask for."""
    from llamatrain.adapters.peft import check_pairs

    check_options(options)
    if not options.peft and not options.only_adapter:
        return merge_to_file(base, options, lora)
    if not lora.scaled:
        raise UsageError(NO_ADAPTER, code="no-adapter")
    gguf, h, adapters = open_base(base, lora)
    if options.out:
        check_output(options.out, [base, *(path for path, _ in lora.scaled)], overwrite=options.overwrite)
    if options.peft:
        check_folder(options, options.peft, lora)
    combined = combine_adapters(adapters)
    if options.peft:
        check_pairs(options.peft, combined.pairs, h)
    result = (
        write_gguf(options, combined)
        if options.only_adapter
        else merge_to_file(base, options, lora)
        if options.out
        else None
    )
    notes = list(result.notes) if result else []
    if options.peft:
        notes += write_peft_folder(options.peft, combined, gguf.path, h)
    path, size = (result.path, result.bytes) if result else (options.peft, 0)
    assert path
    merged = result or Merged(
        path=path, bytes=size, tensors=2 * len(combined.pairs), merged=0, copied=0, check=None, notes=()
    )
    return replace(merged, notes=tuple(notes))


def check_options(options: ExportOptions) -> None:
    """Raise if the options do not say what to write, or contradict each other."""
    if not options.out and (options.only_adapter or not options.peft):
        raise UsageError(
            "--out is missing; name the file to write"
            + ("" if options.only_adapter else ", or a folder with --peft"),
            code="missing-option",
        )
    only_adapter = options.only_adapter or not options.out
    if options.ollama and not options.out:
        raise UsageError("--ollama needs a GGUF file; name it with --out", code="missing-option")
    if only_adapter and options.imatrix:
        raise UsageError("--imatrix has no effect if no model is written; leave it out", code="unused-option")
    if only_adapter and options.check:
        raise UsageError("--check has no effect if no model is written; leave it out", code="unused-option")
    if only_adapter and (
        options.type not in ADAPTER_TYPES if options.only_adapter else options.type not in ("auto", "keep")
    ):
        raise UsageError(
            f"--type of an adapter must be {'f32 or f16' if options.only_adapter else 'f32 for PEFT'} "
            f"(got {options.type})",
            code="invalid-option",
        )


def check_folder(options: ExportOptions, folder: Path, lora: AdapterOptions) -> None:
    """Raise if the folder for PEFT is an input, or holds an adapter that must not be replaced."""
    from llamatrain.adapters import peft

    if any(folder.exists() and path.exists() and folder.samefile(path) for path, _ in lora.scaled):
        raise UsageError(
            f"--peft {folder} would replace an input; choose another name", code="replaces-input"
        )
    peft.check_writable(folder)
    if peft.has_adapter(folder) and not options.overwrite:
        raise FileError(
            f"{folder} already holds an adapter; add --overwrite to replace it", code="output-exists"
        )


def combine_adapters(adapters: "list[Adapter]") -> "Adapter":
    """Return one adapter that adds what all of them add, by concatenating their ranks."""
    import numpy as np

    from llamatrain.adapters.adapter import LoraPair, is_transposed

    first, pairs = adapters[0], dict(adapters[0].pairs)
    for adapter in adapters[1:]:
        for name, pair in adapter.pairs.items():
            if name in pairs:
                both, axis = (pairs[name], pair), -1 if is_transposed(first.architecture, name) else -2
                a = np.concatenate([part.a for part in both], axis)
                b = np.concatenate([np.float32(part.scale) * part.b for part in both], -1)
                pair = LoraPair(a, b, 1.0)
            pairs[name] = pair
    merged_types = {adapter.merged_type for adapter in adapters}
    return replace(first, pairs=pairs, merged_type=first.merged_type if len(merged_types) == 1 else "")


def write_gguf(options: ExportOptions, adapter: "Adapter") -> Merged:
    """Write an adapter as GGUF."""
    from llamatrain.adapters import gguf

    out = options.out
    assert out
    gguf.write_adapter(out, adapter, "f16" if ADAPTER_TYPES[options.type] == "f16" else "f32")
    log_line(f"{out}: an adapter of {len(adapter.pairs)} weights")
    notes = (gguf.norms_note(adapter.norm_names),) if adapter.norm_names else ()
    for line in notes:
        log_line(f"note: {line}")
    size = out.stat().st_size
    return Merged(
        path=out, bytes=size, tensors=2 * len(adapter.pairs), merged=0, copied=0, check=None, notes=notes
    )


def write_peft_folder(folder: Path, adapter: "Adapter", base: Path, h: "Hyperparameters") -> list[str]:
    """Write an adapter in PEFT's format, and return notes."""
    from llamatrain.adapters import peft

    peft.write_peft(folder, adapter, str(base), h)
    omitted = adapter.norm_names
    log_line(f"{folder}: a PEFT adapter of {len(adapter.pairs) - len(omitted)} weights")
    notes = [peft.norms_note(folder, omitted)] if omitted else []
    for line in notes:
        log_line(f"note: {line}")
    return notes
