"""Compares two model files, before their tensors are combined."""

from llamatrain.errors import FileError
from llamatrain.gguf.parser import quote
from llamatrain.gguf.reader import Gguf

TOKENS, MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"


def check_alike(first: Gguf, other: Gguf) -> None:
    """Raise unless two models have the same architecture, tensors, shapes and vocabulary."""
    one, two = (file.get_value("general.architecture", str) for file in (first, other))
    if one != two:
        raise FileError(
            f"{other.path}: its architecture is {quote(two)}, but that of {first.path} is {quote(one)}; "
            "both must have the same",
            code="models-differ",
        )
    for name, tensor in first.tensors.items():
        found = other.tensors.get(name)
        if found is None:
            raise FileError(
                f"{other.path}: it has no tensor {quote(name)}, but {first.path} has one",
                code="models-differ",
            )
        if found.shape != tensor.shape:
            raise FileError(
                f"{other.path}: the shape of {quote(name)} is {list(found.shape)}, but in {first.path} it is "
                f"{list(tensor.shape)}; both must have the same shapes",
                code="models-differ",
            )
    if more := [name for name in other.tensors if name not in first.tensors]:
        raise FileError(
            f"{other.path}: it has a tensor {quote(more[0])}, but {first.path} has none", code="models-differ"
        )
    check_vocabulary(first, other)


def check_vocabulary(first: Gguf, other: Gguf) -> None:
    """Raise unless two models have the same tokens and merges."""
    for key in (TOKENS, MERGES):
        one, two = (file.metadata.raw_values.get(key) for file in (first, other))
        if (one is None and two is None) or (one and two and bytes(one.raw) == bytes(two.raw)):
            continue
        raise FileError(
            f"{other.path}: {key} differs from that of {first.path}{describe_value(first, other, key)}; both must have "
            "the same vocabulary",
            code="models-differ",
        )


def describe_value(first: Gguf, other: Gguf, key: str) -> str:
    """Return the first value of a list that differs between two files, in parentheses, or an empty text."""
    one, two = (file.metadata.get(key) for file in (first, other))
    if not (isinstance(one, list) and isinstance(two, list)):
        return ""
    if len(one) != len(two):
        return f" ({len(two)} values, and there {len(one)})"
    number = next((i for i, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1]), None)
    if number is None:  # they differ in bytes that are no text
        return ""
    return f" (value {number} is {quote(two[number])}, and there {quote(one[number])})"


def differing_keys(first: Gguf, other: Gguf) -> list[str]:
    """Return the keys of the architecture whose values differ between two models."""
    prefix = f"{first.get_value('general.architecture', str)}."
    keys = [file.metadata.raw_values for file in (first, other)]
    return sorted(
        key
        for key in keys[0].keys() | keys[1].keys()
        if key.startswith(prefix)
        and not (key in keys[0] and key in keys[1] and bytes(keys[0][key].raw) == bytes(keys[1][key].raw))
    )
