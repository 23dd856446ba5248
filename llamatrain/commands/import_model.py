"""Imports a model of transformers: a folder with safetensors becomes a GGUF file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from llamatrain.commands.new_file import OVERWRITE, check_output
from llamatrain.config.common import THREADS
from llamatrain.config.options import Option, Options
from llamatrain.config.units import Size
from llamatrain.gguf.type_names import QuantizedName
from llamatrain.io.disk_space import check_disk_space
from llamatrain.platform.terminal import log_line

ImportType = Literal["auto", "f32", "f16", "bf16", QuantizedName]


@dataclass(frozen=True)
class ImportOptions(Options, panel="The new file"):
    """Options of `import`."""

    out: Annotated[
        Path | None,
        Option("File to write; default: the folder's name with .gguf, beside the folder.", short="o"),
    ] = None
    type: Annotated[
        ImportType,
        Option("Type of the matrices; auto: bf16 or f16, as the folder has them, f16 for f32.", unit="TYPE"),
    ] = "auto"
    overwrite: Annotated[bool, OVERWRITE] = False
    threads: Annotated[int | None, THREADS] = None


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The result of an import."""

    path: Path
    bytes: int
    tensors: int
    architecture: str


def import_model(folder: Path, options: ImportOptions) -> Imported:
    """Write a folder with a model of transformers as a GGUF file."""
    from llamatrain.distributed.cores import count_cores
    from llamatrain.importing.checkpoint import open_checkpoint
    from llamatrain.importing.write import import_folder, parse_type

    place = folder.resolve()
    out = options.out or place.with_name(f"{place.name}.gguf")
    check_output(out, [], overwrite=options.overwrite)
    checkpoint = open_checkpoint(folder)
    plan = import_folder(
        checkpoint,
        out,
        parse_type(options.type),
        threads=options.threads or count_cores(),
        check=check_disk_space,
    )
    log_line(f"{out}: {Size(plan.nbytes).text}, {len(plan.tensors)} tensors, {plan.h.describe()}")
    return Imported(
        path=out, bytes=plan.nbytes, tensors=len(plan.tensors), architecture=plan.h.architecture.name
    )
