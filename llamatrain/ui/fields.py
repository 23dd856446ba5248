"""The options of a run as fields of the page: described by their declarations, and read from what was typed."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from typing import Any

from llamatrain.config.options import OptionError, OptionSpec, format_flag, option_specs, replace_flags
from llamatrain.errors import UsageError
from llamatrain.run.options import RunFolderOptions
from llamatrain.run.request import FINETUNE_DEFAULTS, FINETUNE_OPTIONS, FROM_SCRATCH_OPTIONS

CLASSES = {"finetune": FINETUNE_OPTIONS, "from-scratch": FROM_SCRATCH_OPTIONS}
DEFAULTS: dict[str, Mapping[str, Any]] = {"finetune": FINETUNE_DEFAULTS, "from-scratch": {}}
FOLDER_OPTIONS = ("out", "overwrite", "checkpoint_in", "config")  # the page itself resumes runs
# Those that are always visible, with their labels
SHARED = {
    "batch": "Rows per batch",
    "ctx": "Context, in tokens",
    "val_split": "Share for validation",
    "memory": "Memory limit",
    "out": "Folder of the run",
}
LENGTH = {"iters": "Steps", "lr": "Learning rate"}
BASIC = {
    "finetune": {**LENGTH, "lora_r": "Rank of the adapter", **SHARED},
    "from-scratch": {**LENGTH, "size": "Size of the model", **SHARED},
}


def specs_of(command: str) -> dict[str, OptionSpec]:
    """Return the options of a command that the page offers."""
    if command not in CLASSES:
        raise UsageError("command must be finetune or from-scratch", code="unknown-command")
    folder = {name: option_specs(RunFolderOptions)[name] for name in FOLDER_OPTIONS}
    options = {name: spec for cls in CLASSES[command] for name, spec in option_specs(cls).items()}
    return {**options, **folder}


def describe_fields(command: str) -> list[dict[str, Any]]:
    """Return the fields of a command for the page."""
    specs = specs_of(command)
    basic, defaults = BASIC[command], DEFAULTS[command]
    names = [*basic, *(name for name in specs if name not in basic)]
    return [
        describe_field(specs[name], defaults.get(name, specs[name].default), basic.get(name))
        for name in names
        if not specs[name].option.hidden
    ]


def describe_field(spec: OptionSpec, default: Any, label: str | None) -> dict[str, Any]:
    """Return what the page needs to show a field; those with a label are always visible."""
    return {
        "name": spec.name,
        "label": label or spec.name,
        "basic": label is not None,
        "panel": spec.panel,
        "sentence": replace_flags(spec.option.sentence, str),
        "unit": spec.unit,
        "kind": "switch" if spec.kind is bool else "lines" if spec.repeated else "text",
        "choices": list(spec.choices) if not spec.repeated else [],
        "default": format_default(default),
    }


def format_default(default: Any) -> str:
    """Return a default as it would be typed."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is MISSING or default is None or default == ():
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def read_values(command: str, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the fields that were filled in, in the types of their options."""
    specs, values = specs_of(command), dict[str, Any]()
    for name, given in typed.items():
        if name not in specs:
            raise UsageError(f"{name[:80]}: there is no such option", code="unknown-option")
        if given not in ("", [], None):
            spec = specs[name]
            values[name] = spec.check(spec.parse(read_value(spec, given)))
    return values


def read_value(spec: OptionSpec, given: Any) -> Any:
    """Return the value of a field as the command line would give it."""
    if spec.kind is bool:
        if given not in ("on", "off"):
            raise invalid(spec, "on or off")
        return given == "on"
    if not isinstance(given, str):
        raise invalid(spec, "a text")
    if not spec.repeated:
        return given.strip()
    lines = [line.strip() for line in given.splitlines() if line.strip()]
    if len(spec.parts) == 1:
        return lines
    pairs = [line.rsplit(None, len(spec.parts) - 1) for line in lines]
    if any(len(pair) != len(spec.parts) for pair in pairs):
        raise invalid(spec, f"{spec.unit} in each line")
    return pairs


def invalid(spec: OptionSpec, accepted: str) -> OptionError:
    """Return the error for a value of the wrong form."""
    return OptionError(lambda spelt: f"{spelt(spec.name)} must be {accepted}")


def to_words(command: str, typed: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a command line that has these values."""
    specs = specs_of(command)
    for name, given in typed.items():
        if given in ("", [], None):
            continue
        spec, flag = specs[name], format_flag(name)
        value = read_value(spec, given)
        if spec.kind is bool:
            yield flag if value else f"--no-{flag.removeprefix('--')}"
        elif not spec.repeated:
            yield f"{flag}={value}"
        elif len(spec.parts) == 1:
            yield from (f"{flag}={item}" for item in value)
        else:
            for parts in value:
                yield from (flag, *parts)
