"""Writes a checkpoint of transformers as a GGUF file, tensor by tensor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamatrain.errors import FileError, UsageError
from llamatrain.gguf.parser import quote
from llamatrain.gguf.rewrite import file_type, report_progress
from llamatrain.gguf.types import GgmlType, type_by_name
from llamatrain.gguf.values import Kind, Value, boolean, f32, numbers, string, u32
from llamatrain.gguf.writer import create_gguf
from llamatrain.importing.checkpoint import Checkpoint
from llamatrain.importing.description import describe_model
from llamatrain.importing.families import FAMILIES, Family
from llamatrain.importing.keys import Keys, common_keys
from llamatrain.importing.sources import Sources
from llamatrain.importing.tensors import ImportedTensor, plan_tensors
from llamatrain.platform.terminal import progress_bar

if TYPE_CHECKING:
    from llamatrain.model.hyperparameters import Hyperparameters

# returns the keys `tokenizer.*` of a folder, an architecture and a number of tokens
ReadTokenizer = Callable[[Path, str, int], Mapping[str, Value]]
QUANTIZATION_VERSION = 2
ROPE_BASE, DEFAULT_BASE = "rope.freq_base", 10000.0  # the default is left out, where converters do so
WHOLE_KEYS = ("xielu.",)  # beginnings of keys without the architecture's name


@dataclass(frozen=True)
class ImportPlan:
    """A new file before it is written: its metadata and its tensors."""

    checkpoint: Checkpoint
    metadata: Mapping[str, Value]
    tensors: list[ImportedTensor]
    h: "Hyperparameters"

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(tensor.info.nbytes for tensor in self.tensors)


def find_family(checkpoint: Checkpoint) -> Family:
    """Return the family of a checkpoint, or raise if it is not supported or quantized."""
    config = checkpoint.config
    quantization = config.values.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method not in (None, "mxfp4"):
        raise FileError(
            f"{config.path}: the checkpoint is quantized ({quote(str(method))}); import one in float32, float16 or "
            "bfloat16",
            code="unsupported-checkpoint",
        )
    for name in config.classes:
        if name in FAMILIES:
            return FAMILIES[name]
    found = quote(config.classes[0]) if config.classes else "no name of a class in architectures"
    supported = ", ".join(sorted({family.architecture for family in FAMILIES.values()}))
    raise FileError(
        f"{config.path}: this model cannot be imported (got {found}); supported are {supported}",
        code="unsupported-architecture",
    )


def plan_import(checkpoint: Checkpoint, target: GgmlType | None, read_tokenizer: ReadTokenizer) -> ImportPlan:
    """Return what an import writes. Without a target, the type is that of the checkpoint."""
    family = find_family(checkpoint)
    architecture = family.architecture
    chosen = target or guess_type(checkpoint)
    metadata = {
        "general.architecture": string(architecture),
        "general.type": string("model"),
        **encode_keys(checkpoint, family),
        "general.file_type": u32(file_type(chosen)),
        "general.quantization_version": u32(QUANTIZATION_VERSION),
    }
    tensors, h = plan_tensors(checkpoint, family, metadata, chosen)
    tokenizer = read_tokenizer(checkpoint.folder, architecture, h.vocab)
    description = describe_model(checkpoint, [tensor.info for tensor in tensors])
    return ImportPlan(checkpoint, {**description, **metadata, **tokenizer}, tensors, h)


def guess_type(checkpoint: Checkpoint) -> GgmlType:
    """Return the type of the first matrix, as llama.cpp's converter does: BF16, or else F16."""
    for stored in checkpoint.tensors.values():
        if len(stored.shape) >= 2 and stored.dtype in ("BF16", "F16"):
            return type_by_name(stored.dtype)
    return type_by_name("F16")


# ---- metadata -----------------------------------------------------------------------


def encode_keys(checkpoint: Checkpoint, family: Family) -> dict[str, Value]:
    """Return the hyperparameters as a file has them."""
    found: Keys = {
        key: value
        for key, value in common_keys(checkpoint.config).items()
        if key not in family.left_out or (key == ROPE_BASE and value != DEFAULT_BASE)
    }
    try:
        found |= family.keys(checkpoint.config)
        found |= read_number_lists(checkpoint, family)
        return {
            key if key.startswith(WHOLE_KEYS) else f"{family.architecture}.{key}": encode(value)
            for key, value in found.items()
        }
    except (ZeroDivisionError, OverflowError) as error:
        raise FileError(
            f"{checkpoint.config.path}: its numbers make no model ({error})", code="invalid-config"
        ) from None


def encode(value: Any) -> Value:
    """Return a value of metadata."""
    if isinstance(value, list):
        kinds = {bool: Kind.BOOL, int: Kind.INT32, float: Kind.FLOAT32}
        return numbers(kinds[type(value[0])] if value else Kind.INT32, value)
    encoders: dict[type, Callable[[Any], Value]] = {bool: boolean, int: u32, float: f32, str: string}
    return encoders[type(value)](value)


def read_number_lists(checkpoint: Checkpoint, family: Family) -> Keys:
    """Return lists of numbers that a checkpoint has as tensors, one for each block."""
    sources = Sources(checkpoint, family)
    found = Keys()
    for key, pattern in family.number_lists.items():
        pieces = [sources.read(name).to_float32() for name in sources.numbered(pattern)]
        if any(piece.size != 1 for piece in pieces):
            raise FileError(
                f"{checkpoint.folder}: each {pattern} must be one number", code="wrong-tensor-shape"
            )
        if pieces:
            found[key] = [float(piece.reshape(-1)[0]) for piece in pieces]
    return found


# ---- writing ------------------------------------------------------------------------


def import_folder(
    checkpoint: Checkpoint,
    out: Path,
    target: GgmlType | None,
    *,
    threads: int = 1,
    check: Callable[[Path, int], object],
) -> ImportPlan:
    """Write a checkpoint as a GGUF file. `check` gets the path and the size before anything is written."""
    from llamatrain.importing import tokenizer

    plan = plan_import(checkpoint, target, tokenizer.tokenizer_metadata)
    check(out, plan.nbytes)
    with progress_bar("importing", total=plan.nbytes, unit="B", unit_scale=True) as bar:
        write_import(out, plan, threads=threads, progress=bar.update)
    return plan


def write_import(
    out: Path, plan: ImportPlan, *, threads: int = 1, progress: Callable[[int], object] = lambda nbytes: None
) -> None:
    """Write the file. It gets its name when it is complete."""
    infos = [tensor.info for tensor in plan.tensors]
    with create_gguf(out, plan.metadata, infos) as writer:
        for tensor in plan.tensors:
            writer.write(tensor.info.name, report_progress(tensor.chunks(threads), progress))


def parse_type(name: str) -> GgmlType | None:
    """Return a type by its name in options; None for auto."""
    try:
        return None if name == "auto" else type_by_name(name.upper())
    except KeyError:
        raise UsageError(f"unknown type {quote(name)}", code="invalid-option") from None
