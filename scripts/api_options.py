"""Writes llamatrain/api/option_types.py: the options of the Python API, for type checkers and editors.

python scripts/api_options.py            write it
python scripts/api_options.py --check    exit with 1 if it is out of date
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any, get_args, get_origin

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llamatrain.adapters.options import AdapterOptions, ControlOptions
from llamatrain.commands.control_vector import ControlVectorOptions
from llamatrain.commands.embed import EMBED_OPTIONS
from llamatrain.commands.evaluate import EVALUATE_OPTIONS
from llamatrain.commands.extract_lora import ExtractOptions
from llamatrain.commands.generate import LoadOptions
from llamatrain.commands.imatrix import IMATRIX_OPTIONS
from llamatrain.commands.import_model import ImportOptions
from llamatrain.commands.merge_adapters import ExportOptions
from llamatrain.commands.merge_models import MergeOptions
from llamatrain.commands.preview import PreviewOptions
from llamatrain.commands.push import PushOptions
from llamatrain.commands.rerank import RERANK_OPTIONS
from llamatrain.config.options import Options, OptionSpec, option_specs
from llamatrain.config.signatures import sentence_for
from llamatrain.config.units import Bandwidth, Duration, Size
from llamatrain.data.options import DataOptions
from llamatrain.preference.options import PreferenceDataOptions
from llamatrain.run.options import RunFolderOptions
from llamatrain.run.request import FINETUNE_OPTIONS, FROM_SCRATCH_OPTIONS
from llamatrain.sample.options import SamplingOptions

FILE = Path(__file__).resolve().parent.parent / "llamatrain" / "api" / "option_types.py"
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
}  # options that accept further types
GIVEN: dict[
    str, tuple[tuple[type[Options], ...], tuple[str, ...], str]
] = {  # classes, options left out, and more fields
    "FromScratchOptions": ((RunFolderOptions, *FROM_SCRATCH_OPTIONS), (), ""),
    "FinetuneOptions": ((RunFolderOptions, *FINETUNE_OPTIONS), (), ""),
    "ExportLoraOptions": ((ExportOptions, AdapterOptions), ("out",), ""),
    "ControlVectorOptionsGiven": ((ControlVectorOptions,), ("out",), ""),
    "ExtractOptionsGiven": ((ExtractOptions,), ("out",), ""),
    "ImportOptionsGiven": ((ImportOptions,), (), ""),
    "MergeOptionsGiven": ((MergeOptions,), ("out",), ""),
    "PushOptionsGiven": ((PushOptions,), (), ""),
    "EvaluateOptionsGiven": (EVALUATE_OPTIONS, (), ""),
    "ImatrixOptionsGiven": (IMATRIX_OPTIONS, ("out",), ""),
    "EmbedOptionsGiven": (EMBED_OPTIONS, (), ""),
    "RerankOptionsGiven": (RERANK_OPTIONS, (), ""),
    "PreviewOptionsGiven": ((PreviewOptions, PreferenceDataOptions, DataOptions), ("model",), ""),
    "LoadOptionsGiven": ((LoadOptions, AdapterOptions, ControlOptions), (), ""),
    "SamplingOptionsGiven": ((SamplingOptions,), (), SAMPLING),
    "ChatOptionsGiven": ((LoadOptions, AdapterOptions, ControlOptions, SamplingOptions), (), SAMPLING),
}


def document() -> str:
    """Return the text of the file."""
    return HEAD + "".join(f"\n\n{format_class(name, *parts)}" for name, parts in GIVEN.items())


def format_class(name: str, classes: tuple[type[Options], ...], without: tuple[str, ...], more: str) -> str:
    """Return a TypedDict of the options of some classes."""
    options = {
        name: spec for cls in classes for name, spec in option_specs(cls).items() if name not in without
    }
    return (
        f"class {name}(TypedDict, total=False):\n"
        + "".join(line for spec in options.values() for line in format_field(spec))
        + more
    )


def format_field(option: OptionSpec) -> Iterator[str]:
    """Yield the lines of an option: its type and its sentence."""
    line = f"    {option.name}: {option_type(option)}\n"
    if len(line) > WIDTH:  # a long Literal
        items = "".join(f'        "{choice}",\n' for choice in option.choices)
        line = f"    {option.name}: Literal[\n{items}    ]\n"
    yield line
    sentence = sentence_for(option).replace("\\", "\\\\")
    yield (
        "\n".join(wrap(f'"""{sentence}"""', WIDTH - 4, initial_indent="    ", subsequent_indent="    "))
        + "\n"
    )


def option_type(option: OptionSpec) -> str:
    """Return the type of an option as source code."""
    one = format_type(option.kind)
    if option.name in MORE:
        return MORE[option.name]
    if option.repeated:
        one = f"{one} | Sequence[{one}]" if get_origin(option.kind) is not tuple else f"Sequence[{one}]"
    return f"{one} | None" if option.optional else one


def format_type(annotation: Any) -> str:
    """Return a type as source code."""
    if get_origin(annotation) is tuple:
        return f"tuple[{', '.join(map(format_type, get_args(annotation)))}]"
    if choices := get_args(annotation):
        return f"Literal[{', '.join(map(repr, choices))}]".replace("'", '"')
    return KINDS.get(annotation) or annotation.__name__


def main() -> None:
    """Write the file, or check it."""
    text = document()
    if "--check" in sys.argv[1:]:
        sys.exit(FILE.read_text() != text)
    FILE.write_text(text)


if __name__ == "__main__":
    main()
