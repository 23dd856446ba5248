"""The options that name adapters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from llamatrain.errors import UsageError

LARGEST = 1e6  # of scales: what lies beyond is a damaged file or a slip of the hand


@dataclass(frozen=True)
class LoraOptions:
    lora: Annotated[
        tuple[Path, ...], "An adapter: a GGUF file, a .bin of llama.cpp's old finetune, or a folder of PEFT's; may be repeated."
    ] = ()
    lora_scaled: Annotated[tuple[tuple[Path, float], ...], "An adapter, and how much of it is added; may be repeated."] = ()

    def __post_init__(self) -> None:
        for path, scale in self.lora_scaled:
            if not abs(scale) <= LARGEST:  # nor is NaN
                raise UsageError(f"--lora-scaled {path} {scale:g} cannot be; it takes a number such as 0.5")

    @property
    def scaled(self) -> list[tuple[Path, float]]:
        """All of them, with their scales."""
        return [*((path, 1.0) for path in self.lora), *self.lora_scaled]
