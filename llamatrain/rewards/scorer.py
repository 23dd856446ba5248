"""Scores answers by all rewards of a run."""

import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from llamatrain.platform.terminal import log_line
from llamatrain.rewards.options import RewardOptions
from llamatrain.rewards.processes import (
    Answer,
    Failure,
    Limits,
    RewardError,
    RewardProcess,
    create_process,
    do_nothing,
)


class Scorer:
    """Computes the weighted sum of rewards. It must be closed, which ends their processes."""

    def __init__(
        self,
        options: RewardOptions,
        warn: Callable[[str], None] = log_line,
        on_wait: Callable[[], None] = do_nothing,
    ) -> None:
        """Prepare the rewards of some options.

        `warn` is called with a line about rewards that failed, and `on_wait` while a number is awaited; an error
        that it raises ends the scoring.
        """
        self.options, self.warn = options, warn
        self.failed = 0  # rewards, in total
        limits = Limits(options.reward_timeout, options.reward_memory, log_line, on_wait)
        self._processes = [create_process(source, limits) for source in options.reward]

    def start(self) -> None:
        """Import the Python files, so that a broken one is found before the first answer."""
        for process in self._processes:
            process.start()

    def score(self, answers: Sequence[Answer]) -> list[float]:
        """Return the reward of each answer. Raise RewardError if one fails, unless failures have a reward."""
        try:
            columns = [self._score_by(process, answers) for process in self._processes]
        except BaseException:
            self.close()
            raise
        return [
            math.fsum(weight * value for weight, value in zip(self.options.weights, values, strict=True))
            for values in zip(*columns, strict=True)
        ]

    def _score_by(self, process: RewardProcess, answers: Sequence[Answer]) -> list[float]:
        """Return the scores of one reward."""
        numbers, failures = list[float](), list[str]()
        for answer, number in zip(answers, process.scores(answers), strict=True):
            if isinstance(number, Failure):
                failures.append(f"{number.problem} ({describe(answer)})")
                number = self._replace_failed(process, failures[-1])
            numbers.append(number)
        self.failed += len(failures)
        if failures:
            self.warn(
                f"{process.name} failed for {len(failures)} of {len(answers)} answers, which get "
                f"{self.options.reward_failed:g}; {self.failed} so far; the first: {failures[0]}"
            )
        return numbers

    def _replace_failed(self, process: RewardProcess, problem: str) -> float:
        """Return the reward of an answer whose reward failed, or raise RewardError."""
        if self.options.reward_failed is None:
            raise RewardError(
                f"{process.name}: {problem}; correct it, or give such answers a reward with --reward-failed",
                code="reward-failed",
            )
        return self.options.reward_failed

    def close(self) -> None:
        """End all processes; `score` starts them again."""
        for process in self._processes:
            process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def describe(answer: Answer) -> str:
    """Return an answer with the place of its prompt, for a message."""
    text = answer.text if len(answer.text) <= 40 else f"{answer.text[:40]}..."
    return f"the answer {text!r}{f' to {answer.place}' if answer.place else ''}"
