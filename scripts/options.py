"""Prints the README's table of a run's options, as their dataclasses declare them."""

import sys
from dataclasses import MISSING
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llamatrain.adapters.options import AdapterOptions
from llamatrain.config.options import Options, OptionSpec, format_flag, option_specs
from llamatrain.data.options import DataOptions
from llamatrain.model.options import ModelOptions
from llamatrain.preference.options import PreferenceOptions
from llamatrain.run.extra_output_options import ExtraOutputOptions
from llamatrain.run.lora_options import LoraOptions
from llamatrain.run.options import RunFolderOptions, RunOptions, TrainOptions

CLASSES: tuple[type[Options], ...] = (
    ModelOptions,
    LoraOptions,
    AdapterOptions,
    PreferenceOptions,
    DataOptions,
    TrainOptions,
    RunOptions,
    RunFolderOptions,
    ExtraOutputOptions,
)
FEW = 4  # options that are named before a block is opened
COMMANDS = {  # of panels that not all runs have
    ModelOptions.PANEL: ("from-scratch",),
    LoraOptions.PANEL: ("finetune",),
    AdapterOptions.PANEL: ("finetune", "generate", "evaluate"),
    PreferenceOptions.PANEL: ("finetune", "evaluate"),
}


def table() -> str:
    """A block for each panel, which opens where it is clicked."""
    panels: dict[str, list[OptionSpec]] = {}
    for each in (each for cls in CLASSES for each in option_specs(cls).values()):
        if not each.option.hidden:
            panels.setdefault(each.panel, []).append(each)
    return "\n".join(block(title, options) for title, options in panels.items())


def block(title: str, options: list[OptionSpec]) -> str:
    commands = ", ".join(f"<code>{command}</code>" for command in COMMANDS.get(title, ()))
    flags = " ".join(format_flag(each.name) for each in options[:FEW]) + " ..." * (len(options) > FEW)
    head = f"<details><summary><b>{title}</b>{f' ({commands})' if commands else ''} <code>{flags}</code></summary>"
    rows = [f"| {named(each)} | {shown(each)} | {each.option.sentence} |" for each in options]
    return (
        "\n".join([head, "", "| option | default | |", "| --- | --- | --- |", *rows, "", "</details>"]) + "\n"
    )


def named(option: OptionSpec) -> str:
    flag = format_flag(option.name)
    off = option.kind is bool and option.default is not False
    return f"`{flag}`, `--no-{flag.removeprefix('--')}`" if off else f"`{flag}`"


def shown(option: OptionSpec) -> str:
    default = option.default
    if option.kind is bool and default is None:
        return "auto"
    if default is MISSING or default is None or default == () or default == "":
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


if __name__ == "__main__":
    print(table(), end="")
