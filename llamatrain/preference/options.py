"""The options of preference training, and which of them exclude each other."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from llamatrain.config.options import Condition, Option, OptionError, Options, needs

if TYPE_CHECKING:
    from llamatrain.data.preference_records import Compare
    from llamatrain.preference.loss import Objective

LARGEST = 1e6  # what these numbers may be
KTO = Condition(lambda values: values["objective"] == "kto", "with --objective {objective}")
SIMPO = Condition(lambda values: values["objective"] == "simpo", "with --objective {objective}")


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
    def data_kind(self) -> "Compare | None":
        """The kind of data that the objective needs, or None without one."""
        return None if self.objective is None else "answers" if self.objective == "kto" else "pairs"

    @property
    def needs_whole_batch(self) -> bool:
        """True if the answers of a batch are compared with each other, so that a batch cannot be split."""
        return self.data_kind == "answers"


@dataclass(frozen=True)
class PreferenceOptions(PreferenceDataOptions, panel="Preferences"):
    """The objective and its parameters."""

    beta: Annotated[
        float | None,
        Option(
            "How much an objective makes of them (ORPO's lambda); else 0.1, SimPO's 2.",
            above=0,
            below=LARGEST,
            example="0.1",
            when=(needs("objective"),),
        ),
    ] = None
    gamma: Annotated[
        float,
        Option(
            "The margin of rewards that SimPO asks for.",
            least=0,
            most=LARGEST,
            when=(needs("objective"), SIMPO),
        ),
    ] = 1.0
    desirable_weight: Annotated[
        float,
        Option(
            "What an answer that is good counts for in KTO.",
            unit="WEIGHT",
            least=0,
            most=LARGEST,
            example="1.33",
            when=(needs("objective"), KTO),
        ),
    ] = 1.0
    undesirable_weight: Annotated[
        float,
        Option(
            "What an answer that is not good counts for in KTO.",
            unit="WEIGHT",
            least=0,
            most=LARGEST,
            example="1",
            when=(needs("objective"), KTO),
        ),
    ] = 1.0

    @property
    def with_defaults(self) -> "PreferenceOptions":
        """The same options with beta set."""
        return replace(self, beta=self.built.beta) if self.built else self

    @property
    def built(self) -> "Objective | None":
        """The objective, or None."""
        from llamatrain.preference.loss import DEFAULT_BETA, Objective

        if self.objective is None:
            return None
        return Objective(
            kind=self.objective,
            beta=DEFAULT_BETA[self.objective] if self.beta is None else self.beta,
            gamma=self.gamma,
            desirable=self.desirable_weight,
            undesirable=self.undesirable_weight,
        )


def check_compatible(
    options: PreferenceOptions, optimizer: str, full: bool, batch: int, pack: bool | None
) -> None:
    """Raise if the objective cannot be combined with the other options."""
    kind = options.objective
    if kind is None:
        return
    if optimizer == "lbfgs":
        raise OptionError(
            lambda spelt: (
                f"{spelt('objective')} cannot be used with {spelt('optimizer')} lbfgs; choose adamw or sgd"
            ),
            code="objective-needs-rate",
        )
    if full and kind in ("dpo", "kto"):
        reason = "needs the original model, which full training does not keep; choose orpo or simpo"
        raise OptionError(
            lambda spelt: f"{spelt('full')} cannot be used with {spelt('objective')} {kind}: {kind} {reason}",
            code="objective-needs-reference",
        )
    if kind == "kto" and pack:
        raise OptionError(
            lambda spelt: (
                f"{spelt('pack')} cannot be used with {spelt('objective')} kto: each answer has its own row; "
                "leave it out"
            ),
            code="kto-pack",
        )
    check_batch(options, batch)


def check_batch(options: PreferenceOptions, batch: int) -> None:
    """Raise if the batch is too small for the objective."""
    if options.objective == "kto" and batch < 2:
        raise OptionError(
            lambda spelt: (
                f"{spelt('batch')} must be at least 2 with {spelt('objective')} kto, "
                f"which compares each answer with others of its batch (got {batch})"
            ),
            code="kto-batch",
        )


def check_evaluation(options: PreferenceOptions, batch: int, adapted: bool) -> None:
    """Raise if the objective cannot be evaluated with these options."""
    check_batch(options, batch)
    if options.objective in ("dpo", "kto") and not adapted:
        raise OptionError(
            lambda spelt: (
                f"{spelt('objective')} {options.objective} compares a model that has an adapter with the "
                f"model alone; name an adapter with {spelt('lora')}"
            ),
            code="objective-needs-adapter",
        )
