"""Options for the files that a run writes outside its folder."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from llamatrain.config.options import COUNT, Condition, Option, OptionError, Options, excluded_by

NAMES = "; in its name ITERATION becomes the step, and LATEST in another one."
FINETUNE = Condition(lambda values: values["command"] == "finetune", "for a new model")
WHOLE_MODEL = Condition(lambda values: values["command"] != "finetune" or values["full"], "for an adapter")
FILES = ("checkpoint_out", "model_out", "lora_out")


@dataclass(frozen=True)
class ExtraOutputOptions(Options, panel="The run", resumable=True):
    """Options for extra output files. They may change when a run is resumed."""

    checkpoint_out: Annotated[str, Option(f"Write each checkpoint to this file, too{NAMES}", unit="FILE")] = (
        ""
    )
    model_out: Annotated[
        str,
        Option(
            "Also write the model of each save to this file, named likewise.",
            unit="FILE",
            when=(WHOLE_MODEL,),
        ),
    ] = ""
    lora_out: Annotated[
        str,
        Option(
            "Also write the adapter of each save to this file, named likewise.",
            unit="FILE",
            when=(FINETUNE, excluded_by("full")),
        ),
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

    def validate(self) -> None:
        """Refuse words that would lead to another folder."""
        for name, word in (("pattern_fn_it", self.pattern_fn_it), ("fn_latest", self.fn_latest)):
            if {*word} & {"/", os.sep, "\0"}:
                problem = f"{word!r} cannot be; it takes a part of a file's name"
                raise OptionError(lambda spelt, name=name, told=problem: f"{spelt(name)} {told}")  # type: ignore[misc]

    @property
    def files_by_option(self) -> dict[str, str]:
        """The extra files to write, by option name."""
        named = {name: getattr(self, name) for name in FILES}
        return {name: file for name, file in named.items() if file}

    def make_absolute(self, absolute: Callable[[str], str]) -> "ExtraOutputOptions":
        """Return the same options with absolute paths."""
        checkpoint, model, lora = (
            file and absolute(file) for file in (self.checkpoint_out, self.model_out, self.lora_out)
        )
        return replace(self, checkpoint_out=checkpoint, model_out=model, lora_out=lora)

    def path_at_step(self, name: str, step: int | None) -> Path:
        """Return the path of a step's file, or of the newest one."""
        word = self.fn_latest if step is None else str(step)
        path = Path(getattr(self, name))
        return path.with_name(path.name.replace(self.pattern_fn_it, word))

    def name_pattern(self, name: str) -> re.Pattern[str]:
        """Return a pattern that matches the names of all files of an option."""
        parts = map(re.escape, Path(getattr(self, name)).name.split(self.pattern_fn_it))
        return re.compile(rf"(?:{re.escape(self.fn_latest)}|[0-9]+)".join(parts))
