"""Converts PEFT's adapters of plain parameters, as Hugging Face's models keep stacked experts and routers.

PEFT wraps the module that holds a parameter. If it adapts several parameters of a module, wrappers are nested: that of
the first parameter is the innermost, and each one around it adds `.base_layer` to the names inside. Which parameters
these are is in the configuration (`target_parameters`). For experts (E, out, in) the factors are matrices: lora_A
(E r, in), where the rows of an expert are together, and lora_B (out, r E), where the columns of a rank are together.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llamatrain.adapters.adapter import Half, Halves, LoraPair
from llamatrain.errors import FileError
from llamatrain.gguf.parser import quote
from llamatrain.model.architecture import TEXT_PREFIX
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora_targets import short_name

BASE_LAYER = ".base_layer"
MAX_DEPTH = 16  # of nested wrappers
MAX_TARGETS = 1 << 12
ONE_EXPERT = re.compile(r"(.+\.experts)\.(0|[1-9][0-9]{0,5})\.(\w+)")
MODULES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
MISTAKEN = {"gate", *MODULES.values()}

Holders = dict[str, list[str]]  # names of parameters, by the module that holds them


def parameters_by_holder(h: Hyperparameters) -> Holders:
    """Return the parameters that modules hold, in their order there."""
    found: Holders = {}
    for name, kind in h.weight_kinds():
        if kind.is_parameter:
            module = h.architecture.module_for_weight(name) or ""
            holder, _, parameter = module.replace(TEXT_PREFIX, "").rpartition(".")
            parameters = found.setdefault(holder, [])
            if parameter not in parameters:
                parameters.append(parameter)
    return found


def target_parameter(module: str, h: Hyperparameters) -> str | None:
    """Return the name of the parameter that PEFT adapts, or None for a linear layer, which it adapts as a module.

    In models with experts, PEFT 0.21 takes linear layers with the names of single experts' for these experts. It
    finds the right ones by the names of their weights.
    """
    if h.weight_kind(h.weights_for_module(module)[0]).is_parameter:
        return module
    is_mistaken = h.architecture.has_experts and module.rpartition(".")[2] in MISTAKEN
    return f"{module}.weight" if is_mistaken else None


# ---- reading ---------------------------------------------------------------


def check_targets(path: Path, targets: Any) -> list[str]:
    """Return the configuration's target_parameters."""
    targets = targets or []
    if not (
        isinstance(targets, list)
        and len(targets) <= MAX_TARGETS
        and all(isinstance(target, str) for target in targets)
    ):
        raise FileError(
            f"{path}: target_parameters must be a list of at most {MAX_TARGETS} names",
            code="invalid-peft-config",
        )
    return targets


def name_parameters(source: Path, modules: Halves, targets: Collection[str], h: Hyperparameters) -> Halves:
    """Return the factors with the names of parameters in place of those of their wrappers."""
    holders, endings = parameters_by_holder(h), tuple(f".{target}" for target in targets)
    named = Halves()
    for module, halves in modules.items():
        name = wrapped_name(source, module, endings, holders)
        if name in named:
            raise FileError(f"{source}: {quote(name)} has two pairs of factors", code="duplicate-tensor")
        named[name] = halves
    return named


def wrapped_name(source: Path, module: str, endings: tuple[str, ...], holders: Holders) -> str:
    """Return the name of the parameter that a wrapper is for, or that of another module as it is."""
    holder, depth = module, 0
    while holder.endswith(BASE_LAYER) and depth < MAX_DEPTH:
        holder, depth = holder.removesuffix(BASE_LAYER), depth + 1
    if not (parameters := holders.get(holder.replace(TEXT_PREFIX, ""))):
        return module
    names = [f"{holder}.{parameter}" for parameter in parameters]
    wrapped = [name for name in names if f".{name}".endswith(endings)]
    if depth >= len(wrapped):
        raise FileError(
            f"{source}: {quote(module)} has factors, but target_parameters of the configuration names "
            f"{', '.join(wrapped) or 'none'} of its parameters",
            code="unknown-module",
        )
    return wrapped[-1 - depth]


def pattern_name(module: str, targets: Collection[str]) -> str:
    """Return the name of a module that patterns of the configuration match: that of its weight if that is targeted."""
    weight = f"{module}.weight"
    is_weight = not module.endswith(".weight") and any(f".{weight}".endswith(f".{name}") for name in targets)
    return weight if is_weight else module


def stack_factors(
    source: Path, module: str, halves: dict[Half, np.ndarray], experts: int
) -> dict[Half, np.ndarray]:
    """Return the factors of experts as stacks: a (E, r, in) and b (E, out, r)."""
    stacked = dict[Half, np.ndarray]()
    for half, factor in halves.items():
        ranks = factor.shape[half == "b"]
        if ranks % experts:
            raise FileError(
                f"{source}: the {ranks} ranks of {quote(module)} cannot be divided among {experts} experts",
                code="invalid-factor",
            )
        shape = (experts, -1, factor.shape[1]) if half == "a" else (len(factor), -1, experts)
        stack = factor.reshape(shape)
        stacked[half] = stack if half == "a" else np.ascontiguousarray(np.moveaxis(stack, -1, 0))
    return stacked


# ---- reading what older versions of the library wrote -----------------------


def modules_of_experts(source: Path, modules: Collection[str], h: Hyperparameters) -> dict[str, list[str]]:
    """Return the modules of single experts, as Hugging Face's models had them before version 5, by weight.

    Each list has a module for each expert, in order.
    """
    weights = {
        f"{(h.architecture.module_for_weight(name) or '').rpartition('.')[0]}.{MODULES[short]}": name
        for name, kind in h.weight_kinds()
        if kind.role == "experts" and (short := short_name(name)) in MODULES
    }
    found: dict[str, dict[int, str]] = {}
    for module in modules:
        if (match := ONE_EXPERT.fullmatch(module)) and (name := weights.get(f"{match[1]}.{match[3]}")):
            found.setdefault(name, {})[int(match[2])] = module
    for name, numbered in found.items():
        count = h.shapes[name][0]
        if sorted(numbered) != [*range(count)]:
            raise FileError(
                f"{source}: {name} needs pairs for its {count} experts (got pairs for {len(numbered)}); the adapter "
                "is for another base, or for some of the experts, which is not supported",
                code="wrong-base",
            )
    return {name: [numbered[number] for number in sorted(numbered)] for name, numbered in found.items()}


def join_experts(
    source: Path, name: str, experts: Sequence[dict[Half, np.ndarray]]
) -> dict[Half, np.ndarray]:
    """Return the factors of single experts as stacks."""
    joined = dict[Half, np.ndarray]()
    for half in sorted({half for halves in experts for half in halves}):
        factors = [halves[half] for halves in experts if half in halves]
        if len(factors) < len(experts) or len({factor.shape for factor in factors}) > 1:
            raise FileError(
                f"{source}: the experts of {name} must all have a factor {half} of one shape",
                code="invalid-factor",
            )
        joined[half] = np.stack(factors)
    return joined


# ---- writing ---------------------------------------------------------------


def wrapper_name(module: str, modules: Collection[str], holders: Holders) -> str:
    """Return the name of a parameter's wrapper, if these modules have adapters."""
    holder, _, parameter = module.rpartition(".")
    parameters = holders[holder.replace(TEXT_PREFIX, "")]
    later = parameters[parameters.index(parameter) + 1 :]
    return holder + BASE_LAYER * sum(f"{holder}.{name}" in modules for name in later)


def flatten_factors(pair: LoraPair) -> LoraPair:
    """Return a pair of experts with its factors as matrices."""
    a, b = pair.a, np.moveaxis(pair.b, 0, -1)
    return LoraPair(a.reshape(-1, a.shape[-1]), b.reshape(len(b), -1), pair.scale)
