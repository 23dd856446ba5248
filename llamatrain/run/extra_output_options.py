"""The options that say what a run writes beside its folder, and what of it stays."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from llamatrain.config.options import COUNT, Option, OptionError, Options

NAMES = "; in its name ITERATION becomes the step, and LATEST in another one."
FILES = ("checkpoint_out", "model_out", "lora_out")


@dataclass(frozen=True)
class ExtraOutputOptions(Options, panel="The run"):
    """They may change when a run goes on, and stay with it."""

    checkpoint_out: Annotated[str, Option(f"Write each checkpoint to this file, too{NAMES}", unit="FILE")] = (
        ""
    )
    model_out: Annotated[
        str, Option("Write the model of each save to this file, too, named likewise.", unit="FILE")
    ] = ""
    lora_out: Annotated[
        str, Option("Write the adapter of each save to this file, too, named likewise.", unit="FILE")
    ] = ""
    pattern_fn_it: Annotated[
        str, Option("What becomes the step.", unit="WORD", accepts=bool, takes="a word", hidden=True)
    ] = "ITERATION"
    fn_latest: Annotated[
        str,
        Option(
            "What stands for the step in the name of the newest.",
            unit="WORD",
            accepts=bool,
            takes="a word",
            hidden=True,
        ),
    ] = "LATEST"
    keep_results: Annotated[
        int,
        Option(
            "Keep so many of the models or adapters of earlier saves, each under its step.",
            unit="FILES",
            least=0,
            most=COUNT,
        ),
    ] = 0

    def agree(self) -> None:
        """Refuse words that would lead to another folder."""
        for name, word in (("pattern_fn_it", self.pattern_fn_it), ("fn_latest", self.fn_latest)):
            if {*word} & {"/", os.sep, "\0"}:
                told = f"{word!r} cannot be; it takes a part of a file's name"
                raise OptionError(lambda spelt, name=name, told=told: f"{spelt(name)} {told}")  # type: ignore[misc]

    @property
    def said(self) -> dict[str, str]:
        """The files that are to be written, by their options."""
        named = {name: getattr(self, name) for name in FILES}
        return {name: file for name, file in named.items() if file}

    def settled(self, absolute: Callable[[str], str]) -> "ExtraOutputOptions":
        checkpoint, model, lora = (
            file and absolute(file) for file in (self.checkpoint_out, self.model_out, self.lora_out)
        )
        return replace(self, checkpoint_out=checkpoint, model_out=model, lora_out=lora)

    def file(self, name: str, step: int | None) -> Path:
        """That of a step; without one, that of the newest."""
        word = self.fn_latest if step is None else str(step)
        path = Path(getattr(self, name))
        return path.with_name(path.name.replace(self.pattern_fn_it, word))

    def files(self, name: str) -> re.Pattern[str]:
        """The names that its files may have."""
        parts = map(re.escape, Path(getattr(self, name)).name.split(self.pattern_fn_it))
        return re.compile(rf"(?:{re.escape(self.fn_latest)}|[0-9]+)".join(parts))


def idle(command: str, full: bool) -> dict[str, str]:
    """Of an adapter there is no model, of a model no adapter."""
    if command == "finetune" and not full:
        return {"model_out": "to an adapter"}
    return {"lora_out": "to --full" if full else "to a new model"}
