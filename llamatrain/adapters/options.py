"""Options that name adapters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from llamatrain.config.options import COUNT, Option, Options, excluded_by

LARGEST = 1e6  # of scales; beyond it, the file is damaged or the number a mistake


@dataclass(frozen=True)
class AdapterOptions(Options, panel="Adapters"):
    """The adapters to use with a model."""

    lora: Annotated[
        tuple[Path, ...],
        Option(
            "Adapter: a GGUF file, a .bin of llama.cpp's old finetune, or a PEFT folder; may be repeated.",
            when=(excluded_by("full"),),
        ),
    ] = ()
    lora_scaled: Annotated[
        tuple[tuple[Path, float], ...],
        Option(
            "Adapter with a factor by which it is scaled; may be repeated.",
            unit="FILE SCALE",
            least=-LARGEST,
            most=LARGEST,
            takes="a file and a number such as 0.5",
            when=(excluded_by("full"),),
            resumable=True,
        ),
    ] = ()

    @property
    def scaled(self) -> list[tuple[Path, float]]:
        """The paths of all adapters with their scales."""
        return [*((path, 1.0) for path in self.lora), *self.lora_scaled]


@dataclass(frozen=True)
class ControlOptions(Options, panel="Control vectors"):
    """The control vectors to use with a model."""

    control_vector: Annotated[tuple[Path, ...], Option("Control vector: a GGUF file; may be repeated.")] = ()
    control_vector_scaled: Annotated[
        tuple[tuple[Path, float], ...],
        Option(
            "Control vector with a factor by which it is scaled; may be repeated.",
            unit="FILE SCALE",
            least=-LARGEST,
            most=LARGEST,
            takes="a file and a number such as 0.5",
        ),
    ] = ()
    control_vector_first: Annotated[
        int,
        Option(
            "The first block that control vectors change; block 0 never is.",
            unit="BLOCK",
            least=1,
            most=COUNT,
        ),
    ] = 1
    control_vector_last: Annotated[
        int | None,
        Option(
            "The last block that control vectors change; default: the last of all.",
            unit="BLOCK",
            least=1,
            most=COUNT,
        ),
    ] = None

    @property
    def scaled(self) -> list[tuple[Path, float]]:
        """The paths of all control vectors with their scales."""
        return [*((path, 1.0) for path in self.control_vector), *self.control_vector_scaled]
