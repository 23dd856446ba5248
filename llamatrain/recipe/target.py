"""What a run trains and what becomes of it: every weight of a model, or an adapter for a frozen one."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llamatrain.adapters import gguf as adapter_files
from llamatrain.adapters import peft
from llamatrain.adapters.adapter import Adapter, Pair
from llamatrain.files.pages import release
from llamatrain.files.reader import Gguf
from llamatrain.files.values import Value
from llamatrain.graph.tensor import Tensor, parameter
from llamatrain.model import hyperparameters, initial, load
from llamatrain.model.frozen import copies
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Delta, Weights
from llamatrain.recipe.tuning import TuneOptions
from llamatrain.store.checkpoint import Checkpoint
from llamatrain.store.folder import write_model

Arrays = Mapping[str, np.ndarray]


class Task(Protocol):
    kind: str  # training.type
    result: str  # the file that comes of it
    h: Hyperparameters
    weights: Weights
    frozen: dict[str, np.ndarray]  # arrays of the leaves that are not trained, by name
    drops: bool  # whether the pages of the base's file are let go after each reading

    @property
    def copies(self) -> int:
        """Bytes of what is copied from it."""

    @property
    def trained(self) -> Mapping[str, Tensor]: ...

    def load(self) -> None:
        """Make the copies that the plan counts."""

    def begin(self, parts: Arrays) -> None:
        """The first values of what is trained."""

    def saved(self, parts: Arrays) -> dict[str, np.ndarray]:
        """The tensors that a checkpoint keeps."""

    def write(self, path: Path, parts: Arrays) -> None:
        """The result."""

    def extra(self) -> dict[str, Any]:
        """What a checkpoint keeps beside."""


def filled(checkpoint: Checkpoint, parts: Arrays) -> None:
    for name, part in parts.items():
        part[...] = checkpoint.weights[name]
        release(checkpoint.weights[name])


@dataclass
class Full:
    """Every weight, from a file or from a seed."""

    h: Hyperparameters
    metadata: Mapping[str, Value]
    untrained: dict[str, np.ndarray]
    seed: int
    threads: int
    base: Gguf | None
    weights: Weights
    kind: str = "train_model"
    result: str = "model.gguf"
    frozen: dict[str, np.ndarray] = field(default_factory=dict)
    drops: bool = False
    copies: int = 0

    @property
    def trained(self) -> Mapping[str, Tensor]:
        return self.weights.tensors

    def load(self) -> None: ...

    def begin(self, parts: Arrays) -> None:
        if self.base:
            load.fill_from(self.base, parts, self.threads)
        else:
            initial.fill(self.h, self.seed, dict(parts))

    def saved(self, parts: Arrays) -> dict[str, np.ndarray]:
        return {**parts, **self.untrained}

    def write(self, path: Path, parts: Arrays) -> None:
        write_model(path, self.metadata, self.saved(parts))

    def extra(self) -> dict[str, Any]:
        return {}


@dataclass
class LowRank:
    """An adapter. What it is added to stays as it is."""

    h: Hyperparameters
    base: Gguf
    options: TuneOptions
    ranks: Mapping[str, int]
    scales: Mapping[str, float]
    alpha: float
    seed: int
    weights: Weights
    trained: Mapping[str, Tensor]
    frozen: dict[str, np.ndarray]
    drops: bool
    copied: Sequence[Tensor]  # leaves over copies of the base's matrices, which `load` makes
    threads: int
    first: Adapter | None = None  # which is gone on from
    mixed: Sequence[Adapter] = ()  # which are there, and stay as they are
    kind: str = "finetune_lora"
    result: str = "adapter.gguf"

    @property
    def copies(self) -> int:
        return sum(leaf.nbytes for leaf in self.copied)

    def load(self) -> None:
        self.frozen |= copies(self.base, self.copied, self.threads)

    def begin(self, parts: Arrays) -> None:
        """What is added begins at nothing: one factor is random, the other zero."""
        for name, rank in self.ranks.items():
            a, b = parts[f"{name}.lora_a"], parts[f"{name}.lora_b"]
            if self.first:
                pair = self.first.pairs[name]
                a[...], b[...] = pair.a, pair.b
                continue
            turned = self.h.kind(name).turned
            random, zero = (b, a) if turned else (a, b)
            bound = np.float32(1.0 / np.sqrt(rank if turned else a.shape[1]))
            generator = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
            random[...] = (2 * generator.random(random.shape, np.float32) - 1) * bound
            zero[...] = 0.0

    def saved(self, parts: Arrays) -> dict[str, np.ndarray]:
        return dict(parts)

    def adapter(self, parts: Arrays) -> Adapter:
        pairs = {name: Pair(parts[f"{name}.lora_a"], parts[f"{name}.lora_b"], self.scales[name]) for name in self.ranks}
        name = self.base.metadata.get("general.name", self.base.path.stem)
        return Adapter(
            source=self.base.path,
            alpha=self.alpha,
            pairs=pairs,
            name=f"adapter of {name}" if isinstance(name, str) else "adapter",
            architecture=self.h.architecture,
        )

    def write(self, path: Path, parts: Arrays) -> None:
        adapter = self.adapter(parts)
        adapter_files.write(path, adapter, self.options.adapter_type)
        if self.options.peft:
            peft.write(self.options.peft, adapter, str(self.base.path), self.h)

    @cached_property
    def print_of_base(self) -> str:
        return fingerprint(self.base)

    def extra(self) -> dict[str, Any]:
        return {
            "ranks": dict(self.ranks),
            "scales": dict(self.scales),
            "alpha": self.alpha,
            "base": self.print_of_base,
            "mixed": [adapter_print(adapter) for adapter in self.mixed],
        }


def adapted(
    weights: Weights, h: Hyperparameters, ranks: Mapping[str, int], scales: Mapping[str, float], dropout: float
) -> tuple[Weights, dict[str, Tensor]]:
    """The weights with an adapter that is trained, and its parameters in the order of the file."""
    trained: dict[str, Tensor] = {}
    deltas = {}
    for number, (name, rank) in enumerate(ranks.items()):
        (out, into), turned = h.kind(name).shape(h), h.kind(name).turned
        a = parameter(f"{name}.lora_a", (out, rank) if turned else (rank, into))
        b = parameter(f"{name}.lora_b", (into if turned else out, rank))
        trained |= {a.name: a, b.name: b}
        deltas[name] = [Delta(a, b, scales[name], 0.0 if turned else dropout, number)]
    return weights.with_deltas(deltas), trained


def adapter_print(adapter: Adapter) -> str:
    """Of all that an adapter changes."""
    found = 0
    for name, pair in adapter.pairs.items():
        found = zlib.crc32(f"{name} {pair.scale!r}".encode(), found)
        for factor in (pair.a, pair.b):
            found = zlib.crc32(np.ascontiguousarray(factor).tobytes(), found)
    return f"{found:08x}"


PIECES = 16  # of a tensor, that a fingerprint is taken of


def fingerprint(base: Gguf) -> str:
    """Of the base's numbers, its tensors' names and types, and some pieces of each: another model is told apart."""
    found = zlib.crc32(repr(hyperparameters.read(base)).encode())
    for tensor in base.tensors.values():
        raw = tensor.raw.reshape(-1)
        found = zlib.crc32(f"{tensor.name} {tensor.type.name} {tensor.shape}".encode(), found)
        for start in range(0, raw.size, max(1, raw.size // PIECES)):
            found = zlib.crc32(raw[start : start + 256].tobytes(), found)
            release(raw)  # a little read may map two megabytes around it
    return f"{found:08x}"
