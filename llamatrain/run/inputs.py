"""What a run is made from beside its data: a base, adapters, a checkpoint. Each is opened once, and handed on."""

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
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf.reader import Gguf, open_gguf
from llamatrain.io.madvise import release_pages
from llamatrain.io.mapped_file import verify_unchanged
from llamatrain.model import hyperparameters
from llamatrain.platform.terminal import log_if_slow
from llamatrain.run.config import RunConfig
from llamatrain.run.input_watch import WatchedFile, watch_files
from llamatrain.run.resume import ResumePoint

TEACHER = "teacher"  # what it is known by again, in what a checkpoint keeps beside
Factors = Mapping[str, tuple[np.ndarray, np.ndarray, float]]


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    base: Gguf | None = (
        None  # the model that is tuned, that weights are taken from, or that a checkpoint holds
    )
    resume_point: ResumePoint | None = None
    merged_adapters: tuple[Adapter, ...] = ()  # which are there, and stay as they are
    merged_factors: tuple[Factors, ...] = ()  # theirs
    initial_adapter: Adapter | None = None  # which is gone on from
    teacher: Gguf | None = None  # the teacher
    watched_files: Mapping[Path, WatchedFile] = field(
        default_factory=dict
    )  # the files that a run is begun with, as they were before

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.resume_point.checkpoint if self.resume_point else None

    @property
    def folder(self) -> Path | None:
        """The folder of the run that goes on; an ancestor had none."""
        return self.resume_point.path.parent if self.resume_point and self.is_resume else None

    @property
    def is_resume(self) -> bool:
        """With options of its own."""
        return self.resume_point is not None and self.resume_point.has_options

    @property
    def step(self) -> int:
        return self.resume_point.step if self.resume_point else 0

    @cached_property
    def base_fingerprint(self) -> str:
        assert self.base
        with verify_unchanged(self.base.mapped_files):
            return fingerprint(self.base)

    def is_same_base(self) -> bool:
        """Though somebody has written to its file."""
        assert self.base
        return fingerprint(self.base) == self.base_fingerprint

    @cached_property
    def adapter_fingerprints(self) -> list[str]:
        return [fingerprint_adapter(adapter) for adapter in self.merged_adapters]


def open_inputs(config: RunConfig, resume_point: ResumePoint | None) -> RunInputs:
    """All of it, seen to fit together."""
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
    return config.command == "finetune" and not config.tune.full


def files_to_watch(config: RunConfig, resume_point: ResumePoint | None) -> Iterator[tuple[Path, bool]]:
    """The files, and whether they are needed again when the run goes on."""
    if config.base and (trains_adapter(config) or not resume_point):
        yield Path(config.base), trains_adapter(config)
    if trains_adapter(config):
        yield from ((path, True) for path, _ in config.lora.scaled)
        if config.tune.lora_init and not resume_point:
            yield config.tune.lora_init, False
    if config.model.vocab_from and not resume_point:
        yield config.model.vocab_from, False


def open_base(config: RunConfig, resume_point: ResumePoint | None) -> Gguf | None:
    """A run of every weight that goes on has it in its checkpoint."""
    if resume_point and (config.command != "finetune" or config.tune.full or not config.base):
        return open_gguf(resume_point.path)
    if not config.base:
        return None
    if resume_point and not Path(config.base).exists():
        advice = f"if it was moved, name it: llamatrain finetune BASE.gguf --resume {resume_point.path}"
        raise FileError(
            f"{config.base}: no such file, and the run in {resume_point.path} is for it; {advice}"
        )
    gguf = open_gguf(config.base)
    if gguf.kind == "checkpoint" and gguf.metadata.get_text("training.type") == "finetune_lora":
        raise UsageError(
            f"{config.base}: a checkpoint of an adapter, no model; go on with `llamatrain finetune --resume {config.base}`"
        )
    return gguf


def open_teacher(config: RunConfig, resume_point: ResumePoint | None) -> Gguf | None:
    """That which the run began with, if it goes on."""
    path = config.train.teacher
    if path is None:
        return None
    gguf = open_gguf(path)
    if gguf.kind != "model":
        raise UsageError(f"{path}: a file of kind {gguf.kind}, and a model is a teacher")
    if (
        resume_point
        and resume_point.has_options
        and resume_point.checkpoint.extra.get(TEACHER) != fingerprint(gguf)
    ):
        raise FileError(f"{path}: not the teacher that the run in {resume_point.path} had")
    return gguf


def check_unchanged(inputs: RunInputs, resume_point: ResumePoint, config: RunConfig) -> None:
    """Base and adapters are those that the run began with."""
    extra = resume_point.checkpoint.extra
    if extra.get("base") != inputs.base_fingerprint:
        raise FileError(f"{config.base}: not the model that the run in {resume_point.path} was for")
    if inputs.adapter_fingerprints == (stored := extra.get("mixed")):
        return
    prints = zip(inputs.merged_adapters, inputs.adapter_fingerprints, strict=True)
    unknown = [adapter for adapter, found in prints if not isinstance(stored, list) or found not in stored]
    problem = (
        f"{unknown[0].source}: not an adapter"
        if unknown
        else f"{resume_point.path}: not all of the adapters, in their order,"
    )
    options = " ".join(f"--lora-scaled {path} {scale:g}" for path, scale in config.lora.scaled)
    raise FileError(f"{problem} that the run began with; received {shorten(options, LINE) or 'none'}")


# ---- by what they are known again ------------------------------------------


def fingerprint_adapter(adapter: Adapter) -> str:
    """Of all that an adapter changes."""
    crc = 0
    for name, pair in adapter.pairs.items():
        crc = zlib.crc32(f"{name} {pair.scale!r}".encode(), crc)
        for factor in (pair.a, pair.b):
            crc = zlib.crc32(np.ascontiguousarray(factor).tobytes(), crc)
    return f"{crc:08x}"


CHUNK_BYTES = 1 << 20  # bytes that are looked at together
CHUNKS = 16  # of a tensor, that a fingerprint is taken of


def fingerprint_factors(factors: Iterable[Factors]) -> str:
    """Of all their numbers."""
    crc = 0
    for adapter in factors:
        for name, (a, b, scale) in adapter.items():
            crc = zlib.crc32(f"{name} {scale!r}".encode(), crc)
            for part in (a, b):
                crc = zlib.crc32(np.ascontiguousarray(part).data, crc)
    return f"{crc:08x}"


def fingerprint_fully(base: Gguf) -> str:
    """Of all its tensors, each byte of them."""
    crc = 0
    with (
        verify_unchanged(base.mapped_files),
        log_if_slow(f"reading {base.path}, to compare it with that of the other processes"),
    ):
        for tensor in base.tensors.values():
            raw = tensor.raw.reshape(-1)
            for start in range(0, raw.size, CHUNK_BYTES):
                crc = zlib.crc32(raw[start : start + CHUNK_BYTES].data, crc)
                release_pages(raw[start : start + CHUNK_BYTES])
    return f"{fingerprint(base)}-{crc:08x}"


def fingerprint(base: Gguf) -> str:
    """Of the base's numbers, its tensors' names and types, and some pieces of each: another model is told apart."""
    h = hyperparameters.read_hyperparameters(base)
    crc = zlib.crc32(f"{h!r}{h.extra or ''}".encode())
    for tensor in base.tensors.values():
        raw = tensor.raw.reshape(-1)
        crc = zlib.crc32(f"{tensor.name} {tensor.type.name} {tensor.shape}".encode(), crc)
        for start in range(0, raw.size, max(1, raw.size // CHUNKS)):
            crc = zlib.crc32(raw[start : start + 256].tobytes(), crc)
            release_pages(raw)  # a little read may map two megabytes around it
    return f"{crc:08x}"


def file_identity(gguf: Gguf) -> Hashable:
    """Of its files, on all machines."""
    return platform.node(), tuple((file.path, file.identity) for file in gguf.mapped_files)
