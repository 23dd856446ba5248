"""The options of preference training, and which of them exclude each other."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from llamatrain.config.options import Condition, Option, OptionError, Options, Values, needs
from llamatrain.data.options import CONTRASTIVE, GRPO, RERANK
from llamatrain.preference.registry import OBJECTIVES, get_objective

if TYPE_CHECKING:
    from llamatrain.data.preference_records import ComparedKind
    from llamatrain.preference.objective import Objective

    ObjectiveName = str
else:
    ObjectiveName = Literal[(CONTRASTIVE, RERANK, GRPO, *OBJECTIVES)]


def used_by_objective(name: str) -> Condition:
    """Return the condition that the objective has this option."""

    def is_used(values: Values) -> bool:
        """Return True if the objective is one of preferences that has the option."""
        objective = values["objective"]
        if objective == GRPO:
            return name == "beta"
        return objective in OBJECTIVES and name in get_objective(objective).option_names()

    return Condition(is_used, "with --objective {objective}")


LARGEST = 1e6  # of the parameters below


@dataclass(frozen=True)
class PreferenceDataOptions(Options, panel="Preferences"):
    """The option that decides how preference data is read."""

    objective: Annotated[
        ObjectiveName | None,
        Option(
            "Preference training on rows of prompt, chosen and rejected; kto also takes prompt, "
            "completion and label. contrastive: train embeddings on rows of query, positive and negatives; "
            "rerank: train to tell on such rows whether a text answers a query; grpo: learn from rewards of "
            "answers that the model generates to the prompts."
        ),
    ] = None

    @property
    def compared(self) -> str | None:
        """The objective, if it compares answers."""
        return None if self.objective in (CONTRASTIVE, RERANK, GRPO) else self.objective

    @property
    def is_contrastive(self) -> bool:
        """True if embeddings are trained."""
        return self.objective == CONTRASTIVE

    @property
    def is_grpo(self) -> bool:
        """True if answers are generated and rewarded."""
        return self.objective == GRPO

    @property
    def data_kind(self) -> "ComparedKind | None":
        """The kind of data that the objective needs, or None without one."""
        if self.is_contrastive:
            return "texts"
        if self.objective == RERANK:
            return "judged texts"
        return None if self.compared is None else get_objective(self.compared).data

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
            "Strength of the preference term (lambda of ORPO), or of the divergence from the base in GRPO; "
            "default: 0.1, for simpo 2, for grpo 0.",
            above=0,
            below=LARGEST,
            example="0.1",
            when=(needs("objective"), used_by_objective("beta")),
        ),
    ] = None
    gamma: Annotated[
        float,
        Option(
            "Target reward margin of SimPO.",
            least=0,
            most=LARGEST,
            when=(needs("objective"), used_by_objective("gamma")),
        ),
    ] = 1.0
    desirable_weight: Annotated[
        float,
        Option(
            "Weight of desirable answers in KTO.",
            unit="WEIGHT",
            least=0,
            most=LARGEST,
            example="1.33",
            when=(needs("objective"), used_by_objective("desirable_weight")),
        ),
    ] = 1.0
    undesirable_weight: Annotated[
        float,
        Option(
            "Weight of undesirable answers in KTO.",
            unit="WEIGHT",
            least=0,
            most=LARGEST,
            example="1",
            when=(needs("objective"), used_by_objective("undesirable_weight")),
        ),
    ] = 1.0

    @property
    def with_defaults(self) -> "PreferenceOptions":
        """The same options with beta set."""
        return replace(self, beta=self.built.beta) if self.built else self

    @property
    def built(self) -> "Objective | None":
        """The objective, or None."""
        if self.compared is None:
            return None
        return get_objective(self.compared).from_options(vars(self))


def check_compatible(
    options: PreferenceOptions, optimizer: str, full: bool, batch: int, pack: bool | None
) -> None:
    """Raise if the objective cannot be combined with the other options."""
    name = options.objective
    if name is None:
        return
    if optimizer == "lbfgs":
        raise OptionError(
            lambda spelt: (
                f"{spelt('objective')} cannot be used with {spelt('optimizer')} lbfgs; choose adamw or sgd"
            ),
            code="objective-needs-rate",
        )
    if pack and (options.is_grpo or options.data_kind in ("answers", "texts")):
        unit = "each group of texts has" if options.is_contrastive else "each answer has"
        raise OptionError(
            lambda spelt: (
                f"{spelt('pack')} cannot be used with {spelt('objective')} {name}: {unit} "
                "a row of its own; leave it out"
            ),
            code="objective-packs-nothing",
        )
    if options.compared is None:
        return
    objective = get_objective(options.compared)
    if full and objective.uses_reference:
        others = " or ".join(other for other in OBJECTIVES if not get_objective(other).uses_reference)
        raise OptionError(
            lambda spelt: (
                f"{spelt('full')} cannot be used with {spelt('objective')} {name}: {name} needs the original "
                f"model, which full training does not keep; choose {others}"
            ),
            code="objective-needs-reference",
        )
    check_batch(options, batch)


def check_batch(options: PreferenceOptions, batch: int) -> None:
    """Raise if the batch is too small for the objective."""
    if options.compared is None:
        return
    least = get_objective(options.compared).min_batch
    if batch < least:
        raise OptionError(
            lambda spelt: (
                f"{spelt('batch')} must be at least {least} with {spelt('objective')} {options.objective}, "
                f"which compares each answer with others of its batch (got {batch})"
            ),
            code="batch-too-small",
        )


def check_has_answers(options: PreferenceDataOptions) -> None:
    """Raise if the objective generates answers, which its data lacks."""
    if options.is_grpo:
        raise OptionError(
            lambda spelt: (
                f"{spelt('objective')} {GRPO} is for finetune only, which generates the answers; leave it out"
            ),
            code="unused-option",
        )


def check_evaluation(options: PreferenceOptions, batch: int, adapted: bool) -> None:
    """Raise if the objective cannot be evaluated with these options."""
    check_has_answers(options)
    check_batch(options, batch)
    if options.compared and get_objective(options.compared).uses_reference and not adapted:
        raise OptionError(
            lambda spelt: (
                f"{spelt('objective')} {options.objective} compares a model that has an adapter with the "
                f"model alone; name an adapter with {spelt('lora')}"
            ),
            code="objective-needs-adapter",
        )
