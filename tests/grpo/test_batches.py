"""Batches of prompts: their order, their position, and how they are held out."""

from dataclasses import replace

import numpy as np
import pytest

from llamatrain.data.batches import CursorState
from llamatrain.data.options import DataOptions
from llamatrain.data.prompt_records import Prompt
from llamatrain.grpo.batches import PromptBatches, split_prompts
from llamatrain.grpo.settings import Grpo

PROMPTS = [Prompt(f"say {n}", [1, 10 + n], {"n": n}, f"line {n}") for n in range(5)]
SETTINGS = Grpo(num_generations=3, num_iterations=2)


def batches(prompts: list[Prompt] = PROMPTS, seed: int = 7) -> PromptBatches:
    return PromptBatches(prompts, SETTINGS, 64, DataOptions(), seed, padding=0)


def numbers(rows: PromptBatches, count: int) -> list[int | None]:
    return [prompt and prompt.row["n"] for prompt in rows.batch(count).prompts]


def test_each_prompt_has_its_answers_in_each_epoch() -> None:
    rows = batches()
    found = numbers(rows, 30)
    groups = np.array(found).reshape(-1, 3)
    assert (groups == groups[:, :1]).all()
    first, second = groups[:5, 0].tolist(), groups[5:, 0].tolist()
    assert sorted(first) == sorted(second) == [0, 1, 2, 3, 4] and first != second


@pytest.mark.parametrize("cut", [1, 4, 15, 22])
def test_position(cut: int) -> None:
    whole = numbers(batches(), 40)
    rows = batches()
    assert numbers(rows, cut) == whole[:cut]
    again = batches(seed=1)
    assert again.restore(rows.state)
    assert numbers(again, 40 - cut) == whole[cut:]
    skipped = batches()
    skipped.skip(cut)
    assert skipped.state == rows.state


def test_other_data_start_over() -> None:
    rows = batches()
    numbers(rows, 4)
    other = batches([replace(PROMPTS[0], row={"n": 9}), *PROMPTS[1:]])
    assert not other.restore(rows.state)
    assert other.state == CursorState(7, fingerprint=other.fingerprint)
    for crafted in (rows.state._replace(position=5), rows.state._replace(row=3)):
        assert not batches().restore(crafted)


def test_rows_end_with_an_epoch() -> None:
    rows = batches()
    rows.end = 1
    assert rows.count(1) == 30  # each answer is trained twice
    found = numbers(rows, 18)
    assert found[15:] == [None] * 3 and None not in found[:15]
    assert rows.batch(2).empty == 2


def test_one_epoch_has_each_prompt_once() -> None:
    whole = [prompt and prompt.row["n"] for batch in batches().one_epoch(2) for prompt in batch.prompts]
    assert whole == [0, 1, 2, 3, 4, None]
    parts = [[*batches().one_epoch(2, rank, 2)] for rank in range(2)]
    assert [len(part) for part in parts] == [2, 1]
    assert not any(batch.weights.any() for part in parts for batch in part)


def test_split() -> None:
    training, held_out = split_prompts(PROMPTS, 0.4, seed=3)
    assert len(held_out) == 2 and sorted(p.row["n"] for p in [*training, *held_out]) == [0, 1, 2, 3, 4]
    assert split_prompts(PROMPTS, 0.4, seed=3) == (training, held_out)
    assert len(split_prompts(PROMPTS, 0.01, seed=3)[1]) == 1
