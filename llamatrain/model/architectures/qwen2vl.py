"""Qwen 2 and 2.5 VL (Wang et al. 2024): the text model of a vision model, a Qwen 2.

Its rotation has sections for the axes of pictures. The position of text is the same on all axes.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llamatrain.errors import FileError
from llamatrain.gguf.reader import Gguf
from llamatrain.model.architecture import TEXT_PREFIX, NumberList
from llamatrain.model.architectures import qwen2
from llamatrain.model.layers import Weight


class Sections(NumberList):
    """The pairs of a head that rotate by each axis. Text has no position on the fourth."""

    def read(self, gguf: Gguf, key: str, known: Mapping[str, Any]) -> tuple[float, ...]:
        """Read the sections."""
        sections = super().read(gguf, key, known)
        if sections[3]:
            raise FileError(
                f"{gguf.path}: {key}: a fourth section is not supported (got {sections[3]})",
                code="unsupported-model",
            )
        return sections


def new_sections(layers: int, head_size: int) -> tuple[int, ...]:
    """Return sections of about one size, which together are all pairs of a head."""
    pairs = head_size // 2
    return (pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0


SECTIONS = {"rope.dimension_sections": Sections(field="sections", kind=int, initial=new_sections)}


def in_vision_model(weights: dict[str, Weight]) -> dict[str, Weight]:
    """Return weights with the names that modules have in a vision model."""
    return {
        name: replace(kind, module=kind.module.replace("model.", f"model.{TEXT_PREFIX}", 1))
        for name, kind in weights.items()
    }


ARCHITECTURE = replace(
    qwen2.ARCHITECTURE,
    name="qwen2vl",
    weights=in_vision_model(qwen2.WEIGHTS),
    lists=SECTIONS,
    unsupported_names={"cogvlm": "a vision-language model", "qwen-vl": "a vision-language model"},
)
