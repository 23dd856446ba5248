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
from llamatrain.run.input_watch import WatchedFile, inputs_of
from llamatrain.run.resume import ResumePoint

TEACHER = "teacher"  # what it is known by again, in what a checkpoint keeps beside
Factors = Mapping[str, tuple[np.ndarray, np.ndarray, float]]


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    base: Gguf | None = (
        None  # the model that is tuned, that weights are taken from, or that a checkpoint holds
    )
    resumed: ResumePoint | None = None
    mixed: tuple[Adapter, ...] = ()  # which are there, and stay as they are
    factors: tuple[Factors, ...] = ()  # theirs
    first: Adapter | None = None  # which is gone on from
    taught_by: Gguf | None = None  # the teacher
    inputs: Mapping[Path, WatchedFile] = field(
        default_factory=dict
    )  # the files that a run is begun with, as they were before

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.resumed.checkpoint if self.resumed else None

    @property
    def home(self) -> Path | None:
        """The folder of the run that goes on; an ancestor had none."""
        return self.resumed.path.parent if self.resumed and self.goes_on else None

    @property
    def goes_on(self) -> bool:
        """With options of its own."""
        return self.resumed is not None and self.resumed.kept

    @property
    def step(self) -> int:
        return self.resumed.step if self.resumed else 0

    @cached_property
    def print_of_base(self) -> str:
        assert self.base
        with verify_unchanged(self.base.mapped_files):
            return fingerprint(self.base)

    def is_same_base(self) -> bool:
        """Though somebody has written to its file."""
        assert self.base
        return fingerprint(self.base) == self.print_of_base

    @cached_property
    def prints_of_mixed(self) -> list[str]:
        return [adapter_print(adapter) for adapter in self.mixed]


def opened(asked: RunConfig, resumed: ResumePoint | None) -> RunInputs:
    """All of it, seen to fit together."""
    inputs = inputs_of(read_for(asked, resumed))
    base, teacher = base_of(asked, resumed), teacher_of(asked, resumed)
    if not is_adapter(asked) or base is None:
        return RunInputs(base=base, resumed=resumed, taught_by=teacher, inputs=inputs)
    h = hyperparameters.read_hyperparameters(base)
    mixed = tuple(read.read_adapter(path, h).scale_by(scale) for path, scale in asked.lora.scaled)
    first = read.read_adapter(asked.tune.lora_init, h) if asked.tune.lora_init and not resumed else None
    factors = tuple(checked_factors(adapter, h, base.path) for adapter in mixed)
    if first:
        checked_factors(first, h, base.path)
    sources = RunInputs(
        base=base,
        resumed=resumed,
        mixed=mixed,
        factors=factors,
        first=first,
        taught_by=teacher,
        inputs=inputs,
    )
    if resumed and resumed.kept:
        check_same(sources, resumed, asked)
    return sources


def is_adapter(asked: RunConfig) -> bool:
    return asked.command == "finetune" and not asked.tune.full


def read_for(asked: RunConfig, resumed: ResumePoint | None) -> Iterator[tuple[Path, bool]]:
    """The files, and whether they are needed again when the run goes on."""
    if asked.base and (is_adapter(asked) or not resumed):
        yield Path(asked.base), is_adapter(asked)
    if is_adapter(asked):
        yield from ((path, True) for path, _ in asked.lora.scaled)
        if asked.tune.lora_init and not resumed:
            yield asked.tune.lora_init, False
    if asked.model.vocab_from and not resumed:
        yield asked.model.vocab_from, False


def base_of(asked: RunConfig, resumed: ResumePoint | None) -> Gguf | None:
    """A run of every weight that goes on has it in its checkpoint."""
    if resumed and (asked.command != "finetune" or asked.tune.full or not asked.base):
        return open_gguf(resumed.path)
    if not asked.base:
        return None
    if resumed and not Path(asked.base).exists():
        moved = f"if it was moved, name it: llamatrain finetune BASE.gguf --resume {resumed.path}"
        raise FileError(f"{asked.base}: no such file, and the run in {resumed.path} is for it; {moved}")
    gguf = open_gguf(asked.base)
    if gguf.kind == "checkpoint" and gguf.metadata.get_text("training.type") == "finetune_lora":
        raise UsageError(
            f"{asked.base}: a checkpoint of an adapter, no model; go on with `llamatrain finetune --resume {asked.base}`"
        )
    return gguf


def teacher_of(asked: RunConfig, resumed: ResumePoint | None) -> Gguf | None:
    """That which the run began with, if it goes on."""
    path = asked.train.teacher
    if path is None:
        return None
    gguf = open_gguf(path)
    if gguf.kind != "model":
        raise UsageError(f"{path}: a file of kind {gguf.kind}, and a model is a teacher")
    if resumed and resumed.kept and resumed.checkpoint.extra.get(TEACHER) != fingerprint(gguf):
        raise FileError(f"{path}: not the teacher that the run in {resumed.path} had")
    return gguf


def check_same(sources: RunInputs, resumed: ResumePoint, asked: RunConfig) -> None:
    """Base and adapters are those that the run began with."""
    extra = resumed.checkpoint.extra
    if extra.get("base") != sources.print_of_base:
        raise FileError(f"{asked.base}: not the model that the run in {resumed.path} was for")
    if sources.prints_of_mixed == (kept := extra.get("mixed")):
        return
    prints = zip(sources.mixed, sources.prints_of_mixed, strict=True)
    strange = [adapter for adapter, found in prints if not isinstance(kept, list) or found not in kept]
    named = (
        f"{strange[0].source}: not an adapter"
        if strange
        else f"{resumed.path}: not all of the adapters, in their order,"
    )
    told = " ".join(f"--lora-scaled {path} {scale:g}" for path, scale in asked.lora.scaled)
    raise FileError(f"{named} that the run began with; received {shorten(told, LINE) or 'none'}")


# ---- by what they are known again ------------------------------------------


def adapter_print(adapter: Adapter) -> str:
    """Of all that an adapter changes."""
    found = 0
    for name, pair in adapter.pairs.items():
        found = zlib.crc32(f"{name} {pair.scale!r}".encode(), found)
        for factor in (pair.a, pair.b):
            found = zlib.crc32(np.ascontiguousarray(factor).tobytes(), found)
    return f"{found:08x}"


PIECE = 1 << 20  # bytes that are looked at together
PIECES = 16  # of a tensor, that a fingerprint is taken of


def print_of_adapters(factors: Iterable[Factors]) -> str:
    """Of all their numbers."""
    found = 0
    for each in factors:
        for name, (a, b, scale) in each.items():
            found = zlib.crc32(f"{name} {scale!r}".encode(), found)
            for part in (a, b):
                found = zlib.crc32(np.ascontiguousarray(part).data, found)
    return f"{found:08x}"


def whole_print(base: Gguf) -> str:
    """Of all its tensors, each byte of them."""
    found = 0
    with (
        verify_unchanged(base.mapped_files),
        log_if_slow(f"reading {base.path}, to compare it with that of the other processes"),
    ):
        for tensor in base.tensors.values():
            raw = tensor.raw.reshape(-1)
            for start in range(0, raw.size, PIECE):
                found = zlib.crc32(raw[start : start + PIECE].data, found)
                release_pages(raw[start : start + PIECE])
    return f"{fingerprint(base)}-{found:08x}"


def fingerprint(base: Gguf) -> str:
    """Of the base's numbers, its tensors' names and types, and some pieces of each: another model is told apart."""
    h = hyperparameters.read_hyperparameters(base)
    found = zlib.crc32(f"{h!r}{h.extra or ''}".encode())
    for tensor in base.tensors.values():
        raw = tensor.raw.reshape(-1)
        found = zlib.crc32(f"{tensor.name} {tensor.type.name} {tensor.shape}".encode(), found)
        for start in range(0, raw.size, max(1, raw.size // PIECES)):
            found = zlib.crc32(raw[start : start + 256].tobytes(), found)
            release_pages(raw)  # a little read may map two megabytes around it
    return f"{found:08x}"


def identity_of(gguf: Gguf) -> Hashable:
    """Of its files, on all machines."""
    return platform.node(), tuple((file.path, file.identity) for file in gguf.mapped_files)
