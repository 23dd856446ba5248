"""Reads and writes adapters of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors in a folder.

In Hugging Face's weights, the rows of each head of q and k are in halves, as its rotation needs;
architectures that rotate pairs have them interleaved in GGUF files. So the rows of b are permuted when
reading, and back when writing.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from llamatrain.adapters.adapter import (
    Adapter,
    Half,
    Halves,
    LoraPair,
    check_halves,
    decode_factor,
    parse_factor_name,
    select_norms,
)
from llamatrain.adapters.gguf import fold_scale
from llamatrain.adapters.peft_parameters import (
    check_targets,
    flatten_factors,
    join_experts,
    modules_of_experts,
    name_parameters,
    parameters_by_holder,
    pattern_name,
    stack_factors,
    target_parameter,
    wrapper_name,
)
from llamatrain.errors import FileError
from llamatrain.gguf.parser import quote
from llamatrain.gguf.safetensors import (
    KINDS,
    StoredTensor,
    open_safetensors,
    read_json,
    write_safetensors,
)
from llamatrain.io.atomic_write import AtomicFile
from llamatrain.io.mapped_file import MappedFile, map_file, mapped_files, verify_unchanged
from llamatrain.io.partial_files import remove_partials
from llamatrain.model.hyperparameters import Hyperparameters

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
SUFFIXES: dict[str, Half] = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
}
MAX_CONFIG = 1 << 20
MAX_PATTERNS = 1 << 12  # some programs write one for each module
# Variants of LoRA that need more than the factors.
UNSUPPORTED = (
    "use_dora",
    "fan_in_fan_out",
    "modules_to_save",
    "lora_bias",
    "use_qalora",
    "layer_replication",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "arrow_config",
    "use_bdlora",
    "kasa_config",
    "monteclora_config",
    "megatron_config",
)
# with other initializations, the base itself is modified
SUPPORTED_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


# ---- reading ---------------------------------------------------------------


def read_peft(folder: Path, h: Hyperparameters) -> Adapter:
    """Read an adapter from a folder."""
    check_convertible(folder, h)
    config, source = read_config(folder / CONFIG), folder / WEIGHTS
    if not source.exists() and (folder / PICKLE).exists():
        raise FileError(
            f"{folder / PICKLE}: pickle files can run any code and are not read; save the "
            "adapter as safetensors",
            code="pickle-adapter",
        )
    modules, entries = Halves(), open_safetensors(source)
    with verify_unchanged(mapped_files(entry.raw for entry in entries.values())):
        for name, entry in entries.items():
            if not name.endswith(".base_layer.weight"):  # PEFT also stores the original embeddings
                module, half = parse_factor_name(modules, source, name.removeprefix(PREFIX), SUFFIXES)
                modules[module][half] = read_factor(source, name, entry)
    modules = name_parameters(source, modules, config["target_parameters"], h)
    stacks = modules_of_experts(source, modules, h)
    pairs_by_name = {
        name: join_experts(source, name, [modules[module] for module in each])
        for name, each in stacks.items()
    }
    others = [module for module in modules if module not in {*chain(*stacks.values())}]
    names = {name: module for module in others for name in weight_names(source, module, h)}
    pairs_by_name |= {
        name: convert_halves(source, module, name, modules[module], h) for name, module in names.items()
    }
    check_halves(source, pairs_by_name, h.architecture)
    modules_by_name = stacks | {name: [module] for name, module in names.items()}
    pairs = {
        name: LoraPair(
            factors["a"],
            factors["b"],
            common_scale(folder / CONFIG, config, modules_by_name[name], factors["b"].shape[-1]),
        )
        for name, factors in pairs_by_name.items()
    }
    return Adapter(source=folder, alpha=float(config["lora_alpha"]), pairs=pairs, architecture=h.architecture)


def read_factor(source: Path, name: str, entry: StoredTensor) -> np.ndarray:
    """Return a factor as a float32 matrix."""
    if entry.kind is None or len(entry.shape) != 2 or 0 in entry.shape:
        raise FileError(
            f"{source}: {quote(name)} must be a matrix of {', '.join(KINDS)} (got "
            f"{quote(entry.dtype)} {list(entry.shape)})",
            code="invalid-factor",
        )
    return decode_factor(source, name, entry.raw.reshape(entry.shape[0], -1), entry.kind)


def weight_names(source: Path, module: str, h: Hyperparameters) -> list[str]:
    """Return the GGUF names of a module's weights: one, or several that share its rows."""
    names = h.weights_for_module(module)
    if not names:
        raise FileError(
            f"{source}: {quote(module)} is not a module of {h.architecture.name} that can have an adapter",
            code="unknown-module",
        )
    return names


def convert_halves(
    source: Path, module: str, name: str, halves: dict[Half, np.ndarray], h: Hyperparameters
) -> dict[Half, np.ndarray]:
    """Return the factors of a weight's pair in GGUF's layout."""
    converted, kind = dict(halves), h.weight_kind(name)
    number, parts = kind.part
    if kind.role == "experts":
        converted = stack_factors(source, module, converted, kind.shape(h.for_weight(name))[0])
    if parts > 1 and not kind.row_order and "b" in converted:
        rows = converted["b"].shape[-2]
        if rows % parts:
            raise FileError(
                f"{source}: the {rows} rows of {quote(module)} cannot be divided into {parts} parts",
                code="invalid-factor",
            )
        converted["b"] = np.split(converted["b"], parts, axis=-2)[number]
    if kind.has_transposed_lora and "a" in converted:
        converted["a"] = np.ascontiguousarray(converted["a"].T)
    if (count := permuted_heads(name, h)) and "b" in converted:
        if len(converted["b"]) % (2 * count):
            raise FileError(
                f"{source}: the {len(converted['b'])} rows of {quote(module)} cannot be divided "
                f"among {count} heads in pairs",
                code="invalid-factor",
            )
        converted["b"] = interleave_rows(converted["b"], count)
    if kind.row_order and "b" in converted:
        count = sum(len(module_rows(each, h)) for each in h.weights_for_module(module))
        converted["b"] = reorder(source, module, converted["b"], kind.row_order(h), count, axis=-2)
    if kind.column_order and "a" in converted:
        order = kind.column_order(h)
        converted["a"] = reorder(source, module, converted["a"], order, len(order), axis=-1)
    return converted


def module_rows(name: str, h: Hyperparameters) -> np.ndarray:
    """Return the place of each row of a weight among those of its module."""
    kind = h.weight_kind(name)
    if kind.row_order:
        return kind.row_order(h)
    rows = kind.shape(h.for_weight(name))[-2]
    return kind.part[0] * rows + np.arange(rows)


def reorder(
    source: Path, module: str, factor: np.ndarray, order: np.ndarray, count: int, axis: int
) -> np.ndarray:
    """Return some of `count` rows or columns of a factor, or all of them in another order."""
    if factor.shape[axis] != count:
        raise FileError(
            f"{source}: the factors of {quote(module)} must have {count} {('rows', 'columns')[axis]} (got "
            f"{factor.shape[axis]})",
            code="invalid-factor",
        )
    return np.ascontiguousarray(factor.take(order, axis))


def permuted_heads(name: str, h: Hyperparameters) -> int | None:
    """Return the number of a weight's heads whose rows Hugging Face orders otherwise, or None."""
    count = h.weight_kind(name).rotary_heads
    return count(h.for_weight(name)) if count and h.architecture.rotation == "pairs" else None


def interleave_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Convert each head's rows from halves to interleaved pairs."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def split_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Convert each head's rows from interleaved pairs to halves."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def list_tensors(folder: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return configuration and tensors of a folder, without validating that they can be used here."""
    path = folder / CONFIG
    file = map_file(path, "PEFT's configuration")
    check_size(path, file)
    return read_json(path, file.read_bytes(0, len(file))), open_safetensors(folder / WEIGHTS)


# ---- its configuration -----------------------------------------------------


def read_config(path: Path) -> dict[str, Any]:
    """Read and validate the configuration."""
    file = map_file(path, "PEFT's configuration")
    check_size(path, file)
    with verify_unchanged([file]):
        config = read_json(path, file.read_bytes(0, len(file)))
    if config.get("peft_type") != "LORA":
        raise FileError(
            f"{path}: peft_type must be LORA (got {quote_json(config.get('peft_type'))})",
            code="unsupported-adapter",
        )
    for key in UNSUPPORTED:
        if config.get(key):
            raise FileError(
                f"{path}: {key} {quote_json(config[key])} is not supported: only plain LoRA is",
                code="unsupported-adapter",
            )
    if (bias := config.get("bias", "none")) != "none":
        raise FileError(
            f"{path}: trained biases are not supported (bias is {quote_json(bias)})",
            code="unsupported-adapter",
        )
    if (start := config.get("init_lora_weights")) not in SUPPORTED_INITS:
        raise FileError(
            f"{path}: init_lora_weights {quote_json(start)} is not supported: such an adapter "
            "needs a modified base",
            code="unsupported-adapter",
        )
    for key, smallest in (("r", 1), ("lora_alpha", 0)):
        config[key] = check_number(path, key, config.get(key, 8), smallest)
    config["target_parameters"] = check_targets(path, config.get("target_parameters"))
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
            raise FileError(
                f"{path}: {key} must map at most {MAX_PATTERNS} names to numbers (got "
                f"{quote_json(patterns)})",
                code="invalid-peft-config",
            )
        config[key] = {
            compile_pattern(path, key, pattern): check_number(path, key, value, 0)
            for pattern, value in patterns.items()
        }
    return config


def check_size(path: Path, file: MappedFile) -> None:
    """Raise if the configuration is too large."""
    if len(file) > MAX_CONFIG:
        raise FileError(
            f"{path}: the configuration must be at most {MAX_CONFIG} bytes (got {len(file)})",
            code="file-too-large",
        )


def quote_json(value: Any) -> str:
    """Return a value of the configuration for a message."""
    return quote(json.dumps(value))


def check_number(path: Path, key: str, value: Any, smallest: int) -> float:
    """Return a value that must be a number in range."""
    if type(value) not in (int, float) or not smallest <= value < 1 << 31:
        raise FileError(
            f"{path}: {key} must be a number of at least {smallest} (got {quote_json(value)})",
            code="invalid-peft-config",
        )
    return value


def compile_pattern(path: Path, key: str, pattern: str) -> re.Pattern[str]:
    """Return a pattern as PEFT matches it.

    PEFT accepts any regular expression, some of which take forever; here only plain names are allowed.
    """
    if not re.fullmatch(r"\^?(\w|\\?\.)+\$?", pattern):
        raise FileError(
            f"{path}: {key} must contain plain names of modules (got {quote(pattern)})",
            code="unsupported-adapter",
        )
    return re.compile(rf"(.*\.)?({pattern})$")


def lookup_pattern(patterns: dict[re.Pattern[str], float], module: str, default: float) -> float:
    """Return the value of the first pattern that matches a module."""
    return next((value for pattern, value in patterns.items() if pattern.match(module)), default)


def pair_scale(path: Path, config: dict[str, Any], module: str, rank: int) -> float:
    """Return the scale of a module's pair."""
    if (expected := lookup_pattern(config["rank_pattern"], module, config["r"])) != rank:
        raise FileError(
            f"{path}: the rank of {quote(module)} must be {expected} (got {rank})", code="rank-mismatch"
        )
    alpha = lookup_pattern(config["alpha_pattern"], module, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def common_scale(path: Path, config: dict[str, Any], modules: Collection[str], rank: int) -> float:
    """Return the scale of a pair that several modules have in common."""
    names = [pattern_name(module, config["target_parameters"]) for module in modules]
    scales = {pair_scale(path, config, name, rank) for name in names}
    if len(scales) > 1:
        raise FileError(
            f"{path}: experts of one block must have one alpha (got {len(scales)} of them)",
            code="unsupported-adapter",
        )
    return scales.pop()


# ---- writing ---------------------------------------------------------------


def write_peft(folder: Path, adapter: Adapter, base: str, h: Hyperparameters) -> None:
    """Write the folder as PEFT loads it; `base` is PEFT's name of the base model.

    Scales other than alpha / r are folded into b. Pairs of norms, which PEFT does not have, are left out.
    """
    check_pairs(folder, adapter.pairs, h)
    pairs = pairs_by_module(folder, adapter.without(adapter.norm_names), h)
    rank = Counter(pair.rank for pair in pairs.values()).most_common(1)[0][0]
    alpha = adapter.alpha or rank
    parameters = {module: name for module in pairs if (name := target_parameter(module, h))}
    ranks = {parameters.get(module, module): pair.rank for module, pair in pairs.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "rank_pattern": {name: each for name, each in ranks.items() if each != rank},
        "target_modules": target_modules([module for module in pairs if module not in parameters], h),
        **({"target_parameters": [*parameters.values()]} if parameters else {}),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder}: cannot be created: {error.strerror}", code="write-failed") from error
    write_safetensors(folder / WEIGHTS, dict(named_factors(pairs, alpha, h)))
    with AtomicFile(folder / CONFIG) as file:
        file.write(json.dumps(config, indent=2).encode() + b"\n")


def pairs_by_module(folder: Path, adapter: Adapter, h: Hyperparameters) -> dict[str, LoraPair]:
    """Return the pairs in PEFT's layout, by the names of modules."""
    parts: dict[str, dict[str, LoraPair]] = {}
    for name, pair in adapter.pairs.items():
        parts.setdefault(module_name(folder, name, h), {})[name] = to_peft_layout(name, pair, h)
    return {module: join_parts(pairs, h.weights_for_module(module), h) for module, pairs in parts.items()}


def to_peft_layout(name: str, pair: LoraPair, h: Hyperparameters) -> LoraPair:
    """Return a pair with its factors in PEFT's layout."""
    a, b, kind = pair.a, pair.b, h.weight_kind(name)
    if count := permuted_heads(name, h):
        b = split_rows(b, count)
    if kind.column_order:
        a = a[:, np.argsort(kind.column_order(h))]
    return LoraPair(a.T if kind.has_transposed_lora else a, b, pair.scale)


def join_parts(pairs: dict[str, LoraPair], names: Sequence[str], h: Hyperparameters) -> LoraPair:
    """Return the pair of a module that has the rows of several weights, some of which have pairs.

    If they have one factor a, so has the module; else its a has the rows of all, and its b their b's on the
    diagonal.
    """
    first, *others = pairs.values()
    if len(names) == 1 and not h.weight_kind(names[0]).row_order:
        return first
    rows = {name: module_rows(name, h) for name in names}
    has_one_a = all(np.array_equal(each.a, first.a) and each.scale == first.scale for each in others)
    is_shared, column = len(names) == len(pairs) and has_one_a, 0
    rank = first.rank if is_shared else sum(pair.rank for pair in pairs.values())
    b = np.zeros((*first.b.shape[:-2], sum(map(len, rows.values())), rank), np.float32)
    for name in (name for name in names if name in pairs):
        pair = pairs[name]
        b[..., rows[name], column : column + pair.rank] = (
            pair.b if is_shared else np.float32(pair.scale) * pair.b
        )
        column += 0 if is_shared else pair.rank
    if is_shared:
        return LoraPair(first.a, b, first.scale)
    return LoraPair(np.concatenate([pairs[name].a for name in names if name in pairs], -2), b, 1.0)


def named_factors(
    pairs: dict[str, LoraPair], alpha: float, h: Hyperparameters
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the factors of modules by PEFT's names."""
    holders = parameters_by_holder(h)
    for module, pair in pairs.items():
        kind = h.weight_kind(h.weights_for_module(module)[0])
        stored = replace(pair, b=fold_scale(alpha, pair))
        stored = flatten_factors(stored) if kind.role == "experts" else stored
        prefix = wrapper_name(module, pairs, holders) if kind.is_parameter else module
        suffixes = (
            (".lora_embedding_A", ".lora_embedding_B")
            if kind.has_transposed_lora
            else (".lora_A.weight", ".lora_B.weight")
        )
        for suffix, factor in zip(suffixes, (stored.a, stored.b), strict=True):
            yield f"{PREFIX}{prefix}{suffix}", factor


def check_pairs(folder: Path, names: Collection[str], h: Hyperparameters) -> None:
    """Raise if the pairs cannot be written: there are only pairs of norms, or the model cannot be converted."""
    check_convertible(folder, h)
    if len(select_norms(h.architecture, names)) == len(names):
        raise FileError(
            f"{folder}: cannot be written: PEFT has no pairs of norms, and the adapter has no others",
            code="only-norm-pairs",
        )


def check_convertible(folder: Path, h: Hyperparameters) -> None:
    """Raise if adapters of a model cannot be converted from or to PEFT's."""
    if problem := h.architecture.peft_problem:
        raise FileError(
            f"{folder}: PEFT's adapters of a {h.architecture.name} cannot be converted, because {problem}; use GGUF "
            "adapters",
            code="unsupported-adapter",
        )


def norms_note(folder: Path, norms: Sequence[str]) -> str:
    """Return the note about pairs of norms."""
    return (
        f"PEFT has no pairs of norms: {len(norms)} of them, such as that for {norms[0]}, are left out "
        f"of {folder}"
    )


def check_writable(folder: Path) -> None:
    """Raise if the folder cannot be written to, as far as that can be seen before."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise FileError(f"{folder}: cannot be created: {existing} is not a folder", code="write-failed")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise FileError(
            f"{folder}: cannot be written: no permission to write to {existing}", code="write-failed"
        )


def has_adapter(folder: Path) -> bool:
    """Return True if there is an adapter or a part of one."""
    return any((folder / name).exists() for name in (CONFIG, WEIGHTS, PICKLE))


def remove_partial(folder: Path) -> None:
    """Remove temporary files of a process that is gone."""
    for name in (WEIGHTS, CONFIG):
        remove_partials(folder / name)


def module_name(folder: Path, name: str, h: Hyperparameters) -> str:
    """Return Hugging Face's name of a weight's module."""
    module = h.architecture.module_for_weight(name)
    if module is None:
        raise FileError(
            f"{folder}: cannot be written: PEFT does not support adapters of {quote(name)}",
            code="unknown-module",
        )
    return module


def target_modules(modules: Collection[str], h: Hyperparameters) -> list[str]:
    """Return kinds of modules if an adapter has them in each layer, else each module by name."""
    kinds = Counter(module.rpartition(".")[2] for module in modules)
    in_model = Counter(
        kind.module.rpartition(".")[2]
        for _, kind in h.weight_kinds()
        if kind.adaptable and kind.part[0] == 0 and not kind.is_parameter
    )
    has_all = all(kinds[kind] == count for kind, count in in_model.items() if kind in kinds)
    return sorted(kinds) if has_all else list(modules)
