"""Fixed answers with rewards, and what a run makes of them: its loss, and the gradients of an adapter."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llamatrain.adapters import gguf
from llamatrain.adapters.adapter import Adapter
from llamatrain.data.batches import Batch, StepTotals
from llamatrain.grpo.metrics import RolloutStats
from llamatrain.grpo.rollouts import GeneratedAnswer, make_batches
from llamatrain.grpo.settings import Grpo
from llamatrain.run.prepare import prepare, start_request
from llamatrain.run.request import request_finetune
from llamatrain.train.programs import TrainPrograms
from tests.helpers.adapter_files import adapter, linear
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small, weights

H = small(ctx=128)
CTX, GENERATIONS, LIMIT = 40, 4, 12
REWARD = "def reward(prompt, answer, row): return len(answer)\n"


def given_adapter() -> Adapter:
    return adapter(H, linear(H), seed=1)


def fixed_answers(seed: int = 0, spread: float = 0.0) -> list[GeneratedAnswer]:
    """Two groups of answers; their old log-probabilities are about those of the model, if `spread` is not 0."""
    draw = np.random.default_rng(seed)
    answers = []
    for _ in range(2):
        prompt = draw.integers(3, H.vocab, draw.integers(3, 9)).tolist()
        for number in range(GENERATIONS):
            size = LIMIT if number == 1 else int(draw.integers(1, LIMIT))
            tokens = draw.integers(3, H.vocab, size).tolist()
            answers.append(
                GeneratedAnswer(prompt, tokens, is_truncated=size == LIMIT, reward=float(draw.normal()))
            )
    return answers


@dataclass(frozen=True)
class Found:
    loss: float
    gradients: dict[str, tuple[np.ndarray, np.ndarray]]  # of a and b, by the names of the weights
    stats: RolloutStats
    log_probs: np.ndarray  # of the trained tokens


@dataclass(frozen=True)
class Step:
    """The programs of a run with GRPO, and its settings."""

    programs: TrainPrograms
    settings: Grpo
    lengths: tuple[int, ...]

    def batches(self, answers: list[GeneratedAnswer]) -> list[Batch]:
        rows = self.programs.spec.batch
        return make_batches([*answers], self.settings, rows=rows, lengths=self.lengths, padding=0)

    def log_probs(self, answers: list[GeneratedAnswer]) -> list[np.ndarray]:
        """Return the log-probabilities of each answer's trained tokens."""
        (batch,) = self.batches(answers)
        self.programs.eval_loss(batch)
        counts = np.count_nonzero(batch.weights, axis=1)
        return np.split(self.programs.log_probs(batch)[0].copy(), np.cumsum(counts)[:-1])

    def run(self, answers: list[GeneratedAnswer]) -> Found:
        batches = self.batches(answers)
        losses, stats = [], []
        for number, batch in enumerate(batches):
            losses.append(self.programs.compute_gradients(batch, StepTotals(), number))
            stats.append(self.programs.rewards(batch))
        assert self.programs.grads
        parts = self.programs.grads.parts
        pairs = {
            name: (parts[f"{name}.lora_a"].copy(), parts[f"{name}.lora_b"].copy())
            for name in given_adapter().pairs
        }
        total = stats[0]
        assert isinstance(total, RolloutStats)
        for more in stats[1:]:
            assert isinstance(more, RolloutStats)
            total = total.plus(more)
        return Found(sum(losses), pairs, total, self.programs.log_probs(batches[-1])[0].copy())


def prepare_step(folder: Path, **options: Any) -> Step:
    folder.mkdir(exist_ok=True)
    model = base(folder / "base.gguf", H, arrays=weights(H))
    gguf.write_adapter(folder / "given.gguf", given_adapter())
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "reward.py").write_text(REWARD)
    said = {
        "objective": "grpo",
        "reward": (str(folder / "reward.py"),),
        "lora_init": folder / "given.gguf",
        "num_generations": GENERATIONS,
        "max_completion_length": LIMIT,
        "ctx": CTX,
        "batch": 2 * GENERATIONS,
        "grad_acc": 2,  # so that gradients are kept
        "precision": "f32",
        "iters": 1,
    }
    request = request_finetune(str(model), (str(folder / "prompts.jsonl"),), said | options)
    asked, sources, notes = start_request(request)
    prepared = prepare(asked, sources, None, notes, request.changed)
    plan, leaves = prepared.fitted.plan, prepared.fitted.weights
    prepared.trainable.load_copies(leaves)
    programs = TrainPrograms(plan.graphs, plan.arena, leaves.frozen)
    prepared.trainable.init_weights(programs.weights.parts)
    programs.weights.push()
    settings = prepared.config.grpo_settings
    assert settings and prepared.data.prompts
    return Step(programs, settings, prepared.data.prompts.lengths)
