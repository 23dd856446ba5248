"""Takes values over from the `gguf` package, which llama.cpp's converter writes files with."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llamatrain.gguf.values import Value, boolean, string, strings, u32

if TYPE_CHECKING:
    from gguf import GGUFWriter


def collect_values(writer: "GGUFWriter", prefix: str) -> dict[str, Value]:
    """Return the keys with a prefix that were added to a writer; they are texts, counts, and lists of texts."""
    found = {key: entry.value for key, entry in writer.kv_data[0].items() if key.startswith(prefix)}
    return {key: _value(value) for key, value in found.items()}


def _value(value: Any) -> Value:
    if isinstance(value, str):
        return string(value)
    if isinstance(value, bool):
        return boolean(value)
    return strings(value) if isinstance(value, Sequence) else u32(value)
