"""Parses LoRA targets such as attn_q, blk.0-3.ffn_down, blk.8-, output or norms."""

import re
from collections.abc import Sequence
from difflib import get_close_matches

from llamatrain.config.messages import shorten
from llamatrain.errors import UsageError
from llamatrain.model.hyperparameters import Hyperparameters

NORMS = "norms"  # all there are
BLOCKS = r"blk\.(?P<first>\d{1,6})(?P<on>-(?P<last>\d{1,6})?)?"
TARGET = re.compile(rf"(?:{BLOCKS}\.)?(?P<name>[a-z_]+)(?:\.weight)?")


def block_matrices(h: Hyperparameters) -> list[str]:
    """Return the matrices of all blocks that get an adapter by default, in file order."""
    return [
        name
        for name, kind in h.weight_kinds()
        if kind.role == "matrix" and kind.default_target and name.startswith("blk.")
    ]


def norm_weights(h: Hyperparameters) -> set[str]:
    """Return all norms."""
    return {name for name, kind in h.weight_kinds() if kind.role == "norm"}


def match_target(target: str, h: Hyperparameters) -> set[str]:
    """Return the weights that a target names."""
    if target == NORMS:
        return norm_weights(h)
    if blocks := re.fullmatch(BLOCKS, target):
        return {
            name
            for layer in block_range(blocks, target, h)
            for name in block_matrices(h)
            if name.startswith(f"blk.{layer}.")
        }
    match = TARGET.fullmatch(target)
    patterns = {
        short_name(pattern): pattern for pattern, kind in h.architecture.weights.items() if kind.has_lora
    }
    kinds = {name: h.architecture.weights[pattern] for name, pattern in patterns.items()}
    adaptable = [
        name
        for role in ("matrix", "embedding", "output", "norm")
        for name, kind in kinds.items()
        if kind.role == role
    ]
    kind = kinds.get(match["name"]) if match else None
    if not match or not kind:
        module_name = target.removesuffix(".weight").rpartition(".")[2]
        if own_name := next(
            (name for name, each in kinds.items() if module_name in each.module.split(".")), ""
        ):
            raise UsageError(
                f"{shorten(target)}: no such weight; its name is {own_name}", code="unknown-target"
            )
        if target == "all-linear":
            raise UsageError(
                f"{target}: no such weight; without --target, all linear weights get an adapter",
                code="unknown-target",
            )
        close: Sequence[str] = get_close_matches(target.rpartition(".")[2], adaptable, 2, 0.5)
        raise UsageError(
            f"{shorten(target)}: no such weight; choose one of {', '.join(close or adaptable)}",
            code="unknown-target",
        )
    if h.tied and kind.role in ("embedding", "output"):
        raise UsageError(
            f"{shorten(target)}: the model's embeddings are tied, so one matrix is input and output; "
            "leave it out",
            code="tied-target",
        )
    found = {name for name, each in h.weight_kinds() if each is kind}
    if match["first"] is not None:
        pattern = patterns[match["name"]]
        named = {pattern.format(layer) for layer in block_range(match, target, h)}
        found = found & named if "{}" in pattern else set()
    if not found:
        raise UsageError(f"{shorten(target)}: the model has no such weight", code="unknown-target")
    return found


def block_range(match: re.Match[str], target: str, h: Hyperparameters) -> range:
    """Return the blocks of a target: one, a range, or all from one on."""
    first = int(match["first"])
    last = int(match["last"]) if match["last"] else h.layers - 1 if match["on"] else first
    if not first <= last < h.layers:
        raise UsageError(
            f"{shorten(target)}: the model has the blocks 0 to {h.layers - 1}", code="no-such-block"
        )
    return range(first, last + 1)


def short_name(name: str) -> str:
    """Return the short name of a weight: attn_q for blk.{}.attn_q.weight."""
    return name.removesuffix(".weight").rpartition(".")[2]
