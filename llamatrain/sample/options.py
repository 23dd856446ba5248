"""The options that say how tokens are drawn, in llama.cpp's words."""

import math
from dataclasses import dataclass
from typing import Annotated

from llamatrain.errors import UsageError

BOUNDS: dict[str, tuple[int, int | None]] = {
    "n": (-1, None),
    "temp": (0, None),
    "top_k": (0, None),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repeat_last_n": (-1, None),
    "seed": (-1, (1 << 64) - 1),
}


@dataclass(frozen=True)
class SamplingOptions:
    n: Annotated[int, "Tokens to generate; -1: until the text ends or the context is full."] = -1
    temp: Annotated[float, "Temperature: the higher, the more surprising; 0 takes the likeliest token."] = 0.8
    top_k: Annotated[int, "Draw among this many of the likeliest tokens; 0: among all."] = 40
    top_p: Annotated[float, "Draw among the likeliest tokens that together have this probability; 1: among all."] = 0.95
    min_p: Annotated[float, "Leave tokens out that are less likely than this part of the likeliest; 0: none."] = 0.05
    repeat_penalty: Annotated[float, "Makes tokens that were there lately less likely; 1: does not."] = 1.0
    repeat_last_n: Annotated[int, "How many tokens back the penalty looks; 0: it is off, -1: all of them."] = 64
    seed: Annotated[int, "What the draws follow from; -1: a new one each time."] = -1
    stop: Annotated[tuple[str, ...], "Stop before this text; may be repeated."] = ()

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if not least <= value < math.inf or (most is not None and value > most):
                takes = f"{least} or more" if most is None else f"{least} to {most}"
                raise UsageError(f"-{'' if name == 'n' else '-'}{name.replace('_', '-')} {value} cannot be; it takes {takes}")
        if not 0 < self.repeat_penalty < math.inf:
            raise UsageError(f"--repeat-penalty {self.repeat_penalty:g} cannot be; it takes more than 0, such as 1.1")
        if "" in self.stop:
            raise UsageError("--stop was given an empty text; it takes what ends the generated text, such as '\\n\\n'")
