"""Reads config.json of a transformers model: numbers are checked when they are asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamatrain.errors import FileError
from llamatrain.gguf.parser import quote
from llamatrain.gguf.safetensors import read_json

MAX_CONFIG = 1 << 24  # bytes of JSON
MAX_COUNT, MAX_FLOAT = (1 << 32) - 1, 3.4e38  # what a GGUF file holds
TEXT_PARTS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class Config:
    """The values of a configuration. Those of the text part of a model with pictures stand in front."""

    path: Path
    values: Mapping[str, Any]
    classes: tuple[str, ...] = ()  # of transformers, the most specific one first
    rope: Mapping[str, Any] = field(default_factory=dict)  # of the rotation in blocks that see all tokens
    window_rope: Mapping[str, Any] = field(default_factory=dict)  # in blocks with a window

    def has(self, name: str) -> bool:
        """Return True if there is a value that is not null."""
        return self.values.get(name) is not None

    def error(self, name: str, expected: str, value: Any) -> FileError:
        """Return the error about a value."""
        return FileError(
            f"{self.path}: {name} must be {expected} (got {quote(repr(value))})", code="invalid-config"
        )

    def find(self, *names: str) -> str | None:
        """Return the first of some names that has a value."""
        return next((name for name in names if self.has(name)), None)

    def count(self, *names: str, default: int | None = None) -> int:
        """Return a whole number by the first of its names."""
        name = self.find(*names)
        if name is None:
            if default is None:
                raise FileError(f"{self.path}: {names[0]} is missing", code="invalid-config")
            return default
        value = self.values[name]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not 0 <= value <= MAX_COUNT:
            raise self.error(name, f"a whole number from 0 to {MAX_COUNT}", value)
        return value

    def counts(self, *names: str) -> int | list[int]:
        """Return a whole number, or a list with one for each block."""
        name = self.find(*names)
        if name is None or not isinstance(self.values[name], list):
            return self.count(*names)
        return [Config(self.path, {name: value}).count(name) for value in self.values[name]]

    def number(self, *names: str, default: float | None = None) -> float:
        """Return a number by the first of its names."""
        name = self.find(*names)
        if name is None:
            if default is None:
                raise FileError(f"{self.path}: {names[0]} is missing", code="invalid-config")
            return default
        return self.check_number(name, self.values[name])

    def check_number(self, name: str, value: Any) -> float:
        """Return a number, or raise if it is none that a file can hold."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and abs(value) <= MAX_FLOAT):  # False for NaN
            raise self.error(name, "a finite number", value)
        return float(value)

    def rope_number(self, name: str, default: float | None = None) -> float:
        """Return a number of the rotation."""
        value = self.rope.get(name, default)
        if value is None:
            raise FileError(f"{self.path}: {name} of rope_parameters is missing", code="invalid-config")
        return self.check_number(name, value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a value that is true or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false", value)
        return value

    def numbers(self, name: str, source: Mapping[str, Any] | None = None) -> list[float]:
        """Return a list of numbers."""
        value = (self.values if source is None else source).get(name)
        if not isinstance(value, list) or len(value) > MAX_CONFIG:
            raise self.error(name, "a list of numbers", value)
        return [self.check_number(name, each) for each in value]

    def layer_types(self, layers: int) -> list[str]:
        """Return the kind of each block."""
        value = self.values.get("layer_types")
        if not (isinstance(value, list) and len(value) >= layers and all(isinstance(x, str) for x in value)):
            raise self.error("layer_types", f"a list with the kinds of {layers} blocks", value)
        return value[:layers]

    @property
    def head_size(self) -> int:
        """The size of a head."""
        return self.count("head_dim", default=self.embd // max(1, self.heads))

    @property
    def embd(self) -> int:
        """The width of the model."""
        return self.count("hidden_size", "n_embd", "dim")

    @property
    def heads(self) -> int:
        """The number of heads of queries."""
        return self.count("num_attention_heads", "n_head", "n_heads")

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys."""
        return self.count("num_key_value_heads", "n_kv_heads", default=self.heads)

    @property
    def layers(self) -> int:
        """The number of blocks."""
        return self.count("num_hidden_layers", "n_layers", "n_layer", "num_layers")

    @property
    def share_rotated(self) -> float:
        """The share of a head that rotates."""
        return self.rope_number("partial_rotary_factor", 1.0)


def read_config(path: Path) -> Config:
    """Read a configuration."""
    if path.stat().st_size > MAX_CONFIG:
        raise FileError(
            f"{path}: larger than {MAX_CONFIG} bytes; it is no configuration", code="invalid-config"
        )
    whole = read_json(path, path.read_bytes())
    part: dict[str, Any] = next((whole[name] for name in TEXT_PARTS if isinstance(whole.get(name), dict)), {})
    values = {**whole, **{name: value for name, value in part.items() if value is not None}}
    rope, window_rope = read_rope(path, values)
    return Config(path, values, (*class_names(part), *class_names(whole)), rope, window_rope)


def class_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names of classes of a configuration."""
    names = values.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def read_rope(path: Path, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numbers of the rotation, and those in blocks with a window; older files have them elsewhere."""
    found = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise FileError(f"{path}: rope_parameters must be an object", code="invalid-config")
    whole, window = found.get("full_attention", found), found.get("sliding_attention", {})
    if not (isinstance(whole, dict) and isinstance(window, dict)):
        raise FileError(f"{path}: rope_parameters must have objects", code="invalid-config")
    rope = {"rope_type": whole["type"]} if "type" in whole else {}
    places = {
        "rope_theta": ("global_rope_theta", "rope_theta", "rotary_emb_base"),
        "partial_rotary_factor": ("partial_rotary_factor", "rope_pct", "rotary_pct"),
        "original_max_position_embeddings": ("original_max_position_embeddings",),
    }
    for key, names in places.items():
        value = next((values[name] for name in names if values.get(name) is not None), None)
        if value is not None:
            rope[key] = value
    window_rope = dict(window)
    for name in ("local_rope_theta", "rope_local_base_freq", "swa_rope_theta"):
        if values.get(name) is not None:
            window_rope.setdefault("rope_theta", values[name])
    return {**rope, **whole}, window_rope
