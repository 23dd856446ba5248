"""Opens the inputs of a run besides its data: base, adapters, teacher and checkpoint."""

import platform
import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from llamatrain.adapters import read
from llamatrain.adapters.adapter import Adapter, checked_factors
from llamatrain.checkpoints.checkpoint import Checkpoint
from llamatrain.config.messages import LINE, shorten
from llamatrain.config.remote_names import remote_name
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf.reader import Gguf, open_gguf
from llamatrain.io.madvise import release_pages
from llamatrain.io.mapped_file import verify_unchanged
from llamatrain.model import hyperparameters
from llamatrain.platform.terminal import log_if_slow
from llamatrain.run.config import RunConfig
from llamatrain.run.input_watch import WatchedFile, watch_files
from llamatrain.run.resume import ResumePoint
from llamatrain.sources.names import locate, locate_model

MERGED_ADAPTERS = "mixed"  # the key of their fingerprints in a checkpoint
TEACHER = "teacher"  # the key of its fingerprint in a checkpoint
Factors = Mapping[str, tuple[np.ndarray, np.ndarray, float]]


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """The opened inputs of a run."""

    # the model that is finetuned or that gives the first weights, or a checkpoint with a model
    base: Gguf | None = None
    resume_point: ResumePoint | None = None
    merged_adapters: tuple[Adapter, ...] = ()  # frozen adapters (--lora)
    merged_factors: tuple[Factors, ...] = ()  # their factors
    initial_adapter: Adapter | None = None  # the adapter that training starts from
    teacher: Gguf | None = None
    # input files as they were at the start
    watched_files: Mapping[Path, WatchedFile] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that is resumed."""
        return self.resume_point.checkpoint if self.resume_point else None

    @property
    def folder(self) -> Path | None:
        """The folder of the run that is resumed. Checkpoints of llama.cpp's programs have none."""
        return self.resume_point.path.parent if self.resume_point and self.is_resume else None

    @property
    def is_resume(self) -> bool:
        """True if a run of this program is resumed, whose checkpoint stores its options."""
        return self.resume_point is not None and self.resume_point.has_options

    @property
    def step(self) -> int:
        """The steps that the run has done."""
        return self.resume_point.step if self.resume_point else 0

    @cached_property
    def base_fingerprint(self) -> str:
        """The fingerprint of the base when the run started."""
        assert self.base
        with verify_unchanged(self.base.mapped_files):
            return fingerprint(self.base)

    def is_same_base(self) -> bool:
        """Return True if the base still has the same fingerprint, although its file was written to."""
        assert self.base
        return fingerprint(self.base) == self.base_fingerprint

    @cached_property
    def adapter_fingerprints(self) -> list[str]:
        """The fingerprints of the adapters that are merged into the base."""
        return [fingerprint_adapter(adapter) for adapter in self.merged_adapters]


def open_inputs(config: RunConfig, resume_point: ResumePoint | None) -> RunInputs:
    """Open all inputs, and check that they fit each other and the checkpoint."""
    watched = watch_files(files_to_watch(config, resume_point))
    base, teacher = open_base(config, resume_point), open_teacher(config, resume_point)
    if not trains_adapter(config) or base is None:
        return RunInputs(base=base, resume_point=resume_point, teacher=teacher, watched_files=watched)
    h = hyperparameters.read_hyperparameters(base)
    merged = tuple(read.read_adapter(path, h).scale_by(scale) for path, scale in config.lora.scaled)
    initial = (
        read.read_adapter(config.tune.lora_init, h) if config.tune.lora_init and not resume_point else None
    )
    factors = tuple(checked_factors(adapter, h, base.path) for adapter in merged)
    if initial:
        checked_factors(initial, h, base.path)
    inputs = RunInputs(
        base=base,
        resume_point=resume_point,
        merged_adapters=merged,
        merged_factors=factors,
        initial_adapter=initial,
        teacher=teacher,
        watched_files=watched,
    )
    if resume_point and resume_point.has_options:
        check_unchanged(inputs, resume_point, config)
    return inputs


def trains_adapter(config: RunConfig) -> bool:
    """Return True if the run trains an adapter."""
    return config.command == "finetune" and not config.tune.full


def files_to_watch(config: RunConfig, resume_point: ResumePoint | None) -> Iterator[tuple[Path, bool]]:
    """Yield the input files, and whether each is needed again to resume the run."""
    if config.base and (trains_adapter(config) or not resume_point):
        yield locate_model(config.base), trains_adapter(config)
    if trains_adapter(config):
        yield from ((locate(path, "adapter"), True) for path, _ in config.lora.scaled)
        if config.tune.lora_init and not resume_point:
            yield locate(config.tune.lora_init, "adapter"), False
    if config.model.vocab_from and not resume_point:
        yield locate_model(config.model.vocab_from), False


def open_base(config: RunConfig, resume_point: ResumePoint | None) -> Gguf | None:
    """Open the base. A resumed run of a full model has its weights in the checkpoint."""
    if resume_point and (config.command != "finetune" or config.tune.full or not config.base):
        return open_gguf(resume_point.path)
    if not config.base:
        return None
    if resume_point and not remote_name(config.base) and not Path(config.base).exists():
        advice = f"if it was moved, use llamatrain finetune BASE.gguf --resume {resume_point.path}"
        raise FileError(
            f"{config.base}: no such file, but the run in {resume_point.path} needs it; {advice}",
            code="missing-base",
        )
    gguf = open_gguf(config.base)
    if gguf.kind == "checkpoint" and gguf.metadata.get_text("training.type") == "finetune_lora":
        raise UsageError(
            f"{config.base}: this is a checkpoint of an adapter, not a model; use llamatrain finetune "
            f"--resume {config.base}",
            code="not-a-model",
        )
    return gguf


def open_teacher(config: RunConfig, resume_point: ResumePoint | None) -> Gguf | None:
    """Open the teacher; a resumed run must have the one it started with."""
    path = config.train.teacher
    if path is None:
        return None
    gguf = open_gguf(path)
    if gguf.kind != "model":
        raise UsageError(
            f"{path}: a teacher must be a model (got a file of kind {gguf.kind})", code="not-a-model"
        )
    if (
        resume_point
        and resume_point.has_options
        and resume_point.checkpoint.extra.get(TEACHER) != fingerprint(gguf)
    ):
        raise FileError(
            f"{path}: this is not the teacher of the run in {resume_point.path}", code="changed-input"
        )
    return gguf


def check_unchanged(inputs: RunInputs, resume_point: ResumePoint, config: RunConfig) -> None:
    """Raise if the base or the adapters are not those that the run started with."""
    extra = resume_point.checkpoint.extra
    if extra.get("base") != inputs.base_fingerprint:
        raise FileError(
            f"{config.base}: this is not the base of the run in {resume_point.path}", code="changed-input"
        )
    if inputs.adapter_fingerprints == (stored := extra.get(MERGED_ADAPTERS)):
        return
    prints = zip(inputs.merged_adapters, inputs.adapter_fingerprints, strict=True)
    unknown = [
        adapter
        for adapter, fingerprint in prints
        if not isinstance(stored, list) or fingerprint not in stored
    ]
    problem = (
        f"{unknown[0].source}: not an adapter"
        if unknown
        else f"{resume_point.path}: not all of the adapters, in their order,"
    )
    options = " ".join(f"--lora-scaled {path} {scale:g}" for path, scale in config.lora.scaled)
    raise FileError(
        f"{problem} that the run started with (got {shorten(options, LINE) or 'none'})", code="changed-input"
    )


# ---- fingerprints -----------------------------------------------------------


def fingerprint_adapter(adapter: Adapter) -> str:
    """Return a checksum of everything that an adapter changes."""
    crc = 0
    for name, pair in adapter.pairs.items():
        crc = zlib.crc32(f"{name} {pair.scale!r}".encode(), crc)
        for factor in (pair.a, pair.b):
            crc = zlib.crc32(np.ascontiguousarray(factor).tobytes(), crc)
    return f"{crc:08x}"


CHUNK_BYTES = 1 << 20  # bytes that are read at a time
CHUNKS = 16  # chunks of a tensor in a fingerprint


def fingerprint_factors(factors: Iterable[Factors]) -> str:
    """Return a checksum of all numbers of some adapters."""
    crc = 0
    for adapter in factors:
        for name, (a, b, scale) in adapter.items():
            crc = zlib.crc32(f"{name} {scale!r}".encode(), crc)
            for part in (a, b):
                crc = zlib.crc32(np.ascontiguousarray(part).data, crc)
    return f"{crc:08x}"


def fingerprint_fully(base: Gguf) -> str:
    """Return a checksum of a model that covers every byte of its tensors."""
    crc = 0
    with (
        verify_unchanged(base.mapped_files),
        log_if_slow(f"reading {base.path} to compare it with the base of the other processes"),
    ):
        for tensor in base.tensors.values():
            raw = tensor.raw.reshape(-1)
            for start in range(0, raw.size, CHUNK_BYTES):
                crc = zlib.crc32(raw[start : start + CHUNK_BYTES].data, crc)
                release_pages(raw[start : start + CHUNK_BYTES])
    return f"{fingerprint(base)}-{crc:08x}"


def fingerprint(base: Gguf) -> str:
    """Return a checksum of a model's hyperparameters, tensor names and types, and samples of its data."""
    h = hyperparameters.read_hyperparameters(base)
    crc = zlib.crc32(f"{h!r}{h.extra or ''}{h.by_block or ''}{h.lists or ''}".encode())
    for tensor in base.tensors.values():
        raw = tensor.raw.reshape(-1)
        crc = zlib.crc32(f"{tensor.name} {tensor.type.name} {tensor.shape}".encode(), crc)
        for start in range(0, raw.size, max(1, raw.size // CHUNKS)):
            crc = zlib.crc32(raw[start : start + 256].tobytes(), crc)
            release_pages(raw)  # a little read may map two megabytes around it
    return f"{crc:08x}"


def file_identity(gguf: Gguf) -> Hashable:
    """Return a key that identifies the files of a model on this machine."""
    return platform.node(), tuple((file.path, file.identity) for file in gguf.mapped_files)
