"""The options of preference training, and which of them exclude each other."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from llamatrain.config.options import Option, OptionError, Options

if TYPE_CHECKING:
    from llamatrain.data.preference_records import Compare
    from llamatrain.preference.loss import Objective

MOST = 1e6  # what these numbers may be
OF_ROWS = ("train_on", "fill_with_next_samples", "separate_with_eos", "separate_with_bos", "parse_special")
OF_TEXT = ("sample_start", "include_sample_start", "escape", "overlapping_samples", "sample_random_offsets")


@dataclass(frozen=True)
class PreferenceDataOptions(Options, panel="Preferences"):
    """The option that decides how preference data is read."""

    objective: Annotated[
        Literal["orpo", "dpo", "simpo", "kto"] | None,
        Option(
            "Learn from answers that are compared: prompt, chosen and rejected; kto: or prompt, completion and label."
        ),
    ] = None

    @property
    def compare(self) -> "Compare | None":
        """The kind of data that the objective needs, or None without one."""
        return None if self.objective is None else "answers" if self.objective == "kto" else "pairs"


@dataclass(frozen=True)
class PreferenceOptions(PreferenceDataOptions, panel="Preferences"):
    """The objective and its parameters."""

    beta: Annotated[
        float | None,
        Option(
            "How much an objective makes of them (ORPO's lambda); else 0.1, SimPO's 2.",
            above=0,
            below=MOST,
            example="0.1",
        ),
    ] = None
    gamma: Annotated[float, Option("The margin of rewards that SimPO asks for.", least=0, most=MOST)] = 1.0
    desirable_weight: Annotated[
        float,
        Option(
            "What an answer that is good counts for in KTO.",
            unit="WEIGHT",
            least=0,
            most=MOST,
            example="1.33",
        ),
    ] = 1.0
    undesirable_weight: Annotated[
        float,
        Option(
            "What an answer that is not good counts for in KTO.",
            unit="WEIGHT",
            least=0,
            most=MOST,
            example="1",
        ),
    ] = 1.0

    @property
    def decided(self) -> "PreferenceOptions":
        """The same options with beta set."""
        return replace(self, beta=self.made.beta) if self.made else self

    @property
    def made(self) -> "Objective | None":
        """The objective, or None."""
        from llamatrain.preference.loss import BETA, Objective

        if self.objective is None:
            return None
        return Objective(
            kind=self.objective,
            beta=BETA[self.objective] if self.beta is None else self.beta,
            gamma=self.gamma,
            desirable=self.desirable_weight,
            undesirable=self.undesirable_weight,
        )


def idle(options: PreferenceOptions) -> dict[str, str]:
    """Return the options that have no effect, and why."""
    kind = options.objective
    if kind is None:
        return dict.fromkeys(
            ("beta", "gamma", "desirable_weight", "undesirable_weight"), "without --objective"
        )
    found = dict.fromkeys((*OF_ROWS, *OF_TEXT), f"to --objective {kind}")
    if kind != "simpo":
        found["gamma"] = f"to --objective {kind}"
    if kind == "kto":
        return found
    return found | dict.fromkeys(("desirable_weight", "undesirable_weight"), f"to --objective {kind}")


def check_fits(options: PreferenceOptions, optimizer: str, full: bool, batch: int, pack: bool | None) -> None:
    """Raise if the objective cannot be combined with the other options."""
    kind = options.objective
    if kind is None:
        return
    if optimizer == "lbfgs":
        raise OptionError(
            lambda spelt: f"{spelt('objective')} goes by rates; {spelt('optimizer')} adamw or sgd will do"
        )
    if full and kind in ("dpo", "kto"):
        told = f"{kind} compares with the model as it was, which is not kept where all of it is trained; orpo and simpo do not"
        raise OptionError(lambda spelt: f"{spelt('full')} and {spelt('objective')} {told}")
    if kind == "kto" and pack:
        raise OptionError(
            lambda spelt: (
                f"{spelt('pack')} and {spelt('objective')} kto exclude each other: an answer has its own row"
            )
        )
    check_batch(options, batch)


def check_batch(options: PreferenceOptions, batch: int) -> None:
    """Raise if the batch is too small for the objective."""
    if options.objective == "kto" and batch < 2:
        told = "kto compares each answer with another in its batch"
        raise OptionError(
            lambda spelt: f"{spelt('batch')} {batch} is too few: {spelt('objective')} {told}; take 2 or more"
        )


def check_evaluated(options: PreferenceOptions, batch: int, adapted: bool) -> None:
    """Raise if the objective cannot be evaluated with these options."""
    check_batch(options, batch)
    if options.objective in ("dpo", "kto") and not adapted:
        told = f"{options.objective} compares a model with its adapter to the model without; name one with"
        raise OptionError(lambda spelt: f"{spelt('objective')} {told} {spelt('lora')}")
