"""Generates the answers that GRPO trains, with the weights that are trained, and rewards them.

An answer depends on the seed, the step and its row alone. Rank 0 scores the answers of all ranks, so the number of
ranks changes nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from llamatrain.data.batches import Batch
from llamatrain.data.shuffle import mix
from llamatrain.data.tokenizer import Tokenizer
from llamatrain.distributed.comm import Comm
from llamatrain.grpo.batches import PromptBatches
from llamatrain.grpo.metrics import RolloutStats
from llamatrain.grpo.rollouts import GeneratedAnswer, Rollouts, make_batches
from llamatrain.grpo.settings import Grpo
from llamatrain.rewards.processes import Answer, RewardError, shared_reward_error
from llamatrain.rewards.scorer import Scorer
from llamatrain.sample.batch import BatchDecoder, Request, complete
from llamatrain.sample.options import SamplingOptions
from llamatrain.train.evaluate import BatchLoss, stack_units
from llamatrain.train.programs import EvalPrograms, TrainPrograms
from llamatrain.train.protocols import Signals, TrainingInterrupted
from llamatrain.train.state import RunState

if TYPE_CHECKING:
    from llamatrain.data.prompt_records import Prompt


@dataclass(kw_only=True)
class AnswerSource:
    """Generates and rewards answers to batches of prompts."""

    settings: Grpo
    sampling: SamplingOptions
    seed: int
    microbatches: int  # of a step, on all ranks
    prompts: PromptBatches  # of the training data
    tokenizer: Tokenizer
    programs: TrainPrograms
    create_decoder: Callable[[], BatchDecoder]
    scorer: Scorer
    comm: Comm
    signals: Signals

    def __post_init__(self) -> None:
        self._decoder: BatchDecoder | None = None

    def compile(self) -> None:
        """Create the decoder, which compiles its programs."""
        self._decoder = self._decoder or self.create_decoder()

    def next_batches(self, state: RunState, read: Callable[[], list[Batch]]) -> list[Batch]:
        """Return this rank's micro-batches of the next step: with new answers, or with those of the step before."""
        rollouts = state.rollouts if state.counters.step % self.settings.num_iterations else None
        rollouts = rollouts or self._roll_out(state.counters.step, read())
        state.rollouts = rollouts if self.settings.keeps_log_probs else None
        return self._own_batches(rollouts)

    def _own_batches(self, rollouts: Rollouts) -> list[Batch]:
        rows = self.programs.spec.batch
        batches = make_batches(
            rollouts, self.settings, rows=rows, lengths=self.prompts.lengths, padding=self.prompts.padding
        )
        own = self.programs.local_microbatches(self.microbatches)
        return batches[own.start : own.stop]

    def _roll_out(self, step: int, batches: Sequence[Batch]) -> Rollouts:
        """Generate and reward the answers of all ranks."""
        first = self.programs.local_microbatches(self.microbatches).start * self.programs.spec.batch
        prompts = [prompt for batch in batches for prompt in batch.prompts]
        options = [
            replace(self.sampling, seed=mix(self.seed, step, first + row) >> 33)
            for row in range(len(prompts))
        ]
        answers = [*self._generate(prompts, options)]
        gathered = self.comm.all_gather((prompts, answers))
        all_prompts = [prompt for part, _ in gathered for prompt in part]
        rollouts = self._reward(all_prompts, [answer for _, part in gathered for answer in part])
        return self._with_log_probs(rollouts) if self.settings.keeps_log_probs else rollouts

    def _generate(
        self, prompts: "Sequence[Prompt | None]", options: Sequence[SamplingOptions]
    ) -> Iterator[GeneratedAnswer | None]:
        """Yield the answer to each prompt."""
        self.compile()
        assert self._decoder
        numbers = [number for number, prompt in enumerate(prompts) if prompt]
        requests = [Request(prompt.tokens, options[n]) for n, prompt in enumerate(prompts) if prompt]
        ends = {*self.tokenizer.ends.all, *range(len(self.tokenizer), self.programs.spec.h.vocab)}
        answers = dict[int, GeneratedAnswer]()

        def ends_text(_: int, token: int) -> bool:
            check_signals(self.comm, self.signals)
            return token in ends

        for completion in complete(self._decoder, requests, stops=ends_text):
            answers[numbers[completion.index]] = GeneratedAnswer(
                requests[completion.index].tokens,
                completion.tokens,
                is_truncated=completion.stop_reason != "stop",
            )
        for number in range(len(prompts)):
            yield answers.get(number)

    # ---- rewards -----------------------------------------------------------

    def _reward(self, prompts: "list[Prompt | None]", answers: Rollouts) -> Rollouts:
        """Return the answers of all ranks with their rewards; raise RewardError on all ranks if one fails."""
        rewards, problem = list[float](), ""
        if self.comm.rank == 0:
            try:
                rewards = self._score(prompts, answers)
            except RewardError as error:
                problem = str(error)
        rewards, problem = self.comm.broadcast((rewards, problem))
        if problem:
            raise shared_reward_error(problem)
        scores = iter(rewards)
        return [replace(answer, reward=next(scores)) if answer else None for answer in answers]

    def _score(self, prompts: "Sequence[Prompt | None]", answers: Rollouts) -> list[float]:
        return self.scorer.score(
            [
                Answer(prompt.text, self._decode(answer), prompt.row, prompt.place)
                for prompt, answer in zip(prompts, answers, strict=True)
                if prompt and answer
            ]
        )

    def _decode(self, answer: GeneratedAnswer) -> str:
        """Return the text of an answer, without control tokens."""
        return self.tokenizer.decode(answer.tokens, special=False).decode("utf-8", "replace")

    def _with_log_probs(self, rollouts: Rollouts) -> Rollouts:
        """Return the answers of all ranks with the log-probabilities of their tokens."""
        own = list[list[float]]()
        for batch in self._own_batches(rollouts):
            self.programs.eval_loss(batch)
            log_probs = self.programs.log_probs(batch)[0]
            counts = np.count_nonzero(batch.weights, axis=1)
            own += [part.tolist() for part in np.split(log_probs, np.cumsum(counts)[:-1])]
        everything = [log_probs for part in self.comm.all_gather(own) for log_probs in part]
        return [
            replace(answer, log_probs=log_probs) if answer else None
            for answer, log_probs in zip(rollouts, everything, strict=True)
        ]

    # ---- validation ----------------------------------------------------------

    def evaluate(self, programs: EvalPrograms, batch: Batch) -> BatchLoss:
        """Return minus the rewards of the most likely answers to a batch of prompts as its loss."""
        greedy = replace(self.sampling, temp=0.0)
        answers = [*self._generate(batch.prompts, [greedy] * len(batch.prompts))]
        failed = self.scorer.failed
        rewards = np.array(self._score(batch.prompts, answers))
        present = [answer for answer in answers if answer]
        stats = RolloutStats(
            reward=float(rewards.sum()),
            squares=float((rewards**2).sum()),
            answers=len(present),
            answer_tokens=sum(len(answer.tokens) for answer in present),
            truncated=sum(answer.is_truncated for answer in present),
        )
        return BatchLoss(
            loss=-stats.reward,
            weight=stats.answers,
            tokens=stats.answer_tokens,
            correct=None,
            units=stack_units(-rewards, np.ones(len(rewards))),
            rollouts=stats,
            unreported=self.scorer.failed - failed if self.comm.rank else 0,
        )


def check_signals(comm: Comm, signals: Signals) -> None:
    """Raise TrainingInterrupted if a signal arrived. Several ranks exchange their signals after each step."""
    if signals.pending and comm.size == 1:
        raise TrainingInterrupted(signals.pending)
