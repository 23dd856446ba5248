"""Writes llamatrain/api_options.py: the options of the Python API with their types, as type checkers and editors read them.

python scripts/api_options.py            write it
python scripts/api_options.py --check    end with 1 where it is not what the dataclasses say
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any, get_args, get_origin

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llamatrain.adapters.options import AdapterOptions
from llamatrain.commands.evaluate import EvaluateOptions
from llamatrain.commands.generate import LoadOptions
from llamatrain.commands.merge import ExportOptions
from llamatrain.commands.preview import PreviewOptions
from llamatrain.config.options import Options, OptionSpec, option_specs
from llamatrain.config.signatures import sentence_for
from llamatrain.config.units import Bandwidth, Duration, Size
from llamatrain.data.options import DataOptions
from llamatrain.preference.options import PreferenceDataOptions, PreferenceOptions
from llamatrain.run.options import RunFolderOptions
from llamatrain.run.request import FINETUNE_OPTIONS, FROM_SCRATCH_OPTIONS
from llamatrain.sample.options import SamplingOptions

FILE = Path(__file__).resolve().parent.parent / "llamatrain" / "api_options.py"
SAMPLING = '    temperature: float\n    """Another name of temp."""\n'
HEAD = '''"""The options of the Python API, for type checkers and editors.

Made by scripts/api_options.py from the dataclasses that declare them: edit those instead.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Place = str | os.PathLike[str]
'''
KINDS = {Path: "Place", Size: "int | str", Duration: "float | str", Bandwidth: "float | str"}
WIDTH = 130
MORE = {
    "val": "Place | Sequence[Place] | Sequence[Mapping[str, Any]]",
    "vocab_size": "int | str",
}  # what else is understood
GIVEN: dict[
    str, tuple[tuple[type[Options], ...], tuple[str, ...], str]
] = {  # classes, options left out, and more fields
    "FromScratchOptions": ((RunFolderOptions, *FROM_SCRATCH_OPTIONS), (), ""),
    "FinetuneOptions": ((RunFolderOptions, *FINETUNE_OPTIONS), (), ""),
    "ExportLoraOptions": ((ExportOptions, AdapterOptions), ("out",), ""),
    "EvaluateOptionsGiven": ((EvaluateOptions, AdapterOptions, PreferenceOptions, DataOptions), (), ""),
    "PreviewOptionsGiven": ((PreviewOptions, PreferenceDataOptions, DataOptions), ("model",), ""),
    "LoadOptionsGiven": ((LoadOptions, AdapterOptions), (), ""),
    "SamplingOptionsGiven": ((SamplingOptions,), (), SAMPLING),
    "ChatOptionsGiven": ((LoadOptions, AdapterOptions, SamplingOptions), (), SAMPLING),
}


def text() -> str:
    return HEAD + "".join(f"\n\n{class_of(name, *what)}" for name, what in GIVEN.items())


def class_of(name: str, classes: tuple[type[Options], ...], without: tuple[str, ...], more: str) -> str:
    options = {
        each: option for cls in classes for each, option in option_specs(cls).items() if each not in without
    }
    return (
        f"class {name}(TypedDict, total=False):\n"
        + "".join(line for each in options.values() for line in field(each))
        + more
    )


def field(option: OptionSpec) -> Iterator[str]:
    line = f"    {option.name}: {type_of(option)}\n"
    if len(line) > WIDTH:  # a long Literal
        items = "".join(f'        "{each}",\n' for each in option.choices)
        line = f"    {option.name}: Literal[\n{items}    ]\n"
    yield line
    sentence = sentence_for(option).replace("\\", "\\\\")
    yield (
        "\n".join(wrap(f'"""{sentence}"""', WIDTH - 4, initial_indent="    ", subsequent_indent="    "))
        + "\n"
    )


def type_of(option: OptionSpec) -> str:
    one = kind(option.kind)
    if option.name in MORE:
        return MORE[option.name]
    if option.repeated:
        one = f"{one} | Sequence[{one}]" if get_origin(option.kind) is not tuple else f"Sequence[{one}]"
    return f"{one} | None" if option.optional else one


def kind(annotation: Any) -> str:
    if get_origin(annotation) is tuple:
        return f"tuple[{', '.join(map(kind, get_args(annotation)))}]"
    if choices := get_args(annotation):
        return f"Literal[{', '.join(map(repr, choices))}]".replace("'", '"')
    return KINDS.get(annotation) or annotation.__name__


def main() -> None:
    made = text()
    if "--check" in sys.argv[1:]:
        sys.exit(FILE.read_text() != made)
    FILE.write_text(made)


if __name__ == "__main__":
    main()
