"""Parses LoRA targets such as attn_q, blk.0-3.ffn_down, blk.8-, output, or groups such as norms and experts."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from llamatrain.config.messages import shorten
from llamatrain.errors import UsageError
from llamatrain.model.architecture import WeightKind
from llamatrain.model.hyperparameters import Hyperparameters

Kinds = dict[str, WeightKind[Any]]  # by short name

# Targets that name several weights, and which these are, by short name and kind.
GROUPS: dict[str, Callable[[str, WeightKind[Any]], bool]] = {
    "attention": lambda name, kind: kind.role == "matrix" and name.startswith("attn_"),
    "experts": lambda name, kind: kind.role == "experts",
    "shared": lambda name, kind: kind.role == "matrix" and name.endswith("_shexp"),
    "router": lambda name, kind: kind.role == "router",
    "norms": lambda name, kind: kind.role == "norm",
}
BLOCKS = r"blk\.(?P<first>\d{1,6})(?P<on>-(?P<last>\d{1,6})?)?"
TARGET = re.compile(rf"(?:{BLOCKS}\.)?(?P<name>[a-z_]+)(?:\.weight)?")


def block_matrices(h: Hyperparameters) -> list[str]:
    """Return the matrices of all blocks that get an adapter by default, in file order."""
    return [
        name
        for name, kind in h.weight_kinds()
        if kind.role == "matrix" and kind.default_target and name.startswith("blk.")
    ]


def group_weights(group: str, h: Hyperparameters) -> set[str]:
    """Return the weights of a group."""
    return {name for name, kind in h.weight_kinds() if GROUPS[group](short_name(name), kind)}


def group_sizes(sizes: Iterable[tuple[str, int]], h: Hyperparameters) -> dict[str, int]:
    """Return the sum of the sizes of weights by group; feed-forward matrices and others are groups too."""
    sums: Counter[str] = Counter()
    for name, size in sizes:
        short, kind = short_name(name), h.weight_kind(name)
        rest = "feed-forward" if short.startswith("ffn_") else "others"
        sums[next((group for group, holds in GROUPS.items() if holds(short, kind)), rest)] += size
    order = ["attention", "feed-forward", *GROUPS, "others"]
    return {group: sums[group] for group in sorted(sums, key=order.index)}


def describe_groups(sizes: Mapping[str, int]) -> str:
    """Return the number of parameters of each group in one line."""
    return ", ".join(f"{group} {size:,}" for group, size in sizes.items())


def match_target(target: str, h: Hyperparameters) -> set[str]:
    """Return the weights that a target names."""
    if blocks := re.fullmatch(BLOCKS, target):
        return in_blocks(block_matrices(h), block_range(blocks, target, h))
    kinds: Kinds = {
        short_name(pattern): kind for pattern, kind in h.architecture.weights.items() if kind.has_lora
    }
    match = TARGET.fullmatch(target)
    if match and match["name"] in GROUPS:
        found = {name for name in group_weights(match["name"], h) if h.weight_kind(name).has_lora}
    elif match and (problem := adapter_problem(match["name"], h)):
        raise UsageError(
            f"{shorten(target)}: it cannot have an adapter, because {problem}", code="unknown-target"
        )
    elif match and (kind := kinds.get(match["name"])):
        if h.tied and kind.role in ("embedding", "output"):
            raise UsageError(
                f"{shorten(target)}: the model's embeddings are tied, so one matrix is input and output; "
                "leave it out",
                code="tied-target",
            )
        found = {name for name, each in h.weight_kinds() if each is kind}
    else:
        present = {short_name(name) for name in h.shapes}
        raise unknown_target(target, {name: kind for name, kind in kinds.items() if name in present})
    if match["first"] is not None:
        found = in_blocks(found, block_range(match, target, h))
    if not found:
        raise UsageError(f"{shorten(target)}: the model has no such weight", code="unknown-target")
    return found


def adapter_problem(name: str, h: Hyperparameters) -> str:
    """Return why a weight of the model can have no adapter, by its short name; or an empty text."""
    kinds = (kind for pattern, kind in h.architecture.weights.items() if short_name(pattern) == name)
    return next((kind.adapter_problem for kind in kinds if kind.adapter_problem), "")


def unknown_target(target: str, kinds: Kinds) -> UsageError:
    """Return the error for a target that names no weight, by those that there are."""
    module_name = target.removesuffix(".weight").rpartition(".")[2]
    own_name = next((name for name, kind in kinds.items() if module_name in kind.module.split(".")), "")
    roles = ("matrix", "router", "experts", "embedding", "output", "norm")
    names = [name for role in roles for name, kind in kinds.items() if kind.role == role]
    names += [group for group, holds in GROUPS.items() if any(holds(*item) for item in kinds.items())]
    if own_name:
        problem = f"its name is {own_name}"
    elif target == "all-linear":
        problem = "without --target, all linear weights get an adapter"
    else:
        close: Sequence[str] = get_close_matches(target.rpartition(".")[2], names, 2, 0.5)
        problem = f"choose one of {', '.join(close or names)}"
    return UsageError(f"{shorten(target)}: no such weight; {problem}", code="unknown-target")


def in_blocks(names: Iterable[str], blocks: range) -> set[str]:
    """Return the names of weights of some blocks."""
    prefixes = tuple(f"blk.{layer}." for layer in blocks)
    return {name for name in names if name.startswith(prefixes)}


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
