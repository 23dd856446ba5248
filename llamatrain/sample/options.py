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
        bool, Option("Go on where the context is full: the older half of the text goes.")
    ] = False
    keep: Annotated[
        int,
        Option(
            "Tokens that stay when the context is shifted, beside one that begins a text; -1: as many as the prompt has.",
            unit="TOKENS",
            least=-1,
        ),
    ] = 0
    temp: Annotated[
        float, Option("Temperature: the higher, the more surprising; 0 takes the likeliest token.", least=0)
    ] = 0.8
    top_k: Annotated[
        int, Option("Draw among this many of the likeliest tokens; 0: among all.", unit="TOKENS", least=0)
    ] = 40
    top_p: Annotated[
        float,
        Option(
            "Draw among the likeliest tokens that together have this probability; 1: among all.",
            least=0,
            most=1,
        ),
    ] = 0.95
    min_p: Annotated[
        float,
        Option(
            "Leave tokens out that are less likely than this part of the likeliest; 0: none.", least=0, most=1
        ),
    ] = 0.05
    repeat_penalty: Annotated[
        float, Option("Makes tokens that were there lately less likely; 1: does not.", above=0, example="1.1")
    ] = 1.0
    repeat_last_n: Annotated[
        int,
        Option(
            "How many tokens back the penalty looks; 0: it is off, -1: all of them.", unit="TOKENS", least=-1
        ),
    ] = 64
    seed: Annotated[
        int,
        replace(
            SEED, sentence="What the draws follow from; -1: a new one each time.", least=-1, most=LARGEST_SEED
        ),
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
