"""Sampling options, with llama.cpp's names."""

from dataclasses import dataclass, replace
from typing import Annotated

from llamatrain.config.common import SEED
from llamatrain.config.options import Option, OptionError, Options

LARGEST_SEED = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingOptions(Options, panel="Sampling"):
    """The options of sampling."""

    n: Annotated[
        int,
        Option(
            "Tokens to generate; -1: until the text ends or the context is full.", unit="TOKENS", least=-1
        ),
    ] = -1
    ctx_shift: Annotated[
        bool, Option("Continue when the context is full: drop the older half of the text.")
    ] = False
    keep: Annotated[
        int,
        Option(
            "First tokens to keep when the context is shifted, besides a begin token; -1: all of the prompt.",
            unit="TOKENS",
            least=-1,
        ),
    ] = 0
    temp: Annotated[float, Option("Temperature; 0 takes the most likely token.", least=0)] = 0.8
    top_k: Annotated[
        int, Option("Sample from this many of the most likely tokens; 0: from all.", unit="TOKENS", least=0)
    ] = 40
    top_p: Annotated[
        float,
        Option(
            "Sample from the most likely tokens that have this probability in total; 1: from all.",
            least=0,
            most=1,
        ),
    ] = 0.95
    min_p: Annotated[
        float,
        Option(
            "Leave out tokens less likely than this fraction of the most likely one; 0: none.",
            least=0,
            most=1,
        ),
    ] = 0.05
    repeat_penalty: Annotated[
        float, Option("Make recent tokens less likely; 1: off.", above=0, example="1.1")
    ] = 1.0
    repeat_last_n: Annotated[
        int,
        Option(
            "Number of recent tokens that the penalty applies to; 0: off, -1: all.", unit="TOKENS", least=-1
        ),
    ] = 64
    seed: Annotated[
        int,
        replace(SEED, sentence="Seed of sampling; -1: random.", least=-1, most=LARGEST_SEED),
    ] = -1
    stop: Annotated[
        tuple[str, ...],
        Option(
            "Stop before this text; may be repeated.",
            accepts=bool,
            takes=r"what ends the generated text, such as '\n\n'",
        ),
    ] = ()

    def validate(self) -> None:
        """Raise if options contradict each other."""
        if self.keep and not self.ctx_shift:
            raise OptionError(
                lambda spelt: f"{spelt('keep')} has no effect without {spelt('ctx_shift')}; leave it out",
                code="unused-option",
            )
