"""Opens a model with its adapters for evaluation."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llamatrain.adapters.options import AdapterOptions
from llamatrain.errors import FileError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.contrastive.settings import Contrastive
    from llamatrain.data.tokenizer import Tokenizer
    from llamatrain.engine.device import Memory
    from llamatrain.gguf.reader import Gguf
    from llamatrain.model.hyperparameters import Hyperparameters
    from llamatrain.model.lora import Weights
    from llamatrain.preference.objective import Objective
    from llamatrain.train.programs import EvalPrograms

DEFAULT_CTX = 512  # at most, where it is not given
SAME_MODEL = "base"  # stands for the model itself without its adapters


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model with its adapters: hyperparameters, weights, and the arrays by name."""

    gguf: "Gguf"
    h: "Hyperparameters"
    weights: "Weights"
    arrays: "dict[str, np.ndarray]"
    tokenizer: "Tokenizer"
    lora: AdapterOptions
    threads: int
    device: str

    def make_programs(
        self,
        lengths: Sequence[int],
        batch: int,
        precision: str,
        *,
        has_untrained_tokens: bool,
        objective: "Objective | None" = None,
        contrastive: "Contrastive | None" = None,
        with_logits: bool = False,
    ) -> "EvalPrograms":
        """Build the evaluation programs for rows of these lengths, if there is memory for them.

        `with_logits`: programs whose logits are read, instead of programs of a loss.
        """
        from llamatrain.model.load import check_memory
        from llamatrain.train.graphs import StepGraphs, StepSpec
        from llamatrain.train.programs import EvalPrograms

        spec = StepSpec(
            h=self.h,
            weights=self.weights,
            trainable={},
            batch=batch,
            rope_length=max(lengths),
            precision=precision,
            threads=self.threads,
            kernels=self.device,
            has_untrained_tokens=has_untrained_tokens,
            objective=objective,
            reference=replace(self.weights, deltas={}),
            contrastive=contrastive,
        )
        graphs = StepGraphs(spec)
        built = (
            [*map(graphs.hidden_graph, lengths), graphs.logits_graph()]
            if with_logits
            else list(map(graphs.eval_graph, lengths))
        )
        built += [graphs.comparison_graph()] if contrastive else []
        plans = [graphs.plan(graph) for graph in built]
        if spec.device.memory_limit() is None:
            peak = max(plan.total - plan.role_bytes("state") for plan in plans)
            check_memory(self.gguf, peak, "a smaller --ctx or --batch")
        return EvalPrograms(graphs, self.memory, max(plan.arena for plan in plans))

    @cached_property
    def memory(self) -> "dict[str, Memory]":
        """The arrays in the memory of the device, by name."""
        from llamatrain.engine.device import create_device

        device = create_device(self.device, self.threads)
        return {name: device.upload(array) for name, array in self.arrays.items()}


def open_model(
    path: Path, lora: AdapterOptions, threads: int | None, device: str, predicts_text: bool = True
) -> OpenedModel:
    """Open a model with adapters; its weights stay in the mapped file where that is possible.

    The model must be one that predicts text if that is needed.
    """
    from llamatrain.adapters.load_adapted import load_with_adapters
    from llamatrain.distributed.cores import count_cores
    from llamatrain.engine.device import create_device, resolve_device
    from llamatrain.gguf.reader import open_gguf

    gguf, threads, device = open_gguf(path), threads or count_cores(), resolve_device(device)
    h, weights, arrays = load_with_adapters(
        gguf, lora, threads, create_device(device).can_decode, predicts_text
    )
    return OpenedModel(
        gguf=gguf,
        h=h,
        weights=weights,
        arrays=arrays,
        tokenizer=load_tokenizer(gguf, h.vocab),
        lora=lora,
        threads=threads,
        device=device,
    )


def open_base(model: OpenedModel, path: Path) -> OpenedModel:
    """Open the model to compare with: a file, or for the name `base` the model without its adapters."""
    own_path = Path(model.gguf.path)
    shown, path = path, own_path if str(path) == SAME_MODEL else path
    if not model.lora.scaled and os.path.realpath(path) == os.path.realpath(own_path):
        raise UsageError(
            f"--compare {shown} is the evaluated model itself; name an adapter with --lora, or another model "
            "to compare with",
            code="same-model",
        )
    base = open_model(path, AdapterOptions(), model.threads, model.device)
    if path == own_path:
        return base
    counts = [(len(opened.tokenizer), opened.h.vocab) for opened in (base, model)]
    if base.tokenizer.fingerprint != model.tokenizer.fingerprint or counts[0] != counts[1]:
        raise UsageError(
            f"{path}: a model to compare with must have the vocabulary of {model.gguf.path} (got "
            f"{counts[0][1]:,} tokens, the other has {counts[1][1]:,}, or other texts of tokens)",
            code="other-vocabulary",
        )
    return base


def load_tokenizer(gguf: "Gguf", embeddings: int) -> "Tokenizer":
    """Return the model's tokenizer; raise if it has more tokens than the model has embeddings."""
    from llamatrain.data.tokenizer import load

    tokenizer = load(gguf.metadata, gguf.path)
    if len(tokenizer) > embeddings:
        raise FileError(
            f"{gguf.path}: the vocabulary has {len(tokenizer)} tokens, but there are {embeddings} embeddings",
            code="damaged-model",
        )
    return tokenizer
