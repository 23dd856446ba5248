"""The options of rewards."""

import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from llamatrain.config.not_found import missing_file
from llamatrain.config.options import Option, OptionError, Options, needs
from llamatrain.config.units import Duration, Size

WEIGHT = r"[+-]?(?:[0-9]{1,15}\.?[0-9]{0,15}|\.[0-9]{1,15})(?:e[+-]?[0-9]{1,2})?"
WEIGHTS = re.compile(rf"{WEIGHT}(?:,{WEIGHT})*")
LARGEST = 1e9
TIMEOUT, MEMORY = Duration(60), Size(4 * 10**9)


def are_weights(text: Any) -> bool:
    """Return True if a text lists weights."""
    return not text or WEIGHTS.fullmatch(text) is not None


def python_file(source: str) -> Path | None:
    """Return the Python file that a reward names, or None if it names a command."""
    if not source.endswith(".py") or (len(split_words(source)) > 1 and not Path(source).is_file()):
        return None
    return Path(source)


def split_words(text: str) -> list[str]:
    """Split a command into words; text with an open quote is one word."""
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


@dataclass(frozen=True)
class RewardOptions(Options, panel="Rewards"):
    """The options that decide how answers are scored."""

    reward: Annotated[
        tuple[str, ...],
        Option(
            "Scores answers: a Python file with a function reward(prompt, answer, row), or a command that reads "
            "lines of JSON and writes a number for each; may be repeated.",
            unit="FILE.py|COMMAND",
            accepts=lambda text: bool(text.strip()) and "\0" not in text,
            takes="a Python file or a command",
        ),
    ] = ()
    reward_weights: Annotated[
        str,
        Option(
            "Weights of several rewards in their sum; default: 1 each.",
            unit="WEIGHT,...",
            accepts=are_weights,
            takes="a weight for each reward, such as 1,0.5",
            when=(needs("reward"),),
        ),
    ] = ""
    reward_timeout: Annotated[
        Duration,
        Option(
            "Stop a reward that gives no further number for this long.",
            when=(needs("reward"),),
            resumable=True,
        ),
    ] = TIMEOUT
    reward_memory: Annotated[
        Size,
        Option("Memory that each process of a reward may take.", when=(needs("reward"),), resumable=True),
    ] = MEMORY
    reward_failed: Annotated[
        float | None,
        Option(
            "Reward of answers whose reward fails, with a warning; by default a failure stops the run.",
            least=-LARGEST,
            most=LARGEST,
            example="0",
            when=(needs("reward"),),
        ),
    ] = None

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each reward."""
        weights = tuple(map(float, filter(None, self.reward_weights.split(","))))
        return weights or (1.0,) * len(self.reward)

    def make_absolute(self, absolute: Callable[[str], str]) -> "RewardOptions":
        """Return the same options with absolute paths of Python files."""
        reward = tuple(absolute(source) if python_file(source) else source for source in self.reward)
        return replace(self, reward=reward)

    def validate(self) -> None:
        """Raise if weights or files do not fit."""
        if self.reward and len(self.weights) != len(self.reward):
            raise OptionError(
                lambda spelt: (
                    f"{spelt('reward_weights')} needs a weight for each {spelt('reward')}: {len(self.reward)} "
                    f"(got {len(self.weights)})"
                )
            )
        if any(not math.isfinite(weight) or abs(weight) > LARGEST for weight in self.weights):
            raise OptionError(
                lambda spelt: (
                    f"{spelt('reward_weights')} must be at most {LARGEST:g} (got {self.reward_weights})"
                )
            )
        for source in self.reward:
            if (file := python_file(source)) and not file.is_file():
                raise missing_file(file)
