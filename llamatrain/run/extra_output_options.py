"""Options for the files that a run writes outside its folder."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from llamatrain.config.options import COUNT, Condition, Option, OptionError, Options, excluded_by

NAMES = "; ITERATION in its name becomes the step, and LATEST in the name of a second copy."
FINETUNE = Condition(lambda values: values["command"] == "finetune", "for a new model")
WHOLE_MODEL = Condition(lambda values: values["command"] != "finetune" or values["full"], "for an adapter")
FILES = ("checkpoint_out", "model_out", "lora_out")


@dataclass(frozen=True)
class ExtraOutputOptions(Options, panel="The run", resumable=True):
    """Options for extra output files. They may change when a run is resumed."""

    checkpoint_out: Annotated[str, Option(f"Also write each checkpoint to this file{NAMES}", unit="FILE")] = (
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
        str,
        Option(
            "Word in file names that becomes the step.",
            unit="WORD",
            accepts=bool,
            takes="a word",
            hidden=True,
        ),
    ] = "ITERATION"
    fn_latest: Annotated[
        str,
        Option(
            "Word in place of the step in the name of the newest file.",
            unit="WORD",
            accepts=bool,
            takes="a word",
            hidden=True,
        ),
    ] = "LATEST"
    keep_results: Annotated[
        int,
        Option(
            "Keep this many models or adapters of earlier saves, named by step.",
            unit="FILES",
            least=0,
            most=COUNT,
        ),
    ] = 0

    def validate(self) -> None:
        """Refuse words that would lead to another folder."""
        for name, word in (("pattern_fn_it", self.pattern_fn_it), ("fn_latest", self.fn_latest)):
            if {*word} & {"/", os.sep, "\0"}:
                problem = f"must be part of a file name (got {word!r})"
                raise OptionError(lambda spelt, name=name, problem=problem: f"{spelt(name)} {problem}")  # type: ignore[misc]

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
