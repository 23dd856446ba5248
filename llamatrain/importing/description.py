"""Describes an imported model for its users: the keys `general.*`, as llama.cpp's converter writes them.

The name and the size come from the folder, the licence, base models, languages and tags from the front matter of its
README.md, and the settings of sampling from generation_config.json. A file that cannot be read is left out with a note.
"""

import re
from collections.abc import Iterable
from math import isfinite, prod
from pathlib import Path
from typing import Any, TypeGuard

from llamatrain.config.read_limited import read_limited
from llamatrain.errors import FileError
from llamatrain.gguf.safetensors import read_json
from llamatrain.gguf.types import TensorInfo
from llamatrain.gguf.values import Kind, Value, number
from llamatrain.importing.checkpoint import Checkpoint
from llamatrain.importing.gguf_package import collect_values
from llamatrain.platform.terminal import log_line

MOST_BYTES = 1 << 24  # of a README.md or a generation_config.json
MOST_FRONT_MATTER = 1 << 16  # characters; the reader of YAML needs about a second for them
MOST_LEVELS = 50  # of lists and mappings in it; the reader needs 25 s for 60,000
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which JSON and YAML can have
LISTS = {
    *("license", "language", "languages", "tags", "pipeline_tag", "base_model", "base_models"),
    *("base_model_sources", "dataset", "datasets", "dataset_sources"),
}
# keys of generation_config.json by the last part of their names in GGUF files; the first that is there counts
SAMPLING = {
    "top_k": (Kind.INT32, ("top_k",)),
    "top_p": (Kind.FLOAT32, ("top_p",)),
    "min_p": (Kind.FLOAT32, ("min_p",)),
    "temp": (Kind.FLOAT32, ("temperature",)),
    "penalty_repeat": (Kind.FLOAT32, ("penalty_repeat", "repetition_penalty")),
}


def describe_model(checkpoint: Checkpoint, infos: Iterable[TensorInfo]) -> dict[str, Value]:
    """Return the keys `general.*` that say what a model is called and where it comes from."""
    import gguf

    folder = checkpoint.folder.resolve()
    total, size = measure(infos)
    named = checkpoint.config.values.get("_name_or_path")
    names = {"_name_or_path": named} if is_text(named) else {}
    card = read_front_matter(folder / "README.md")
    found = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), card, names, folder, total)
    found.name = found.name or folder.name
    found.size_label = found.size_label or size
    writer = gguf.GGUFWriter("", "")
    found.set_gguf_meta_model(writer)
    return collect_values(writer, "general.") | read_sampling(folder / "generation_config.json")


def measure(infos: Iterable[TensorInfo]) -> tuple[int, str]:
    """Return the number of parameters, and the text that stands for it in names, such as 7B or 8x7B."""
    import gguf

    shapes = {info.name: info.shape for info in infos}
    stacks = [shape for name, shape in shapes.items() if "_exps." in name and len(shape) > 2]
    total, in_stacks = sum(map(prod, shapes.values())), sum(map(prod, stacks))
    experts = sum(shape[-3] for shape in stacks) // max(1, len(stacks))
    of_one = sum(prod(shape) // shape[-3] for shape in stacks)
    return total, gguf.size_label(total, total - in_stacks, of_one, experts)


# ---- files --------------------------------------------------------------------------


def read_front_matter(path: Path) -> dict[str, Any]:
    """Return the texts and lists of texts in the front matter of a README, by name."""
    import yaml

    if not path.exists():
        return {}
    try:
        lines = read_limited(path, MOST_BYTES, "a README").decode("utf-8", "replace").splitlines()
        if lines[:1] != ["---"] or "---" not in lines[1:]:
            return {}
        front = "\n".join(lines[1 : lines.index("---", 1)]).replace("\t", "  ")
        if len(front) > MOST_FRONT_MATTER:
            raise ValueError(f"it has more than {MOST_FRONT_MATTER} characters")
        check_yaml(front)
        values = yaml.load(front, yaml.BaseLoader)  # which leaves texts as they are: `no` is a language
    except (FileError, ValueError, RecursionError, yaml.YAMLError) as error:
        log_line(f"{path}: its front matter was left out ({first_line(error)})")
        return {}
    if not isinstance(values, dict):
        return {}
    return {name: value for name, value in values.items() if is_text(value) or is_list(name, value)}


def check_yaml(text: str) -> None:
    """Raise for YAML whose references or levels would take much memory or time to read."""
    import yaml

    starts = (
        *(yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken),
        *(yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken),
    )
    ends = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
    levels = 0
    for token in yaml.scan(text):
        if isinstance(token, yaml.AliasToken):
            raise ValueError("it repeats parts by reference")
        levels += isinstance(token, starts) - isinstance(token, ends)
        if levels > MOST_LEVELS:
            raise ValueError(f"it has more than {MOST_LEVELS} levels of lists and mappings")


def read_sampling(path: Path) -> dict[str, Value]:
    """Return the settings of sampling that a model's makers suggest."""
    if not path.exists():
        return {}
    try:
        values = read_json(path, read_limited(path, MOST_BYTES, "a file of settings"))
    except FileError as error:
        log_line(f"settings of sampling were left out ({first_line(error)})")
        return {}
    found = dict[str, Value]()
    for key, (kind, names) in SAMPLING.items():
        value = next((values[name] for name in names if values.get(name) is not None), None)
        if is_number(value, kind):
            found[f"general.sampling.{key}"] = number(kind, value)
    return found


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def is_text(value: Any) -> bool:
    """Return True for a text that a file can hold."""
    return isinstance(value, str) and value != "" and not SURROGATE.search(value)


def is_list(name: Any, value: Any) -> bool:
    """Return True for a list of texts under a name that may have several."""
    return name in LISTS and isinstance(value, list) and all(is_text(each) for each in value)


def is_number(value: Any, kind: Kind) -> TypeGuard[float]:
    """Return True if a value is a number that a kind can hold."""
    if isinstance(value, bool) or not isinstance(value, int if kind is Kind.INT32 else (int, float)):
        return False
    return abs(value) < 1 << 31 and isfinite(value)
