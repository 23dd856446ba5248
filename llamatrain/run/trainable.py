"""Trains all weights of a model, or an adapter for a frozen base: makes the weights, and writes the result."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from llamatrain.adapters import gguf as adapter_files
from llamatrain.adapters import peft
from llamatrain.adapters.adapter import Adapter, LoraPair, select_norms
from llamatrain.adapters.merge import encode_chunks, plan_merge
from llamatrain.checkpoints.checkpoint import FLOAT32, write_model
from llamatrain.engine.device import Memory, create_device
from llamatrain.errors import FileError
from llamatrain.gguf import quants
from llamatrain.gguf.reader import Gguf
from llamatrain.gguf.rewrite import check_encodable
from llamatrain.gguf.types import GgmlType, TensorInfo
from llamatrain.gguf.values import Value
from llamatrain.graph import ops as O
from llamatrain.graph.int8 import Int8Copy
from llamatrain.graph.tensor import Tensor, parameter, quantized, state
from llamatrain.io.mapped_file import verify_unchanged
from llamatrain.model import init, load
from llamatrain.model.file_types import choose_types
from llamatrain.model.frozen_weights import (
    add_frozen_adapters,
    copy_weights,
    load_frozen,
)
from llamatrain.model.hyperparameters import Hyperparameters, describe_unused, unused_tensors
from llamatrain.model.lora import Delta, Weights
from llamatrain.model.lora_targets import group_sizes
from llamatrain.run.inputs import MERGED_ADAPTERS, RunInputs
from llamatrain.train.int8_copies import make_int8_copies, pack_for_int8
from llamatrain.train.rounded_weights import RoundedWeight

LOG = ".log"  # ends the name of a weight that is trained as its logarithm
Arrays = Mapping[str, np.ndarray]
Cache = Literal["auto", "bf16", "int8", "off"]
Upload = Callable[[np.ndarray], Memory]


def as_it_is(array: np.ndarray) -> np.ndarray:
    """Return the array."""
    return array


@dataclass(frozen=True, kw_only=True)
class TrainableWeights:
    """The weights that graphs are built on, and the arrays of those that are not trained."""

    weights: Weights
    trainable: Mapping[str, Tensor]  # in the order of the file
    # arrays of frozen weights, by name; copies are uploaded as soon as they are made
    frozen: dict[str, Memory] = field(default_factory=dict)
    drop_base: bool = False  # release pages of the base's file after each read
    reference: Weights | None = None  # the weights without the trained adapter
    # tensors that hold copies of the base's matrices; their arrays exist after load_copies
    copied_tensors: Sequence[Tensor] = ()
    int8_copies: Mapping[str, Int8Copy] = field(default_factory=dict)  # further copies, for products in int8
    rounded: Mapping[str, RoundedWeight] = field(default_factory=dict)  # in quantization-aware training

    @property
    def copy_bytes(self) -> int:
        """Bytes of the base's copies."""
        return sum(tensor.nbytes for tensor in (*self.copied_tensors, *chain(*self.int8_copies.values())))

    @property
    def read_weights(self) -> Weights:
        """The weights as products read them, for graphs without gradients."""
        return self.weights.with_tensors({name: weight.stored for name, weight in self.rounded.items()})

    def adapter_sizes(self, h: Hyperparameters) -> dict[str, int]:
        """Return the number of parameters of the trained adapter by group of weights; empty without one."""
        factors = self.trainable.items() if self.reference else ()
        return group_sizes(((name.rpartition(".lora_")[0], factor.size) for name, factor in factors), h)


class Trainable(Protocol):
    """Makes the weights that a run trains, and writes the result."""

    @property
    def kind(self) -> str:
        """The value of training.type in checkpoints."""

    @property
    def result_name(self) -> str:
        """The name of the result file."""

    @property
    def h(self) -> Hyperparameters:
        """The hyperparameters of the model."""

    def make_weights(self, cache: Cache) -> TrainableWeights:
        """Return the weights of the graph; `cache` says how a base's matrices are held."""

    def load_copies(self, leaves: TrainableWeights, upload: Upload = as_it_is) -> None:
        """Make the copies of the base that the plan counts, and upload each."""

    def init_weights(self, parts: Arrays) -> None:
        """Set the initial values of the trained weights."""

    def encode_weight(self, name: str, parts: Arrays) -> Iterable[np.ndarray]:
        """Yield the rows of a weight as the exported file will have them, in chunks."""

    def checkpoint_tensors(self, parts: Arrays) -> dict[str, np.ndarray]:
        """Return the tensors that a checkpoint stores."""

    def write_result(self, path: Path, parts: Arrays) -> None:
        """Write the result file."""

    def write_extra(self, parts: Arrays) -> None:
        """Write results that go outside the run's folder."""

    def checkpoint_extra(self) -> dict[str, Any]:
        """Return further facts that a checkpoint stores."""

    def notes(self) -> Iterator[str]:
        """Yield what users of the result should know."""


@dataclass(frozen=True, kw_only=True)
class FullModel:
    """A model of which all weights are trained, except constants."""

    h: Hyperparameters
    metadata: Mapping[str, Value]
    untrained: Mapping[str, np.ndarray]  # tensors of the file that are not trained
    seed: int
    threads: int
    base: Gguf | None
    device: str = "cpu"  # of the run
    quant_aware: GgmlType | None = None  # the type that the weights are trained for
    embd_std: float | None = None  # standard deviation of new embeddings; None: by their width
    kind: str = "train_model"
    result_name: str = "model.gguf"

    def make_weights(self, cache: Cache) -> TrainableWeights:
        """Return the model's weights, all of them trained but constants."""
        trained, weights, constants = dict[str, Tensor](), dict[str, Tensor](), dict[str, np.ndarray]()
        rounded = dict[str, RoundedWeight]()
        for name, shape in self.h.shapes.items():
            if name in self.untrained:
                weights[name], constants[name] = state(name, shape), self.untrained[name]
                continue
            parts, weights[name] = self.make_weight(name, shape)
            trained |= {part.name: part for part in parts}
            if self.file_types[name] is not FLOAT32:
                stored = store_rounded(name, self.file_types[name], self.h, self.device)
                rounded[name] = stored.trained_by(weights[name])
                weights[name] = rounded[name].in_graph
        return TrainableWeights(
            weights=Weights(weights), trainable=trained, frozen=constants, rounded=rounded
        )

    @cached_property
    def file_types(self) -> dict[str, GgmlType]:
        """The types of the tensors in the model's file, by name."""
        untrained = {name: array.shape for name, array in self.untrained.items()}
        infos = {
            name: TensorInfo(name, FLOAT32, shape) for name, shape in (self.h.shapes | untrained).items()
        }
        return choose_types(infos, self.h, self.quant_aware, "the model", "quant_aware")

    def make_weight(self, name: str, shape: tuple[int, ...]) -> tuple[Sequence[Tensor], Tensor]:
        """Return what is trained of a weight, and the weight in the graph."""
        if self.h.weight_kind(name).trained_as_log:
            log = parameter(f"{name}{LOG}", shape)
            return [log], O.neg(O.exp(log), name=name)
        weight = parameter(name, shape)
        return [weight], weight

    def weight_value(self, name: str, parts: Arrays) -> np.ndarray:
        """Return the value of a weight by what is trained of it."""
        return parts[name] if name in parts else -np.exp(parts[f"{name}{LOG}"])

    def load_copies(self, leaves: TrainableWeights, upload: Upload = as_it_is) -> None:
        """Do nothing: there is no frozen base."""

    def init_weights(self, parts: Arrays) -> None:
        """Load the weights of the base, or random ones."""
        whole = {name.removesuffix(LOG): array for name, array in parts.items()}
        if self.base:
            load.load_weights(self.base, whole, self.threads)
        else:
            init.init_weights(self.h, self.seed, whole, self.embd_std)
        for name in parts:
            if name.endswith(LOG):
                self.take_log(name.removesuffix(LOG), parts[name])

    def take_log(self, name: str, array: np.ndarray) -> None:
        """Replace a weight that is below 0 by its logarithm without the sign."""
        if self.base and not np.all(array < 0):
            raise FileError(
                f"{self.base.path}: {name} must be below 0 (got {array.max():g}); the file is damaged",
                code="damaged-model",
            )
        np.log(-array, out=array)

    def encode_weight(self, name: str, parts: Arrays) -> Iterable[np.ndarray]:
        """Yield the rows of a weight as the model's file has them, in chunks."""
        kind = self.file_types[name]
        return quants.encode_chunks(self.weight_value(name, parts), kind, threads=self.threads, name=name)

    def checkpoint_tensors(self, parts: Arrays) -> dict[str, np.ndarray]:
        """Return the tensors of the model's file, and what is trained."""
        return {**self.result_tensors(parts), **parts}

    def result_tensors(self, parts: Arrays) -> dict[str, np.ndarray]:
        """Return the tensors of the model's file."""
        trained = [name for name in self.h.shapes if name not in self.untrained]
        values = {name: self.weight_value(name, parts) for name in trained} | dict(self.untrained)
        return {name: values[name] for name in (*self.h.shapes, *self.untrained)}

    def write_result(self, path: Path, parts: Arrays) -> None:
        """Write the model, in the types that it was trained for."""
        tensors = self.result_tensors(parts)
        write_model(path, self.metadata, tensors, self.file_types, self.quant_aware, self.threads)

    def write_extra(self, parts: Arrays) -> None:
        """Do nothing."""

    def checkpoint_extra(self) -> dict[str, Any]:
        """Return no further facts."""
        return {}

    def notes(self) -> Iterator[str]:
        """Yield notes about the base's tensors that the result lacks."""
        names = unused_tensors(self.base, self.h) if self.base else []
        if dropped := [name for name in names if name not in self.untrained]:
            yield describe_unused(dropped, f"left out of {self.result_name}")


@dataclass(frozen=True, kw_only=True)
class LoraAdapter:
    """A LoRA adapter for a frozen base."""

    h: Hyperparameters
    base: Gguf
    sources: RunInputs
    ranks: Mapping[str, int]
    scales: Mapping[str, float]
    alpha: float
    dropout: float
    seed: int
    threads: int
    half: bool  # the run's products are in bf16
    device: str  # of the run
    number_type: Literal["f32", "f16"]  # type of the numbers in the adapter's file
    peft: Path | None  # a folder for the adapter in Hugging Face's PEFT format
    quant_aware: GgmlType | None = None  # the type of the merged model that the adapter is trained for
    keeps_base: bool = True  # the base is read beside the merged weights that are trained
    kind: str = "finetune_lora"
    result_name: str = "adapter.gguf"

    def make_weights(self, cache: Cache) -> TrainableWeights:
        """Return the frozen weights of the base with trained adapter factors."""
        all_copied = cache == "bf16"
        weights, arrays = load_frozen(
            self.base,
            self.h,
            self.threads,
            all_copied,
            self.half,
            create_device(self.device).can_decode,
        )
        copied = [leaf for name, leaf in weights.tensors.items() if name not in arrays]
        reference, arrays = add_frozen_adapters(weights, arrays, self.sources.merged_factors)
        weights, trained = adapted(reference, self.h, self.ranks, self.scales, self.dropout)
        rounded = self.round_merged(weights) if self.quant_aware else {}
        if rounded and not self.keeps_base:
            arrays = {name: array for name, array in arrays.items() if name not in rounded}
            copied = [leaf for leaf in copied if leaf.name not in rounded]
        drops = not all_copied
        return TrainableWeights(
            weights=weights.with_tensors({name: weight.in_graph for name, weight in rounded.items()}),
            trainable=trained,
            frozen=arrays,
            drop_base=drops,
            reference=reference,
            copied_tensors=copied,
            int8_copies=make_int8_copies(weights.tensors, self.h) if cache == "int8" else {},
            rounded=rounded,
        )

    @cached_property
    def merged_types(self) -> dict[str, GgmlType]:
        """The types of the tensors in the merged model, by name."""
        return choose_types(self.base.tensors, self.h, self.quant_aware, self.base.path, "quant_aware")

    def round_merged(self, weights: Weights) -> dict[str, RoundedWeight]:
        """Return the weights that differ from the base's in the merged model and are rounded there."""
        rounded = dict[str, RoundedWeight]()
        for name, shape in self.h.shapes.items():
            kind, deltas = self.merged_types[name], weights.deltas.get(name, ())
            is_base = not deltas and kind is self.base.tensors[name].type
            if is_base or kind is FLOAT32 or self.h.weight_kind(name).stays_float32:
                continue
            check_encodable(name, kind, self.base.path)
            rounded[name] = store_rounded(name, kind, self.h, self.device)
            if name in self.ranks:
                # gradients with respect to the factors read no weight of the base: this leaf is never bound
                base = state(f"{name}.base", shape)
                product = deltas[-1].product(self.h.weight_kind(name).has_transposed_lora)
                rounded[name] = rounded[name].trained_by(O.add(base, product))
        return rounded

    def encode_weight(self, name: str, parts: Arrays) -> Iterable[np.ndarray]:
        """Yield the rows of a weight as the merged model will have them, in chunks."""
        with verify_unchanged(self.base.mapped_files):
            pairs = {name: self.pair(name, parts)} if name in self.ranks else {}
            own = Adapter(
                source=self.base.path, alpha=self.alpha, pairs=pairs, architecture=self.h.architecture
            )
            adapters = [*self.sources.merged_adapters, adapter_files.as_stored(own)]
            (tensor,) = plan_merge(self.base, adapters, {name: self.merged_types[name]})
            yield from encode_chunks(tensor, self.threads)

    def load_copies(self, leaves: TrainableWeights, upload: Upload = as_it_is) -> None:
        """Copy the base's matrices to bf16 or int8, if the plan says so."""
        for name, array in copy_weights(self.base, leaves.copied_tensors, self.threads):
            leaves.frozen[name] = upload(array)
        with verify_unchanged(self.base.mapped_files):
            for name, copies in leaves.int8_copies.items():
                arrays = pack_for_int8(leaves.weights[name], leaves.frozen[name], self.threads)
                leaves.frozen.update((copy.name, array) for copy, array in zip(copies, arrays, strict=True))

    def init_weights(self, parts: Arrays) -> None:
        """Initialize one factor randomly and the other to zero, so that the adapter adds nothing at first."""
        for name, rank in self.ranks.items():
            a, b = parts[f"{name}.lora_a"], parts[f"{name}.lora_b"]
            if self.sources.initial_adapter:
                pair = self.sources.initial_adapter.pairs[name]
                a[...], b[...] = pair.a, pair.b
                continue
            turned = self.h.weight_kind(name).has_transposed_lora
            random, zero = (b, a) if turned else (a, b)
            bound = np.float32(1.0 / np.sqrt(rank if turned else a.shape[-1]))
            generator = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
            random[...] = (2 * generator.random(random.shape, np.float32) - 1) * bound
            zero[...] = 0.0

    def checkpoint_tensors(self, parts: Arrays) -> dict[str, np.ndarray]:
        """Return the factors of the adapter."""
        return dict(parts)

    def pair(self, name: str, parts: Arrays) -> LoraPair:
        """Return the factors of a weight with their present values."""
        return LoraPair(parts[f"{name}.lora_a"], parts[f"{name}.lora_b"], self.scales[name])

    def adapter(self, parts: Arrays) -> Adapter:
        """Return the adapter with its present values."""
        pairs = {name: self.pair(name, parts) for name in self.ranks}
        name = self.base.metadata.get("general.name", self.base.path.stem)
        return Adapter(
            source=self.base.path,
            alpha=self.alpha,
            pairs=pairs,
            name=f"adapter of {name}" if isinstance(name, str) else "adapter",
            merged_type=self.quant_aware.name.lower() if self.quant_aware else "",
            architecture=self.h.architecture,
        )

    def write_result(self, path: Path, parts: Arrays) -> None:
        """Write the adapter as GGUF."""
        adapter_files.write_adapter(path, self.adapter(parts), self.number_type)

    def write_extra(self, parts: Arrays) -> None:
        """Write the adapter for PEFT, if that was asked for."""
        if self.peft:
            peft.write_peft(self.peft, self.adapter(parts), str(self.base.path), self.h)

    def checkpoint_extra(self) -> dict[str, Any]:
        """Return ranks, scales and fingerprints of the base and the merged adapters."""
        return {
            "ranks": dict(self.ranks),
            "scales": dict(self.scales),
            "alpha": self.alpha,
            "base": self.sources.base_fingerprint,
            MERGED_ADAPTERS: self.sources.adapter_fingerprints,
        }

    def notes(self) -> Iterator[str]:
        """Yield notes about how the adapter is to be used."""
        if self.quant_aware:
            others = ", the adapters of --lora" if self.sources.merged_adapters else ""
            yield (
                f"{self.result_name} is for a merged model in {self.quant_aware.name.lower()}, which export-lora "
                f"makes of {self.base.path.name}{others} and this adapter"
            )
        if norms := select_norms(self.h.architecture, self.ranks):
            yield adapter_files.norms_note(norms)
            if self.peft:
                yield peft.norms_note(self.peft, norms)


def store_rounded(name: str, kind: GgmlType, h: Hyperparameters, device: str) -> RoundedWeight:
    """Return a weight that is rounded to a type, and stored as the device's products read it best."""
    decodes = h.weight_kind(name).role != "stack" and create_device(device).can_decode(quantized(kind.name))
    return RoundedWeight.make(name, kind, h.shapes[name], decodes=decodes)


def adapted(
    weights: Weights,
    h: Hyperparameters,
    ranks: Mapping[str, int],
    scales: Mapping[str, float],
    dropout: float,
) -> tuple[Weights, dict[str, Tensor]]:
    """Return the weights with a trained adapter, and its parameters in the order of the file."""
    trained: dict[str, Tensor] = {}
    deltas = {}
    for number, (name, rank) in enumerate(ranks.items()):
        *rows, into = h.weight_kind(name).shape(h.for_weight(name))
        *experts, out = rows or [1]
        turned = h.weight_kind(name).has_transposed_lora
        a = parameter(f"{name}.lora_a", (out, rank) if turned else (*experts, rank, into))
        b = parameter(f"{name}.lora_b", (*experts, into if turned else out, rank))
        trained |= {a.name: a, b.name: b}
        deltas[name] = [Delta(a=a, b=b, scale=scales[name], dropout=0.0 if turned else dropout, salt=number)]
    return weights.with_deltas(deltas), trained
