"""The options of GRPO, which have the names of TRL, and which of them exclude each other."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from llamatrain.config.options import COUNT, Condition, Option, OptionError, Options
from llamatrain.data.options import GRPO
from llamatrain.grpo.settings import LossType, Scaling

if TYPE_CHECKING:
    from llamatrain.grpo.settings import Grpo

USED = Condition(lambda values: values.get("objective") == GRPO, f"without --objective {GRPO}")
LARGEST = 1e6


@dataclass(frozen=True)
class GrpoOptions(Options, panel="Rewards"):
    """The options of answers that are generated in training, and of their loss."""

    num_generations: Annotated[
        int,
        Option(
            "Answers to each prompt, which are compared; --batch counts answers.",
            least=2,
            most=COUNT,
            when=(USED,),
        ),
    ] = 8
    num_iterations: Annotated[
        int,
        Option(
            "Steps with the same answers, before new ones are generated.", least=1, most=COUNT, when=(USED,)
        ),
    ] = 1
    max_completion_length: Annotated[
        int,
        Option(
            "Longest answer; those without an end are cut there.",
            unit="TOKENS",
            least=1,
            most=COUNT,
            when=(USED,),
        ),
    ] = 256
    temperature: Annotated[
        float,
        Option(
            "Temperature of the answers, and of the probabilities that are trained.",
            above=0,
            below=LARGEST,
            when=(USED,),
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Option(
            "Draw answers from this many of the most likely tokens; 0: from all.",
            unit="TOKENS",
            least=0,
            when=(USED,),
        ),
    ] = 0
    top_p: Annotated[
        float,
        Option(
            "Draw from the most likely tokens that have this probability in total; 1: from all.",
            above=0,
            most=1,
            when=(USED,),
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Option(
            "Leave out tokens less likely than this fraction of the most likely one.",
            least=0,
            most=1,
            when=(USED,),
        ),
    ] = 0.0
    epsilon: Annotated[
        float,
        Option("How far below 1 a ratio of probabilities counts.", least=0, most=1, when=(USED,)),
    ] = 0.2
    epsilon_high: Annotated[
        float | None,
        Option(
            "How far above 1 a ratio counts; default: as --epsilon.",
            least=0,
            most=LARGEST,
            example="0.28",
            when=(USED,),
        ),
    ] = None
    loss_type: Annotated[
        LossType,
        Option(
            "How tokens are averaged: all of a step (dapo, bnpo), those of each answer first (grpo), or by a constant "
            "length (dr_grpo).",
            when=(USED,),
        ),
    ] = "dapo"
    scale_rewards: Annotated[
        Scaling,
        Option(
            "Divide advantages by the standard deviation of a group of answers, or of all of a step.",
            when=(USED,),
        ),
    ] = "group"
    mask_truncated_completions: Annotated[bool, Option("Train no answer that has no end.", when=(USED,))] = (
        False
    )

    def settings(self, beta: float | None) -> "Grpo":
        """Return the settings of the loss."""
        from llamatrain.grpo.settings import Grpo

        return Grpo(
            num_generations=self.num_generations,
            num_iterations=self.num_iterations,
            beta=beta or 0.0,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon if self.epsilon_high is None else self.epsilon_high,
            temperature=self.temperature,
            loss_type=self.loss_type,
            scale_rewards=self.scale_rewards,
            max_completion_length=self.max_completion_length,
            mask_truncated_completions=self.mask_truncated_completions,
        )


def check_grpo(
    options: GrpoOptions, *, rewards: int, rows: int, beta: float | None, full: bool, dropout: float
) -> None:
    """Raise if GRPO lacks a reward, or if options do not fit each other; a step has some rows."""
    if not rewards:
        raise OptionError(
            lambda spelt: (
                f"{spelt('objective')} {GRPO} needs a reward; name a file or a command with {spelt('reward')}"
            ),
            code="no-reward",
        )
    if rows % options.num_generations:
        raise OptionError(
            lambda spelt: (
                f"{spelt('batch')} times {spelt('grad_acc')} must be a multiple of {spelt('num_generations')}, "
                f"{options.num_generations} (got {rows})"
            ),
            code="batch-too-small",
        )
    conflicts = {
        "full": (full and beta, "and {beta} need the original model, which full training does not keep"),
        "lora_dropout": (dropout, "changes the probabilities of answers that are computed twice"),
    }
    for name, (is_given, problem) in conflicts.items():
        if is_given:
            raise OptionError(
                lambda spelt, name=name, problem=problem: (  # type: ignore[misc]
                    f"{spelt(name)} {problem.format(beta=spelt('beta'))} with {spelt('objective')} {GRPO}; leave it out"
                ),
                code="conflicting-options",
            )
