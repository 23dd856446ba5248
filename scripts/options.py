"""Prints the README's table of a run's options, as their dataclasses declare them."""

import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llamatrain.adapters.options import LoraOptions
from llamatrain.config.options import flag_of
from llamatrain.data.options import DataOptions
from llamatrain.model.options import ModelOptions
from llamatrain.recipe.options import PlaceOptions, RunOptions, TrainOptions
from llamatrain.recipe.tuning import TuneOptions

PARTS = {
    "A new model (`from-scratch`)": ModelOptions,
    "An adapter (`finetune`)": TuneOptions,
    "Adapters beside the model (`finetune`, `generate`, `evaluate`)": LoraOptions,
    "Data": DataOptions,
    "Training": TrainOptions,
    "The run": RunOptions,
    "Where it lives": PlaceOptions,
}


def table() -> str:
    lines = ["| option | default | |", "| --- | --- | --- |"]
    for title, cls in PARTS.items():
        lines.append(f"| **{title}** | | |")
        hints = get_type_hints(cls, include_extras=True)
        for field in fields(cls):
            kind, sentence = get_args(hints[field.name])
            flag = flag_of(field.name)
            name = f"`{flag}`" if kind is not bool or not field.default else f"`{flag}`, `--no-{flag.removeprefix('--')}`"
            lines.append(f"| {name} | {shown(field.default)} | {sentence} |")
    return "\n".join(lines) + "\n"


def shown(default: object) -> str:
    if default is MISSING or default is None or default == () or default == "":
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


if __name__ == "__main__":
    print(table(), end="")
